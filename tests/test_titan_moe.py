"""torchtitan's mixture of experts on fused operators: each part against its parent, whole models, and what is refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torchtitan")

from jumar import compat, titan

compat.apply()

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.config_utils import (
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from jumar.titan import moe as fused
from jumar.titan.models import model_spec

NAMES = ["npu_rms_norm", "npu_rope", "npu_swiglu", "npu_linear", "npu_gmm", "npu_permute", "npu_router"]
MOE = NAMES[-3:]
EXPERTS, WIDTH, HIDDEN = 5, 24, 16


def _override(root, names):
    apply_overrides(OverrideConfig(imports=[f"jumar.titan.{name}" for name in names]), root)


def _loop(x, counts, w1, w2, w3):
    """Experts by definition, in the dtype of x."""
    parts = x[: sum(counts)].split(counts)
    return torch.cat([(F.silu(p @ w1[e].T) * (p @ w3[e].T)) @ w2[e].T for e, p in enumerate(parts)])


def _exact_forward(self, x, counts):
    """A stand-in for the parent's forward, which rounds to bf16."""
    return _loop(x, counts.tolist(), self.w1_EFD, self.w2_EDF, self.w3_EFD)


def _filled(module, seed=3):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 7, 1, 0], [0, 0, 9, 0, 0], [0] * 5, [1, 0, 0, 0, 0]])
def test_experts(counts, dtype):
    config = titan.npu_gmm(GroupedExperts.Config(dim=WIDTH, hidden_dim=HIDDEN, num_experts=EXPERTS))
    experts = _filled(config.build()).to(dtype)
    assert type(experts) is fused.FusedGroupedExperts
    x = torch.randn(sum(counts), WIDTH).to(dtype).requires_grad_()
    weight = torch.randn(sum(counts), WIDTH).to(dtype)
    out = experts(x, torch.tensor(counts))
    out.backward(weight)
    leaves = [t.detach().double().requires_grad_() for t in (x, experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)]
    expected = _loop(leaves[0], counts, *leaves[1:])
    expected.backward(weight.double())
    assert out.dtype == dtype and out.shape == x.shape
    # In bf16 gate, up and their product are rounded before the last matrix product.
    bound = 3e-6 if dtype == torch.float32 else 0.03
    found = [out, x.grad, experts.w1_EFD.grad, experts.w2_EDF.grad, experts.w3_EFD.grad]
    for got, want in zip(found, [expected, *(leaf.grad for leaf in leaves)], strict=True):
        assert got.numel() == 0 or (got.double() - want).abs().max() <= bound * max(1.0, want.abs().max().item())
    idle = [e for e, count in enumerate(counts) if not count]
    assert (experts.w1_EFD.grad[idle] == 0).all() and (experts.w2_EDF.grad[idle] == 0).all()


def _dispatchers(k, ranks=None):
    plain = make_token_dispatcher_config(num_experts=EXPERTS, top_k=k, comm_backend="standard")
    stock = (LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=k) if ranks is None else plain).build()
    ours = copy.copy(stock)
    ours.__class__ = fused.FusedLocalTokenDispatcher if ranks is None else fused.FusedAllToAllTokenDispatcher
    for dispatcher in (stock, ours):
        if ranks is not None:
            dispatcher.ep_mesh = SimpleNamespace(size=lambda: ranks)
    return stock, ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "k"), [(7, 2), (1, 3), (40, 1)])
def test_dispatch_and_combine(tokens, k, dtype):
    torch.manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS)[:k] for _ in range(tokens)])
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    results = []
    for dispatcher in _dispatchers(k):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
        scores = torch.rand(tokens, k, generator=generator).requires_grad_()
        rows, by_expert, metadata = dispatcher.dispatch(x, scores, ids, counts)
        out = dispatcher.combine(rows * 2, metadata, x)
        out.backward(torch.randn(tokens, WIDTH, generator=generator).to(dtype))
        results.append((rows, by_expert, out, x.grad, scores.grad))
    stock, ours = results
    assert torch.equal(ours[0], stock[0]) and torch.equal(ours[1], stock[1])
    # The parent rounds every row, the fused one their sum.
    bound = 1e-6 if dtype == torch.float32 else 2**-7
    for got, want in zip(ours[2:], stock[2:], strict=True):
        torch.testing.assert_close(got, want, rtol=bound, atol=bound * want.abs().max().item())


def test_rows_of_several_ranks_come_in_the_order_of_experts():
    stock, ours = _dispatchers(2, ranks=3)
    counts = torch.tensor([4, 0, 1, 2, 3, 0])  # three ranks, two experts
    rows = torch.randn(10, WIDTH)
    shape, expected, order, sizes = stock._permute(rows, counts)
    their_shape, permuted, positions, their_sizes = ours._permute(rows, counts)
    assert torch.equal(permuted, expected) and torch.equal(their_sizes, sizes) and their_shape == shape
    assert torch.equal(ours._unpermute(permuted, shape, positions), rows)
    assert torch.equal(stock._unpermute(expected, shape, order), rows)
    nothing = torch.zeros(6, dtype=torch.int64)
    assert ours._permute(rows[:0], nothing)[1].shape == (0, WIDTH)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("score", "norm", "groups"), [("softmax", True, None), ("softmax", False, None), ("sigmoid", True, 4), ("sigmoid", False, 2)]
)
def test_router(score, norm, groups, biased):
    config = make_router_config(
        dim=WIDTH, num_experts=8, gate_param_init={}, top_k=3, score_func=score, route_norm=norm, route_scale=2.5,
        num_expert_groups=groups, num_limited_groups=groups and 2, bias=True,
    )  # fmt: skip
    stock = _filled(copy.deepcopy(config).build())
    ours = titan.npu_router(config).build()
    ours.load_state_dict(stock.state_dict())
    bias = torch.linspace(-0.3, 0.3, 8) if biased else None
    results = []
    for router in (stock, ours):
        x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
        weights, ids, scores = router(x, bias)
        order = ids.argsort(-1)
        weights, ids = weights.gather(-1, order), ids.gather(-1, order)
        ((weights * torch.arange(1.0, 4.0)).sum() + scores.square().sum()).backward()
        results.append([ids, weights, scores, x.grad, *(p.grad for p in router.parameters())])
        router.zero_grad()
    assert torch.equal(results[0][0], results[1][0])
    for want, got in zip(*(r[1:] for r in results), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("names", [["npu_router"], ["npu_router", "npu_linear"]])
def test_gate_is_computed_in_fp32(names):
    """bf16 logits would put experts that differ by less than their rounding in the order of their numbers."""
    spec = model_spec("qwen3", "tiny_moe")
    _override(spec, names)
    router = _filled(spec.model.layers[0].moe.router.build()).bfloat16()
    x = torch.randn(1, 50, 64).bfloat16()
    weights, ids, _ = router(x)
    exact = (x.double() @ router.gate.weight.double().T).softmax(-1)
    assert torch.equal(ids, exact.topk(2, dim=-1)[1]) and weights.dtype == torch.float32
    top = exact.topk(2, dim=-1)[0]
    torch.testing.assert_close(weights.double(), top / top.sum(-1, keepdim=True), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("name", "flavor"), [("qwen3", "tiny_moe"), ("deepseek_v3", "tiny")])
@pytest.mark.parametrize("names", [NAMES, NAMES[::-1], ["npu_gmm"], ["npu_permute"], ["npu_router"]], ids=" ".join)
def test_model(name, flavor, names, monkeypatch):
    """Logits, gradients, token counts: as the plain model whose experts do not round."""
    spec = model_spec(name, flavor)
    plain = _filled(copy.deepcopy(spec.model).build())
    wanted = [n for n in names if n != "npu_swiglu" or name != "qwen3"]
    report = titan.plan(spec, wanted)
    assert not report.skipped
    _override(spec, wanted)
    model = spec.model.build()
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    built = titan.count_modules([model])
    assert {n: built[n] for n in wanted} == {
        n: sum(site.converter == n for site in report.replaced) + (2 if n == "npu_rms_norm" and name == "qwen3" else 0)
        for n in wanted
    }
    monkeypatch.setattr(GroupedExperts, "forward", _exact_forward)
    tokens = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(2, -1)
    for block in [*plain.layers.values(), *model.layers.values()]:
        block.attention.rope._init_self_buffers()
        if block.moe_enabled:
            block.moe._init_self_buffers()
            block.moe.expert_bias_E.copy_(torch.linspace(-0.1, 0.1, 8))
    results = []
    for net in (plain, model):
        out = net(tokens, positions, net.get_attention_masks(positions))
        F.cross_entropy(out.flatten(0, 1), tokens.flatten()).backward()
        mixtures = [block.moe for block in net.layers.values() if block.moe_enabled]
        results.append((out, {n: p.grad for n, p in net.named_parameters()}, [m.tokens_per_expert_E for m in mixtures]))
    (out, grads, counts), (our_out, our_grads, our_counts) = results
    torch.testing.assert_close(our_out, out, rtol=1e-4, atol=1e-4)
    for parameter, grad in grads.items():
        torch.testing.assert_close(our_grads[parameter], grad, rtol=1e-3, atol=2e-5 * max(1, grad.abs().max().item()))
    assert all(torch.equal(a, b) for a, b in zip(counts, our_counts, strict=True))
    assert all(count.sum() == tokens.numel() * m.router.top_k for count, m in zip(counts, mixtures, strict=True))


def test_what_is_refused():
    spec = model_spec("gpt_oss", "debugmodel")
    reasons = {s.reason for s in titan.plan(spec, ["npu_gmm"], strict=False).sites}
    assert reasons == {"GptOssGroupedExperts computes more than grouped_matmul or moe_ffn"}
    spec = model_spec("qwen3", "tiny_moe")
    for layer, backend in zip(spec.model.layers, ("deepep", "hybridep"), strict=True):
        layer.moe.routed_experts.token_dispatcher = make_token_dispatcher_config(
            num_experts=8, top_k=2, comm_backend=backend, hidden_dim=64
        )
        layer.moe.router._debug_force_load_balance = True
    report = titan.plan(spec, MOE, strict=False)
    assert {s.reason for s in report.skipped} == {
        "DeepEPTokenDispatcher exchanges and orders tokens by kernels of its own",
        "HybridEPTokenDispatcher exchanges and orders tokens by kernels of its own",
        "_debug_force_load_balance routes by position, not by scores",
    }
    before = [type(layer.moe.routed_experts.token_dispatcher) for layer in spec.model.layers]
    _override(spec, MOE)
    assert [type(layer.moe.routed_experts.token_dispatcher) for layer in spec.model.layers] == before
    model = spec.model
    assert type(model.layers[0].moe.routed_experts.inner_experts) is fused.FusedGroupedExperts.Config


def test_frozen_experts_are_converted_too():
    from jumar.titan import lora

    spec = model_spec("qwen3", "tiny_moe")
    assert lora.targets(spec.model) == ["wqkv", "wo"] and lora.experts(spec.model) == ["gate"]
    spec.model = lora.convert(spec.model, 4, 8.0, lora.targets(spec.model))
    assert not titan.plan(spec, MOE).skipped
    _override(spec, MOE)
    model = spec.model.build()
    assert titan.count_modules([model]) == {"npu_gmm": 2, "npu_permute": 2, "npu_router": 2}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in n and ".attention." in n for n in trained)
    deepseek = model_spec("deepseek_v3", "tiny").model
    # The first layer's dense feed-forward shares its names with the shared experts.
    assert lora.targets(deepseek) == ["wq_a", "wq_b", "wkv_a", "wkv_b", "wo"]
    assert lora.experts(deepseek) == ["gate", "w1", "w2", "w3"]
