"""tools/mutate on a tree of one function: what it says of each way in which a mutant can end."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """def first_power(base, limit):
    power = 1
    while power < limit:
        power *= base
    return power
"""
TEST = """from thing import first_power

def test_first_power():
    assert first_power(2, 9) == 16
"""
MUTANTS = {
    "killed": ("power *= base", "power += base"),
    "timed out": ("power *= base", "power *= 1"),
    "SURVIVED": ("power < limit", "power <= limit"),
    "text found 0 times, must be once": ("power > limit", "power < limit"),
}


@pytest.fixture
def mutate(tmp_path, monkeypatch):
    source = str(Path(__file__).parent.parent / "tools" / "mutate")
    loader = importlib.machinery.SourceFileLoader("mutate", source)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("mutate", loader))
    monkeypatch.setitem(sys.modules, "mutate", module)  # its data classes look themselves up
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    for name, text in {"python/thing.py": CODE, "tests/test_thing.py": TEST, "pyproject.toml": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LEAST_S", 5)
    monkeypatch.setattr(module.Sandbox, "library", lambda self: None)

    def run(*verdicts):
        entries = (
            f"[[mutation]]\nfile = 'python/thing.py'\nfind = '{find}'\nreplace = '{replace}'\ntest = 'tests/test_thing.py'\n"
            for find, replace in (MUTANTS[v] for v in verdicts)
        )
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / "tools" / "mutations.toml").write_text("".join(entries))
        monkeypatch.setattr(sys, "argv", ["mutate", "--work-dir", str(tmp_path / "build")])
        return module.main()

    return run


def test_verdicts(mutate, capsys):
    assert mutate(*MUTANTS) == 1
    lines = capsys.readouterr().out.splitlines()
    for verdict, line in zip(MUTANTS, lines, strict=False):
        assert line.startswith(verdict), line
    assert lines[4] == "2 of 4 mutants killed, 1 of them by a test that timed out"
    assert [line.split("]: ")[1] for line in lines[5:]] == ["timed out", *list(MUTANTS)[2:]]


def test_a_mutant_that_hangs_is_found(mutate, capsys):
    assert mutate("killed", "timed out") == 0
    assert "2 of 2 mutants killed, 1 of them by a test that timed out" in capsys.readouterr().out
    assert mutate("killed") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 mutants killed"
