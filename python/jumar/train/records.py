"""The file of records, ``metrics.jsonl``: one JSON object a step."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


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
