"""What is printed at the end of a job: sites and calls by operator."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from jumar.convert.report import Report

# Operators that run in the backward pass, by the operator whose gradient they are.
_BACKWARD = {
    "npu_rms_norm": ("npu_rms_norm_backward",),
    "npu_rotary_mul": ("npu_rotary_mul_backward", "rotary_mul_backward"),
    "swiglu_gate_up": ("swiglu_gate_up_backward",),
    "npu_linear": ("npu_linear_backward", "linear_dgrad", "linear_wgrad", "linear_bias_grad"),
    "linear_cross_entropy": ("linear_cross_entropy_backward",),
}


def rows(report: Report, modules: dict[str, int], calls: dict[str, int]) -> list[dict[str, Any]]:
    """One row a converter: nodes planned, replaced and skipped, modules built, calls forward and backward.

    ``planned`` counts the places that the converter knows; ``replaced`` those among them that were built fused.
    """
    from jumar.titan import CONVERTERS

    table = []
    for name, counts in report.counts().items():
        operator = CONVERTERS[name].operator
        built = modules.get(name, 0) > 0
        table.append(
            {
                "converter": name,
                "operator": operator,
                "planned": counts["replaced"] + counts["skipped"],
                "replaced": counts["replaced"] if built else 0,
                "skipped": counts["skipped"],
                "modules": modules.get(name, 0),
                "calls": calls.get(operator, 0),
                "backward_calls": sum(calls.get(op, 0) for op in _BACKWARD.get(operator, ())),
            }
        )
    return table


def site_rows(report: Report, calls: dict[str, int]) -> list[dict[str, Any]]:
    """The same rows for a converted model, whose report knows every module: ``modules`` is what was replaced."""
    table = []
    for name, counts in report.counts().items():
        used = [s.operator for s in report.sites if s.converter == name and s.status == "replaced"]
        operators = list(dict.fromkeys(used or [s.operator for s in report.sites if s.converter == name]))
        table.append(
            {
                "converter": name,
                "operator": ", ".join(operators),
                "planned": counts["replaced"] + counts["skipped"],
                "replaced": counts["replaced"],
                "skipped": counts["skipped"],
                "modules": counts["replaced"],
                "calls": sum(calls.get(operator, 0) for operator in operators),
                "backward_calls": sum(calls.get(op, 0) for o in operators for op in _BACKWARD.get(o, (f"{o}_backward",))),
            }
        )
    return table


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
