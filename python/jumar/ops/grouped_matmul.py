"""Grouped matrix products: ``grouped_matmul`` and its parts. See docs/ops/grouped_matmul.md.

The vendor's ``npu_grouped_matmul`` and ``npu_grouped_matmul_add`` are in :mod:`jumar.ops.npu_grouped_matmul`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    compute_dtype,
    gradient,
    register_autocast,
    register_autograd,
    register_fake,
    register_in_place,
)


def grouped_matmul(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    group_list: Tensor,
    bias: Tensor | Sequence[Tensor] | None = None,
    group_list_type: int = 0,
) -> Tensor:
    """``y[t] = x[t] @ weight[g] (+ bias[g])`` for the rows ``t`` of each group ``g``.

    Args:
        x: [M, K], fp32, bf16, fp16 or fp64, any strides; the rows of a group lie together.
        weight: [E, K, N] of x's dtype, any strides (a model's [E, N, K] goes in as ``weight.transpose(1, 2)``, without a
            copy), or E matrices [K, N].
        group_list: int64 or int32: the groups' ends (``group_list_type`` 0), their sizes (1), or pairs of a group's index
            and its size (2, [E, 2]).
        bias: [E, N] or E vectors, of x's dtype or fp32.

    Returns:
        [M, N] of x's dtype. Rows of no group are zero and are not read. Differentiable in x, weight and bias; gradients of
        weights lie in memory as the weights do.

    Raises:
        RuntimeError: sizes, dtypes or the group list do not fit.
    """
    if isinstance(weight, Tensor):
        return torch.ops.jumar.grouped_matmul(x, weight, group_list, bias, group_list_type)
    biases = [] if bias is None else list(bias)
    return torch.ops.jumar.grouped_matmul_list(x, list(weight), group_list, biases, group_list_type)


def by_columns(weight: Tensor) -> bool:
    """Whether a matrix, or a stack of them, lies in memory column by column."""
    return weight.stride(-2) == 1 and weight.stride(-1) != 1


# ---- stacked weights


def _fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        raise RuntimeError(
            f"grouped_matmul: x {list(x.shape)} does not go with weight {list(weight.shape)}"
        )
    return x.new_empty((x.shape[0], weight.shape[2]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, group_list, _, ctx.type = inputs
    ctx.by_columns = by_columns(weight)
    # Each gradient needs the other operand only.
    ctx.save_for_backward(
        x if ctx.needs_input_grad[1] else None,
        weight if ctx.needs_input_grad[0] else None,
        group_list,
    )


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, group_list = ctx.saved_tensors
    need_x, need_weight, _, need_bias = (*ctx.needs_input_grad, False, False)[:4]
    ops = torch.ops.jumar
    return (
        ops.grouped_matmul_dgrad(grad, weight, group_list, ctx.type) if need_x else None,
        ops.grouped_matmul_wgrad(x, grad, group_list, ctx.type, ctx.by_columns)
        if need_weight
        else None,
        None,
        ops.grouped_matmul_bias_grad(grad, group_list, ctx.type) if need_bias else None,
    )


def _dgrad_fake(grad_output: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return grad_output.new_empty((grad_output.shape[0], weight.shape[1]))


def _dgrad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad_output, weight, group_list, ctx.type = inputs
    ctx.by_columns = by_columns(weight)
    ctx.save_for_backward(grad_output, weight, group_list)


def _dgrad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_output, weight, group_list = ctx.saved_tensors
    need_grad, need_weight = ctx.needs_input_grad[:2]
    ops = torch.ops.jumar
    dw = None
    if need_weight:
        dw = ops.grouped_matmul_wgrad(grad, grad_output, group_list, ctx.type, ctx.by_columns)
    dy = ops.grouped_matmul(grad, weight, group_list, None, ctx.type) if need_grad else None
    return dy, dw


def _wgrad_fake(
    x: Tensor, grad_output: Tensor, group_list: Tensor, group_list_type: int, transposed: bool
) -> Tensor:
    groups, k, n = group_list.shape[0], x.shape[1], grad_output.shape[1]
    return (
        x.new_empty((groups, n, k)).transpose(1, 2) if transposed else x.new_empty((groups, k, n))
    )


def _wgrad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, grad_output, group_list, ctx.type, _ = inputs
    ctx.save_for_backward(x, grad_output, group_list)


def _wgrad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, grad_output, group_list = ctx.saved_tensors
    need_x, need_grad = ctx.needs_input_grad[:2]
    ops = torch.ops.jumar
    return (
        ops.grouped_matmul_dgrad(grad_output, grad, group_list, ctx.type) if need_x else None,
        ops.grouped_matmul(x, grad, group_list, None, ctx.type) if need_grad else None,
    )


def _bias_grad_fake(grad_output: Tensor, group_list: Tensor, *_: Any) -> Tensor:
    return grad_output.new_empty(
        (group_list.shape[0], grad_output.shape[1]), dtype=compute_dtype(grad_output.dtype)
    )


# ---- a list of weights


def _list_fake(x: Tensor, weight: list[Tensor], *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight[0].shape[1]))


def _list_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, group_list, bias, ctx.type = inputs
    ctx.by_columns, ctx.biases = all(map(by_columns, weight)), len(bias)
    ctx.save_for_backward(
        x if any(w.requires_grad for w in weight) else None,
        group_list,
        *(weight if x.requires_grad else ()),
    )
    ctx.weights = len(weight)


def _list_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, group_list, *weight = ctx.saved_tensors
    need_x, need_weight, _, need_bias = ctx.needs_input_grad[:4]
    ops = torch.ops.jumar
    dw: list[Tensor | None] = [None] * ctx.weights
    if any(need_weight):
        dw = ops.grouped_matmul_list_wgrad(x, grad, group_list, ctx.type, ctx.by_columns)
    db: list[Tensor | None] = [None] * ctx.biases
    if ctx.biases and any(need_bias):
        db = list(ops.grouped_matmul_bias_grad(grad, group_list, ctx.type))
    dx = ops.grouped_matmul_list_dgrad(grad, weight, group_list, ctx.type) if need_x else None
    return dx, dw, None, db


def _list_dgrad_fake(grad_output: Tensor, weight: list[Tensor], *_: Any) -> Tensor:
    return grad_output.new_empty((grad_output.shape[0], weight[0].shape[0]))


def _list_wgrad_fake(
    x: Tensor, grad_output: Tensor, group_list: Tensor, group_list_type: int, transposed: bool
) -> list[Tensor]:
    k, n = x.shape[1], grad_output.shape[1]
    return [
        x.new_empty((n, k)).mT if transposed else x.new_empty((k, n))
        for _ in range(group_list.shape[0])
    ]


# ---- heads of an attention


def _head_fake(x: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        raise RuntimeError(
            f"head_matmul: x {list(x.shape)} does not go with weight {list(weight.shape)}"
        )
    return x.new_empty((x.shape[0], weight.shape[2]))


def _head_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, rows = inputs
    ctx.by_columns = by_columns(weight)
    ctx.save_for_backward(
        x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None, rows
    )


def _head_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, rows = ctx.saved_tensors
    need_x, need_weight = ctx.needs_input_grad[:2]
    ops = torch.ops.jumar
    return (
        ops.head_matmul_dgrad(grad, weight, rows) if need_x else None,
        ops.head_matmul_wgrad(x, grad, rows, ctx.by_columns) if need_weight else None,
    )


def _head_wgrad_fake(x: Tensor, grad_output: Tensor, rows: Tensor, transposed: bool) -> Tensor:
    return _wgrad_fake(x, grad_output, rows, 1, transposed)


# ---- products that share nothing


def _separate_fake(x: list[Tensor], weight: list[Tensor], bias: list[Tensor]) -> list[Tensor]:
    return [a.new_empty((a.shape[0], b.shape[1])) for a, b in zip(x, weight, strict=True)]


def _separate_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, bias = inputs
    ctx.count, ctx.biases = len(x), len(bias)
    ctx.save_for_backward(*x, *weight)


def _separate_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    need_x, need_weight, need_bias = ctx.needs_input_grad
    product = torch.ops.jumar.separate_matmul
    none: list[Tensor | None] = [None] * ctx.count
    dx = product(grads, [w.mT for w in weight], []) if any(need_x) else none
    dw = none
    if any(need_weight):
        # Where a weight lies column by column, so does its gradient.
        turned = [by_columns(w) for w in weight]
        pairs = [(g.mT, a) if t else (a.mT, g) for a, g, t in zip(x, grads, turned, strict=True)]
        dw = product([a for a, _ in pairs], [b for _, b in pairs], [])
        dw = [d.mT if t else d for d, t in zip(dw, turned, strict=True)]
    db = [None] * ctx.biases
    if ctx.biases and any(need_bias):
        db = [torch.ops.jumar.linear_bias_grad(g) for g in grads]
    return dx, dw, db


register_fake("grouped_matmul", _fake)
register_fake("grouped_matmul_dgrad", _dgrad_fake)
register_fake("grouped_matmul_wgrad", _wgrad_fake)
gradient("grouped_matmul_bias_grad", _bias_grad_fake)
register_fake("grouped_matmul_list", _list_fake, shown="grouped_matmul")
gradient("grouped_matmul_list_dgrad", _list_dgrad_fake, shown="grouped_matmul_dgrad")
gradient("grouped_matmul_list_wgrad", _list_wgrad_fake, shown="grouped_matmul_wgrad")
register_fake("separate_matmul", _separate_fake)
register_autograd("grouped_matmul", _backward, _setup)
register_autograd("grouped_matmul_dgrad", _dgrad_backward, _dgrad_setup)
register_autograd("grouped_matmul_wgrad", _wgrad_backward, _wgrad_setup)
register_autograd("grouped_matmul_list", _list_backward, _list_setup)
register_autograd("separate_matmul", _separate_backward, _separate_setup)
register_fake("head_matmul", _head_fake)
register_autograd("head_matmul", _head_backward, _head_setup)
gradient("head_matmul_dgrad", _dgrad_fake)
gradient("head_matmul_wgrad", _head_wgrad_fake)
for _name in ("grouped_matmul", "grouped_matmul_list", "head_matmul", "separate_matmul"):
    register_autocast(_name)
register_in_place("grouped_matmul_add_", (0,), shown="npu_grouped_matmul_add")
