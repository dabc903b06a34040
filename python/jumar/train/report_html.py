"""A run as one HTML page that loads nothing: styles, plots and numbers are in it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from jumar.train import report_plots
from jumar.train.experts import balance
from jumar.train.records import settled
from jumar.train.text import duration

#: More records than this are thinned in the table; all of them are embedded as data.
_MOST_ROWS = 1000
_PROFILE_ROWS = 40

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1e21; background: #fff; max-width: 72rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #d8dbe0; }
p { margin: .4rem 0; } .muted { color: #6a6f78; } code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: #f6f7f9; padding: .8rem; overflow-x: auto; }
.state { display: inline-block; padding: .05rem .6rem; border-radius: .7rem; font-size: .85rem; color: #fff; background: #6a6f78; }
.state.finished { background: #2d7a3a; } .state.failed, .state.killed { background: #b3261e; } .state.stopped { background: #a86200; }
.facts { display: flex; flex-wrap: wrap; gap: .4rem 2.2rem; margin: 1rem 0; padding: 0; list-style: none; }
.facts b { display: block; font-size: 1.15rem; } .facts span { color: #6a6f78; font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: .5rem 1rem; }
.plots figure { margin: 0; } .plots svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .18rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e7e9ed; }
th { border-bottom: 1px solid #9aa0aa; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.warning { border-left: 3px solid #a86200; padding-left: .7rem; } details { margin: .5rem 0; } summary { cursor: pointer; }
""".strip()

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def text(value: Any) -> str:
    """A value as HTML text; characters that no HTML page may hold are replaced."""
    clean = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", "\ufffd", str(value))
    return escape(clean, quote=True)


def number(value: Any, form: str = ",.4g") -> str:
    """A number for people that carries its exact value: ``<data value="...">``."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text(value)
    shown = f"{value:{form}}" if math.isfinite(value) else str(value)
    return f'<data value="{value!r}">{shown}</data>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    """Cells are HTML; ``numeric`` columns are aligned right."""
    right = set(numeric)
    kind = [' class="n"' if i in right else "" for i in range(len(headings))]
    head = "".join(f"<th{k}>{text(h)}</th>" for h, k in zip(headings, kind, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{k}>{cell}</td>" for cell, k in zip(row, kind, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def section(title: str, *parts: str) -> str:
    """A section with a heading; nothing when it would be empty."""
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{text(title)}</h2>\n{body}\n</section>" if body else ""


def details(title: str, body: str) -> str:
    """What is shown on a click; nothing when it would be empty."""
    return f"<details><summary>{text(title)}</summary>\n{body}\n</details>" if body else ""


def render(run: dict[str, Any]) -> str:
    """The page. ``run`` is what :func:`jumar.train.report.collect` gives."""
    values = run.get("job", {}).get("values", {})
    title = run.get("model") or _model(values) or "training run"
    parts = [
        _head(run, title, values),
        section("Warnings", *(f'<p class="warning">{text(w)}</p>' for w in run["warnings"])),
        section("Course", _plots(run)),
        section("Experts", _experts(run["records"])),
        section("How it went", _sessions(run)),
        section("Fused operators", _operators(run), _sites(run)),
        section("Operators in a profiled step", _profile(run)),
        section("Beside eager", _eager(run)),
        section("Checkpoints", _checkpoints(run)),
        section("Job", _job(run)),
        section("Environment", _environment(run.get("environment") or {})),
        section("Records", _records(run["records"])),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{text(title)}: report</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n{body}\n{_data(run)}\n</body>\n</html>\n"
    )


def _model(values: dict[str, Any]) -> str:
    model = values.get("model", {})
    return " ".join(str(model[key]) for key in ("name", "flavor") if model.get(key))


def _ending(run: dict[str, Any]) -> tuple[str, str]:
    """(state, sentence) of the last session."""
    if not run["sessions"]:
        return "unknown", "how the run ended is not known"
    last = run["sessions"][-1]
    state, error, done = last.get("state", "unknown"), last.get("error"), last.get("steps")
    if done is None and run["records"]:
        done = run["records"][-1]["step"]
    after = f" after step {done}" if done is not None else ""
    sentence = {
        "finished": f"finished{after}",
        "stopped": f"stopped by {error}{after}",
        "failed": f"failed with an error{after}: {error}",
        "killed": f"killed{after}: it ended without a word (SIGKILL, out of memory, power)",
        "running": f"running, so far{after or ' no step'}",
    }.get(state, state)
    return state, sentence


def _head(run: dict[str, Any], title: str, values: dict[str, Any]) -> str:
    state, sentence = _ending(run)
    records = run["records"]
    facts: list[tuple[str, str]] = []
    if records:
        facts.append((f"{number(records[0].get('loss'), '.4f')} → {number(records[-1].get('loss'), '.4f')}", "loss"))
        held = [r["validation_loss"] for r in records if "validation_loss" in r]
        if held:
            facts.append((number(held[-1], ".4f"), "validation loss"))
        total = values.get("training", {}).get("steps")
        facts.append((f"{records[-1]['step']}{f' of {total}' if total else ''}", "steps"))
    rate = settled(records)
    if rate is not None:
        facts.append((number(rate, ",.0f"), "tokens/s (median)"))
    if run.get("parameters"):
        facts.append((number(run["parameters"], ","), "parameters"))
    if run.get("processes"):
        facts.append((str(run["processes"]), "processes"))
    seconds = sum(s.get("seconds") or 0 for s in run["sessions"])
    if seconds:
        facts.append((duration(seconds), "time"))
    most = [r["peak_memory_bytes"] for r in records if r.get("peak_memory_bytes")]
    if most:
        facts.append((f"{max(most) / 2**30:.2f} GiB", "peak memory"))
    description = values.get("job", {}).get("description", "")
    items = "".join(f"<li><b>{value}</b><span>{text(name)}</span></li>" for value, name in facts)
    return (
        f'<header>\n<h1>{text(title)} <span class="state {text(state)}">{text(state)}</span></h1>\n'
        + (f"<p>{text(description)}</p>\n" if description else "")
        + f'<p class="muted">{text(sentence)}</p>\n<ul class="facts">{items}</ul>\n</header>'
    )


def _plots(run: dict[str, Any]) -> str:
    records, eager = run["records"], run["eager"]
    curve = report_plots.curve
    plots = (
        ("loss", {"train": curve(records, "loss"), "validation": curve(records, "validation_loss"), "eager": curve(eager, "loss")}),
        ("indexer loss", {"train": curve(records, "indexer_loss"), "eager": curve(eager, "indexer_loss")}),
        ("gradient norm", {"gradient norm": curve(records, "grad_norm")}),
        ("learning rate", {"learning rate": curve(records, "lr")}),
        ("tokens per second", {"fused" if eager else "this run": curve(records, "tokens_per_second"), "eager": curve(eager, "tokens_per_second")}),
        ("busiest expert over the mean", {"mean of layers": curve(records, "expert_balance"), "worst layer": curve(records, "expert_balance_worst")}),
        ("memory, GiB", {"now": curve(records, "memory_bytes", 2**-30), "peak": curve(records, "peak_memory_bytes", 2**-30)}),
    )  # fmt: skip
    figures = [report_plots.draw(curves, name, log=name == "tokens per second" and bool(eager)) for name, curves in plots]
    drawn = "\n".join(f"<figure>{figure}</figure>" for figure in figures if figure)
    if drawn:
        return f'<div class="plots">\n{drawn}\n</div>'
    return "" if not records else '<p class="muted">no plots: matplotlib is not installed</p>'


def _experts(records: list[dict[str, Any]]) -> str:
    """Tokens per expert in the last step that was recorded, a row a layer."""
    counted = [record for record in records if record.get("tokens_per_expert")]
    if not counted:
        return ""
    last = counted[-1]
    layers = last["tokens_per_expert"]
    rows = [
        [text(name), number(balance(counts), ".3f"), number(max(counts), ","), number(min(counts), ","),
         number(sum(1 for count in counts if not count), "d")]
        for name, counts in layers.items()
    ]  # fmt: skip
    headings = ("layer", "balance", "most tokens", "fewest", "experts without")
    width = max(map(len, layers.values()))
    every = [[text(name), *(number(count, ",") for count in counts), *[""] * (width - len(counts))] for name, counts in layers.items()]
    return (
        f'<p class="muted">step {last["step"]}; balance is the busiest expert\'s tokens over the mean: 1 is even</p>'
        + table(headings, rows, range(5))
        + details("tokens of every expert", table(("layer", *map(str, range(width))), every, range(width + 1)))
    )


def _sessions(run: dict[str, Any]) -> str:
    headings = ("started", "ended", "time", "state", "last step", "resumed from", "process")
    rows = []
    for s in run["sessions"]:
        seconds = s.get("seconds")
        rows.append(
            [text(s.get("started") or ""), text(s.get("ended") or ""), duration(seconds) if seconds is not None else "",
             text(s.get("state", "")), text("" if s.get("steps") is None else s["steps"]), text(s.get("resumed_from") or ""),
             text(s.get("process", ""))]
        )  # fmt: skip
    traces = [
        f"<pre>{text(s['error'])}</pre>" + details("traceback", f"<pre>{text(s['traceback'])}</pre>" if s.get("traceback") else "")
        for s in run["sessions"]
        if s.get("state") == "failed"
    ]
    return (table(headings, rows, [2, 4]) if rows else "") + "\n".join(traces)


def _operators(run: dict[str, Any]) -> str:
    rows = run.get("operators") or []
    if not rows:
        return ""
    counts = ("planned", "replaced", "skipped", "modules", "calls", "backward_calls")
    cells = [
        [text(row.get("converter", "")), text(row.get("operator", "")), *(number(row.get(name), ",") for name in counts)]
        for row in rows
    ]
    headings = ("converter", "operator", *(name.replace("_", " ") for name in counts))
    every = run.get("calls") or {}
    calls = table(("operator", "calls"), [[text(n), number(c, ",")] for n, c in sorted(every.items())], [1])
    return table(headings, cells, range(2, 8)) + details("calls of every operator, counted in C++", calls if every else "")


def _sites(run: dict[str, Any]) -> str:
    """Places in the model, those that differ by the number of a layer in one row."""
    report = run.get("report") or {}
    groups: dict[tuple[str, ...], int] = {}
    for site in report.get("sites", []):
        path = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", site.get("path", ""))
        key = (site.get("converter", ""), path or "(the model)", site.get("module_class", ""), site.get("status", ""), site.get("reason", ""))
        groups[key] = groups.get(key, 0) + 1
    rows = [[*(text(part) for part in key), number(count, ",")] for key, count in groups.items()]
    unmatched = report.get("unmatched") or []
    note = f"<p>matched nothing: {text(', '.join(unmatched))}</p>" if unmatched else ""
    if not rows:
        return note
    headings = ("converter", "module", "class", "status", "reason", "sites")
    skipped = sum(1 for key in groups if key[3] == "skipped")
    title = f"places in the model ({len(report['sites'])}; {skipped} kinds were left alone)"
    return note + details(title, table(headings, rows, [5]))


def _profile(run: dict[str, Any]) -> str:
    found = run["profile"]
    if not found:
        return ""
    from jumar.profile.render import cells, headings, summary
    from jumar.profile.table import OperatorRow, OperatorTable

    names = OperatorRow.__dataclass_fields__
    rows = [OperatorRow(**{k: v for k, v in row.items() if k in names}) for row in found.get("operators", [])]
    operators = OperatorTable(found["trace"], found["steps"], found["wall_us"], found["limits"], rows)
    made = [[text(row.operator), row.kind, *(text(cell) for cell in cells(row))] for row in rows]
    columns = headings(False)
    right = range(2, len(columns))
    steps = ", ".join(str(step) for step in found["steps_profiled"])
    lines = "".join(f"<p>{text(line)}</p>" for line in summary(operators))
    rest = made[_PROFILE_ROWS:]
    return (
        f'{lines}<p class="muted">traces end with step {text(steps)}; this is the last one</p>'
        + table(columns, made[:_PROFILE_ROWS], right)
        + details(f"{len(rest)} more", table(columns, rest, right) if rest else "")
    )


def _eager(run: dict[str, Any]) -> str:
    eager = {record["step"]: record for record in run["eager"]}
    pairs = [(record, eager[record["step"]]) for record in run["records"] if record["step"] in eager]
    if not pairs:
        return ""
    rows = [
        [number(f["step"], "d"), number(f.get("loss"), ".5f"), number(e.get("loss"), ".5f"),
         f"{f['loss'] - e['loss']:+.2e}", number(f.get("tokens_per_second"), ",.0f"), number(e.get("tokens_per_second"), ",.0f")]
        for f, e in pairs
    ]  # fmt: skip
    ours, theirs = settled(run["records"]), settled(run["eager"])
    ratio = f"<p>{ours:,.0f} tokens/s beside {theirs:,.0f}: <b>{ours / theirs:.2f}x</b></p>" if ours and theirs else ""
    headings = ("step", "loss", "eager loss", "difference", "tokens/s", "eager tokens/s")
    return ratio + table(headings, rows, range(6))


def _checkpoints(run: dict[str, Any]) -> str:
    rows = [
        [text(c["name"]), number(c["step"], "d"), f"{c['bytes'] / 2**20:,.1f} MiB", text(c["state"])] for c in run["checkpoints"]
    ]
    exported = run.get("hf_folder")
    line = f"<p>model for transformers: <code>{text(exported)}</code></p>" if exported else ""
    return (table(("checkpoint", "step", "size", "state"), rows, [1, 2]) if rows else "") + line


def _job(run: dict[str, Any]) -> str:
    job = run.get("job") or {}
    given = job.get("overrides") or []
    overrides = f"<p>from the command line:</p><pre>{text(chr(10).join(given))}</pre>" if given else ""
    values = [
        f"[{section_}]\n" + "\n".join(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in keys.items())
        for section_, keys in (job.get("values") or {}).items()
    ]
    whole = details("every value", f"<pre>{text(chr(10).join(values))}</pre>" if values else "")
    written = f"<p><code>{text(job.get('file', ''))}</code></p><pre>{text(job['text'])}</pre>" if job.get("text") else ""
    return written + overrides + whole


def _environment(facts: dict[str, Any]) -> str:
    def flat(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{k}: {flat(v)}" for k, v in value.items() if v not in (None, [], {}))
        if isinstance(value, list):
            return "; ".join(flat(part) for part in value)
        return str(value)

    rows = [[text(name), text(flat(value))] for name, value in facts.items() if value not in (None, [], {}, "")]
    return table(("", ""), rows) if rows else ""


_FORMS = {"loss": ".6f", "max_loss": ".6f", "validation_loss": ".6f", "grad_norm": ".4f", "lr": ".4g", "tokens_seen": ","}


def _records(records: list[dict[str, Any]]) -> str:
    if not records:
        return '<p class="muted">no step was recorded</p>'
    names = [n for n in dict.fromkeys(name for record in records for name in record) if n != "tokens_per_expert"]
    stride = math.ceil(len(records) / _MOST_ROWS)
    last = len(records) - 1
    shown = [r for i, r in enumerate(records) if i % stride == 0 or i == last]
    rows = [[number(r.get(n), "d" if n == "step" else _FORMS.get(n, ",.4g")) for n in names] for r in shown]
    title = f"{len(records)} records" if stride == 1 else f"every {stride}th of {len(records)} records; all are in this page as data"
    return details(title, table([n.replace("_", " ") for n in names], rows, range(len(names))))


def _data(run: dict[str, Any]) -> str:
    """All records as JSON lines, for programs: ``<script type="application/json" id="records">``."""
    lines = ",\n".join(json.dumps(_finite(record)) for record in run["records"])
    safe = lines.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="records">[\n{safe}\n]</script>'


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinities and no NaN: they are strings."""
    return {k: json.dumps(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
