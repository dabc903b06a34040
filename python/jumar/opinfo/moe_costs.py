"""Costs of what mixtures of experts are made of: rows to experts and back, grouped products."""

from __future__ import annotations

from typing import Any

from jumar.opinfo.cost_types import Arg, Cost, Formula, recorded


def _grouped(x: Arg, weight: Arg | list[Arg], groups: Arg, bias: Any = None, *_: Any) -> Cost:
    """As if every row belonged to a group. ``weight``: [E, K, N], or a list of [K, N], as ``bias``."""
    weights = weight if isinstance(weight, list) else [weight]
    biases = bias if isinstance(bias, list) else [bias] if bias else []
    k, n = weights[0].shape[-2:]
    moved = sum(t.bytes for t in (x, groups, *weights, *biases)) + x.shape[0] * n * x.item
    return Cost(moved, 2.0 * x.shape[0] * k * n, x.dtype)


def _grouped_dgrad(dy: Arg, weight: Arg | list[Arg], groups: Arg, *_: Any) -> Cost:
    weights = weight if isinstance(weight, list) else [weight]
    k, n = weights[0].shape[-2:]
    moved = sum(t.bytes for t in (dy, groups, *weights)) + dy.shape[0] * k * dy.item
    return Cost(moved, 2.0 * dy.shape[0] * k * n, dy.dtype)


def _grouped_wgrad(x: Arg, dy: Arg, groups: Arg, *_: Any) -> Cost:
    k, n = x.shape[1], dy.shape[1]
    moved = x.bytes + dy.bytes + groups.bytes + groups.shape[0] * k * n * x.item
    return Cost(moved, 2.0 * x.shape[0] * k * n, x.dtype)


def _grouped_add(sums: Arg, x: Arg, dy: Arg, groups: Arg, *_: Any) -> Cost:
    moved = x.bytes + dy.bytes + groups.bytes + 2 * sums.dense
    return Cost(moved, 2.0 * x.shape[0] * x.shape[1] * dy.shape[1], x.dtype)


def _grouped_bias_grad(dy: Arg, groups: Arg, *_: Any) -> Cost:
    return Cost(dy.bytes + groups.bytes + groups.shape[0] * dy.shape[1] * max(4, dy.item))


def _separate(x: list[Arg], weight: list[Arg], bias: list[Arg], *_: Any) -> Cost:
    recorded(x)
    moved = sum(t.bytes for t in (*x, *weight, *bias))
    moved += sum(a.shape[0] * w.shape[1] * a.item for a, w in zip(x, weight, strict=True))
    flops = sum(2.0 * a.numel * w.shape[1] for a, w in zip(x, weight, strict=True))
    return Cost(moved, flops, x[0].dtype)


def _experts(
    x: Arg, ids: Arg, probs: Arg, gate_up: list[Arg], down: list[Arg], up: list[Arg], *_: Any
) -> Cost:
    """As if every slot had an expert. ``down``: one [E, I, H], or a list of [I, H]."""
    recorded(down)
    inner, width = down[0].shape[-2:]
    moved = sum(t.bytes for t in (x, ids, probs, *gate_up, *down, *up)) + x.dense
    return Cost(moved, 6.0 * ids.numel * inner * width, x.dtype)


def _experts_backward(
    dy: Arg,
    x: Arg,
    ids: Arg,
    probs: Arg,
    gate_up: list[Arg],
    down: list[Arg],
    up: list[Arg],
    saved: Arg,
    *needs: Any,
) -> Cost:
    """Five products; down's (transposed) is needed for all but its own gradient."""
    forward = _experts(x, ids, probs, gate_up, down, up)
    need_x, need_probs, need_inner, need_outer = needs
    moved = forward.bytes - x.dense + dy.bytes + saved.bytes
    moved += x.dense * need_x + probs.dense * need_probs + sum(t.dense for t in down) * need_outer
    moved += sum(t.dense for t in (*gate_up, *up)) * need_inner
    products = (need_x or need_probs or need_inner) + 2 * need_x + 2 * need_inner + need_outer
    return Cost(moved, forward.flops / 3 * products, x.dtype)


def _given(*arguments: Arg | None) -> float:
    """Bytes of arguments of which some may be left out."""
    return sum(a.bytes for a in arguments if a is not None)


def _slots(rows: float, x: Arg, *read: Arg | None) -> Cost:
    """``read`` once, and ``rows`` rows of x's width written."""
    return Cost(_given(*read) + rows * x.shape[-1] * x.item)


def _moe_permute(x: Arg, indices: Arg, rows: int | None = None, *_: Any) -> Cost:
    kept = indices.numel
    if rows:
        kept = min(rows, kept) if rows > 0 else kept + rows
    return _slots(kept, x, x, indices) + Cost(4 * indices.numel)


def _moe_unpermute(rows: Arg, indices: Arg, probs: Arg | None = None, *_: Any) -> Cost:
    tokens = indices.numel if probs is None else probs.shape[0]
    return _slots(tokens, rows, rows, indices, probs)


def _moe_unpermute_grad(
    rows: Arg, grad: Arg, indices: Arg, probs: Arg | None = None, *_: Any
) -> Cost:
    weights = 0 if probs is None else probs.dense + rows.bytes
    return _slots(rows.shape[0], rows, grad, indices, probs) + Cost(weights)


def _moe_unpermute_grad_v2(
    grad: Arg, indices: Arg, rows: int, dtype: Any, probs: Arg | None = None, *rest: Any
) -> Cost:
    weights = 0 if probs is None else probs.dense + rest[-1].bytes
    return _slots(rows, grad, grad, indices, probs) + Cost(weights)


def _moe_permute_map(
    x: Arg, routing_map: Arg, probs: Arg | None, n: int | None, drop: bool
) -> Cost:
    groups = routing_map.shape[1 if drop else 0]
    rows = (x.shape[0] if n is None else n) // max(1, groups) * groups
    return _slots(rows, x, x, routing_map) + Cost(rows * (4 + 2 * (probs.item if probs else 0)))


def _moe_permute_map_grad(
    grad: Arg, probs: Arg | None, indices: Arg, routing_map: Arg, experts: int, tokens: int, *_: Any
) -> Cost:
    cells = tokens * experts * probs.item if probs else 0
    return _slots(tokens, grad, grad, probs, indices, routing_map) + Cost(cells)


def _moe_unpermute_map(
    rows: Arg, indices: Arg, shape: list[int], probs: Arg | None, *rest: Any
) -> Cost:
    return _slots(shape[0], rows, rows, indices, probs, rest[0]) + Cost(8 * indices.numel)


def _moe_unpermute_map_grad(
    grad: Arg,
    index: Arg,
    ids: Arg,
    routing_map: Arg | None,
    rows: Arg | None,
    probs: Arg | None,
    *_: Any,
) -> Cost:
    read = (grad, index, ids, routing_map, probs, rows if probs else None)
    return _slots(index.numel, grad, *read) + Cost(probs.numel * grad.item if probs else 0)


def _moe_init(x: Arg, row_idx: Arg, ids: Arg, active: int) -> Cost:
    return _slots(min(active, x.shape[0]) * ids.shape[1], x, x, row_idx, ids) + Cost(8 * ids.numel)


def _moe_init_v2(x: Arg, ids: Arg, *_: Any) -> Cost:
    return _slots(ids.numel, x, x, ids) + Cost(4 * ids.numel)


def _moe_init_grad(grad: Arg, index: Arg, tokens: int, *_: Any) -> Cost:
    return _slots(tokens, grad, grad, index)


def _moe_finalize(
    rows: Arg,
    skip1: Arg | None,
    skip2: Arg | None,
    bias: Arg | None,
    scales: Arg | None,
    index: Arg,
    ids: Arg | None,
    *rest: Any,
) -> Cost:
    tokens = scales.shape[0] if scales else index.numel // ((rest[1] if len(rest) > 1 else 1) or 1)
    return _slots(tokens, rows, rows, skip1, skip2, bias, scales, index, ids)


def _moe_finalize_grad(
    grad: Arg, rows: Arg, bias: Arg | None, scales: Arg | None, index: Arg, ids: Arg | None, *_: Any
) -> Cost:
    read = (grad, index, ids) if scales is None else (grad, rows, bias, scales, index, ids)
    return Cost(
        _given(*read) + rows.dense + (bias.dense if bias else 0) + (scales.dense if scales else 0)
    )


def _moe_re_routing(x: Arg, counts: Arg, scales: Arg | None, *_: Any) -> Cost:
    return Cost(
        x.bytes + x.dense + counts.bytes + 4 * x.shape[0] + (2 * scales.bytes if scales else 0)
    )


MOE_COSTS: dict[str, Formula] = {
    "grouped_matmul": _grouped,
    "grouped_matmul_dgrad": _grouped_dgrad,
    "grouped_matmul_wgrad": _grouped_wgrad,
    "grouped_matmul_bias_grad": _grouped_bias_grad,
    "grouped_matmul_list": _grouped,
    "grouped_matmul_list_dgrad": _grouped_dgrad,
    "grouped_matmul_list_wgrad": _grouped_wgrad,
    "grouped_matmul_add_": _grouped_add,
    "head_matmul": _grouped,
    "head_matmul_dgrad": _grouped_dgrad,
    "head_matmul_wgrad": _grouped_wgrad,
    "separate_matmul": _separate,
    "npu_moe_token_permute": _moe_permute,
    "npu_moe_token_permute_grad": lambda x, grad, ids, index, *_: _slots(
        x.shape[0], x, grad, index
    ),
    "npu_moe_token_permute_grad_v2": _moe_init_grad,
    "npu_moe_token_unpermute": _moe_unpermute,
    "_npu_moe_token_unpermute": _moe_unpermute,
    "npu_moe_token_unpermute_grad": _moe_unpermute_grad,
    "npu_moe_token_unpermute_grad_v2": _moe_unpermute_grad_v2,
    "moe_permute_map": _moe_permute_map,
    "npu_moe_token_permute_with_routing_map_grad": _moe_permute_map_grad,
    "moe_unpermute_map": _moe_unpermute_map,
    "npu_moe_token_unpermute_with_routing_map_grad": _moe_unpermute_map_grad,
    "npu_moe_init_routing": _moe_init,
    "moe_init_routing_v2": _moe_init_v2,
    "moe_init_routing_grad": _moe_init_grad,
    "npu_moe_finalize_routing": _moe_finalize,
    "moe_finalize_routing_grad": _moe_finalize_grad,
    "moe_re_routing": _moe_re_routing,
    "moe_re_routing_grad": lambda grad, index: Cost(grad.bytes + grad.dense + index.bytes),
    "expert_counts": lambda indices, experts: Cost(indices.bytes + 8 * experts),
    "moe_ffn": _experts,
    "moe_ffn_backward": _experts_backward,
}
