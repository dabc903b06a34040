"""``npu_loss``: the output head and the loss of causal language models in one operator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jumar import ops
from jumar.convert import swap
from jumar.convert.registry import ModuleConverter, register
from jumar.convert.report import Site
from jumar.convert.verdict import Match, Miss
from jumar.convert.verify import Trial
from jumar.hf import heads, probe
from jumar.hf.logits import LazyLogits, lazy_head


class _FusedLoss:
    """transformers' causal loss, by ``linear_cross_entropy`` where it gets the head's very output."""

    def __init__(self, original: Any, seen: list[bool] | None):
        self.original, self.seen = original, seen
        functools.update_wrapper(self, original)

    @torch._dynamo.disable
    def __call__(
        self, logits: Tensor, labels: Tensor, vocab_size: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        lazy = isinstance(logits, LazyLogits) and logits.pending
        if self.seen is not None:
            self.seen.append(lazy)
            return torch.zeros((), device="cpu")
        if lazy and not args:
            loss = _fused(logits, labels, vocab_size, **kwargs)
            if loss is not None:
                return loss
        return self.original(logits, labels, vocab_size, *args, **kwargs)


def _fused(
    logits: LazyLogits,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """The loss by transformers' rules for shifting and dividing; None where its own code has to say what is wrong."""
    head, hidden = logits.head, logits.hidden
    if shift_labels is None:
        # Token i predicts token i + 1; the last one predicts nothing.
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1)
    if vocab_size != head.weight.shape[0] or target.numel() * hidden.shape[-1] != hidden.numel():
        return None
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(hidden.device)
    return ops.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        head.weight,
        target.to(hidden.device),
        head.bias,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        divisor=num_items_in_batch,
    )


@functools.partial(torch._dynamo.disable, recursive=False)
def _forward_with_lazy_head(
    forward: Any, head: nn.Module, self: nn.Module, args: tuple, kwargs: dict
) -> Any:
    if not heads.plain_now(head):
        return forward(self, *args, **kwargs)
    with lazy_head(head):
        return forward(self, *args, **kwargs)


class LossConverter(ModuleConverter):
    name = "npu_loss"
    aliases = ("loss",)
    operators = ("linear_cross_entropy",)
    summary = "output head and loss of a causal language model; logits are computed when somebody looks at them"

    def recognise(self, module: nn.Module) -> Match | Miss | None:
        cls = type(module)
        if not heads.takes_labels(cls) or not hasattr(module, "get_output_embeddings"):
            return None
        if not heads.is_causal_loss(module.loss_function):
            foreign = "_loss_function" in module.__dict__
            return Miss("its loss function was set by somebody else") if foreign else None
        found = heads.head_of(module)
        if found is None:
            return Miss("its output head is not a child of its own")
        reason = heads.head_obstacle(found[1])
        if reason is not None:
            return Miss(reason)
        match = Match(self.operators[0], (found[0],))
        patch = swap.Patch(self.name, match.operator, match.key)
        reason = heads.sees_plain_logits(module, swap.patched_class(module, patch))
        return match if reason is None else Miss(reason)

    def trials(self, site: Site) -> Iterable[Trial]:
        module, patch = site.action.module, site.action.patch
        classes = heads.head_of(module)[1].weight.shape[0]
        labels = torch.arange(6, device="cpu").view(2, 3) % classes

        def loss(cls: type) -> Any:
            def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                model = heads.trial_model(module, cls, hidden, weight, bias)
                return heads.call(model, labels).loss.reshape(1)

            return run

        yield Trial(
            loss(type(module)),
            loss(swap.patched_class(module, patch)),
            (
                probe.randn(2, 3, 5, seed=32),
                probe.randn(classes, 5, seed=33),
                probe.randn(classes, seed=34),
            ),
        )

    def namespace(self, key: tuple, base: type) -> dict:
        original = base.forward
        place = list(inspect.signature(original).parameters).index("labels") - 1

        @functools.wraps(original)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            labels = args[place] if len(args) > place else kwargs.get("labels")
            if labels is None:
                return original(self, *args, **kwargs)
            return _forward_with_lazy_head(original, self._modules[key[0]], self, args, kwargs)

        def loss_function(self: nn.Module) -> Any:
            loss = base.loss_function.fget(self)
            if not heads.is_causal_loss(loss):
                return loss
            return _FusedLoss(loss, self.__dict__.get("_jumar_probe"))

        return {
            "forward": forward,
            "loss_function": property(loss_function, base.loss_function.fset),
        }


register(LossConverter())
