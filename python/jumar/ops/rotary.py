"""``npu_rotary_mul`` and ``npu_interleave_rope``: rotary position embedding. See docs/ops/npu_rotary_mul.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    define_composite,
    gradient,
    register_autograd,
    register_fake,
)


@calls_operator
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """``input * r1 + R(input) * r2`` along the last dimension, r1 and r2 being the tables of cos and sin.

    Args:
        input: [.., D] with D even, rank 2 to 8, fp32, bf16, fp16 or fp64, any strides.
        r1, r2: tables of input's rank and one shape; each dimension is 1 or input's. Their last dimension R is even and
            at most D; when it is smaller, the other D - R elements of each row are copied. fp32, bf16 or fp16, fp32 kept
            as it is; fp64 with fp64 input only.
        rotary_mode: "half": ``R(x) = cat(-x[R/2:], x[:R/2])``; "interleave": ``R(x)[2i] = -x[2i+1], R(x)[2i+1] = x[2i]``.
        rotate: [D, D]; when given, ``R(x) = x @ rotate`` whatever rotary_mode says. Forward only.

    Returns:
        Like input, in its memory layout, rounded once. Differentiable in input, r1 and r2.

    Raises:
        RuntimeError: shapes, dtypes or the mode do not fit, or rotate is given and a gradient is required.
    """


@calls_operator
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours are rotated and come out in halves: ``npu_rotary_mul(cat(x[0::2], x[1::2]), cos, sin)``.

    Args:
        x: [B, N, S, D] with D even, fp32, bf16, fp16 or fp64, any strides.
        cos, sin: [B, 1, S, D], any of the first three sizes may be 1; dtypes as :func:`npu_rotary_mul` takes them.

    Returns:
        Like x, contiguous, differentiable in all three.

    Raises:
        RuntimeError: shapes or dtypes do not fit.
    """


def _check(
    op: str, input: Tensor, r1: Tensor, r2: Tensor, mode: str, names: tuple[str, str, str] = ("input", "r1", "r2")
) -> None:  # fmt: skip
    if mode not in ("half", "interleave"):
        raise RuntimeError(
            f"{op}: The rotary_mode of npu_rotary_mul should be half or interleave, but got {mode}"
        )
    fits = r1.shape == r2.shape and r1.dim() == input.dim() and input.dim() >= 2
    fits = fits and all(r in (1, x) for r, x in zip(r1.shape[:-1], input.shape[:-1], strict=True))
    if not fits or r1.shape[-1] > input.shape[-1]:
        x, cos, sin = (f"{n} {list(t.shape)}" for n, t in zip(names, (input, r1, r2), strict=True))
        raise RuntimeError(f"{op}: {cos} and {sin} do not go with {x}")
    for width in (input.shape[-1], r1.shape[-1]):
        if width % 2 != 0:
            raise RuntimeError(f"{op}: the last dimension must be even, got {width}")


def _fake(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    _check("npu_rotary_mul", input, r1, r2, rotary_mode)
    return torch.empty_like(input)


def _backward_fake(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    _check("npu_rotary_mul_backward", input, r1, r2, rotary_mode)
    return torch.empty_like(grad), r1.new_empty(r1.shape), r2.new_empty(r2.shape)


def _dx_fake(grad: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> Tensor:
    _check("rotary_mul_backward", grad, r1, r2, rotary_mode)
    return torch.empty_like(grad)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, r1, r2, ctx.mode, rotate = inputs
    if rotate is not None and any(ctx.needs_input_grad):
        raise RuntimeError(
            "npu_rotary_mul: rotate is given, but the gradient is implemented without rotate only"
        )
    ctx.tables = any(ctx.needs_input_grad[1:3])
    # The gradient of input alone does not need input.
    ctx.save_for_backward(input if ctx.tables else None, r1, r2)


def _backward(ctx: Any, grad: Tensor) -> Any:
    input, r1, r2 = ctx.saved_tensors
    if ctx.tables:
        return npu_rotary_mul_backward(grad, input, r1, r2, ctx.mode)
    return torch.ops.jumar.rotary_mul_backward(grad, r1, r2, ctx.mode)


register_fake("npu_rotary_mul", _fake)
register_autograd("npu_rotary_mul", _backward, _setup)
npu_rotary_mul_backward = gradient(
    "npu_rotary_mul_backward",
    _backward_fake,
    "Gradients of :func:`npu_rotary_mul`: of input (like grad), of r1 and of r2 (in their shapes and dtypes).",
)
gradient("rotary_mul_backward", _dx_fake)


def _interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.dim() != 4 or x.shape[-1] % 2 != 0:
        raise RuntimeError(
            f"npu_interleave_rope: x must be [B, N, S, D] with D even, got {list(x.shape)}"
        )
    if cos.shape[-1:] != x.shape[-1:]:
        raise RuntimeError(
            f"npu_interleave_rope: cos {list(cos.shape)} does not go with x {list(x.shape)}"
        )
    _check("npu_interleave_rope", x, cos, sin, "half", ("x", "cos", "sin"))
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.ops.jumar.npu_rotary_mul(halves, cos, sin, "half")


define_composite(
    "npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor", _interleave_rope
)
