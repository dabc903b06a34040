"""The operator table for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jumar.limits import Limits
from jumar.profile.table import SORTS, OperatorRow, OperatorTable
from jumar.spelling import unknown

KINDS = ("fused", "torch", "autograd")

_NUMBERS = ("calls", "self ms", "share", "total ms", "min us", "avg us", "max us", "MB", "GFLOP", "GB/s", "GFLOP/s", "of limit")


def check(name: str, what: str, known: tuple[str, ...]) -> str:
    """``name``. ValueError, with the nearest one, when it is not in ``known``."""
    if name not in known:
        raise ValueError(unknown(what, name, known))
    return name


def _optional(value: float | None, scale: float, digits: int) -> str:
    return "" if value is None else f"{value * scale:,.{digits}f}"


def cells(row: OperatorRow) -> list[str]:
    """The numbers of a row as text, in the order of the headings."""
    return [
        f"{row.calls:,}",
        f"{row.self_us / 1e3:,.3f}",
        f"{row.share:.1f} %",
        f"{row.total_us / 1e3:,.3f}",
        *(f"{value:,.1f}" for value in (row.min_us, row.avg_us, row.max_us)),
        _optional(row.bytes, 1e-6, 2),
        _optional(row.flops, 1e-9, 3),
        _optional(row.gb_per_s, 1, 2),
        _optional(row.gflop_per_s, 1, 1),
        "" if row.percent is None else f"{row.percent:.0f} % {row.bound}",
    ]


def headings(shapes: bool) -> tuple[str, ...]:
    """Of the table's columns; what precedes the numbers is text."""
    return ("operator", "kind", *(("shapes",) if shapes else ()), *_NUMBERS)


def summary(found: OperatorTable) -> list[str]:
    """Lines about the trace: its steps, and the limits that percentages refer to."""
    steps = f"{found.steps} training step{'s' if found.steps != 1 else ''}, " if found.steps else ""
    fused = sum(row.share for row in found.rows if row.kind == "fused")
    lines = [f"{steps}{found.wall_us / 1e3:,.1f} ms; {fused:.0f} % of it in fused operators"]
    limits = found.limits
    if limits is None:
        lines.append("the trace does not say what its machine can do, so there is no percent of the limit")
    else:
        lines.append(f"limits {Limits(**limits).text}")
    return lines


def show(found: OperatorTable, console: Console, *, top: int, shapes: bool, sort: str) -> None:
    """Prints the first ``top`` rows (0: all)."""
    rows = found.rows[:top] if top else found.rows
    for line in summary(found):
        console.print(line, soft_wrap=True)
    result = Table(header_style="bold")
    texts = len(headings(shapes)) - len(_NUMBERS)
    for index, heading in enumerate(headings(shapes)):
        result.add_column(heading, justify="left" if index < texts else "right", overflow="fold")
    for row in rows:
        names = [row.operator, row.kind, *([row.shapes] if shapes else [])]
        result.add_row(*(escape(name) for name in names), *cells(row))
    console.print(result)
    left = len(found.rows) - len(rows)
    more = f"; {left} more rows (--top 0 shows all)" if left > 0 else ""
    console.print(f"sorted by {SORTS[sort][1]}{more}")
