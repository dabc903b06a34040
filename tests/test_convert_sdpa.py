"""``npu_sdpa``: attention of transformers models through its two interfaces, masks, windows, padding, undo, two models."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import jumar
from jumar import models
from jumar.convert import ConverterError, plan
from op_util import assert_ulp

transformers = pytest.importorskip("transformers")
from transformers import masking_utils

from jumar.hf import attention, masks

NAME = ["npu_sdpa"]
FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_next",
    "qwen3_5_moe", "deepseek_v3",
)  # fmt: skip
FAMILIES = tuple(family for family in FAMILIES if family in models.available())
#: Layers with attention of the built-in models, where not all of two have it.
LAYERS = {"qwen3_next": 1, "qwen3_5_moe": 1, "deepseek_v3": 3}


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


def same(ours, theirs, floor=0.0, relative=1e-5):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert_ulp(a, b.double(), 8.0, floor=max(floor, relative * b.abs().max().item()))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(f, torch.float32) for f in FAMILIES] + [(f, torch.bfloat16) for f in ("qwen3", "qwen2_5_vl", "deepseek_v3")],
)
def test_families(family, dtype):
    """Text and images: outputs and all gradients beside eager's, in bf16 as far from fp32 as eager, but for chance."""
    layers = LAYERS.get(family, 2)
    model = models.build(family)
    exact = None if dtype == torch.float32 else run(model, **models.example_inputs(model))
    model = model.to(dtype)
    inputs = models.example_inputs(model)
    before = run(model, **inputs)
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
        # The decays of delta rules amplify what attention rounds.
        same(after, before, relative=3e-5 if "A_log" in "".join(model.state_dict()) else 1e-5)
    else:
        ours, eager = (
            sum(float((t.double() - e).norm() / e.norm()) for t, e in zip(ts, exact, strict=True) if e.norm() > 1e-6)
            for ts in (after, before)
        )
        assert ours <= 1.3 * eager
    report.undo()
    jumar.reset_call_counts()
    assert all(torch.equal(a, b) for a, b in zip(run(model, **inputs), before, strict=True))
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


def lazy_only(monkeypatch):
    """Fails where a mask is made as a matrix."""
    monkeypatch.setattr(masks.LazyMask, "value", lambda self: pytest.fail("a matrix was made"))
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda **_: pytest.fail("a matrix was made"))


@pytest.mark.skipif(not hasattr(masking_utils, "remap_positions_for_packed_sequence"), reason="transformers 5")
@pytest.mark.parametrize("padded", [False, True])
def test_masks_are_those_of_transformers(padded):
    """Whatever is read from a composed function equals what transformers makes of it; what cannot be read is a matrix."""
    known = masking_utils
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, *range(7)]])
    packed, window = known.packed_sequence_mask_function(ids), known.sliding_window_causal_mask_function(3)
    remap = known.remap_positions_for_packed_sequence
    functions = {
        "causal": known.causal_mask_function,
        "full": known.bidirectional_mask_function,
        "window": window,
        "both sides": known.sliding_window_bidirectional_mask_function(2),
        "packed": known.and_masks(known.causal_mask_function, packed),
        "packed window": known.and_masks(remap(window, positions), packed),
        "chunks": known.chunked_causal_mask_function(3, torch.tensor([0, 2])),
        "other positions": known.and_masks(remap(window, 2 * positions), packed),
        "not packed": remap(window, positions),
        "or": known.or_masks(window, packed),
        "ids that return": known.packed_sequence_mask_function(ids % 2),
    }
    options = dict(batch_size=2, kv_length=8, q_length=8, allow_is_causal_skip=False)
    if padded:
        options["attention_mask"] = torch.tensor([[False] * 2 + [True] * 6, [True] * 5 + [False] * 3])
    for name, function in functions.items():
        made = masks.attention_mask(mask_function=function, **options)
        read = isinstance(made, masks.LazyMask)
        assert read == (name not in ("chunks", "other positions", "not packed", "or", "ids that return"))
        want = known.sdpa_mask(mask_function=function, **options)
        assert torch.equal(made.value() if read else made, want), name
    options |= {"q_length": 3, "q_offset": 4, "kv_offset": 1, "kv_length": 6}
    for name in ("causal", "full", "window"):
        made = masks.attention_mask(mask_function=functions[name], **options)
        assert torch.equal(made.value(), known.sdpa_mask(mask_function=functions[name], **options)), name


PACKED = torch.tensor([[*range(5), *range(1), *range(6)], [*range(3), *range(9)]])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences_are_lengths(monkeypatch, window, dtype):
    sliding = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0}
    model = qwen3(**(sliding if window else {})).to(dtype)
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    want = run(model, input_ids=ids, position_ids=PACKED)
    jumar.convert(model, NAME)
    jumar.reset_call_counts()
    lazy_only(monkeypatch)
    got = run(model, input_ids=ids, position_ids=PACKED)
    assert jumar.call_counts()["npu_fusion_attention"] == 2
    if dtype == torch.float32:
        same(got, want)
    else:
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() <= 0.02 * b.norm()
    # Each document alone gives the same logits.
    alone = model(input_ids=ids[1:, 3:], use_cache=False).logits
    torch.testing.assert_close(got[0][1:, 3:], alone, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)


def test_lengths_of_a_collator(monkeypatch):
    """What transformers' collator for flash attention gives: lengths with and without positions."""
    features = [{"input_ids": torch.randint(3, 60, (n,)).tolist()} for n in (4, 1, 6)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = dict(collate(features))
    batch.pop("labels")
    model = qwen3()
    plain = {k: v for k, v in batch.items() if k in ("input_ids", "position_ids")}
    want = run(model, **plain)
    jumar.convert(model, NAME)
    lazy_only(monkeypatch)
    same(run(model, **batch), want)
    batch.pop("position_ids")
    positions = {"position_ids": torch.arange(11)[None]}
    same(
        [model(**batch, **positions, use_cache=False).logits],
        [torch.cat([model(input_ids=torch.tensor([f["input_ids"]]), position_ids=torch.arange(at, at + len(f["input_ids"]))[None], use_cache=False).logits for at, f in zip((0, 4, 5), features, strict=True)], 1)],
    )  # fmt: skip


def test_a_lazy_mask_is_a_mask():
    made = masks.attention_mask(
        batch_size=2, q_length=4, kv_length=4, attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    )
    assert isinstance(made, masks.LazyMask) and made.shape == (2, 1, 4, 4) and made.dtype == torch.bool
    want = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    want[0, ..., 0] = False
    assert made._value is None and repr(made) == "LazyMask(shape=(2, 1, 4, 4))"
    assert torch.equal(made[:, :, :2], want[:, :, :2]) and torch.equal(made.to(torch.uint8), want.byte())
    other = made.contiguous()
    assert isinstance(other, masks.LazyMask) and not other.changed
    other[0, 0, 3, 0] = True
    assert other.changed and not made.changed and not bool(made[0, 0, 3, 0])
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(other) is torch.Tensor and torch.equal(other, want)


def test_generation_with_a_cache():
    model = qwen3().eval()
    ids = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    settings = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    want = model.generate(ids, **settings)
    jumar.convert(model, NAME)
    jumar.reset_call_counts()
    assert torch.equal(model.generate(ids, **settings), want)
    assert jumar.call_counts()["npu_fusion_attention"] > 2


def test_generation_of_a_padded_batch_in_a_static_cache(monkeypatch):
    model = qwen3().eval()
    ids = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    settings = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, attention_mask=mask)
    settings |= dict(cache_implementation="static", disable_compile=True)
    want = model.generate(ids, **settings)
    jumar.convert(model, NAME)
    lazy_only(monkeypatch)
    assert torch.equal(model.generate(ids, **settings), want)


def test_continued_prefill(monkeypatch):
    """A second piece of a prompt behind a cache: causal from the lower right."""
    model = qwen3().eval()
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    jumar.convert(model, NAME)
    lazy_only(monkeypatch)
    cache = transformers.DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(ids[:, :4], use_cache=True, **{name: cache})
    got = model(ids[:, 4:], use_cache=True, **{name: cache}).logits
    same([got], [model(ids, use_cache=False).logits[:, 4:]])


def test_cross_attention():
    """An encoder with padding, a causal decoder, attention between them."""
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config)
    gen = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    inputs = {
        "input_ids": torch.randint(3, 64, (2, 9), generator=gen),
        "decoder_input_ids": torch.randint(3, 64, (2, 6), generator=gen),
        "attention_mask": mask,
    }
    want = run(model, **inputs)
    report = jumar.convert(model, NAME)
    assert len(report.replaced) == 3
    jumar.reset_call_counts()
    # The bias of a key projection has no effect: its gradient is rounding.
    same(run(model, **inputs), want, floor=1e-8)
    assert jumar.call_counts()["npu_fusion_attention"] >= 3


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


def test_keys_chosen_by_indices_are_refused():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="npu_sdpa: Module chooses its keys by indices"):
        attention.attention_forward(nn.Module(), q, q, q, None, indices=torch.zeros(1, 3, 2))


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


def test_an_additive_bias_is_a_bias():
    model, ids = qwen3(), torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    causal = torch.ones(1, 1, 9, 9).triu(1).bool()
    lowest = torch.finfo(torch.float32).min
    masks = [torch.zeros(1, 1, 9, 9).masked_fill(causal, low) for low in (-torch.inf, lowest)]
    masks.append(masks[0] - 0.5 * torch.arange(9.0))
    # A row of the lowest numbers alone is no row that sees nothing.
    masks.append(masks[1].masked_fill((torch.arange(9) == 4)[:, None], lowest))
    for number, mask in enumerate(masks):
        fresh = qwen3()
        want = run(fresh, input_ids=ids, attention_mask=mask)
        jumar.convert(fresh, NAME)
        jumar.reset_call_counts()
        same(run(fresh, input_ids=ids, attention_mask=mask), want)
        assert jumar.call_counts().get("npu_fusion_attention", 0) == (2 if number < 3 else 0)
    # In 16 bits a bias is only divided by a power of two.
    low, scaled = qwen3().bfloat16(), masks[2].bfloat16()
    low.model.layers[1].self_attn.scaling = 0.25
    jumar.convert(low, NAME)
    jumar.reset_call_counts()
    low(input_ids=ids, attention_mask=scaled)
    assert jumar.call_counts()["npu_fusion_attention"] == 1
    # A boolean one of the caller's, True = visible, is turned round.
    seen = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    seen[..., 2] = False
    jumar.convert(model, NAME)
    same(
        run(model, input_ids=ids, attention_mask=seen),
        run(qwen3(), input_ids=ids, attention_mask=seen),
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


def test_compiles():
    model = qwen3().eval()
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    jumar.convert(model, NAME)
    want = model(input_ids=ids, use_cache=False).logits
    got = torch.compile(model, backend="aot_eager")(input_ids=ids, use_cache=False).logits
    assert_ulp(got, want.double(), 8.0, floor=1e-6)
