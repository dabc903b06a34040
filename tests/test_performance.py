"""docs/performance.md is what its CSV files say."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from jumar.bench import page

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "performance" / "avx2"


def test_page_and_csv_agree():
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "performance", "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_figure_of_the_csv_is_on_the_page(tmp_path):
    """The page follows the CSV: another figure there is another figure on the page."""
    source = FOLDER / "operators.csv"
    with open(source, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    index = next(i for i, row in enumerate(rows) if row["to_eager"])
    shown = page.operators(rows)
    assert f"{float(rows[index]['to_eager']):.2f}x" in shown
    rows[index]["to_eager"] = "1234.5678"
    assert "1234.57x" in page.operators(rows)
    rows[index]["note"] = "wrong: y is off"
    assert "wrong: not timed" in page.operators(rows)


def test_the_page_has_every_operator_and_the_machine():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    with open(FOLDER / "operators.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["simd"] in text and "GB/s" in text and "operators.png" in text
    for name in {row["op"] for row in rows}:
        assert f"`{name}`" in text
    for row in rows:
        assert all(miss in text for miss in row["below_target"].split("; "))


def test_an_empty_folder_gives_a_page(tmp_path):
    assert page.render(tmp_path).startswith("# Performance")
