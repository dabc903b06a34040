"""``npu_sdpa``: attention of transformers models through its two interfaces, undo, copies, two models."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import jumar
from jumar import models
from jumar.convert import ConverterError, plan

transformers = pytest.importorskip("transformers")

from jumar.hf import attention
from sdpa_util import NAME, PACKED, error, qwen3, run, same, spreads

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_next",
    "qwen3_5_moe", "deepseek_v3",
)  # fmt: skip
FAMILIES = tuple(family for family in FAMILIES if family in models.available())
#: Layers with attention of the built-in models, where not all of two have it.
LAYERS = {"qwen3_next": 1, "qwen3_5_moe": 1, "deepseek_v3": 3}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(f, torch.float32) for f in FAMILIES] + [(f, torch.bfloat16) for f in ("qwen3", "qwen2_5_vl", "deepseek_v3")],
)
def test_families(family, dtype):
    """Text and images: outputs and all gradients beside eager's, in bf16 as far from fp32 as eager, but for chance.

    In fp32 a model amplifies what its attention rounds as it amplifies any last bit, and some by more than others: the
    gradients of a delta rule's decays are sums that cancel, which one ulp in the parameters moves by 1e-5 (``A_log``,
    ``dt_bias``) where most of a model's move by 1e-6. So the bound is what one ulp does to eager.
    """
    layers = LAYERS.get(family, 2)
    model = models.build(family)
    exact = None if dtype == torch.float32 else run(model, **models.example_inputs(model))
    model = model.to(dtype)
    inputs = models.example_inputs(model)
    before = run(model, **inputs)
    bounds = spreads(model, before, **inputs) if exact is None else []
    report = jumar.convert(model, NAME, strict=True, verify=dtype == torch.float32)
    text = [s for s in report.replaced if ".visual." not in f".{s.path}."]
    vision = len(report.replaced) - len(text)
    assert len(text) == layers and not report.skipped
    assert vision == (2 if "pixel_values" in inputs else 0)
    jumar.reset_call_counts()
    after = run(model, **inputs)
    # A call for each layer of a vision tower as well, whatever number of images and windows it sees.
    assert jumar.call_counts()["npu_fusion_attention"] == layers + vision
    assert jumar.call_counts()["npu_fusion_attention_grad"] == layers + vision
    if exact is None:
        for a, b, bound in zip(after, before, bounds, strict=True):
            assert (a - b).abs().max() <= 2 * bound
    else:
        assert error(after, exact) <= 1.3 * error(before, exact)
    report.undo()
    jumar.reset_call_counts()
    assert all(torch.equal(a, b) for a, b in zip(run(model, **inputs), before, strict=True))
    assert "npu_fusion_attention" not in jumar.call_counts()


def test_generation_with_a_cache():
    model = qwen3().eval()
    ids = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    settings = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    want = model.generate(ids, **settings)
    jumar.convert(model, NAME)
    jumar.reset_call_counts()
    assert torch.equal(model.generate(ids, **settings), want)
    assert jumar.call_counts()["npu_fusion_attention"] > 2


@pytest.mark.skipif(not hasattr(transformers, "GptOssForCausalLM"), reason="transformers has no gpt_oss")
@pytest.mark.parametrize("packed", [False, True])
def test_sinks(packed):
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.5) if "sinks" in name else p
    inputs = {"input_ids": torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))}
    if packed:
        inputs["position_ids"] = PACKED
    want = run(model, **inputs)
    report = jumar.convert(model, NAME, strict=True, verify=True)
    assert len(report.replaced) == 2
    jumar.reset_call_counts()
    same(run(model, **inputs), want)
    assert jumar.call_counts()["npu_fusion_attention"] == 2
    report.undo()
    assert model.config._attn_implementation == "eager"


def test_keys_chosen_by_indices_and_capped_scores_with_sinks_are_refused():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=r"npu_sdpa: Module chooses its keys by indices \[1, 3, 2\]; convert it with npu_dsa"):
        attention.attention_forward(nn.Module(), q, q, q, None, indices=torch.zeros(1, 3, 2))
    with pytest.raises(NotImplementedError, match="npu_sdpa: Module has sinks, and .* cap; set attn_implementation"):
        attention.attention_forward(nn.Module(), q, q, q, None, s_aux=torch.zeros(2), softcap=3.0)


def test_capped_scores_are_refused_by_site():
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8,
    )  # fmt: skip
    (site,) = plan(transformers.Gemma2ForCausalLM(config), NAME).report().skipped
    assert (site.path, site.reason) == ("model.layers.0.self_attn", "its scores are capped")


@pytest.mark.parametrize("name", ["jumar", "npu_sdpa"])
def test_chosen_by_name(name):
    model = qwen3(attn_implementation=name)
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    jumar.reset_call_counts()
    got = run(model, input_ids=ids)
    assert jumar.call_counts()["npu_fusion_attention"] == 2
    same(got, run(qwen3(), input_ids=ids))
    assert {s.reason for s in plan(model, NAME).report().skipped} == {"already converted"}
    later = qwen3()
    later.set_attn_implementation(name)
    same(run(later, input_ids=ids), got)


def test_the_scaling_is_the_modules():
    model = qwen3()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.2
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    want = run(model, input_ids=ids)
    jumar.convert(model, NAME)
    same(run(model, input_ids=ids), want)


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
    assert model.config._attn_implementation == attention.FUSED["sdpa"]


@pytest.mark.parametrize("name", ["jumar", "npu_sdpa"])
def test_revert_leaves_a_name_that_the_user_has_chosen(name):
    model, ids = qwen3(attn_implementation=name), torch.ones(1, 5, dtype=torch.long)
    report = jumar.kernelize(model)
    assert {s.reason for s in report.skipped if s.converter == "npu_sdpa"} == {"already converted"}
    for other in (copy.deepcopy(model), model):
        assert jumar.convert.revert(other) > 0
        assert other.config._attn_implementation == name
        assert {m.config._attn_implementation for m in other.modules() if hasattr(m, "config")} == {name}
        jumar.reset_call_counts()
        other(input_ids=ids)
        assert jumar.call_counts() == {"npu_fusion_attention": 2}


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
    assert "it has attention sinks, which it does not hand to its attention" in reasons
    assert len(reasons) == 2


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
