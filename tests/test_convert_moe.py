"""Mixtures of experts of transformers 5.x, converted; the cases that hold for 4.57 too are in ``moe_hf_suite.py``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jumar

pytest.register_assert_rewrite("convert_hf_suite", "moe_hf_suite")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers.integrations.moe import use_experts_implementation

from jumar import models
from moe_hf_suite import *
from moe_hf_suite import CONVERTERS, assert_close

EXPERTS, TOP_K = 6, 2


class Config:
    _experts_implementation = "eager"

    def __init__(self, hidden=8, inner=12, act=F.silu):
        self.hidden, self.inner, self.act = hidden, inner, act


def experts_class(transposed=False, scale=1.0, **flags):
    """A class of stacked experts, declared to transformers as it is."""

    @use_experts_implementation(is_transposed=transposed, **flags)
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.hidden_dim, self.intermediate_dim = (
                EXPERTS,
                config.hidden,
                config.inner,
            )
            self.act_fn = config.act
            shapes = [
                (EXPERTS, 2 * config.inner, config.hidden),
                (EXPERTS, config.hidden, config.inner),
            ]
            if transposed:
                shapes = [(e, i, o) for e, o, i in shapes]
            self.gate_up_proj, self.down_proj = (
                nn.Parameter(torch.randn(shape) * 0.3) for shape in shapes
            )

        def forward(self, hidden_states, top_k_index, top_k_weights):
            gate_up, down = self.gate_up_proj, self.down_proj
            if transposed:
                gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
            result = torch.zeros_like(hidden_states)
            for expert in range(self.num_experts):
                token, place = torch.where(top_k_index == expert)
                gate, up = F.linear(hidden_states[token], gate_up[expert]).chunk(2, -1)
                rows = (
                    F.linear(self.act_fn(gate) * up, down[expert])
                    * top_k_weights[token, place, None]
                )
                result = result.index_add(0, token, (rows * scale).to(result.dtype))
            return result

    torch.manual_seed(3)
    return Experts


def routed(hidden=8, tokens=9, experts=EXPERTS):
    torch.manual_seed(4)
    x = torch.randn(tokens, hidden, requires_grad=True)
    indices = torch.rand(tokens, experts).topk(TOP_K, -1)[1]
    return x, indices, torch.rand(tokens, TOP_K, requires_grad=True)


def run(experts, x, indices, weights):
    experts.zero_grad(set_to_none=True)
    out = experts(x, indices, weights)
    generator = torch.Generator().manual_seed(5)
    leaves = (x, weights, *experts.parameters())
    return out.detach(), *torch.autograd.grad(
        (out * torch.randn(out.shape, generator=generator)).sum(), leaves
    )


@pytest.mark.parametrize(
    "names", [["npu_gmm"], ["npu_permute"], ["npu_gmm", "npu_permute"]], ids="+".join
)
@pytest.mark.parametrize("sizes", [(8, 4), (8, 8), (8, 12)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_orientation_comes_from_the_class(transposed, sizes, names):
    """C5: with 2 * inner == hidden or inner == hidden the shapes tell nothing."""
    experts = experts_class(transposed)(Config(*sizes))
    inputs = routed(sizes[0])
    expected = run(experts, *inputs)
    report = jumar.convert(experts, names, strict=True, verify=True)
    assert report.replaced[0].action.patch.key.transposed == transposed
    for actual, want in zip(run(experts, *inputs), expected, strict=True):
        assert_close(actual, want, 1e-5)


def skipped(module, converter="npu_gmm"):
    before = type(module)
    (site,) = jumar.convert(module, [converter]).sites
    assert site.status == "skipped" and type(module) is before
    return site.reason


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"has_bias": True}, "its experts have biases"),
        ({"has_gate": False}, "its experts have no gate"),
        ({"is_concatenated": False}, "gate and up lie interleaved in its weights"),
        ({"has_post_expert_norm": True}, "normalises the output of each expert"),
    ],
)
def test_what_the_class_declares(flags, reason):
    assert skipped(experts_class(**flags)(Config())) == reason


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (F.gelu, "its activation is GELU, not SiLU"),
        (F.relu, "its activation is ReLU, not SiLU"),
        (torch.tanh, "unknown experts layout: its experts do not compute down(silu(gate) * up)"),
        (lambda x: F.silu(x).clamp(max=60), "computes something else for large values"),
    ],
)
@pytest.mark.parametrize("converter", ["npu_gmm", "npu_permute"])
def test_other_activations_are_near_misses(act, reason, converter):
    assert skipped(experts_class()(Config(act=act)), converter) == reason


def test_a_gate_method_of_its_own():
    cls = experts_class()
    cls._apply_gate = lambda self, gate_up: F.silu(gate_up[..., ::2]) * gate_up[..., 1::2]
    assert skipped(cls(Config())) == "its gate is another one than silu(gate) * up"


def test_a_declaration_that_is_not_true():
    cls = experts_class(transposed=False)
    experts = cls(Config())
    experts.is_transposed = True
    assert skipped(experts).startswith("unknown experts layout")
    assert skipped(experts_class(scale=2.0)(Config())).startswith("unknown experts layout")


def test_other_implementations_are_left_alone():
    experts = experts_class()(Config())
    experts.config._experts_implementation = "deepgemm"
    assert skipped(experts) == "runs the experts implementation 'deepgemm'"


class Undeclared(nn.Module):
    """Packed weights of a class that says nothing about them, as remote code has."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.hidden_size = EXPERTS, 8
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 8, 8))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, 4, 8))

    def forward(self, hidden_states, indices, weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(indices == expert)
            gate, up = (hidden_states[token] @ self.gate_up_proj[expert]).chunk(2, -1)
            out = out.index_add(
                0, token, F.silu(gate) * up @ self.down_proj[expert] * weights[token, place, None]
            )
        return out


class Exotic(Undeclared):
    def forward(self, hidden_states):
        return torch.bmm(hidden_states.expand(EXPERTS, -1, -1), self.gate_up_proj)


def test_undeclared_experts():
    """C5: the class's own code decides, on sizes that differ; whoever cannot be run is left alone."""
    experts = Undeclared()
    inputs = routed()
    expected = run(experts, *inputs)
    report = jumar.convert(experts, ["npu_gmm", "npu_permute"], strict=True, verify=True)
    assert report.replaced[0].action.patch.key.transposed
    for actual, want in zip(run(experts, *inputs), expected, strict=True):
        assert_close(actual, want, 1e-5)
    report = jumar.convert(Exotic(), ["npu_gmm"])
    assert "unknown experts layout" in report.sites[0].reason and "unknown experts layout" in str(
        report
    )


def test_strict_names_the_near_miss():
    """C4: a converter that matched nothing is an error where it is asked to be one."""
    with pytest.raises(
        jumar.convert.ConverterError, match=r"npu_gmm matched nothing \(near misses: .*have biases"
    ):
        jumar.convert(experts_class(has_bias=True)(Config()), ["npu_gmm"], strict=True)
    with pytest.raises(jumar.convert.ConverterError, match="npu_router matched nothing"):
        jumar.convert(nn.Linear(4, 4), ["npu_router"], strict=True)


@pytest.mark.parametrize(
    "names", [["npu_gmm"], ["npu_permute"], ["npu_gmm", "npu_permute"]], ids="+".join
)
def test_foreign_experts_of_other_ranks_add_nothing(names):
    """An index equal to the number of experts is what expert-parallel ranks mark foreign slots with."""
    experts = experts_class()(Config())
    experts._is_expert_parallel = True
    x, indices, weights = routed()
    indices[0] = EXPERTS
    indices[3, 1] = indices[5, 0] = EXPERTS
    expected = run(experts, x, indices, weights)
    jumar.convert(experts, names, strict=True)
    actual = run(experts, x, indices, weights)
    for have, want in zip(actual, expected, strict=True):
        assert_close(have, want, 1e-5)
    assert not actual[0][0].any() and not actual[1][0].any() and not actual[2][0].any()


@pytest.mark.parametrize(
    "names", [["npu_gmm"], ["npu_permute"], ["npu_gmm", "npu_permute"]], ids="+".join
)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_types_of_hidden_states_and_weights(names, weights_dtype):
    """fp32 weights of the router beside bf16 hidden states, as Mixtral has them: the types are eager's."""
    experts = experts_class()(Config()).bfloat16()
    x, indices, weights = routed()
    inputs = (
        x.detach().bfloat16().requires_grad_(),
        indices,
        weights.detach().to(weights_dtype).requires_grad_(),
    )
    expected = run(experts, *inputs)
    jumar.convert(experts, names, strict=True)
    for actual, want in zip(run(experts, *inputs), expected, strict=True):
        assert_close(actual, want, 3e-2)


@pytest.mark.parametrize(
    ("module", "cls", "config", "reason"),
    [
        ("gpt_oss", "GptOssExperts", "GptOssConfig", "its experts have biases"),
        ("nemotron_h", "NemotronHExperts", "NemotronHConfig", "its experts have no gate"),
    ],
)
def test_experts_of_other_models(module, cls, config, reason):
    library = __import__(f"transformers.models.{module}", fromlist=["x"])
    modelling = __import__(f"transformers.models.{module}.modeling_{module}", fromlist=["x"])
    with torch.device("meta"):
        experts = getattr(modelling, cls)(getattr(library, config)())
    assert skipped(experts) == reason


# ---- routers ----


class Router(nn.Module):
    def __init__(self, rule=None):
        super().__init__()
        self.top_k, self.num_experts, self.hidden_dim = 2, 8, 16
        self.weight = nn.Parameter(torch.randn(8, 16))
        self.rule = rule or (lambda logits: logits.softmax(-1).topk(2, -1))

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        return (logits, *self.rule(logits, self.top_k))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (lambda z, k: (2 * z).softmax(-1).topk(k, -1), "chooses experts by another rule"),
        (lambda z, k: z.topk(k, -1), "chooses experts by another rule"),
        (
            lambda z, k: (lambda v, i: (v.softmax(-1) ** 2, i))(*z.topk(k, -1)),
            "chooses experts by another rule",
        ),
        (lambda z, k: (z.softmax(-1),), "returns neither"),
        (lambda z, k: z.missing, "its forward raised AttributeError"),
    ],
)
def test_other_routers_are_near_misses(rule, reason):
    assert reason in skipped(Router(rule), "npu_router")


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_routers_by_what_they_compute(scoring, norm):
    def rule(logits, k):
        scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
        weights, indices = scores.topk(k, -1)
        return (weights / weights.sum(-1, keepdim=True) if norm else weights), indices

    torch.manual_seed(1)
    router, x = Router(rule), torch.randn(2, 5, 16, requires_grad=True)

    def everything():
        logits, weights, indices = router(x)
        total = (weights * torch.arange(1.0, 3)).sum() + logits.square().sum()
        return (
            logits.detach(),
            weights.detach(),
            indices,
            *torch.autograd.grad(total, (x, router.weight)),
        )

    expected = everything()
    jumar.convert(router, ["npu_router"], strict=True, verify=True)
    for actual, want in zip(everything(), expected, strict=True):
        assert actual.dtype == want.dtype
        assert_close(actual.double(), want.double(), 1e-5)


def test_a_flag_that_changes_later_is_obeyed():
    model = models.build("qwen3_moe")
    router = model.model.layers[0].mlp.gate
    x = torch.randn(4, 48)
    jumar.convert(router, ["npu_router"], strict=True)
    assert_close(router(x)[1].sum(-1), torch.ones(4), 1e-5)
    router.norm_topk_prob = False
    assert (router(x)[1].sum(-1) < 0.999).all()


def test_attention_is_no_router():
    assert not jumar.convert(nn.MultiheadAttention(8, 2), CONVERTERS).sites
