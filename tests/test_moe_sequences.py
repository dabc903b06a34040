"""The operators in the order in which verl, Twinkle and torchtitan-npu call them, against the eager model."""

from __future__ import annotations

import pytest
import torch

import jumar
from jumar import models, ops
from op_util import peak_memory

pytest.importorskip("transformers", minversion="5.0")
npu = torch.ops.npu

OPTIONS = {"bias": None, "group_list_type": 1}


class VerlMatmul(torch.autograd.Function):
    """Counts as int64; dX with the transposed view, dW by groups along K."""

    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x, weight, counts)
        return npu.npu_grouped_matmul(
            [x], [weight], group_list=counts, split_item=2, group_type=0, **OPTIONS
        )[0]

    @staticmethod
    def backward(ctx, grad):
        x, weight, counts = ctx.saved_tensors
        dx = npu.npu_grouped_matmul(
            [grad],
            [weight.transpose(1, 2)],
            group_list=counts,
            split_item=2,
            group_type=0,
            **OPTIONS,
        )[0]
        dw = npu.npu_grouped_matmul(
            [x.transpose(0, 1)], [grad], group_list=counts, split_item=3, group_type=2, **OPTIONS
        )[0]
        return dx, dw, None


class TwinkleMatmul(torch.autograd.Function):
    """The same with copies of the transposed weight and of dW."""

    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x, weight, counts)
        return npu.npu_grouped_matmul(
            [x], [weight], group_list=counts.to(torch.int64), split_item=2, group_type=0, **OPTIONS
        )[0]

    @staticmethod
    def backward(ctx, grad):
        x, weight, counts = ctx.saved_tensors
        turned = weight.transpose(-2, -1).contiguous()
        dx = npu.npu_grouped_matmul(
            [grad], [turned], group_list=counts, split_item=2, group_type=0, **OPTIONS
        )[0]
        dw = npu.npu_grouped_matmul(
            [x.transpose(0, 1)], [grad], group_list=counts, split_item=3, group_type=2, **OPTIONS
        )[0]
        return dx, dw.contiguous(), None


def counts_of(indices, experts):
    return torch.bincount(indices.flatten(), minlength=experts)


def verl(x, indices, weights, gate_up, down):
    gate, up = gate_up.chunk(2, dim=1)
    counts = counts_of(indices, len(down))
    rows, places = npu.npu_moe_token_permute(x, indices.to(torch.int32))
    halves = [VerlMatmul.apply(rows, w.transpose(1, 2), counts) for w in (gate, up)]
    gated = npu.npu_swiglu(torch.cat(halves, dim=-1), dim=-1)
    done = VerlMatmul.apply(gated, down.transpose(1, 2), counts)
    return npu.npu_moe_token_unpermute(done, places, probs=weights)


def twinkle(x, indices, weights, gate_up, down):
    counts = counts_of(indices, len(down))
    rows, places = npu.npu_moe_token_permute(x, indices.to(torch.int32))
    packed = TwinkleMatmul.apply(rows, gate_up.transpose(1, 2).contiguous(), counts)
    done = TwinkleMatmul.apply(
        npu.npu_swiglu(packed, -1), down.transpose(1, 2).contiguous(), counts
    )
    return npu.npu_moe_token_unpermute(done, places, weights)


class TitanMatmul(torch.autograd.Function):
    """``aten::_grouped_mm`` as the card's backend takes it: ends as int64, groups along K where both are matrices."""

    @staticmethod
    def product(a, b, ends):
        return npu.npu_grouped_matmul(
            [a],
            [b],
            group_list=ends.to(torch.int64),
            group_list_type=0,
            split_item=2,
            group_type=2 if a.dim() == b.dim() == 2 else 0,
        )[0]

    @staticmethod
    def forward(ctx, a, b, ends):
        ctx.save_for_backward(a, b, ends)
        return TitanMatmul.product(a, b, ends)

    @staticmethod
    def backward(ctx, grad):
        a, b, ends = ctx.saved_tensors
        da = TitanMatmul.product(grad, b.transpose(-2, -1), ends)
        return da, TitanMatmul.product(a.transpose(0, 1), grad, ends), None


def titan(x, indices, weights, gate_up, down):
    """Scores travel by a second sort, rows come back unsummed."""
    ends = counts_of(indices, len(down)).cumsum(0).to(torch.int32)
    rows, places = npu.npu_moe_token_permute(x, indices.to(torch.int32))
    flat = indices.reshape(-1, 1).to(torch.int32)
    scores, _ = npu.npu_moe_token_permute(weights.reshape(-1, 1), flat)
    packed = TitanMatmul.apply(rows, gate_up.transpose(1, 2), ends)
    done = TitanMatmul.apply(npu.npu_swiglu(packed, -1), down.transpose(1, 2), ends) * scores
    slots = npu.npu_moe_token_unpermute(done.to(x.dtype), places)
    return slots.view(*indices.shape, -1).sum(1)


SEQUENCES = {"verl": verl, "twinkle": twinkle, "torchtitan-npu": titan}


def leaves(experts, dtype, one_expert=False):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(37, 48, generator=generator).to(dtype)
    indices = torch.rand(37, 8, generator=generator).topk(3, -1)[1]
    weights = torch.rand(37, 3, generator=generator).to(dtype)
    if one_expert:
        indices, weights = torch.full((37, 1), 5), weights[:, :1].contiguous()
    tensors = [x, weights, *(p.detach().to(dtype) for p in experts.parameters())]
    return indices, [t.clone().requires_grad_() for t in tensors]


def results(function, indices, tensors):
    x, weights, gate_up, down = tensors
    out = function(x, indices, weights, gate_up, down)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def eager(experts):
    own = type(experts).forward.__wrapped__

    def run(x, indices, weights, gate_up, down):
        module = experts.to(x.dtype)
        names = {"gate_up_proj": gate_up, "down_proj": down}
        bound = type("Bound", (torch.nn.Module,), {"forward": lambda self, *a: own(module, *a)})()
        bound.module = module
        inner = {f"module.{name}": value for name, value in names.items()}
        return torch.func.functional_call(bound, inner, (x, indices, weights))

    return run


@pytest.mark.parametrize("one_expert", [False, True])
@pytest.mark.parametrize("sequence", list(SEQUENCES))
def test_sequence_equals_the_eager_model(sequence, one_expert):
    """C2: all tokens at one expert, where every row's score is told by the order of the sort alone."""
    experts = models.build("qwen3_moe").model.layers[0].mlp.experts
    indices, tensors = leaves(experts, torch.float32, one_expert)
    expected = results(eager(experts), indices, tensors)
    for actual, want in zip(results(SEQUENCES[sequence], indices, tensors), expected, strict=True):
        assert bool(((actual - want).abs() <= 1e-5 * want.abs().max()).all())


@pytest.mark.parametrize("sequence", list(SEQUENCES))
def test_sequence_in_bf16(sequence):
    experts = models.build("qwen3_moe").model.layers[0].mlp.experts
    indices, tensors = leaves(experts, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = results(eager(experts), indices, wide)
    plain = results(eager(experts), indices, tensors)
    fused = results(SEQUENCES[sequence], indices, tensors)
    for name, e, p, f in zip(
        ("out", "dx", "dweights", "dgate_up", "ddown"), exact, plain, fused, strict=True
    ):
        assert f.dtype == torch.bfloat16
        errors = [(t.double() - e).square().mean().sqrt() for t in (p, f)]
        assert errors[1] <= 1.1 * errors[0], name


def test_a_group_list_of_another_number_of_experts_names_both():
    """D20: the local experts of an expert-parallel rank beside the global list."""
    x, weight = torch.randn(6, 4), torch.randn(2, 4, 3)
    counts = torch.tensor([2, 1, 2, 1])
    for call in (
        lambda: npu.npu_grouped_matmul(
            [x], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
        ),
        lambda: ops.grouped_matmul(x, weight, counts, group_list_type=1),
    ):
        with pytest.raises(RuntimeError, match=r"grouped_matmul: .*(\b2\b.*\b4\b|\b4\b.*\b2\b)"):
            call()


def test_counts_need_no_histogram_of_integers(monkeypatch):
    """D22: torch.histc knows no int64 on the CPU."""
    indices = torch.tensor([[0, 3], [3, 5], [5, 5]])
    with pytest.raises(RuntimeError, match="Long"):
        torch.histc(indices, 6, 0, 5)
    assert torch.equal(
        ops.expert_counts(indices, 6), torch.bincount(indices.flatten(), minlength=6)
    )

    def refuse(*args, **kwargs):
        raise AssertionError("histc")

    model = models.build("qwen3_moe")
    inputs = models.example_inputs(model)
    jumar.convert(model, ["npu_gmm", "npu_permute", "npu_router"], strict=True)
    monkeypatch.setattr(torch, "histc", refuse)
    model(**inputs).loss.backward()


def test_gradients_that_are_expanded():
    """D23: .sum().backward() hands out a gradient with strides of zero."""
    for grouped in (True, False):
        x, w = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, 3, requires_grad=True)
        if grouped:
            ops.grouped_matmul(x, w, torch.tensor([2, 4]), group_list_type=1).sum().backward()
        else:
            (x[:2] @ w[0]).sum().backward()
            (x[2:] @ w[1]).sum().backward()
        grads = [x.grad, w.grad] if grouped else None
        if grouped:
            assert torch.allclose(grads[0][:2], w.sum(2)[0].expand(2, 4).detach())
            assert torch.allclose(grads[1][1], x[2:].sum(0)[:, None].expand(4, 3).detach())
    tokens = torch.randn(3, 4, requires_grad=True)
    rows, places = ops.npu_moe_token_permute(tokens, torch.tensor([[0, 1], [1, 0], [0, 1]]))
    ops.npu_moe_token_unpermute(rows, places, torch.ones(3, 2)).sum().backward()
    assert torch.equal(tokens.grad, torch.full((3, 4), 2.0))


_PEAK = """
import sys, torch
import jumar
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
torch.set_num_threads(2)
torch.manual_seed(0)
sizes = dict(hidden_size=128, moe_intermediate_size=96, num_experts=16, num_experts_per_tok=8, num_hidden_layers=2)
rest = dict(vocab_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=32, intermediate_size=64)
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **rest)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
def step(tokens):
    ids = torch.arange(tokens)[None] * 7 % 128
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
report = jumar.kernelize(model)
step(16)  # what libraries set up once
report.undo()
step(16)
before = peak()
report = jumar.kernelize(model)
step(2048)
fused = peak()
report.undo()
step(2048)
print(fused - before, peak() - before)
"""


def test_peak_memory_is_at_most_seven_tenths_of_eagers():
    """Of a whole training step, above parameters, gradients and the optimizer's states."""
    fused, eager_peak = peak_memory(_PEAK)
    assert fused <= 0.7 * eager_peak, (fused, eager_peak)
