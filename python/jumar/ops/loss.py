"""``linear_cross_entropy`` (head and loss in one, no logits) and ``npu_cross_entropy_loss``.

See docs/ops/linear_cross_entropy.md and docs/ops/npu_cross_entropy_loss.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    compute_dtype,
    gradient,
    register_autocast,
    register_autograd,
    register_fake,
)

#: Up to so many logits are kept for the backward (kKeptLogits in src/kernels/loss/linear_cross_entropy.h).
KEPT_LOGITS = 4 << 20

_REDUCTIONS = ("none", "mean", "sum")


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    divisor: int | float | Tensor | None = None,
) -> Tensor:
    """``cross_entropy(input @ weight.T + bias, target)`` without the logits of all tokens ever existing.

    Args:
        input: [.., H], fp32, bf16, fp16 or fp64, any strides.
        weight: [V, H] of input's dtype; bias: [V] of input's dtype, or None.
        target: [..], int64 or int32 class numbers, or ``ignore_index`` for tokens without a loss.
        reduction: ``"mean"`` over the tokens that are not ignored, ``"sum"``, or ``"none"`` for [..].
        label_smoothing: in [0, 1], as in ``torch.nn.functional.cross_entropy``.
        z_loss: coefficient of ``logsumexp(logits)**2``, added to the loss of each token.
        divisor: with ``"sum"``, what the sum is divided by: a number of tokens that the caller counted.

    Returns:
        The loss in fp32 (fp64 for fp64). Differentiable in input, weight and bias; only the gradients that are needed
        are computed. Under autocast the arguments are cast as those of ``torch.nn.functional.linear`` are.

    Raises:
        RuntimeError: sizes or dtypes do not fit, or a target is out of range.
        ValueError: ``divisor`` with another reduction than ``"sum"``.
    """
    if divisor is not None and reduction != "sum":
        raise ValueError(
            f"linear_cross_entropy: divisor goes with reduction 'sum', not {reduction!r}"
        )
    loss = torch.ops.jumar.linear_cross_entropy(
        input, weight, target, bias, ignore_index, reduction, label_smoothing, z_loss
    )[0]
    return loss if divisor is None else loss / divisor


@calls_operator
def npu_cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropy by the vendor's rule: a negative ``ignore_index``, such as the default, ignores nothing.

    Args:
        input: [N, C] logits, fp32, bf16, fp16 or fp64, any strides.
        target: [N], int64 or int32.
        weight: [C] fp32, one weight per class, or None.
        lse_square_scale_for_zloss, return_zloss: must keep their defaults, as on the card.

    Returns:
        (loss, log_prob [N, C], zloss [0], lse [0]), all in input's dtype. loss is [1], or [N] for ``"none"``. loss and
        log_prob are differentiable in input.

    Raises:
        RuntimeError: sizes or dtypes do not fit, a target is out of range (-100 is), or a z-loss is asked for.
    """


def _check_reduction(op: str, reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise RuntimeError(f"{op}: reduction must be 'none', 'mean' or 'sum', got {reduction!r}")


def _fake(
    input: Tensor, weight: Tensor, target: Tensor, bias: Any, ignore_index: int, reduction: str, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    op = "linear_cross_entropy"
    _check_reduction(op, reduction)
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"{op}: input {list(input.shape)} does not go with weight {list(weight.shape)}"
        )
    if target.shape != input.shape[:-1]:
        raise RuntimeError(
            f"{op}: target {list(target.shape)} does not go with input {list(input.shape)}"
        )
    dtype = compute_dtype(input.dtype)
    tokens, classes = target.numel(), weight.shape[0]
    rows = tokens if tokens * classes <= KEPT_LOGITS else 0
    return (
        input.new_empty(target.shape if reduction == "none" else (), dtype=dtype),
        input.new_empty((tokens,), dtype=dtype),
        input.new_empty((rows, classes), dtype=dtype),
    )


def _backward_fake(
    grad: Tensor, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    need_input, need_weight, need_bias = rest[-3:]
    return (
        input.new_empty(input.shape if need_input else (0,)),
        input.new_empty(weight.shape if need_weight else (0,)),
        input.new_empty(weight.shape[:1] if need_bias and bias is not None else (0,)),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, weight, target, bias, *ctx.options = inputs
    _, lse, logits = output
    ctx.save_for_backward(input, weight, target, bias, lse, logits)
    ctx.mark_non_differentiable(lse, logits)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    input, weight, target, bias, lse, logits = ctx.saved_tensors
    # torch drops trailing arguments that have their defaults.
    need_input, need_weight, _, need_bias = (*ctx.needs_input_grad, False)[:4]
    need_bias = need_bias and bias is not None
    needs = (need_input, need_weight, need_bias)
    dinput, dweight, dbias = torch.ops.jumar.linear_cross_entropy_backward(
        grad, input, weight, target, bias, lse, logits, *ctx.options, *needs
    )
    return (
        dinput if need_input else None,
        dweight if need_weight else None,
        None,
        dbias if need_bias else None,
    )


def _vendor_fake(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``rest``: ignore_index, label_smoothing, and the two arguments of the z-loss."""
    op = "npu_cross_entropy_loss"
    _check_reduction(op, reduction)
    if any(rest[2:]):
        raise RuntimeError(f"{op}: the z-loss is not supported")
    if input.dim() != 2 or target.shape != input.shape[:1]:
        raise RuntimeError(
            f"{op}: input {list(input.shape)} does not go with target {list(target.shape)}"
        )
    return (
        input.new_empty((input.shape[0] if reduction == "none" else 1,)),
        input.new_empty(input.shape),
        input.new_empty((0,)),
        input.new_empty((0,)),
    )


def _vendor_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, target, ctx.weight, *options = inputs
    ctx.options = options[:3]  # reduction, ignore_index, label_smoothing
    _, log_prob, zloss, lse = output
    ctx.save_for_backward(target, log_prob)
    ctx.mark_non_differentiable(zloss, lse)
    ctx.set_materialize_grads(False)


def _vendor_backward(
    ctx: Any, grad: Tensor | None, grad_log_prob: Tensor | None, *_: Any
) -> Tensor | None:
    target, log_prob = ctx.saved_tensors
    if not ctx.needs_input_grad[0]:
        return None
    dinput = None
    if grad is not None:
        dinput = npu_cross_entropy_loss_backward(
            grad, log_prob, target, ctx.weight, None, None, *ctx.options
        )
    # The vendor's formula drops this gradient without a word.
    if grad_log_prob is not None:
        wide = grad_log_prob.to(compute_dtype(log_prob.dtype))
        through = wide - log_prob.to(wide.dtype).exp() * wide.sum(-1, keepdim=True)
        dinput = through if dinput is None else through + dinput
        dinput = dinput.to(log_prob.dtype)
    return dinput


register_fake("linear_cross_entropy", _fake)
register_fake("npu_cross_entropy_loss", _vendor_fake)
register_autograd("linear_cross_entropy", _backward, _setup)
register_autograd("npu_cross_entropy_loss", _vendor_backward, _vendor_setup)
gradient("linear_cross_entropy_backward", _backward_fake)
npu_cross_entropy_loss_backward = gradient(
    "npu_cross_entropy_loss_backward",
    lambda grad_loss, log_prob, *_: log_prob.new_empty(log_prob.shape, dtype=grad_loss.dtype),
    "Gradient of :func:`npu_cross_entropy_loss` for its input: shape of log_prob, dtype of grad_loss.",
)
register_autocast("linear_cross_entropy")
