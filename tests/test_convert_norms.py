"""``npu_rms_norm``: which norms are recognised, as what, and which lookalikes are left alone and why."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jumar
from jumar.convert import Match, Miss
from jumar.hf import norms

WIDTH = 24


class Llama(nn.Module):
    """Rounds the normalised value to the input's type, then multiplies."""

    def __init__(self, width=WIDTH, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class ZeroCentred(nn.Module):
    """1 + w, with the same attributes as the plain one: only what it computes tells them apart."""

    def __init__(self, width=WIDTH, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.variance_epsilon = eps

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * (1.0 + self.weight.float())).type_as(x)


class PlainWithEps(Llama):
    """Plain w, under the attribute that zero-centred norms use."""

    def __init__(self):
        super().__init__()
        self.eps = self.variance_epsilon
        del self.variance_epsilon

    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight, self.eps)


class SubtractsMean(Llama):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )


class EpsOutside(Llama):
    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class L2(Llama):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.variance_epsilon)


class Scaled(Llama):
    def forward(self, x):
        return 2 * super().forward(x)


class HardCodedNorm(Llama):
    def __init__(self):
        super().__init__()
        del self.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class OtherEps(Llama):
    """The attribute says one epsilon, the code uses another."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


class Noisy(Llama):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


class Gated(Llama):
    def forward(self, hidden_states, gate=None):
        dtype = hidden_states.dtype
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        x = self.weight * x.to(dtype)
        return (x * F.silu(gate.float())).to(dtype)


class GateFirst(Llama):
    def forward(self, x, gate):
        return super().forward(x * F.silu(gate))


class SigmoidGate(Llama):
    def forward(self, x, gate):
        return super().forward(x) * torch.sigmoid(gate)


class Residual(Llama):
    def forward(self, x, residual=None, prenorm=False):
        return super().forward(x)


class Fails(Llama):
    def forward(self, x):
        raise RuntimeError("not on this device")


@pytest.mark.parametrize(
    ("module", "operator", "kind"),
    [
        (Llama(), "npu_rms_norm", "plain"),
        (Llama(eps=1e-5), "npu_rms_norm", "plain"),
        (Llama(width=1), "npu_rms_norm", "plain"),
        (PlainWithEps(), "npu_rms_norm", "plain"),
        (nn.RMSNorm(WIDTH), "npu_rms_norm", "plain"),
        (nn.RMSNorm(WIDTH, eps=1e-5), "npu_rms_norm", "plain"),
        (nn.RMSNorm(WIDTH, eps=0.0), "npu_rms_norm", "plain"),
        (ZeroCentred(), "npu_gemma_rms_norm", "one_plus"),
        (Gated(), "rms_norm_gated", "gated"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else None,
)
def test_recognised(module, operator, kind):
    verdict = norms.recognise(module)
    assert isinstance(verdict, Match), verdict
    assert verdict.operator == operator and verdict.key[0] == kind
    assert norms.recognise(copy.deepcopy(module).to("meta")) == verdict
    assert norms.recognise(copy.deepcopy(module).bfloat16()) == verdict


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (SubtractsMean(), "subtracts the mean"),
        (nn.LayerNorm(WIDTH), "has a bias"),
        (nn.LayerNorm(WIDTH, bias=False), "subtracts the mean"),
        (nn.BatchNorm1d(WIDTH), "has a bias"),
        (nn.RMSNorm(WIDTH, elementwise_affine=False), "has no weight"),
        (nn.RMSNorm((2, WIDTH)), "shape (2, 24)"),
        (EpsOutside(), "does not compute"),
        (L2(), "does not compute"),
        (Scaled(), "does not compute"),
        (OtherEps(), "does not compute"),
        (HardCodedNorm(), "no attribute holds its epsilon"),
        (Noisy(), "training mode"),
        (GateFirst(), "gates before it normalises"),
        (SigmoidGate(), "sigmoid"),
        (Residual(), "other arguments"),
        (Fails(), "its forward raised RuntimeError: not on this device"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else None,
)
def test_near_misses_are_left_alone_and_say_why(module, reason):
    verdict = norms.recognise(module)
    assert isinstance(verdict, Miss) and reason in verdict.reason
    before = type(module)
    report = jumar.convert(module, ["npu_rms_norm"])
    assert type(module) is before
    assert [(s.status, s.path) for s in report.sites] == [("skipped", "")]
    assert reason in report.sites[0].reason


@pytest.mark.parametrize(
    "module", [nn.Linear(3, 3), nn.Embedding(4, 3, max_norm=1.0), nn.Dropout(), nn.SiLU()]
)
def test_other_modules_are_not_mentioned(module):
    assert norms.recognise(module) is None


def test_recognising_changes_nothing():
    module = Noisy().train()
    seen = []
    module.register_forward_hook(lambda *a: seen.append(a))
    state = torch.random.get_rng_state()
    weight = module.weight.detach().clone()
    before = dict(vars(module))
    norms.recognise(module)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not seen and vars(module) == before and torch.equal(module.weight, weight)


def run(module, *inputs):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    module.zero_grad()
    out = module(*leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    out.backward(grad)
    return out.detach(), [leaf.grad for leaf in leaves] + [
        p.grad.clone() for p in module.parameters()
    ]


@pytest.mark.parametrize(
    "make", [Llama, ZeroCentred, PlainWithEps, Gated, lambda: nn.RMSNorm(WIDTH)]
)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("input", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_types_and_values_are_those_of_eager(make, weight, input):
    """Every pair of input and weight type (C9: a wide input is not narrowed to the weight's type)."""
    torch.manual_seed(1)
    module = make().to(weight)
    inputs = [
        torch.randn(3, 5, WIDTH).to(input) for _ in range(2 if isinstance(module, Gated) else 1)
    ]
    expected, expected_grads = run(module, *inputs)
    jumar.convert(module, ["npu_rms_norm"], strict=True)
    actual, grads = run(module, *inputs)
    assert actual.dtype == expected.dtype
    wide = jumar_exact(module, *inputs)
    narrowest = max(torch.finfo(t).eps for t in (input, weight, actual.dtype))
    relative = 4 * narrowest if narrowest > 1e-6 else 1e-5
    assert ((actual.double() - wide).abs() <= relative * wide.abs() + 1e-6).all()
    for a, e in zip(grads, expected_grads, strict=True):
        assert a.dtype == e.dtype
        assert ((a.double() - e.double()).abs() <= 8 * relative * e.double().abs().max()).all()


def jumar_exact(module, x, gate=None):
    """The norm's formula in fp64 on the given values."""
    eps = next(v for k, v in vars(module).items() if "eps" in k)
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    x, w = x.double(), module.weight.detach().double()
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y * (1 + w if type(module).__name__ == "ZeroCentred" else w)
    return y if gate is None else y * F.silu(gate.double())


def test_wide_input_narrow_weight():
    """C9 by value: with a bf16 weight of ones, an fp32 input keeps its fp32 result."""
    module = Llama().bfloat16()
    module.weight.data.fill_(1)
    x = torch.tensor([1.0 + 2**-12] * WIDTH)
    x[0] = 3.0 + 2**-11
    expected = module(x)
    jumar.convert(module, ["npu_rms_norm"])
    actual = module(x)
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().max() < 1e-6
    assert (actual - module(x.bfloat16().float())).abs().max() > 1e-5


def test_one_rounding_instead_of_two():
    """D13: the documented difference of at most one unit in the last place from eager's two roundings."""
    module = Llama(4).bfloat16()
    module.weight.data = torch.tensor([1.5, 1.75, 0.1875, 1.625], dtype=torch.bfloat16)
    x = torch.tensor([-4, -0.75, 3.25, -3.75], dtype=torch.bfloat16)
    assert module(x).tolist() == [-1.875, -0.408203125, 0.1904296875, -1.90625]
    jumar.convert(module, ["npu_rms_norm"])
    assert module(x).tolist() == [-1.8671875, -0.408203125, 0.189453125, -1.8984375]


def test_zero_weight_of_a_zero_centred_norm():
    """D14: w = 0 gives norm(x), not 0; and C6: torch's norm with w = 1 gives norm(x), not twice that."""
    x = torch.randn(2, WIDTH)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    for module, value in ((ZeroCentred(), 0.0), (nn.RMSNorm(WIDTH, eps=1e-6), 1.0)):
        module.weight.data.fill_(value)
        jumar.convert(module, ["npu_rms_norm"], strict=True)
        assert torch.allclose(module(x), expected, atol=1e-6)


def test_weight_and_epsilon_are_read_at_call_time():
    module = Llama()
    x = torch.randn(3, WIDTH)
    jumar.convert(module, ["npu_rms_norm"])
    module.weight = nn.Parameter(torch.full((WIDTH,), 2.0))
    module.variance_epsilon = 0.5
    expected = 2 * x * (x.square().mean(-1, keepdim=True) + 0.5).rsqrt()
    assert torch.allclose(module(x), expected, atol=1e-6)


def test_arguments_keep_their_names_and_defaults():
    module, gated = Llama(), Gated()
    jumar.convert(nn.ModuleList([module, gated]), ["npu_rms_norm"], strict=True)
    x = torch.randn(2, WIDTH)
    assert torch.equal(module(hidden_states=x), module(x))
    assert torch.equal(gated(gate=x, hidden_states=x), gated(x, x))
    with pytest.raises(AttributeError):  # as eager, which has no ungated form either
        gated(x)
    with pytest.raises(TypeError, match="forward"):
        module(x, x)


def test_transformers_zero_centred_and_gated_norms():
    """Qwen3-Next's norms, recognised from what they compute."""
    next_ = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, gate = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    for module, operator, inputs in (
        (next_.Qwen3NextRMSNorm(WIDTH), "npu_gemma_rms_norm", (x,)),
        (next_.Qwen3NextRMSNormGated(WIDTH), "rms_norm_gated", (x, gate)),
    ):
        module.weight.data = torch.randn(WIDTH)
        expected = module(*inputs)
        report = jumar.convert(module, ["npu_rms_norm"], strict=True)
        assert report.replaced[0].operator == operator
        jumar.reset_call_counts()
        assert torch.allclose(module(*inputs), expected, atol=1e-5)
        assert jumar.call_counts() == {operator: 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_epsilon_of_none(dtype):
    """It stands for a machine epsilon; in 16 bits the input's and fp32's lie far apart, and input this small shows it."""
    module = nn.RMSNorm(WIDTH, dtype=dtype)
    x = (torch.randn(4, WIDTH) * 1e-3).to(dtype)
    expected = module(x)
    assert expected.double().square().mean() > 0.5
    jumar.convert(module, ["npu_rms_norm"], strict=True)
    assert (
        (module(x) - expected).abs() <= 2 * torch.finfo(dtype).eps * expected.abs() + 1e-6
    ).all()
