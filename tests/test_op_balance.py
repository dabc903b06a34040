"""load_balance_loss, router_z_loss, expert_bias_update; routers and losses of the libraries' own models."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

from jumar import compat, ops
from op_util import FLOAT_DTYPES, assert_ulp, strided_views


def distinct(rows, experts, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, experts, generator=generator).argsort(-1)
    return ((order - experts // 2) / 16).to(dtype)


def own(library, name):
    return getattr(importlib.import_module(library), name)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_load_balance_is_transformers(masked, top_k):
    func = own("transformers.models.mixtral.modeling_mixtral", "load_balancing_loss_func")
    layers = [distinct(12, 8, torch.float32, seed).requires_grad_() for seed in range(3)]
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]) if masked else None
    want = func(tuple(layers), 8, top_k, mask)
    want_grads = torch.autograd.grad(want, layers)
    loss = ops.load_balance_loss(layers, 8, top_k, mask)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    assert loss.dtype == torch.float32 and loss.shape == ()
    for got, right in zip(torch.autograd.grad(loss, layers), want_grads, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_load_balance_against_fp64(dtype, masked):
    x = distinct(200, 24, dtype).requires_grad_()
    mask = torch.arange(200) % 3 > 0 if masked else None
    wide = x.detach().double().requires_grad_()
    m = torch.ones(200, dtype=torch.float64) if mask is None else mask.double()
    p = wide.softmax(-1)
    hot = torch.zeros_like(p).scatter(-1, wide.topk(4).indices, 1.0)
    want = 24 * ((m @ hot) / m.sum() * (m @ p) / m.sum()).sum()
    want.backward()
    loss = ops.load_balance_loss(x, 24, 4, mask)
    loss.backward()
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    assert_ulp(loss.detach(), want.detach(), 1, floor=12 * unit * want.item())
    assert_ulp(x.grad, wide.grad, 0.51, floor=20 * unit * 24 * 0.2 / m.sum().item())


def test_load_balance_gradients_and_registration():
    layers = [distinct(6, 8, seed=s).requires_grad_() for s in range(2)]
    mask = torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 1.0])
    assert gradcheck(lambda a, b: ops.load_balance_loss([a, b], 8, 3, mask), layers)
    narrow = [layer.detach().bfloat16().requires_grad_() for layer in layers]
    op = torch.ops.jumar.load_balance_loss.default
    opcheck(op, (narrow, 8, 3, mask))
    opcheck(op, (narrow, 8, 3))
    loss, tokens = op(layers, 8, 3)
    chosen = torch.cat([layer.topk(3).indices.flatten() for layer in layers])
    torch.testing.assert_close(tokens, torch.bincount(chosen, minlength=8).double() / 12)
    backward = torch.ops.jumar.load_balance_loss_backward.default
    opcheck(backward, (loss.detach(), [x.detach() for x in layers], mask, tokens))
    # One layer that needs a gradient, one that does not.
    (dx,) = torch.autograd.grad(
        ops.load_balance_loss([layers[0], layers[1].detach()], 8, 3), layers[0]
    )
    assert torch.equal(dx, torch.autograd.grad(ops.load_balance_loss(layers, 8, 3), layers)[0])
    for view in strided_views(layers[0].detach()).values():
        assert ops.load_balance_loss(view, 8, 2) == ops.load_balance_loss(layers[0], 8, 2)


def test_load_balance_compiles():
    x = distinct(6, 8, torch.float32).requires_grad_()
    run = torch.compile(
        lambda x: ops.load_balance_loss([x, x], 8, 2), backend="aot_eager", fullgraph=True
    )
    want = torch.autograd.grad(ops.load_balance_loss([x, x], 8, 2), x)[0]
    assert torch.equal(torch.autograd.grad(run(x), x)[0], want)


def test_load_balance_errors():
    x = distinct(4, 8, torch.float32)
    for call, text in (
        (lambda: ops.load_balance_loss([], 8), "at least one layer"),
        (
            lambda: ops.load_balance_loss(x, 7),
            r"gate_logits\[0\] must be \[rows, 7\], got \[4, 8\]",
        ),
        (lambda: ops.load_balance_loss(x, 8, 9), r"top_k must be in \[1, 8\].*got 9"),
        (
            lambda: ops.load_balance_loss(x, 8, 2, torch.ones(5)),
            r"attention_mask \[5\] has 5 elements",
        ),
        (lambda: ops.load_balance_loss([x, x.half()], 8), "one dtype, got float32 and float16"),
        (lambda: ops.load_balance_loss(x.long(), 8), "got int64"),
        (lambda: ops.load_balance_loss([x, x.to("meta")], 8), "one device, got cpu and meta"),
    ):
        with pytest.raises(RuntimeError, match=f"load_balance_loss: .*{text}"):
            call()
    assert ops.load_balance_loss(x, 8, 2, torch.zeros(4)).isnan()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_z_loss(dtype):
    x = (distinct(40, 24, dtype) + 1).reshape(5, 8, 24).requires_grad_()
    wide = x.detach().double().requires_grad_()
    want = wide.logsumexp(-1).square().mean()
    want.backward()
    loss = ops.router_z_loss(x)
    loss.backward()
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    assert_ulp(loss.detach(), want.detach(), 1, floor=20 * unit * want.item())
    assert_ulp(x.grad, wide.grad, 0.51, floor=20 * unit)
    opcheck(torch.ops.jumar.router_z_loss.default, (x,))
    opcheck(torch.ops.jumar.router_z_loss_backward.default, (loss.detach(), x.detach()))
    if dtype == torch.float64:
        assert gradcheck(ops.router_z_loss, (x[:1, :2].detach().requires_grad_(),))
    with pytest.raises(RuntimeError, match="router_z_loss: .*got int64"):
        ops.router_z_loss(x.long())


def test_expert_bias_update():
    bias = torch.linspace(-0.1, 0.1, 8)
    tokens = torch.tensor([5.0, 9, 0, 33, 12, 12, 1, 24])
    # torchtitan's rule, as its optimizer hook states it.
    delta = 0.001 * torch.sign(tokens.mean() - tokens)
    titan = bias + (delta - delta.mean())
    kept = bias.clone()
    for counts in (tokens, tokens.long(), tokens.int(), tokens.double()):
        got = ops.expert_bias_update(bias, counts, 0.001)
        torch.testing.assert_close(got, titan, rtol=0, atol=2**-27)
        torch.testing.assert_close(ops.expert_bias_update(bias, counts, 0.001, False), bias + delta)
    assert torch.equal(bias, kept)
    both = ops.expert_bias_update(
        torch.stack([bias, bias]), torch.stack([tokens, tokens.flip(0)]), 0.001
    )
    assert torch.equal(both[0], got)
    opcheck(torch.ops.jumar.expert_bias_update.default, (bias, tokens, 0.001))
    with pytest.raises(RuntimeError, match=r"expert_bias_update: tokens_per_expert float32\[7\]"):
        ops.expert_bias_update(bias, tokens[:7], 0.001)


MODELS = [
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_vl_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "mixtral",
    "deepseek_v3",
]
ROUTERS = {
    "qwen2_moe": "Qwen2MoeTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "qwen3_vl_moe": "Qwen3VLMoeTextTopKRouter",
    "qwen3_next": "Qwen3NextTopKRouter",
    "qwen3_5_moe": "Qwen3_5MoeTopKRouter",
    "mixtral": "MixtralTopKRouter",
    "deepseek_v3": "DeepseekV3TopkRouter",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_router_top_k_is_the_models(model, norm, dtype):
    config = SimpleNamespace(
        num_experts_per_tok=4, num_experts=16, num_local_experts=16, hidden_size=8, norm_topk_prob=norm,
        n_group=4, topk_group=2, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = own(f"transformers.models.{model}.modeling_{model}", ROUTERS[model])(config).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        router.weight.copy_(torch.randn(16, 8, generator=generator))
    x = torch.randn(50, 8, generator=generator).to(dtype)
    deepseek = model == "deepseek_v3"
    if deepseek:
        router.e_score_correction_bias = torch.randn(16, generator=generator) * 0.1
    logits, weights, indices = router(x)
    if deepseek:
        options = {
            "scoring": "sigmoid", "renorm": norm, "bias": router.e_score_correction_bias, "n_group": 4,
            "topk_group": 2, "scale": 2.5, "eps": 1e-20,
        }  # fmt: skip
    elif model in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        options = {"renorm": norm}
    else:
        options = {"renorm": True, "wide_weights": model == "mixtral"}
    got_weights, got_indices, _ = ops.router_top_k(logits, 4, **options)
    assert got_weights.dtype == weights.dtype and got_indices.dtype == indices.dtype
    # Where two logits are equal the model's own order is open.
    order = indices.argsort(-1) if deepseek else torch.arange(4).expand(50, 4)
    ours = got_indices.argsort(-1) if deepseek else order
    same = (indices.gather(-1, order) == got_indices.gather(-1, ours)).all(-1)
    assert same.float().mean() > (0.99 if dtype == torch.float32 else 0.7)
    close = (
        {"rtol": 2**-7, "atol": 0} if weights.dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 0}
    )
    torch.testing.assert_close(
        got_weights.gather(-1, ours)[same], weights.gather(-1, order)[same].detach(), **close
    )


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [None, 4])
@pytest.mark.parametrize("norm", [True, False])
def test_router_top_k_is_torchtitans(score_func, groups, norm):
    compat.apply()
    router = own("torchtitan.models.common.moe", "TokenChoiceTopKRouter")
    gate = torch.nn.Linear(8, 16, bias=False)
    torch.nn.init.normal_(gate.weight, generator=torch.Generator().manual_seed(2))
    fields = {
        "num_experts": 16, "num_expert_groups": groups, "num_limited_groups": groups and 2, "top_k": 3,
        "score_func": score_func, "route_norm": norm, "route_scale": 2.5, "_debug_force_load_balance": False,
        "gate": SimpleNamespace(build=lambda: gate),
    }  # fmt: skip
    module = router(SimpleNamespace(**fields))
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(4))
    bias = torch.linspace(-0.1, 0.1, 16)
    weights, indices, scores = module(x, bias)
    got = ops.router_top_k(
        gate(x), 3, scoring=score_func, renorm=norm, bias=bias, n_group=groups or 1, topk_group=2 if groups else 1,
        scale=2.5, eps=1e-20, output_scores=True,
    )  # fmt: skip
    order, ours = indices.argsort(-1), got[1].argsort(-1)
    assert torch.equal(indices.gather(-1, order), got[1].gather(-1, ours))
    torch.testing.assert_close(
        got[0].gather(-1, ours), weights.gather(-1, order), rtol=2e-6, atol=0
    )
    torch.testing.assert_close(got[2], scores, rtol=2e-6, atol=1e-7)
    inputs = list(gate.parameters())
    g, h = torch.randn_like(weights), torch.randn_like(scores)
    want = torch.autograd.grad((weights.gather(-1, order) * g).sum() + (scores * h).sum(), inputs)
    (dx,) = torch.autograd.grad((got[0].gather(-1, ours) * g).sum() + (got[2] * h).sum(), inputs)
    torch.testing.assert_close(dx, want[0], rtol=1e-4, atol=1e-5)
