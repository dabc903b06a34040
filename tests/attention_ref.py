"""Fused attention in plain PyTorch: the oracle, in fp64, of the attention tests.

Everything is per sequence, [N, S, D], with a matrix that says which query sees which key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min
UNBOUNDED = 2147483647
#: The vendor's compressed masks.
CAUSAL_MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
PREFIX_MASK = torch.cat([CAUSAL_MASK, (torch.arange(2048) >= 1024).expand(1024, 2048)])


def heads_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """[B, N, S, D] of a tensor in a padded layout."""
    if layout == "BSH":
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)
    if layout == "SBH":
        return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    return x.transpose(1, 2) if layout == "BSND" else x


def in_layout(x: Tensor, layout: str) -> Tensor:
    """The inverse of :func:`heads_first`."""
    if layout == "BSH":
        return x.transpose(1, 2).flatten(2)
    if layout == "SBH":
        return x.permute(2, 0, 1, 3).flatten(2)
    return x.transpose(1, 2) if layout == "BSND" else x


def visible(
    rows: int,
    keys: int,
    mode: int,
    mask: Tensor | None,
    pre: int,
    following: int,
    prefix: int,
    cut: bool,
) -> Tensor:
    """Which query sees which key; `mask`: that of the sequence. `cut`: the sequence that was cut (modes 7 and 8)."""
    i, j, shift = torch.arange(rows)[:, None], torch.arange(keys)[None], keys - rows
    if mask is None:
        return torch.ones(rows, keys, dtype=torch.bool)
    if mode in (0, 1, 5):
        band = (j >= i - pre) & (j <= i + following)
        return ~mask.bool() & band if mode == 0 else ~mask.bool()
    if mode == 4 or (cut and mode in (7, 8)):
        return (j <= i + shift + following) & (j >= i + shift - pre)
    if mode in (2, 8):
        return (j <= i).expand(rows, keys)
    causal = j <= i + shift
    return causal | (j < prefix) if mode == 6 else causal


class Result(NamedTuple):
    out: Tensor
    maximum: Tensor
    total: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float, pse: Tensor | None = None,
    pattern: Tensor | None = None, keep_prob: float = 1.0, sink: Tensor | None = None,
) -> Result:  # fmt: skip
    """One sequence. `pattern`: 1 where dropout keeps."""
    group = q.shape[-3] // k.shape[-3]
    scores = q @ k.repeat_interleave(group, -3).mT
    scores = ((scores if pse is None else scores + pse) * scale).masked_fill(~keep, -torch.inf)
    maximum = (
        scores.amax(-1, keepdim=True)
        if scores.shape[-1]
        else scores.new_full((*scores.shape[:-1], 1), LOWEST)
    )
    maximum = maximum.detach().clamp(min=LOWEST)
    if sink is not None:
        maximum = torch.maximum(maximum, sink.detach()[:, None, None])
    weights = torch.exp(scores - maximum)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink[:, None, None] - maximum)
    weights = weights / torch.where(total == 0, 1, total)
    if pattern is not None:
        weights = weights * pattern / keep_prob
    return Result(weights @ v.repeat_interleave(group, -3), maximum, total)


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    mask: Tensor | None,
    ends: Sequence[int],
    ends_kv: Sequence[int],
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor | None]]:
    if layout != "TND":
        for b in range(q.shape[0]):
            m = mask if mask is None or mask.dim() == 2 else mask[b % mask.shape[0]]
            yield b, q[b], k[b], v[b], m
        return
    begin, begin_kv = 0, 0
    for b, (end, end_kv) in enumerate(zip(ends, ends_kv, strict=True)):
        if end >= begin and end_kv >= begin_kv and (end or end_kv):
            parts = (q[begin:end], k[begin_kv:end_kv], v[begin_kv:end_kv])
            yield b, *(x.transpose(0, 1) for x in parts), mask
            begin, begin_kv = end, end_kv


def fusion_attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, layout: str, *, pse: Tensor | None = None,
    mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0, pre: int = UNBOUNDED,
    following: int = UNBOUNDED, prefix: Sequence[int] | None = None, ends: Sequence[int] = (),
    ends_kv: Sequence[int] = (), mode: int = 0, sink: Tensor | None = None, patterns: Sequence[Tensor] | None = None,
) -> Result:  # fmt: skip
    """npu_fusion_attention: output in `layout`, statistics [B, N, S] or [N, T]."""
    if layout != "TND":
        size = q.shape[-1] // heads if layout in ("BSH", "SBH") else q.shape[-1]
        kv = k.shape[-1] // size if layout in ("BSH", "SBH") else 0
        q, k, v = (heads_first(x, layout, n) for x, n in ((q, heads), (k, kv), (v, kv)))
    parts = list(_sequences(q, k, v, layout, mask, ends, ends_kv))
    live = [i for i, (_, a, _, _, _) in enumerate(parts) if a.shape[1]]
    cut = {7: live[-1:], 8: live[:1]}.get(mode, []) if layout == "TND" else []
    results = []
    for at, (b, qb, kb, vb, mb) in enumerate(parts):
        rows, keys = qb.shape[1], kb.shape[1]
        if mb is not None and mode in (0, 1) and layout == "TND":
            mb = mb[:rows, :keys]
        keep = visible(rows, keys, mode, mb, pre, following, prefix[b] if prefix else 0, at in cut)
        bias = pse if pse is None else pse[b % pse.shape[0]]
        pattern = patterns[at] if patterns is not None else None
        results.append(attend(qb, kb, vb, keep, scale, bias, pattern, keep_prob, sink))
    if layout == "TND":
        out = torch.cat([r.out for r in results], 1).transpose(0, 1)
        return Result(out, *(torch.cat([r[x] for r in results], 1).squeeze(-1) for x in (1, 2)))
    out, maximum, total = (torch.stack(x) for x in zip(*results, strict=True))
    return Result(in_layout(out, layout), maximum.squeeze(-1), total.squeeze(-1))
