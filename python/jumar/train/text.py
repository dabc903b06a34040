"""Numbers as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``12 s``, ``3:07``, ``2:03:07``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
