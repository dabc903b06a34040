"""Sites and the report: what was replaced, what was left alone and why, and the way back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.table import Table

from jumar.convert.errors import ConverterError


class Action(Protocol):
    """A change to the model that can be taken back."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


@dataclass
class Site:
    """One place in a model that a converter matched or nearly matched.

    ``status`` is ``"replaced"`` or ``"skipped"``; ``reason`` says why a site was skipped.
    """

    path: str
    converter: str
    operator: str
    status: str
    reason: str
    module_class: str
    action: Action | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, str]:
        """The site as plain strings."""
        keys = ("path", "module_class", "converter", "operator", "status", "reason")
        return {key: getattr(self, key) for key in keys}


def _pattern(path: str) -> str:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``: sites that differ by an index only share a row."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", path)


class Report:
    """The outcome of one conversion.

    Attributes:
        sites: every :class:`Site`, in the order converter by converter, then as the model lists its modules.
        requested: the names of the converters that were asked for.
    """

    def __init__(self, sites: Iterable[Site], requested: Iterable[str]):
        self.sites = list(sites)
        self.requested = list(requested)

    @property
    def replaced(self) -> list[Site]:
        """The sites that run a fused operator because of this conversion."""
        return [site for site in self.sites if site.status == "replaced"]

    @property
    def skipped(self) -> list[Site]:
        """The sites that were left alone."""
        return [site for site in self.sites if site.status == "skipped"]

    @property
    def unmatched(self) -> list[str]:
        """Converters that replaced nothing and found nothing that was converted before."""
        from jumar.convert.registry import ALREADY

        found = {s.converter for s in self.sites if s.status == "replaced" or s.reason == ALREADY}
        return [name for name in self.requested if name not in found]

    def undo(self) -> None:
        """Give every module that this conversion changed its class back, in reverse order; twice is harmless."""
        failures = []
        for site in reversed(self.replaced):
            if site.action is not None:
                try:
                    site.action.undo()
                except ConverterError as error:
                    failures.append(str(error))
        if failures:
            raise ConverterError("undo: " + "; ".join(failures))

    def counts(self) -> dict[str, dict[str, int]]:
        """Per converter the number of replaced and skipped sites."""
        table = {name: {"replaced": 0, "skipped": 0} for name in self.requested}
        for site in self.sites:
            table[site.converter][site.status] += 1
        return table

    def to_dict(self) -> dict:
        """The report as plain data: ``converters`` (counts) and ``sites``."""
        return {
            "converters": self.counts(),
            "unmatched": self.unmatched,
            "sites": [site.to_dict() for site in self.sites],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def table(self, full: bool = False) -> Table:
        """A rich table; sites that differ only by a layer's index share a row unless ``full``."""
        rows: dict[tuple, int] = {}
        for site in self.sites:
            path = site.path if full else _pattern(site.path)
            row = (
                site.status,
                site.converter,
                site.operator,
                path or "(the model)",
                site.module_class,
                site.reason,
            )
            rows[row] = rows.get(row, 0) + 1
        order = {name: index for index, name in enumerate(self.requested)}
        table = Table(
            title=self.summary(), title_justify="left", title_style="bold", header_style="bold"
        )
        for heading in ("converter", "operator", "module", "class", "sites", "status"):
            table.add_column(
                heading, justify="right" if heading == "sites" else "left", overflow="fold"
            )
        # skipped last, otherwise the order of discovery
        for row, number in sorted(
            rows.items(), key=lambda r: (r[0][0] != "replaced", order.get(r[0][1], 0))
        ):
            status, converter, operator, path, cls, reason = row
            text = "replaced" if status == "replaced" else f"skipped: {reason}"
            style = None if status == "replaced" else "dim"
            table.add_row(converter, operator, path, cls, str(number), text, style=style)
        for name in self.unmatched:
            if not any(site.converter == name for site in self.sites):
                table.add_row(name, "", "", "", "0", "matched nothing", style="yellow")
        return table

    def summary(self) -> str:
        """One line: how many sites were replaced and skipped."""
        return f"{len(self.replaced)} sites replaced, {len(self.skipped)} skipped"

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        console = Console(width=160, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def __repr__(self) -> str:
        return f"<Report: {self.summary()}>"
