"""Reads Chrome traces that torch.profiler wrote: calls of operators with their shapes, dtypes and own time."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jumar.opinfo.costs import FUSED, Arg

#: Key of a trace under which jumar keeps the limits of the machine.
METADATA = "jumar"

_GZIP = b"\x1f\x8b"
_OPERATORS = ("cpu_op", "Operator", "operator")
_STEP = "ProfilerStep#"
# What torch.library wraps around an operator with a gradient formula: part of the operator.
_WRAPPER = "GeneratedBackwardFor_"
_NODE = re.compile(r"Backward\d*$")

# C++ names of element types, as torch.profiler records them.
_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16,
    "long": torch.int64,
    "long int": torch.int64,
    "long long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "short int": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
}
_NO_TENSOR = ("", "Scalar", "ScalarList", "TensorList", "GenericList")


class TraceError(ValueError):
    """A file that is no trace, or a damaged one; the text begins with its name."""


@dataclass
class Call:
    """One call of an operator; times in microseconds.

    Attributes:
        name: ``jumar::npu_linear``, ``aten::mm``, ``MmBackward0``.
        duration: with everything that it calls.
        own: without the operators that it calls.
        outermost: no call of the same operator is around it.
        innermost: it calls no operator of its own name. Distributed tensors call the operator on what this process holds
            of them: the innermost call is the one that works, and its shapes are those that are worked on.
        arguments: in the order of the schema, see :func:`jumar.opinfo.costs.cost`; None when shapes were not recorded.
        shapes: the same for people: ``bfloat16[2, 256, 512] x bfloat16[512, 512]``.
    """

    name: str
    start: float
    duration: float
    own: float
    outermost: bool
    innermost: bool
    arguments: list[Any] | None
    shapes: str

    @property
    def kind(self) -> str:
        """``fused`` (jumar's), ``torch``, or ``autograd`` for nodes of the backward graph and what runs them."""
        if self.name.partition("::")[0] in FUSED:
            return "fused"
        return "autograd" if "autograd::" in self.name or _NODE.search(self.name) else "torch"


@dataclass
class Trace:
    """A trace that was read.

    Attributes:
        calls: every call of an operator, by thread and time.
        steps: the numbers of the training steps that it covers.
        wall: microseconds of these steps, or from the first call to the end of the last one.
        limits: as :class:`jumar.limits.Limits` when the trace was taken, as plain data; None in other traces.
        skipped: events that had no time or name.
    """

    file: Path
    calls: list[Call]
    steps: list[int]
    wall: float
    limits: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0


def find(path: str | Path) -> Path:
    """``path``, or for a folder the newest trace in it. TraceError when there is none."""
    path = Path(path)
    if not path.is_dir():
        return path
    found = [p for p in path.rglob("*.json*") if p.name.endswith((".json", ".json.gz")) and "trace" in p.name]
    found = [p for p in found if not p.name.startswith(".")]
    if not found:
        raise TraceError(f"{path}: no trace (*trace*.json, *trace*.json.gz) in this folder")
    return max(found, key=lambda p: (p.stat().st_mtime, p.name))


def _text(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror or error}") from error
    if not content.strip():
        raise TraceError(f"{file}: the file is empty")
    if content.startswith(_GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{file}: the gzip file is damaged: {error}") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{file}: not a trace: neither gzip nor UTF-8 text ({error.reason})") from error


def _document(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(_text(file), strict=False)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceError(f"{file}: not JSON, or cut short: {error}") from error
    if isinstance(document, list):  # the array form of Chrome traces
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(f"{file}: JSON, but not a Chrome trace: it has no list `traceEvents`")
    return document


def read(path: str | Path) -> Trace:
    """Reads a trace, ``.json`` or ``.json.gz``; of a folder, the newest trace in it.

    Raises:
        TraceError: there is no such file; it is damaged; it is no Chrome trace; it holds no operators.
    """
    file = find(path)
    document = _document(file)
    threads: dict[tuple[Any, Any], list[tuple[float, float, dict[str, Any]]]] = {}
    steps: dict[int, float] = {}
    skipped = 0
    for event in document["traceEvents"]:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        name, start, duration = event.get("name"), event.get("ts"), event.get("dur")
        if not (isinstance(name, str) and _number(start) and _number(duration) and duration >= 0):
            skipped += 1
        elif event.get("cat") in _OPERATORS:
            thread = (str(event.get("pid")), str(event.get("tid")))
            threads.setdefault(thread, []).append((float(start), float(duration), event))
        elif name.startswith(_STEP) and name.removeprefix(_STEP).isdigit():
            number = int(name.removeprefix(_STEP))
            steps[number] = max(steps.get(number, 0.0), float(duration))
    calls = [call for events in threads.values() for call in _nest(events)]
    if not calls:
        raise TraceError(f"{file}: a Chrome trace, but without operators (events of category cpu_op)")
    first = min(call.start for call in calls)
    wall = sum(steps.values()) or max(call.start + call.duration for call in calls) - first
    metadata = document.get(METADATA)
    metadata = metadata if isinstance(metadata, dict) else {}
    limits = metadata.get("limits")
    return Trace(
        file, calls, sorted(steps), wall, limits if isinstance(limits, dict) else None, metadata, skipped
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _nest(events: list[tuple[float, float, dict[str, Any]]]) -> list[Call]:
    """The calls of one thread. What lies within another call is called by it."""
    events.sort(key=lambda e: (e[0], -e[1]))
    calls: list[Call] = []
    around: list[tuple[float, Call]] = []  # (end, call), outermost first
    for start, duration, event in events:
        name = event["name"]
        if name.startswith(_WRAPPER) and not _NODE.search(name):
            continue
        # Times are rounded to nanoseconds: a child may seem to begin when its sibling has not quite ended.
        while around and around[-1][0] <= start:
            around.pop()
        arguments, shapes = _arguments(event.get("args"))
        same = [call for _, call in around if call.name == name]
        for call in same:
            call.innermost = False
        call = Call(name, start, duration, duration, not same, True, arguments, shapes)
        if around:
            end, parent = around[-1]
            parent.own = max(0.0, parent.own - min(duration, end - start))
        calls.append(call)
        around.append((start + duration, call))
    return calls


def _arguments(args: Any) -> tuple[list[Any] | None, str]:
    """(arguments, text) from what was recorded with ``record_shapes``."""
    if not isinstance(args, dict) or not isinstance(args.get("Input Dims"), list):
        return None, ""
    dims = args["Input Dims"]

    def column(key: str) -> list[Any]:
        values = args.get(key)
        values = values if isinstance(values, list) else []
        return [*values, *[""] * (len(dims) - len(values))]

    arguments, shown = [], []
    columns = (column("Input type"), column("Concrete Inputs"), column("Input Strides"))
    for shape, kind, concrete, strides in zip(dims, *columns, strict=False):
        argument = _argument(shape, kind, concrete, strides)
        arguments.append(argument)
        if isinstance(argument, Arg):
            shown.append(_show(argument))
        elif isinstance(argument, list) and argument and isinstance(argument[0], Arg):
            shown.append(f"{len(argument)} tensors")
    return arguments, " x ".join(shown)


def _show(arg: Arg) -> str:
    return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(isinstance(n, int) for n in value):
        return tuple(value)
    return None


def _argument(shape: Any, kind: Any, concrete: Any, strides: Any) -> Any:
    if kind == "TensorList" and isinstance(shape, list):
        sizes = [_sizes(part) for part in shape]
        # The dtypes of lists are not recorded.
        return [Arg(part, None) for part in sizes] if None not in sizes else None
    if kind in _NO_TENSOR:
        return _literal(concrete) if kind in ("Scalar", "ScalarList") else None
    sizes = _sizes(shape)
    return None if sizes is None else Arg(sizes, _DTYPES.get(kind), _sizes(strides))


def _literal(text: Any) -> Any:
    """A number, bool or list of numbers; None for anything else."""
    words = {"True": "true", "False": "false"}
    try:
        value = json.loads(words.get(text, text).rstrip(".") if isinstance(text, str) else "null")
    except ValueError:
        return None
    return value if isinstance(value, bool | int | float | list) else None
