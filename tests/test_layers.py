"""docs/layers.md, checked: the tables of that page are the rules, every #include and import of the code is held to them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "layers.md").read_text()


def _table(heading: str) -> dict[str, set[str]]:
    """First column -> the words in code quotes of the last one."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip().strip("`"): set(re.findall(r"`([^`]+)`", row[-1])) for row in rows}


def _cpp_files() -> list[Path]:
    return [
        p
        for base in ("include", "src")
        for ext in ("h", "cc")
        for p in sorted((ROOT / base).rglob(f"*.{ext}"))
    ]


def _includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', path.read_text(), flags=re.MULTILINE)


def _room(include: str) -> str | None:
    """The room that an include leads to; None for the standard library and the system."""
    first = include.split("/")[0]
    if first == "jumar":
        return "include/jumar"
    if first in ("base", "simd", "kernels", "testing"):
        return f"src/{first}"
    if first == "torch":
        inside = (ROOT / "src" / include).exists()
        return "src/torch" if inside else "torch"
    return first if first in ("hwy", "ATen", "c10") else None


def _functions(path: Path) -> list[tuple[str, ...]]:
    """Name and types of the parameters of what a file defines in the namespace of a SIMD target."""
    found = []
    for body in re.findall(r"^namespace HWY_NAMESPACE \{$(.*?)^\}  // namespace HWY_NAMESPACE$", path.read_text(), re.M | re.S):
        body = re.sub(r"^namespace \{$.*?^\}  // namespace$", "", body, flags=re.M | re.S)
        for name, given in re.findall(r"^[A-Za-z][\w:<>*&, ]* \**(\w+)\(([^;{}]*?)\) \{$", body, re.M):
            kinds = (re.sub(r"\s*\b\w+$", "", " ".join(p.split())) for p in given.split(","))
            found.append((name, *kinds))
    return found


def test_what_two_files_define_for_a_target_has_two_names():
    """Templates of one name and one list of types are one to the linker, whichever file they come from."""
    files: dict[tuple[str, ...], set[str]] = {}
    for path in (p for p in _cpp_files() if p.suffix == ".cc"):
        for function in _functions(path):
            files.setdefault(function, set()).add(str(path.relative_to(ROOT)))
    assert ("ScaleRows", "void*", "int64_t", "int64_t", "int64_t", "const void*") in files
    assert {f: sorted(where) for f, where in files.items() if len(where) > 1} == {}


def test_the_page_names_every_folder():
    cpp = {f"src/{p.name}" for p in (ROOT / "src").iterdir() if p.is_dir()} | {"include/jumar"}
    assert set(_table("C++")) == cpp
    package = ROOT / "python" / "jumar"
    python = {p.stem for p in package.glob("*.py")} | {
        p.parent.name for p in package.glob("*/__init__.py")
    }
    assert python - {"__init__", "__main__"} <= set(_table("Python"))


@pytest.mark.parametrize("path", _cpp_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_includes_point_downwards(path):
    rules = _table("C++")
    relative = path.relative_to(ROOT)
    room = "/".join(relative.parts[:2])
    allowed = rules[room] | ({"src/kernels"} if room == "src/kernels" else set())
    if path.stem.endswith(("_test", "_bench")):
        allowed = allowed | {"src/testing"}
    for include in _includes(path):
        target = _room(include)
        assert target is None or target in allowed, f"{relative} includes {include}"
        if room == "src/kernels" and target == "src/kernels":
            family = include.split("/")[1]
            own = family in (relative.parts[2], "gemm")
            assert own or (path.stem.endswith("_bench") and family == "limits"), (
                f"{relative} includes {include} of another family"
            )
        if target == "torch":
            assert include.startswith(
                ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
            ), f"{relative} includes {include}, which is not part of the stable ABI"


def _imports(path: Path) -> set[str]:
    """Every module that a file imports, those within functions too, `from jumar import x` as jumar.x."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "jumar":
                found |= {f"jumar.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


def _python_files() -> list[Path]:
    return sorted((ROOT / "python" / "jumar").rglob("*.py"))


@pytest.mark.parametrize("path", _python_files(), ids=lambda p: str(p.relative_to(ROOT / "python")))
def test_imports_point_downwards(path):
    rules = _table("Python")
    parts = path.relative_to(ROOT / "python" / "jumar").with_suffix("").parts
    own = parts[0]
    modules = {p.stem for p in _python_files()} | {p.parent.name for p in _python_files()}
    if own not in ("__init__", "__main__", "cli", "cli_runs"):
        for name in _imports(path):
            if name.startswith("jumar."):
                target = name.split(".")[1]
                # Names that `jumar` itself re-exports (jumar.convert is a package, jumar.simd_target a function).
                if target in modules:
                    assert target in rules[own] | {own}, f"{own} imports {name}"
    outside = {name.split(".")[0] for name in _imports(path)}
    if own not in ("titan", "titan02", "compat", "train"):
        assert "torchtitan" not in outside
    if own not in ("hf", "models", "verify", "train", "convert"):
        assert "transformers" not in outside
    assert "torch_npu" not in outside
    assert "triton" not in outside


def test_import_jumar_is_light():
    """`import jumar` loads none of the libraries that only some features need."""
    code = "import jumar, sys; print([m for m in ('transformers', 'torchtitan', 'datasets', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_stay_short():
    """About 500 lines at most; code that grows beyond is split."""
    files = _cpp_files() + _python_files()
    long = {
        str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 520
    }
    assert not long
