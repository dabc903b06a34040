"""``squared_relu_glu``: the Python side of the worked example. See docs/adding-an-operator.md."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor


def load(library: str | os.PathLike[str]) -> None:
    """Loads the C++ library, which registers ``torch.ops.jumar_example.*``, and wires fakes and gradients. Call once."""
    torch.ops.load_library(library)
    torch.library.register_fake("jumar_example::squared_relu_glu", _fake)
    torch.library.register_fake("jumar_example::squared_relu_glu_backward", _backward_fake)
    torch.library.register_autograd("jumar_example::squared_relu_glu", _backward, setup_context=_setup)
    # Without this torch would hand out undefined second derivatives after a mere warning.
    torch.library.register_autograd(
        "jumar_example::squared_relu_glu_backward",
        _no_double_backward,
        setup_context=lambda ctx, inputs, output: None,
    )


def squared_relu_glu(input: Tensor, gate: Tensor) -> Tensor:
    """``max(input, 0)^2 * gate``, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        input: any shape and strides, fp32, bf16, fp16 or fp64.
        gate: shape and dtype of input.

    Returns:
        A contiguous tensor of input's shape and dtype; differentiable once in both arguments.

    Raises:
        RuntimeError: gate is not like input, or the dtype is no floating one.
    """
    return torch.ops.jumar_example.squared_relu_glu(input, gate)


def _fake(input: Tensor, gate: Tensor) -> Tensor:
    return input.new_empty(input.shape)


def _backward_fake(dy: Tensor, input: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape), input.new_empty(input.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    input, gate = ctx.saved_tensors
    return torch.ops.jumar_example.squared_relu_glu_backward(dy, input, gate)


def _no_double_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("squared_relu_glu_backward: not differentiable (double backward is not implemented)")
