"""The entries of the lightning indexer and of its losses: formulas, data, bounds, costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jumar import ops
from jumar.opinfo.cases import Source, layouts
from jumar.opinfo.cost_types import Arg, Cost, Formula
from jumar.opinfo.spec import Bound, Case, OpInfo, Shape, Target

_INF = float("inf")


def _scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """[B, S, S'], in the dtype of query or, for 16 bits, in fp32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, w = (x.to(wide) for x in (query, key, weights))
    products = (q.transpose(1, 2) @ k.squeeze(2).mT.unsqueeze(1)).relu()
    return (w.mT.unsqueeze(-1) * products).sum(1)


def _seen(rows: int, keys: int) -> Tensor:
    """Causal from the lower right."""
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def _chain(slope: Tensor, indexer: list[Tensor]) -> list[Tensor]:
    """Gradients of sum(slope * scores)."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in indexer]
        return list(torch.autograd.grad((slope * _scores(*leaves)).sum(), leaves))


def _terms_of(size: Tensor, indexer: list[Tensor]) -> list[Tensor]:
    """Magnitudes of what :func:`_chain` sums, for sums of so many terms."""
    count = size.shape[1] * indexer[0].shape[2] + size.shape[2] + indexer[0].shape[3]
    return [x * count**0.5 for x in _chain(size, [x.abs() for x in indexer])]


def _choice(query: Tensor, key: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """A quarter of the keys."""
    return ops.npu_lightning_indexer(
        query, key, weights, sparse_count=-(-key.shape[1] // 4), return_value=True
    )[::-1]


def _choose(query: Tensor, key: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    hidden = ~_seen(query.shape[1], key.shape[1])
    scores = _scores(query, key, weights).masked_fill(hidden, -_INF)
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    values, indices = (x[..., : -(-key.shape[1] // 4)].unsqueeze(2) for x in (values, indices))
    return values.to(query.dtype), indices.masked_fill(values == -_INF, -1)


def _choice_plain(query: Tensor, key: Tensor, weights: Tensor) -> tuple[Tensor]:
    return _choose(query, key, weights)[:1]


def _choice_terms(t: dict[str, Tensor], grads: list[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    indices = _choose(**t)[1].squeeze(2)
    size = torch.zeros(*indices.shape[:2], t["key"].shape[1] + 1, dtype=grads[0].dtype)
    at = torch.where(indices < 0, size.shape[-1] - 1, indices)
    size = size.scatter_add(-1, at, grads[0].squeeze(2).abs())[..., :-1]
    terms = _terms_of(size, list(t.values()))
    return dict(zip(("d query", "d key", "d weights"), terms, strict=True))


def _whole(source: Source, *shape: int) -> Tensor:
    """Small whole numbers: scores are exact, so that the choice is the same in every dtype; many are alike."""
    return torch.randint(-3, 4, shape, generator=source.generator).to(source.dtype)


def _choice_data(source: Source, batch: int, rows: int, keys: int, heads: int, size: int) -> dict[str, Tensor]:
    return {
        "query": _whole(source, batch, rows, heads, size),
        "key": _whole(source, batch, keys, 1, size),
        "weights": _whole(source, batch, rows, heads),
    }


#: (batch, rows, keys, heads, size)
_SIZES = ((1, 1, 1, 1, 1), (2, 5, 9, 3, 8), (1, 33, 40, 16, 33), (2, 64, 150, 4, 64))


def _choice_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for sizes in _SIZES:
        source = Source(dtype, seed + sizes[2])
        grads = [source.normal(*sizes[:2], 1, -(-sizes[2] // 4))]
        case = Case("x".join(map(str, sizes)), _choice_data(source, *sizes), {}, grads)
        yield case
        if sizes[1] == 33:
            yield from layouts(case)


def _choice_bench(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """In fp64, where finite differences are taken, no two scores are alike and no product is at relu's kink."""
    data = _lse_data if dtype == torch.float64 else _choice_data
    return data(Source(dtype, 1), 1, shape["s"], shape["s"], shape["heads"], shape["d"])


def _lse_plain(query: Tensor, key: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, weights).masked_fill(~_seen(query.shape[1], key.shape[1]), -_INF)
    top = scores.amax(-1)
    return top.unsqueeze(1), (scores - top[..., None]).exp().sum(-1).unsqueeze(1)


def _room(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """What scores are off at most, in units of rounding: [B, S]."""
    sums = query.shape[2] + query.shape[3]
    return _scores(query.abs(), key.abs(), weights.abs()).amax(-1) * sums**0.5 + key.shape[1] ** 0.5


def _lse_terms(t: dict[str, Tensor], grads: list[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    room = _room(**t).unsqueeze(1)
    return {"max": room, "sum": room * _lse_plain(**t)[1]}


def _indexer(source: Source, batch: int, rows: int, keys: int, heads: int, size: int) -> dict[str, Tensor]:
    return {
        "query_index": source.normal(batch, rows, heads, size),
        "key_index": source.normal(batch, keys, 1, size),
        "weights": source.normal(batch, rows, heads, scale=(heads * size) ** -0.5),
    }


def _lse_data(source: Source, *sizes: int) -> dict[str, Tensor]:
    """:func:`_indexer` under the names that an operator without an attention has."""
    return dict(zip(("query", "key", "weights"), _indexer(source, *sizes).values(), strict=True))


def _lse_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for sizes in _SIZES:
        case = Case("x".join(map(str, sizes)), _lse_data(Source(dtype, seed + sizes[2]), *sizes))
        yield case
        if sizes[1] == 33:
            yield from layouts(case)


_INDEXER = ("query_index", "key_index", "weights")


def _probabilities(t: dict[str, Tensor], dense: bool) -> tuple[Tensor, Tensor]:
    """p of the attention and y of the indexer over all keys [B, S, S']; where a sparse row has no slot, both 0."""
    q, k = torch.cat([t["query"], t["query_rope"]], -1), torch.cat([t["key"], t["key_rope"]], -1)
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = (x.to(wide).transpose(1, 2) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    by_head = (lambda x: x) if dense else (lambda x: x.permute(0, 3, 2, 1))
    p = ((q @ k.mT * q.shape[-1] ** -0.5 - by_head(t["softmax_max"])).exp() / by_head(t["softmax_sum"])).mean(1)
    scores = _scores(*(t[n] for n in _INDEXER))
    seen = _seen(*scores.shape[1:]).expand_as(scores)
    if dense:
        y = (scores - t["softmax_max_index"].mT).exp() / t["softmax_sum_index"].mT
        return p.where(seen, 0), y.where(seen, 0)
    picked = torch.zeros(*scores.shape[:2], scores.shape[2] + 1, dtype=torch.bool)
    ids = t["sparse_indices"].squeeze(2)
    seen = seen & picked.scatter(-1, torch.where(ids < 0, scores.shape[2], ids).long(), True)[..., :-1]
    p = p.where(seen, 0)
    total = p.sum(-1, keepdim=True)
    y = scores.masked_fill(~seen, -_INF).softmax(-1).nan_to_num(0.0)
    return p / total.where(total != 0, 1), y


def _loss_plain(names: tuple[str, ...], dense: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    t = dict(zip(names, tensors, strict=True))
    p, y = _probabilities(t, dense)
    grads = _chain(y - p, [t[n] for n in _INDEXER])
    loss = p * (p.clamp(min=1e-8).log() - y.clamp(min=1e-8).log())
    return *grads, loss.sum().reshape(1)


def _loss_terms(
    dense: bool, t: dict[str, Tensor], grads: list[Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    p, y = _probabilities(t, dense)
    indexer = [t[n] for n in _INDEXER]
    attention = t["query"].shape[-1] + t["query_rope"].shape[-1] + 16
    room = (_room(*indexer) + 4 * attention**0.5).unsqueeze(-1)
    logs = 1 + p.clamp(min=1e-8).log().abs() + y.clamp(min=1e-8).log().abs()
    terms = [*_terms_of((y + p) * room, indexer), (p * logs * room).sum().reshape(1)]
    return dict(zip(_RESULTS, terms, strict=True))


_RESULTS = ("d_query_index", "d_key_index", "d_weights", "loss")
_SPARSE = ("query", "key", *_INDEXER, "sparse_indices", "softmax_max", "softmax_sum", "query_rope", "key_rope")
_DENSE = (
    "query", "key", *_INDEXER, "softmax_max", "softmax_sum", "softmax_max_index", "softmax_sum_index", "query_rope",
    "key_rope",
)  # fmt: skip


def _loss_call(dense: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    *rest, q_rope, k_rope = tensors
    op = ops.npu_dense_lightning_indexer_grad_kl_loss if dense else ops.npu_sparse_lightning_indexer_grad_kl_loss
    scale = (rest[0].shape[-1] + q_rope.shape[-1]) ** -0.5
    return op(*rest, scale, query_rope=q_rope, key_rope=k_rope)


def _loss_data(
    source: Source, batch: int, rows: int, keys: int, heads: int, size: int, attention: tuple[int, int, int], count: int
) -> dict[str, Tensor]:
    """``attention``: its heads, head size and columns of rope. ``count`` ids a row, 0: over all keys."""
    n, d, rope = attention
    kv = 1 if count else n
    stored = torch.promote_types(source.dtype, torch.float32)
    data = {"query": source.normal(batch, rows, n, d), "key": source.normal(batch, keys, kv, d)}
    data |= {"query_rope": source.normal(batch, rows, n, rope), "key_rope": source.normal(batch, keys, kv, rope)}
    data |= _indexer(source, batch, rows, keys, heads, size)
    q, k = torch.cat([data["query"], data["query_rope"]], -1), torch.cat([data["key"], data["key_rope"]], -1)
    totals = torch.zeros(batch, n, rows, 1, dtype=stored)
    seen = _seen(rows, keys)
    # Row by row of heads: a matrix of all of them would be the largest thing here.
    for h in range(n):
        s = q[:, :, h].to(stored) @ k[:, :, h % kv].to(stored).mT * (d + rope) ** -0.5
        totals[:, h] = s.masked_fill(~seen, -_INF).logsumexp(-1, keepdim=True)
    statistics = {"softmax_max": totals, "softmax_sum": torch.ones_like(totals)}
    if count:
        order = torch.rand(batch, rows, keys, generator=source.generator).argsort(-1)[..., :count]
        order[..., : count // 8] = -1
        data |= {name: x.permute(0, 3, 2, 1).contiguous() for name, x in statistics.items()}
        return {n: {**data, "sparse_indices": order.int().unsqueeze(2)}[n] for n in _SPARSE}
    lse = ops.npu_dense_lightning_indexer_softmax_lse(*(data[n] for n in _INDEXER))
    data |= statistics | dict(zip(("softmax_max_index", "softmax_sum_index"), lse, strict=True))
    return {n: data[n] for n in _DENSE}


def _loss_cases(dense: bool, dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for sizes, attention, count in zip(
        _SIZES, ((1, 1, 1), (2, 7, 3), (4, 16, 0), (2, 64, 16)), (1, 4, 30, 64), strict=True
    ):
        source = Source(dtype, seed + sizes[2])
        case = Case("x".join(map(str, sizes)), _loss_data(source, *sizes, attention, 0 if dense else count))
        yield case
        if sizes[1] == 33:
            yield from layouts(case)


def _loss_bench(dense: bool, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    s, heads, d = shape["s"], shape["heads"], shape["d"]
    attention = (16, 128, 64) if dense else (16, 512, 64)
    return _loss_data(Source(dtype, 1), 1, s, s, heads, d, attention, 0 if dense else -(-s // 4))


def _pairs(query: Arg, key: Arg, causal: bool = True, most: int | None = None) -> float:
    """Keys that queries see, at most so many for each; sequences of one packed row are taken for one."""
    rows, keys = query.shape[-3], key.shape[-3]
    lengths = range(keys - rows + 1, keys + 1) if causal else [keys] * rows
    batch = query.numel // max(1, rows * query.shape[-2] * query.shape[-1])
    return batch * float(sum(min(keys if most is None else most, max(0, n)) for n in lengths))


def _products(query: Arg, key: Arg, weights: Arg, pairs: float, products: int, moved: float = 0.0) -> Cost:
    """``products`` of a head's columns for each pair; gradients of all inputs where there are three."""
    heads, size = query.shape[-2:]
    inputs = (1 if products == 1 else 2) * (query.bytes + key.bytes + weights.bytes)
    return Cost(inputs + moved, 2.0 * products * pairs * heads * size, query.dtype)


def _loss_cost(a: tuple[Any, ...], most: int | None, ropes: int) -> Cost:
    q, k, query, key, weights, *statistics = a[:9]
    pairs = _pairs(query, key, most=most)
    parts = [(q, k), *([a[ropes : ropes + 2]] if len(a) > ropes and a[ropes] is not None else [])]
    teacher = sum(x.bytes + y.bytes for x, y in parts) + sum(x.bytes for x in statistics if isinstance(x, Arg))
    flops = 2.0 * pairs * q.shape[-2] * sum(x.shape[-1] for x, _ in parts)
    return _products(query, key, weights, pairs, 3, teacher) + Cost(0.0, flops, query.dtype)


#: Part of :data:`jumar.opinfo.costs.FUSED_COSTS`.
LIGHTNING_INDEXER_COSTS: dict[str, Formula] = {
    "lightning_indexer": lambda q, k, w, ends, ends_k, table, layout, layout_k, count, mode, *r: _products(
        q, k, w, _pairs(q, k, mode == 3), 1, 4.0 * count * q.numel / max(1, q.shape[-1] * q.shape[-2])
    ),
    "npu_lightning_indexer_grad": lambda q, k, dy, ids, w, *r: _products(
        q, k, w, float(ids.numel), 3, dy.bytes + ids.bytes
    ),
    "npu_dense_lightning_indexer_softmax_lse": lambda q, k, w, *r: _products(q, k, w, _pairs(q, k), 1),
    "npu_sparse_lightning_indexer_grad_kl_loss": lambda *a: _loss_cost(a, a[5].shape[-1], 9),
    "npu_dense_lightning_indexer_grad_kl_loss": lambda *a: _loss_cost(a, None, 10),
}

_SUMS = Bound(half=1.0, single=1.0, double=4.0, terms=2.0)
# Eager computes scores of 16-bit tensors in fp32 too.
_TARGET = Target(percent=50.0, eager=2.0, flops=6e9)
_DOC = "docs/ops/npu_lightning_indexer.md"
_FILE = "lightning_indexer"


def _loss(dense: bool, **given: Any) -> OpInfo:
    return OpInfo(
        doc=_DOC,
        shapes_file=_FILE,
        outputs=_RESULTS,
        differentiable=(),
        bounds=dict.fromkeys(_RESULTS, _SUMS),
        plain=partial(_loss_plain, _DENSE if dense else _SPARSE, dense),
        terms=partial(_loss_terms, dense),
        cases=partial(_loss_cases, dense),
        bench=partial(_loss_bench, dense),
        call=partial(_loss_call, dense),
        target=_TARGET,
        **given,
    )


ENTRIES = (
    OpInfo(
        name="npu_lightning_indexer",
        formula="I[s, t] = Σ_h w[s, h] · max(q[s, h] · k[t], 0);  the positions of the largest I[s] and their values",
        shapes="query [B, S, N, D], key [B, S', 1, D], weights [B, S, N] -> indices, values [B, S, 1, K], and TND",
        shapes_file=_FILE,
        outputs=("values",),
        backward=("npu_lightning_indexer_grad",),
        bounds={"values": Bound(half=0.51, single=0.0, double=0.0)}
        | dict.fromkeys(("d query", "d key", "d weights"), _SUMS),
        plain=_choice_plain,
        terms=_choice_terms,
        cases=_choice_cases,
        bench=_choice_bench,
        call=_choice,
        target=_TARGET,
    ),
    OpInfo(
        name="npu_dense_lightning_indexer_softmax_lse",
        formula="max over t of I[s, t], and Σ exp(I - max)",
        shapes="query [B, S, N, D], key [B, S', 1, D], weights [B, S, N] -> max, sum [B, 1, S], and TND",
        doc=_DOC,
        shapes_file=_FILE,
        outputs=("max", "sum"),
        differentiable=(),
        bounds=dict.fromkeys(("max", "sum"), _SUMS),
        plain=_lse_plain,
        terms=_lse_terms,
        cases=_lse_cases,
        bench=lambda shape, dtype: _lse_data(Source(dtype, 1), 1, shape["s"], shape["s"], shape["heads"], shape["d"]),
        target=_TARGET,
    ),
    _loss(
        False,
        name="npu_sparse_lightning_indexer_grad_kl_loss",
        formula="loss = Σ p · log(p / softmax(I)) over chosen keys, p the attention's mean over heads; its gradients",
        shapes="query, key and ropes of the attention, query_index, key_index, weights, ids [B, S, 1, K], its statistics",
    ),
    _loss(
        True,
        name="npu_dense_lightning_indexer_grad_kl_loss",
        formula="loss = Σ p · log(p / softmax(I)) over all visible keys; its gradients",
        shapes="query, key and ropes of the attention, query_index, key_index, weights, statistics of both",
    ),
)
