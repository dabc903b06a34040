"""The entries of attention: formulas, data, bounds, costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jumar.opinfo.cases import Source, layouts
from jumar.opinfo.cost_types import Arg, Cost, Formula
from jumar.opinfo.spec import Bound, Case, OpInfo, Shape, Target

_ROUNDING = {torch.bfloat16: 2.0**16, torch.float16: 2.0**13}


def _call(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, causal: bool = True
) -> tuple:
    """[B, S, N, D], the layout of models; causal from the upper left."""
    mask = torch.zeros(1, 1, dtype=torch.bool) if causal else None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.jumar.npu_fusion_attention(
        query, key, value, query.shape[2], "BSND", atten_mask=mask, scale=scale, next_tockens=0
    )


def _plain(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, causal: bool = True
) -> tuple[Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    group = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=group)
    return (y.transpose(1, 2),)


def _terms(
    t: dict[str, Tensor], grads: list[Tensor], scale: float | None = None, causal: bool = True,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:  # fmt: skip
    query, key = t["query"], t["key"]
    hidden = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).triu(1) if causal else None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attention_terms(query, key, t["value"], grads[0], hidden, scale, dtype)


def attention_terms(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, hidden: Tensor | None, scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:  # fmt: skip
    """An error of a score moves all of its row; delta comes from the rounded output. [B, S, N, D]; ``hidden``: a mask of
    scores [B, N, S, S']."""
    q, k, v, dy = (x.transpose(1, 2) for x in (query, key, value, dy))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = scale * q @ k.mT
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    p = scores.softmax(-1).nan_to_num(0.0)  # rows that see nothing
    size = abs(scale) * q.abs() @ k.abs().mT
    size = (size.amax(-1, keepdim=True) if k.shape[-2] else size.sum(-1, keepdim=True)) * q.shape[
        -1
    ] ** 0.5
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
        label = (
            f"{batch} x {rows} rows, {heads}/{kv} heads of {size}, {'causal' if causal else 'full'}"
        )
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


def _pairs(query: Arg, key: Arg, heads: int, causal: bool) -> float:
    """Scores of all heads. The layout is a string, which no trace has: [B, N, S, D] or [B, S, N, D]."""
    if len(query.shape) != 4:
        raise LookupError("rows and heads of three dimensions go by the layout")
    rows = 2 if query.shape[1] == heads else 1
    visible = query.shape[rows] * key.shape[rows]
    if causal:
        visible -= min(query.shape[rows], key.shape[rows]) * (key.shape[rows] - 1) / 2
    return query.shape[0] * heads * visible


def _cost(
    a: tuple[Any, ...],
    heads: int,
    mask: int,
    following: int,
    mode: int,
    rope: int | None,
    backward: bool,
) -> Cost:
    """Of a call with arguments ``a``; the numbers are places in it. 5 products backward, 3 of them over q's columns."""
    query, key, value = a[:3]
    ropes = [x for x in (a[rope : rope + 2] if rope is not None else ()) if x is not None]
    causal = a[mask] is not None and (a[mode] in (2, 3) or (not a[mode] and a[following] == 0))
    pairs = _pairs(query, key, a[heads], causal)
    columns = query.shape[3] + (ropes[0].shape[3] if ropes else 0)
    inputs = sum(x.bytes for x in (query, key, value, *ropes))
    rows = query.numel // query.shape[3] * value.shape[3] * query.item  # out
    if backward:
        return Cost(2 * inputs + 2 * rows, pairs * (6 * columns + 4 * value.shape[3]), query.dtype)
    return Cost(inputs + rows, pairs * 2 * (columns + value.shape[3]), query.dtype)


def _formula(*places: int | None, backward: bool = True) -> Formula:
    return lambda *a: _cost(a, *places, backward)


#: Part of :data:`jumar.opinfo.costs.FUSED_COSTS`. Places of head_num, atten_mask, next_tokens, sparse_mode, query_rope.
ATTENTION_COSTS: dict[str, Formula] = {
    "npu_fusion_attention": _formula(3, 7, 11, 16, None, backward=False),
    "npu_fusion_attention_v3": _formula(3, 7, 11, 16, None, backward=False),
    "fusion_attention_v2": _formula(3, 7, 13, 17, 8, backward=False),
    "npu_fusion_attention_grad": _formula(4, 8, 16, 24, None),
    "npu_fusion_attention_grad_v2": _formula(4, 8, 18, 26, 13),
    "npu_fusion_attention_grad_v3": _formula(4, 8, 16, 23, None),
    "fusion_attention_backward": _formula(7, 10, 18, 24, 13),
    "fusion_attention_backward_v3": _formula(7, 10, 15, 21, None),
}

_BOUND = Bound(half=1.0, single=1.0, double=4.0, terms=2.0)
_NAMES = ("query", "key", "value")
_ROPES = ("query_rope", "key_rope")


def _joined(t: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """query, key and value with the ropes behind the columns of query and key."""
    return torch.cat([t[0], t[3]], -1), torch.cat([t[1], t[4]], -1), t[2]


def _v2_call(*tensors: Tensor, scale: float | None = None, causal: bool = True) -> tuple:
    q, k, v, q_rope, k_rope = tensors
    scale = (q.shape[-1] + q_rope.shape[-1]) ** -0.5 if scale is None else scale
    mask = torch.zeros(1, 1, dtype=torch.bool) if causal else None
    return torch.ops.jumar.npu_fusion_attention_v2(
        q,
        k,
        v,
        q.shape[2],
        "BSND",
        query_rope=q_rope,
        key_rope=k_rope,
        atten_mask=mask,
        scale=scale,
        next_tokens=0,
    )


def _v2_terms(t: dict[str, Tensor], grads: list[Tensor], **options: Any) -> dict[str, Tensor]:
    joined = dict(zip(_NAMES, _joined([t[n] for n in (*_NAMES, *_ROPES)]), strict=True))
    terms = _terms(joined, grads, **options)
    for name, rope in zip(_NAMES, _ROPES, strict=False):
        size = t[name].shape[-1]
        terms[f"d {rope}"] = terms[f"d {name}"][..., size:]
        terms[f"d {name}"] = terms[f"d {name}"][..., :size]
    return terms


def _v2_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for case in _cases(dtype, seed):
        source = Source(dtype, seed + 1)
        t = case.tensors
        size = t["query"].shape[-1] // 2 + 1
        ropes = {
            n: source.normal(*t[x].shape[:-1], size) for n, x in zip(_ROPES, _NAMES, strict=False)
        }
        yield Case(case.label, {**t, **ropes}, case.options, case.grads)


def _v2_bench(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    source = Source(dtype, 2)
    ropes = {
        name: source.normal(1, shape["s"], shape[heads], shape["rope"])
        for name, heads in zip(_ROPES, ("heads", "kv"), strict=True)
    }
    return {**_bench(shape, dtype), **ropes}


def _v3_call(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, causal: bool = True
) -> tuple[Tensor]:
    mask = torch.zeros(1, 1, dtype=torch.bool) if causal else None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.jumar.npu_fusion_attention_v3(
        query, key, value, query.shape[2], "BSND", atten_mask=mask, scale=scale, next_tockens=0
    )


_COMMON: dict[str, Any] = {
    "shapes": "query [B, S, N, D], key [B, S', N', D], value [B, S', N', D'] -> [B, S, N, D'], and other layouts",
    "bounds": dict.fromkeys(("y", "d query", "d key", "d value"), _BOUND),
    "plain": _plain,
    "terms": _terms,
    "cases": _cases,
    "bench": _bench,
    "target": Target(percent=60.0, eager=1.0, bf16=(3.0, 1.0), flops=6e9),
}

ENTRIES = (
    OpInfo(
        name="npu_fusion_attention",
        formula="y = softmax(mask(scale · (q · kᵀ + pse))) · v  per head",
        backward=("npu_fusion_attention_grad", "fusion_attention_backward"),
        call=_call,
        **_COMMON,
    ),
    OpInfo(
        name="npu_fusion_attention_v2",
        formula="y = softmax(mask(scale · (q · kᵀ + q_rope · k_ropeᵀ + pse))) · v  per head",
        backward=("npu_fusion_attention_grad_v2", "fusion_attention_backward"),
        doc="docs/ops/npu_fusion_attention.md",
        call=_v2_call,
        **{
            **_COMMON,
            "bounds": dict.fromkeys(("y", *(f"d {n}" for n in (*_NAMES, *_ROPES))), _BOUND),
            "plain": lambda *t, **options: _plain(*_joined(t), **options),
            "terms": _v2_terms,
            "cases": _v2_cases,
            "bench": _v2_bench,
        },
    ),
    OpInfo(
        name="npu_fusion_attention_v3",
        formula="npu_fusion_attention with lengths, seed and offset in tensors",
        backward=("npu_fusion_attention_grad_v3", "fusion_attention_backward_v3"),
        doc="docs/ops/npu_fusion_attention.md",
        call=_v3_call,
        **_COMMON,
    ),
)
