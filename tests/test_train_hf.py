"""Whole jobs on tiny Hugging Face folders: losses of fused and eager, packing, accumulation, adapters, evaluation, export."""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import jumar
from hf_util import CONVERTERS, conversations, make_folder, write_hf_job, write_lines
from jumar import models
from jumar.train import JobError, runner
from jumar.train.hf import dataset, records
from jumar.train.hf import model as hf_model
from train_util import one_thread, train_job

# Gated delta nets (Qwen3-Next, Qwen3.5) mix packed documents.
FAMILIES = [name for name in models.BUILT_IN if not name.startswith(("qwen3_next", "qwen3_5"))]

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "deepseek_v3", "deepseek_v32")

#: What a family has no use for: stacked experts have no MLP.
WITHOUT = dict.fromkeys(("mixtral", "qwen3_moe", "qwen3_vl_moe"), "npu_swiglu")


_one_thread = pytest.fixture(autouse=True)(one_thread)


@pytest.fixture(scope="module", autouse=True)
def _little_garbage():
    """accelerate collects garbage for every run: let it leave alone what was imported before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return write_hf_job(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_folder(root / name, name) for name in FAMILIES}


def _converters(family: str) -> str:
    more = ["npu_gmm", "npu_permute", "npu_router"] if family in MIXTURES else []
    if family == "deepseek_v32":
        more.append("npu_dsa")
    return f"model.converters={json.dumps([c for c in [*CONVERTERS, *more] if c != WITHOUT.get(family)])}"


def _run(job: Path, out: Path, *overrides: str) -> dict:
    return train_job(job, f"job.dump_folder={out}", *overrides)


@pytest.fixture(scope="module")
def runs(job, tmp_path_factory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("runs")
    held_out = ("validation.enable=true", "validation.part=0.2", "validation.freq=4", "metrics.plot_file=loss.png")
    return {
        "fused": _run(job, out / "fused", *held_out),
        "eager": _run(job, out / "eager", *held_out, "model.converters="),
    }


def test_losses_of_fused_and_eager(runs):
    fused, eager = runs["fused"], runs["eager"]
    assert fused["losses"][:3] == pytest.approx(eager["losses"][:3], rel=1e-5)
    assert fused["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    assert len(fused["losses"]) == 6 and fused["losses"][-1] < fused["losses"][0] - 0.5
    held_out = [{r["step"]: r["validation_loss"] for r in run["records"] if "validation_loss" in r} for run in runs.values()]
    assert list(held_out[0]) == [4, 6] and held_out[0] == pytest.approx(held_out[1], rel=1e-4)


def test_operators_are_counted(runs):
    rows = {row["converter"]: row for row in runs["fused"]["operators"]}
    assert {name: (row["replaced"], row["skipped"]) for name, row in rows.items()} == {
        "npu_rms_norm": (9, 0), "npu_rope": (2, 0), "npu_swiglu": (2, 0), "npu_linear": (15, 0),
    }
    # Six steps, and twice three batches of five samples held out.
    assert rows["npu_linear"]["calls"] == 15 * (6 + 2 * 3) and rows["npu_swiglu"]["backward_calls"] == 12
    assert runs["eager"]["operators"] == []


def test_what_is_written(runs):
    fused = runs["fused"]
    lines = [json.loads(line) for line in Path(fused["metrics_file"]).read_text().splitlines()]
    assert lines == fused["records"] and [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    # The keys of the other engine's records.
    assert set(lines[0]) >= {
        "step", "loss", "max_loss", "grad_norm", "lr", "seconds_per_step", "tokens_per_second", "tokens_seen",
    }
    assert [line["lr"] for line in lines[:3]] == pytest.approx([1.5e-3, 3e-3, 3e-3])
    assert Path(fused["plot"]).read_bytes().startswith(b"\x89PNG")
    assert fused["data"]["samples"] == 19 and lines[-1]["tokens_seen"] > 6 * 2 * 20


def test_exported_model(job, runs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(runs["fused"]["hf_folder"])
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(loaded).__name__ == "Qwen3ForCausalLM" and loaded.config.use_cache
    ids = tokenizer.apply_chat_template(conversations(1)[0]["messages"], return_tensors="pt", return_dict=True)["input_ids"]
    before = AutoModelForCausalLM.from_pretrained(job.parent / "model")
    assert loaded(ids, labels=ids).loss < before(ids, labels=ids).loss - 0.3
    eager = AutoModelForCausalLM.from_pretrained(runs["eager"]["hf_folder"])
    torch.testing.assert_close(loaded(ids).logits, eager(ids).logits, rtol=1e-3, atol=1e-3)


def _encoded(tokenizer, folder: Path) -> list[dataset.Sample]:
    file = write_lines(folder / "few.jsonl", conversations(7))
    chat = {"name": [], "author": [], "system": None}
    return dataset.encode(records.read(file, chat), tokenizer, 96, "truncate").samples


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_packed_losses_are_those_of_single_documents(folders, tmp_path, family, fused):
    """The loss and its gradient, summed over the labels, packed in two rows, padded, and one by one."""
    folder = folders[family]
    tokenizer, model = hf_model.load_tokenizer(folder), models.load(folder)
    if fused:
        jumar.kernelize(model)
    elif family == "deepseek_v32":
        # Of equal scores torch.topk takes any, in another layout others: nothing is left to choose.
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = 96
    samples = _encoded(tokenizer, tmp_path)
    planes = dataset.position_planes(model.config)
    assert planes == (4 if "vl" in family else 0)
    hf_model.check_packing(model, planes)

    def total(rows: list, packing: bool) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        batch = dataset.Collator(3, packing, planes)(rows)
        batch.pop("tokens")
        loss = model(**batch, use_cache=False).loss * (batch["labels"] != -100).sum()
        loss.backward()
        return loss.item(), model.get_input_embeddings().weight.grad.clone()

    rows = dataset.rows(samples, 96, True, 0)
    rows.sort(key=len, reverse=True)
    assert max(map(len, rows)) > 1
    packed, gradient = total(rows, True)
    padded, padded_gradient = total([[s] for s in samples], False)
    single = [total([[s]], False) for s in samples]
    assert packed == pytest.approx(sum(loss for loss, _ in single), rel=1e-5)
    assert padded == pytest.approx(sum(loss for loss, _ in single), rel=1e-5)
    expected = sum(grad for _, grad in single)
    for found in (gradient, padded_gradient):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_padded_step(folders, job, tmp_path, family):
    """A step on all of the data has one loss and one gradient norm, however it is laid out."""
    more = [f"model.hf_assets_path={folders[family]}", _converters(family), "training.steps=1", "checkpoint.export_hf=false"]
    rows = len(runner.prepare(str(job), [*more, "training.packing=true"]).rows)
    packed = _run(job, tmp_path / "packed", *more, "training.packing=true", f"training.local_batch_size={rows}")
    padded = _run(job, tmp_path / "padded", *more, "training.local_batch_size=24")
    assert rows < 24
    assert packed["losses"] == pytest.approx(padded["losses"], rel=1e-5)
    assert packed["records"][0]["grad_norm"] == pytest.approx(padded["records"][0]["grad_norm"], rel=1e-4)
    assert packed["records"][0]["tokens_seen"] == padded["records"][0]["tokens_seen"] == packed["data"]["tokens"]


def test_packing_that_a_model_does_not_honour_is_an_error(folders):
    # Without the plane of text positions Qwen2.5-VL does not look for documents.
    model = models.load(folders["qwen2_5_vl"])
    with pytest.raises(JobError, match="Qwen2_5_VLForConditionalGeneration lets packed documents see one another"):
        hf_model.check_packing(model, 0)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl"])
def test_accumulation_weighs_every_label_alike(folders, job, tmp_path, family):
    """Four samples one by one, two by two, or at once. Qwen2.5-VL cannot be told how many labels a step has."""
    more = [f"model.hf_assets_path={folders[family]}", "training.steps=3", "checkpoint.export_hf=false"]
    results = [
        _run(job, tmp_path / str(local), *more, f"training.local_batch_size={local}", "training.global_batch_size=4")
        for local in (1, 2, 4)
    ]
    assert results[0]["losses"] == pytest.approx(results[2]["losses"], rel=1e-5)
    assert results[1]["losses"] == pytest.approx(results[2]["losses"], rel=1e-5)
    norms = [[r["grad_norm"] for r in result["records"]] for result in results]
    assert norms[0] == pytest.approx(norms[2], rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_everything(folders, job, tmp_path, family):
    """Packed, with adapters, recomputed, in bf16; fused as far as there are operators."""
    result = _run(
        job, tmp_path / "out", f"model.hf_assets_path={folders[family]}", _converters(family), "training.steps=2",
        "training.packing=true", "lora.enable=true", "activation_checkpoint.mode=full", "training.mixed_precision_param=bfloat16",
    )
    assert result["steps"] == 2 and all(4 < loss < 8 for loss in result["losses"])
    assert all(row["replaced"] and row["calls"] for row in result["operators"])
    sites = {site["path"] for site in result["report"]["sites"] if site["status"] == "replaced"}
    projection = "o_proj" if family.startswith("deepseek") else "q_proj"
    for part in ("base_layer", "lora_A.default", "lora_B.default"):
        assert any(path.endswith(f"layers.0.self_attn.{projection}.{part}") for path in sites)
    assert result["trained_parameters"] < result["parameters"]


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("family", ["qwen3_vl", *MIXTURES])
def test_every_weight_is_in_a_checkpoint(folders, job, tmp_path, family, adapters):
    """Files have names of their own, for every expert one: what is stacked in the model goes on from them, too."""
    more = [f"model.hf_assets_path={folders[family]}", "model.converters=", f"lora.enable={str(adapters).lower()}"]
    more += ["training.steps=2", "checkpoint.enable=true", "checkpoint.interval=1", "checkpoint.export_hf=false"]
    whole = _run(job, tmp_path, *more)
    shutil.rmtree(tmp_path / "checkpoint" / "step-2")
    again = _run(job, tmp_path, *more)
    assert again["resumed_from"].endswith("step-1") and again["losses"] == whole["losses"][1:]


def _adapted_losses(folder: Path, when: str) -> tuple[list[float], object]:
    import peft

    tokenizer, model = hf_model.load_tokenizer(folder), models.load(folder)
    if when == "before":
        jumar.convert(model, CONVERTERS, strict=True)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    report = jumar.convert(model, CONVERTERS) if when != "never" else None
    samples = _encoded(tokenizer, folder)
    batch = dataset.Collator(3, False)([[s] for s in samples])
    batch.pop("tokens")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, report


def test_converted_before_or_after_peft(folders):
    """The same losses as peft alone; in both orders the layers under adapters and the adapters run fused."""
    expected, _ = _adapted_losses(folders["qwen3"], "never")
    for when in ("before", "after"):
        jumar.reset_call_counts()
        losses, report = _adapted_losses(folders["qwen3"], when)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert jumar.call_counts()["npu_linear"] == 3 * (14 * 3 + 1)
        found = {site.path: (site.status, site.reason) for site in report.sites if site.converter == "npu_linear"}
        path = "base_model.model.model.layers.0.mlp.gate_proj"
        assert found[f"{path}.lora_A.default"] == found[f"{path}.lora_B.default"] == ("replaced", "")
        done = ("skipped", "already converted") if when == "before" else ("replaced", "")
        assert found[f"{path}.base_layer"] == done
        assert report.unmatched == []


def test_adapters_in_the_layout_of_peft(job, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = _run(job, tmp_path / "out", "lora.enable=true", "lora.rank=4", "lora.alpha=16", "optimizer.lr=3e-2")
    adapter = Path(result["adapter_folder"])
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 16, "LORA")
    assert (adapter / "adapter_model.safetensors").is_file() and (adapter / "chat_template.jinja").is_file()
    base = AutoModelForCausalLM.from_pretrained(job.parent / "model")
    ids = torch.arange(20)[None]
    plain = base(ids).logits.detach()
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, adapter)(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(result["hf_folder"])(ids).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
    assert (adapted - plain).abs().max() > 0.05
    named = _run(job, tmp_path / "named", "lora.enable=true", "lora.target_modules=q_proj,v_proj", "training.steps=1")
    assert named["trained_parameters"] == 2 * (8 * (48 + 64) + 8 * (48 + 32))


def test_epochs_and_text(job, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"the rope holds line {i}\n" for i in range(10)))
    result = _run(
        job, tmp_path / "out", f"training.dataset_path={tmp_path / 'text.txt'}", "training.epochs=1.5",
        "training.local_batch_size=3", "checkpoint.export_hf=false", "metrics.log_freq=4",
    )
    assert result["steps"] == 5 and result["hf_folder"] is None
    assert [r["step"] for r in result["records"]] == [1, 4, 5]


def test_shipped_example(folders, tmp_path):
    """The job in configs/ on the data in examples/, with a model that fits a test."""
    file = Path(__file__).parent.parent / "configs" / "hf_self_cognition.toml"
    with pytest.raises(JobError, match="model.hf_assets_path = '../models/Qwen3-0.6B': no such file or folder"):
        runner.prepare(str(file), [])
    small = [f"model.hf_assets_path={folders['qwen3']}", "training.seq_len=128", "training.epochs=none", "training.steps=3"]
    result = _run(file, tmp_path / "out", *small, "metrics.report_file=", "optimizer.lr=1e-2")
    assert result["losses"][-1] < result["losses"][0] and result["data"]["records"] == 38 - 4
    assert Path(result["adapter_folder"]).is_dir() and "validation_loss" in result["records"][-1]


@pytest.mark.parametrize("more", [[], ["lora.enable=true"], ["activation_checkpoint.mode=full", "training.packing=true"]])
def test_fused_loss(runs, job, tmp_path, more):
    """npu_loss serves the head and the loss of the step in one operator."""
    options = ["checkpoint.export_hf=false", "training.steps=3", "training.global_batch_size=4", *more]
    plain = _run(job, tmp_path / "plain", *options)
    fused = _run(job, tmp_path / "fused", *options, f"model.converters={','.join([*CONVERTERS, 'npu_loss'])}")
    assert fused["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    row = next(row for row in fused["operators"] if row["converter"] == "npu_loss")
    assert row["replaced"] == 1 and row["calls"] == 6


def test_own_optimizer(job, tmp_path):
    """jumar_adamw, its clipping included, goes the way of torch's."""
    options = ["checkpoint.export_hf=false", "training.max_norm=0.5"]
    torchs = _run(job, tmp_path / "torch", *options)
    own = _run(job, tmp_path / "own", *options, "optimizer.name=jumar_adamw")
    assert own["losses"] == pytest.approx(torchs["losses"], rel=1e-5)
    assert own["calls"].get("adamw_", 0) + own["calls"].get("npu_apply_adam_w", 0) >= 6


def test_evaluation_leaves_no_trace(job, tmp_path):
    options = ["checkpoint.export_hf=false", "lora.enable=true", "lora.dropout=0.3", "training.steps=4"]
    held_out = f"validation.dataset_path={job.parent / 'chat.jsonl'}"
    plain = _run(job, tmp_path / "plain", *options)
    evaluated = _run(job, tmp_path / "evaluated", *options, held_out, "validation.enable=true", "validation.freq=1")
    assert evaluated["losses"] == plain["losses"]
    few = _run(job, tmp_path / "few", *options, held_out, "validation.enable=true", "validation.freq=4", "validation.steps=1")
    assert few["records"][-1]["validation_loss"] != evaluated["records"][-1]["validation_loss"]


@pytest.mark.long
def test_compiled_model(runs, job, tmp_path):
    if not os.environ.get("JUMAR_LONG_TESTS"):
        pytest.skip("long; set JUMAR_LONG_TESTS=1")
    options = ["checkpoint.export_hf=false", "training.steps=3"]
    plain = _run(job, tmp_path / "plain", *options)
    compiled = _run(job, tmp_path / "compiled", *options, "compile.enable=true")
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.flavor=0.6B", ["model.flavor is nothing for a Hugging Face folder"]),
        ("parallelism.tensor_parallel_degree=2", ["parallelism.tensor_parallel_degree is nothing for"]),
        ("training.loss_chunks=4", ["training.loss_chunks is nothing for"]),
        ("model.hf_assets_path=none", ["model.hf_assets_path is missing"]),
        ("model.hf_assets_path=.", ["no config.json in it"]),
        ("model.converters=npu_rmsnorm", ["unknown converter 'npu_rmsnorm'", "'npu_rms_norm'"]),
        ("model.converters=npu_rope,npu_rope", ["listed twice"]),
        ("training.dataset=c4", ["training.dataset = 'c4'"]),
        ("training.dataset_path=nowhere", ["training.dataset_path = 'nowhere'", "no such file"]),
        ("training.seq_len=500", ["training.seq_len = 500 is more than the model's 128"]),
        ("training.global_batch_size=3", ["training.global_batch_size = 3 is not a multiple"]),
        ("training.dtype=bfloat16", ["training.dtype = 'bfloat16' cannot be computed"]),
        ("training.too_long=cut", ["'cut' is not one of truncate, drop"]),
        ("activation_checkpoint.mode=selective", ["activation_checkpoint.mode = 'selective'"]),
        ("validation.enable=true", ["validation.dataset_path is missing"]),
        ("validation.part=2", ["validation.part = 2 is not between 0 and 1"]),
        ("chat.name=a,b,c", ["have one value, or two"]),
    ],
)
def test_mistakes_are_named(job, override, words):
    with pytest.raises(JobError) as error:
        runner.prepare(str(job), [override])
    for word in words:
        assert word in str(error.value)


def test_mistakes_in_the_folder_are_named(job, tmp_path):
    with pytest.raises(JobError, match="no layer is called 'q_projj'; did you mean 'q_proj'"):
        runner.prepare(str(job), ["lora.enable=true", "lora.target_modules=q_projj"])
    with pytest.raises(JobError, match="training.packing is nothing for the torchtitan model 'qwen3'"):
        runner.prepare(str(job), ["model.name=qwen3", "model.flavor=tiny", "model.hf_assets_path=none", "training.packing=true"])
    folder = make_folder(tmp_path / "model", template=None)
    with pytest.raises(JobError, match="the tokenizer has no chat template"):
        runner.prepare(str(job), [f"model.hf_assets_path={folder}"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    with pytest.raises(JobError, match="tokenizer and model disagree: .*ids up to 2.., the model's vocabulary is 200"):
        runner.prepare(str(job), [f"model.hf_assets_path={folder}"])
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(JobError, match="no tokenizer in it"):
        runner.prepare(str(job), [f"model.hf_assets_path={folder}"])
