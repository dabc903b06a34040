"""The entries of attention: formulas, data, bounds, costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jumar.opinfo.cases import Source, layouts
from jumar.opinfo.cost_types import Arg, Cost, Formula
from jumar.opinfo.spec import Bound, Case, OpInfo, Shape, Target

_ROUNDING = {torch.bfloat16: 2.0**16, torch.float16: 2.0**13}


def _call(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, causal: bool = True) -> tuple:
    """[B, S, N, D], the layout of models; causal from the upper left."""
    mask = torch.zeros(1, 1, dtype=torch.bool) if causal else None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.jumar.npu_fusion_attention(
        query, key, value, query.shape[2], "BSND", atten_mask=mask, scale=scale, next_tockens=0
    )


def _plain(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, causal: bool = True) -> tuple[Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    group = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=group)
    return (y.transpose(1, 2),)


def _terms(
    t: dict[str, Tensor], grads: list[Tensor], scale: float | None = None, causal: bool = True,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:  # fmt: skip
    """An error of a score moves all of its row; delta comes from the rounded output."""
    q, k, v, dy = (x.transpose(1, 2) for x in (t["query"], t["key"], t["value"], grads[0]))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = scale * q @ k.mT
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    p = scores.softmax(-1)
    size = abs(scale) * q.abs() @ k.abs().mT
    size = (size.amax(-1, keepdim=True) if k.shape[-2] else size.sum(-1, keepdim=True)) * q.shape[-1] ** 0.5
    row = 4 * size + max(1, k.shape[-2]) ** 0.5 + 8
    y = (p * row) @ v.abs()
    g = dy.abs()
    dp = g @ v.abs().mT
    ds = abs(scale) * p * (dp + (g * (p @ v.abs())).sum(-1, keepdim=True))
    ds = ds * (2 * row + _ROUNDING.get(dtype, 4.0)) * max(1, q.shape[-2] * group) ** 0.5

    def fold(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, group)).sum(2).transpose(1, 2)

    return {
        "y": y.transpose(1, 2),
        "d query": (ds @ k.abs()).transpose(1, 2),
        "d key": fold(ds.mT @ q.abs()),
        "d value": fold((p * row).mT @ g) * max(1, q.shape[-2] * group) ** 0.5,
    }


def _cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """(batch, rows, heads, heads of keys, head size, value's, causal)"""
    for batch, rows, heads, kv, size, value_size, causal in (
        (1, 0, 2, 1, 8, 8, True),
        (1, 1, 1, 1, 1, 1, True),
        (2, 5, 2, 1, 7, 3, True),
        (1, 33, 4, 2, 16, 16, False),
        (2, 65, 4, 4, 33, 20, True),
        (1, 150, 6, 2, 64, 64, True),
        (1, 17, 2, 1, 192, 128, True),
    ):
        source = Source(dtype, seed + rows)
        tensors = {
            "query": source.rows(batch, rows, heads, size),
            "key": source.normal(batch, rows, kv, size),
            "value": source.normal(batch, rows, kv, value_size),
        }
        label = f"{batch} x {rows} rows, {heads}/{kv} heads of {size}, {'causal' if causal else 'full'}"
        grads = [source.normal(batch, rows, heads, value_size)]
        case = Case(label, tensors, {"scale": size**-0.5, "causal": causal}, grads)
        yield case
        if rows == 65:
            yield from layouts(case)


def _bench(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    source = Source(dtype, 1)
    s, size = shape["s"], shape["d"]
    return {
        "query": source.normal(1, s, shape["heads"], size),
        "key": source.normal(1, s, shape["kv"], size),
        "value": source.normal(1, s, shape["kv"], size),
    }


def _products(query: Arg, key: Arg, heads: int, causal: bool) -> float:
    """FLOPs of one product per head. The layout is a string, which no trace has: [B, N, S, D] or [B, S, N, D]."""
    if len(query.shape) != 4:
        raise LookupError("rows and heads of three dimensions go by the layout")
    rows = 2 if query.shape[1] == heads else 1
    visible = query.shape[rows] * key.shape[rows]
    if causal:
        visible -= min(query.shape[rows], key.shape[rows]) * (key.shape[rows] - 1) / 2
    return 2.0 * query.shape[0] * heads * query.shape[3] * visible


def _causal(mask: Arg | None, following: int | None, mode: int | None) -> bool:
    return mask is not None and (mode in (2, 3) or (not mode and following == 0))


def _forward_cost(query: Arg, key: Arg, value: Arg, heads: int, *rest: Any) -> Cost:
    causal = _causal(rest[3], rest[7], rest[12])
    moved = query.bytes + key.bytes + value.bytes + query.numel * query.item
    return Cost(moved, 2 * _products(query, key, heads, causal), query.dtype)


def _backward_cost(query: Arg, key: Arg, value: Arg, heads: int, causal: bool) -> Cost:
    tensors = 4 * query.numel * query.item + 2 * (key.bytes + value.bytes)
    return Cost(tensors, 5 * _products(query, key, heads, causal), query.dtype)


#: Part of :data:`jumar.opinfo.costs.FUSED_COSTS`.
ATTENTION_COSTS: dict[str, Formula] = {
    "npu_fusion_attention": _forward_cost,
    "npu_fusion_attention_grad": lambda q, k, v, dy, heads, *r: _backward_cost(
        q, k, v, heads, _causal(r[3], r[11], r[19])
    ),
    "fusion_attention_backward": lambda q, k, v, dy, out, most, total, heads, *r: _backward_cost(
        q, k, v, heads, _causal(r[2], r[8], r[14])
    ),
}

_BOUND = Bound(half=1.0, single=1.0, double=4.0, terms=2.0)

ENTRIES = (
    OpInfo(
        name="npu_fusion_attention",
        formula="y = softmax(mask(scale · (q · kᵀ + pse))) · v  per head",
        shapes="query [B, S, N, D], key [B, S', N', D], value [B, S', N', D'] -> [B, S, N, D'], and other layouts",
        backward=("npu_fusion_attention_grad", "fusion_attention_backward"),
        bounds=dict.fromkeys(("y", "d query", "d key", "d value"), _BOUND),
        plain=_plain,
        terms=_terms,
        cases=_cases,
        bench=_bench,
        call=_call,
        target=Target(percent=60.0, eager=1.0, bf16=(3.0, 1.0), flops=6e9),
    ),
)
