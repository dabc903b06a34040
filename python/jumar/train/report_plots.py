"""Plots of a run as SVG text that stands in an HTML page: no script, no name space, no link."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

Points = Sequence[tuple[float, float]]

#: More points than this are thinned to the lowest and highest of each stretch.
_MOST = 1500
_COLOURS = ("#1f5fa8", "#c2571a", "#3b8043", "#8a4fa3")


def thin(points: Points, most: int = _MOST) -> list[tuple[float, float]]:
    """At most about ``most`` points that look the same in a plot."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(2 * len(points) / most)
    kept = []
    for begin in range(0, len(points), stretch):
        part = points[begin : begin + stretch]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return sorted({points[0], *kept, points[-1]})


def curve(records: Sequence[Mapping[str, Any]], key: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """(step, value) of the records that have a finite number there."""
    return [
        (record["step"], record[key] * scale)
        for record in records
        if isinstance(record.get(key), int | float) and math.isfinite(record[key])
    ]


def draw(curves: Mapping[str, Points], ylabel: str, *, log: bool = False) -> str | None:
    """One plot over the steps, a line a curve; None when no curve has points or matplotlib is missing."""
    curves = {name: thin(points) for name, points in curves.items() if points}
    if not curves:
        return None
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        return None
    # Text stays text; identifiers, of which a page has several plots, follow from the content.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": ylabel, "font.family": "sans-serif"}):
        figure = Figure(figsize=(5.4, 2.9))
        canvas = FigureCanvasSVG(figure)
        axes = figure.add_axes((0.14, 0.17, 0.83, 0.78))
        for (name, points), colour in zip(curves.items(), _COLOURS * len(curves), strict=False):
            few = len(points) < 30
            axes.plot(
                [x for x, _ in points], [y for _, y in points],
                label=name, color=colour, linewidth=1.4, marker="o" if few else None, markersize=3,
            )  # fmt: skip
        axes.set(xlabel="step", ylabel=ylabel)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if log and all(y > 0 for points in curves.values() for _, y in points):
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if len(curves) > 1:
            axes.legend(frameon=False, fontsize=8)
        text = io.StringIO()
        canvas.print_svg(text, metadata={"Date": None, "Creator": None})
    return _inline(text.getvalue(), f"{ylabel} over the steps: {', '.join(curves)}")


def _inline(svg: str, label: str) -> str:
    """The element alone: the XML head, name spaces and metadata, which HTML needs not, are full of addresses."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
