"""What the commands of :mod:`jumar.cli` share: errors of the user, the console, JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


class UserError(Exception):
    """A mistake of the user; its text is one line."""


@contextlib.contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turns exceptions of these kinds, which the code inside raises for wrong names and files, into UserError."""
    try:
        yield
    except kinds as error:
        raise UserError(" ".join(str(error).split())) from error


def console() -> Console:
    """Tables are as wide as the terminal, or wide enough for any row where the output is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=180, highlight=False)


def print_json(data: Any) -> None:
    """Numbers that JSON does not know (infinity, NaN) are written as strings."""

    def clean(value: Any) -> Any:
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            return str(value)
        if isinstance(value, dict):
            return {str(k): clean(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [clean(v) for v in value]
        return value

    print(json.dumps(clean(data), indent=2, ensure_ascii=False))


def split(text: str | None) -> list[str] | None:
    """``"a,b"`` -> ``["a", "b"]``; None stays None."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]
