"""The lightning indexer and its losses in plain PyTorch, for any dtype: the oracle of the tests, in fp64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NINF = -float("inf")
LOWEST = torch.finfo(torch.float32).min


def scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """[B, S1, S2] of query [B, S1, N, D], key [B, S2, 1, D], weights [B, S1, N]."""
    products = torch.einsum("bshd,btd->bsht", query, key.squeeze(2))
    return (weights.unsqueeze(-1) * products.relu()).sum(2)


def visible(
    rows: int, keys: int, mode: int = 3, q_len: list | None = None, k_len: list | None = None
) -> Tensor:
    """[B, S1, S2] (B = 1 without lengths): the keys that each query sees."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    masks = []
    for a, b in zip(q_len or [rows], k_len or [keys], strict=True):
        seen = (i < a) & (j < b)
        masks.append(seen & (j <= i + b - a) if mode == 3 else seen)
    return torch.stack(masks)


def choose(
    query: Tensor, key: Tensor, weights: Tensor, count: int, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Positions and scores of the `count` largest of each row [B, S1, count], -1 and -inf where none is left."""
    found = scores(query, key, weights)
    order = (
        found.masked_fill(~seen, NINF)
        .sort(dim=-1, descending=True, stable=True)
        .indices[..., :count]
    )
    valid = seen.expand_as(found).gather(-1, order)
    values = found.gather(-1, order).masked_fill(~valid, NINF)
    missing = max(0, count - order.shape[-1])
    pad = torch.nn.functional.pad
    return pad(order.masked_fill(~valid, -1), (0, missing), value=-1), pad(
        values, (0, missing), value=NINF
    )


class Result(NamedTuple):
    gradients: tuple[Tensor, ...]
    loss: Tensor
    sizes: tuple[
        Tensor, ...
    ]  # gradients with every term's magnitude: what errors are measured against


def through_scores(
    slope: Tensor, size: Tensor, at: Tensor | None, *indexer: Tensor
) -> tuple[tuple, tuple]:
    """Gradients of sum(slope * scores), and with `size` and magnitudes of all factors. `at`: the slots [B, S1, K]."""

    def run(
        weight: Tensor, tensors: tuple[Tensor, ...], signs: Tensor | None
    ) -> tuple[Tensor, ...]:
        q, k, w = leaves = [x.detach().clone().requires_grad_() for x in tensors]
        products = torch.einsum("bshd,btd->bsht", q, k.squeeze(2))
        positive = products.relu() if signs is None else products * (signs > 0)
        found = (w.unsqueeze(-1) * positive).sum(2)
        found = found if at is None else found.gather(-1, at)
        return torch.autograd.grad((weight * found).sum(), leaves)

    q, k, _ = indexer
    signs = torch.einsum("bshd,btd->bsht", q, k.squeeze(2))
    return run(slope, indexer, None), run(size, tuple(x.abs() for x in indexer), signs)


def _attention(
    query: Tensor, key: Tensor, rope: tuple[Tensor, Tensor] | None, scale: float
) -> Tensor:
    """Scores [B, S1, N, S2]; heads of key serve groups of query's."""
    q, k = (
        (query, key)
        if rope is None
        else (torch.cat([query, rope[0]], -1), torch.cat([key, rope[1]], -1))
    )
    return scale * torch.einsum(
        "bshd,bthd->bsht", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    )


def statistics(
    query: Tensor, key: Tensor, scale: float, seen: Tensor, rope=None, sinks=None
) -> tuple[Tensor, Tensor]:
    """max and sum of exponentials [B, S1, N] of attention over the keys of `seen` [B, S1, S2]."""
    s = _attention(query, key, rope, scale).masked_fill(~seen[:, :, None], NINF)
    top = s.amax(-1).clamp(min=LOWEST)
    top = top if sinks is None else torch.maximum(top, sinks)
    total = (s - top[..., None]).exp().sum(-1)
    return top, total if sinks is None else total + (sinks - top).exp()


def _divergence(p: Tensor, y: Tensor) -> Tensor:
    return (p * (p.clamp(min=1e-8).log() - y.clamp(min=1e-8).log())).sum()


def _share(query, key, rope, scale, top, total) -> Tensor:
    p = (_attention(query, key, rope, scale) - top[..., None]).exp() / total.where(total != 0, 1)[
        ..., None
    ]
    return p.where((total != 0)[..., None], 0).mean(2)


def sparse_loss(query, key, indexer, indices, top, total, scale, seen, rope=None) -> Result:
    """indices [B, S1, K]; slots of -1 and of keys outside `seen` count for nothing, wherever they stand."""
    at = indices.clamp(min=0).long()
    ok = (indices >= 0) & seen.expand(len(at), -1, -1).gather(-1, at)
    p = _share(query, key, rope, scale, top, total).gather(-1, at).where(ok, 0)
    p = p / p.sum(-1, keepdim=True).where(p.sum(-1, keepdim=True) != 0, 1)
    found = scores(*indexer).gather(-1, at).masked_fill(~ok, NINF)
    y = found.softmax(-1).where(ok, 0)
    gradients, sizes = through_scores(y - p, y + p, at, *indexer)
    return Result(gradients, _divergence(p, y), sizes)


def dense_loss(
    query, key, indexer, top, total, top_index, total_index, scale, seen, rope=None
) -> Result:
    p = _share(query, key, rope, scale, top, total).where(seen, 0)
    y = ((scores(*indexer) - top_index[..., None]).exp() / total_index[..., None]).where(seen, 0)
    gradients, sizes = through_scores(y - p, y + p, None, *indexer)
    return Result(gradients, _divergence(p, y), sizes)
