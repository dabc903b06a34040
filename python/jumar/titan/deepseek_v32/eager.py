"""DeepSeek sparse attention in torch's own operations: what the fused operators are compared with.

Scores of all queries and keys are kept, so memory grows with the square of the sequence.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from jumar.compat.attention import WIDEN

# Smallest probability in the logarithms of the loss, the gradients do not know it.
_EPS = 1e-8


def wide(x: Tensor) -> Tensor:
    """16-bit numbers as fp32, others as they are."""
    return x.float() if x.element_size() < 4 else x


def visible(batch: int, length: int, ends: Tensor | None, device: torch.device) -> Tensor:
    """[B or 1, S, S] bool: True where a query sees a key, its own document's up to itself.

    ``ends``: where documents of the batch end, as cumulative lengths over all its rows one after another; None: every
    row is one document.
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None]
    if ends is None:
        return causal
    rows = torch.arange(batch * length, device=device, dtype=ends.dtype)
    document = torch.bucketize(rows, ends, right=True).view(batch, length)
    return causal & (document[:, :, None] == document[:, None])


def scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """``I[s, t] = sum over h of w[s, h] relu(q[s, h] k[t])``: [B, S, H, D], [B, S, 1, D], [B, S, H] -> [B, S, S]."""
    products = torch.einsum("bshd,btd->bsht", wide(query), wide(key)[:, :, 0])
    return torch.einsum("bsh,bsht->bst", wide(weights).to(products.dtype), products.relu())


def choose(index: Tensor, seen: Tensor, count: int) -> Tensor:
    """[B, S, S] bool: the ``count`` best visible keys of every query; of equal ones the first."""
    order = index.masked_fill(~seen, -math.inf).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(index, dtype=torch.bool).scatter(-1, order[..., :count], True) & seen


def attention(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, scale: float) -> Tensor:
    """Softmax attention over the chosen keys, [B, S, N, D] in and out."""
    dtype = query.dtype
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if WIDEN and dtype == torch.bfloat16:
        q, k, v = q.float(), k.float(), v.float()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=chosen[:, None], scale=scale)
    return out.to(dtype).transpose(1, 2)


def kl(
    index_query: Tensor,
    index_key: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    chosen: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The indexer's loss over the chosen keys, summed over queries, and its gradients, by autograd.

    ``sum of p (log p - log y)`` with p the attention's probabilities, the mean over its heads, and y the softmax of the
    indexer's scores. Returns (d index_query, d index_key, d weights, loss).
    """
    dots = torch.einsum("bsnd,btnd->bnst", wide(query), wide(key)) * scale
    p = dots.masked_fill(~chosen[:, None], -math.inf).softmax(-1).mean(1)
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (index_query, index_key, weights)]
        log_y = scores(*inputs).masked_fill(~chosen, -math.inf).log_softmax(-1).masked_fill(~chosen, 0)
        gradients = torch.autograd.grad(-(p * log_y).sum(), inputs)
    loss = (p * (p.clamp(min=_EPS).log() - log_y.detach().clamp(min=math.log(_EPS)))).sum()
    return *gradients, loss
