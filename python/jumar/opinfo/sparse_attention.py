"""The entry of sparse attention: formula, data, bounds, costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jumar import ops
from jumar.opinfo.attention import attention_terms
from jumar.opinfo.cases import Source, layouts
from jumar.opinfo.cost_types import Arg, Cost, Formula
from jumar.opinfo.spec import Bound, Case, OpInfo, Shape, Target


def _call(
    query: Tensor, key: Tensor, value: Tensor, ids: Tensor, query_rope: Tensor, key_rope: Tensor, scale: float = 1.0
) -> tuple[Tensor, ...]:  # fmt: skip
    return ops.npu_sparse_flash_attention(
        query, key, value, ids, scale, query_rope=query_rope, key_rope=key_rope
    )


def _visible(ids: Tensor, keys: int) -> Tensor:
    """[B, N', S, S']: what ids [B, S, N', K] without repetitions pick, causal from the lower right."""
    picked = ids.new_zeros((*ids.shape[:-1], keys + 1), dtype=torch.bool)
    picked = picked.scatter(-1, torch.where(ids < 0, keys, ids).long(), True)[..., :keys]
    return picked.transpose(1, 2).tril(keys - ids.shape[1])


def _plain(
    query: Tensor, key: Tensor, value: Tensor, ids: Tensor, query_rope: Tensor, key_rope: Tensor, scale: float = 1.0
) -> tuple[Tensor]:  # fmt: skip
    """Dense attention with a mask of the picked keys, as models compute it eagerly."""
    q, k = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1)
    # Equal head sizes let torch take its attention without a matrix of scores.
    v = F.pad(value, (0, k.shape[-1] - value.shape[-1]))
    group = q.shape[2] // k.shape[2]
    mask = _visible(ids, k.shape[1]).repeat_interleave(group, 1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=group > 1)
    return (y.transpose(1, 2)[..., : value.shape[-1]],)


def _terms(
    t: dict[str, Tensor],
    grads: list[Tensor],
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    q, k = torch.cat([t["query"], t["query_rope"]], -1), torch.cat([t["key"], t["key_rope"]], -1)
    hidden = ~_visible(t["sparse_indices"], k.shape[1]).repeat_interleave(
        q.shape[2] // k.shape[2], 1
    )
    terms = attention_terms(q, k, t["value"], grads[0], hidden, scale, dtype)
    size = t["query"].shape[-1]
    for name in ("d query", "d key"):
        terms[f"{name}_rope"] = terms[name][..., size:]
        terms[name] = terms[name][..., :size]
    return terms


def _ids(source: Source, batch: int, rows: int, kv: int, count: int, holes: bool = True) -> Tensor:
    """For every row ``count`` keys that it sees, in no order, -1 among them; a row in the middle has none."""
    ids = torch.rand(batch, rows, kv, rows, generator=source.generator)
    ids = ids.masked_fill(torch.ones(rows, rows).triu(1).bool()[:, None], 2.0)
    order = ids.argsort(-1)[..., :count]
    order = order.masked_fill(ids.gather(-1, order) > (0.9 if holes else 1.0), -1)
    if holes and rows > 4:
        order[:, rows // 2] = -1
    return order.int()


def _cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """(batch, rows, heads, heads of keys, head size, columns of the ropes, value's, ids)"""
    for batch, rows, heads, kv, size, rope, value_size, count in (
        (1, 0, 2, 1, 8, 0, 8, 3),
        (1, 1, 1, 1, 1, 1, 1, 1),
        (2, 5, 2, 1, 7, 2, 3, 3),
        (2, 33, 6, 2, 16, 0, 16, 9),
        (2, 65, 16, 1, 33, 4, 20, 40),
        (1, 40, 20, 1, 128, 16, 128, 30),
    ):
        source = Source(dtype, seed + rows)
        tensors = {
            "query": source.rows(batch, rows, heads, size),
            "key": source.normal(batch, rows, kv, size),
            "value": source.normal(batch, rows, kv, value_size),
            "sparse_indices": _ids(source, batch, rows, kv, count),
            "query_rope": source.normal(batch, rows, heads, rope),
            "key_rope": source.normal(batch, rows, kv, rope),
        }
        label = f"{batch} x {rows} rows, {heads}/{kv} heads of {size} + {rope}, {count} ids"
        grads = [source.normal(batch, rows, heads, value_size)]
        case = Case(label, tensors, {"scale": (size + rope) ** -0.5}, grads)
        yield case
        if rows == 33:
            yield from layouts(case)


def _bench(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    source = Source(dtype, 1)
    s, heads, size, rope = shape["s"], shape["heads"], shape["d"], shape["rope"]
    # Blocks of rows, for a matrix of all of them would be the largest thing here.
    blocks = [
        torch.rand(len(rows), s, generator=source.generator)
        .masked_fill(torch.arange(s) > rows[:, None], 2.0)
        .topk(shape["k"], largest=False)
        for rows in torch.arange(s).split(256)
    ]
    ids = torch.cat([torch.where(b.values > 1, -1, b.indices) for b in blocks])
    return {
        "query": source.normal(1, s, heads, size, scale=(size + rope) ** -0.25),
        "key": source.normal(1, s, 1, size, scale=(size + rope) ** -0.25),
        "value": source.normal(1, s, 1, size),
        "sparse_indices": ids.view(1, s, 1, -1).int(),
        "query_rope": source.normal(1, s, heads, rope),
        "key_rope": source.normal(1, s, 1, rope),
    }


def _cost(
    query: Arg, key: Arg, value: Arg, ids: Arg, query_rope: Arg | None, key_rope: Arg | None, block: int, mode: int,
    backward: bool,
) -> Cost:  # fmt: skip
    """Forward: scores and sums of values. Backward: the scores again, and two products for each."""
    rows, heads, keys, slots = (
        query.shape[-3],
        query.shape[-2],
        key.shape[-3],
        ids.shape[-1] * block,
    )
    lengths = range(keys - rows + 1, keys + 1) if mode == 3 else [keys] * rows
    pairs = sum(min(slots, max(0, n)) for n in lengths) * (
        query.numel // max(1, query.shape[-1] * rows * heads)
    )
    rope = query_rope.shape[-1] if query_rope is not None else 0
    size, value_size = query.shape[-1] + rope, value.shape[-1]
    columns = 3 * size + 2 * value_size if backward else size + value_size
    out = query.numel // max(1, query.shape[-1]) * value_size * query.item
    both = [x.bytes for x in (query, key, value, query_rope, key_rope) if x is not None]
    moved = (2 if backward else 1) * sum(both) + ids.bytes + (2 if backward else 1) * out
    return Cost(moved, 2.0 * pairs * heads * columns, query.dtype)


#: Part of :data:`jumar.opinfo.costs.FUSED_COSTS`.
SPARSE_ATTENTION_COSTS: dict[str, Formula] = {
    "sparse_attention": lambda q, k, v, ids, scale, ends, ends_kv, qr, kr, sinks, block, layout, mode: (
        _cost(q, k, v, ids, qr, kr, block, mode, False)
    ),
    "sparse_attention_backward": lambda q, k, v, ids, dy, out, most, total, scale, ends, ends_kv, qr, kr, *r: (
        _cost(q, k, v, ids, qr, kr, r[1], r[3], True)
    ),
    "npu_sparse_flash_attention_grad": lambda q, k, v, ids, dy, out, most, total, scale, block, *r: (
        _cost(
            q,
            k,
            v,
            ids,
            *(*r, None, None)[:2],
            block,
            r[5] if len(r) > 5 and r[5] is not None else 3,
            True,
        )
    ),
}

_BOUND = Bound(half=1.0, single=1.0, double=4.0, terms=2.0)

ENTRIES = (
    OpInfo(
        name="npu_sparse_flash_attention",
        formula="y[i] = softmax over t in ids[i] of (scale · (q[i] · k[t] + q_rope[i] · k_rope[t])) · v[t]  per head",
        shapes="query [B, S, N, D], key [B, S', N', D], value [B, S', N', D'], ids [B, S, N', K] -> [B, S, N, D'], and TND",
        backward=("npu_sparse_flash_attention_grad", "sparse_attention_backward"),
        bounds=dict.fromkeys(
            ("y", "d query", "d key", "d value", "d query_rope", "d key_rope"), _BOUND
        ),
        plain=_plain,
        terms=_terms,
        cases=_cases,
        bench=_bench,
        call=_call,
        target=Target(percent=50.0, eager=3.0, bf16=(10.0, 1.0), flops=6e9),
    ),
)
