"""Named shapes: one text file per kind of operator, one shape a line, ``NAME key=size key=size  # remark``."""

from __future__ import annotations

import difflib
from pathlib import Path

_FOLDER = Path(__file__).parent / "shapes"


def read_shapes(kind: str) -> dict[str, dict[str, int]]:
    """The shapes of ``shapes/KIND.txt`` in order; the first is the smallest. ValueError for a malformed line."""
    path = _FOLDER / f"{kind}.txt"
    shapes: dict[str, dict[str, int]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            sizes = {key: int(size) for key, size in (word.split("=") for word in words[1:])}
        except ValueError as error:
            raise ValueError(
                f"{path.name}:{number}: expected NAME key=size ..., got {line!r}"
            ) from error
        if not sizes or words[0] in shapes:
            raise ValueError(f"{path.name}:{number}: no sizes, or a name that is taken: {line!r}")
        shapes[words[0]] = sizes
    return shapes


def pick(kind: str, name: str | None) -> dict[str, dict[str, int]]:
    """All shapes, or the one that is named. ValueError with the nearest name when there is none."""
    shapes = read_shapes(kind)
    if name is None:
        return shapes
    if name not in shapes:
        near = difflib.get_close_matches(name, shapes, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown shape {name!r}{hint} (known for {kind}: {', '.join(shapes)})")
    return {name: shapes[name]}
