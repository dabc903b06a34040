"""Records of a run: one JSON object a step in ``metrics.jsonl``, and a progress line with the time that is left."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jumar.train import durable
from jumar.train.files import replace_file
from jumar.train.memory import peak, resident
from jumar.train.text import duration

# Steps whose times give the estimate of what is left.
_WINDOW = 20


class Records:
    """The records of one run, on the rank that writes them.

    Attributes:
        written: what this run wrote, in order.
        earlier: the records of the steps before, when the run was resumed.
    """

    def __init__(self, file: Path | None, steps: int, *, label: str = "", progress: bool = True):
        """``file``: None for none. ``steps``: of the whole job. ``label``: the start of the progress line."""
        self.file, self.steps, self.label, self.progress = file, steps, label, progress
        self.written: list[dict[str, Any]] = []
        self.earlier: list[dict[str, Any]] = []
        self._stream = None

    def resume(self, step: int) -> None:
        """Opens the file of records and drops those after ``step``: a killed run was ahead of its last checkpoint."""
        if self.file is None:
            return
        self.earlier = [record for record in read(self.file) if record["step"] <= step]
        lines = "".join(json.dumps(record) + "\n" for record in self.earlier)
        with durable.clear_errors(self.file, "metrics"):
            replace_file(self.file, lines)
            self._stream = open(self.file, "a", encoding="utf-8")

    def add(self, record: dict[str, Any]) -> None:
        """Writes the record of a step, and the progress line."""
        self.written.append(record)
        if self._stream is not None:
            with durable.clear_errors(self.file, "metrics"):
                self._stream.write(json.dumps(record) + "\n")
                self._stream.flush()
        if self.progress:
            self._show(record)

    def sync(self) -> None:
        """Waits until the records are on the disk."""
        if self._stream is not None:
            with durable.clear_errors(self.file, "metrics"):
                os.fsync(self._stream.fileno())

    def _show(self, record: dict[str, Any]) -> None:
        # The first step carries set-up (and compilation), so it says little about the next ones.
        times = [r["seconds_per_step"] for r in self.written[1:]][-_WINDOW:] or [record["seconds_per_step"]]
        left = statistics.median(times) * (self.steps - record["step"])
        width = len(str(self.steps))
        held_out = f"val loss {record['validation_loss']:.4f}  " if "validation_loss" in record else ""
        uneven = f"balance {record['expert_balance_worst']:.2f}  " if "expert_balance_worst" in record else ""
        indexers = f"indexer loss {record['indexer_loss']:.4f}  " if "indexer_loss" in record else ""
        line = (
            f"{self.label}step {record['step']:{width}}/{self.steps}  loss {record['loss']:.4f}  {indexers}{held_out}{uneven}"
            f"grad norm {record['grad_norm']:.3f}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"left {duration(left)}"
        )
        if sys.stderr.isatty():
            end = "\n" if record["step"] >= self.steps else ""
            sys.stderr.write(f"\r\x1b[K{line}{end}")
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._stream is not None:
            with contextlib.suppress(OSError):  # a full disk was reported where it was found
                self._stream.close()
            self._stream = None


def of_step(seconds: float, steps: int, tokens: float, **values: Any) -> dict[str, Any]:
    """A record: ``values``, the speed of the ``steps`` since the last record, and the memory of now."""
    now = resident()
    return {
        **values,
        "seconds_per_step": seconds / max(1, steps),
        "tokens_per_second": tokens / seconds,
        "memory_bytes": now,
        # Linux brings its peak up to date every now and then, not with every page.
        "peak_memory_bytes": max(peak(), now or 0),
    }


def settled(records: Sequence[dict[str, Any]], key: str = "tokens_per_second") -> float | None:
    """The median of a number over the records; the first one, which carries set-up, is left out."""
    values = [record[key] for record in records if isinstance(record.get(key), int | float)]
    return statistics.median(values[1:] or values) if values else None


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file, one a step, in the order of steps; a line that a kill cut short is left out."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            found[int(record["step"])] = record
    return [found[step] for step in sorted(found)]
