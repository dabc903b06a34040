"""DeepSeek sparse attention on the fused operators, and the loss that its indexer learns from.

The indexer sees its inputs detached, and nothing of the language-model loss reaches it: the keys that it chooses have no
gradient. It learns from a loss of its own, per query the Kullback-Leibler divergence of its distribution over the keys from
the attention's. That loss needs no place in the model's output: :func:`learn` returns the attention as it is, and where its
gradient arrives, adds the loss's gradients to the indexer's outputs. It is computed there and nowhere else, so that activation
checkpointing, which computes the forward pass again, does not compute the loss twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from jumar import ops
from jumar.masks import attend, functions

#: What an indexer gives for its scores: queries, keys, weights.
Index = tuple[Tensor, Tensor, Tensor]
#: From an index and constants the gradients of the index, and the indexer's loss.
Kl = Callable[..., tuple[Tensor, ...]]


class Meter:
    """The indexer's loss of one layer, summed over the queries of a backward pass, for each one since :meth:`take`."""

    #: So many passes are kept one by one, more than a step has; what is older is kept as its sum, for nobody may ever ask.
    KEPT = 1024

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Adds a loss of one element."""
        self.losses.append(loss.detach().reshape(()))
        if len(self.losses) > 2 * self.KEPT:
            self.losses = [sum(self.losses[: -self.KEPT]), *self.losses[-self.KEPT :]]

    def take(self, passes: int | None = None) -> Tensor:
        """The sum over all backward passes, or the last ``passes`` of them; the list begins again at none."""
        losses, self.losses = self.losses[-(passes or 0) :], []
        return sum(losses, torch.zeros(()))


class _Learn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, kl: Kl, factor: float, meter: Meter, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.kl, ctx.factor, ctx.meter = kl, factor, meter
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        tensors = ctx.saved_tensors
        *gradients, loss = ctx.kl(*tensors)
        ctx.meter.add(loss)
        own = (gradient * ctx.factor for gradient in gradients)
        return grad, None, None, None, *own, *[None] * (len(tensors) - len(gradients))


def learn(
    out: Tensor, constants: tuple[Tensor, ...], kl: Kl, index: Index, factor: float, meter: Meter
) -> Tensor:
    """``out``, whose backward pass gives the indexer its gradients.

    Args:
        out: the attention's output.
        constants: what the loss needs beside ``index``; no gradient flows to it.
        kl: from ``index`` and ``constants`` the gradients of the three, and the loss; sums over the queries, all of them.
        index: the indexer's queries, keys and weights.
        factor: of the gradients: the loss's weight over the queries of a whole step, so that a batch in parts gives the
            gradients of the batch.
        meter: adds the loss up.
    """
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in index)):
        return out
    return _Learn.apply(out, kl, factor, meter, *index, *(t.detach() for t in constants))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kl: Kl, constants: tuple[Tensor, ...], *index: Tensor) -> Tensor:
        *gradients, loss = kl(*index, *constants)
        ctx.save_for_backward(*gradients)
        return loss.reshape(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return None, None, *(gradient * grad.to(gradient.dtype) for gradient in ctx.saved_tensors)


def loss(constants: tuple[Tensor, ...], kl: Kl, index: Index) -> Tensor:
    """The indexer's loss of :func:`learn` as a number, summed over queries, for models that carry it themselves."""
    return _Loss.apply(kl, tuple(t.detach() for t in constants), *index)


def _along(x: Tensor, order: Tensor) -> Tensor:
    """The rows of x [B, S, ..] in another order, [B, S]."""
    return x.take_along_dim(order.view(*order.shape, *[1] * (x.dim() - 2)), 1)


@dataclass(frozen=True)
class Layout:
    """How the rows of a batch lie: every row a sequence, or all rows one after another, cut where sequences end.

    Attributes:
        ends: of queries, cumulative, without a leading 0; None: every row of the batch is a sequence. In a compiled graph a
            tensor, which the indexer's loss does not take.
        key_ends: of their keys.
        order: int64 [B, S], which token of its row comes at each place; None: they are in order.
    """

    ends: tuple[int, ...] | Tensor | None = None
    key_ends: tuple[int, ...] | Tensor | None = None
    order: Tensor | None = None

    @property
    def name(self) -> str:
        return "BSND" if self.ends is None else "TND"

    def rows(self, x: Tensor) -> Tensor:
        """A tensor [B, S, ..] as the operators take it."""
        x = x if self.order is None else _along(x, self.order)
        return x if self.ends is None else x.flatten(0, 1)

    def unpacked(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """A result of the operators for queries, as [B, S, ..] of ``shape``, whose last size is x's."""
        x = x.view(*shape[:-1], -1)
        return x if self.order is None else _along(x, self.order.argsort(1))

    def lists(self) -> dict[str, Any]:
        """Arguments of the operators that take lists of ends."""
        return {"layout": self.name, "actual_seq_qlen": self.ends, "actual_seq_klen": self.key_ends}

    def lengths(self, keys: str, device: torch.device) -> dict[str, Any]:
        """Arguments of the operators that take tensors of ends, named for queries and for ``keys``."""
        tensors = (
            None if ends is None else torch.as_tensor(ends, dtype=torch.int32, device=device)
            for ends in (self.ends, self.key_ends)
        )
        names = ("actual_seq_lengths_query", f"actual_seq_lengths_{keys}")
        return {
            "layout_query": self.name,
            f"layout_{keys}": self.name,
            **dict(zip(names, tensors, strict=True)),
        }


def layout(batch: int, ends: Sequence[int] | None, key_ends: Sequence[int] | None = None) -> Layout:
    """The layout of a batch, all rows one after another, whose queries and keys end there; None: one sequence a row."""
    if ends is None:
        return Layout()
    both = tuple(ends), tuple(key_ends or ends)
    if all(e == tuple(e[-1] // batch * (b + 1) for b in range(batch)) for e in both):
        return Layout()
    return Layout(*both)


def autocast(index: Index) -> Index:
    """An index with its queries and keys in autocast's dtype, where it is on; weights stay as wide as they are."""
    *both, weights = index
    return *functions.autocast(*both), weights


def freeze_others(model: nn.Module) -> None:
    """For the stage ``warmup``: of what is trained in a model, all but its indexers is frozen."""
    for name, parameter in model.named_parameters():
        if ".indexer." not in name:
            parameter.requires_grad_(False)


def learns(model: nn.Module) -> bool:
    """Whether any parameter of a model's indexers is trained."""
    return any(p.requires_grad and ".indexer." in name for name, p in model.named_parameters())


def weight_of(linear: nn.Module, width: int, like: Tensor) -> Tensor:
    """The matrix [out, in] by which a linear layer multiplies; ``width`` numbers go in.

    That of a plain layer is its weight; of any other, one with adapters say, it is what becomes of the unit vectors.
    """
    if isinstance(linear, nn.Linear) and not list(linear.children()):
        return linear.weight.to(like.dtype)
    return linear(torch.eye(width, dtype=like.dtype, device=like.device)).transpose(0, 1)


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """``x[.., n, :] @ weight[n]`` for every head n: [.., N, a] and [N, a, b] -> [.., N, b], by ``head_matmul``."""
    heads = len(weight)
    rows = x.movedim(-2, 0).flatten(0, -2)
    counts = torch.full((heads,), len(rows) // heads, dtype=torch.int64, device=x.device)
    out = torch.ops.jumar.head_matmul(rows, weight, counts)
    return out.view(heads, *x.shape[:-2], -1).movedim(0, -2)


def sparse_attention(
    query: tuple[Tensor, Tensor],
    latent: Tensor,
    k_pe: Tensor,
    weight: Tensor,
    index: Index,
    topk: int,
    scale: float,
    rows: Layout,
) -> tuple[Tensor, tuple[Tensor, ...], Kl]:
    """The heads' outputs [B, S, N, Dv], and the constants and function of the indexer's loss for :func:`learn`.

    Keys and values stay latent: their up-projection is taken into the query and out of the result, so that all heads
    share one key and one value. Shapes are those of the module's eager form: query [B, S, N, Dn] and [B, S, N, Dr], latent
    [B, S, R], k_pe [B, S, 1, Dr], weight [N (Dn + Dv), R].
    """
    q_nope, q_pe = query
    heads, nope = q_nope.shape[-2:]
    up = weight.unflatten(0, (heads, -1))
    key = latent.unsqueeze(2)
    out, constants, kl = latent_attention(
        per_head(q_nope, up[:, :nope]), key, key, q_pe, k_pe, index, topk, scale, rows
    )
    return per_head(out, up[:, nope:].transpose(1, 2)), constants, kl


def latent_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_pe: Tensor,
    k_pe: Tensor,
    index: Index,
    topk: int,
    scale: float,
    rows: Layout,
) -> tuple[Tensor, tuple[Tensor, ...], Kl]:
    """As :func:`sparse_attention`, of queries [B, S, N, R] and one key and value [B, S, 1, R] in latent space."""
    shape = query.shape
    # The loss, which is computed outside of autocast, gets what the attention has got.
    tensors = functions.autocast(query, key, value, q_pe, k_pe)
    query, key, value, q_pe, k_pe = (rows.rows(t) for t in tensors)
    with torch.no_grad():
        indices, _ = ops.npu_lightning_indexer(
            *(t.detach() for t in index), **rows.lengths("key", query.device), sparse_count=topk, sparse_mode=3
        )
    out, most, total = ops.npu_sparse_flash_attention(
        query,
        key,
        value,
        indices,
        scale,
        **rows.lengths("kv", query.device),
        query_rope=q_pe,
        key_rope=k_pe,
        sparse_mode=3,
        attention_mode=2,
        return_softmax_lse=True,
    )
    constants = (query, key, indices, most, total, q_pe, k_pe)
    return rows.unpacked(out, shape), constants, functools.partial(_sparse_kl, scale=scale, rows=rows)


def _sparse_kl(
    q: Tensor, k: Tensor, w: Tensor, query: Tensor, key: Tensor, indices: Tensor, most: Tensor, total: Tensor,
    q_pe: Tensor, k_pe: Tensor, *, scale: float, rows: Layout,
) -> tuple[Tensor, ...]:  # fmt: skip
    return ops.npu_sparse_lightning_indexer_grad_kl_loss(
        query, key, q, k, w, indices, most, total, scale, query_rope=q_pe, key_rope=k_pe, **rows.lists()
    )


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Layout
) -> tuple[Tensor, tuple[Tensor, ...], Kl]:
    """As :func:`sparse_attention`, over all keys up to the query: [B, S, N, D], value [B, S, N, Dv]."""
    q, k, v = (rows.rows(t) for t in functions.autocast(query, key, value))
    out, most, total, *_ = ops.npu_fusion_attention(
        q,
        k,
        v,
        query.shape[-2],
        rows.name,
        scale=scale,
        actual_seq_qlen=rows.ends,
        actual_seq_kvlen=rows.key_ends,
        softmax_layout="" if rows.ends is None else "TND",
        **attend.packed_band(query.device, None),
    )
    # [B, N, S, 8], or [T, N, 8]: each number eight times.
    statistics = [t[..., :1] if rows.ends is None else t[..., :1].transpose(0, 1) for t in (most, total)]
    return rows.unpacked(out, query.shape), (q, k, *statistics), functools.partial(_dense_kl, scale=scale, rows=rows)


def _dense_kl(
    q: Tensor, k: Tensor, w: Tensor, query: Tensor, key: Tensor, most: Tensor, total: Tensor, *, scale: float, rows: Layout
) -> tuple[Tensor, ...]:  # fmt: skip
    own = ops.npu_dense_lightning_indexer_softmax_lse(q, k, w, **rows.lists())
    return ops.npu_dense_lightning_indexer_grad_kl_loss(
        query, key, q, k, w, most, total, *own, scale, **rows.lists()
    )
