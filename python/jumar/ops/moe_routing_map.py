"""Tokens to the order of their experts and back by a map. See docs/ops/npu_moe_token_permute_with_routing_map.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    define_by_position,
    gradient,
    register_autograd,
    register_fake,
)


@calls_operator
def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows of ``tokens`` grouped by expert, by a map of which token goes to which expert.

    Args:
        tokens: [T, H], fp32, bf16, fp16 or fp64, any strides.
        routing_map: [T, E], bool or int8. Without ``drop_and_pad`` every row has ``num_out_tokens / T`` experts.
        probs: [T, E] of any floating dtype, or None.
        num_out_tokens: rows of the result; None means T, which is right for one expert a token only.
        drop_and_pad: each expert has ``num_out_tokens // E`` rows: its first tokens, then tokens not routed to it.

    Returns:
        (permuted_tokens [O, H], permuted_probs [O] or None, sorted_indices [O] int32). sorted_indices maps slot
        ``t * K + j``, the j-th expert of t in ascending order, to its row; with drop_and_pad a row to its token.
        Differentiable in tokens and probs.

    Raises:
        RuntimeError: shapes or dtypes do not fit, or a row of the map has another number of experts.
    """


@calls_operator
def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Tensor:
    """Each token as the sum of its rows, weighted by ``probs``.

    Args:
        permuted_tokens: [O, H], fp32, bf16, fp16 or fp64, any strides.
        sorted_indices: [O] int32 or int64, of :func:`npu_moe_token_permute_with_routing_map` in the same mode.
        restore_shape: [T, H].
        probs: [T, E] of any floating dtype, or None for weights of 1.
        routing_map: [T, E], bool or int8; needed with probs, unless ``drop_and_pad``.

    Returns:
        [T, H] of permuted_tokens' dtype, summed in fp32 (fp64) and rounded once. Differentiable in permuted_tokens and
        probs.

    Raises:
        RuntimeError: shapes or dtypes do not fit, or an index is out of range.
    """


def _permute_fake(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, n: int | None, drop_and_pad: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    n = tokens.shape[0] if n is None else n
    groups = routing_map.shape[1 if drop_and_pad else 0]
    rows = n // groups * groups if groups else 0
    moved = None if probs is None else probs.new_empty((rows,))
    index = tokens.new_empty((rows,), dtype=torch.int32)
    return tokens.new_empty((rows, tokens.shape[1])), moved, index


def _permute_grad_fake(
    grad: Tensor,
    probs_grad: Tensor | None,
    index: Tensor,
    routing_map: Tensor,
    experts: int,
    tokens: int,
    *_: Any,
) -> tuple[Tensor, Tensor | None]:
    dprobs = None if probs_grad is None else probs_grad.new_empty((tokens, experts))
    return grad.new_empty((tokens, grad.shape[1])), dprobs


def _permute_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    tokens, routing_map, _, _, ctx.drop_and_pad = inputs
    ctx.sizes = (routing_map.shape[1], tokens.shape[0])
    ctx.save_for_backward(routing_map, output[2])
    ctx.mark_non_differentiable(output[2])


def _permute_backward(ctx: Any, grad: Tensor, probs_grad: Tensor | None, _: Any) -> Any:
    routing_map, index = ctx.saved_tensors
    probs_grad = probs_grad if ctx.needs_input_grad[2] else None
    dtokens, dprobs = npu_moe_token_permute_with_routing_map_grad(
        grad, probs_grad, index, routing_map, *ctx.sizes, ctx.drop_and_pad
    )
    return dtokens, None, dprobs


def _unpermute_fake(
    permuted: Tensor, index: Tensor, shape: list[int], probs: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    rows = permuted.shape[0]
    out_index, ids = (permuted.new_empty((rows,), dtype=torch.int32) for _ in range(2))
    moved = None if probs is None else probs.new_empty((rows,))
    return permuted.new_empty(shape), out_index, ids, moved


def _unpermute_grad_fake(
    grad: Tensor,
    out_index: Tensor,
    ids: Tensor,
    routing_map: Tensor | None,
    permuted: Tensor | None,
    probs: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor | None]:
    dprobs = None if probs is None else grad.new_empty(probs.shape)
    return grad.new_empty((out_index.shape[0], grad.shape[1])), dprobs


def _unpermute_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keeps the permuted rows only for a gradient of probs."""
    permuted, _, ctx.shape, probs, routing_map, ctx.drop_and_pad = inputs
    _, out_index, ids, moved = output
    kept = None if probs is None else permuted
    ctx.save_for_backward(out_index, ids, routing_map, kept, probs)
    ctx.mark_non_differentiable(*(t for t in (out_index, ids, moved) if t is not None))


def _unpermute_backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
    out_index, ids, routing_map, permuted, probs = ctx.saved_tensors
    dpermuted, dprobs = npu_moe_token_unpermute_with_routing_map_grad(
        grad, out_index, ids, routing_map, permuted, probs, ctx.drop_and_pad, ctx.shape
    )
    return dpermuted, None, None, dprobs


register_fake(
    "moe_permute_map", _permute_fake, shown="npu_moe_token_permute_with_routing_map"
)
register_fake(
    "moe_unpermute_map", _unpermute_fake, shown="npu_moe_token_unpermute_with_routing_map"
)
register_autograd("moe_permute_map", _permute_backward, _permute_setup)
register_autograd("moe_unpermute_map", _unpermute_backward, _unpermute_setup)
npu_moe_token_permute_with_routing_map_grad = gradient(
    "npu_moe_token_permute_with_routing_map_grad",
    _permute_grad_fake,
    "Gradients of :func:`npu_moe_token_permute_with_routing_map` for tokens and probs. Not differentiable.",
)
npu_moe_token_unpermute_with_routing_map_grad = gradient(
    "npu_moe_token_unpermute_with_routing_map_grad",
    _unpermute_grad_fake,
    "Gradients of :func:`npu_moe_token_unpermute_with_routing_map`, in the gradient's dtype. Not differentiable.",
)

_UNPERMUTE = (
    "npu_moe_token_unpermute_with_routing_map(Tensor permuted_tokens, Tensor sorted_indices, int[] restore_shape, *, "
    "Tensor? probs=None, Tensor? routing_map=None, bool drop_and_pad=False) -> "
)
define_by_position(
    "npu_moe_token_permute_with_routing_map(Tensor tokens, Tensor routing_map, *, Tensor? probs=None, "
    "int? num_out_tokens=None, bool drop_and_pad=False) -> (Tensor, Tensor, Tensor)",
    torch.ops.jumar.moe_permute_map,
)
define_by_position(f"{_UNPERMUTE}Tensor", lambda *args: torch.ops.jumar.moe_unpermute_map(*args)[0])
define_by_position(
    f"_{_UNPERMUTE}(Tensor, Tensor, Tensor, Tensor)", torch.ops.jumar.moe_unpermute_map
)
