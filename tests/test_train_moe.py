"""Jobs of mixtures of experts: fused beside plain, their records, checkpoints, adapters, and the models they export."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan")

from jumar import titan
from jumar.train import JobError, experts, runner
from train_util import check_resumes, quickly, torchrun, train_job, write_job

NAMES = ["npu_rms_norm", "npu_rope", "npu_swiglu?", "npu_linear", "npu_gmm", "npu_permute", "npu_router"]
MODELS = {
    "qwen3": ["model.flavor=tiny_moe", "model.load_balance_coeff=0"],
    "deepseek_v3": ["model.name=deepseek_v3"],
}

_quick = pytest.fixture(autouse=True, scope="module")(quickly)


def _run(folder: Path, model: str, *overrides: str, converters: list[str] = NAMES) -> dict:
    return train_job(write_job(folder, converters), *MODELS[model], *overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Ten fp32 steps of each model, fused and plain."""
    found = {}
    for model in MODELS:
        for form, converters in (("fused", NAMES), ("eager", [])):
            folder = tmp_path_factory.mktemp(f"{model}_{form}")
            found[model, form] = _run(folder, model, "optimizer.lr=3e-3", "training.seq_len=32", converters=converters)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_the_plain_model(runs, model):
    fused, eager = (runs[model, form]["losses"] for form in ("fused", "eager"))
    assert len(fused) == 10 and fused[-1] < fused[0]
    distance = [abs(a - b) / b for a, b in zip(fused, eager, strict=True)]
    # The plain experts round to bf16.
    assert max(distance[:3]) <= 2e-5 and max(distance) <= 1e-4, distance


@pytest.mark.parametrize("model", MODELS)
def test_every_converter_ran(runs, model):
    rows = {row["converter"]: row for row in runs[model, "fused"]["operators"]}
    layers = 2
    for name in NAMES[-3:]:
        row = rows[name]
        assert row["planned"] == row["replaced"] == row["modules"] == layers and not row["skipped"]
        assert row["calls"] >= 10 * layers and row["backward_calls"] >= 10 * layers
    paths = {s["path"] for s in runs[model, "fused"]["report"]["sites"] if s["converter"] in NAMES[-3:]}
    assert {"layers.1.moe.router", "layers.1.moe.routed_experts", "layers.1.moe.routed_experts.inner_experts"} <= paths


@pytest.mark.parametrize("model", MODELS)
def test_tokens_of_every_expert_are_recorded(runs, model):
    run = runs[model, "fused"]
    assert [r["tokens_per_expert"] for r in run["records"][:1]] == [
        r["tokens_per_expert"] for r in runs[model, "eager"]["records"][:1]
    ]
    layers, top_k = (("0", "1"), 2) if model == "qwen3" else (("1", "2"), 3)
    for record in run["records"]:
        counts = record["tokens_per_expert"]
        assert tuple(counts) == layers
        assert all(len(c) == 8 and sum(c) == 2 * 32 * top_k for c in counts.values())
        worst = max(max(c) * 8 / sum(c) for c in counts.values())
        assert record["expert_balance_worst"] == pytest.approx(worst) and worst >= record["expert_balance"] >= 1
    folder = Path(run["dump_folder"])
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert written == run["records"]
    page = (folder / "report.html").read_text()
    assert "<h2>Experts</h2>" in page and "busiest expert over the mean" in page
    for count in counts[layers[-1]]:
        assert f'<data value="{count}">' in page
    assert "tokens per expert</th>" not in page


def test_balance():
    assert experts.balance([5, 5, 5]) == 1 and experts.balance([0, 6, 0]) == 3 and experts.balance([0, 0]) == 0


def test_progress_shows_the_balance(tmp_path, capfd):
    runner.train(
        runner.prepare(str(write_job(tmp_path, [])), [*MODELS["qwen3"], "training.steps=1", "checkpoint.export_hf=false"])
    )
    assert re.search(r"step +1/1 +loss [\d.]+ +balance [\d.]+ +grad norm", capfd.readouterr().err)


@pytest.mark.parametrize("model", MODELS)
def test_exported_model_gives_the_same_logits(runs, model):
    """As torchtitan's adapter reads it back, on fused operators."""
    from safetensors.torch import load_file
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from transformers import AutoModelForCausalLM

    from jumar.titan.models import model_spec

    folder = Path(runs[model, "fused"]["hf_folder"])
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    spec = model_spec(model, "tiny_moe" if model == "qwen3" else "tiny")
    if model == "qwen3":
        for layer in spec.model.layers:
            layer.moe.load_balance_coeff = None
    apply_overrides(OverrideConfig(imports=[f"jumar.titan.{name.rstrip('?')}" for name in NAMES]), spec)
    ours = spec.model.build()
    ours.init_states()
    weights = load_file(folder / "model.safetensors")
    assert not any(ours.load_state_dict(spec.state_dict_adapter(spec.model, None).from_hf(weights), strict=False))
    if model == "deepseek_v3":
        biases = [t for name, t in weights.items() if name.endswith("e_score_correction_bias")]
        assert len(biases) == 2 and all(bias.abs().max() > 1e-3 for bias in biases)
    tokens = torch.randint(0, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(40).expand(2, -1)
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(
            ours.eval()(tokens, positions, ours.get_attention_masks(positions)), expected, rtol=2e-5, atol=2e-5
        )


def test_exported_bias_is_not_rounded(tmp_path):
    """A bias of bf16 would choose other experts; transformers keeps it in fp32 too."""
    from safetensors.torch import load_file

    run = _run(tmp_path, "deepseek_v3", "training.steps=2", "checkpoint.export_dtype=bfloat16", converters=[])
    weights = load_file(Path(run["hf_folder"]) / "model.safetensors")
    assert {t.dtype for name, t in weights.items() if name.endswith("e_score_correction_bias")} == {torch.float32}
    assert weights["model.norm.weight"].dtype == torch.bfloat16


def test_models_that_transformers_does_not_have_are_not_exported(tmp_path, caplog):
    short = ["training.steps=1"]
    run = _run(tmp_path / "bias", "qwen3", *short, "model.load_balance_coeff=0.001", converters=[])
    assert run["hf_folder"] is None
    assert "Qwen3MoeForCausalLM has no expert bias; model.load_balance_coeff = 0 trains without one" in caplog.text
    from jumar.titan.models import model_spec
    from jumar.train import export

    assert "by softmax" in export.obstacle("deepseek_v3", model_spec("deepseek_v3", "debugmodel").model)
    assert export.obstacle("deepseek_v3", model_spec("deepseek_v3", "debugmodel_sigmoid").model) is None


def test_balancing_needs_experts(tmp_path):
    with pytest.raises(JobError, match="model.load_balance_coeff = 0.1: qwen3 tiny has no experts"):
        _run(tmp_path, "qwen3", "model.flavor=tiny", "model.load_balance_coeff=0.1", converters=[])


def test_resumed_run_gives_the_same_bits(tmp_path):
    """Weights, losses and the bias of the experts, which every step moves."""

    def run(folder, *overrides):
        return _run(folder, "deepseek_v3", *overrides)

    whole, second = check_resumes(run, tmp_path, 6, "grad_norm", "tokens_per_expert")
    assert (Path(second["hf_folder"]) / "model.safetensors").read_bytes() == (
        Path(whole["hf_folder"]) / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_computing_again_changes_no_bit(tmp_path, mode):
    short = ["training.steps=2", "metrics.plot_file=", "checkpoint.export_hf=false"]
    plain, again = (
        _run(tmp_path / m, "deepseek_v3", *short, f"activation_checkpoint.mode={m}") for m in ("none", mode)
    )
    assert again["losses"] == plain["losses"]
    assert [r["grad_norm"] for r in again["records"]] == [r["grad_norm"] for r in plain["records"]]
    assert [r["tokens_per_expert"] for r in again["records"]] == [r["tokens_per_expert"] for r in plain["records"]]


@pytest.mark.parametrize("model", MODELS)
def test_bf16_and_jumar_adamw(tmp_path, model):
    run = _run(
        tmp_path, model, "training.mixed_precision_param=bfloat16", "optimizer.name=jumar_adamw", "optimizer.lr=3e-3",
        "training.global_batch_size=4", "checkpoint.export_hf=false",
    )  # fmt: skip
    assert run["losses"][-1] < run["losses"][0] - 0.1
    assert all(sum(c) == 4 * 64 * (2 if model == "qwen3" else 3) for c in run["records"][-1]["tokens_per_expert"].values())


def test_adapters_leave_experts_and_their_bias_alone(tmp_path, caplog):
    run = _run(tmp_path, "deepseek_v3", "lora.enable=true", "training.steps=2")
    assert "experts have no adapters and stay as they are" in caplog.text
    from safetensors.torch import load_file

    weights = load_file(Path(run["hf_folder"]) / "model.safetensors")
    assert all(not t.any() for name, t in weights.items() if name.endswith("e_score_correction_bias"))
    assert not any("lora" in name for name in weights)
    with pytest.raises(JobError, match="'w1' is a part of experts or their router, which adapters do not cover"):
        _run(tmp_path / "named", "deepseek_v3", "lora.enable=true", "lora.target_modules=w1")


@pytest.mark.parametrize("file", ["qwen3_moe_debug.toml", "deepseek_v3_debug.toml"])
def test_job_files(file):
    """The jobs that come with the package name models and converters that go together."""
    from jumar.train import mapping
    from jumar.train.job import load

    job = load(str(Path(__file__).parents[1] / "configs" / file), [])
    report = titan.plan(mapping.model_spec(job), job["model"]["converters"])
    assert not report.unmatched and not report.skipped
    assert {"npu_gmm", "npu_permute", "npu_router"} <= set(report.requested)
    assert tomllib.loads(job.file.read_text())["model"]["name"] == job["model"]["name"]


LAYOUTS = {
    "expert": ["parallelism.expert_parallel_degree=2"],
    "tensor": ["parallelism.tensor_parallel_degree=2"],
    "tensor and expert": ["parallelism.tensor_parallel_degree=2", "parallelism.expert_parallel_degree=2"],
    "pipeline": ["parallelism.pipeline_parallel_degree=2"],
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes(tmp_path, layout):
    """Fused and plain agree, counts are of all ranks, and the exported model is whole."""
    if not os.environ.get("JUMAR_LONG_TESTS"):
        pytest.skip("long; set JUMAR_LONG_TESTS=1")
    options = [*MODELS["deepseek_v3"], "training.steps=3", "lr_scheduler.total_steps=10", *LAYOUTS[layout]]
    fused, eager = (
        torchrun(write_job(tmp_path / str(len(names)), names), *options) for names in (NAMES, [])
    )
    assert fused["losses"] == pytest.approx(eager["losses"], rel=5e-5)
    # Ranks that share the tokens of a sequence count them once; data-parallel ones have tokens of their own.
    sequences = 4 if layout == "expert" else 2
    for run in (fused, eager):
        for record in run["records"]:
            assert all(sum(c) == sequences * 64 * 3 for c in record["tokens_per_expert"].values())
            assert set(record["tokens_per_expert"]) == {"1", "2"}
    assert Path(fused["hf_folder"], "model.safetensors").is_file()
