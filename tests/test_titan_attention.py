"""torchtitan's inner attention on npu_fusion_attention: masks, context parallelism, sinks, lengths, jobs."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torchtitan")

import jumar
from jumar import compat, titan

compat.apply()

from torch.nn.attention.flex_attention import and_masks, create_block_mask
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common import attention as stock

from jumar.compat.attention import SdpaFlexAttention, dense_mask
from jumar.masks import functions
from jumar.masks.attend import Plan
from jumar.titan.attention import (
    FusedFlexAttention,
    FusedScaledDotProductAttention,
    FusedVarlenAttention,
)
from jumar.titan.models import model_spec
from op_util import assert_ulp
from train_util import CONVERTERS, quickly, torchrun, train_job, write_job

_quick = pytest.fixture(autouse=True)(quickly)
_POSITIONS = torch.tensor([[*range(37), *range(91), *range(172)], [*range(300)], [*range(1), *range(298), 0]])


def tensors(queries=300, keys=300, batch=3, dtype=torch.float32, sizes=(16, 16)):
    gen = torch.Generator().manual_seed(0)
    shapes = ((queries, 4, sizes[0]), (keys, 2, sizes[0]), (keys, 2, sizes[1]))
    return [torch.randn(batch, *s, generator=gen).to(dtype).requires_grad_() for s in shapes]


def run(function, inputs):
    out = function(*inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def same(ours, theirs, bound=8.0, relative=2e-6):
    for a, b in zip(ours, theirs, strict=True):
        assert_ulp(a, b.double(), bound, floor=relative * b.abs().max().item())


def masks():
    documents = stock.get_efficient_causal_mask_mod_for_packed_document(_POSITIONS)
    causal = stock.get_causal_mask_mod()
    mods = {
        "packed": [causal, documents],
        "documents": [stock.get_document_mask_mod(_POSITIONS)],
        "window": [causal, documents, stock.get_sliding_window_mask_mod(50)],
        "blocks": [causal, stock.get_fixed_block_mask_mod(64)],
        "holes": [lambda b, h, q, k: (q + k) % 3 != 0],
    }
    return {name: create_block_mask(and_masks(*m), 3, None, 300, 300, device="cpu") for name, m in mods.items()}


@pytest.mark.parametrize("name", ["packed", "documents", "window", "blocks", "holes"])
@pytest.mark.parametrize("sizes", [(16, 16), (24, 16)], ids=["same", "latent"])
def test_flex(name, sizes):
    mask = masks()[name]
    options = dict(attention_masks=mask, scale=0.3, enable_gqa=True)
    fused, plain = FusedFlexAttention.Config().build(), SdpaFlexAttention(stock.FlexAttention.Config())
    wide = [t.detach().double().requires_grad_() for t in tensors(sizes=sizes)]
    jumar.reset_call_counts()
    got = run(lambda *t: fused(*t, **options), tensors(sizes=sizes))
    same(got, run(lambda *t: plain(*t, **options), wide))
    assert jumar.call_counts() == {"npu_fusion_attention": 1, "npu_fusion_attention_grad": 1}
    plan = functions.plan_of(mask, 3)
    assert isinstance(plan, Plan) == (name != "holes")
    if name != "holes":
        assert len(plan.calls) == 1 and "hidden" not in plan.__dict__


def test_flex_in_bf16():
    mask = masks()["packed"]
    fused = FusedFlexAttention.Config().build()
    values = tensors(dtype=torch.bfloat16)
    out = fused(*values, attention_masks=mask, enable_gqa=True)
    assert out.dtype == torch.bfloat16
    exact = SdpaFlexAttention(stock.FlexAttention.Config())(
        *(t.double() for t in values), attention_masks=mask, enable_gqa=True
    )
    assert_ulp(out.detach(), exact.detach(), 0.51, floor=1e-6)


def test_refusals():
    mask = masks()["packed"]
    fused, values = FusedFlexAttention.Config().build(), tensors()
    with pytest.raises(NotImplementedError, match="npu_sdpa: score_mod must be None, got .*lambda.*; leave npu_sdpa out"):
        fused(*values, attention_masks=mask, score_mod=lambda s, b, h, q, k: s)
    with pytest.raises(NotImplementedError, match="npu_sdpa: out_transform must be None, got .*; leave npu_sdpa out"):
        fused(*values, attention_masks=mask, out_transform=lambda out, lse: out)
    plain = SdpaFlexAttention(stock.FlexAttention.Config())
    with pytest.raises(NotImplementedError, match="SdpaFlexAttention: score_mod must be None on a CPU, got .*lambda"):
        plain(*values, attention_masks=mask, score_mod=lambda s, b, h, q, k: s)
    with pytest.raises(TypeError, match="BlockMask"):
        fused(*values, attention_masks=None)
    with pytest.raises(ValueError, match="attention_masks"):
        FusedScaledDotProductAttention.Config().build()(*values, attention_masks=mask)
    with pytest.raises(NotImplementedError, match=r"npu_sdpa: window_size must be .*, got \(3, 2\); leave npu_sdpa out"):
        lengths = stock.create_varlen_metadata_for_document(_POSITIONS)
        FusedVarlenAttention.Config(window_size=(3, 2)).build()(*values, attention_masks=lengths)


@pytest.mark.parametrize("causal", [True, False])
def test_without_a_mask(causal):
    fused = titan.npu_sdpa(stock.ScaledDotProductAttention.Config()).build()
    assert type(fused) is FusedScaledDotProductAttention
    plain = stock.ScaledDotProductAttention(stock.ScaledDotProductAttention.Config())
    options = dict(is_causal=causal, enable_gqa=True, scale=0.2)
    for keys in (12, 9):
        wide = [t.detach().double().requires_grad_() for t in tensors(9, keys)]
        same(run(lambda *t: fused(*t, **options), tensors(9, keys)), run(lambda *t: plain(*t, **options), wide))


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (20, 0)])
def test_lengths(window):
    fused = titan.npu_sdpa(stock.VarlenAttention.Config(window_size=window)).build()
    lengths = stock.create_varlen_metadata_for_document(_POSITIONS)
    ids = (_POSITIONS == 0).cumsum(1)
    at = torch.arange(300)
    seen = ids[:, :, None] == ids[:, None]
    if window[1] == 0:
        seen &= at[:, None] >= at
    if window[0] >= 0:
        seen &= at[:, None] - at <= window[0]

    def wide(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True).transpose(1, 2)

    exact = [t.detach().double().requires_grad_() for t in tensors()]
    same(run(lambda *t: fused(*t, attention_masks=lengths, enable_gqa=True), tensors()), run(wide, exact))


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallelism(monkeypatch, ranks):
    """Each rank's part of the queries on all keys, in the order in which the ranks hold them, by lengths."""
    from torch.distributed.tensor.experimental import _attention as experimental
    from torch.distributed.tensor.experimental._context_parallel import _attention as parallel

    monkeypatch.setattr(parallel, "_compiled_create_block_mask", create_block_mask)
    length = 1024
    positions = torch.cat([torch.arange(n) for n in (100, 500, 1, 300, 123)])[None].repeat(2, 1)
    positions[1] = torch.arange(length)
    mods = [stock.get_causal_mask_mod(), stock.get_efficient_causal_mask_mod_for_packed_document(positions)]
    whole = create_block_mask(and_masks(*mods), 2, None, length, length, device="cpu")
    plain = SdpaFlexAttention(stock.FlexAttention.Config())
    values = [t.detach() for t in tensors(length, length, 2)]
    want = plain(*(t.double() for t in values), attention_masks=whole, enable_gqa=True)
    balancer = experimental._HeadTailLoadBalancer(length, ranks, "cpu")
    order = balancer._generate_indices()[0]
    fused = FusedFlexAttention.Config().build()
    for rank in range(ranks):
        mesh = SimpleNamespace(get_local_rank=lambda rank=rank: rank, size=lambda *_: ranks, device_type="cpu")
        mask = parallel._create_cp_block_mask(whole.mask_mod, 2, 1, length, length, mesh, balancer)
        rows = order.chunk(ranks)[rank]
        q, k, v = values[0][:, rows], values[1][:, order], values[2][:, order]
        got = fused(q, k, v, attention_masks=mask, enable_gqa=True)
        assert_ulp(got, want[:, rows], 8.0, floor=1e-6)
        plan = functions.plan_of(mask, 2)
        # A document that reaches into both parts of a rank lends its keys twice.
        assert isinstance(plan, Plan) and 1 <= len(plan.calls) <= 2
        assert plan.ranges.order is not None


def test_sinks_of_gpt_oss():
    """Its epilogue is one more term under the softmax, with its own gradient."""
    spec = model_spec("gpt_oss", "debugmodel")
    apply_overrides(OverrideConfig(imports=["jumar.titan.npu_sdpa"]), spec)
    config = spec.model.layers[0].attention
    torch.manual_seed(0)
    layer = config.build()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.2)
    heads = layer.sinks.numel()
    gen = torch.Generator().manual_seed(2)
    values = [torch.randn(3, 300, heads, 16, generator=gen).requires_grad_() for _ in range(3)]
    mask = masks()["window"]

    def ours(q, k, v, sinks):
        with torch.no_grad():
            layer.sinks.copy_(sinks)
        return layer.inner_attention(q, k, v, attention_masks=mask, scale=0.2, out_transform=layer._apply_sinks)

    def theirs(q, k, v, sinks):
        scores = torch.einsum("blnh,bmnh->bnlm", q, k) * 0.2
        scores = scores.masked_fill(~dense_mask(mask), -torch.inf)
        wide = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(3, -1, 300, 1)], -1).softmax(-1)[..., :-1]
        return torch.einsum("bnlm,bmnh->blnh", wide, v)

    sinks = torch.randn(heads, generator=gen)
    got = run(lambda *t: ours(*t, sinks), values)
    wide = [t.detach().double().requires_grad_() for t in values]
    same(got, run(lambda *t: theirs(*t, sinks.double()), wide))
    exact = sinks.double().requires_grad_()
    weight = torch.randn(got[0].shape, generator=torch.Generator().manual_seed(1))
    (want,) = torch.autograd.grad((theirs(*wide, exact) * weight.double()).sum(), exact)
    layer.zero_grad()
    (ours(*values, sinks) * weight).sum().backward()
    same([layer.sinks.grad], [want])


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
def test_job(tmp_path, model):
    """A job with packed documents: losses of the plain attention; selective checkpointing keeps attention's results."""
    job = write_job(tmp_path, [*CONVERTERS, "npu_sdpa"])
    more = [f"model.name={model}", "model.flavor=tiny", "training.steps=3", "lr_scheduler.total_steps=10"]
    more += ["checkpoint.export_hf=false", "metrics.plot_file="]
    plain = train_job(job, *more, "model.converters=" + ",".join(CONVERTERS))
    fused = train_job(job, *more)
    layers = {"qwen3": 2, "deepseek_v3": 3}[model]
    assert fused["losses"] == pytest.approx(plain["losses"], rel=2e-6)
    assert fused["calls"]["npu_fusion_attention"] == fused["calls"]["npu_fusion_attention_grad"] == 3 * layers
    again = {m: train_job(job, *more, f"activation_checkpoint.mode={m}") for m in ("selective", "full")}
    assert {tuple(r["losses"]) for r in again.values()} == {tuple(fused["losses"])}
    assert again["selective"]["calls"]["npu_fusion_attention"] == 3 * layers
    assert again["full"]["calls"]["npu_fusion_attention"] == 6 * layers


@pytest.mark.long
@pytest.mark.parametrize("layout", ["context", "tensor", "pipeline", "data"])
def test_two_processes(tmp_path, layout):
    if not os.environ.get("JUMAR_LONG_TESTS"):
        pytest.skip("long; set JUMAR_LONG_TESTS=1")
    job = write_job(tmp_path, [*CONVERTERS, "npu_sdpa"])
    base = ["training.steps=3", "lr_scheduler.total_steps=10", "training.seq_len=512", "training.local_batch_size=2"]
    base += ["checkpoint.export_hf=false", "metrics.plot_file=", "model.flavor=tiny_untied"]
    degree = {"data": "parallelism.data_parallel_shard_degree=2"}.get(layout, f"parallelism.{layout}_parallel_degree=2")
    start = ["checkpoint.enable=true", "checkpoint.create_seed_checkpoint=true"]
    train_job(job, *base, *start, f"job.dump_folder={tmp_path / 'seed'}")
    base += ["checkpoint.enable=true", "checkpoint.load_only=true"]
    base += [f"checkpoint.initial_load_path={tmp_path / 'seed' / 'checkpoint' / 'step-0'}"]
    two = torchrun(job, *base, degree)
    plain = ["model.converters=" + ",".join(CONVERTERS)]
    other = torchrun(job, *base, degree, *plain) if layout == "data" else train_job(job, *base, *plain)
    assert two["losses"] == pytest.approx(other["losses"], rel=5e-5)
    assert two["calls"]["npu_fusion_attention"] >= 3
