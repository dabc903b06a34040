"""Operators against the fp64 oracle: outputs and gradients, eager beside fused, in ulps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jumar import ops
from jumar.opinfo import OPERATORS, Case, OpInfo, dtype_name, find
from jumar.opinfo.spec import DTYPES, compute_epsilon


@dataclass
class Row:
    """The worst of all cases for one result of one operator in one dtype.

    ``fused`` and ``eager`` are the largest errors in ulps, ``stated`` the bound of the operator; ``index``, ``got``
    and ``expected`` show fused's worst element, in the case ``case``.
    """

    op: str
    dtype: str
    result: str
    eager: float
    fused: float
    stated: float
    bound: str
    case: str = ""
    index: tuple[int, ...] = ()
    got: float = math.nan
    expected: float = math.nan
    cases: int = 0

    @property
    def ok(self) -> bool:
        """Not worse than the larger of eager's error and the stated bound; NaN and infinity never pass."""
        return self.fused <= max(self.stated, self.eager) and math.isfinite(self.fused)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "index": list(self.index), "ok": self.ok}


def _run(function: Any, case: Case, dtype: torch.dtype | None, info: OpInfo) -> dict[str, Tensor]:
    """Outputs and gradients of ``function`` on the case, widened to ``dtype`` when that is given."""
    leaves = []
    for tensor in case.tensors.values():
        leaf = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        leaves.append(leaf.requires_grad_())
    outputs = function(*leaves, **case.options)
    named = dict(zip(info.outputs, outputs, strict=True))
    grads = [g if dtype is None else g.to(dtype) for g in case.grads]
    differentiated = [named[name] for name in info.differentiable]
    for leaf, grad in zip(
        case.tensors, torch.autograd.grad(differentiated, leaves, grads), strict=True
    ):
        named[f"d {leaf}"] = grad
    return {name: tensor.detach() for name, tensor in named.items()}


def compare(info: OpInfo, dtype: torch.dtype, case: Case, *, eager: bool = True) -> list[Row]:
    """One case of one operator: a row per output and gradient. Without ``eager`` the stated bound alone counts."""
    wide = {name: tensor.detach().double() for name, tensor in case.tensors.items()}
    oracle = _run(
        lambda *tensors, **options: info.run_oracle(dtype, *tensors, **options),
        case,
        torch.float64,
        info,
    )
    grads = [g.double() for g in case.grads]
    magnitudes = info.magnitudes(dtype, wide, grads, **case.options)
    plain = _run(info.plain, case, None, info) if eager else None
    fused = _run(info.fused, case, None, info)
    rows = []
    for name, expected in oracle.items():
        bound = info.bounds[name]
        slack = None
        if bound.terms and name in magnitudes:
            slack = magnitudes[name] * (bound.terms * compute_epsilon(dtype))
        got = fused[name]
        error, index = (value.item() for value in ops.ulp_error(got, expected, slack))
        eager_error = 0.0
        if plain is not None:
            eager_error = ops.ulp_error(plain[name].to(got.dtype), expected, slack)[0].item()
        row = Row(
            info.name,
            dtype_name(dtype),
            name,
            eager_error,
            error,
            bound.ulps(dtype),
            bound.text(dtype),
            cases=1,
        )
        if index >= 0:
            row.case = case.label
            row.index = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), got.shape))
            row.got, row.expected = got[row.index].item(), expected[row.index].item()
        rows.append(row)
    return rows


def _merge(rows: list[Row]) -> Row:
    """One row for all cases of a result: a case that fails, or else fused's worst beside eager's worst."""
    failed = [row for row in rows if not row.ok]
    worst = max(failed or rows, key=lambda row: row.fused)
    eager = worst.eager if failed else max(row.eager for row in rows)
    return replace(worst, eager=eager, cases=len(rows))


def verify_operator(info: OpInfo, dtype: torch.dtype, seed: int = 0) -> list[Row]:
    """All cases of one operator in one dtype: a row per result. Every single case has to hold."""
    rows: dict[str, list[Row]] = {name: [] for name in info.bounds}
    for case in info.cases(dtype, seed):
        for row in compare(info, dtype, case):
            rows[row.result].append(row)
    return [_merge(group) for group in rows.values() if group]


def verify_operators(
    names: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    seed: int = 0,
) -> list[Row]:
    """Operators (default: all that are registered) in dtypes (default: all). ValueError for an unknown name."""
    infos = (
        [find(name) for name in names]
        if names
        else [info for info in OPERATORS.values() if info.registered]
    )
    for info in infos:
        if not info.registered:
            raise ValueError(f"operator {info.name!r} is not in the library that is loaded")
    return [
        row
        for info in infos
        for dtype in (dtypes or DTYPES)
        for row in verify_operator(info, dtype, seed)
    ]
