"""``npu_sdpa``: attention of transformers models through its two interfaces, masks, windows, padding, undo, two models."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import jumar
from jumar import models
from jumar.convert import ConverterError, plan
from op_util import assert_ulp

transformers = pytest.importorskip("transformers")
from jumar.hf import attention

NAME = ["npu_sdpa"]
FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl")


def qwen3(**more):
    settings = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings | more))


def run(model, **inputs):
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert_ulp(a, b.double(), 8.0, floor=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    model = models.build(family)
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
    before = run(model, input_ids=ids)
    report = jumar.convert(model, NAME, strict=True, verify=True)
    text = [s for s in report.replaced if ".visual." not in f".{s.path}."]
    assert len(text) == 2 and all(s.operator == "npu_fusion_attention" for s in text)
    jumar.reset_call_counts()
    same(run(model, input_ids=ids), before)
    assert jumar.call_counts()["npu_fusion_attention"] == 2
    assert jumar.call_counts()["npu_fusion_attention_grad"] == 2
    report.undo()
    jumar.reset_call_counts()
    assert all(torch.equal(a, b) for a, b in zip(run(model, input_ids=ids), before, strict=True))
    assert "npu_fusion_attention" not in jumar.call_counts()


def test_causal_attention_builds_no_mask(monkeypatch):
    seen = []
    forward = attention.attention_forward

    def spy(module, q, k, v, mask, **rest):
        seen.append(mask)
        return forward(module, q, k, v, mask, **rest)

    model = qwen3()
    jumar.convert(model, NAME)
    transformers.AttentionInterface.register("npu_sdpa", spy)
    try:
        model(
            input_ids=torch.ones(2, 9, dtype=torch.long),
            attention_mask=torch.ones(2, 9, dtype=torch.long),
        )
    finally:
        attention.register()
    assert seen == [None, None]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side):
    model = qwen3()
    ids = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    mask = mask if side == "left" else mask.flip(1)
    labels = ids.masked_fill(mask == 0, -100)

    def losses(m):
        m.zero_grad()
        loss = m(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in m.parameters())]

    want = losses(model)
    report = jumar.convert(model, NAME)
    assert len(report.replaced) == 2
    got = losses(model)
    assert all(g.isfinite().all() for g in got)
    same(got, want)


@pytest.mark.parametrize("padded", [False, True])
def test_sliding_window_is_a_band(padded):
    model = qwen3(
        sliding_window=4, use_sliding_window=True, max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids}
    if padded:
        inputs["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
        inputs["attention_mask"][1, :5] = 0
    want = run(model, **inputs)
    jumar.convert(model, NAME)
    jumar.reset_call_counts()
    got = run(model, **inputs)
    same(got, want)
    assert jumar.call_counts()["npu_fusion_attention"] == 2


def test_packed_sequences():
    model = qwen3()
    ids = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[*range(5), *range(7)]])
    want = run(model, input_ids=ids, position_ids=positions)
    jumar.convert(model, NAME)
    same(run(model, input_ids=ids, position_ids=positions), want)


def test_generation_with_a_cache():
    model = qwen3().eval()
    ids = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    settings = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    want = model.generate(ids, **settings)
    jumar.convert(model, NAME)
    jumar.reset_call_counts()
    assert torch.equal(model.generate(ids, **settings), want)
    assert jumar.call_counts()["npu_fusion_attention"] > 2


def test_the_scaling_is_the_modules():
    model = qwen3()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.2
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    want = run(model, input_ids=ids)
    jumar.convert(model, NAME)
    same(run(model, input_ids=ids), want)


def test_an_additive_bias_stays_with_torch():
    model = qwen3()
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    bias = torch.full((1, 1, 9, 9), -torch.inf).triu(1) - 0.5 * torch.arange(9.0)
    want = run(model, input_ids=ids, attention_mask=bias)
    jumar.convert(model, NAME)
    jumar.reset_call_counts()
    got = run(model, input_ids=ids, attention_mask=bias)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert "npu_fusion_attention" not in jumar.call_counts()
    # A boolean one of the caller's, True = visible, is turned round.
    seen = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    seen[..., 2] = False
    fresh = qwen3()
    same(
        run(model, input_ids=ids, attention_mask=seen),
        run(fresh, input_ids=ids, attention_mask=seen),
    )


def test_two_models_of_one_configuration():
    first = qwen3()
    second = transformers.Qwen3ForCausalLM(first.config)
    config = first.config
    assert second.config is config
    report = jumar.convert(first, NAME)
    assert config._attn_implementation == "sdpa" and first.config is not config
    assert first.model.config is first.model.layers[0].self_attn.config
    ids = torch.ones(1, 5, dtype=torch.long)
    jumar.reset_call_counts()
    second(input_ids=ids)
    assert "npu_fusion_attention" not in jumar.call_counts()
    first.config.use_cache = False
    report.undo()
    assert first.config is config and first.model.layers[1].self_attn.config is config
    assert config._attn_implementation == "sdpa" and config.use_cache is False
    report.undo()


def test_twice_copies_and_revert():
    model = qwen3()
    jumar.convert(model, NAME)
    again = plan(model, NAME).report()
    assert not again.replaced and {s.reason for s in again.skipped} == {"already converted"}
    ids = torch.ones(1, 5, dtype=torch.long)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        jumar.reset_call_counts()
        other(input_ids=ids)
        assert jumar.call_counts()["npu_fusion_attention"] == 2
        assert jumar.convert.revert(other) > 0
        assert other.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "npu_sdpa"


def test_saves_without_a_trace(tmp_path):
    model = qwen3()
    jumar.convert(model, NAME)
    model.save_pretrained(tmp_path)
    assert "npu_sdpa" not in (tmp_path / "config.json").read_text()
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation
        == "sdpa"
    )


def test_what_is_left_alone():
    model = qwen3()
    model.config._attn_implementation_internal = "flex_attention"
    report = plan(model, NAME).report()
    assert {s.reason for s in report.skipped} == {
        "its attention is 'flex_attention'"
    } and not report.replaced
    with pytest.raises(ConverterError, match="npu_sdpa matched nothing"):
        jumar.convert(model, NAME, strict=True)
    assert not plan(nn.Linear(3, 3), NAME).sites

    model = qwen3(attn_implementation="eager")
    assert {s.reason.split(",")[0] for s in plan(model, NAME).report().skipped} == {"its attention is 'eager'"}

    # One layer that must stay keeps all that share its configuration.
    model = qwen3()
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    reasons = {s.reason for s in plan(model, NAME).report().skipped}
    assert "it has attention sinks" in reasons and len(reasons) == 2

    model = qwen3()
    model.model.layers[0].self_attn.sliding_window = 4
    assert not plan(model, NAME).report().replaced


def test_dropout():
    model = qwen3(attention_dropout=0.5).train()
    jumar.convert(model, NAME)
    ids = torch.ones(1, 6, dtype=torch.long)
    torch.manual_seed(0)
    first = model(input_ids=ids).logits
    torch.manual_seed(0)
    assert torch.equal(first, model(input_ids=ids).logits)
    assert not torch.equal(first, model(input_ids=ids).logits)
    assert torch.equal(model.eval()(input_ids=ids).logits, model(input_ids=ids).logits)


def test_gradient_checkpointing():
    model = qwen3().train()
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    jumar.convert(model, NAME)
    want = run(model, input_ids=ids)
    model.gradient_checkpointing_enable()
    assert all(torch.equal(a, b) for a, b in zip(run(model, input_ids=ids), want, strict=True))


def test_compiles():
    model = qwen3().eval()
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    jumar.convert(model, NAME)
    want = model(input_ids=ids, use_cache=False).logits
    got = torch.compile(model, backend="aot_eager")(input_ids=ids, use_cache=False).logits
    assert_ulp(got, want.double(), 8.0, floor=1e-6)
