"""What a shim is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Shim:
    """One change outside of this package.

    Attributes:
        name: what ``JUMAR_SHIMS=-name`` switches off.
        reason: what fails without it.
        reference: where the newer behaviour, or the failure, comes from.
        late: needs torchtitan's modules; the others go in before torchtitan is imported.
        probe: True when the shim is needed here; changes nothing and imports nothing heavy.
        patch: makes the change.
    """

    name: str
    reason: str
    reference: str
    probe: Callable[[], bool]
    patch: Callable[[], None]
    late: bool = False
    state: str = field(default="pending")
