"""Operators against eager and Inductor: correctness first, then interleaved times."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jumar.bench.limits import Limits, measure
from jumar.bench.shapes import pick
from jumar.bench.timing import Timing, interleave, keeps_memory
from jumar.opinfo import OPERATORS, Case, OpInfo, dtype_name, find
from jumar.verify import compare

#: Eager 16-bit matrix products slower than this are timed at the smallest shape only.
SLOW_GFLOPS = 10.0


@dataclass
class Job:
    """One operator, dtype and shape to measure."""

    info: OpInfo
    dtype: torch.dtype
    shape_name: str
    shape: dict[str, int]


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


def plan(
    names: list[str] | None,
    dtypes: list[torch.dtype] | None,
    shape: str | None,
    *,
    quick: bool = False,
) -> list[Job]:
    """The jobs for operators (None: all that are registered), dtypes (None: fp32 and bf16) and a shape (None: all).

    ``quick`` keeps the shapes ``small`` and ``odd``.  ValueError for an unknown operator or shape.
    """
    infos = [find(n) for n in names] if names else [i for i in OPERATORS.values() if i.registered]
    jobs = []
    for info in infos:
        if not info.registered:
            raise ValueError(f"operator {info.name!r} is not in the library that is loaded")
        shapes = pick(info.shapes_file, shape)
        if quick and shape is None:
            shapes = {name: sizes for name, sizes in shapes.items() if name in ("small", "odd")}
        jobs += [
            Job(info, dtype, name, sizes)
            for dtype in (dtypes or [torch.float32, torch.bfloat16])
            for name, sizes in shapes.items()
        ]
    return jobs


def _gate(job: Job, tensors: dict[str, Tensor], grads: list[Tensor]) -> tuple[float, float, str]:
    """(worst error, its stated bound, what is wrong) of the very tensors that are timed."""
    worst, stated, wrong = 0.0, math.nan, ""
    for row in compare(job.info, job.dtype, Case(job.shape_name, tensors, {}, grads), eager=False):
        if not row.ok:
            wrong = f"wrong: {row.result} is off by {row.fused:.3g} ulp at {list(row.index)}"
        if not row.fused / max(row.stated, 0.5) <= worst / (stated if stated > 0 else 1.0):
            worst, stated = row.fused, row.stated
    return worst, stated, wrong


def _contenders(job: Job, inductor: bool, eager: bool) -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {"jumar": job.info.fused}
    if eager:
        functions["eager"] = job.info.plain
    if inductor:
        torch._dynamo.reset()
        functions["inductor"] = torch.compile(job.info.plain, dynamic=False)
    return functions


def _forward(function: Callable[..., Any], tensors: dict[str, Tensor]) -> Callable[[], Any]:
    plain = [t.detach() for t in tensors.values()]

    def call() -> Any:
        with torch.no_grad():
            return function(*plain)

    return call


def _both(
    function: Callable[..., Any], tensors: dict[str, Tensor], info: OpInfo, grads: list[Tensor]
) -> Callable[[], Any]:
    leaves = [t.detach().requires_grad_(n not in info.constants) for n, t in tensors.items()]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    picked = [info.outputs.index(name) for name in info.differentiable]

    def call() -> Any:
        outputs = function(*leaves)
        return torch.autograd.grad([outputs[i] for i in picked], wanted, grads)

    return call


def _judge(row: BenchRow, job: Job, limits: Limits, index: int) -> None:
    """Fills in how much of the machine's limit the best time of jumar reaches."""
    seconds = row.timings["jumar"].minimum
    if job.info.flops is not None:
        row.limit = "flops"
        row.percent = (
            1e-7 * job.info.flops(job.shape)[index] / seconds / limits.flops_limit(job.dtype)
        )
    elif job.info.traffic is not None:
        row.limit = "bytes"
        bytes_ = job.info.traffic(job.shape, job.dtype.itemsize)[index]
        row.percent = 1e-7 * bytes_ / seconds / limits.copy_gbs


def _measure(job: Job, *, quick: bool, inductor: bool, eager: bool) -> list[BenchRow]:
    tensors = job.info.bench(job.shape, job.dtype)
    with torch.no_grad():
        outputs = dict(zip(job.info.outputs, job.info.fused(*tensors.values()), strict=True))
    generator = torch.Generator().manual_seed(2)
    grads = [
        torch.randn(outputs[name].shape, generator=generator).to(job.dtype)
        for name in job.info.differentiable
    ]
    ulp, stated, wrong = _gate(job, tensors, grads)
    common = (job.info.name, dtype_name(job.dtype), job.shape_name, job.shape)
    if wrong:
        return [BenchRow(*common, "forward + backward", ulp=ulp, stated=stated, note=wrong)]
    settings = {"rounds": 3, "budget": 0.1, "sample": 2e-4} if quick else {}
    rows = []
    for index, direction in enumerate(("forward", "forward + backward")):
        row = BenchRow(*common, direction, ulp=ulp, stated=stated)
        calls = {
            name: _both(f, tensors, job.info, grads) if index else _forward(f, tensors)
            for name, f in _contenders(job, inductor, eager).items()
        }
        if inductor:
            try:
                calls["inductor"]()
            except Exception as error:  # no C++ compiler, an operator that Inductor lacks
                row.note = f"Inductor: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
                del calls["inductor"]
        if not eager:
            row.note = f"eager runs below {SLOW_GFLOPS:g} GFLOP/s: timed at the smallest shape only"
        row.timings = interleave(calls, **settings)
        rows.append(row)
    return rows


def _is_slow(rows: list[BenchRow], job: Job) -> bool:
    timing = rows[0].timings.get("eager")
    if job.info.flops is None or timing is None or job.dtype.itemsize != 2:
        return False
    return job.info.flops(job.shape)[0] / timing.minimum < SLOW_GFLOPS * 1e9


def run(
    jobs: list[Job],
    *,
    quick: bool = False,
    inductor: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """Measures the limits of the machine and every job, whose results are checked before they are timed.

    Limits are measured before, after and (unless ``quick``) beside every job, and the best counts: another process may
    have disturbed some of them.
    """
    progress("limits of this machine")
    limits = measure(quick)
    rows: list[BenchRow] = []
    done: list[tuple[BenchRow, Job, int]] = []
    slow: set[tuple[str, torch.dtype]] = set()
    for job in jobs:
        key = (job.info.name, job.dtype)
        if not quick:
            bytes_bound = job.info.flops is None
            limits = limits.better(measure(copy=bytes_bound, flops=not bytes_bound))
        progress(f"{job.info.name} {dtype_name(job.dtype)} {job.shape_name}")
        measured = _measure(
            job, quick=quick, inductor=inductor and key not in slow, eager=key not in slow
        )
        if _is_slow(measured, job):
            slow.add(key)
        rows += measured
        done += [(row, job, index) for index, row in enumerate(measured) if row.timings]
    limits = limits.better(measure(quick))
    for row, job, index in done:
        _judge(row, job, limits, index)
    return Result(limits, rows)
