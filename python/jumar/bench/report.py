"""The results of ``jumar bench`` as a table, as plain data, as CSV and as a plot."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jumar.bench.runner import BenchRow, Result

_BASELINES = ("eager", "inductor")


def _sizes(row: BenchRow) -> str:
    return "x".join(str(n) for n in row.sizes.values())


def _milliseconds(row: BenchRow, name: str) -> str:
    timing = row.timings.get(name)
    if timing is None:
        return "-"
    digits = 3 if timing.minimum < 1e-2 else 1
    return f"{timing.minimum * 1e3:.{digits}f} / {timing.median * 1e3:.{digits}f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def limits_text(result: Result) -> str:
    """One line: the limits that percentages refer to."""
    limits = result.limits
    bf16 = f", bf16 dot products {limits.bf16_gflops:.0f} GFLOP/s" if limits.bf16_gflops else ""
    return (
        f"limits of this machine ({limits.threads} threads, {limits.simd}): copy {limits.copy_gbs:.1f} GB/s, "
        f"fp32 multiply-add {limits.fma_gflops:.0f} GFLOP/s{bf16}"
    )


def show(result: Result, console: Console) -> None:
    """Prints the limits and a row per operator, dtype, shape and direction."""
    console.print(limits_text(result))
    table = Table(header_style="bold")
    for heading in ("operator", "dtype", "shape", "direction"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "eager ms",
        "Inductor ms",
        "jumar ms",
        "/eager",
        "/Inductor",
        "of limit",
        "ulp",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    previous: tuple[str, ...] = ()
    for row in result.rows:
        key = (row.op, row.dtype, row.shape)
        if previous and key[:2] != previous[:2]:
            table.add_section()
        new = key != previous
        previous = key
        percent = "-" if math.isnan(row.percent) else f"{row.percent:.0f} % {row.limit}"
        table.add_row(
            row.op if new else "",
            row.dtype if new else "",
            f"{row.shape} {_sizes(row)}" if new else "",
            row.direction,
            *(_milliseconds(row, name) for name in (*_BASELINES, "jumar")),
            *(_times(row.ratio(name)) for name in _BASELINES),
            percent,
            f"{row.ulp:.2f}",
        )
    console.print(table)
    pages = "" if result.keeps_memory else "; large results were written to fresh pages"
    console.print(f"times: minimum / median; ratios: of the minima, above 1 jumar is faster{pages}")
    for note in dict.fromkeys(
        f"{r.op} {r.dtype} {r.shape}: {r.note}" for r in result.rows if r.note
    ):
        console.print(escape(note), style=None if "wrong" not in note else "bold red")


def to_dict(result: Result) -> dict[str, Any]:
    """For ``--json``; times in seconds."""
    rows = []
    for row in result.rows:
        data = asdict(row)
        data["ratios"] = {
            f"{name} {of}": row.ratio(name, of)
            for name in _BASELINES
            for of in ("minimum", "median")
            if name in row.timings
        }
        rows.append({**data, "ok": row.ok})
    return {
        "ok": result.ok,
        "limits": asdict(result.limits),
        "keeps_memory": result.keeps_memory,
        "rows": rows,
    }


def write_csv(result: Result, path: str) -> None:
    """One line per row of the table; times in seconds."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        contenders = (*_BASELINES, "jumar")
        times = [f"{name}_{of}" for name in contenders for of in ("min", "median")]
        writer.writerow(
            ["op", "dtype", "shape", "sizes", "direction", *times, "limit", "percent", "ulp"]
        )
        for row in result.rows:
            values: list[Any] = []
            for name in contenders:
                timing = row.timings.get(name)
                values += ["", ""] if timing is None else [timing.minimum, timing.median]
            writer.writerow(
                [row.op, row.dtype, row.shape, _sizes(row), row.direction, *values]
                + [row.limit, row.percent, row.ulp]
            )


def draw(result: Result, path: str) -> None:
    """Bars: how many times longer eager and Inductor take, forward + backward. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result.rows if row.direction != "forward" and "jumar" in row.timings]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.32 * len(rows)), layout="constrained")
    for offset, name in ((-0.2, "eager"), (0.2, "inductor")):
        bars = [(i + offset, r.ratio(name)) for i, r in enumerate(rows) if r.ratio(name)]
        axes.barh([y for y, _ in bars], [x for _, x in bars], height=0.38, label=name)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [f"{r.op} {r.dtype} {r.shape}" for r in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time of the contender / time of jumar, forward + backward")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
