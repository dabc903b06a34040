"""A run as one HTML page that loads nothing: styles, plots and numbers are in it. Its form is ``report.html.jinja``."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import jinja2
from markupsafe import Markup

from jumar.train import report_plots
from jumar.train.experts import balance
from jumar.train.records import settled
from jumar.train.text import duration

#: More records than this are thinned in the table; all of them are embedded as data.
_MOST_ROWS = 1000
_PROFILE_ROWS = 40
_COUNTS = ("planned", "replaced", "skipped", "modules", "calls", "backward_calls")


def _clean(value: Any) -> Any:
    """None as nothing; characters that no HTML page may hold are replaced."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", "\ufffd", value)
    return "" if value is None else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def number(value: Any, form: str = ",.4g") -> Any:
    """A number for people that carries its exact value: ``<data value="...">``; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    shown = f"{value:{form}}" if math.isfinite(value) else str(value)
    return Markup(f'<data value="{value!r}">{shown}</data>')


def render(run: dict[str, Any]) -> str:
    """The page. ``run`` is what :func:`jumar.train.report.collect` gives."""
    values = run.get("job", {}).get("values", {})
    state, ending = _ending(run)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("jumar.train", ""), undefined=jinja2.ChainableUndefined, autoescape=True, finalize=_clean
    )
    return environment.get_template("report.html.jinja").render(
        run=run,
        values=values,
        title=run.get("model") or _model(values) or "training run",
        state=state,
        ending=ending,
        facts=_facts(run, values),
        plots=[Markup(plot) for plot in _plots(run) if plot],
        experts=_experts(run["records"]),
        sessions=[_session(s) for s in run["sessions"]],
        counts=[name.replace("_", " ") for name in _COUNTS],
        operators=[
            [row.get("converter"), row.get("operator"), *(number(row.get(name), ",") for name in _COUNTS)]
            for row in run.get("operators") or []
        ],
        calls=[[name, number(count, ",")] for name, count in sorted((run.get("calls") or {}).items())],
        **_sites(run.get("report") or {}),
        profile=_profile(run),
        **_eager(run),
        checkpoints=[
            [c["name"], number(c["step"], "d"), f"{c['bytes'] / 2**20:,.1f} MiB", c["state"]] for c in run["checkpoints"]
        ],
        json=_json,
        environment=[
            [name, _flat(value)] for name, value in (run.get("environment") or {}).items() if value not in (None, [], {}, "")
        ],
        records=_records(run["records"]),
        data=_data(run),
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


def _facts(run: dict[str, Any], values: dict[str, Any]) -> list[tuple[Any, str]]:
    """What stands at the head of the page: (value, name)."""
    records = run["records"]
    facts: list[tuple[Any, str]] = []
    if records:
        first, last = (number(record.get("loss"), ".4f") for record in (records[0], records[-1]))
        facts.append((Markup("{} → {}").format(first, last), "loss"))
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
        facts.append((run["processes"], "processes"))
    seconds = sum(s.get("seconds") or 0 for s in run["sessions"])
    if seconds:
        facts.append((duration(seconds), "time"))
    most = [r["peak_memory_bytes"] for r in records if r.get("peak_memory_bytes")]
    if most:
        facts.append((f"{max(most) / 2**30:.2f} GiB", "peak memory"))
    return facts


def _plots(run: dict[str, Any]) -> list[str | None]:
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
    return [report_plots.draw(curves, name, log=name == "tokens per second" and bool(eager)) for name, curves in plots]


def _experts(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Tokens per expert in the last step that was recorded, a row a layer."""
    counted = [record for record in records if record.get("tokens_per_expert")]
    if not counted:
        return None
    layers = counted[-1]["tokens_per_expert"]
    width = max(map(len, layers.values()))
    return {
        "step": counted[-1]["step"],
        "layers": [
            [name, number(balance(counts), ".3f"), number(max(counts), ","), number(min(counts), ","), number(counts.count(0), "d")]
            for name, counts in layers.items()
        ],
        "headings": ["layer", *range(width)],
        "every": [
            [name, *(number(count, ",") for count in counts), *[""] * (width - len(counts))] for name, counts in layers.items()
        ],
    }


def _session(session: dict[str, Any]) -> list[Any]:
    seconds = session.get("seconds")
    time = None if seconds is None else duration(seconds)
    names = ("state", "steps", "resumed_from", "process")
    return [session.get("started"), session.get("ended"), time, *map(session.get, names)]


def _sites(report: dict[str, Any]) -> dict[str, Any]:
    """Places in the model, those that differ by the number of a layer in one row."""
    groups: dict[tuple[str, ...], int] = {}
    for site in report.get("sites", []):
        path = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", site.get("path", ""))
        key = (site.get("converter", ""), path or "(the model)", *(site.get(k, "") for k in ("module_class", "status", "reason")))
        groups[key] = groups.get(key, 0) + 1
    skipped = sum(1 for key in groups if key[3] == "skipped")
    return {
        "sites": [[*key, number(count, ",")] for key, count in groups.items()],
        "sites_title": f"places in the model ({sum(groups.values())}; {skipped} kinds were left alone)",
    }


def _profile(run: dict[str, Any]) -> dict[str, Any] | None:
    found = run["profile"]
    if not found:
        return None
    from jumar.profile.render import cells, headings, summary
    from jumar.profile.table import OperatorRow, OperatorTable

    names = OperatorRow.__dataclass_fields__
    rows = [OperatorRow(**{k: v for k, v in row.items() if k in names}) for row in found.get("operators", [])]
    operators = OperatorTable(found["trace"], found["steps"], found["wall_us"], found["limits"], rows)
    made = [[row.operator, row.kind, *cells(row)] for row in rows]
    columns = headings(False)
    return {
        "summary": summary(operators),
        "headings": columns,
        "rows": made[:_PROFILE_ROWS],
        "rest": made[_PROFILE_ROWS:],
        "numeric": range(2, len(columns)),
    }


def _eager(run: dict[str, Any]) -> dict[str, Any]:
    eager = {record["step"]: record for record in run["eager"]}
    pairs = [(record, eager[record["step"]]) for record in run["records"] if record["step"] in eager]
    rows = [
        [number(f["step"], "d"), number(f.get("loss"), ".5f"), number(e.get("loss"), ".5f"),
         f"{f['loss'] - e['loss']:+.2e}", number(f.get("tokens_per_second"), ",.0f"), number(e.get("tokens_per_second"), ",.0f")]
        for f, e in pairs
    ]  # fmt: skip
    return {"eager": rows, "ours": settled(run["records"]), "theirs": settled(run["eager"])}


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_flat(v)}" for k, v in value.items() if v not in (None, [], {}))
    if isinstance(value, list):
        return "; ".join(_flat(part) for part in value)
    return str(value)


_FORMS = {"loss": ".6f", "max_loss": ".6f", "validation_loss": ".6f", "grad_norm": ".4f", "lr": ".4g", "tokens_seen": ","}


def _records(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not records:
        return None
    names = [n for n in dict.fromkeys(name for record in records for name in record) if n != "tokens_per_expert"]
    stride = math.ceil(len(records) / _MOST_ROWS)
    last = len(records) - 1
    shown = [r for i, r in enumerate(records) if i % stride == 0 or i == last]
    return {
        "title": f"{len(records)} records" if stride == 1 else f"every {stride}th of {len(records)} records; all are in this page as data",
        "headings": [n.replace("_", " ") for n in names],
        "rows": [[number(r.get(n), "d" if n == "step" else _FORMS.get(n, ",.4g")) for n in names] for r in shown],
    }


def _data(run: dict[str, Any]) -> Markup:
    """All records as JSON lines, for programs: ``<script type="application/json" id="records">``."""
    lines = ",\n".join(json.dumps(_finite(record)) for record in run["records"])
    return Markup(lines.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinities and no NaN: they are strings."""
    return {k: json.dumps(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
