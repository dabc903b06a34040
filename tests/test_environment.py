"""docs/environment.md lists exactly the environment variables that the code reads."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jumar

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "environment.md").read_text()


def _documented() -> set[str]:
    return set(re.findall(r"^\| `(JUMAR_[A-Z0-9_]+)` \|", PAGE, flags=re.MULTILINE))


def _read_in_cpp() -> set[str]:
    text = "".join(p.read_text() for ext in ("h", "cc") for p in (ROOT / "src").rglob(f"*.{ext}"))
    return set(re.findall(r'getenv\("(JUMAR_[A-Z0-9_]+)"\)', text))


def _strings_by_name(tree: ast.Module) -> dict[str, str]:
    """Module-level NAME = "text"."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def _read_in_python(path: Path) -> set[str]:
    """Keys of os.environ[...], os.environ.get(...), os.getenv(...), `... in os.environ`, given as text or constant."""
    tree = ast.parse(path.read_text())
    names = _strings_by_name(tree)
    keys: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            keys.append(node.slice)
        elif isinstance(node, ast.Call) and node.args:
            if ast.unparse(node.func) in ("os.environ.get", "os.getenv", "os.environ.pop"):
                keys.append(node.args[0])
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            keys.append(node.left)
    found = set()
    for key in keys:
        if isinstance(key, ast.Constant):
            found.add(key.value)
        elif isinstance(key, ast.Name) and key.id in names:
            found.add(names[key.id])
    return {name for name in found if isinstance(name, str) and name.startswith("JUMAR_")}


def test_table_equals_code():
    read = _read_in_cpp()
    for folder in ("python", "tests", "tools", "examples", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            read |= _read_in_python(path)
    assert read == _documented()


def _run(**environment: str) -> subprocess.CompletedProcess[str]:
    code = "import jumar; print(jumar.simd_target())"
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


@pytest.mark.parametrize("target", jumar.simd_targets())
def test_simd_caps_the_level(target):
    assert _run(JUMAR_SIMD=target).stdout.strip() == target


def test_simd_unknown_name_is_an_error():
    done = _run(JUMAR_SIMD="AVX9")
    assert done.returncode != 0
    assert 'JUMAR_SIMD: unknown or unusable SIMD target "AVX9"; usable here: ' in done.stderr
