"""``npu_scaled_masked_softmax``. See docs/ops/npu_scaled_masked_softmax.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    define_by_position,
    gradient,
    register_autocast,
    register_autograd,
    register_fake,
)


@calls_operator
def npu_scaled_masked_softmax(
    x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False
) -> Tensor:
    """Softmax of ``scale * x`` along the last dimension, with -10000 where the mask is True.

    Args:
        x: fp32, bf16, fp16 or fp64, at least one dimension.
        mask: bool, broadcasts to x; **True hides**.
        fixed_triu_mask: must be False, as on the card.

    Returns:
        Like x, differentiable in x. A row that is hidden whole is uniform.
    """


@calls_operator
def npu_scaled_masked_softmax_backward(
    y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    """Gradient of :func:`npu_scaled_masked_softmax` in x. Not differentiable."""


def _checked(name: str, scale: Any, fixed_triu_mask: bool) -> float:
    if isinstance(scale, bool | complex):
        raise RuntimeError(f"{name}: scale must be an integer or a float, got {scale}")
    if fixed_triu_mask:
        raise RuntimeError(f"{name}: fixed_triu_mask must be False, got True")
    return float(scale)


def _forward(x: Tensor, mask: Tensor, scale: Any, fixed_triu_mask: bool) -> Tensor:
    scale = _checked("npu_scaled_masked_softmax", scale, fixed_triu_mask)
    return torch.ops.jumar.scaled_masked_softmax(x, mask, scale)


def _gradient(y_grad: Tensor, y: Tensor, mask: Tensor, scale: Any, fixed_triu_mask: bool) -> Tensor:
    scale = _checked("npu_scaled_masked_softmax_backward", scale, fixed_triu_mask)
    return torch.ops.jumar.scaled_masked_softmax_backward(y_grad, y, mask, scale)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    _, mask, ctx.scale = inputs
    ctx.save_for_backward(output, mask)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    y, mask = ctx.saved_tensors
    return torch.ops.jumar.scaled_masked_softmax_backward(grad, y, mask, ctx.scale)


register_fake(
    "scaled_masked_softmax",
    lambda x, mask, scale: x.new_empty(x.shape),
    shown="npu_scaled_masked_softmax",
)
gradient(
    "scaled_masked_softmax_backward",
    lambda grad, y, mask, scale: y.new_empty(y.shape),
    shown="npu_scaled_masked_softmax_backward",
)
register_autograd("scaled_masked_softmax", _backward, _setup)
register_autocast("scaled_masked_softmax")
define_by_position(
    "npu_scaled_masked_softmax(Tensor x, Tensor mask, Scalar scale=1, bool fixed_triu_mask=False) -> Tensor",
    _forward,
)
define_by_position(
    "npu_scaled_masked_softmax_backward(Tensor y_grad, Tensor y, Tensor mask, Scalar scale, bool fixed_triu_mask)"
    " -> Tensor",
    _gradient,
)
