"""Named shapes: one text file per kind of operator, one shape a line, ``NAME key=size key=size  # remark``.

The first shape is the smallest. A ``*`` after a name marks the shape, out of cache, that ``--quick`` measures.
"""

from __future__ import annotations

from pathlib import Path

from jumar.spelling import nearest

_FOLDER = Path(__file__).parent / "shapes"

Shapes = dict[str, dict[str, int]]


def sizes_of(text: str) -> dict[str, int]:
    """``"rows=3 cols=5"`` or ``"rows=3,cols=5"`` as sizes. ValueError for anything else."""
    sizes: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        key, equals, size = word.partition("=")
        if not key or not equals or not size.isdecimal() or key in sizes:
            raise ValueError(f"expected key=size, got {word!r}")
        sizes[key] = int(size)
    if not sizes:
        raise ValueError("no sizes")
    return sizes


def _read(path: Path) -> tuple[Shapes, list[str]]:
    """The shapes of a file, and the names of those that ``--quick`` measures."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    shapes: Shapes = {}
    marked: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#")[0].split(maxsplit=1)
        if not words:
            continue
        name, rest = words[0], " ".join(words[1:])
        mark, name = name.endswith("*"), name.removesuffix("*")
        try:
            if not name or "=" in name or ":" in name:
                raise ValueError("expected NAME key=size ...")
            if name in shapes:
                raise ValueError(f"the name {name!r} is taken")
            shapes[name] = sizes_of(rest)
        except ValueError as error:
            raise ValueError(f"{path.name}:{number}: {error}: {line.strip()!r}") from error
        if mark:
            marked.append(name)
    if not shapes:
        raise ValueError(f"{path.name}: no shapes")
    keys = next(iter(shapes.values())).keys()
    for name, sizes in shapes.items():
        if sizes.keys() != keys:
            raise ValueError(f"{path.name}: {name} has {', '.join(sizes)}, not {', '.join(keys)}")
    return shapes, marked


def _path(kind: str) -> Path:
    """The file of a kind; ``kind`` may also be the path of a file."""
    return Path(kind) if "/" in kind or kind.endswith(".txt") else _FOLDER / f"{kind}.txt"


def read_shapes(kind: str) -> Shapes:
    """The shapes of ``shapes/KIND.txt`` in order; the first is the smallest. ValueError for a malformed line."""
    return _read(_path(kind))[0]


def quick_shapes(kind: str) -> Shapes:
    """Those that ``--quick`` measures: the marked ones, or the last."""
    shapes, marked = _read(_path(kind))
    return {name: shapes[name] for name in marked or [list(shapes)[-1]]}


def pick(kind: str, name: str | None) -> Shapes:
    """All shapes, or those that are named, comma-separated. ValueError with the nearest name when there is none."""
    shapes = read_shapes(kind)
    if name is None:
        return shapes
    picked: Shapes = {}
    for one in name.split(","):
        if one not in shapes:
            hint = nearest(one, shapes)
            raise ValueError(f"unknown shape {one!r}{hint} (known for {kind}: {', '.join(shapes)})")
        picked[one] = shapes[one]
    return picked
