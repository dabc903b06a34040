"""What is said about a name that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known name closest to ``name``, or the empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown(what: str, name: str, known: Iterable[str], more: Iterable[str] = ()) -> str:
    """The text for a ``what`` that is not in ``known``; ``more`` are names that may be meant, but are not listed."""
    known = list(known)
    return f"unknown {what} {name!r}{nearest(name, [*known, *more])} (known: {', '.join(known)})"
