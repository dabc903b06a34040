"""The table of supported models, made by converting them: it can only say what is really replaced."""

from __future__ import annotations

from collections.abc import Iterable

from jumar.convert.planner import kernelize
from jumar.convert.registry import known_converters
from jumar.convert.report import Report

_TITLES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v32": "DeepSeek-V3.2",
}


def model_reports(names: Iterable[str] | None = None) -> dict[str, Report]:
    """The conversion report of each built-in model (see :mod:`jumar.models`), everything that applies."""
    from jumar import models

    return {name: kernelize(models.build(name)) for name in (names or models.available())}


def _cell(report: Report, converter: str) -> str:
    """Replaced classes by tower, with what was left alone in brackets."""
    parts: dict[str, dict[str, None]] = {}
    for site in report.sites:
        if site.converter != converter:
            continue
        tower = "vision" if ".visual." in f".{site.path}." else "text"
        text = (
            f"`{site.module_class}`"
            if site.status == "replaced"
            else f"({site.module_class}: {site.reason})"
        )
        parts.setdefault(tower, {})[text] = None
    if not parts:
        return "-"
    if set(parts) == {"text"}:
        return ", ".join(parts["text"])
    return "; ".join(f"{tower}: {', '.join(found)}" for tower, found in sorted(parts.items()))


def model_table(names: Iterable[str] | None = None) -> str:
    """A Markdown table, one row per built-in model, one column per converter."""
    converters = list(known_converters())
    lines = ["| model | " + " | ".join(f"`{name}`" for name in converters) + " |"]
    lines.append("|---" * (len(converters) + 1) + "|")
    for name, report in model_reports(names).items():
        cells = [_cell(report, converter) for converter in converters]
        lines.append(f"| {_TITLES.get(name, name)} (`{name}`) | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
