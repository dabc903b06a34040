"""Activation checkpointing, gradient accumulation, adapters and evaluation, on a tiny Qwen3 in fp32."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan")

from jumar import titan
from jumar.titan import lora
from jumar.titan.models import model_spec
from jumar.train import JobError, runner
from train_util import CONVERTERS, quickly, sentences, train_job, write_job

QUICK = ("training.steps=3", "lr_scheduler.total_steps=10", "checkpoint.export_hf=false", "metrics.plot_file=")


_quick = pytest.fixture(autouse=True)(quickly)


def _run(job: Path, *overrides: str) -> dict:
    return train_job(job, *QUICK, *overrides)


# Activation checkpointing.


def test_activation_checkpointing_changes_no_bit(tmp_path):
    job = write_job(tmp_path)
    runs = {mode: _run(job, f"activation_checkpoint.mode={mode}") for mode in ("none", "selective", "full")}
    for name in ("selective", "full"):
        assert runs[name]["losses"] == runs["none"]["losses"]
        assert [r["grad_norm"] for r in runs[name]["records"]] == [r["grad_norm"] for r in runs["none"]["records"]]
    calls = {mode: run["calls"] for mode, run in runs.items()}
    # Full computes everything of the layers again (7 of the 11 products, SwiGLU, norms), selective keeps products.
    assert calls["full"]["npu_linear"] > calls["selective"]["npu_linear"] >= calls["none"]["npu_linear"]
    assert calls["full"]["swiglu_gate_up"] == calls["selective"]["swiglu_gate_up"] == 2 * calls["none"]["swiglu_gate_up"]


# Gradient accumulation.


@pytest.fixture
def masked(monkeypatch):
    """Labels are ignored in unequal numbers: all but one in some sequences, none in others, all in one."""
    from torchtitan.hf_datasets import text_datasets

    batches = text_datasets.HuggingFaceTextDataset.__iter__

    def some(self):
        for number, (inputs, labels) in enumerate(batches(self)):
            keep = (1, len(labels), 0, 17, 40)[number % 5]
            labels = labels.clone()
            labels[keep:] = -100
            yield inputs, labels

    monkeypatch.setattr(text_datasets.HuggingFaceTextDataset, "__iter__", some)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("converters", [[], CONVERTERS], ids=["eager", "fused"])
def test_accumulation_equals_one_batch(tmp_path, masked, converters, chunks):
    job = write_job(tmp_path, converters)
    more = ["training.global_batch_size=6", f"training.loss_chunks={chunks}"]
    whole = _run(job, *more, "training.local_batch_size=6")
    parts = {size: _run(job, *more, f"training.local_batch_size={size}") for size in (1, 2)}
    for run in parts.values():
        assert run["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        norms = [[r["grad_norm"] for r in other["records"]] for other in (run, whole)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert [r["tokens_seen"] for r in run["records"]] == [r["tokens_seen"] for r in whole["records"]]


def test_batch_of_ignored_labels_has_loss_0(tmp_path, monkeypatch):
    from torchtitan.hf_datasets import text_datasets

    batches = text_datasets.HuggingFaceTextDataset.__iter__
    monkeypatch.setattr(
        text_datasets.HuggingFaceTextDataset,
        "__iter__",
        lambda self: ((inputs, torch.full_like(labels, -100)) for inputs, labels in batches(self)),
    )
    run = _run(write_job(tmp_path))
    assert run["losses"] == [0, 0, 0] and [r["grad_norm"] for r in run["records"]] == [0, 0, 0]


def test_batch_that_does_not_divide(tmp_path):
    with pytest.raises(JobError, match="global batch size must be multiple of local batch size"):
        _run(write_job(tmp_path), "training.global_batch_size=5")


# Low-rank adapters.


def _adapted(order: str, names: list[str]) -> torch.nn.Module:
    """A tiny model with adapters, converted before or after them, the adapters' B not 0."""
    from torchtitan.config.override import OverrideConfig, apply_overrides

    spec = model_spec("qwen3", "tiny_untied")
    steps = {
        "fuse": lambda: apply_overrides(OverrideConfig(imports=[f"jumar.titan.{n}" for n in names]), spec),
        "adapt": lambda: setattr(spec, "model", lora.convert(spec.model, 4, 8.0, lora.targets(spec.model))),
    }
    for step in order.split():
        steps[step]()
    torch.manual_seed(0)
    model = spec.model.build()
    model.init_states()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def test_adapters_and_converters_in_either_order():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 512, (2, 32), generator=generator)
    positions = torch.arange(32).repeat(2, 1)
    found = {}
    for order in ("adapt", "adapt fuse", "fuse adapt"):
        model = _adapted(order, CONVERTERS)
        counts = titan.count_modules([model])
        if "fuse" in order:
            assert counts["npu_linear"] >= 11 and counts["npu_swiglu"] == 2 and counts["npu_rope"] == 2
            assert counts["npu_rms_norm"] == 9
        logits = model(tokens, positions, model.get_attention_masks(positions))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        found[order] = logits, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert {n.rsplit(".", 2)[1] for n in found["adapt"][1]} == {"lora_a", "lora_b"}
    assert len(found["adapt"][1]) == 2 * 10
    for order in ("adapt fuse", "fuse adapt"):
        torch.testing.assert_close(found[order], found["adapt"], rtol=2e-5, atol=2e-6)


def test_job_with_adapters(tmp_path):
    """Fused as eager; only adapters move; the exported model is the adapted one; a checkpoint resumes."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    job = write_job(tmp_path)
    more = ["lora.enable=true", "lora.rank=4", "lora.alpha=8", "optimizer.lr=1e-2", "checkpoint.export_hf=true"]
    fused = _run(job, *more)
    eager = _run(job, *more, "model.converters=", f"job.dump_folder={tmp_path / 'eager'}")
    assert fused["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert fused["losses"][2] < fused["losses"][0]
    rows = {row["converter"]: (row["planned"], row["replaced"], row["skipped"]) for row in fused["operators"]}
    assert rows == {"npu_rms_norm": (7, 7, 0), "npu_rope": (2, 2, 0), "npu_swiglu": (2, 2, 0), "npu_linear": (11, 11, 0)}
    # Products of the frozen layers and of both adapters.
    assert fused["calls"]["npu_linear"] == 3 * (11 + 2 * 10)
    exported = load_file(f"{fused['hf_folder']}/model.safetensors")
    assert not any("lora" in name for name in exported)
    start = _run(job, *more, "training.steps=1", "optimizer.lr=0", f"job.dump_folder={tmp_path / 'start'}")
    before = load_file(f"{start['hf_folder']}/model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], exported[name])}
    assert moved == {n for n in before if "_proj" in n}
    # transformers computes, from the merged weights, what training computed with the adapters.
    held_out = [f"validation.{k}" for k in ("enable=true", "dataset_path=text", "freq=3")]
    checked = _run(job, *more, *held_out, f"job.dump_folder={tmp_path / 'checked'}")
    model = AutoModelForCausalLM.from_pretrained(checked["hf_folder"], dtype=torch.float32)
    assert checked["records"][-1]["validation_loss"] == pytest.approx(_loss(model, job, checked), rel=1e-4)
    save = ["checkpoint.enable=true", "checkpoint.interval=2", f"job.dump_folder={tmp_path / 'saved'}"]
    _run(job, *more, *save, "training.steps=2")
    assert _run(job, *more, *save)["losses"] == fused["losses"][2:]


def test_adapters_on_an_exported_model(tmp_path):
    job = write_job(tmp_path)
    base = _run(job, "checkpoint.export_hf=true", "training.steps=6", "optimizer.lr=1e-2")
    other = write_job(tmp_path / "other")
    start = ["checkpoint.enable=true", "checkpoint.initial_load_in_hf=true", f"checkpoint.initial_load_path={base['hf_folder']}"]
    tuned = _run(other, *start, "lora.enable=true", "lora.target_modules=wo,w2", f"model.hf_assets_path={base['hf_folder']}")
    assert tuned["losses"][0] < base["losses"][0] - 0.2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lora.target_modules=w4", "no layer is called 'w4'; did you mean 'w"),
        ("lora.target_modules=all_linear", "did you mean 'all-linear'"),
        ("lora.target_modules=", "is empty: nothing would be trained"),
        ("lora.rank=0", "lora.rank = 0 is less than 1"),
        ("lora.r=8", "unknown key 'lora.r'"),
        ("validation.frequency=3", "unknown key 'validation.frequency'; did you mean 'freq'"),
        ("checkpoint.resume=always", "'always' is not one of auto, must, never"),
        ("validation.dataset_path=", "validation.dataset_path is missing"),
    ],
)
def test_mistakes_are_named(tmp_path, override, words):
    with pytest.raises(JobError) as error:
        runner.prepare(str(write_job(tmp_path)), ["lora.enable=true", "validation.enable=true", override])
    assert words in str(error.value)


# Evaluation.


def _loss(model: torch.nn.Module, job: Path, run: dict) -> float:
    """The mean loss of a transformers model over the job's packed sequences, documents apart."""
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    text = (job.parent / "text" / "data.jsonl").read_text().splitlines()
    tokenizer = HuggingFaceTokenizer(HuggingFaceTokenizer.Config(), tokenizer_path=run["tokenizer"])
    stream: list[float] = []
    for line in text:
        ids = tokenizer.encode(json.loads(line)["text"], add_bos=True, add_eos=True)
        inputs, labels = ids[:-1], ids[1:]
        while inputs:
            # What runs over the edge of a sequence begins anew in the next one.
            room = 64 - len(stream) % 64
            logits = model(torch.tensor([inputs[:room]])).logits[0]
            stream += torch.nn.functional.cross_entropy(logits, torch.tensor(labels[:room]), reduction="none").tolist()
            inputs, labels = inputs[room:], labels[room:]
    whole = len(stream) // 64 * 64
    return sum(stream[:whole]) / whole


def test_evaluation_is_the_mean_over_the_set(tmp_path):
    texts = sentences(80)[60:]
    job = write_job(tmp_path)
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out" / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    evaluate = ["validation.enable=true", "validation.dataset_path=held_out", "validation.freq=2"]
    plain = _run(job)
    run = _run(job, *evaluate)
    # It does not touch training.
    assert run["losses"] == plain["losses"]
    held_out = {r["step"]: r["validation_loss"] for r in run["records"] if "validation_loss" in r}
    assert sorted(held_out) == [2, 3] and all(math.isfinite(v) for v in held_out.values())
    # Batches of another size, and fewer of them, see the same sequences.
    other = _run(job, *evaluate, "training.local_batch_size=1", "training.global_batch_size=2")
    assert other["records"][1]["validation_loss"] == pytest.approx(held_out[2], rel=1e-5)
    first = _run(job, *evaluate, "validation.steps=1")
    assert first["records"][1]["validation_loss"] != pytest.approx(held_out[2], rel=1e-5)


def test_evaluation_on_too_little_text(tmp_path):
    job = write_job(tmp_path)
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.jsonl").write_text('{"text": "one rope"}\n')
    with pytest.raises(JobError, match="less than one sequence"):
        _run(job, "validation.enable=true", "validation.dataset_path=few", "validation.freq=1")
