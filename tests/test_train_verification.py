"""`jumar inspect` and `jumar verify` on job files."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("torchtitan")
pytest.importorskip("transformers")

from hf_util import write_hf_job
from jumar import cli, dsa, ops
from jumar.train import JobError, verification
from jumar.train.job import load
from jumar.verify.models import MEAN
from train_util import quickly, write_job

DSA = ["npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm"]

_quick = pytest.fixture(autouse=True, scope="module")(quickly)


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in arguments])
        return end.value.code, *capsys.readouterr()

    return call


def _short(folder, converters, *overrides):
    return load(str(write_job(folder, converters)), ["training.seq_len=24", *overrides])


def test_inspect(run, tmp_path):
    job = write_job(tmp_path, ["npu_dsa", "npu_swiglu?"])
    arguments = ("inspect", job, "--model.name=deepseek_v32", "--json")
    status, out, _ = run(*arguments)
    data = json.loads(out)
    assert status == 0 and data["model"] == str(job)
    assert {s["path"] for s in data["sites"] if s["converter"] == "npu_dsa"} == {
        f"layers.{n}.attention.inner_attention" for n in range(3)
    }
    found = json.loads(run(*arguments, "--converters", "npu_rms_norm")[1])
    assert {s["converter"] for s in found["sites"]} == {"npu_rms_norm"}
    every = json.loads(run(*arguments, "--model.converters=")[1])
    assert {"npu_dsa", "npu_linear", "npu_gmm"} <= {s["converter"] for s in every["sites"] if s["status"] == "replaced"}
    adapters = json.loads(run("inspect", job, "--converters", "npu_linear", "--lora.enable=true", "--json")[1])
    plain = json.loads(run("inspect", job, "--converters", "npu_linear", "--json")[1])
    assert len(adapters["sites"]) == len(plain["sites"]) and adapters["sites"] != plain["sites"]


def test_inspect_and_verify_a_hugging_face_job(run, tmp_path):
    job = write_hf_job(tmp_path, ["npu_dsa"], "deepseek_v32")
    data = json.loads(run("inspect", job, "--json")[1])
    assert {s["converter"] for s in data["sites"]} == {"npu_dsa"} and len(data["sites"]) == 3
    status, out, _ = run("verify", job, "--lora.enable=true", "--json")
    names = {r["result"] for r in json.loads(out)["results"]}
    assert status == 0 and "logits" in names and any("q_a_proj.lora_A" in name for name in names)
    (tmp_path / "model" / "config.json").unlink()
    status, _, error = run("inspect", job)
    assert status == 2 and error.startswith("jumar inspect: model.hf_assets_path") and error.count("\n") == 1


def test_experts_that_are_not_replaced(tmp_path):
    """torchtitan's own round to bf16 in fp32, which no converter is to blame for."""
    job = _short(tmp_path, ["npu_rms_norm"], "model.name=deepseek_v3", "model.flavor=tiny")
    rows = verification.verify(job, None, torch.float32)
    assert any("experts" in row.result for row in rows) and not [row for row in rows if not row.ok]


def test_mistakes_are_one_line(run, tmp_path):
    job = write_job(tmp_path, ["npu_dsa"])
    for arguments, start in (
        (("inspect", "no/such.toml"), "jumar inspect: job file 'no/such.toml' does not exist"),
        (("verify", job, "--model.flavour=tiny"), "jumar verify: command line: unknown key 'model.flavour'; did you mean 'fla"),
        (("verify", job), "jumar verify: matched nothing in this model: npu_dsa (write npu_dsa? if that is expected)"),
        (("inspect", job, "--strict"), "jumar inspect: matched nothing in this model: npu_dsa"),
        (("inspect", job, "--model.flavor=tinny"), "jumar inspect: model.flavor = 'tinny' is unknown for qwen3; did you"),
        (("inspect", job, "--converters", "npu_swiglo"), "jumar inspect: unknown converter 'npu_swiglo'; did you mean"),
        (("inspect", job, "--stirct"), "jumar inspect: unexpected argument '--stirct'"),
        (("inspect", "qwen3", "--model.flavor=tiny"), "jumar inspect: --model.flavor=tiny goes with a job file (*.toml), and"),
        (("verify", "--model.flavor=tiny"), "jumar verify: --model.flavor=tiny goes with a job file (*.toml), which is missing"),
    ):
        status, out, error = run(*arguments)
        assert status == 2 and out == "" and error.startswith(start) and error.count("\n") == 1, (arguments, error)


def test_a_model_too_large_for_fp64_is_refused(tmp_path):
    job = _short(tmp_path, DSA, "model.name=deepseek_v32", "model.flavor=671B")
    with pytest.raises(JobError, match=r"671B has 67\d,\d{3},\d{3},\d{3} parameters, too many to compare with fp64 in the"):
        verification.verify(job, None, None)


JOBS = {
    "qwen3": (["npu_rms_norm", "npu_rope", "npu_swiglu", "npu_linear", "npu_sdpa", "npu_loss"], []),
    "qwen3 with adapters": (["npu_linear"], ["lora.enable=true"]),
    "deepseek_v3": (["npu_gmm", "npu_permute", "npu_router", "npu_rope"], ["model.name=deepseek_v3"]),
    "deepseek_v32": (DSA, ["model.name=deepseek_v32"]),
    "warm-up": (DSA, ["model.name=deepseek_v32", "model.indexer_stage=warmup"]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_fused_is_no_further_from_fp64_than_eager(tmp_path, name, dtype):
    converters, overrides = JOBS[name]
    rows = verification.verify(_short(tmp_path, converters, *overrides), None, dtype)
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]
    names = {row.result for row in rows}
    assert ("logits" in names) == ("npu_loss" not in converters) and "loss" in names
    indexers = {n for n in names if ".indexer." in n}
    assert len(indexers) == (15 if "npu_dsa" in converters else 0) and ("indexer loss" in names) == bool(indexers)
    if name == "warm-up":
        assert {n for n in names if n.startswith("d ")} == indexers
    if name == "qwen3 with adapters":
        assert any(n.endswith("lora_a.weight") for n in names) and not any(n.endswith("wo.weight") for n in names)


def test_a_wrong_loss_of_the_indexers_is_found(tmp_path, monkeypatch):
    right = ops.npu_sparse_lightning_indexer_grad_kl_loss

    def wrong(*args, **kwargs):
        q, k, w, loss = right(*args, **kwargs)
        return q, k, w * 1.01, loss

    monkeypatch.setattr(dsa.ops, "npu_sparse_lightning_indexer_grad_kl_loss", wrong)
    rows = verification.verify(_short(tmp_path, DSA, "model.name=deepseek_v32"), None, torch.float32)
    bad = {row.result for row in rows if not row.ok}
    assert bad - {MEAN} == {f"d layers.{n}.attention.indexer.weights_proj.weight" for n in range(3)}
