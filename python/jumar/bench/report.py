"""The results of ``jumar bench`` as a table, as plain data, as CSV and as a plot."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jumar.bench.machine import facts
from jumar.bench.runner import BenchRow, Result
from jumar.bench.targets import below, judged_any

_BASELINES = ("eager", "inductor")


def sizes_text(row: BenchRow) -> str:
    """``2047x1531``."""
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
    return f"limits of this machine {result.limits.text}"


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
            f"{row.shape} {sizes_text(row)}" if new else "",
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
        f"{r.op} {r.dtype} {r.shape}: {r.note}" for r in result.rows if r.note and r.ok
    ):
        console.print(escape(note))
    for row in result.rows:
        if not row.ok:
            console.print(
                escape(f"{row.case}: {row.note}; not timed"), style="bold red", soft_wrap=True
            )
            console.print(f"    jumar bench --case {row.case}", soft_wrap=True)
    _show_misses(result, console)


def _show_misses(result: Result, console: Console) -> None:
    misses = below(result)
    if misses:
        console.print("below target:", style="bold")
        for miss in misses:
            console.print(f"  {miss.text}")
    elif judged_any(result):
        console.print("every operator reaches its target")
    else:
        console.print("no shape is large enough to be judged by the targets")


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
        "machine": facts(),
        "limits": asdict(result.limits),
        "keeps_memory": result.keeps_memory,
        "rows": rows,
        "below_target": [{**asdict(miss), "text": miss.text} for miss in below(result)],
    }


def write_csv(result: Result, path: str) -> None:
    """One line per row of the table; times in seconds, the machine and its limits in every line."""
    misses: dict[tuple[str, str, str], list[str]] = {}
    for miss in below(result):
        misses.setdefault((miss.op, miss.dtype, miss.shape), []).append(miss.text)
    limits = result.limits
    machine = {
        **facts(),
        "copy_gbs": limits.copy_gbs,
        "fma_gflops": limits.fma_gflops,
        "bf16_gflops": limits.bf16_gflops,
    }
    contenders = (*_BASELINES, "jumar")
    last = {(r.op, r.dtype, r.shape): r.direction for r in result.rows}
    lines = []
    for row in result.rows:
        line: dict[str, Any] = {"op": row.op, "dtype": row.dtype, "shape": row.shape}
        line |= {"sizes": sizes_text(row), "direction": row.direction}
        for name in contenders:
            timing = row.timings.get(name)
            line[f"{name}_min"] = "" if timing is None else timing.minimum
            line[f"{name}_median"] = "" if timing is None else timing.median
        for name in _BASELINES:
            ratio = row.ratio(name)
            line[f"to_{name}"] = "" if ratio is None else ratio
        line |= {"bytes": row.bytes, "flops": row.flops, "limit": row.limit, "percent": row.percent}
        line |= {"ulp": row.ulp, "stated": row.stated, "note": row.note, "case": row.case}
        key = (row.op, row.dtype, row.shape)
        shown = misses.get(key, []) if row.direction == last[key] else []
        line["below_target"] = "; ".join(shown)
        lines.append({**line, **machine})
    write_lines(path, lines)


def write_lines(path: str, lines: list[dict[str, Any]]) -> None:
    """A CSV file of lines that have the same keys."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def plotter() -> Any:
    """matplotlib's pyplot, which draws to files. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(result: Result, path: str) -> None:
    """Bars: how many times longer eager and Inductor take, forward + backward. ImportError without matplotlib."""
    pyplot = plotter()
    last = {(r.op, r.dtype, r.shape): r for r in result.rows if "jumar" in r.timings}
    rows = list(last.values())
    figure, (axes, percent) = pyplot.subplots(
        1, 2, figsize=(11, 1.4 + 0.32 * len(rows)), layout="constrained", sharey=True, width_ratios=(3, 2)
    )
    for offset, name in ((-0.2, "eager"), (0.2, "inductor")):
        bars = [(i + offset, r.ratio(name)) for i, r in enumerate(rows) if r.ratio(name)]
        axes.barh([y for y, _ in bars], [x for _, x in bars], height=0.38, label=name)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(rows)), [f"{r.op} {r.dtype} {r.shape}" for r in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("how many times longer than jumar, forward + backward")
    axes.legend()
    colours = {"bytes": "tab:green", "flops": "tab:purple"}
    for limit, colour in colours.items():
        bars = [(i, r.percent) for i, r in enumerate(rows) if r.limit == limit]
        name = {"bytes": "copy bandwidth", "flops": "multiply-add peak"}[limit]
        percent.barh([y for y, _ in bars], [x for _, x in bars], color=colour, label=name)
    percent.axvline(75.0, color="black", linewidth=0.8)
    percent.set_xlabel("percent of the limit (line: 75)")
    percent.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2, fontsize=7)
    figure.suptitle(limits_text(result), fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
