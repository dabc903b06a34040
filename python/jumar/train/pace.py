"""A hook at the start of every step of either engine: `jumar bench --step` lets contenders take turns through it."""

from __future__ import annotations

from collections.abc import Callable

_hook: Callable[[], None] | None = None


def set_hook(hook: Callable[[], None] | None) -> None:
    """``hook`` is called in the training thread before the data of a step is read; None: nothing is called."""
    global _hook
    _hook = hook


def step_begins() -> None:
    """Called by the engines."""
    if _hook is not None:
        _hook()
