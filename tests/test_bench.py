"""jumar.bench: shapes, interleaving, limits, and that wrong results are never timed. No time is asserted."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import platform
import subprocess
import sys

import pytest
import torch

from jumar import bench
from jumar.bench import timing
from jumar.opinfo import OPERATORS

REGISTERED = [info for info in OPERATORS.values() if info.registered]


def test_shapes():
    for info in OPERATORS.values():
        shapes = bench.read_shapes(info.shapes_file)
        assert list(shapes)[:2] == ["small", "odd"]
        first = math.prod(shapes["small"].values())
        assert all(math.prod(sizes.values()) >= first for sizes in shapes.values())
        assert any(size % 2 for size in shapes["odd"].values())
    with pytest.raises(ValueError, match="did you mean 'small'"):
        bench.pick("linear", "smal")


def test_malformed_shapes(tmp_path, monkeypatch):
    from jumar.bench import shapes

    monkeypatch.setattr(shapes, "_FOLDER", tmp_path)
    for text in ("a rows=x", "a rows", "a rows=1\na rows=2", "a"):
        (tmp_path / "bad.txt").write_text(text)
        with pytest.raises(ValueError, match=r"bad.txt:\d: "):
            shapes.read_shapes("bad")


def test_interleave():
    calls: list[str] = []
    timings = bench.interleave(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=4, sample=0
    )
    assert timings["a"].samples == timings["b"].samples == 4
    assert 0 < timings["a"].minimum <= timings["a"].median
    # one uncounted call, one to estimate, then turns whose order rotates
    assert "".join(calls) == "aabb" + "abbaabba"


_FAULTS = """
import resource, torch
def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)  # 64 MiB, 16384 pages
    torch.ones(1 << 23)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin
faults()
print(max(faults() for _ in range(5)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunables of glibc")
def test_kept_memory_is_not_mapped_again():
    """What was freed is handed out again: no page faults once a size has been used."""
    environment = {**os.environ, "GLIBC_TUNABLES": timing.KEEP_MEMORY}
    result = subprocess.run(
        [sys.executable, "-c", _FAULTS], env=environment, capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 1000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunables of glibc")
def test_restart(monkeypatch):
    seen = []
    monkeypatch.setattr(os, "execve", lambda *arguments: seen.append(arguments))
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    timing.restart_keeping_memory(["bench", "--quick"])
    program, arguments, environment = seen[0]
    assert arguments == [program, "-m", "jumar", "bench", "--quick"]
    assert environment["GLIBC_TUNABLES"] == timing.KEEP_MEMORY
    monkeypatch.setenv("GLIBC_TUNABLES", timing.KEEP_MEMORY)
    timing.restart_keeping_memory(["bench", "--quick"])
    assert len(seen) == 1 and timing.keeps_memory()


def test_limits():
    limits = bench.measure(quick=True)
    assert limits.copy_gbs > 0 and limits.fma_gflops > 0 and limits.bf16_gflops >= 0
    assert limits.flops_limit(torch.float32) == limits.fma_gflops
    better = limits.better(dataclasses.replace(limits, copy_gbs=1e9, fma_gflops=0.0))
    assert (better.copy_gbs, better.fma_gflops) == (1e9, limits.fma_gflops)


def test_plan(monkeypatch):
    jobs = bench.plan(["npu_rms_norm"], None, "small,odd")
    assert [(job.dtype, job.shape_name) for job in jobs] == [
        (torch.float32, "small"),
        (torch.float32, "odd"),
        (torch.bfloat16, "small"),
        (torch.bfloat16, "odd"),
    ]
    # quick: the marked shape; before it the smallest where eager's bf16 products may be slow
    quick = bench.plan(["npu_rms_norm", "npu_linear"], None, None, quick=True)
    assert [job.shape_name for job in quick if job.info.name == "npu_rms_norm"] == ["hidden1024"] * 2
    for simd, expected in (("AVX2", ["small", "square1024"]), ("AVX3_SPR", ["square1024"])):
        monkeypatch.setattr("jumar.simd_target", lambda simd=simd: simd)
        quick = bench.plan(["npu_linear"], [torch.bfloat16], None, quick=True)
        assert [job.shape_name for job in quick] == expected
    monkeypatch.undo()
    assert {job.info.name for job in bench.plan(None, None, None)} == {i.name for i in REGISTERED}
    with pytest.raises(ValueError, match="unknown operator"):
        bench.plan(["nothing"], None, None)
    with pytest.raises(ValueError, match="none of these operators takes int32"):
        bench.plan(["npu_linear"], [torch.int32], None)


@pytest.mark.parametrize("info", REGISTERED, ids=lambda info: info.name)
def test_every_operator_runs(info):
    result = bench.run(
        bench.plan([info.name], [torch.bfloat16], "small"), quick=True, inductor=False
    )
    assert result.ok and len(result.rows) == 1  # quick: forward + backward, or forward where there is no gradient
    for row in result.rows:
        assert set(row.timings) == {"eager", "jumar"}
        assert row.ratio("eager") > 0 and row.ratio("inductor") is None
        assert row.percent > 0 and row.ulp <= row.stated


def test_inductor_takes_part():
    result = bench.run(bench.plan(["npu_rms_norm"], [torch.float32], "small"), quick=True)
    assert result.ok
    assert all("inductor" in r.timings or r.note.startswith("Inductor: ") for r in result.rows)


def test_wrong_results_are_not_timed(monkeypatch):
    gemma = OPERATORS["npu_gemma_rms_norm"]
    wrong = dataclasses.replace(OPERATORS["npu_rms_norm"], plain=gemma.plain, terms=gemma.terms)
    monkeypatch.setitem(OPERATORS, "npu_rms_norm", wrong)
    result = bench.run(bench.plan(["npu_rms_norm"], [torch.float32], "small"), quick=True)
    assert not result.ok
    assert result.rows[0].timings == {} and result.rows[0].note.startswith("wrong: ")
    assert not bench.to_dict(result)["ok"]


def test_slow_eager_is_timed_once(monkeypatch):
    from jumar.bench import runner

    monkeypatch.setattr(runner, "SLOW_GFLOPS", 1e9)
    measure = runner.measure  # of a CPU without bf16 dot products
    monkeypatch.setattr(
        runner, "measure", lambda *a, **k: dataclasses.replace(measure(*a, **k), bf16_gflops=0.0)
    )
    jobs = bench.plan(["npu_linear"], [torch.bfloat16], "small,odd")
    small, odd = bench.run(jobs, quick=True, inductor=False).rows
    assert "eager" in small.timings and "eager" not in odd.timings
    assert "smallest shape only" in odd.note


def test_reports(tmp_path, capsys):
    from rich.console import Console

    jobs = bench.plan(["npu_rms_norm"], [torch.float32], "small")
    result = bench.run(jobs, quick=False, inductor=False)
    bench.show(result, Console(width=180))
    out = capsys.readouterr().out
    assert "npu_rms_norm" in out and "copy" in out and "GB/s" in out
    bench.write_csv(result, str(tmp_path / "rows.csv"))
    with open(tmp_path / "rows.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["direction"] for row in rows] == ["forward", "forward + backward"]
    assert float(rows[0]["jumar_min"]) == result.rows[0].timings["jumar"].minimum
    assert rows[0]["inductor_min"] == ""
    data = bench.to_dict(result)
    assert data["rows"][0]["ratios"].keys() == {"eager minimum", "eager median"}
    assert data["machine"]["simd"] == rows[0]["simd"] and float(rows[0]["copy_gbs"]) > 0
    assert float(rows[1]["to_eager"]) == result.rows[1].ratio("eager")
    assert rows[0]["case"] == "npu_rms_norm:float32:rows=128,cols=256:contiguous"
