"""Tokens to the order of their experts and back. See docs/ops/npu_moe_token_permute.md."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import calls_operator, gradient, register_autograd, register_fake


@calls_operator
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows of ``tokens`` grouped by expert, once for each of a token's experts.

    Args:
        tokens: [T, H], fp32, bf16, fp16 or fp64, any strides.
        indices: [T, K] or [T], int32 or int64 expert ids >= 0.
        num_out_tokens: how many rows are kept: None or 0 all, n > 0 the first min(n, T K), n < 0 all but the last -n.
        padded_mode: must be False.

    Returns:
        (permuted_tokens [O, H], sorted_indices [T K] int32). Rows are in ascending order of expert, those of one expert
        in the order of slots ``t * K + k``. sorted_indices maps a slot to its row, also where that row was dropped.
        Differentiable in tokens.

    Raises:
        RuntimeError: shapes or dtypes do not fit, an id is negative, or more rows are to be dropped than there are.
    """


@calls_operator
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """Each token as the sum of its rows, weighted by ``probs``.

    Args:
        permuted_tokens: [O, H], fp32, bf16, fp16 or fp64, any strides.
        sorted_indices: [T K] int32 or int64, of :func:`npu_moe_token_permute`. Slots whose row is O or more add nothing.
        probs: [T, K] of any floating dtype. Without it every slot is a result row of its own.
        padded_mode: must be False.
        restore_shape: has no meaning without padding.

    Returns:
        [T, H] of permuted_tokens' dtype, summed in fp32 (fp64) and rounded once. Differentiable in permuted_tokens and
        probs.

    Raises:
        RuntimeError: shapes or dtypes do not fit, or an index is out of range.
    """


def expert_counts(indices: Tensor, num_experts: int) -> Tensor:
    """How many elements of ``indices`` name each expert: ``bincount``, [num_experts] int64.

    Args:
        indices: any shape, int32 or int64, in [0, num_experts]; ``num_experts`` stands for no expert and is not counted.

    Raises:
        RuntimeError: an index is out of range.
    """
    return torch.ops.jumar.expert_counts(indices, num_experts)


def _top_k(indices: Tensor) -> int:
    return 1 if indices.dim() == 1 else indices.shape[-1]


def _no_padding(op: str, padded_mode: bool) -> None:
    if padded_mode:
        raise RuntimeError(f"{op}: padded_mode=True is not supported")


def _permute_fake(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None, padded_mode: bool
) -> tuple[Tensor, Tensor]:
    op = "npu_moe_token_permute"
    _no_padding(op, padded_mode)
    if tokens.dim() != 2:
        raise RuntimeError(
            f"{op}: The dims of input tokens should be 2 dimensional, got {list(tokens.shape)}"
        )
    if indices.dim() not in (1, 2):
        raise RuntimeError(
            f"{op}: The dims of input indices should be 2 or 1 dimensional, got {list(indices.shape)}"
        )
    slots = indices.numel()
    if num_out_tokens is None or num_out_tokens == 0:
        rows = slots
    elif num_out_tokens > 0:
        rows = torch.sym_min(num_out_tokens, slots)
    else:
        rows = slots + num_out_tokens
    return tokens.new_empty((rows, tokens.shape[1])), tokens.new_empty((slots,), dtype=torch.int32)


def _permute_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tokens, indices, *_ = inputs
    ctx.tokens, ctx.dtype, ctx.top_k = tokens.shape[0], tokens.dtype, _top_k(indices)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _permute_backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
    (sorted_indices,) = ctx.saved_tensors
    return npu_moe_token_permute_grad_v2(grad, sorted_indices, ctx.tokens, ctx.dtype, ctx.top_k)


def _unpermute_fake(
    op: str, permuted: Tensor, indices: Tensor, probs: Tensor | None, padded_mode: bool, *_: Any
) -> Tensor:
    _no_padding(op, padded_mode)
    if permuted.dim() != 2:
        raise RuntimeError(
            f"{op}: The dims of input permuted_tokens should be 2 dimensional, got {list(permuted.shape)}"
        )
    if probs is not None and probs.dim() != 2:
        raise RuntimeError(
            f"{op}: The dims of input probs should be 2 dimensional, got {list(probs.shape)}"
        )
    tokens = indices.shape[0] if probs is None else probs.shape[0]
    return permuted.new_empty((tokens, permuted.shape[1]))


def _unpermute_grad_fake(
    permuted: Tensor, grad: Tensor, indices: Tensor, probs: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor | None]:
    dprobs = None if probs is None else probs.new_empty(probs.shape)
    return permuted.new_empty(permuted.shape), dprobs


def _unpermute_grad_v2_fake(
    grad: Tensor, indices: Tensor, rows: int, dtype: torch.dtype, probs: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor | None]:
    permuted = grad.new_empty((rows, grad.shape[1]), dtype=dtype)
    return _unpermute_grad_fake(permuted, grad, indices, probs)


def _unpermute_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keeps the permuted rows only for a gradient of probs."""
    permuted, indices, probs, *_ = inputs
    ctx.rows, ctx.dtype = permuted.shape[0], permuted.dtype
    ctx.save_for_backward(indices, probs, None if probs is None else permuted)


def _unpermute_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    indices, probs, permuted = ctx.saved_tensors
    dpermuted, dprobs = npu_moe_token_unpermute_grad_v2(
        grad, indices, ctx.rows, ctx.dtype, probs, False, None, permuted
    )
    return dpermuted, None, dprobs


for _name, _fake in {
    "npu_moe_token_permute": _permute_fake,
    "npu_moe_token_unpermute": partial(_unpermute_fake, "npu_moe_token_unpermute"),
    "_npu_moe_token_unpermute": lambda *args: (
        _unpermute_fake("_npu_moe_token_unpermute", *args),
        None,
    ),
    "expert_counts": lambda indices, num_experts: indices.new_empty(
        (num_experts,), dtype=torch.int64
    ),
}.items():
    register_fake(_name, _fake)
register_autograd("npu_moe_token_permute", _permute_backward, _permute_setup)
register_autograd("npu_moe_token_unpermute", _unpermute_backward, _unpermute_setup)
register_autograd("_npu_moe_token_unpermute", _unpermute_backward, _unpermute_setup)
npu_moe_token_permute_grad = gradient(
    "npu_moe_token_permute_grad",
    lambda tokens, *_: tokens.new_empty(tokens.shape),
    "Gradient of :func:`npu_moe_token_permute`, like tokens. Not differentiable.",
)
npu_moe_token_permute_grad_v2 = gradient(
    "npu_moe_token_permute_grad_v2",
    lambda grad, index, tokens, dtype, *_: grad.new_empty((tokens, grad.shape[1]), dtype=dtype),
    "Gradient of :func:`npu_moe_token_permute` without its inputs: [tokens_size_0, H]. Not differentiable.",
)
npu_moe_token_unpermute_grad = gradient(
    "npu_moe_token_unpermute_grad",
    _unpermute_grad_fake,
    "Gradients of :func:`npu_moe_token_unpermute` for permuted_tokens and probs. Not differentiable.",
)
npu_moe_token_unpermute_grad_v2 = gradient(
    "npu_moe_token_unpermute_grad_v2",
    _unpermute_grad_v2_fake,
    "As :func:`npu_moe_token_unpermute_grad`; permuted_tokens is needed with probs only. Not differentiable.",
)
