"""``jumar bench``: operators against eager and Inductor, interleaved, beside the machine's own limits."""

from __future__ import annotations

from jumar.bench.limits import Limits, measure
from jumar.bench.report import draw, limits_text, show, to_dict, write_csv
from jumar.bench.runner import BenchRow, Job, Result, plan, run
from jumar.bench.shapes import pick, read_shapes
from jumar.bench.timing import Timing, interleave

__all__ = [
    "BenchRow",
    "Job",
    "Limits",
    "Result",
    "Timing",
    "draw",
    "interleave",
    "limits_text",
    "measure",
    "pick",
    "plan",
    "read_shapes",
    "run",
    "show",
    "to_dict",
    "write_csv",
]
