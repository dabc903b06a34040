"""The documented model table is the one that the code makes."""

from pathlib import Path

import pytest

from jumar import hf
from jumar.convert import known_converters

pytest.importorskip("transformers", minversion="5.0")
PAGE = Path(__file__).parent.parent / "docs" / "converters.md"
BEGIN, END = "<!-- model table: begin -->\n", "<!-- model table: end -->"


def test_model_table_is_generated():
    """On failure: put the output of ``python -c 'from jumar import hf; print(hf.model_table())'`` there."""
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == hf.model_table()


def test_every_converter_is_documented():
    text = PAGE.read_text()
    for name, converter in known_converters().items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        for word in (*converter.aliases, *converter.operators):
            assert f"`{word}`" in row


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl", "qwen3_vl", "qwen3_5_moe", "deepseek_v3"])
def test_table_counts_what_really_was_replaced(name):
    """A column says "-" or a reason in brackets exactly where nothing was replaced."""
    from jumar.hf.table import model_reports

    report = model_reports([name])[name]
    row = hf.model_table([name]).splitlines()[2].split(" | ")[1:]
    for cell, (converter, counts) in zip(row, report.counts().items(), strict=True):
        assert ("`" in cell) == (counts["replaced"] > 0), converter
        assert ("(" in cell) == (counts["skipped"] > 0), converter
