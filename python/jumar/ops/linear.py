"""``npu_linear``: x · Wᵀ + b on the packed matrix product. See docs/ops/npu_linear.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    gradient,
    on_card,
    register_autocast,
    register_autograd,
    register_fake,
)


@calls_operator
def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y[.., o] = sum_i input[.., i] * weight[o, i] + bias[o]``, summed in fp32 and rounded once.

    Args:
        input: [.., I], fp32, bf16, fp16 or fp64, any strides.
        weight: [O, I] of input's dtype; bias: [O] of input's dtype, or None.

    Returns:
        [.., O] of input's dtype. Differentiable in all three arguments; only the gradients that are needed are computed.
        Under autocast the arguments are cast as those of ``torch.nn.functional.linear`` are.

    Raises:
        RuntimeError: sizes or dtypes do not fit.
    """


def _check(op: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"{op}: input {list(input.shape)} does not go with weight {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError(
            f"{op}: bias {list(bias.shape)} does not go with weight {list(weight.shape)}"
        )


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check("npu_linear", input, weight, bias)
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _dgrad_fake(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], weight.shape[1]))


def _wgrad_fake(grad: Tensor, input: Tensor) -> Tensor:
    return input.new_empty((grad.shape[-1], input.shape[-1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias = inputs
    # Each gradient needs the other operand only; a frozen weight keeps no activations alive.
    ctx.save_for_backward(
        input if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None
    )


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    # torch drops a trailing argument that has its default.
    need_input, need_weight, need_bias = (*ctx.needs_input_grad, False)[:3]
    if on_card(grad):
        dx, dw = (grad @ weight if need_input else None), None
        if need_weight:
            dw = grad.flatten(0, -2).T @ input.flatten(0, -2)
        return dx, dw, grad.flatten(0, -2).sum(0) if need_bias else None
    return (
        torch.ops.jumar.linear_dgrad(grad, weight) if need_input else None,
        torch.ops.jumar.linear_wgrad(grad, input) if need_weight else None,
        torch.ops.jumar.linear_bias_grad(grad) if need_bias else None,
    )


register_fake("npu_linear", _fake)
register_autograd("npu_linear", _backward, _setup)
npu_linear_backward = gradient(
    "npu_linear_backward",
    lambda grad, input, weight: (_dgrad_fake(grad, weight), _wgrad_fake(grad, input)),
    "Gradients of :func:`npu_linear` for input and weight: ``grad · W`` [.., I] and ``gradᵀ · input`` [O, I].",
)
gradient("linear_dgrad", _dgrad_fake)
gradient("linear_wgrad", _wgrad_fake)
gradient("linear_bias_grad", lambda grad: grad.new_empty(grad.shape[-1:]))
register_autocast("npu_linear")
