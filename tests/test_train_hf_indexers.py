"""Hugging Face jobs on DeepSeek-V3.2 whose indexers learn."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file

from hf_util import make_folder, write_hf_job
from jumar import models
from jumar.train import JobError, runner
from train_util import train_job

if "deepseek_v32" not in models.available():
    pytest.skip("transformers has no DeepSeek-V3.2", allow_module_level=True)

STAGES = ["sparse", "warmup"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return write_hf_job(tmp_path_factory.mktemp("dsa"), ["npu_dsa"], "deepseek_v32")


def _run(job: Path, out: Path, stage: str, *overrides: str) -> dict:
    return train_job(job, f"job.dump_folder={out}", f"model.indexer_stage={stage}", "checkpoint.export_hf=false", *overrides)


def _step(result: dict) -> list[float]:
    return [result["records"][0][name] for name in ("loss", "indexer_loss", "grad_norm")]


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_is_one_however_its_sequences_lie(job, tmp_path, stage):
    """All at once, in parts of unequal length, and packed: padding counts as no query."""
    whole = ["training.steps=1", "training.global_batch_size=24"]
    forms = {
        "whole": ["training.local_batch_size=24"],
        "parts": ["training.local_batch_size=4"],
        "recomputed": ["training.local_batch_size=4", "activation_checkpoint.mode=full"],
    }
    found = {name: _step(_run(job, tmp_path / name, stage, *whole, *more)) for name, more in forms.items()}
    packed = ["training.steps=1", "training.packing=true"]
    rows = len(runner.prepare(str(job), packed).rows)
    found["packed"] = _step(_run(job, tmp_path / "packed", stage, *packed, f"training.local_batch_size={rows}"))
    assert found["recomputed"] == found["parts"] and 0.01 < found["whole"][1] < 2
    for name, values in found.items():
        assert values == pytest.approx(found["whole"], rel=2e-5), name


def test_warm_up_trains_the_indexers_alone_and_its_model_goes_on_sparse(job, tmp_path):
    warm = _run(job, tmp_path / "warm", "warmup", "checkpoint.export_hf=true", "validation.enable=true", "validation.part=0.2")
    first, last = (warm["records"][i] for i in (0, -1))
    assert last["indexer_loss"] < 0.9 * first["indexer_loss"]
    assert warm["trained_parameters"] < 0.2 * warm["parameters"]
    before, after = (load_file(f / "model.safetensors") for f in (job.parent / "model", Path(warm["hf_folder"])))
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".indexer." in name}
    # What is held out is attended to like what is trained on, as nothing but indexers has moved: it stays.
    held_out = train_job(
        job, f"job.dump_folder={tmp_path / 'dense'}", f"model.hf_assets_path={_dense(tmp_path, job)}", "training.steps=1",
        "optimizer.lr=0", "validation.enable=true", "validation.part=0.2",
    )  # fmt: skip
    assert last["validation_loss"] == pytest.approx(held_out["records"][-1]["validation_loss"], rel=1e-5)
    sparse = _run(job, tmp_path / "sparse", "sparse", f"model.hf_assets_path={warm['hf_folder']}", "metrics.report_file=r.html")
    assert sparse["records"][-1]["loss"] < sparse["records"][0]["loss"]
    assert "indexer loss" in Path(sparse["report_file"]).read_text()


def _dense(folder: Path, job: Path) -> Path:
    """The model of a job with so many keys a query that all are chosen."""
    place = make_folder(folder / "all keys", "deepseek_v32")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"index_topk": 128}))
    (place / "model.safetensors").write_bytes((job.parent / "model" / "model.safetensors").read_bytes())
    return place


def test_weight_of_the_loss(job, tmp_path):
    """It weighs in the gradients and not in the record; without a weight, or keys, nothing of it is computed."""
    short = ["training.steps=2", "training.max_norm=1e9"]
    once, thrice = (_run(job, tmp_path / str(c), "warmup", *short, f"model.indexer_loss_coeff={c}") for c in (1, 3))
    assert once["records"][0]["indexer_loss"] == thrice["records"][0]["indexer_loss"]
    assert thrice["records"][0]["grad_norm"] == pytest.approx(3 * once["records"][0]["grad_norm"], rel=1e-5)
    off = _run(job, tmp_path / "off", "sparse", *short, "model.indexer_loss_coeff=0")
    plain = train_job(job, f"job.dump_folder={tmp_path / 'plain'}", *short)
    assert off["losses"] == plain["losses"] and "indexer_loss" not in (off["records"] + plain["records"])[0]


def test_every_kind_of_job(job, tmp_path):
    """bf16, adapters, recomputation and packing together; compiled; the progress line."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        more = ["training.packing=true", "lora.enable=true", "activation_checkpoint.mode=full"]
        more += ["training.mixed_precision_param=bfloat16", "training.global_batch_size=4"]
        runner.train(runner.prepare(str(job), [f"job.dump_folder={tmp_path / 'a'}", "model.indexer_stage=sparse", *more]))
    assert said.getvalue().count("  indexer loss 0.") == 6
    bf16 = "training.mixed_precision_param=bfloat16"
    forms = {"plain": [], "adapted": ["lora.enable=true"], "bf16": [bf16], "bf16 adapted": [bf16, "lora.enable=true"]}
    plain, adapted, half, half_adapted = (
        _run(job, tmp_path / name, "warmup", "training.steps=1", *more) for name, more in forms.items()
    )
    assert _step(adapted)[:2] == _step(plain)[:2] and _step(half_adapted)[:2] == _step(half)[:2]
    assert _step(half) == pytest.approx(_step(plain), rel=0.03)
    assert 0 < adapted["trained_parameters"] < plain["trained_parameters"]
    one = make_folder(tmp_path / "one layer", "deepseek_v32")
    config = json.loads((one / "config.json").read_text())
    layers = {"num_hidden_layers": 1, **{k: v[:1] for k, v in config.items() if k.endswith("layer_types")}}
    (one / "config.json").write_text(json.dumps(config | layers))
    (one / "model.safetensors").unlink()
    compiled, eager = (
        _run(job, tmp_path / name, "sparse", "training.steps=2", f"model.hf_assets_path={one}", *more)
        for name, more in {"c": ["compile.enable=true", "compile.backend=aot_eager"], "e": []}.items()
    )
    for ours, theirs in zip(compiled["records"], eager["records"], strict=True):
        assert ours["indexer_loss"] == pytest.approx(theirs["indexer_loss"], rel=1e-4)


def test_mistakes(job, tmp_path):
    def said(*overrides: str) -> str:
        with pytest.raises(JobError) as error:
            runner.prepare(str(job), list(overrides))
        return str(error.value)

    warm = "model.indexer_stage=warmup"
    assert said(warm, "model.converters=") == (
        "model.indexer_stage: transformers has no loss for indexers; it is npu_dsa's, which model.converters lacks"
    )
    v3 = make_folder(tmp_path / "v3", "deepseek_v3")
    assert said("model.indexer_loss_coeff=2", f"model.hf_assets_path={v3}", "model.converters=") == (
        "model.indexer_loss_coeff = 2.0: DeepseekV3ForCausalLM has no indexers"
    )
    assert said(warm, "model.indexer_loss_coeff=0") == (
        "model.indexer_stage = 'warmup' trains the indexers alone, and model.indexer_loss_coeff is 0"
    )
    assert said(warm, "lora.enable=true", "lora.target_modules=o_proj") == (
        "model.indexer_stage: lora.target_modules names no layer of the indexers, so nothing of them is trained"
    )
    saved = ["checkpoint.enable=true", "training.steps=1"]
    _run(job, tmp_path / "stages", "warmup", *saved)
    with pytest.raises(JobError, match="was written with model = hf Deepseek.*warm-up of its indexers"):
        _run(job, tmp_path / "stages", "sparse", *saved)
