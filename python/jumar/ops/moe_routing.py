"""Routing of whole layers: rows by expert and back, with quantisation left out. See docs/ops/npu_moe_init_routing.md."""

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
def npu_moe_init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of ``x`` grouped by expert, for row numbers that go column by column.

    Args:
        x: [n, H], fp32, bf16, fp16 or fp64, any strides.
        row_idx: [n, K] int32 or int64, ``row_idx[t, k] = k * n + t``, as ``npu_moe_gating_top_k_softmax`` gives it.
        expert_idx: [n, K] int32 or int64 expert ids >= 0.
        active_num: rows of so many tokens are kept: min(active_num, n) K.

    Returns:
        (expanded_x, expanded_row_idx [n K], expanded_expert_idx [n K]), the latter two int32: row of each element of
        row_idx, and the sorted ids. Differentiable in x.
    """


@calls_operator
def npu_moe_init_routing_v2(
    x: Tensor, expert_idx: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of ``x`` grouped by expert, of the experts in a range.

    Args:
        x: [n, H], fp32, bf16, fp16 or fp64, any strides.
        expert_idx: [n, K] int32 or int64 expert ids >= 0.
        options: scale ([n], moved with the rows, no gradient), active_num, expert_capacity, expert_num, drop_pad_mode,
            expert_tokens_num_type, expert_tokens_num_flag, active_expert_range, row_idx_type; offset, quant_mode and
            x_dtype must keep their defaults.

    Returns:
        (expanded_x, expanded_row_idx, counts, expanded_scale), see the page. Differentiable in x.
    """


@calls_operator
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """``skip1 + skip2 + sum_k scales * (rows + bias)`` of each token.

    Args:
        expanded_permuted_rows: [.., H], fp32, bf16, fp16 or fp64.
        skip1, skip2: [n, H] of that dtype, or None.
        bias: [E, H] of that dtype, or None; with it export_for_source_row, the [n, K] expert ids.
        scales: [n, K] of any floating dtype, or None for ones and K = k.
        expanded_src_to_dst_row: [n K], row of slot ``k * n + t`` (drop_pad_mode 0, 1) or ``t * K + k`` (2, 3); -1: none.

    Returns:
        [n, H] of the rows' dtype, summed in fp32 (fp64) and rounded once. Differentiable in all floating arguments.
    """


@calls_operator
def npu_moe_re_routing(
    tokens: Tensor, expert_token_num_per_rank: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows from every rank, in blocks by (rank, expert), to blocks by (expert, rank).

    Args:
        tokens: [A, H], fp32, bf16, fp16 or fp64, any strides.
        expert_token_num_per_rank: [N, E] int32 or int64 block sizes that add up to A.
        options: per_token_scales ([A], moved with the rows, no gradient); expert_token_num_type, idx_type and
            tokens_dtype must keep their defaults.

    Returns:
        (permute_tokens [A, H], permute_per_token_scales, permute_token_idx [A] int32, expert_token_num [E]).
        Differentiable in tokens.
    """


def _init_fake(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> Any:
    rows = torch.sym_min(active_num, x.shape[0]) * expert_idx.shape[1]
    index, experts = (x.new_empty((expert_idx.numel(),), dtype=torch.int32) for _ in range(2))
    return x.new_empty((rows, x.shape[1])), index, experts


def _init_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.tokens = inputs[0].shape[0]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(*output[1:])


def _init_backward(ctx: Any, grad: Tensor, *_: Any) -> Tensor:
    (index,) = ctx.saved_tensors
    return torch.ops.jumar.moe_init_routing_grad(grad, index, ctx.tokens, True, 0)


def _init_v2_fake(
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    active_num: int,
    capacity: int,
    experts: int,
    drop_pad_mode: int,
    counts_type: int,
    counts_flag: bool,
    quant_mode: int,
    active_range: list[int],
    row_idx_type: int,
    x_dtype: int | None,
) -> Any:
    slots, width = expert_idx.numel(), x.shape[1]
    start, end = active_range or (0, experts)
    if drop_pad_mode == 1:
        rows = experts * capacity
        expanded = x.new_empty((experts, capacity, width))
    else:
        rows = slots if active_num <= 0 else torch.sym_min(active_num, slots)
        expanded = x.new_empty((rows, width))
    counts = (experts, 2) if counts_type == 2 else (end - start,)
    moved = x.new_empty((0,), dtype=torch.float32) if scale is None else scale.new_empty((rows,))
    index = x.new_empty((slots,), dtype=torch.int32)
    return expanded, index, x.new_empty(counts, dtype=torch.int64), moved


def _init_v2_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.tokens, ctx.row_idx_type = inputs[0].shape[0], inputs[-2]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(*output[1:])


def _init_v2_backward(ctx: Any, grad: Tensor, *_: Any) -> Tensor:
    (index,) = ctx.saved_tensors
    return torch.ops.jumar.moe_init_routing_grad(grad, index, ctx.tokens, False, ctx.row_idx_type)


def _init_grad_fake(grad: Tensor, index: Tensor, tokens: int, *_: Any) -> Tensor:
    return grad.new_empty((tokens, grad.shape[-1]))


def _no_gradient(op: str, name: str, value: Tensor | None) -> None:
    if value is not None and value.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{op}: {name} has no gradient, but requires one")


def _init_v2(x: Tensor, expert_idx: Tensor, scale: Tensor | None, *options: Any) -> Any:
    _no_gradient("npu_moe_init_routing_v2", "scale", scale)
    return torch.ops.jumar.moe_init_routing_v2(x, expert_idx, scale, *options)


def _finalize_fake(
    rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    row_idx: Tensor,
    experts: Tensor | None,
    drop_pad_mode: int | None,
    k: int | None,
) -> Tensor:
    top_k = scales.shape[1] if scales is not None else 1 if k is None else k
    return rows.new_empty((row_idx.shape[0] // top_k, rows.shape[-1]))


def _finalize_grad_fake(
    grad: Tensor, rows: Tensor, bias: Tensor | None, scales: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dscales = None if scales is None else scales.new_empty(scales.shape)
    dbias = None if bias is None else bias.new_empty(bias.shape)
    return rows.new_empty(rows.shape), dscales, dbias


def _finalize_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, _, _, bias, scales, row_idx, experts, mode, k = inputs
    ctx.options = (0 if mode is None else mode, 1 if k is None else k)
    ctx.save_for_backward(rows, bias, scales, row_idx, experts)


def _finalize_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, bias, scales, row_idx, experts = ctx.saved_tensors
    drows, dscales, dbias = torch.ops.jumar.moe_finalize_routing_grad(
        grad, rows, bias, scales, row_idx, experts, *ctx.options
    )
    skips = (grad if needed else None for needed in ctx.needs_input_grad[1:3])
    return drows, *skips, dbias, dscales


def _re_fake(tokens: Tensor, counts: Tensor, scales: Tensor | None, *_: Any) -> Any:
    rows = tokens.shape[0]
    moved = (
        tokens.new_empty((0,), dtype=torch.float32) if scales is None else scales.new_empty((rows,))
    )
    index = tokens.new_empty((rows,), dtype=torch.int32)
    return tokens.new_empty(tokens.shape), moved, index, counts.new_empty((counts.shape[1],))


def _re_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[2])
    ctx.mark_non_differentiable(*output[1:])


def _re_backward(ctx: Any, grad: Tensor, *_: Any) -> Tensor:
    return torch.ops.jumar.moe_re_routing_grad(grad, *ctx.saved_tensors)


def _re_routing(tokens: Tensor, counts: Tensor, scales: Tensor | None, *options: Any) -> Any:
    _no_gradient("npu_moe_re_routing", "per_token_scales", scales)
    return torch.ops.jumar.moe_re_routing(tokens, counts, scales, *options)


for _name, _fake in {
    "npu_moe_init_routing": _init_fake,
    "moe_init_routing_v2": _init_v2_fake,
    "npu_moe_finalize_routing": _finalize_fake,
    "moe_re_routing": _re_fake,
}.items():
    register_fake(_name, _fake, shown=f"npu_{_name.removeprefix('npu_')}")
register_autograd("npu_moe_init_routing", _init_backward, _init_setup)
register_autograd("moe_init_routing_v2", _init_v2_backward, _init_v2_setup)
register_autograd("npu_moe_finalize_routing", _finalize_backward, _finalize_setup)
register_autograd("moe_re_routing", _re_backward, _re_setup)
gradient("moe_init_routing_grad", _init_grad_fake)
gradient("moe_finalize_routing_grad", _finalize_grad_fake)
gradient("moe_re_routing_grad", lambda grad, index: grad.new_empty(grad.shape))

define_by_position(
    "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
    "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
    "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=-1, "
    "int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _init_v2,
)
define_by_position(
    "npu_moe_re_routing(Tensor tokens, Tensor expert_token_num_per_rank, *, Tensor? per_token_scales=None, "
    "int expert_token_num_type=1, int idx_type=0, int? tokens_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _re_routing,
)
