"""Calls of a trace added up by operator: times, bytes, FLOPs, and how near they come to the machine's limit."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from jumar.limits import Limits
from jumar.opinfo.costs import Cost, cost
from jumar.profile.trace import Call, Trace


@dataclass
class OperatorRow:
    """One operator, or one operator on one set of shapes; times in microseconds.

    Attributes:
        kind: fused, torch or autograd, see :attr:`jumar.profile.trace.Call.kind`.
        shapes: where rows are by shape.
        self_us: without, total_us: with the operators that it calls. A call within one of the same operator is part of
            that one: it adds to self_us alone.
        share: percent of the time of the steps that is self_us.
        min_us, avg_us, max_us: of a call, with what it calls.
        bytes, flops: of all calls; None where any call's is unknown, flops also where memory is all that counts.
        gb_per_s, gflop_per_s: these by the time of the calls that do the work: all but those that only call the operator
            again, on the part of a distributed tensor that is here.
        percent: of the limit: the least time that the machine needs for these bytes and FLOPs, by the same time.
        bound: ``bytes`` or ``flops``, which of both sets that least time.
    """

    operator: str
    kind: str
    shapes: str
    calls: int = 0
    self_us: float = 0.0
    total_us: float = 0.0
    share: float = 0.0
    min_us: float = 0.0
    avg_us: float = 0.0
    max_us: float = 0.0
    bytes: float | None = None
    flops: float | None = None
    gb_per_s: float | None = None
    gflop_per_s: float | None = None
    percent: float | None = None
    bound: str = ""


#: What rows can be sorted by -> (key, what it is).
SORTS: dict[str, tuple[Callable[[OperatorRow], Any], str]] = {
    "self": (lambda r: r.self_us, "own time"),
    "total": (lambda r: r.total_us, "time with everything that is called"),
    "calls": (lambda r: r.calls, "calls"),
    "avg": (lambda r: r.avg_us, "average time of a call"),
    "max": (lambda r: r.max_us, "longest call"),
    "bytes": (lambda r: r.bytes or 0.0, "bytes"),
    "flops": (lambda r: r.flops or 0.0, "FLOPs"),
    "percent": (lambda r: -1.0 if r.percent is None else r.percent, "percent of the limit"),
    "name": (lambda r: r.operator, "name"),
}

COLUMNS = tuple(OperatorRow.__dataclass_fields__)


@dataclass
class OperatorTable:
    """:func:`table` of a trace. ``steps``: training steps in it; ``wall_us``: their time; ``limits``: of the machine."""

    trace: str
    steps: int
    wall_us: float
    limits: dict[str, Any] | None
    rows: list[OperatorRow] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "trace": self.trace,
            "steps": self.steps,
            "wall_us": self.wall_us,
            "limits": self.limits,
            "operators": [{k: _cell(v, None) for k, v in asdict(row).items()} for row in self.rows],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as a JSON document."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def to_csv(self) -> str:
        """A heading and one line a row; what is unknown is empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in self.rows:
            writer.writerow([_cell(value) for value in asdict(row).values()])
        return text.getvalue()

    def sort(self, by: str = "self") -> OperatorTable:
        """Sorts the rows, largest first (names in alphabetical order); ``by`` is one of :data:`SORTS`."""
        self.rows.sort(key=lambda r: (r.operator, r.shapes))
        if by != "name":
            self.rows.sort(key=SORTS[by][0], reverse=True)
        return self


def _cell(value: Any, unknown: Any = "") -> Any:
    """Times are nanoseconds that became microseconds: three digits are all there are."""
    if value is None:
        return unknown
    return round(value, 3) if isinstance(value, float) else value


def table(trace: Trace, *, by_shape: bool = False, limits: Limits | None = None) -> OperatorTable:
    """Adds up the calls of a trace, sorted by own time.

    Args:
        trace: from :func:`jumar.profile.read`.
        by_shape: one row for each operator and set of shapes.
        limits: of the machine; None: those that the trace was written with, if any.
    """
    limits = limits or _limits(trace.limits)
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in trace.calls:
        groups.setdefault((call.name, call.shapes if by_shape else ""), []).append(call)
    known: dict[tuple[str, str], Cost | None] = {}
    optimizers = _optimizers(trace)
    rows = []
    for (name, shapes), calls in groups.items():
        # By shape, the calls on the local part of distributed tensors are rows of their own.
        outermost = [call for call in calls if call.outermost] or calls
        row = OperatorRow(name, calls[0].kind, shapes, calls=len(outermost))
        row.self_us = sum(call.own for call in calls)
        row.total_us = sum(call.duration for call in outermost)
        row.share = 100 * row.self_us / trace.wall if trace.wall > 0 else 0.0
        durations = [call.duration for call in outermost]
        row.min_us, row.max_us = min(durations), max(durations)
        row.avg_us = sum(durations) / len(durations)
        working = [call for call in calls if call.innermost]
        seconds = 1e-6 * sum(call.duration for call in working)
        costs = [_cost(call, known) for call in working]
        if name in optimizers and sum(key[0] == name for key in groups) == 1:
            costs = [Cost(optimizers[name])]
        _judge(row, costs, seconds, limits)
        rows.append(row)
    found = OperatorTable(
        str(trace.file), len(trace.steps), trace.wall, None if limits is None else asdict(limits), rows
    )
    return found.sort()


def _limits(recorded: dict[str, Any] | None) -> Limits | None:
    if recorded is None:
        return None
    try:
        limits = Limits(**{name: recorded[name] for name in Limits.__dataclass_fields__})
        numbers = (limits.copy_gbs, limits.fma_gflops, limits.bf16_gflops)
        return limits if all(isinstance(n, int | float) for n in numbers) else None
    except (KeyError, TypeError):
        return None  # of another version of jumar


def _optimizers(trace: Trace) -> dict[str, float]:
    """Operator -> bytes that all its calls move, for the steps of optimizers."""
    noted = trace.metadata.get("optimizers")
    noted = noted if isinstance(noted, dict) else {}
    return {name: float(moved) for name, moved in noted.items() if isinstance(moved, int | float) and moved > 0}


def _cost(call: Call, known: dict[tuple[str, str], Cost | None]) -> Cost | None:
    if call.arguments is None:
        return None
    key = (call.name, repr(call.arguments))
    if key not in known:
        known[key] = cost(call.name, call.arguments)
    return known[key]


def _judge(row: OperatorRow, costs: list[Cost | None], seconds: float, limits: Limits | None) -> None:
    """Fills in bytes, FLOPs, rates and the part of the limit: all of them are of every call, or left out."""
    if not costs or any(found is None for found in costs) or seconds <= 0:
        return
    if all(found.bytes is not None for found in costs):
        row.bytes = sum(found.bytes for found in costs)
        row.gb_per_s = row.bytes / seconds * 1e-9
    if all(found.flops is not None for found in costs):
        row.flops = sum(found.flops for found in costs)
        row.gflop_per_s = row.flops / seconds * 1e-9
    if limits is None:
        return
    least: dict[str, float] = {}
    for found in costs:
        peak = limits.flops_limit(found.dtype) if found.dtype is not None else 0.0
        needed = found.seconds(limits.copy_gbs, peak)
        if needed is None:
            return
        least[needed[1]] = least.get(needed[1], 0.0) + needed[0]
    row.percent = 100 * sum(least.values()) / seconds
    row.bound = max(least, key=lambda name: least[name])
