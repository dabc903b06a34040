"""The loss over the steps, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(file: Path, curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> None:
    """Draws one line a curve; a curve is a list of (step, loss)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.items():
        few = len(points) < 12
        axes.plot(*zip(*points, strict=True), label=name, marker="o" if few else None, linewidth=1.6)
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
