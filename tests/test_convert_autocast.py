"""Attention under autocast: what rotary tables have widened is narrowed again, as for torch's own attention."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import jumar
from jumar import dsa, models
from jumar.masks import functions
from op_util import assert_ulp

LENGTH = 20


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def tensors(order=(0, 1, 2)):
    """Query and key of fp32, as rotation by fp32 tables gives them, value of bf16; [B, N, S, D] in another order."""
    gen = torch.Generator().manual_seed(0)
    made = [torch.randn(2, n, LENGTH, 8, generator=gen) for n in (4, 2, 2)]
    made[2] = made[2].bfloat16()
    axes = (0, *(1 + a for a in order))
    return [t.permute(axes).contiguous().requires_grad_() for t in made]


def run(call, inputs, inside=True):
    """Output and gradients; ``inside``: of a call under autocast, otherwise of the same in bf16."""
    if not inside:
        inputs = [t.detach().bfloat16().requires_grad_() for t in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=inside), warnings.catch_warnings():
        warnings.simplefilter("error")
        jumar.reset_call_counts()
        out = call(*inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = torch.autograd.grad((out * weight).sum(), inputs)
    counts = {k: v for k, v in jumar.call_counts().items() if "fusion" in k}
    assert counts == {"npu_fusion_attention": 1, "npu_fusion_attention_grad": 1}
    return [out.detach(), *grads]


def check(call, order=(0, 1, 2)):
    """The operator ran, in bf16: the bits are those of a call with bf16 tensors."""
    inputs = tensors(order)
    got, want = run(call, inputs), run(call, inputs, inside=False)
    assert got[0].dtype == torch.bfloat16 and [g.dtype for g in got[1:]] == [
        t.dtype for t in inputs
    ]
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, want, strict=True))
    return got[0]


def exact(mask=None, **options):
    wide = (t.detach().bfloat16().double() for t in tensors())
    return F.scaled_dot_product_attention(*wide, mask, enable_gqa=True, **options)


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
LOW = torch.zeros(LENGTH, LENGTH).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (None, {"is_causal": True}),
        (CAUSAL, {}),
        (LOW, {}),
        (LOW - torch.arange(20.0), {"scale": 0.25}),
        (None, {}),
    ],
    ids=["causal", "bool", "lowest", "bias", "full"],
)
def test_scaled_dot_product_attention(mask, options):

    def call(*t):
        beside = mask.to(t[0].dtype) if mask is not None and mask.is_floating_point() else mask
        return functions.scaled_dot_product_attention(*t, beside, enable_gqa=True, **options)

    got = check(call)
    wide = (
        mask.double().masked_fill(mask < -1e30, -torch.inf)
        if mask is not None and mask.is_floating_point()
        else mask
    )
    assert_ulp(got, exact(wide, **options), 0.51)


def test_a_bias_that_bf16_would_round_is_torchs():
    call = functions.scaled_dot_product_attention
    inputs = [t.detach() for t in tensors()]
    bias = LOW - torch.arange(20.0)
    with autocast():
        jumar.reset_call_counts()
        got = call(*inputs, bias, enable_gqa=True)
        assert torch.equal(got, F.scaled_dot_product_attention(*inputs, bias, enable_gqa=True))
    assert not jumar.call_counts()


def test_flex_attention():
    block = create_block_mask(
        lambda b, h, q, k: q >= k, 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16
    )
    call = functions.flex_attention_by(flex_attention)
    got = check(lambda *t: call(*t, block_mask=block, enable_gqa=True))
    assert_ulp(got, exact(is_causal=True), 0.51)
    assert_ulp(check(lambda *t: call(*t, enable_gqa=True)), exact(), 0.51)


def test_modules_of_ones_own():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x, turn):
            q, k, v = self.qkv(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, 1)
            return F.scaled_dot_product_attention(q * turn, k * turn, v, is_causal=True)

    torch.manual_seed(0)
    model = nn.Sequential(Attention())
    x, turn = torch.randn(2, LENGTH, 32), torch.rand(LENGTH, 8)
    wide = model[0].double()(x.double(), turn.double())
    model.float()
    with autocast():
        eager = model[0](x, turn)
        jumar.convert(model, "npu_sdpa", strict=True)
        jumar.reset_call_counts()
        fused = model[0](x, turn)
    assert (
        jumar.call_counts()["npu_fusion_attention"] == 1
        and fused.dtype == eager.dtype == torch.bfloat16
    )
    assert (fused.double() - wide).norm() <= 1.02 * (eager.double() - wide).norm()


def test_fp64_stays():
    inputs = [t.detach().double() for t in tensors()]
    with autocast():
        assert (
            functions.scaled_dot_product_attention(*inputs, enable_gqa=True).dtype == torch.float64
        )


def test_what_inference_made_first_is_good_in_training():
    """Masks that are kept, for the process or on a BlockMask."""
    from jumar.masks import attend

    device = torch.device("cpu")
    block = create_block_mask(
        lambda b, h, q, k: (q + k) % 3 != 0, 2, None, LENGTH, LENGTH, device="cpu"
    )
    flex = functions.flex_attention_by(flex_attention)
    with torch.inference_mode():
        for kept in (
            attend.upper_left,
            lambda d: attend.packed_band(d, None),
            lambda d: attend.band(d, 2, 2, None),
        ):
            assert not kept(device)["atten_mask"].is_inference()
        flex(*(t.detach().float() for t in tensors()), block_mask=block, enable_gqa=True)
    inputs = [t.detach().float().requires_grad_() for t in tensors()]
    flex(*inputs, block_mask=block, enable_gqa=True).sum().backward()
    assert all(t.grad is not None for t in inputs)


def test_torchtitan():
    pytest.importorskip("torchtitan")
    from jumar import compat

    compat.apply()
    from torchtitan.models.common.attention import create_varlen_metadata_for_document

    from jumar.titan import attention as titan

    def block(mod):
        return create_block_mask(mod, 2, None, LENGTH, LENGTH, device="cpu")

    flex, order = titan.FusedFlexAttention.Config().build(), (1, 0, 2)
    mods = (lambda b, h, q, k: q >= k, lambda b, h, q, k: (q >= k) & ((q + k) % 3 != 1))
    for mask in map(block, mods):
        check(lambda *t, m=mask: flex(*t, attention_masks=m, enable_gqa=True), order)
    plain = titan.FusedScaledDotProductAttention.Config().build()
    got = check(lambda *t: plain(*t, enable_gqa=True), order)
    assert_ulp(got.transpose(1, 2), exact(is_causal=True), 0.51)
    lengths = create_varlen_metadata_for_document(torch.arange(LENGTH).repeat(2, 1))
    packed = titan.FusedVarlenAttention.Config(window_size=(-1, 0)).build()
    assert torch.equal(
        check(lambda *t: packed(*t, attention_masks=lengths, enable_gqa=True), order), got
    )
    # Nothing is seen, and no call is made.
    with autocast():
        none = flex(
            *tensors(order), attention_masks=block(lambda b, h, q, k: q < 0), enable_gqa=True
        )
    assert none.dtype == torch.bfloat16 and not none.any()


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_sparse_attention_and_its_indexers_loss(stage):
    """The loss, whose backward pass autocast does not reach, takes the tensors that the attention took."""
    gen = torch.Generator().manual_seed(0)
    shapes = [(4, 12), (4, 8), (20,), (1, 8), (3, 16), (1, 16), (3,)]
    made = [torch.randn(2, LENGTH, *s, generator=gen) for s in shapes]
    weight = torch.randn(4 * (12 + 6), 20, generator=gen)
    narrow = (0,)

    def run(inside):
        low = narrow if inside else range(6)
        leaves = [t.bfloat16() if i in low else t.clone() for i, t in enumerate(made)]
        q_nope, q_pe, latent, k_pe, *index = (t.requires_grad_() for t in leaves)
        meter = dsa.Meter()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            index = dsa.autocast(index)
            if stage == "sparse":
                up = weight if inside else weight.bfloat16()
                result = dsa.sparse_attention(
                    (q_nope, q_pe), latent, k_pe, up, index, 7, 0.2, dsa.Layout()
                )
            else:
                query = torch.cat([q_nope, q_pe], -1)
                value = latent.unflatten(-1, (4, 5))
                result = dsa.dense_attention(query, query, value, 0.2, dsa.Layout())
            out, constants, kl = result
            out = dsa.learn(out, constants, kl, index, 0.5, meter)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        return [out.detach(), meter.take(), *(t.grad for t in leaves if t.grad is not None)]

    got, want = run(True), run(False)
    assert (
        len(got) == len(want) == (9 if stage == "sparse" else 8) and got[0].dtype == torch.bfloat16
    )
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(
    "deepseek_v32" not in models.available(), reason="transformers has no DeepSeek-V3.2"
)
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_indexers_of_a_model_learn(stage):
    from jumar.convert.dsa import train_indexers

    model = models.build("deepseek_v32").train()
    model.config.use_cache = False
    inputs = models.example_inputs(model, length=24)
    jumar.convert(model, "npu_dsa", strict=True)
    meters = train_indexers(model, stage=stage)
    with autocast():
        loss = model(**inputs).loss
    loss.backward()
    grads = [p.grad for n, p in model.named_parameters() if ".indexer." in n]
    assert len(grads) == 15 and all(g.isfinite().all() and g.any() for g in grads)
    assert all(0 < meter.take() < 100 for meter in meters)
