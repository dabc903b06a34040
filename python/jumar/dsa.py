"""The indexer's loss of DeepSeek sparse attention, carried by the backward pass of the attention that it learns from.

The indexer sees its inputs detached, and nothing of the language-model loss reaches it: the keys that it chooses have no
gradient. It learns from a loss of its own, per query the Kullback-Leibler divergence of its distribution over the keys from
the attention's. That loss needs no place in the model's output: :func:`learn` returns the attention as it is, and where its
gradient arrives, adds the loss's gradients to the indexer's outputs. It is computed there and nowhere else, so that activation
checkpointing, which computes the forward pass again, does not compute the loss twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Meter:
    """The indexer's loss of one layer, summed over the queries of a backward pass, for each one since :meth:`take`."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Adds a loss of one element."""
        self.losses.append(loss.detach().reshape(()))

    def take(self, passes: int | None = None) -> Tensor:
        """The sum over all backward passes, or the last ``passes`` of them; the list begins again at none."""
        losses, self.losses = self.losses[-(passes or 0) :], []
        return sum(losses, torch.zeros(()))


class _Learn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, kl: Callable, factor: float, meter: Meter, *tensors: Tensor) -> Tensor:
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
    out: Tensor,
    index: tuple[Tensor, Tensor, Tensor],
    constants: tuple[Tensor | None, ...],
    kl: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    factor: float,
    meter: Meter,
) -> Tensor:
    """``out``, whose backward pass gives the indexer its gradients.

    Args:
        out: the attention's output.
        index: the indexer's queries, keys and weights.
        constants: what else the loss needs; no gradient flows to it.
        kl: from ``index`` and ``constants`` the gradients of the three, and the loss; sums over the queries, all of them.
        factor: of the gradients: the loss's weight over the queries of a whole step, so that a batch in parts gives the
            gradients of the batch.
        meter: adds the loss up.
    """
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in index)):
        return out
    return _Learn.apply(out, kl, factor, meter, *index, *(t if t is None else t.detach() for t in constants))
