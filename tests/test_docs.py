"""Every relative link of the README and of docs/ leads to a file, and every operator has its page with its schema."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from jumar import models, opinfo

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://", "#", "mailto:")):
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        relative = str(page.relative_to(ROOT / "docs"))
        assert relative == "README.md" or f"({relative})" in index, relative


@pytest.mark.parametrize("name", opinfo.OPERATORS)
def test_operator_page_shows_the_schema(name):
    """The page of each operator names it and every argument, with the defaults that torch knows."""
    page = ROOT / opinfo.OPERATORS[name].doc
    text = page.read_text()
    schema = getattr(torch.ops.jumar, name).default._schema
    shown = [line for line in text.splitlines() if line.startswith(f"{name}(")]
    assert shown, f"{page.name} does not show the schema of {name}"
    for argument in schema.arguments:
        assert re.search(rf"\b{argument.name}\b", shown[0]), (
            f"{page.name}: {argument.name} is missing in {shown[0]}"
        )


def test_the_built_in_models_are_listed():
    """The page of the commands names the models that `jumar inspect` and `jumar verify` know, and no others."""
    text = (ROOT / "docs" / "cli.md").read_text()
    listed = re.search(r"built-in tiny model: ([^.]*)\.", text).group(1)
    assert re.findall(r"`(\w+)`", listed) == list(models.BUILT_IN)
