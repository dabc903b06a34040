"""What is printed at the end of a job: sites and calls by operator."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from jumar import opinfo
from jumar.convert.report import Report


def _backward(operator: str) -> tuple[str, ...]:
    # An operator of jumar may be the one that computes what the vendor's is known for.
    info = opinfo.OPERATORS.get(operator) or opinfo.OPERATORS.get(f"npu_{operator}")
    return tuple(f"{operator}_{end}" for end in ("backward", "grad", "grad_v2")) if info is None else info.backward


def rows(report: Report, calls: dict[str, int], modules: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """One row a converter: sites planned, replaced and skipped, modules, calls forward and backward.

    ``modules`` counts what was built from a plan: ``planned`` are then the places that the converter knows, ``replaced``
    those among them that were built fused. None: the report is of the model itself, and knows every module.
    """
    table = []
    for name, counts in report.counts().items():
        sites = [site for site in report.sites if site.converter == name]
        used = [site.operator for site in sites if site.status == "replaced"]
        operators = list(dict.fromkeys(used or [site.operator for site in sites]))
        either = [part for operator in operators for part in operator.split(" or ")]
        backward = {part for operator in either for part in _backward(operator)}
        built = counts["replaced"] if modules is None else modules.get(name, 0)
        table.append(
            {
                "converter": name,
                "operator": ", ".join(operators),
                "planned": counts["replaced"] + counts["skipped"],
                "replaced": counts["replaced"] if built else 0,
                "skipped": counts["skipped"],
                "modules": built,
                "calls": sum(calls.get(operator, 0) for operator in either),
                "backward_calls": sum(calls.get(operator, 0) for operator in backward),
            }
        )
    return table


def check(rows_: list[dict[str, Any]]) -> None:
    """RuntimeError for a converter whose modules are absent from what was built, or whose operator never ran."""
    for row in rows_:
        if row["planned"] > row["skipped"] and (not row["replaced"] or not row["calls"]):
            raise RuntimeError(
                f"{row['converter']}: {row['planned'] - row['skipped']} sites were planned, "
                f"{row['modules']} modules are fused, {row['operator']} ran {row['calls']} times"
            )


def table(rows_: list[dict[str, Any]]) -> Table:
    """:func:`rows` as a table for people."""
    result = Table(title="Fused operators", title_justify="left", title_style="bold", header_style="bold")
    for heading in ("converter", "operator"):
        result.add_column(heading)
    for heading in ("planned", "replaced", "skipped", "modules", "calls", "backward calls"):
        result.add_column(heading, justify="right")
    for row in rows_:
        result.add_row(*(f"{v:,}" if isinstance(v, int) else v for v in row.values()))
    return result
