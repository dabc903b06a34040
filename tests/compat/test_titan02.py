"""torchtitan 0.2.x from its own TOML, with jumar's converters; run by `make test-compat` in an environment that has it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch


def _installed() -> str:
    try:
        return version("torchtitan")
    except PackageNotFoundError:
        return "none"


pytestmark = pytest.mark.skipif(
    not _installed().startswith("0.2."), reason=f"needs torchtitan 0.2.x, found {_installed()}"
)

CONVERTERS = ["npu_rms_norm", "npu_rope", "npu_sdpa", "npu_swiglu", "npu_linear"]
MOE = ["npu_rms_norm", "npu_sdpa", "npu_swiglu", "npu_linear", "npu_gmm", "npu_permute", "npu_router"]
_JOB = """
[job]
dump_folder = "{folder}/out"
[model]
name = "{model}"
flavor = "debugmodel"
hf_assets_path = "{folder}/tokenizer"
{converters}
[experimental]
custom_import = "jumar.titan02"
[training]
dataset = "c4_test"
dataset_path = "{folder}/data"
local_batch_size = 2
seq_len = 64
steps = 3
mixed_precision_param = "float32"
[optimizer]
lr = 1e-3
eps = 1e-6
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 1
disable_color_printing = true
[debug]
seed = 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data and a byte-level tokenizer of 2048 entries at most."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    place = tmp_path_factory.mktemp("titan02")
    words = "the rope holds a climber who reads one page of every book that the wall has kept".split()
    texts = [" ".join(words[(i * 7 + j * j) % len(words)] for j in range(20 + i % 50)) for i in range(200)]
    (place / "data").mkdir()
    (place / "data" / "data.json").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    (place / "tokenizer").mkdir()
    tokenizer.save(str(place / "tokenizer" / "tokenizer.json"))
    (place / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return place


def _run(folder: Path, model: str, converters: list[str], *arguments: str, processes: int = 1) -> str:
    job = folder / "job.toml"
    line = f"converters = {json.dumps(converters)}" if converters else ""
    job.write_text(_JOB.format(folder=folder, model=model, converters=line))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"),
            *("-m", "jumar.compat.launch", "--job.config_file", str(job), *arguments),
        ],
        env=environment, capture_output=True, text=True, timeout=300, cwd=folder,
    )
    output = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(output[-4000:])
    return output


def _losses(output: str) -> list[float]:
    found = {int(step): float(loss) for step, loss in re.findall(r"step:\s+(\d+)\s+loss:\s+([\d.]+)", output)}
    assert sorted(found) == [1, 2, 3]
    return [found[step] for step in sorted(found)]


@pytest.mark.parametrize(("model", "norms", "linears"), [("qwen3", 33, 57), ("llama3", 13, 43)])
def test_losses_and_counts(folder, model, norms, linears):
    fused = _run(folder, model, CONVERTERS)
    assert f"npu_rms_norm: {norms} modules replaced" in fused
    assert f"npu_linear: {linears} modules replaced" in fused
    assert f"npu_sdpa: {dict(qwen3=8, llama3=6)[model]} modules replaced" in fused
    assert _losses(fused) == pytest.approx(_losses(_run(folder, model, [])), rel=1e-5)


def test_flex_attention(folder):
    """FlexAttention has no backward on CPUs: with npu_sdpa the model of documents trains, without it there is none."""
    fused = _run(folder, "llama3", CONVERTERS, "--model.flavor=debugmodel_flex_attn")
    assert "npu_sdpa: 6 modules replaced" in fused
    losses = _losses(fused)
    assert losses[2] < losses[0]


def test_two_processes(folder):
    arguments = ["--parallelism.tensor_parallel_degree=2"]
    fused = _losses(_run(folder, "llama3", CONVERTERS, *arguments, processes=2))
    assert fused == pytest.approx(_losses(_run(folder, "llama3", [], *arguments, processes=2)), rel=1e-5)


def test_mixture_of_experts(folder):
    fused = _run(folder, "deepseek_v3", MOE)
    for name in MOE[-3:]:
        assert f"{name}: 5 modules replaced" in fused
    # The plain experts round to bf16.
    assert _losses(fused) == pytest.approx(_losses(_run(folder, "deepseek_v3", [])), rel=5e-5)


@pytest.mark.parametrize("layout", ["expert", "tensor"])
def test_experts_on_two_processes(folder, layout):
    arguments = [f"--parallelism.{layout}_parallel_degree=2"]
    fused = _losses(_run(folder, "deepseek_v3", MOE, *arguments, processes=2))
    expected = _losses(_run(folder, "deepseek_v3", [], *arguments, processes=2))
    assert fused == pytest.approx(expected, rel=5e-5)


def _mixture(before: bool, score: str = "sigmoid", **more):
    from torchtitan.models.moe.moe import MoE, MoEArgs

    torch.manual_seed(0)
    arguments = MoEArgs(
        num_experts=8, num_shared_experts=1, score_func=score, top_k=3, score_before_experts=before, route_norm=True,
        route_scale=1.5, use_grouped_mm=False, **more,
    )  # fmt: skip
    model = MoE(arguments, 32, 16)
    with torch.no_grad():
        model.init_weights(0.2, torch.device("cpu"))
    model.expert_bias.copy_(torch.linspace(-0.2, 0.2, 8))
    return model


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("names", [MOE[-3:], ["npu_gmm"], ["npu_permute"], ["npu_router"]], ids=" ".join)
def test_mixture_against_its_parent(before, names):
    """Outputs, gradients, counts, with scores before or after the experts; the parent runs its loop over experts in fp32."""
    import copy
    from types import SimpleNamespace

    from jumar.titan02 import converters

    plain = _mixture(before, num_expert_groups=4, num_limited_groups=2)
    model = copy.deepcopy(plain)
    dims = SimpleNamespace(tp_enabled=False, ep_enabled=False, etp=1)
    for name in names:
        report = converters._report(model, name, dims)
        assert len(report.replaced) == 1 and not report.skipped
        assert [s.reason for s in converters._report(model, name, dims).skipped] == ["already converted"]
    assert list(model.state_dict()) == list(plain.state_dict())
    results = []
    for net in (plain, model):
        x = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = net(x)
        out.square().sum().backward()
        results.append([out, x.grad, net.tokens_per_expert, *(p.grad for p in net.parameters())])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-5 * want.abs().max().item())


def test_mixtures_that_are_left_alone():
    from types import SimpleNamespace

    from jumar.titan02 import converters

    model = _mixture(False, _debug_force_load_balance=True)
    dims = SimpleNamespace(tp_enabled=True, ep_enabled=True, etp=1)
    reasons = {name: [s.reason for s in converters._report(model, name, dims).skipped] for name in MOE[-3:]}
    assert reasons["npu_gmm"] == []
    assert reasons["npu_permute"] == ["its tensor-parallel ranks share out the tokens, which the module's own reordering does"]
    assert reasons["npu_router"] == ["_debug_force_load_balance routes by position, not by scores"]


def test_nothing_matched_is_an_error_unless_optional(folder):
    with pytest.raises(RuntimeError, match="npu_rope matched nothing in this model"):
        _run(folder, "deepseek_v3", ["npu_rope"])


def test_token_order_of_the_experts():
    from jumar.titan02.moe_indices import generate_permute_indices

    # Two ranks, three experts; what each rank sends lies behind one another.
    counts = torch.tensor([4, 2, 0, 3, 1, 5])
    indices, sizes, ends = generate_permute_indices(counts, 3, 2, 32, 4)
    assert sizes.tolist() == [8, 4, 8] and ends.tolist() == [8, 12, 20]
    starts = [0, 4, 6, 6, 9, 10]
    expected = [-1] * 32
    for expert, begin in enumerate([0, 8, 12]):
        at = begin
        for rank in range(2):
            block = rank * 3 + expert
            for k in range(counts[block]):
                expected[at] = starts[block] + k
                at += 1
    assert indices.tolist() == expected
    short, _, _ = generate_permute_indices(counts, 3, 2, 6, 4)
    assert short.tolist() == expected[:6]
