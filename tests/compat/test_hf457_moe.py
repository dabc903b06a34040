"""Mixtures of experts on transformers 4.57: experts are modules in a list, blocks route themselves and return a pair."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.register_assert_rewrite("convert_hf_suite", "moe_hf_suite")
transformers = pytest.importorskip("transformers")

import jumar
from jumar import models
from moe_hf_suite import *
from moe_hf_suite import CONVERTERS, assert_close, blocks, counted, tokens_of_kinds

LISTED = ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v3"]


@pytest.mark.parametrize("name", LISTED)
def test_a_block_returns_what_it_did(name):
    model = models.build(name)
    block = blocks(model)[0]
    hidden = tokens_of_kinds(model, 7)
    expected = block(hidden)
    jumar.convert(block, CONVERTERS, strict=True)
    actual = block(hidden)
    if name == "deepseek_v3":
        assert_close(actual, expected, 1e-5)
        return
    assert isinstance(actual, tuple) and len(actual) == 2
    for have, want in zip(actual, expected, strict=True):
        assert_close(have, want, 1e-5)


@pytest.mark.parametrize("name", LISTED)
def test_experts_without_tokens_get_no_gradient(name):
    """As in the loop: an optimizer passes over them, and no memory is spent on zeros."""
    model = models.build(name).train()
    block = blocks(model)[0]
    hidden = tokens_of_kinds(model, 1)
    jumar.convert(block, CONVERTERS, strict=True)
    out = block(hidden)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    hit = [all(p.grad is not None for p in expert.parameters()) for expert in block.experts]
    assert sum(hit) == 3
    assert all(
        p.grad is None
        for expert, h in zip(block.experts, hit, strict=True)
        if not h
        for p in expert.parameters()
    )


@pytest.mark.parametrize("name", LISTED)
def test_hooks_and_adapters_on_experts_run(name):
    """Whatever comes onto an expert later is not passed over."""
    model = models.build(name)
    block = blocks(model)[0]
    hidden = tokens_of_kinds(model, 9)
    jumar.convert(block, CONVERTERS, strict=True)
    seen = []
    for expert in block.experts:
        expert.register_forward_hook(lambda module, args, out: seen.append(out) or 2 * out)
    doubled = block(hidden)
    assert seen
    for expert in block.experts:
        expert._forward_hooks.clear()
    single, calls = counted(lambda: block(hidden))
    shared = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
    if shared is None:
        assert_close(doubled[0], 2 * single[0], 1e-5)
    assert calls["moe_ffn"] == 1


def test_noise_in_training_is_a_near_miss():
    model = models.build("mixtral")
    block = blocks(model)[0]
    block.jitter_noise = 0.1
    report = jumar.convert(block, CONVERTERS)
    assert [site.reason for site in report.sites] == [
        "computes something else in training mode"
    ] * 3


def test_experts_with_biases_are_a_near_miss():
    block = blocks(models.build("qwen3_moe"))[0]
    block.experts[2].up_proj.bias = torch.nn.Parameter(torch.zeros(24))
    report = jumar.convert(block, ["npu_gmm"])
    assert "three plain torch.nn.Linear without bias" in report.sites[0].reason


@pytest.mark.parametrize("shift", [-0.9, 0.0, 0.5])
def test_deepseek_with_negative_scores(shift):
    """4.57 fills the groups that are left out with zero: with negative choices it takes experts from there, which tie."""
    gate = blocks(models.build("deepseek_v3"))[0].gate
    gate.e_score_correction_bias.add_(shift)
    hidden = torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(3))
    expected = gate(hidden)
    jumar.convert(gate, ["npu_router"], strict=True, verify=True)
    actual = gate(hidden)
    scores = (hidden.view(80, 48) @ gate.weight.T).sigmoid()
    choice = (scores + gate.e_score_correction_bias).detach().view(80, 4, 2)
    kept = torch.zeros(80, 4).scatter(1, choice.sum(-1).topk(2, -1)[1], 1.0).bool()
    choice = choice.masked_fill(~kept[..., None], 0.0).view(80, 8)
    taken = [choice.gather(1, indices).sort(-1)[0] for indices, _ in (actual, expected)]
    assert torch.equal(*taken)
    assert bool((taken[0] == 0).any()) == (shift < 0)
    if shift >= 0:
        dense = [torch.zeros(80, 8).scatter(1, i, w) for i, w in (actual, expected)]
        assert_close(dense[0], dense[1], 1e-5)
