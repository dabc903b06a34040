"""RMSNorm family: ``npu_rms_norm``, ``npu_gemma_rms_norm``, ``npu_add_rms_norm``, ``rms_norm_gated``.

See docs/ops/npu_rms_norm.md for formulas, dtypes and error bounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    compute_dtype,
    gradient,
    register_autograd,
    register_fake,
    resolve,
)


@calls_operator
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """``y = input * rstd * gamma``, ``rstd = (mean(input^2) + epsilon)^-1/2`` over gamma's trailing dimensions.

    Args:
        input: [a.., n..], fp32, bf16, fp16 or fp64, any strides.
        gamma: [n..], any of these dtypes (fp64 only with fp64).
        epsilon: added to the mean square, inside the root.

    Returns:
        y like input (one rounding), and rstd [a.., 1..] in fp32 (fp64 for fp64). y is differentiable, rstd is not.

    Raises:
        RuntimeError: gamma does not match the trailing dimensions of input, or dtypes do not go together.
    """


@calls_operator
def npu_gemma_rms_norm(
    input: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """:func:`npu_rms_norm` with a zero-centred weight: ``y = input * rstd * (1 + gamma)``. Differentiable here."""


@calls_operator
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """``x = x1 + x2`` rounded to x1's dtype, then :func:`npu_rms_norm` of x. Returns (y, rstd, x).

    x1 and x2 have one shape and dtype. y and x are differentiable here (the vendor's operator is not).
    """


def rms_norm_gated(
    input: Tensor, gate: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """``y = input * rstd * gamma * silu(gate)`` with one rounding; norm before gate. Returns (y, rstd).

    gate has the shape and dtype of input.
    """
    return torch.ops.jumar.rms_norm_gated(input, gate, gamma, epsilon)


def _rstd(x: Tensor, gamma: Tensor) -> Tensor:
    sizes = list(x.shape[: x.dim() - gamma.dim()]) + [1] * gamma.dim()
    return x.new_empty(sizes, dtype=compute_dtype(x.dtype))


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _dgamma(x: Tensor, gamma: Tensor) -> Tensor:
    return x.new_empty(gamma.shape, dtype=compute_dtype(x.dtype))


def _check_gamma(op: str, x: Tensor, gamma: Tensor) -> None:
    if gamma.dim() == 0 or gamma.dim() > x.dim() or x.shape[x.dim() - gamma.dim() :] != gamma.shape:
        raise RuntimeError(
            f"{op}: gamma {list(gamma.shape)} does not match the trailing dimensions of the input {list(x.shape)}"
        )


def _norm_fake(op: str) -> Any:
    def fake(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        _check_gamma(op, input, gamma)
        return _like(input), _rstd(input, gamma)

    return fake


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _ = inputs
    _, rstd = output
    ctx.save_for_backward(*tensors, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _norm_backward(op: str) -> Any:
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor, Tensor]:
        x, gamma, rstd = ctx.saved_tensors
        dx, dgamma = resolve(op, x)(dy, x, gamma, rstd)
        return dx, dgamma.to(gamma.dtype)

    return backward


for _op, _backward in (
    ("npu_rms_norm", "npu_rms_norm_backward"),
    ("npu_gemma_rms_norm", "gemma_rms_norm_backward"),
):
    register_fake(_op, _norm_fake(_op))
    register_autograd(_op, _norm_backward(_backward), _norm_setup)


def _norm_backward_fake(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return _like(input), _dgamma(input, gamma)


npu_rms_norm_backward = gradient(
    "npu_rms_norm_backward",
    _norm_backward_fake,
    "Gradients of :func:`npu_rms_norm`: dinput like input, and dgamma [n..] in fp32 (fp64 for fp64).",
)
gradient("gemma_rms_norm_backward", _norm_backward_fake)


def _add_fake(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check_gamma("npu_add_rms_norm", x1, gamma)
    return _like(x1), _rstd(x1, gamma), _like(x1)


def _add_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, gamma, _ = inputs
    _, rstd, x = output
    ctx.save_for_backward(x, gamma, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _add_backward(
    ctx: Any, dy: Tensor | None, _: Any, dx: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, gamma, rstd = ctx.saved_tensors
    if dy is None:
        return dx, dx
    if dx is None:
        grad, dgamma = torch.ops.jumar.npu_rms_norm_backward(dy, x, gamma, rstd)
    else:
        grad, dgamma = torch.ops.jumar.add_rms_norm_backward(dy, dx, x, gamma, rstd)
    return grad, grad, dgamma.to(gamma.dtype)


register_fake("npu_add_rms_norm", _add_fake)
gradient("add_rms_norm_backward", lambda dy, dx, x, gamma, rstd: (_like(x), _dgamma(x, gamma)))
register_autograd("npu_add_rms_norm", _add_backward, _add_setup)


def _gated_fake(
    input: Tensor, gate: Tensor, gamma: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    _check_gamma("rms_norm_gated", input, gamma)
    return _like(input), _rstd(input, gamma)


def _gated_backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor, ...]:
    x, gate, gamma, rstd = ctx.saved_tensors
    dx, dgate, dgamma = torch.ops.jumar.rms_norm_gated_backward(dy, x, gate, gamma, rstd)
    return dx, dgate, dgamma.to(gamma.dtype)


register_fake("rms_norm_gated", _gated_fake)
gradient(
    "rms_norm_gated_backward",
    lambda dy, input, gate, gamma, rstd: (_like(input), _like(input), _dgamma(input, gamma)),
)
register_autograd("rms_norm_gated", _gated_backward, _norm_setup)
