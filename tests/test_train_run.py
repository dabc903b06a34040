"""Whole jobs on a tiny Qwen3: losses of fused and eager, the exported model, resuming, what is written."""

from __future__ import annotations

import copy
import json
import os
import statistics
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan")

from jumar import compat, titan, train
from train_util import CONVERTERS, no_sleep, quickly, torchrun, train_job, write_job

_quick = pytest.fixture(autouse=True)(quickly)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, dict]:
    """The same job, ten steps, fused and eager, in fp32."""
    result = {}
    with pytest.MonkeyPatch.context() as patch:
        compat.apply()
        no_sleep(patch)
        for name, converters in (("eager", []), ("fused", CONVERTERS)):
            job = write_job(tmp_path_factory.mktemp(name), converters)
            result[name] = train_job(job) | {"job": job}
    return result


def _distance(a: dict, b: dict) -> list[float]:
    return [abs(x - y) / abs(y) for x, y in zip(a["losses"], b["losses"], strict=True)]


def test_losses_of_fused_and_eager(runs):
    distance = _distance(runs["fused"], runs["eager"])
    assert len(distance) == 10
    assert max(distance[:3]) <= 1e-5
    assert max(distance) <= 1e-4
    losses = runs["fused"]["losses"]
    assert losses[-1] < losses[0] - 0.05


def test_operators_are_counted(runs):
    rows = {row["converter"]: row for row in runs["fused"]["operators"]}
    # Two layers: planned nodes, and modules built; the query-key norm is one node and two modules.
    assert {name: (row["planned"], row["replaced"], row["skipped"], row["modules"]) for name, row in rows.items()} == {
        "npu_rms_norm": (7, 7, 0, 9),
        "npu_rope": (2, 2, 0, 2),
        "npu_swiglu": (2, 2, 0, 2),
        "npu_linear": (11, 11, 0, 11),
    }
    # Ten steps; a rotary module turns query and key.
    assert {name: row["calls"] for name, row in rows.items()} == {
        "npu_rms_norm": 90, "npu_rope": 40, "npu_swiglu": 20, "npu_linear": 110,
    }
    assert all(row["backward_calls"] >= row["calls"] for row in rows.values())
    assert runs["eager"]["operators"] == []


def test_what_is_written(runs):
    fused = runs["fused"]
    records = [json.loads(line) for line in Path(fused["metrics_file"]).read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 11))
    assert [record["loss"] for record in records] == fused["losses"]
    assert {"grad_norm", "lr", "tokens_per_second", "seconds_per_step", "tokens_seen"} <= set(records[0])
    assert records[-1]["tokens_seen"] == 10 * 2 * 64
    assert Path(fused["plot"]).read_bytes().startswith(b"\x89PNG")
    assert not [p for p in Path(fused["dump_folder"]).rglob("*") if ".tmp-" in p.name or ".old-" in p.name]


def test_exported_model_is_the_trained_one(runs, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = runs["fused"]["hf_folder"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.tie_word_embeddings and model.config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) <= model.config.vocab_size
    # torchtitan's own model with the exported weights gives the same logits.
    from safetensors.torch import load_file

    from jumar.titan.models import model_spec

    spec = model_spec("qwen3", "tiny")
    adapter = spec.state_dict_adapter(spec.model, None)
    own = spec.model.build()
    own.init_states()
    own.load_state_dict(adapter.from_hf(load_file(str(Path(folder) / "model.safetensors"))), strict=False)
    ids = tokenizer("the rope holds a climber", return_tensors="pt").input_ids
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    expected = own(ids, positions, own.get_attention_masks(positions))
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    # Trained on these sentences: they are likelier than shuffled tokens.
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    assert model(ids, labels=ids).loss < model(shuffled, labels=shuffled).loss + 0.5


def test_checkpoints_resume(runs, tmp_path):
    job = write_job(tmp_path)
    saved = ("checkpoint.enable=true", "checkpoint.interval=4", "lr_scheduler.total_steps=10", "checkpoint.export_hf=false")
    first = train_job(job, *saved, "training.steps=4")
    second = train_job(job, *saved)
    assert len(second["losses"]) == 6
    whole = runs["fused"]["losses"]
    assert first["losses"] + second["losses"] == pytest.approx(whole, rel=1e-6)
    records = Path(second["metrics_file"]).read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == list(range(1, 11))


@pytest.mark.parametrize(
    "overrides",
    [
        ["activation_checkpoint.mode=selective", "training.loss_chunks=4"],
        ["activation_checkpoint.mode=full", "training.global_batch_size=4", "training.local_batch_size=1"],
    ],
    ids=["selective+chunks", "full+accumulation"],
)
def test_other_ways_to_the_same_losses(runs, tmp_path, overrides):
    job = write_job(tmp_path)
    more = [*overrides, "training.steps=3", "lr_scheduler.total_steps=10", "checkpoint.export_hf=false"]
    fused = train_job(job, *more)
    if any("accumulation" in o or "global" in o for o in overrides):
        eager = train_job(job, *more, "model.converters=")
        assert max(_distance(fused, eager)) <= 1e-5
    else:
        assert fused["losses"] == pytest.approx(runs["eager"]["losses"][:3], rel=1e-5)


def _gradients(names: list[str], dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Gradients, as fp64, of a tiny model with bf16-valued weights that computes in ``dtype``."""
    from torchtitan.config.override import OverrideConfig, apply_overrides

    from jumar.titan.models import model_spec

    spec = model_spec("qwen3", "tiny_untied")
    if names:
        apply_overrides(OverrideConfig(imports=[f"jumar.titan.{n}" for n in names]), spec)
    torch.manual_seed(seed)
    model = spec.model.build()
    model.init_states()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            # Parameters alone, as mixed precision does it: the rotary table stays fp32.
            parameter.data = (parameter + noise).bfloat16().to(dtype)
    tokens = torch.randint(0, 512, (2, 32), generator=generator)
    positions = torch.arange(32).repeat(2, 1)
    positions[1, 20:] -= 20
    logits = model(tokens, positions, model.get_attention_masks(positions))
    target = tokens.roll(-1, 1).flatten()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), target).backward()
    return {n: p.grad.double() for n, p in model.named_parameters()}


def test_bf16_gradients_are_no_further_from_fp64():
    """At equal weights, over several models. Which of two ways to round comes nearer is chance in a single model (by
    5 % either way), so the mean of the differences is held against its own standard error."""

    def error(names: list[str], seed: int, exact: dict[str, torch.Tensor]) -> float:
        found = _gradients(names, torch.bfloat16, seed)
        parts = [((found[n] - exact[n]).norm() / exact[n].norm()).item() for n in exact]
        return sum(part**2 for part in parts) ** 0.5

    eager, excess = [], []
    for seed in range(12):
        exact = _gradients([], torch.float64, seed)
        eager.append(error([], seed, exact))
        excess.append(error(CONVERTERS, seed, exact) - eager[-1])
        assert excess[-1] != 0
    standard_error = statistics.stdev(excess) / len(excess) ** 0.5
    assert statistics.mean(excess) <= 2 * standard_error
    assert standard_error < 0.02 * statistics.mean(eager)


def test_a_converter_that_did_not_survive_is_an_error(tmp_path, monkeypatch):
    job = write_job(tmp_path)
    monkeypatch.setattr(titan, "count_modules", lambda parts: {})
    with pytest.raises(RuntimeError, match="npu_rms_norm: 7 sites were planned, 0 modules are fused"):
        train_job(job, "training.steps=1")


def test_json_is_one_document(tmp_path, capsys):
    job = write_job(tmp_path)
    result = train.run(str(job), ["training.steps=2", "checkpoint.export_hf=false", "metrics.plot_file="], json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["losses"] == result["losses"]
    assert "step 2/2" in captured.err and "left 0 s" in captured.err


def test_state_of_the_process_is_left_alone(tmp_path):
    import gc

    before = dict(os.environ)
    train_job(write_job(tmp_path), "training.steps=1", "checkpoint.export_hf=false", "metrics.plot_file=")
    assert gc.isenabled() and not torch.distributed.is_initialized()
    assert {k: v for k, v in os.environ.items() if k in ("RANK", "WORLD_SIZE", "MASTER_PORT")} == {
        k: v for k, v in before.items() if k in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    }


def test_export_that_fails_leaves_the_old_one(tmp_path):
    from jumar.train.files import replace_folder

    folder = tmp_path / "hf"
    with replace_folder(folder) as place:
        (place / "a").write_text("1")
    with pytest.raises(ZeroDivisionError), replace_folder(folder) as place:
        (place / "a").write_text("2")
        raise ZeroDivisionError
    assert (folder / "a").read_text() == "1" and [p.name for p in tmp_path.iterdir()] == ["hf"]
    with replace_folder(folder) as place:
        (place / "b").write_text("3")
    assert [p.name for p in folder.iterdir()] == ["b"] and [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_untied_model_and_llama(tmp_path):
    """Configurations that are written for transformers match the weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from jumar.titan.models import model_spec
    from jumar.train import export

    for name, flavor in (("qwen3", "tiny_untied"), ("llama3", "debugmodel"), ("qwen3", "0.6B"), ("llama3", "8B")):
        spec = model_spec(name, flavor)
        config = export.hf_config(name, copy.deepcopy(spec.model), None)
        (tmp_path / "config.json").write_text(json.dumps(config))
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
            if flavor == "8B":
                continue
            ours = spec.state_dict_adapter(spec.model, None).to_hf(spec.model.build().state_dict())
        shapes = {n: tuple(t.shape) for n, t in theirs.state_dict().items()}
        if config["tie_word_embeddings"]:
            shapes.pop("lm_head.weight")
        assert {n: tuple(t.shape) for n, t in ours.items()} == shapes


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "context", "data"])
def test_two_processes(tmp_path, layout):
    """From one seed checkpoint, two processes give the losses of one, whatever they share."""
    if not os.environ.get("JUMAR_LONG_TESTS"):
        pytest.skip("long; set JUMAR_LONG_TESTS=1")
    job = write_job(tmp_path)
    base = ["model.flavor=tiny_untied", "training.seq_len=256", "training.global_batch_size=4", "training.steps=3"]
    train_job(job, *base, "checkpoint.enable=true", "checkpoint.create_seed_checkpoint=true", f"job.dump_folder={tmp_path / 'seed'}")
    start = ["checkpoint.enable=true", "checkpoint.load_only=true",
             f"checkpoint.initial_load_path={tmp_path / 'seed' / 'checkpoint' / 'step-0'}"]
    degree = {"data": "parallelism.data_parallel_shard_degree=2"}.get(layout, f"parallelism.{layout}_parallel_degree=2")
    two = torchrun(job, *base, *start, degree)
    assert two["processes"] == 2
    assert {row["converter"]: row["modules"] for row in two["operators"]}["npu_linear"] == 11
    if layout == "data":
        # Ranks read other documents than one process does: the plain model is the reference.
        other = torchrun(job, *base, *start, degree, "model.converters=")
    else:
        other = train_job(job, *base, *start)
    assert two["losses"] == pytest.approx(other["losses"], rel=5e-5)
    assert Path(two["hf_folder"], "model.safetensors").is_file()


@pytest.mark.long
def test_compiled_model(runs, tmp_path):
    if not os.environ.get("JUMAR_LONG_TESTS"):
        pytest.skip("long; set JUMAR_LONG_TESTS=1")
    result = train_job(write_job(tmp_path), "compile.enable=true", "training.steps=3", "lr_scheduler.total_steps=10")
    assert result["losses"] == pytest.approx(runs["eager"]["losses"][:3], rel=1e-5)
