"""Which operators miss the speed that is asked of them (``target`` of the operator table)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from jumar.bench.runner import BenchRow, Result
from jumar.limits import Limits
from jumar.opinfo import OPERATORS, Target, parse_dtype


@dataclass
class Miss:
    """One operator and dtype below its target: ``reached`` and ``asked`` in percent or as a ratio."""

    op: str
    dtype: str
    shape: str
    what: str
    reached: float
    asked: float

    @property
    def text(self) -> str:
        """One line."""
        where = f"{self.op} {self.dtype} {self.shape}"
        if self.what in ("bytes", "flops"):
            limit = "copy bandwidth" if self.what == "bytes" else "multiply-add peak"
            return f"{where}: {self.reached:.0f} % of the {limit}, target {self.asked:.0f} %"
        return f"{where}: {self.reached:.2f}x {self.what}, target {self.asked:g}x"


def _eager(target: Target, dtype: torch.dtype, limits: Limits) -> float:
    if dtype == torch.bfloat16 and target.bf16 is not None:
        return target.bf16[1] if limits.bf16_gflops > 0 else target.bf16[0]
    return target.eager


def _miss(row: BenchRow, what: str, reached: float | None, asked: float) -> list[Miss]:
    if reached is None or math.isnan(reached) or not asked or reached >= asked:
        return []
    return [Miss(row.op, row.dtype, row.shape, what, reached, asked)]


def _last(rows: list[BenchRow]) -> list[BenchRow]:
    """Of each case the row with most in it: forward + backward, or forward where there is no gradient."""
    return list({(r.op, r.dtype, r.case or r.shape): r for r in rows if r.timings}.values())


def judged(row: BenchRow) -> bool:
    """Whether a shape is large enough for its operator's target."""
    target = OPERATORS[row.op].target
    return row.bytes >= target.bytes and row.flops >= target.flops


def below(result: Result) -> list[Miss]:
    """Every operator, dtype and large shape that misses a target, forward + backward.

    The ratio to eager of an operator that eager runs too slowly for large shapes is judged at the small one.
    """
    misses: list[Miss] = []
    rows = _last(result.rows)
    for row in rows:
        target, dtype = OPERATORS[row.op].target, parse_dtype(row.dtype)
        same = [r for r in rows if (r.op, r.dtype) == (row.op, row.dtype)]
        large = judged(row)
        if large:
            misses += _miss(row, row.limit, row.percent, target.percent)
            misses += _miss(row, "Inductor", row.ratio("inductor"), target.inductor)
        only = not any(judged(r) and "eager" in r.timings for r in same)
        if large or only:
            misses += _miss(row, "eager", row.ratio("eager"), _eager(target, dtype, result.limits))
    return misses


def judged_any(result: Result) -> bool:
    """Whether any shape was large enough to be judged."""
    return any(judged(row) for row in _last(result.rows))
