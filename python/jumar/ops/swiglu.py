"""SwiGLU: ``npu_swiglu`` on a packed tensor, ``swiglu_gate_up`` on two. See docs/ops/npu_swiglu.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    gradient,
    on_card,
    register_autograd,
    register_fake,
)


@calls_operator
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """``silu(A) * B``, where A is the first half of input along `dim` and B the second.

    Args:
        input: [.., 2n, ..], fp32, bf16, fp16 or fp64, any strides.
        dim: the dimension that is halved.

    Returns:
        [.., n, ..] of input's dtype, contiguous, rounded once. Differentiable.

    Raises:
        RuntimeError: dim is out of range or its size is odd.
    """


def swiglu_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of two tensors of one shape and dtype: :func:`npu_swiglu` without the concatenation.

    Returns:
        A contiguous tensor like gate, rounded once. Differentiable in both.

    Raises:
        RuntimeError: shapes or dtypes differ.
    """
    if on_card(gate):
        return torch.ops.npu.npu_swiglu(torch.cat((gate, up), dim=-1), -1)
    return torch.ops.jumar.swiglu_gate_up(gate, up)


def _check_packed(op: str, input: Tensor, dim: int) -> int:
    if not -input.dim() <= dim < input.dim():
        raise RuntimeError(f"{op}: dim out of range: {dim} for input of shape {list(input.shape)}")
    if input.shape[dim] % 2 != 0:
        raise RuntimeError(
            f"{op}: the size of input along dim {dim} must be even, got {input.shape[dim]} in {list(input.shape)}"
        )
    return dim % input.dim()


def _check_pair(op: str, gate: Tensor, up: Tensor) -> None:
    if gate.dtype != up.dtype or gate.shape != up.shape:
        raise RuntimeError(
            f"{op}: gate and up must have one shape and dtype, got {gate.dtype}{list(gate.shape)} and "
            f"{up.dtype}{list(up.shape)}"
        )


def _fake(input: Tensor, dim: int) -> Tensor:
    at = _check_packed("npu_swiglu", input, dim)
    return input.new_empty((*input.shape[:at], input.shape[at] // 2, *input.shape[at + 1 :]))


def _backward_fake(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    _check_packed("npu_swiglu_backward", input, dim)
    return input.new_empty(input.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, ctx.dim = inputs
    ctx.save_for_backward(input)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (input,) = ctx.saved_tensors
    return npu_swiglu_backward(grad, input, ctx.dim)


register_fake("npu_swiglu", _fake)
register_autograd("npu_swiglu", _backward, _setup)
npu_swiglu_backward = gradient("npu_swiglu_backward", _backward_fake, "Gradient of :func:`npu_swiglu`, like input. Not differentiable.")


def _pair_fake(gate: Tensor, up: Tensor) -> Tensor:
    _check_pair("swiglu_gate_up", gate, up)
    return gate.new_empty(gate.shape)


def _pair_backward_fake(grad_output: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    _check_pair("swiglu_gate_up_backward", gate, up)
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _pair_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _pair_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    return torch.ops.jumar.swiglu_gate_up_backward(grad, gate, up)


register_fake("swiglu_gate_up", _pair_fake)
gradient("swiglu_gate_up_backward", _pair_backward_fake)
register_autograd("swiglu_gate_up", _pair_backward, _pair_setup)
