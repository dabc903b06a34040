"""Operators against eager and Inductor: correctness first, then interleaved times."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jumar.bench.cases import Job
from jumar.bench.timing import Timing, interleave, keeps_memory
from jumar.limits import Limits, measure
from jumar.opinfo import Case, OpInfo, Value, dtype_name, flat
from jumar.opinfo.costs import of_operator
from jumar.verify import compare

#: Eager 16-bit matrix products slower than this are timed at the smallest shape only.
SLOW_GFLOPS = 10.0
#: Elements of a shape from which on memory, not the cache, is what tensors stream from.
_LARGE = 1 << 22
_QUICK = {"rounds": 7, "budget": 0.6, "sample": 5e-4}


@dataclass
class BenchRow:
    """Times of one job, forward or forward + backward; ``ulp`` is the worst error beside what is stated."""

    op: str
    dtype: str
    shape: str
    sizes: dict[str, int]
    direction: str
    timings: dict[str, Timing] = field(default_factory=dict)
    limit: str = ""
    percent: float = math.nan
    ulp: float = math.nan
    stated: float = math.nan
    note: str = ""
    case: str = ""
    bytes: float = 0.0
    flops: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.note.startswith("wrong")

    def ratio(self, other: str, of: str = "minimum") -> float | None:
        """How many times longer ``other`` takes than jumar."""
        if other not in self.timings or "jumar" not in self.timings:
            return None
        return getattr(self.timings[other], of) / getattr(self.timings["jumar"], of)


@dataclass
class Result:
    """``keeps_memory``: results were written to memory that had been used before, not to fresh pages."""

    limits: Limits
    rows: list[BenchRow]
    keeps_memory: bool = field(default_factory=keeps_memory)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


def gate(job: Job, tensors: dict[str, Value], grads: list[Tensor]) -> tuple[float, float, str]:
    """(worst error, its stated bound, what is wrong) of these very tensors; the bound alone counts, not eager."""
    worst, stated, wrong = 0.0, math.nan, ""
    for row in compare(job.info, job.dtype, Case(job.text, tensors, {}, grads), eager=False):
        if not row.ok:
            wrong = (
                f"wrong: {row.result} is off by {row.fused:.3g} ulp (stated: {row.bound}) at "
                f"{list(row.index)}: {row.got:.8g} for {row.expected:.8g}"
            )
        share = row.fused / max(row.stated, 0.5)
        if math.isnan(stated) or not share <= worst / (stated if stated > 0 else 1.0):
            worst, stated = row.fused, row.stated
    return worst, stated, wrong


def _contenders(job: Job, inductor: bool, eager: bool) -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {"jumar": job.info.fused}
    plain = job.info.eager or job.info.plain
    if eager:
        functions["eager"] = plain
    if inductor:
        torch._dynamo.reset()
        functions["inductor"] = torch.compile(plain, dynamic=False)
    return functions


def _forward(
    function: Callable[..., Any], tensors: dict[str, Value], info: OpInfo
) -> Callable[[], Any]:
    values = list(info.arguments(tensors).values())

    def call() -> Any:
        with torch.no_grad():
            return function(*values)

    return call


def _both(
    function: Callable[..., Any], tensors: dict[str, Value], info: OpInfo, grads: list[Tensor]
) -> Callable[[], Any]:
    leaves = info.arguments(tensors, grads=True)
    for name in info.constants:
        leaves[name] = tensors[name]
    values = list(leaves.values())
    wanted = [leaf for value in values for leaf in flat(value) if leaf.requires_grad]

    def call() -> Any:
        return torch.autograd.grad(info.carrying(function(*values)), wanted, grads)

    return call


def _judge(row: BenchRow, job: Job, limits: Limits) -> None:
    """Fills in how much of the machine's limit the best time of jumar reaches: the larger of both least times."""
    seconds = row.timings["jumar"].minimum
    least = {
        "bytes": 1e-9 * row.bytes / limits.copy_gbs,
        "flops": 1e-9 * row.flops / limits.flops_limit(job.dtype),
    }
    row.limit = max(least, key=lambda name: least[name])
    if least[row.limit] > 0:
        row.percent = 100 * least[row.limit] / seconds
    else:
        row.limit = ""


def _measure(job: Job, *, quick: bool, inductor: bool, eager: bool) -> list[BenchRow]:
    tensors = job.tensors()
    grads = job.grads(tensors)
    ulp, stated, wrong = gate(job, tensors, grads)
    directions = ["forward", "forward + backward"] if job.info.differentiable else ["forward"]
    common = (job.info.name, dtype_name(job.dtype), job.shape_name, job.shape)
    if wrong:
        return [BenchRow(*common, directions[-1], ulp=ulp, stated=stated, note=wrong, case=job.text)]
    rows, work = [], of_operator(job.info, tensors)
    for index, direction in enumerate(directions):
        if quick and direction != directions[-1]:
            continue  # one compilation a case
        row = BenchRow(*common, direction, ulp=ulp, stated=stated, case=job.text)
        row.bytes, row.flops = work[index].bytes or 0.0, work[index].flops or 0.0
        calls = {
            name: _both(f, tensors, job.info, grads) if index else _forward(f, tensors, job.info)
            for name, f in _contenders(job, inductor, eager).items()
        }
        if inductor:
            try:
                calls["inductor"]()
            except Exception as error:  # no C++ compiler, an operator that Inductor lacks
                text = (str(error).splitlines() or [""])[0][:80]
                row.note = f"Inductor: {type(error).__name__}: {text}"
                del calls["inductor"]
        if not eager:
            row.note = f"eager runs below {SLOW_GFLOPS:g} GFLOP/s: timed at the smallest shape only"
        row.timings = interleave(calls, **(_QUICK if quick else {}))
        rows.append(row)
    return rows


def _is_slow(rows: list[BenchRow], job: Job) -> bool:
    timing = rows[0].timings.get("eager")
    if timing is None or job.dtype.itemsize != 2 or not rows[0].flops:
        return False
    return rows[0].flops / timing.minimum < SLOW_GFLOPS * 1e9


def run(
    jobs: list[Job],
    *,
    quick: bool = False,
    inductor: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """Measures the limits of the machine and every job, whose results are checked before they are timed.

    Limits are measured before, after and beside the jobs (``quick``: beside every eighth), and the best counts: another
    process may have disturbed some of them.
    """
    progress("limits of this machine")
    large = any(math.prod(job.shape.values()) >= _LARGE for job in jobs)
    megabytes = 256 if large else 64
    limits = measure(quick, megabytes=megabytes)
    rows: list[BenchRow] = []
    done: list[tuple[BenchRow, Job]] = []
    slow: set[tuple[str, torch.dtype]] = set()
    for number, job in enumerate(jobs):
        key = (job.info.name, job.dtype)
        if not quick or number % 8 == 7:
            streams = not job.info.multiplies
            limits = limits.better(
                measure(quick, copy=streams or quick, flops=not streams or quick, megabytes=megabytes)
            )
        progress(f"{number + 1}/{len(jobs)} {job.text}")
        measured = _measure(
            job, quick=quick, inductor=inductor and key not in slow, eager=key not in slow
        )
        if limits.bf16_gflops == 0 and _is_slow(measured, job):
            slow.add(key)
        rows += measured
        done += [(row, job) for row in measured if row.timings]
    limits = limits.better(measure(quick, megabytes=megabytes))
    for row, job in done:
        _judge(row, job, limits)
    return Result(limits, rows)
