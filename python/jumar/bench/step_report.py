"""The results of ``jumar bench --step`` as tables, as plain data, as CSV and as a plot."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jumar.bench.report import plotter, write_lines
from jumar.bench.step import Contender, StepResult

#: Operators that are shown, largest share first.
_SHOWN = 12


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f}" if count else "-"


def _ratio(result: StepResult, name: str, of: str = "minimum") -> str:
    ratio = result.ratio(name, of)
    return "-" if ratio is None or name == "jumar" else f"{ratio:.2f}x"


def show(result: StepResult, console: Console) -> None:
    """Prints a row a contender, and where jumar's time goes."""
    machine = result.machine
    console.print(
        f"{result.job}: {result.description} ({machine['threads']} threads, {machine['simd']}, torch {machine['aten']})"
    )
    table = Table(header_style="bold")
    table.add_column("contender", no_wrap=True)
    headings = ("step ms", "by jumar", "of medians", "tokens/s", "peak MB", "above state MB", "first loss", "steps")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for contender in result.contenders:
        table.add_row(contender.name, *_cells(result, contender))
    console.print(table)
    console.print(
        "step: minimum / median; by jumar: times longer than jumar's; peak: of physical memory; state: before a step"
    )
    for contender in result.contenders:
        if contender.wrong:
            text = f"{contender.name}: wrong: {contender.wrong}; not timed"
            console.print(escape(text), style="bold red", soft_wrap=True)
        elif contender.note:
            console.print(escape(contender.note), soft_wrap=True)
    own = result.find("jumar")
    if own is not None and own.operators:
        console.print(_operators(own))


def _cells(result: StepResult, contender: Contender) -> list[str]:
    if result.find(contender.name) is None:
        return ["-"] * 8
    return [
        f"{contender.minimum * 1e3:,.0f} / {contender.median * 1e3:,.0f}",
        _ratio(result, contender.name),
        _ratio(result, contender.name, "median"),
        f"{contender.tokens_per_second:,.0f}",
        _megabytes(contender.peak),
        _megabytes(contender.peak - contender.state),
        f"{contender.losses[0]:.5f}" if contender.losses else "-",
        str(len(contender.seconds)),
    ]


def largest(contender: Contender) -> list[dict[str, Any]]:
    """The operators with the largest shares of a step."""
    return sorted(contender.operators, key=lambda row: -row["share"])[:_SHOWN]


def _operators(contender: Contender) -> Table:
    table = Table(title="one step of jumar", title_justify="left", header_style="bold")
    table.add_column("operator", no_wrap=True)
    for heading in ("calls", "share", "of limit"):
        table.add_column(heading, justify="right")
    for row in largest(contender):
        percent = "-" if row["percent"] is None else f"{row['percent']:.0f} % {row['bound']}"
        table.add_row(row["operator"], f"{row['calls']:,}", f"{row['share']:.1f} %", percent)
    return table


def to_dict(result: StepResult) -> dict[str, Any]:
    """For ``--json``; times in seconds, memory in bytes."""
    rows = []
    for contender in result.contenders:
        row = asdict(contender)
        if contender.wrong:
            row["seconds"] = []
        if result.find(contender.name):
            row |= {"minimum": contender.minimum, "median": contender.median}
            row["tokens_per_second"] = contender.tokens_per_second
            row["ratio"] = result.ratio(contender.name)
        rows.append(row)
    return {
        "mode": "step",
        "ok": result.ok,
        "job": result.job,
        "description": result.description,
        "machine": result.machine,
        "contenders": rows,
    }


def write_csv(result: StepResult, path: str) -> None:
    """One line a contender; times in seconds, memory in bytes."""
    lines = []
    for contender in result.contenders:
        timed = result.find(contender.name) is not None
        line = {"job": result.job, "description": result.description, "dtype": result.dtype}
        line["contender"] = contender.name
        line["min"] = contender.minimum if timed else ""
        line["median"] = contender.median if timed else ""
        line["steps"] = len(contender.seconds)
        for of in ("minimum", "median"):
            ratio = result.ratio(contender.name, of)
            line[f"to_jumar_{of}"] = "" if ratio is None else ratio
        line["tokens_per_second"] = contender.tokens_per_second if timed else ""
        line |= {"peak": contender.peak, "state": contender.state}
        line["first_loss"] = contender.losses[0] if contender.losses else ""
        line["note"] = f"wrong: {contender.wrong}" if contender.wrong else contender.note
        lines.append({**line, **result.machine})
    write_lines(path, lines)


def draw(result: StepResult, path: str) -> None:
    """Bars: tokens a second and peak memory of each contender."""
    pyplot = plotter()
    timed = [c for c in result.contenders if result.find(c.name)]
    names = [c.name for c in timed]
    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    speed.bar(names, [c.tokens_per_second for c in timed])
    speed.set_ylabel("tokens/s")
    memory.bar(names, [c.state / 1e6 for c in timed], label="before a step", color="lightgrey")
    above = [(c.peak - c.state) / 1e6 for c in timed]
    memory.bar(names, above, bottom=[c.state / 1e6 for c in timed], label="within it")
    memory.set_ylabel("MB of physical memory")
    memory.legend()
    figure.suptitle(f"{result.job}: {result.description}", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
