"""Sparse attention in plain PyTorch, query by query: the oracle, in fp64, of its tests.

A query's slots are a list of tokens; everything of it is a small dense softmax over the rows that the list names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min


class Result(NamedTuple):
    out: Tensor  # like query, with value's head size
    maximum: Tensor  # [B, Nk, S1, N / Nk]
    total: Tensor


def slots(ids: Tensor, block: int, visible: int) -> list[int]:
    """Tokens of one row of ids: blocks one after another, -1 skipped, tokens from `visible` on left out."""
    tokens = [i * block + o for i in ids.tolist() if i >= 0 for o in range(block)]
    return [t for t in tokens if t < visible]


def rows(
    batch: int, queries: int, keys: int, mode: int, q_lengths: list[int] | None, k_lengths: list[int] | None,
    packed: bool,
) -> Iterator[tuple[int, int, int, int]]:  # fmt: skip
    """(batch entry, row of query, row of key that is token 0, visible tokens) of every query of a sequence."""
    if packed:
        begins, begins_k = [0, *q_lengths[:-1]], [0, *k_lengths[:-1]]
        parts = [
            (0, a, b - a, c, d - c)
            for a, b, c, d in zip(begins, q_lengths, begins_k, k_lengths, strict=True)
            if b or d
        ]
    else:
        q_lengths, k_lengths = q_lengths or [queries] * batch, k_lengths or [keys] * batch
        parts = [(b, 0, q_lengths[b], 0, k_lengths[b]) for b in range(batch)]
    for b, begin, length, begin_k, length_k in parts:
        for i in range(length):
            last = max(0, min(i + length_k - length + 1, length_k)) if mode == 3 else length_k
            yield b, begin + i, begin_k, last


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, scale: float, *, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None, sinks: Tensor | None = None, block: int = 1, mode: int = 3,
    q_lengths: list[int] | None = None, k_lengths: list[int] | None = None,
) -> Result:  # fmt: skip
    """BSND for 4 dimensions, else TND."""
    packed = query.dim() == 3
    if query_rope is not None:
        query, key = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1)
    if packed:
        query, key, value, indices = (x.unsqueeze(0) for x in (query, key, value, indices))
    batch, queries, heads, _ = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    size = value.shape[-1]
    # A part of the graph, for calls without a single slot.
    zero = query.new_zeros(group, size) + 0 * query.sum()
    nothing = (
        zero.new_full((group,), LOWEST) if sinks is None else None,
        zero.new_zeros(group) if sinks is None else zero.new_ones(group),
    )
    out = {}
    for b, i, begin, visible in rows(
        batch, queries, key.shape[1], mode, q_lengths, k_lengths, packed
    ):
        for h in range(kv_heads):
            tokens = [begin + t for t in slots(indices[b, i, h], block, visible)]
            sink = None if sinks is None else sinks[h * group : (h + 1) * group]
            if not tokens:
                continue
            scores = scale * query[b, i, h * group : (h + 1) * group] @ key[b, tokens, h].mT
            most = scores.detach().amax(-1)
            if sink is not None:
                most = torch.maximum(most, sink.detach())
            weights = torch.exp(scores - most[:, None])
            total = weights.sum(-1)
            if sink is not None:
                total = total + torch.exp(sink - most)
            out[b, i, h] = (weights / total[:, None] @ value[b, tokens, h], most, total)

    def rest(h: int) -> tuple[Tensor, Tensor, Tensor]:
        most = nothing[0] if sinks is None else sinks[h * group : (h + 1) * group]
        return zero, most, nothing[1]

    def gather(at: int) -> Tensor:
        return torch.stack([
            torch.stack([
                torch.stack([out.get((b, i, h), rest(h))[at] for h in range(kv_heads)])
                for i in range(queries)
            ])
            for b in range(batch)
        ])  # fmt: skip

    if not queries or not batch:
        empty = query.new_zeros(batch, kv_heads, queries, group)
        results = (zero.sum() + query.new_zeros(batch, queries, heads, size), empty, empty)
    else:
        results = (gather(0).flatten(2, 3), gather(1).transpose(1, 2), gather(2).transpose(1, 2))
    return Result(*(x.squeeze(0) if packed else x for x in results))
