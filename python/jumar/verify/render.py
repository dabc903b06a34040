"""The results of ``jumar verify`` as tables and as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jumar.verify.models import FACTOR, FLOOR, MEAN_FACTOR, ModelRow
from jumar.verify.operators import Row


def _ulps(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.2f}" if value < 1000 else f"{value:.3g}"


def _element(row: Row | ModelRow) -> str:
    """``[3, 17]: 0.40625 for 0.40577`` - where fused is worst, what it gave, and what is right."""
    if math.isnan(row.expected) and math.isnan(row.got):
        return ""
    where = ", ".join(str(i) for i in row.index)
    return f"[{where}]: {row.got:.8g} for {row.expected:.8g}"


def _status(ok: bool) -> str:
    return "[green]ok[/green]" if ok else "[bold red]WORSE[/bold red]"


def _operator_table(rows: Sequence[Row]) -> Table:
    table = Table(header_style="bold", title_justify="left")
    for heading in ("operator", "dtype", "result"):
        table.add_column(heading, no_wrap=True)
    for heading in ("eager", "fused"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("stated", "", "worst element of fused"):
        table.add_column(heading)
    previous = None
    for row in rows:
        if previous is not None and (row.op, row.dtype) != previous:
            table.add_section()
        first = (row.op, row.dtype) != previous
        previous = (row.op, row.dtype)
        element = _element(row)
        where = f"{element.replace('[', chr(92) + '[')} ({row.case})" if element else ""
        table.add_row(
            row.op if first else "",
            row.dtype if first else "",
            row.result,
            _ulps(row.eager),
            _ulps(row.fused),
            row.bound,
            _status(row.ok),
            where,
        )
    return table


def _model_table(rows: Sequence[ModelRow]) -> Table:
    table = Table(header_style="bold")
    table.add_column("dtype", no_wrap=True)
    table.add_column("tensor", overflow="fold")
    for heading in ("eager", "fused"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("worst element of fused")
    for row in rows:
        element = _element(row).replace("[", "\\[")
        table.add_row(
            row.dtype, row.result, _ulps(row.eager), _ulps(row.fused), _status(row.ok), element
        )
    return table


def summary(rows: Sequence[Row | ModelRow]) -> str:
    """One line: how many results hold, and what was asked of them."""
    bad = sum(not row.ok for row in rows)
    if rows and isinstance(rows[0], ModelRow):
        rule = (
            f"fused within {FACTOR:g} x eager's error + {FLOOR:g} ulp at the scale of each tensor, "
            f"{MEAN_FACTOR:g} x over all"
        )
    else:
        rule = "fused within the larger of eager's error and the stated bound"
    return f"{len(rows) - bad} of {len(rows)} results hold ({rule})"


def show(rows: Sequence[Row | ModelRow], console: Console) -> None:
    """Prints the table and the summary."""
    if rows:
        is_model = isinstance(rows[0], ModelRow)
        console.print(_model_table(rows) if is_model else _operator_table(rows))
    console.print(summary(rows))


def to_dict(rows: Sequence[Row | ModelRow]) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "ok": all(row.ok for row in rows),
        "unit": "ulp",
        "results": [row.to_dict() for row in rows],
    }
