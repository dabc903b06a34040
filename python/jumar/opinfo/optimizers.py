"""The entries of the optimizer: one AdamW step of one parameter, and of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jumar.opinfo.cases import Source, layouts, shape_text
from jumar.opinfo.spec import STREAMS, Bound, Case, OpInfo, Shape

LR, BETA1, BETA2, EPS, DECAY, STEP = 1e-2, 0.9, 0.95, 1e-8, 0.1, 10
_CORRECTION1, _CORRECTION2 = 1 - BETA1**STEP, 1 - BETA2**STEP

# Computed in fp64 and rounded once. fp64 itself loses where terms cancel.
_ROUNDED = Bound(half=0.52, single=0.51, double=2.0, terms=4.0)


def _formula(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m = torch.lerp(m, g, 1 - BETA1)
    v = (v * BETA2).addcmul(g, g, value=1 - BETA2)
    denominator = (v.sqrt() / math.sqrt(_CORRECTION2)).add(EPS)
    return (p * (1 - LR * DECAY)).addcdiv(m, denominator, value=-LR / _CORRECTION1), m, v


def _foreach(params: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor]) -> None:
    """torch.optim.AdamW(foreach=True), in place."""
    torch._foreach_mul_(params, 1 - LR * DECAY)
    torch._foreach_lerp_(first, grads, 1 - BETA1)
    torch._foreach_mul_(second, BETA2)
    torch._foreach_addcmul_(second, grads, grads, 1 - BETA2)
    denominators = torch._foreach_sqrt(second)
    torch._foreach_div_(denominators, math.sqrt(_CORRECTION2))
    torch._foreach_add_(denominators, EPS)
    torch._foreach_addcdiv_(params, first, denominators, -LR / _CORRECTION1)


def _sizes(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Magnitudes of the terms, fp64."""
    v = (v * BETA2).addcmul(g, g, value=1 - BETA2)
    first = m.abs() + g.abs()
    update = LR / _CORRECTION1 * first / ((v / _CORRECTION2).sqrt() + EPS)
    return p.abs() + update, first, v


def _each(formula: Any, *lists: list[Tensor]) -> tuple[list[Tensor], ...]:
    """``formula`` of the tensors at each place."""
    return tuple(map(list, zip(*(formula(*four) for four in zip(*lists, strict=True)), strict=True)))


def _entry(outputs: tuple[str, ...], sizes: Any, **own: Any) -> OpInfo:
    """Writes what it returns: 7 passes, as parameter and moments are read and written, the gradient is read."""

    def terms(t: dict[str, Any], grads: list[Tensor], dtype: torch.dtype) -> dict[str, Any]:
        return dict(zip(outputs, sizes(*t.values()), strict=True)) if dtype == torch.float64 else {}

    return OpInfo(
        outputs=outputs,
        bounds=dict.fromkeys(outputs, _ROUNDED),
        terms=terms,
        mutates=outputs,
        target=STREAMS,
        **own,
    )


# ---- one parameter


def _one_call(var: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.jumar.npu_apply_adam_w(
        BETA1 ** (STEP - 1), BETA2 ** (STEP - 1), LR, DECAY, BETA1, BETA2, EPS, grad, None, None, None, out=[var, m, v]
    )  # fmt: skip


def _one_eager(*four: Tensor) -> None:
    _foreach(*([t] for t in four))


def _state(source: Source, *shape: int) -> dict[str, Tensor]:
    return {
        "var": source.normal(*shape),
        "grad": source.rows(*shape, scale=0.1) if len(shape) > 1 else source.normal(*shape),
        "m": source.normal(*shape, scale=0.1),
        "v": source.normal(*shape, scale=0.1).square(),
    }


def _one_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for shape in ((0, 8), (1, 1), (5, 7), (2, 3, 33), (37, 257)):
        tensors = _state(Source(dtype, seed + sum(shape)), *shape)
        yield (case := Case(shape_text(shape), tensors))
    yield from layouts(case, ("grad",))


def _one_bench(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    return _state(Source(dtype, 1), shape["rows"], shape["cols"])


# ---- all parameters


def _all_call(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor]
) -> tuple[list[Tensor], ...]:
    steps = list(torch.full((len(params),), STEP - 1.0).unbind())
    numbers = [[LR], [BETA1], [BETA2], [EPS], [DECAY]]
    torch.ops.jumar.adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], [], steps, [len(params)], *numbers, [0]
    )
    return params, exp_avgs, exp_avg_sqs


def _lists(source: Source, shapes: list[tuple[int, ...]]) -> dict[str, list[Tensor]]:
    states = [_state(source, *shape) for shape in shapes]
    names = {"params": "var", "grads": "grad", "exp_avgs": "m", "exp_avg_sqs": "v"}
    return {name: [state[key] for state in states] for name, key in names.items()}


def _all_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for shapes in (
        [(3, 5)],
        [(7,), (0,), (1, 1)],
        [(9, 33), (4,)],
        [(2, 3, 33), (17, 5), (257,)],
        [(37, 257), (3,), (130, 65)],
    ):
        tensors = _lists(Source(dtype, seed + len(shapes)), shapes)
        yield (case := Case(" and ".join(map(shape_text, shapes)), tensors))
    yield from layouts(case, ("grads",))


def _all_bench(shape: Shape, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    return _lists(Source(dtype, 1), [(shape["rows"], shape["cols"])] * shape["tensors"])


ENTRIES = (
    _entry(
        ("var", "m", "v"),
        _sizes,
        name="npu_apply_adam_w",
        formula="m, v: averages of g and g²,  var = var · (1 - lr·λ) - lr · m̂ / (√v̂ + ε)",
        shapes="grad, out = (var, m, v): one shape, in place",
        plain=_formula,
        cases=_one_cases,
        bench=_one_bench,
        call=_one_call,
        eager=_one_eager,
    ),
    _entry(
        ("params", "exp_avgs", "exp_avg_sqs"),
        partial(_each, _sizes),
        name="adamw_",
        formula="npu_apply_adam_w for lists of tensors: the step of jumar.optim.AdamW",
        shapes="params, grads, exp_avgs, exp_avg_sqs: lists of tensors, in place",
        doc="docs/optim.md",
        plain=partial(_each, _formula),
        cases=_all_cases,
        bench=_all_bench,
        call=_all_call,
        eager=_foreach,
    ),
)
