"""``docs/performance.md`` from the CSV files that ``jumar bench --csv`` writes: every figure of the page is in them."""

from __future__ import annotations

import csv
from pathlib import Path

_HEAD = """# Performance

The latest run of `jumar bench`, made into a page by `tools/performance` from the CSV files in [performance/](performance).
These machines are shared: ratios and percentages mean something, milliseconds do not. How everything is measured:
[benchmarks](benchmarks.md). On your machine: `make performance`, under ten minutes on two cores.
"""


def _read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _ms(row: dict[str, str], name: str) -> str:
    text = row[name]
    if not text:
        return "-"
    milliseconds = float(text) * 1e3
    return f"{milliseconds:.{3 if milliseconds < 1 else 1 if milliseconds < 100 else 0}f}"


def _ratio(text: str) -> str:
    return f"{float(text):.2f}x" if text else "-"


def _table(headings: list[str], lines: list[list[str]], right: int) -> str:
    """A Markdown table whose columns from ``right`` on are aligned to the right."""
    rule = ["---"] * right + ["---:"] * (len(headings) - right)
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, rule, *lines]) + "\n"


def machine_text(row: dict[str, str]) -> str:
    """One sentence about the machine of a row."""
    text = (
        f"{row['cpu']}, {row['threads']} threads, jumar on {row['simd']}, torch {row['torch']} on {row['aten']}, "
        f"{row['date']}."
    )
    if "copy_gbs" in row:
        bf16 = float(row["bf16_gflops"])
        dot = f", bf16 dot products {bf16:.0f} GFLOP/s" if bf16 else ""
        text += (
            f" Limits in the same run: copy {float(row['copy_gbs']):.1f} GB/s, fp32 multiply-add "
            f"{float(row['fma_gflops']):.0f} GFLOP/s{dot}."
        )
    return text


def operators(rows: list[dict[str, str]]) -> str:
    """The table of operators, and those below target."""
    lines = []
    for row in rows:
        percent = row["percent"]
        limit = f"{float(percent):.0f} % {row['limit']}" if row["limit"] else "-"
        if row["note"].startswith("wrong"):
            limit = "wrong: not timed"
        direction = "both" if "backward" in row["direction"] else "forward"
        lines.append(
            [f"`{row['op']}`", row["dtype"], f"{row['shape']} {row['sizes']}", direction]
            + [_ms(row, f"{name}_min") for name in ("eager", "inductor", "jumar")]
            + [_ratio(row["to_eager"]), _ratio(row["to_inductor"]), limit]
        )
    headings = ["operator", "dtype", "shape", "direction", "eager ms", "Inductor ms", "jumar ms"]
    text = _table([*headings, "to eager", "to Inductor", "of the limit"], lines, 4)
    text += (
        "\nMinima; ratios above 1: jumar is faster. both: forward + backward. The limit: bytes that must move by copy "
        "bandwidth, or FLOPs by the multiply-add peak (bf16 dot products for bf16 where the CPU has them), whichever "
        "takes longer.\n"
    )
    notes = dict.fromkeys(f"{r['op']} {r['dtype']}: {r['note']}" for r in rows if r["note"])
    if notes:
        text += "\n" + "".join(f"* {note}\n" for note in notes)
    misses = [miss for row in rows for miss in row["below_target"].split("; ") if miss]
    below = "Below target ([why](benchmarks.md#why-some-stay-below)):\n"
    text += f"\n{below}\n" if misses else "\nEvery operator reaches its target.\n"
    return text + "".join(f"* {miss}\n" for miss in misses)


def steps(rows: list[dict[str, str]]) -> str:
    """The table of training steps."""
    lines = []
    for row in rows:
        ratios = [row["to_jumar_minimum"], row["to_jumar_median"]] if row["contender"] != "jumar" else ["", ""]
        peak, state = float(row["peak"]), float(row["state"])
        speed = f"{float(row['tokens_per_second']):,.0f}" if row["tokens_per_second"] else row["note"] or "-"
        lines.append(
            [f"`{row['job']}`: {row['description']}", row["contender"], _ms(row, "min"), _ms(row, "median")]
            + [_ratio(ratio) for ratio in ratios]
            + [speed, f"{peak / 1e6:,.0f}" if peak else "-", f"{(peak - state) / 1e6:,.0f}" if peak else "-"]
        )
    headings = ["job", "contender", "step ms", "median", "to it", "of medians", "tokens/s", "peak MB", "above state"]
    text = _table(headings, lines, 2)
    return text + (
        "\nto it: how many times longer than jumar. peak: of physical memory, a process a contender; above state: over what "
        "is there before a step (weights, optimizer states, code).\n"
    )


def render(folder: Path) -> str:
    """The page for the sub-folders of ``folder`` that hold CSV files: one section an instruction set."""
    text = _HEAD
    for measured in sorted(folder.glob("*/operators.csv")):
        name = measured.parent.name
        title = name.upper() if not name.endswith("-held") else f"Held to {name.removesuffix('-held').upper()}"
        rows = _read(measured)
        text += f"\n## {title}\n\n{machine_text(rows[0])}\n\n{operators(rows)}"
        if (folder / name / "operators.png").exists():
            text += f"\n![ratios and percentages]({folder.name}/{name}/operators.png)\n"
        found = [row for file in sorted((folder / name).glob("step_*.csv")) for row in _read(file)]
        if found:
            text += f"\n### A training step\n\n{machine_text(found[0])}\n\n{steps(found)}"
    return text
