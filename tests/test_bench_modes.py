"""The modes of jumar bench over the same cases, the text of a case, targets, and operators of other kinds."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from jumar import bench, cli, opinfo
from jumar.bench import checks, runner, targets
from jumar.bench.runner import BenchRow, Result
from jumar.bench.timing import Timing
from jumar.limits import Limits
from jumar.opinfo import OPERATORS, Bound, Case, OpInfo
from jumar.verify import compare

REGISTERED = [info for info in OPERATORS.values() if info.registered]
LIMITS = Limits(copy_gbs=10.0, fma_gflops=100.0, bf16_gflops=0.0, threads=1, simd="AVX2")


def test_case_text_round_trip():
    for job in bench.plan(None, None, None, layouts=bench.LAYOUTS):
        again = bench.parse_case(job.text)
        assert (again.info.name, again.dtype, again.shape, again.layout) == (
            job.info.name,
            job.dtype,
            job.shape,
            job.layout,
        )
    job = bench.parse_case("npu_rms_norm:bf16:rows=3,cols=5:sliced")
    assert job.shape == {"rows": 3, "cols": 5} and job.layout == "sliced"
    assert job.tensors()["input"].stride() == (10, 2)
    assert bench.parse_case("npu_linear:fp32:odd").shape_name == "odd"
    for text, error in (
        ("npu_linear:fp32", "is not OPERATOR:DTYPE:SHAPE"),
        ("npu_linaer:fp32:odd", "did you mean 'npu_linear'"),
        ("npu_linear:int4:odd", "unknown dtype 'int4'"),
        ("npu_linear:fp32:od", "did you mean 'odd'"),
        ("npu_linear:fp32:m=1,k=2", "has the sizes m, k, n, got m, k"),
        ("npu_linear:fp32:m=1,k=2,n=-3", "expected key=size, got 'n=-3'"),
        ("npu_linear:fp32:odd:slided", "did you mean 'sliced'"),
    ):
        with pytest.raises(ValueError, match=error):
            bench.parse_case(text)


def test_the_same_case_has_the_same_data():
    job = bench.parse_case("npu_add_rms_norm:bf16:rows=4,cols=9:transposed")
    for a, b in zip(job.tensors().values(), job.tensors().values(), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    assert all(map(torch.equal, job.grads(job.tensors()), job.grads(job.tensors())))
    assert [g.stride() for g in dataclasses.replace(job, layout="expanded").grads(job.tensors())] == [(0, 0)] * 2


def test_own_shapes(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("a rows=3 cols=7\nb rows=5 cols=9  # remark\n")
    jobs = bench.plan(["npu_swiglu"], [torch.float32], None, shapes_file=str(file))
    assert [job.shape for job in jobs] == [{"rows": 3, "cols": 7}, {"rows": 5, "cols": 9}]
    with pytest.raises(ValueError, match="a has the sizes rows, cols; npu_linear needs m, k, n"):
        bench.plan(["npu_linear"], None, None, shapes_file=str(file))
    with pytest.raises(ValueError, match="nothing.txt: No such file"):
        bench.plan(["npu_swiglu"], None, None, shapes_file=str(tmp_path / "nothing.txt"))
    file.write_text("a rows=3 cols=7\nb rows=5 cols=nine\n")
    with pytest.raises(ValueError, match="mine.txt:2: expected key=size, got 'cols=nine'"):
        bench.plan(["npu_swiglu"], None, None, shapes_file=str(file))


def test_every_family_marks_one_shape_for_quick():
    for info in OPERATORS.values():
        (name,) = bench.quick_shapes(info.shapes_file)
        job = bench.parse_case(f"{info.name}:float32:{name}")
        assert job.shape == bench.read_shapes(info.shapes_file)[name]


@pytest.mark.parametrize("info", REGISTERED, ids=lambda info: info.name)
def test_modes_hold(info):
    small = bench.plan([info.name], [torch.bfloat16], "small", layouts=bench.LAYOUTS)
    assert [row.status for row in bench.check(small, "correctness")] == ["ok"] * len(small)
    double = bench.plan([info.name], [torch.float64], "small", layouts=("contiguous", "sliced"))
    status = "ok" if info.differentiable else "none"
    assert [row.status for row in bench.check(double, "gradient")] == [status] * len(double)
    every = bench.plan([info.name], list(opinfo.DTYPES), "small", layouts=bench.LAYOUTS, every_dtype=True)
    for row in bench.check(every, "support"):
        assert row.status in ("ok", "no") and row.ok


def test_what_is_wrong_is_shown_with_its_case(monkeypatch, capsys):
    gemma = OPERATORS["npu_gemma_rms_norm"]
    wrong = dataclasses.replace(OPERATORS["npu_rms_norm"], plain=gemma.plain, terms=gemma.terms)
    monkeypatch.setitem(OPERATORS, "npu_rms_norm", wrong)
    with pytest.raises(SystemExit) as stop:
        cli.main("bench --op npu_rms_norm --mode correctness --shape small --dtype bf16".split())
    out = capsys.readouterr().out
    assert stop.value.code == 1 and "0 of 4 cases hold" in out
    command = "jumar bench --mode correctness --case npu_rms_norm:bfloat16:rows=128,cols=256:sliced"
    assert command in out
    with pytest.raises(SystemExit) as stop:
        cli.main([*command.split()[1:], "--json"])
    data = json.loads(capsys.readouterr().out)
    assert stop.value.code == 1 and [row["status"] for row in data["rows"]] == ["wrong"]


def test_gradient_mode_needs_no_oracle(monkeypatch):
    """A gradient that is off by a factor is found though the formula beside it is never asked."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x * 3.0

        @staticmethod
        def backward(ctx, dy: Tensor) -> Tensor:
            return dy * 3.01

    info = dataclasses.replace(
        OPERATORS["npu_swiglu"], call=lambda input: (Off.apply(input),), outputs=("y",)
    )
    monkeypatch.setitem(OPERATORS, "npu_swiglu", info)
    job = bench.parse_case("npu_swiglu:fp64:rows=3,cols=4")
    row = checks.gradient(job)
    assert row.status == "wrong" and "GradcheckError" in row.detail


def _scale(x: list[Tensor], by: Tensor) -> tuple[list[Tensor]]:
    return ([t * by.to(t.dtype) for t in x],)


def _scale_in_place(x: list[Tensor], by: Tensor) -> tuple[list[Tensor]]:
    for t in x:
        t.mul_(by)
    return (x,)


def _in_place() -> OpInfo:
    """An operator that multiplies a list of tensors in place."""

    def tensors(shape: dict[str, int], dtype: torch.dtype) -> dict:
        torch.manual_seed(0)
        return {"x": [torch.randn(n, shape["cols"]).to(dtype) for n in (1, shape["rows"])], "by": torch.tensor(1.5)}

    def cases(dtype: torch.dtype, seed: int):
        yield Case("two", tensors({"rows": 3, "cols": 5}, dtype))

    return OpInfo(
        name="scale_in_place",
        formula="x <- x by",
        shapes="x: list",
        doc="",
        backward=(),
        outputs=("x",),
        differentiable=(),
        bounds={"x": Bound(half=0.51, single=0.51, double=0.51)},
        plain=_scale,
        terms=lambda tensors, grads, **_: {},
        cases=cases,
        bench=tensors,
        shapes_file="rms_norm",
        mutates=("x",),
        call=_scale_in_place,
        eager=_scale_in_place,
    )


def test_operators_in_place_over_lists(monkeypatch):
    info = _in_place()
    (case,) = info.cases(torch.bfloat16, 0)
    before = [t.clone() for t in case.tensors["x"]]
    rows = compare(info, torch.bfloat16, case)
    assert [row.result for row in rows] == ["x", "x"] and all(row.ok for row in rows)
    assert all(map(torch.equal, before, case.tensors["x"])), "a contender wrote the case"
    wrong = dataclasses.replace(info, call=lambda x, by: _scale_in_place(x, by * 1.01))
    assert not any(row.ok for row in compare(wrong, torch.bfloat16, case))
    # what is written keeps its strides
    strided = {"x": [torch.zeros(4, 6)[:, ::2]], "by": torch.tensor(2.0)}
    assert info.arguments(strided)["x"][0].stride() == (6, 2)
    monkeypatch.setattr(OpInfo, "registered", True)
    monkeypatch.setitem(OPERATORS, info.name, info)
    result = bench.run(bench.plan([info.name], [torch.float32], "small"), quick=True, inductor=False)
    (row,) = result.rows
    assert result.ok and row.direction == "forward" and set(row.timings) == {"eager", "jumar"}
    assert checks.gradient(bench.parse_case("scale_in_place:fp64:small")).status == "none"
    assert checks.support(bench.parse_case("scale_in_place:fp16:small:sliced")).detail == "no gradient"


def _row(**values) -> BenchRow:
    row = BenchRow("npu_rms_norm", "float32", "big", {"rows": 1}, "forward + backward", bytes=1e9)
    row.timings = {"jumar": Timing(1.0, 1.0, 1), "eager": Timing(3.0, 3.0, 1), "inductor": Timing(1.2, 1.2, 1)}
    row.limit, row.percent = "bytes", 80.0
    for name, value in values.items():
        setattr(row, name, value)
    return row


def test_targets_as_text(capsys):
    assert OPERATORS["npu_linear"].target.text.startswith("75 % of the limit, bf16 10x eager, 1x")
    with pytest.raises(SystemExit):
        cli.main(["ops", "npu_rms_norm"])
    assert "75 % of the limit, 2x eager, 1x Inductor" in capsys.readouterr().out


def test_targets():
    def texts(*rows: BenchRow, limits: Limits = LIMITS) -> list[str]:
        return [miss.text for miss in targets.below(Result(limits, list(rows)))]

    assert texts(_row()) == []
    assert texts(_row(percent=74.0)) == [
        "npu_rms_norm float32 big: 74 % of the copy bandwidth, target 75 %"
    ]
    slow = {"jumar": Timing(2.0, 2.0, 1), "eager": Timing(3.0, 3.0, 1), "inductor": Timing(1.2, 1.2, 1)}
    assert texts(_row(timings=slow)) == [
        "npu_rms_norm float32 big: 0.60x Inductor, target 1x",
        "npu_rms_norm float32 big: 1.50x eager, target 2x",
    ]
    assert texts(_row(percent=10.0, bytes=1e6, shape="small"), _row()) == []  # fits the cache
    assert texts(_row(timings=slow, direction="forward"), _row()) == []  # forward + backward counts
    # bf16 products: what is asked depends on the CPU; eager may have run at the small shape only
    linear = {"op": "npu_linear", "dtype": "bfloat16", "limit": "flops"}
    small = _row(**linear, shape="small", flops=1e6, percent=1.0)
    large = _row(**linear, flops=1e10, timings={"jumar": Timing(1.0, 1.0, 1)})
    assert texts(small, large) == ["npu_linear bfloat16 small: 3.00x eager, target 10x"]
    assert texts(small, large, limits=dataclasses.replace(LIMITS, bf16_gflops=500.0)) == []


def test_the_limit_is_the_larger_of_both_times():
    job = bench.parse_case("npu_linear:fp32:small")
    row = _row(bytes=1e9, flops=1e9)  # 0.1 s at 10 GB/s, 0.01 s at 100 GFLOP/s
    runner._judge(row, job, LIMITS)
    assert row.limit == "bytes" and row.percent == pytest.approx(10.0)
    row = _row(bytes=1e9, flops=5e10)
    runner._judge(row, job, LIMITS)
    assert row.limit == "flops" and row.percent == pytest.approx(50.0)


def test_emulation_restarts_under_its_variables(monkeypatch):
    from jumar.bench import timing

    seen = []
    monkeypatch.setattr(timing.os, "execve", lambda *arguments: seen.append(arguments))
    monkeypatch.setenv("GLIBC_TUNABLES", timing.KEEP_MEMORY)
    for name in timing.EMULATE["avx2"]:
        monkeypatch.delenv(name, raising=False)
    timing.restart_keeping_memory(["bench", "--emulate=avx2", "--quick"])
    assert timing.EMULATE["avx2"].items() <= seen[0][2].items()
    assert not timing.emulating("avx2")
    monkeypatch.setattr(timing.os, "environ", seen[0][2])
    timing.restart_keeping_memory(["bench", "--emulate", "avx2"])
    assert timing.emulating("avx2") and len(seen) == 1
    monkeypatch.delenv("GLIBC_TUNABLES")  # training processes run as training does
    timing.restart_keeping_memory(["bench", "--emulate", "avx2", "--step", "a.toml"])
    assert len(seen) == 1
