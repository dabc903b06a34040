"""The jumar command: what it prints, its JSON, its exit status, and one clear line for each mistake."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

import jumar
from jumar import cli, opinfo

needs_hf = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


@pytest.fixture
def run(capsys):
    """Runs the command in this process: (exit status, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(list(arguments))
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


def one_line(error: str, start: str) -> None:
    assert error.startswith(start), error
    assert error.count("\n") == 1 and error.endswith("\n"), error


def test_module_and_subprocess():
    environment = {**os.environ, "JUMAR_SIMD": jumar.simd_targets()[-1]}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    result = subprocess.run(
        [sys.executable, "-m", "jumar", "env", "--json"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    facts = json.loads(result.stdout)
    assert facts["simd"]["in_use"] == jumar.simd_targets()[-1]
    assert facts["variables"] == {"JUMAR_SIMD": jumar.simd_targets()[-1]}
    bad = subprocess.run(
        [sys.executable, "-m", "jumar", "ops", "npu_rms_nrm"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert bad.returncode == 2 and bad.stdout == ""
    one_line(bad.stderr, "jumar ops: unknown operator 'npu_rms_nrm'; did you mean 'npu_rms_norm'?")


def test_help(run):
    for arguments in ((), ("--help",)):
        status, out, error = run(*arguments)
        assert status == 0 and error == ""
        assert all(c in out for c in ("env", "ops", "inspect", "verify", "bench", "train"))


def test_env(run):
    status, out, _ = run("env")
    assert status == 0
    assert torch.__version__ in out and jumar.simd_target() in out and "torch.ops.jumar" in out
    status, out, _ = run("env", "--json")
    facts = json.loads(out)
    assert facts["simd"] == {"in_use": jumar.simd_target(), "usable": jumar.simd_targets()}
    assert facts["threads"] == torch.get_num_threads()
    assert facts["torch_npu"] in ("real", "absent")


def test_env_shims(run, monkeypatch):
    monkeypatch.delenv("JUMAR_SHIMS", raising=False)
    facts = json.loads(run("env", "--json")[1])
    assert {"name", "state", "reason"} <= facts["shims"][0].keys()
    name = facts["shims"][0]["name"]
    monkeypatch.setenv("JUMAR_SHIMS", f"-{name}x")
    status, _, error = run("env")
    assert status == 2
    one_line(error, f"jumar env: JUMAR_SHIMS: unknown shim '{name}x'")


def test_ops(run):
    status, out, _ = run("ops")
    assert status == 0
    assert all(name in out for name in opinfo.schemas())
    status, out, _ = run("ops", "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert entries.keys() == opinfo.schemas().keys()
    assert entries["npu_rms_norm_backward"]["formula"] == "gradient of npu_rms_norm"


def test_one_operator(run):
    status, out, _ = run("ops", "npu_rms_norm")
    assert status == 0
    assert "input [a.., n..], gamma [n..]" in out  # brackets are text, not markup
    assert "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=" in out
    assert "0.51 ulp" in out and "docs/ops/npu_rms_norm.md" in out
    entry = json.loads(run("ops", "npu_rms_norm", "--json")[1])
    assert entry["gradient"] == ["npu_rms_norm_backward"]
    assert entry["dtypes"] == ["float32", "bfloat16", "float16", "float64"]


def test_mistakes_are_one_line(run):
    for arguments, start in (
        (("nothing",), "jumar: No such command 'nothing'"),
        (("ops", "--nothing"), "jumar ops: No such option"),
        (("inspect",), "jumar inspect: Missing argument 'MODEL'"),
        (("verify", "--op", "npu_swiglo"), "jumar verify: unknown operator 'npu_swiglo'; did you"),
        (("verify", "--dtype", "int8"), "jumar verify: unknown dtype 'int8' (known: float32"),
        (("verify", "qwen3", "--op", "npu_linear"), "jumar verify: give a model or --op, not both"),
        (("verify", "--converters", "x"), "jumar verify: --converters goes with a model"),
        (("bench", "--op", "npu_linar"), "jumar bench: unknown operator 'npu_linar'; did you mean"),
        (("bench", "--op", "npu_linear", "--shape", "smal"), "jumar bench: unknown shape 'smal'"),
        (("bench", "--csv", "no/such/folder/x.csv"), "jumar bench: no folder for no/such/folder"),
        (("bench", "--sahpe", "small"), "jumar bench: No such option: --sahpe; did you mean --shape?"),
        (("bench", "--mode", "sped"), "jumar bench: unknown mode 'sped'; did you mean 'speed'?"),
        (("bench", "--layout", "slice"), "jumar bench: unknown layout 'slice'; did you mean 'sliced'"),
        (("bench", "--case", "npu_linear:bf16"), "jumar bench: case 'npu_linear:bf16' is not OPERATOR"),
        (("bench", "--case", "npu_linear:bf16:m=1"), "jumar bench: case 'npu_linear:bf16:m=1': npu_l"),
        (("bench", "--emulate", "avx9"), "jumar bench: --emulate avx9: known are avx2"),
        (("bench", "--mode", "gradient", "--dtype", "bf16"), "jumar bench: --mode gradient takes fin"),
        (("bench", "--step", "a.toml", "--op", "npu_linear"), "jumar bench: --op goes with operators"),
        (("bench", "--step", "no/such.toml"), "jumar bench: job file 'no/such.toml' does not exist"),
        (("train",), "jumar train: Missing option '--job.config_file'"),
    ):
        status, out, error = run(*arguments)
        assert status == 2 and out == "", (arguments, out)
        one_line(error, start)


@needs_hf
def test_inspect(run):
    status, out, _ = run("inspect", "qwen3", "--converters", "npu_rms_norm,linear")
    assert status == 0 and "model.layers.*.input_layernorm" in out and "replaced" in out
    data = json.loads(run("inspect", "qwen3", "--converters", "npu_rms_norm", "--json")[1])
    assert data["model"] == "qwen3"
    sites = data["sites"]
    assert len(sites) == 9 and all(site["status"] == "replaced" for site in sites)
    for arguments, start in (
        (("qwen33",), "jumar inspect: 'qwen33' is neither a folder with a config.json nor"),
        (("qwen3", "--converters", "npu_rms"), "jumar inspect: unknown converter 'npu_rms'; did"),
    ):
        status, _, error = run("inspect", *arguments)
        assert status == 2
        one_line(error, start)


@needs_hf
def test_inspect_a_folder(run, tmp_path):
    from jumar import models

    models.build("llama").save_pretrained(tmp_path)
    data = json.loads(run("inspect", str(tmp_path), "--json")[1])
    assert sum(site["status"] == "replaced" for site in data["sites"]) > 10
    (tmp_path / "config.json").write_text("{")
    status, _, error = run("inspect", str(tmp_path))
    assert status == 2
    one_line(error, "jumar inspect: ")


def test_verify_operator(run):
    status, out, _ = run("verify", "--op", "npu_rms_norm", "--dtype", "bf16,fp32")
    assert status == 0
    assert "12 of 12" not in out and "8 of 8 results hold" in out and "d gamma" in out
    data = json.loads(run("verify", "--op", "npu_rms_norm", "--dtype", "bf16", "--json")[1])
    assert data["ok"] and [r["result"] for r in data["results"]] == [
        "y",
        "rstd",
        "d input",
        "d gamma",
    ]
    assert all(0 < r["fused"] <= max(r["stated"], r["eager"]) for r in data["results"])


def test_verify_fails_with_status_1(run, monkeypatch):
    import dataclasses

    gemma = opinfo.OPERATORS["npu_gemma_rms_norm"]
    swapped = dataclasses.replace(
        opinfo.OPERATORS["npu_rms_norm"], plain=gemma.plain, terms=gemma.terms
    )
    monkeypatch.setitem(opinfo.OPERATORS, "npu_rms_norm", swapped)
    status, out, error = run("verify", "--op", "npu_rms_norm", "--dtype", "fp32")
    assert status == 1 and error == ""
    assert "WORSE" in out and "results hold" in out


@needs_hf
def test_verify_model(run):
    status, out, _ = run(
        "verify", "qwen3", "--converters", "npu_rms_norm,npu_linear", "--dtype", "fp32"
    )
    assert status == 0 and "d model.embed_tokens.weight" in out and "logits" in out
    status, _, error = run("verify", "qwen3", "--converters", "npu_nothing")
    assert status == 2
    one_line(error, "jumar verify: unknown converter 'npu_nothing'")


def test_bench(run, tmp_path):
    pytest.importorskip("matplotlib")
    csv, plot = tmp_path / "rows.csv", tmp_path / "plot.png"
    status, out, error = run(
        *("bench", "--op", "npu_rms_norm", "--dtype", "bf16", "--shape", "small", "--no-inductor"),
        *("--csv", str(csv), "--plot", str(plot)),
    )
    assert status == 0, error
    assert "limits of this machine" in out and "forward + backward" in out
    assert len(csv.read_text().splitlines()) == 3
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_has_no_bare_infinity(capsys):
    cli.print_json({"a": float("inf"), "b": [float("nan"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"a": "inf", "b": ["nan", 1.5]}


def test_train_hands_over(run, monkeypatch):
    from jumar import train

    seen = []
    monkeypatch.setattr(train, "run", lambda *a, **k: seen.append((a, k)))
    status, _, _ = run(
        *("train", "--job.config_file", "job.toml", "--training.steps=3"),
        *("--model.name", "qwen3", "--json"),
    )
    assert status == 0
    assert seen == [(("job.toml", ["training.steps=3", "model.name=qwen3"]), {"json": True})]
    status, _, error = run("train", "--job.config_file=job.toml", "nonsense")
    assert status == 2 and len(seen) == 1
    one_line(error, "jumar train: unexpected argument 'nonsense'")

    def fail(*a, **k):
        raise train.JobError("[model] nmae: unknown key;\n did you mean name?")

    monkeypatch.setattr(train, "run", fail)
    status, _, error = run("train", "--job.config_file=job.toml")
    assert status == 2
    one_line(error, "jumar train: [model] nmae: unknown key; did you mean name?")


def test_train_overrides():
    assert cli._overrides(["--training.steps=3", "--model.name", "qwen3"]) == [
        "training.steps=3",
        "model.name=qwen3",
    ]
    for arguments in (["steps=3"], ["--training.steps"], ["--a.b", "--c.d=1"], ["--steps=3"]):
        with pytest.raises(cli.UserError):
            cli._overrides(arguments)


def test_models_without_their_packages(monkeypatch, capsys):
    from jumar import models

    def load(*arguments, **options):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(models, "load", load)
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", "qwen3"])
    assert stop.value.code == 2
    assert "(the extra jumar[hf]): No module named 'transformers'" in capsys.readouterr().err


def test_training_without_its_packages(monkeypatch, capsys):
    from jumar import train

    def run(*arguments, **options):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(train, "run", run)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--job.config_file", "job.toml"])
    assert stop.value.code == 2
    assert "needs more packages (the extra jumar[train]): No module named 'numpy'" in capsys.readouterr().err
