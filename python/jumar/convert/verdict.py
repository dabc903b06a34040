"""What a recogniser says about a module: it matches, it only looks alike, or (``None``) neither."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Match:
    """The module computes what the operator computes.

    ``key`` holds everything that the replacement must know, as hashable and picklable data: it names the
    generated class in the cache and travels in pickles.
    """

    operator: str
    key: tuple


@dataclass(frozen=True)
class Miss:
    """A near miss: the module looks like a site, and ``reason`` says why it is left alone."""

    reason: str
    operator: str = ""


Verdict = Match | Miss | None
