"""``jumar bench``: operators and training steps against eager and Inductor, beside the machine's own limits."""

from __future__ import annotations

from jumar.bench.cases import LAYOUTS, Job, layouts_of, parse_case, plan
from jumar.bench.checks import MODES, Check, check
from jumar.bench.report import draw, limits_text, show, to_dict, write_csv
from jumar.bench.runner import BenchRow, Result, run
from jumar.bench.shapes import pick, quick_shapes, read_shapes
from jumar.bench.targets import Miss, below
from jumar.bench.timing import Timing, interleave
from jumar.limits import Limits, measure

__all__ = [
    "LAYOUTS",
    "MODES",
    "BenchRow",
    "Check",
    "Job",
    "Limits",
    "Miss",
    "Result",
    "Timing",
    "below",
    "check",
    "draw",
    "interleave",
    "layouts_of",
    "limits_text",
    "measure",
    "parse_case",
    "pick",
    "plan",
    "quick_shapes",
    "read_shapes",
    "run",
    "show",
    "to_dict",
    "write_csv",
]
