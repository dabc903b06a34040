"""Traces and the table of their operators: against numbers counted by hand, against torch's own table, damaged files."""

from __future__ import annotations

import csv
import gzip
import io
import json

import pytest
import torch
from torch.profiler import ProfilerActivity

import jumar
from jumar import cli, profile
from jumar.limits import Limits
from jumar.opinfo.costs import Arg
from jumar.profile.render import check

LIMITS = {"copy_gbs": 10.0, "fma_gflops": 100.0, "bf16_gflops": 0.0, "threads": 1, "simd": "AVX2"}


def event(name, ts, dur, tid=1, dims=None, types=None, cat="cpu_op", **more):
    args = {} if dims is None else {"Input Dims": dims, "Input type": types, "Concrete Inputs": [""] * len(dims)}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args, **more}


BF16, FP32 = "c10::BFloat16", "float"
NORM = {"dims": [[4, 8], [8], []], "types": [BF16, BF16, "Scalar"]}
EVENTS = [
    event("ProfilerStep#7", 0, 1000, cat="user_annotation"),
    event("jumar::npu_rms_norm", 100, 20, **NORM),
    event("GeneratedBackwardFor_jumar_npu_rms_norm_default", 101, 18, **NORM),
    event("aten::empty", 102, 4),
    event("jumar::npu_rms_norm", 200, 40, **NORM),
    event("aten::mm", 300, 10, dims=[[100, 100], [100, 100]], types=[FP32, FP32]),
    # sum calls itself: its time is there once
    event("aten::sum", 400, 10, dims=[[4, 8], []], types=[FP32, ""]),
    event("aten::sum", 402, 6, dims=[[4, 8], [], [], []], types=[FP32, "ScalarList", "Scalar", ""]),
    # on two processes: half of the rows are here
    event("jumar::npu_swiglu", 600, 30, dims=[[4, 8], []], types=[FP32, "Scalar"]),
    event("jumar::npu_swiglu", 620, 8, dims=[[2, 8], []], types=[FP32, "Scalar"]),
    event("aten::add", 500, 5, dims=[[4], [4]], types=["long int", "long int"]),
    # at the same time in another thread
    event("MulBackward0", 100, 50, tid=2),
    event("aten::mul", 110, 30, tid=2, dims=[[4, 8], []], types=[FP32, "double"]),
    {"ph": "X", "cat": "cpu_op", "name": "broken", "ts": "soon", "dur": 1},
    {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "args": {"name": "python"}},
]


def write(path, document, compress=False):
    text = json.dumps(document).encode()
    path.write_bytes(gzip.compress(text) if compress else text)
    return path


@pytest.fixture
def trace(tmp_path):
    return write(tmp_path / "trace.json.gz", {"traceEvents": EVENTS, "jumar": {"limits": LIMITS}}, compress=True)


@pytest.fixture
def quick(monkeypatch):
    """The machine's limits are not measured."""
    monkeypatch.setattr("jumar.profile.session.measure", lambda quick: Limits(**LIMITS))


def rows(table):
    return {row.operator: row for row in table.rows}


def test_table_by_hand(trace):
    read = profile.read(trace)
    assert read.steps == [7] and read.wall == 1000 and read.skipped == 1
    table = profile.table(read)
    found = rows(table)
    assert "GeneratedBackwardFor_jumar_npu_rms_norm_default" not in found
    norm = found["jumar::npu_rms_norm"]
    assert (norm.kind, norm.calls, norm.total_us, norm.self_us) == ("fused", 2, 60, 56)
    assert (norm.min_us, norm.avg_us, norm.max_us, norm.share) == (20, 30, 40, 5.6)
    assert norm.bytes == 2 * (2 * 64 + 16 + 16) and norm.flops is None and norm.gflop_per_s is None
    assert norm.gb_per_s == pytest.approx(320 / 60e-6 * 1e-9)
    # 320 bytes take 32 ns at 10 GB/s
    assert norm.bound == "bytes" and norm.percent == pytest.approx(100 * 32e-9 / 60e-6)
    product = found["aten::mm"]
    # 2 MFLOP in 10 us: 200 GFLOP/s on a machine that does 100
    assert product.flops == 2e6 and product.gflop_per_s == pytest.approx(200)
    assert product.bound == "flops" and product.percent == pytest.approx(200)
    shared = found["jumar::npu_swiglu"]
    assert (shared.calls, shared.total_us, shared.self_us) == (1, 30, 30)
    assert shared.bytes == 4 * (16 + 8) and shared.gb_per_s == pytest.approx(96 / 8e-6 * 1e-9)
    total = found["aten::sum"]
    assert (total.calls, total.total_us, total.self_us, total.bytes) == (1, 10, 10, 4 * 33)
    assert found["aten::add"].bytes is None and found["aten::add"].percent is None  # integers
    assert (found["MulBackward0"].kind, found["MulBackward0"].self_us) == ("autograd", 20)
    assert found["aten::mul"].kind == "torch" and found["aten::mul"].bytes == 4 * 64 + 8
    assert [row.operator for row in table.rows][:2] == ["jumar::npu_rms_norm", "aten::mul"]


def test_rows_by_shape_and_orders(trace):
    table = profile.table(profile.read(trace), by_shape=True)
    shapes = {row.shapes for row in table.rows if row.operator == "aten::mm"}
    assert shapes == {"float32[100, 100] x float32[100, 100]"}
    shared = {row.shapes: (row.calls, row.bytes) for row in table.rows if row.operator == "jumar::npu_swiglu"}
    assert shared == {"float32[4, 8]": (1, None), "float32[2, 8]": (1, 96)}
    for by, (key, _) in profile.SORTS.items():
        values = [key(row) for row in table.sort(by).rows]
        assert values == sorted(values, reverse=by != "name")
    with pytest.raises(ValueError, match="unknown order 'byte'; did you mean 'bytes'?"):
        check("byte", "order", tuple(profile.SORTS))


def test_csv_and_json_hold_the_rows(trace):
    table = profile.table(profile.read(trace))
    read = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [row["operator"] for row in read] == [row.operator for row in table.rows]
    first = read[0]
    assert float(first["total_us"]) == 60 and first["flops"] == "" and first["bound"] == "bytes"
    document = json.loads(table.to_json())
    assert document["operators"][0]["bytes"] == 320 and document["operators"][0]["flops"] is None
    assert document["limits"] == LIMITS and document["steps"] == 1


def test_trace_without_limits(tmp_path):
    """As plain torch writes it; the array form, too."""
    table = profile.table(profile.read(write(tmp_path / "a.json", EVENTS)))
    assert table.limits is None and rows(table)["aten::mm"].percent is None
    assert rows(table)["aten::mm"].gflop_per_s == pytest.approx(200)
    other = profile.table(profile.read(tmp_path / "a.json"), limits=Limits(**LIMITS | {"fma_gflops": 400.0, "copy_gbs": 100.0}))
    assert rows(other)["aten::mm"].percent == pytest.approx(50)
    odd = write(tmp_path / "b.json", {"traceEvents": EVENTS, "jumar": {"limits": {"copy_gbs": "fast"}}})
    assert profile.table(profile.read(odd)).limits is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"not json", "not JSON, or cut short"),
        (json.dumps({"traceEvents": EVENTS}).encode()[:-40], "not JSON, or cut short"),
        (gzip.compress(json.dumps(EVENTS).encode())[:-30], "the gzip file is damaged"),
        (b"\x1f\x8b\x08\x00" + bytes(40), "the gzip file is damaged"),
        (b"\x89PNG\r\n\xff\xfe", "neither gzip nor UTF-8 text"),
        (b'{"step": 1}', "JSON, but not a Chrome trace"),
        (b"3", "JSON, but not a Chrome trace"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}, 5]}', "without operators"),
    ],
)
def test_damaged_files(tmp_path, content, message):
    file = tmp_path / "trace.json"
    file.write_bytes(content)
    with pytest.raises(profile.TraceError, match=message) as error:
        profile.read(file)
    assert str(file) in str(error.value)


def test_missing_files(tmp_path):
    with pytest.raises(profile.TraceError, match="nix.json: No such file"):
        profile.read(tmp_path / "nix.json")
    with pytest.raises(profile.TraceError, match="no trace .* in this folder"):
        profile.read(tmp_path)


def test_own_time_adds_up_as_in_torch(tmp_path):
    """A real trace of plain torch: calls and times are those of torch's own table."""
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)

    def work():
        torch.nn.functional.linear(x, w).relu().sum().backward()

    work()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True) as taken:
        work()
    taken.export_chrome_trace(str(tmp_path / "t.json"))
    found = rows(profile.table(profile.read(tmp_path / "t.json")))
    theirs = {event.key: event for event in taken.key_averages()}
    assert set(found) == set(theirs)
    for name, row in found.items():
        assert row.calls == theirs[name].count, name
        assert row.self_us == pytest.approx(theirs[name].self_cpu_time_total, abs=0.05 * row.calls), name
    product = found["aten::mm"]
    assert product.calls == 3 and product.flops == 3 * 2 * 8 * 16 * 4


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Five steps, of which the third and the fifth are recorded, in folders of this session."""
    folder = tmp_path_factory.mktemp("session")
    x, w = torch.randn(8, 16).bfloat16(), torch.randn(4, 16, requires_grad=True)
    settings = profile.Settings(profile_freq=3, profiler_warmup=1, save_traces_folder="traces")
    with pytest.raises(ZeroDivisionError), profile.profiling(settings, folder, rank=2) as taken:
        for step in range(1, 7):
            torch.ops.jumar.npu_linear(x, w.bfloat16()).sum().backward()
            if step == 6:
                raise ZeroDivisionError  # within a step that is recorded
            taken.step()
    return folder, taken


def test_session_writes_traces_and_tables(session):
    folder, taken = session
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert names == [
        f"traces/iteration_{step}/rank2_{name}"
        for step in (3, 5)
        for name in ("operators.csv", "operators.json", "trace.json.gz")
    ]
    assert [p.parent.name for p in taken.traces] == ["iteration_3", "iteration_5"]
    read = profile.read(folder)  # the newest
    assert read.file == taken.traces[-1]
    table = profile.table(profile.read(taken.traces[0]))
    assert table.steps == 1 and table.limits["simd"] == jumar.simd_target() and table.limits["copy_gbs"] > 0
    found = rows(table)
    linear = found["jumar::npu_linear"]
    assert (linear.calls, linear.flops, linear.kind) == (1, 2.0 * 8 * 16 * 4, "fused")
    assert linear.percent > 0 and linear.bound in ("bytes", "flops")
    assert found["jumar::linear_wgrad"].flops == linear.flops and "jumar::linear_dgrad" not in found
    stored = json.loads((taken.traces[0].parent / "rank2_operators.json").read_text())
    assert {row["operator"] for row in stored["operators"]} == set(found)


def test_arguments_of_a_real_trace(session):
    folder, taken = session
    call = next(c for c in profile.read(taken.traces[0]).calls if c.name == "jumar::npu_linear")
    assert call.arguments[:2] == [Arg((8, 16), torch.bfloat16, (16, 1)), Arg((4, 16), torch.bfloat16, (16, 1))]
    assert call.shapes == "bfloat16[8, 16] x bfloat16[4, 16]"


def test_nothing_is_written_between_steps(tmp_path, quick):
    settings = profile.Settings(profile_freq=1, profiler_warmup=0)
    with profile.profiling(settings, tmp_path, step=4) as taken:
        torch.ones(3).exp()
        taken.step()
    assert [p.parent.name for p in taken.traces] == ["iteration_5"]
    with profile.profiling(None, tmp_path / "none") as off:
        off.step()
    assert not (tmp_path / "none").exists() and off.traces == []


def test_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog, quick):
    (tmp_path / "file").write_text("in the way")
    settings = profile.Settings(profile_freq=1, profiler_warmup=0, save_traces_folder="file")
    with profile.profiling(settings, tmp_path) as taken:
        torch.ones(3).exp()
        taken.step()
    assert "the profile of step 1 is not whole" in caplog.text and taken.traces == []


@pytest.mark.parametrize("name", ["torch", "jumar"])
def test_steps_of_optimizers_have_a_cost(tmp_path, quick, name):
    """Lists of tensors are recorded without dtypes, and long ones not at all: the session counts for itself."""
    weights = [torch.randn(64, 5, requires_grad=True), *(torch.randn(7, requires_grad=True) for _ in range(50))]
    unused = torch.randn(9, requires_grad=True)
    if name == "jumar":
        from jumar.optim import AdamW

        optimizer, operator = AdamW([*weights, unused]), "jumar::adamw_"
    else:
        optimizer, operator = torch.optim.AdamW([*weights, unused], fused=True), "aten::_fused_adamw_"
    plain = torch.optim.SGD([unused])  # has no such operator
    with profile.profiling(profile.Settings(profile_freq=2, profiler_warmup=0), tmp_path) as taken:
        for _ in range(2):
            sum(w.square().sum() for w in weights).backward()
            optimizer.step()
            plain.step()
            taken.step()
    row = rows(profile.table(profile.read(taken.traces[0])))[operator]
    assert row.bytes == 4 * (64 * 5 + 50 * 7) * 7 and row.percent > 0 and row.calls == 1


def test_schedules():
    settings = profile.Settings(profile_freq=5)
    assert settings.recorded(1, 5) and not settings.recorded(1, 4) and not settings.recorded(6, 9)
    with pytest.raises(ValueError, match="profile_freq = 3 is less than profiler_warmup = 3 and profiler_active = 1"):
        profile.Settings(profile_freq=3).schedule()


def test_command(trace, tmp_path, capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main(["profile", *arguments])
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    status, out, _ = run(str(trace), "--top", "2", "--csv", str(tmp_path / "out.csv"))
    assert status == 0 and "jumar::npu_rms_norm" in out and "more rows" in out and "aten::add " not in out
    assert "copy 10.0 GB/s" in out and "1 training step" in out
    assert (tmp_path / "out.csv").read_text().count("\n") == 1 + len(profile.table(profile.read(trace)).rows)
    status, out, _ = run(str(trace), "--kind", "fused", "--by-shape", "--top", "0")
    assert status == 0 and "bfloat16[4, 8]" in out and "aten::mm" not in out
    status, out, _ = run(str(trace), "--json", "--sort", "flops", "--top", "1")
    assert [row["operator"] for row in json.loads(out)["operators"]] == ["aten::mm"]
    for arguments, message in (
        ([str(tmp_path / "nix")], f"jumar profile: {tmp_path / 'nix'}: No such file"),
        ([str(trace), "--sort", "flop"], "jumar profile: unknown order 'flop'; did you mean 'flops'?"),
        ([str(trace), "--kind", "fuse"], "jumar profile: unknown kind 'fuse'; did you mean 'fused'?"),
        ([str(trace), "--csv", str(tmp_path / "nix" / "x.csv")], f"jumar profile: {tmp_path / 'nix' / 'x.csv'}: No such file"),
    ):
        status, out, err = run(*arguments)
        assert status == 2 and out == "" and err.startswith(message) and err.count("\n") == 1
