"""``npu_linear`` and ``npu_swiglu``: which layers and MLPs are recognised, and which only look alike."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jumar
from convert_modules import Mlp
from jumar.convert import plan

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


# ---- linear ----


class Quantised(nn.Linear):
    def forward(self, input):
        return F.linear(input, self.weight.round())


def test_linear_is_exact():
    m = nn.Sequential(nn.Linear(8, 8), Quantised(8, 8), nn.LazyLinear(8), nn.Bilinear(8, 8, 8))
    report = jumar.convert(m, ["npu_linear"])
    assert {s.path: s.status for s in report.sites} == {
        "0": "replaced",
        "1": "skipped",
        "2": "skipped",
    }
    assert all("subclass of torch.nn.Linear" in s.reason for s in report.skipped)


def test_parametrised_linear_is_left_alone():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    expected = layer(X)
    assert not jumar.convert(layer, ["npu_linear"]).replaced
    assert torch.equal(layer(X), expected)


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    m = Tied()
    ids = torch.tensor([[1, 2, 3]])
    m(ids).square().sum().backward()
    expected = m.embed.weight.grad.clone()
    m.zero_grad()
    jumar.convert(m, ["npu_linear"], strict=True)
    assert m.head.weight is m.embed.weight
    m(ids).square().sum().backward()
    assert torch.allclose(m.embed.weight.grad, expected, atol=1e-5)
    clone = copy.deepcopy(m)
    assert clone.head.weight is clone.embed.weight


def test_one_module_in_two_places_is_one_site():
    shared = nn.Linear(8, 8)
    m = nn.Sequential(shared, nn.ReLU(), shared)
    report = jumar.convert(m, ["npu_linear"])
    assert [s.path for s in report.sites] == ["0"]
    report.undo()
    assert type(shared) is nn.Linear


# ---- swiglu ----


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (F.gelu, "its activation is GELU, not SiLU"),
        (lambda x: F.gelu(x, approximate="tanh"), "its activation is tanh GELU, not SiLU"),
        (F.relu, "its activation is ReLU, not SiLU"),
        (torch.tanh, "does not compute"),
        (lambda x: x * torch.sigmoid(1.702 * x), "does not compute"),
    ],
)
def test_other_activations_are_near_misses(act, reason):
    m = Mlp(act)
    report = jumar.convert(m, ["npu_swiglu"])
    assert [s.status for s in report.sites] == ["skipped"]
    assert reason in report.sites[0].reason
    assert type(m) is Mlp


class SiluByHand(Mlp):
    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(gate / (1 + torch.exp(-gate)) * self.up_proj(x))


class Swapped(Mlp):
    def forward(self, x):
        return self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))


class Scaled(Mlp):
    def forward(self, x):
        return 2 * super().forward(x)


class Twice(Mlp):
    def forward(self, x):
        return (
            self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)) + 0 * self.up_proj(x).sum()
        )


class Dropped(Mlp):
    def forward(self, x):
        return self.down_proj(
            F.dropout(F.silu(self.gate_proj(x)), 0.5, self.training) * self.up_proj(x)
        )


class Extra(Mlp):
    def forward(self, x, scale=None):
        return super().forward(x)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 12)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FeedForwardSwapped(FeedForward):
    def forward(self, x):
        return self.w2(F.silu(self.w3(x)) * self.w1(x))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * F.silu(gate))


class PackedUpFirst(Packed):
    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * F.silu(gate))


class PackedInterleaved(Packed):
    def forward(self, x):
        gate_up = self.gate_up_proj(x)
        return self.down_proj(gate_up[..., 1::2] * F.silu(gate_up[..., ::2]))


@pytest.mark.parametrize("cls", [Mlp, SiluByHand, FeedForward, Packed])
def test_gated_mlps_are_recognised(cls):
    m = cls()
    x = torch.randn(4, 8, requires_grad=True)
    m(x).square().sum().backward()
    expected, grads = m(x).detach(), [x.grad, *(p.grad for p in m.parameters())]
    x.grad = None
    m.zero_grad()
    jumar.convert(m, ["npu_swiglu"], strict=True, verify=True)
    jumar.reset_call_counts()
    m(x).square().sum().backward()
    assert jumar.call_counts()["npu_swiglu" if cls is Packed else "swiglu_gate_up"] == 1
    assert torch.allclose(m(x), expected, atol=1e-6)
    for a, e in zip([x.grad, *(p.grad for p in m.parameters())], grads, strict=True):
        assert torch.allclose(a, e, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Swapped, "SiLU is on up"),
        (FeedForwardSwapped, "SiLU is on up"),
        (Scaled, "does not compute"),
        (Twice, "times, not once each"),
        (PackedUpFirst, "SiLU is on up"),
        (PackedInterleaved, "does not compute"),
        (Dropped, "training mode"),
        (Extra, "other arguments"),
    ],
)
def test_mlps_that_only_look_gated(cls, reason):
    report = jumar.convert(cls(), ["npu_swiglu"])
    assert [s.status for s in report.sites] == ["skipped"] and reason in report.sites[0].reason


def test_hooked_activation_is_left_alone():
    class WithModule(Mlp):
        def __init__(self):
            super().__init__()
            self.act = nn.SiLU()

    m = WithModule()
    assert len(plan(m, ["npu_swiglu"]).report().replaced) == 1
    m.act.register_forward_hook(lambda *a: None)
    assert "act has hooks" in jumar.convert(m, ["npu_swiglu"]).sites[0].reason


def test_other_children_of_an_mlp_are_not_mentioned():
    assert not jumar.convert(nn.Sequential(nn.Linear(2, 2), nn.SiLU()), ["npu_swiglu"]).sites


class _Clamped(nn.Module):
    """A SwiGLU with a limit: like the plain one for small values only."""

    def __init__(self, where: str):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down_proj, self.where = nn.Linear(16, 8, bias=False), where

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.where == "inputs":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        product = nn.functional.silu(gate) * up
        return self.down_proj(product.clamp(-100, 100) if self.where == "product" else product)


@pytest.mark.parametrize("where", ["inputs", "product"])
def test_a_clamp_is_a_near_miss(where):
    report = jumar.convert(nn.Sequential(_Clamped(where)), ["npu_swiglu"])
    assert not report.replaced
    assert "large values" in report.skipped[0].reason
    assert jumar.convert(nn.Sequential(_Clamped("nowhere")), ["npu_swiglu"]).replaced


def test_a_norm_that_clamps_is_a_near_miss():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x):
            x = x.clamp(-50, 50)
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    report = jumar.convert(nn.Sequential(Norm()), ["npu_rms_norm"])
    assert not report.replaced and report.skipped
