"""``moe_ffn``: the experts of a mixture in one operator. See docs/ops/moe_ffn.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    gradient,
    register_autocast,
    register_autograd,
    register_fake,
)
from jumar.ops.grouped_matmul import by_columns

_Weights = Tensor | Sequence[Tensor]


def moe_ffn(
    hidden: Tensor,
    ids: Tensor,
    probs: Tensor | None,
    gate_up: _Weights,
    down: _Weights,
    up: _Weights | None = None,
) -> Tensor:
    """``y[t] = sum_k probs[t, k] * (silu(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e]`` with ``e = ids[t, k]``.

    Args:
        hidden: [T, H], fp32, bf16, fp16 or fp64, any strides.
        ids: [T, K] int64 or int32, experts in [0, E); E itself is no expert: the slot contributes nothing.
        probs: [T, K], any floating dtype; None: every slot weighs 1.
        gate_up: [E, H, 2 * I], gate first, or E matrices; any strides, so that a parameter [E, 2 * I, H] goes in as
            ``transpose(1, 2)``. With ``up`` it is gate alone, [E, H, I].
        down: [E, I, H], or E matrices.
        up: [E, H, I], or E matrices.

    Returns:
        [T, H] of hidden's dtype. Differentiable in hidden, probs and all weights, whose gradients lie in memory as they do.
        For the backward only gate's and up's results are kept, in hidden's dtype; nothing without gradients.

    Raises:
        RuntimeError: sizes or dtypes do not fit, or an id is out of range.
    """
    if probs is None:
        probs = hidden.new_ones(ids.shape)
    gate_ups, downs, ups = (_list(w) for w in (gate_up, down, up))
    save = torch.is_grad_enabled() and any(
        t.requires_grad for t in (hidden, probs, *gate_ups, *downs, *ups)
    )
    return torch.ops.jumar.moe_ffn(hidden, ids, probs, gate_ups, downs, ups, save)[0]


def _list(weights: _Weights | None) -> list[Tensor]:
    if weights is None:
        return []
    return [weights] if isinstance(weights, Tensor) else list(weights)


def _fake(
    hidden: Tensor,
    ids: Tensor,
    probs: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    up: list[Tensor],
    save: bool,
) -> tuple[Tensor, Tensor]:
    if (
        hidden.dim() != 2
        or ids.dim() != 2
        or ids.shape != probs.shape
        or ids.shape[0] != hidden.shape[0]
    ):
        raise RuntimeError(
            f"moe_ffn: hidden {list(hidden.shape)}, ids {list(ids.shape)} and probs {list(probs.shape)} do not go together"
        )
    inner = down[0].shape[-2]
    return hidden.new_empty(hidden.shape), hidden.new_empty((ids.numel() if save else 0, 2 * inner))


def _empty_like(tensor: Tensor, needed: bool) -> Tensor:
    if not needed:
        return tensor.new_empty((0,))
    return (
        tensor.new_empty(tensor.mT.shape).mT
        if by_columns(tensor)
        else tensor.new_empty(tensor.shape)
    )


def _backward_fake(
    grad: Tensor, hidden: Tensor, ids: Tensor, probs: Tensor, gate_up: list[Tensor], down: list[Tensor],
    up: list[Tensor], saved: Tensor, need_hidden: bool, need_probs: bool, need_gate_up: bool, need_down: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    return (
        hidden.new_empty(hidden.shape if need_hidden else (0,)),
        probs.new_empty(probs.shape if need_probs else (0,)),
        [_empty_like(t, need_gate_up) for t in gate_up],
        [_empty_like(t, need_down) for t in down],
        [_empty_like(t, need_gate_up) for t in up],
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, ids, probs, gate_up, down, up, ctx.save = inputs
    ctx.counts = len(gate_up), len(down), len(up)
    ctx.save_for_backward(hidden, ids, probs, output[1], *gate_up, *down, *up)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Any, ...]:
    gates, downs, ups = ctx.counts
    if not ctx.save:
        raise RuntimeError("moe_ffn: called with save=False, which keeps nothing for the backward")
    hidden, ids, probs, saved, *weights = ctx.saved_tensors
    gate_up, down, up = weights[:gates], weights[gates : gates + downs], weights[gates + downs :]
    need_hidden, _, need_probs, need_gate, need_down, need_up, _ = ctx.needs_input_grad
    need_inner, need_outer = any(need_gate) or any(need_up), any(need_down)
    wanted = (need_hidden, need_probs, need_inner, need_outer)
    dhidden, dprobs, dgate_up, ddown, dup = torch.ops.jumar.moe_ffn_backward(
        grad, hidden, ids, probs, gate_up, down, up, saved, *wanted
    )
    return (
        dhidden if need_hidden else None,
        None,
        dprobs if need_probs else None,
        dgate_up if need_inner else [None] * gates,
        ddown if need_outer else [None] * downs,
        dup if need_inner else [None] * ups,
    )


register_fake("moe_ffn", _fake)
gradient("moe_ffn_backward", _backward_fake)
register_autograd("moe_ffn", _backward, _setup)
register_autocast("moe_ffn", keep=(2,))
