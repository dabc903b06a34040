"""The README's generated tables are what the code says, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_generated_tables_are_up_to_date():
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "readme", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_links_of_every_page_lead_to_files():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    missing = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http") and not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert not missing, missing


def test_every_operator_of_the_table_has_a_page():
    import jumar.opinfo

    for name in jumar.opinfo.OPERATORS:
        assert (ROOT / jumar.opinfo.find(name).doc).exists(), name
