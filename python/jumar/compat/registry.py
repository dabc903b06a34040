"""The table of shims, the switch that turns them off, and the one function that applies them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from jumar.compat.shim import Shim
from jumar.spelling import nearest

ENV = "JUMAR_SHIMS"


class ShimError(ValueError):
    """``JUMAR_SHIMS`` names a shim that does not exist."""


@dataclass(frozen=True)
class Status:
    """What became of one shim: ``state`` is applied, not needed, switched off or pending."""

    name: str
    state: str
    reason: str
    reference: str


_shims: dict[str, Shim] = {}


def _load() -> None:
    from jumar.compat import titan_shims, torch_shims

    # torch's own first: what torchtitan is to be told of the device must be in place when it is imported.
    for shim in (*torch_shims.SHIMS, *titan_shims.SHIMS):
        _shims.setdefault(shim.name, shim)


def switched_off() -> set[str]:
    """Names that ``JUMAR_SHIMS`` switches off. ShimError, with the nearest name, for an unknown one."""
    _load()
    text = os.environ.get(ENV, "").strip()
    if text.lower() in ("off", "none", "0"):
        return set(_shims)
    names = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name = part.removeprefix("-")
        if name not in _shims:
            hint = nearest(f"-{name}", [f"-{shim}" for shim in _shims])
            raise ShimError(f"{ENV}: unknown shim {name!r}{hint} (known: {', '.join(_shims)})")
        if not part.startswith("-"):
            raise ShimError(f"{ENV}: {part!r} should be -{part}: shims are on unless switched off")
        names.add(name)
    return names


def apply(*, late: bool = True) -> list[Status]:
    """Applies every shim that is needed and not switched off; calling it again changes nothing.

    Args:
        late: also those that patch torchtitan's own modules, which imports torchtitan.

    Raises:
        ShimError: ``JUMAR_SHIMS`` names an unknown shim.
    """
    off = switched_off()
    for shim in _shims.values():
        if shim.state not in ("pending", "not needed") or (shim.late and not late):
            continue
        if shim.name in off:
            shim.state = "switched off"
        elif shim.probe():
            shim.patch()
            shim.state = "applied"
        else:
            shim.state = "not needed"
    return status()


def status() -> list[Status]:
    """Every shim and its state."""
    _load()
    return [Status(s.name, s.state, s.reason, s.reference) for s in _shims.values()]
