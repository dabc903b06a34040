"""Operators against the fp64 oracle: outputs and gradients, eager beside fused, in ulps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jumar import ops
from jumar.opinfo import OPERATORS, Case, OpInfo, dtype_name, find
from jumar.opinfo.spec import compute_epsilon, flat


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


def _run(
    function: Any, case: Case, dtype: torch.dtype | None, info: OpInfo
) -> dict[str, list[Tensor]]:
    """Outputs and gradients of ``function`` on the case, widened to ``dtype`` when that is given.

    A result that the operator leaves out (None) has no tensors.
    """
    leaves = info.arguments(case.tensors, dtype, grads=True)
    outputs = function(*leaves.values(), **case.options)
    named = {name: flat(value) for name, value in zip(info.outputs, outputs, strict=True)}
    wanted = [(n, t) for n, v in leaves.items() for t in flat(v) if info.wants_gradient(n, v)]
    if wanted:
        grads = [g if dtype is None else g.to(dtype) for g in case.grads]
        results = torch.autograd.grad(info.carrying(outputs), [t for _, t in wanted], grads)
        for (leaf, _), grad in zip(wanted, results, strict=True):
            named.setdefault(f"d {leaf}", []).append(grad)
    return {name: [t.detach() for t in tensors] for name, tensors in named.items()}


def compare(info: OpInfo, dtype: torch.dtype, case: Case, *, eager: bool = True) -> list[Row]:
    """One case of one operator: a row per output and gradient. Without ``eager`` the stated bound alone counts."""
    wide = info.arguments(case.tensors, torch.float64)
    oracle = _run(partial(info.run_oracle, dtype), case, torch.float64, info)
    grads = [g.double() for g in case.grads]
    magnitudes = info.magnitudes(dtype, wide, grads, **case.options)
    plain = _run(info.plain, case, None, info) if eager else None
    fused = _run(info.fused, case, None, info)
    rows = []
    for name, expected in oracle.items():
        bound = info.bounds[name]
        slacks: list[Tensor | None] = [None] * len(expected)
        if bound.terms and name in magnitudes:
            slacks = [m * (bound.terms * compute_epsilon(dtype)) for m in flat(magnitudes[name])]
        others = plain[name] if plain is not None else [None] * len(expected)
        for got, right, slack, other in zip(fused[name], expected, slacks, others, strict=True):
            error, index = (value.item() for value in ops.ulp_error(got, right, slack))
            eager_error = 0.0
            if other is not None:
                eager_error = ops.ulp_error(other.to(got.dtype), right, slack)[0].item()
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
                position = torch.unravel_index(torch.tensor(index), got.shape)
                row.case, row.index = case.label, tuple(int(i) for i in position)
                row.got, row.expected = got[row.index].item(), right[row.index].item()
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
        for dtype in (dtypes or info.dtypes)
        for row in verify_operator(info, dtype, seed)
    ]
