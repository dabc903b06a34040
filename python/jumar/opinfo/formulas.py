"""Each operator as a few lines of plain PyTorch, and how large the terms are that cancel in it.

``*_plain`` is what a model runs without fused operators: written as Hugging Face models write it, in whatever dtype
its inputs have.  On fp64 inputs it is the oracle.  ``*_terms`` gives, on fp64 values, the sum of the magnitudes of the
terms behind each result whose terms may cancel: an error there is measured against the terms, not against what is left
of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    """fp32, or fp64 for fp64: the dtype that models compute norms in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _dims(gamma: Tensor) -> list[int]:
    return list(range(-gamma.dim(), 0))


def _rstd(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return torch.rsqrt(_wide(x).pow(2).mean(_dims(gamma), keepdim=True) + epsilon)


def rms_norm_plain(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    rstd = _rstd(input, gamma, epsilon)
    return (gamma * (_wide(input) * rstd).to(input.dtype)).to(input.dtype), rstd


def gemma_rms_norm_plain(
    input: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    rstd = _rstd(input, gamma, epsilon)
    return (_wide(input) * rstd * (1.0 + _wide(gamma))).to(input.dtype), rstd


def add_rms_norm_plain(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    x = x1 + x2
    y, rstd = rms_norm_plain(x, gamma, epsilon)
    return y, rstd, x


def add_rms_norm_oracle(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """With the sum rounded to ``dtype``, which the operator is specified to do before it normalises."""
    x = x1 + x2
    x = x + (x.to(dtype).to(x.dtype) - x).detach()
    y, rstd = rms_norm_plain(x, gamma, epsilon)
    return y, rstd, x


def rms_norm_gated_plain(
    input: Tensor, gate: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    y, rstd = rms_norm_plain(input, gamma, epsilon)
    return (y * F.silu(_wide(gate))).to(input.dtype), rstd


def _norm_terms(x: Tensor, u: Tensor, epsilon: float, dims: list[int]) -> Tensor:
    """dx = rstd * (u - xhat * mean(u * xhat)): both terms."""
    rstd = torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + epsilon)
    xhat = x * rstd
    return rstd * (u.abs() + xhat.abs() * (u * xhat).abs().mean(dims, keepdim=True))


def rms_norm_terms(t: dict[str, Tensor], grads: list[Tensor], offset: float = 0.0, **options):
    x, gamma, (dy,) = t["input"], t["gamma"], grads
    epsilon, dims = options.get("epsilon", 1e-6), _dims(gamma)
    xhat = x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + epsilon)
    return {
        "d input": _norm_terms(x, dy * (offset + gamma), epsilon, dims),
        "d gamma": (dy * xhat).abs().sum_to_size(gamma.shape),
    }


def gemma_rms_norm_terms(t: dict[str, Tensor], grads: list[Tensor], **options):
    return rms_norm_terms(t, grads, offset=1.0, **options)


def add_rms_norm_terms(t: dict[str, Tensor], grads: list[Tensor], *, dtype: torch.dtype, **options):
    x = (t["x1"] + t["x2"]).to(dtype).double()
    dy, dsum = grads
    terms = rms_norm_terms({"input": x, "gamma": t["gamma"]}, [dy], **options)
    dx = terms["d input"] + dsum.abs()
    return {"d x1": dx, "d x2": dx, "d gamma": terms["d gamma"]}


def _silu_slope_terms(a: Tensor) -> Tensor:
    """d silu = s * (1 + a * (1 - s)): both terms."""
    s = torch.sigmoid(a)
    return s * (1.0 + a.abs() * (1.0 - s))


def rms_norm_gated_terms(t: dict[str, Tensor], grads: list[Tensor], **options):
    x, gate, gamma, (dy,) = t["input"], t["gate"], t["gamma"], grads
    terms = rms_norm_terms({"input": x, "gamma": gamma}, [dy * F.silu(gate)], **options)
    rstd = torch.rsqrt(x.pow(2).mean(_dims(gamma), keepdim=True) + options.get("epsilon", 1e-6))
    terms["d gate"] = (dy * x * rstd * gamma).abs() * _silu_slope_terms(gate)
    return terms


def swiglu_plain(input: Tensor, dim: int = -1) -> tuple[Tensor]:
    a, b = input.chunk(2, dim)
    return (F.silu(a) * b,)


def swiglu_terms(t: dict[str, Tensor], grads: list[Tensor], dim: int = -1, **_):
    a, b = t["input"].chunk(2, dim)
    (dy,) = grads
    da = (dy * b).abs() * _silu_slope_terms(a)
    return {"d input": torch.cat([da, torch.zeros_like(da)], dim)}


def swiglu_gate_up_plain(gate: Tensor, up: Tensor) -> tuple[Tensor]:
    return (F.silu(gate) * up,)


def swiglu_gate_up_terms(t: dict[str, Tensor], grads: list[Tensor], **_):
    return {"d gate": (grads[0] * t["up"]).abs() * _silu_slope_terms(t["gate"])}


def _rotate(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def rotary_mul_plain(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor]:
    width = r1.shape[-1]
    if width == input.shape[-1]:
        return ((input * r1 + _rotate(input, rotary_mode) * r2).to(input.dtype),)
    x, rest = input[..., :width], input[..., width:]
    return (torch.cat((rotary_mul_plain(x, r1, r2, rotary_mode)[0], rest), dim=-1),)


def rotary_mul_terms(t: dict[str, Tensor], grads: list[Tensor], rotary_mode: str = "half", **_):
    x, cos, sin = (t[name].abs() for name in ("input", "r1", "r2"))
    g = grads[0].abs()
    width = cos.shape[-1]
    rotated = _rotate(x[..., :width], rotary_mode).abs()
    y = F.pad(x[..., :width] * cos + rotated * sin, (0, x.shape[-1] - width))
    back = _rotate(g[..., :width] * sin, rotary_mode).abs()
    dx = F.pad(g[..., :width] * cos + back, (0, x.shape[-1] - width))
    return {
        "y": y,
        "d input": dx,
        "d r1": (g[..., :width] * x[..., :width]).sum_to_size(cos.shape),
        "d r2": (g[..., :width] * rotated).sum_to_size(sin.shape),
    }


def linear_plain(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor]:
    return (F.linear(input, weight, bias),)


def linear_terms(t: dict[str, Tensor], grads: list[Tensor], **_):
    """Products of magnitudes; a sum of K rounded terms strays with the root of K, so each gets that factor."""
    x, w, g = t["input"].abs(), t["weight"].abs(), grads[0].abs()
    bias = t.get("bias")
    x2, g2 = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    terms = {
        "y": F.linear(x, w, None if bias is None else bias.abs()) * max(1, x.shape[-1]) ** 0.5,
        "d input": (g @ w) * max(1, w.shape[0]) ** 0.5,
        "d weight": (g2.mT @ x2) * max(1, x2.shape[0]) ** 0.5,
    }
    if bias is not None:
        terms["d bias"] = g2.sum(0) * max(1, x2.shape[0]) ** 0.5
    return terms
