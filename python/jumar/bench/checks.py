"""The modes of ``jumar bench`` that time nothing, over the same cases: correctness, gradient, support."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from jumar.bench.cases import LAYOUTS, Job
from jumar.bench.runner import gate
from jumar.opinfo import DTYPES, dtype_name, flat

MODES = ("speed", "correctness", "gradient", "support")


@dataclass
class Check:
    """What one case came to. ``detail``: the worst error in ulps beside its bound, or what is wrong."""

    op: str
    dtype: str
    shape: str
    layout: str
    case: str
    status: str  # ok, wrong, no (not supported), none (nothing to check)
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status != "wrong"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _check(job: Job, status: str, detail: str = "") -> Check:
    name = dtype_name(job.dtype)
    return Check(job.info.name, name, job.shape_name, job.layout, job.text, status, detail)


def correctness(job: Job) -> Check:
    """Outputs and gradients of the case against the fp64 oracle; the stated bounds hold."""
    try:
        tensors = job.tensors()
        worst, stated, wrong = gate(job, tensors, job.grads(tensors))
    except Exception as error:
        return _check(job, "wrong", _first_line(error))
    if wrong:
        return _check(job, "wrong", wrong.removeprefix("wrong: "))
    return _check(job, "ok", f"{worst:.3f} ulp, stated {stated:g}")


def gradient(job: Job) -> Check:
    """The gradient operators against finite differences of the forward operator, in fp64, along random directions.

    This is ``torch.autograd.gradcheck`` in its fast mode: it needs no oracle, so a formula that is wrong in the same way
    in operator and oracle shows here.
    """
    info = job.info
    if not info.differentiable:
        return _check(job, "none", "has no gradient")
    leaves = info.arguments(job.tensors(), grads=True)
    named = [(name, tensor) for name, value in leaves.items() for tensor in flat(value)]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        stream = iter(tensors)
        values = [
            [next(stream) for _ in value] if isinstance(value, list) else next(stream)
            for value in leaves.values()
        ]
        # An infinite result (a slot that holds nothing) has no differences.
        return tuple(t.masked_fill(t.isinf(), 0) for t in info.carrying(info.fused(*values)))

    try:
        torch.manual_seed(0)  # of the directions
        torch.autograd.gradcheck(
            function, [t for _, t in named], fast_mode=True, check_undefined_grad=False
        )
    except Exception as error:
        return _check(job, "wrong", _first_line(error))
    inputs = [name for name, value in leaves.items() if info.wants_gradient(name, value)]
    return _check(job, "ok", ", ".join(f"d {name}" for name in inputs))


def support(job: Job) -> Check:
    """Whether the operator and its gradient run in this dtype and layout; what it states to take has to run."""
    info, stated = job.info, job.dtype in job.info.dtypes
    try:
        tensors = job.tensors()
        grads = job.grads(tensors)
        leaves = info.arguments(tensors, grads=True)
        results = info.carrying(info.fused(*leaves.values()))
        if info.differentiable:
            wanted = [t for value in leaves.values() for t in flat(value) if t.requires_grad]
            torch.autograd.grad(results, wanted, grads)
    except Exception as error:
        return _check(job, "wrong" if stated else "no", _first_line(error))
    return _check(job, "ok", "" if info.differentiable else "no gradient")


_RUN: dict[str, Callable[[Job], Check]] = {
    "correctness": correctness,
    "gradient": gradient,
    "support": support,
}


def check(
    jobs: list[Job], mode: str, progress: Callable[[str], None] = lambda text: None
) -> list[Check]:
    """Runs every case in one of the modes, without stopping at what is wrong."""
    done = []
    for job in jobs:
        progress(f"{mode} {job.text}")
        done.append(_RUN[mode](job))
    return done


def defaults(mode: str, quick: bool) -> tuple[list[torch.dtype] | None, str | None, tuple[str, ...]]:
    """(dtypes, shapes, layouts) of a mode where nothing else is asked for."""
    if mode == "correctness":
        return list(DTYPES), "small,odd" if quick else None, LAYOUTS
    if mode == "gradient":
        return [torch.float64], "small" if quick else "small,odd", LAYOUTS[:3]
    if mode == "support":
        return list(DTYPES), "small", LAYOUTS
    return None, None, ("contiguous",)


def again(row: Check, mode: str) -> str:
    """The command that runs one case again."""
    return f"jumar bench --mode {mode} --case {shlex.quote(row.case)}"


def show(rows: list[Check], mode: str, console: Console) -> None:
    """A table: operator and dtype down, layouts or shapes across; below it what is wrong, with the command to repeat it."""
    if mode == "support":
        _show_support(rows, console)
    else:
        _show_cases(rows, console)
    failed = [row for row in rows if not row.ok]
    for row in failed:
        console.print(f"{row.case}: {escape(row.detail)}", style="bold red", soft_wrap=True)
        console.print(f"    {again(row, mode)}", soft_wrap=True)
    counted = [row for row in rows if row.status != "none"]
    console.print(f"{len(counted) - len(failed)} of {len(counted)} cases hold")


def _show_cases(rows: list[Check], console: Console) -> None:
    table = Table(header_style="bold")
    for heading in ("operator", "dtype", "shape", "layout", "", "worst, or what was compared"):
        table.add_column(heading, no_wrap=heading != "worst, or what was compared")
    previous: tuple[str, ...] = ()
    for row in rows:
        key = (row.op, row.dtype, row.shape)
        if previous and key[0] != previous[0]:
            table.add_section()
        shown = [part if key[: i + 1] != previous[: i + 1] else "" for i, part in enumerate(key)]
        previous = key
        status = {"ok": "[green]ok[/green]", "wrong": "[bold red]WRONG[/bold red]"}
        table.add_row(*shown, row.layout, status.get(row.status, "-"), escape(row.detail))
    console.print(table)


def _show_support(rows: list[Check], console: Console) -> None:
    layouts = [layout for layout in LAYOUTS if any(row.layout == layout for row in rows)]
    table = Table("operator", "dtype", *layouts, header_style="bold")
    cells = {(row.op, row.dtype, row.layout): row for row in rows}
    previous = ""
    for op, dtype in dict.fromkeys((row.op, row.dtype) for row in rows):
        if previous and op != previous:
            table.add_section()
        marks = [_mark(cells.get((op, dtype, layout))) for layout in layouts]
        table.add_row(op if op != previous else "", dtype, *marks)
        previous = op
    console.print(table)
    console.print("yes: forward and gradient; forward: has no gradient; no: is refused")


def _mark(row: Check | None) -> str:
    if row is None:
        return "-"
    if row.status == "ok":
        return "forward" if row.detail else "yes"
    return "no" if row.status == "no" else "[bold red]FAILS[/bold red]"

