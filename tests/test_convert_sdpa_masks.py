"""``npu_sdpa`` in transformers models: masks are ranges of keys, and matrices where they are none."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F

import jumar

transformers = pytest.importorskip("transformers")
from transformers import masking_utils

from jumar.hf import attention, masks
from op_util import assert_ulp
from sdpa_util import NAME, PACKED, error, lazy_only, qwen3, run, same


def test_causal_attention_builds_no_mask(monkeypatch):
    seen = []
    forward = attention.attention_forward

    def spy(module, q, k, v, mask, **rest):
        seen.append(mask)
        return forward(module, q, k, v, mask, **rest)

    model = qwen3()
    jumar.convert(model, NAME)
    transformers.AttentionInterface.register(attention.FUSED["sdpa"], spy)
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


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences_are_lengths(monkeypatch, window, dtype):
    sliding = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0}
    model = qwen3(**(sliding if window else {})).to(dtype)
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    exact = run(copy.deepcopy(model).double(), input_ids=ids, position_ids=PACKED)
    want = run(model, input_ids=ids, position_ids=PACKED)
    jumar.convert(model, NAME)
    jumar.reset_call_counts()
    lazy_only(monkeypatch)
    got = run(model, input_ids=ids, position_ids=PACKED)
    assert jumar.call_counts()["npu_fusion_attention"] == 2
    # Each document alone gives the same logits.
    alone = model(input_ids=ids[1:, 3:], use_cache=False).logits.detach()
    if dtype == torch.float32:
        same(got, want)
        same([got[0][1:, 3:]], [alone])
    else:
        # Added up over logits and gradients: what is left of chance is some percent.
        assert error(got, exact) <= 1.1 * error(want, exact)
        assert error([alone], [exact[0][1:, 3:]]) <= 1.1 * error([want[0][1:, 3:]], [exact[0][1:, 3:]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("window", [None, 3, 200])
def test_packed_documents_have_the_bits_of_documents_alone(window, dtype):
    """By the attention function itself; gradients, too."""
    lengths, module = (1, 130, 5, 300, 64), torch.nn.Module()
    total, gen = sum(lengths), torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, n, total, 24, generator=gen).to(dtype).requires_grad_() for n in (4, 2, 2)]
    weight = torch.randn(1, total, 4, 24, generator=gen).to(dtype)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]

    def attend(tensors, part, ids):
        known, size = masking_utils, part.stop - part.start
        function = known.causal_mask_function if window is None else known.sliding_window_causal_mask_function(window)
        if ids is not None:
            function = known.and_masks(function, known.packed_sequence_mask_function(ids))
        mask = masks.attention_mask(batch_size=1, q_length=size, kv_length=size, mask_function=function)
        assert mask is None or isinstance(mask, masks.LazyMask)
        out = attention.attention_forward(module, *(t[:, :, part] for t in tensors), mask)[0]
        return [out.detach(), *torch.autograd.grad((out * weight[:, part]).sum(), tensors)]

    packed, begin = attend(leaves, slice(0, total), ids), 0
    for length in lengths:
        part = slice(begin, begin + length)
        out, *grads = attend(leaves, part, None)
        assert torch.equal(out, packed[0][:, part])
        assert all(torch.equal(a[:, :, part], b[:, :, part]) for a, b in zip(grads, packed[1:], strict=True))
        begin += length


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


def test_lengths_that_do_not_add_up_are_an_error():
    batch = {"input_ids": torch.randint(3, 60, (1, 11)), "position_ids": torch.arange(11)[None]}
    given = {"cu_seq_lens_q": torch.tensor([0, 4, 9]), "cu_seq_lens_k": torch.tensor([0, 4, 9])}
    model = qwen3()
    jumar.convert(model, NAME)
    # Transformers 4.57 makes a mask of the positions, beside which they are looked at.
    with pytest.raises(RuntimeError, match="(npu_fusion_attention: actual_seq_qlen|npu_sdpa: cu_seq_lens_q) .*11"):
        model(**batch, **given, use_cache=False)


def lengths(*sizes, keys=None):
    starts = [torch.tensor([0, *ends]).cumsum(0).int() for ends in (sizes, keys or sizes)]
    return {"cu_seq_lens_q": starts[0], "cu_seq_lens_k": starts[1]}


def padded_qkv(queries=6):
    """Attention of two rows of nine keys, the first of them padded at its left, with a lazy mask; fp64 on its matrix."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8, generator=gen) for n in (queries, 9, 9))
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, :2] = False
    made = masks.attention_mask(
        batch_size=2, q_length=queries, kv_length=9, q_offset=9 - queries, attention_mask=padding
    )  # fmt: skip
    assert isinstance(made, masks.LazyMask)
    return (q, k, v), made


@pytest.mark.parametrize(
    ("queries", "given"),
    [(9, lengths(4, 5, 6, 3)), (9, lengths(4, 11, 3)), (9, lengths(18)), (6, lengths(2, 4, 6, keys=(5, 4, 9)))],
    ids=["in rows", "across rows", "one", "fewer queries"],
)
def test_lengths_cut_a_mask(queries, given):
    tensors, made = padded_qkv(queries)
    out = attention.attention_forward(torch.nn.Module(), *tensors, made, **given)[0]
    same([attention.attention_forward(torch.nn.Module(), *tensors, made.value(), **given)[0]], [out])
    of = [
        torch.arange(len(t) - 1).repeat_interleave(t.long().diff()).view(2, n)
        for t, n in zip(given.values(), (queries, 9), strict=True)
    ]
    matrix = made.value() & (of[0][:, :, None] == of[1][:, None])[:, None]
    want = F.scaled_dot_product_attention(*(t.double() for t in tensors), attn_mask=matrix)
    want = want.masked_fill(~matrix.any(-1, keepdim=True), 0)
    assert_ulp(out.transpose(1, 2), want, 4.0, floor=1e-6)


@pytest.mark.parametrize(
    "given",
    [lengths(4, 5, 6), lengths(4, 5, 6, 4), lengths(9), lengths(4, 5, 9, keys=(9, 8)), lengths(20, -2), lengths(18, keys=(9, 9))]
    + [{name: values + 1 for name, values in lengths(4, 13).items()}],
)  # fmt: skip
def test_lengths_beside_a_mask_must_add_up(given):
    tensors, made = padded_qkv(9)
    for mask in (made, made.value()):
        with pytest.raises(RuntimeError, match="npu_sdpa: cu_seq_lens_[qk] .*(rise from 0 to the 2 x 9 tokens|as many)"):
            attention.attention_forward(torch.nn.Module(), *tensors, mask, **given)


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


def test_a_lazy_tensor_has_a_value():
    from jumar.hf.lazy import Lazy

    with pytest.raises(TypeError, match="Other: a subclass of Lazy must define value"):
        type("Other", (Lazy,), {})
    with pytest.raises(TypeError, match="Lazy is abstract"):
        Lazy(3)


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
