"""The output head and the loss of a torchtitan model in one operator."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import (
    IGNORE_INDEX,
    BaseLoss,
    ChunkedLossWrapper,
    CrossEntropyLoss,
)
from torchtitan.config.override import derive
from torchtitan.models.common.linear import Linear

from jumar import ops
from jumar.titan.modules import FusedLinear
from jumar.titan.nodes import Converter

_HEAD = "lm_head"
_PLAIN = (Linear, FusedLinear)


def _forward(self: nn.Module, input: Tensor, labels: Tensor | None = None) -> Tensor:
    """The head's logits, or with ``labels`` the summed loss: inside the module's hooks, so that FSDP gathers its weight."""
    if labels is None:
        return type(self).forward(self, input)
    return ops.linear_cross_entropy(
        input, self.weight, labels, self.bias, ignore_index=IGNORE_INDEX, reduction="sum"
    )


class FusedLinearLoss(ChunkedLossWrapper):
    """Summed cross-entropy of the model's hidden states by ``linear_cross_entropy``: no logits of a whole batch.

    It is torchtitan's wrapper, because the trainer hands that one the head and takes the hidden states instead of
    logits. Where the head's weight is sharded over the vocabulary, or the head is not a plain linear layer, it does
    what the wrapper does.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        pass

    fused = False

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Called by the trainer. A head with a forward of its own (tensor parallelism wraps it) stays as it is."""
        super().set_lm_head(lm_head)
        kind = next(c for c in type(lm_head).__mro__ if not issubclass(c, FSDPModule))
        self.fused = kind in _PLAIN and "forward" not in lm_head.__dict__
        if self.fused:
            lm_head.forward = types.MethodType(_forward, lm_head)

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, metrics), as torchtitan's losses: the sum over tokens, over ``global_valid_tokens`` where given."""
        if not self.fused or isinstance(pred, DTensor) or spmd.is_type_checking():
            return super().__call__(pred, labels, global_valid_tokens, **loss_inputs)
        loss = self.lm_head(pred, labels)
        if global_valid_tokens is not None:
            loss = loss / global_valid_tokens
        return loss, {}


class LossConverter(Converter):
    """``npu_loss``: its site is the output head; what changes in the configuration is the loss."""

    def nodes(self, root: Any) -> Iterator[tuple[str, Any]]:
        for path, node in super().nodes(root):
            if path.split(".")[-1] == _HEAD:
                yield path, node

    def built(self, module: nn.Module) -> bool:
        return getattr(module.__dict__.get("forward"), "__func__", None) is _forward

    def obstacle(self, config: Any) -> str | None:
        owner = type(config)._owner
        if owner in _PLAIN:
            return None
        return f"{owner.__qualname__} computes more than a linear layer"

    def convert(self, config: BaseLoss.Config) -> BaseLoss.Config:
        """The configuration of a loss, not of a head: cross-entropy, chunked or not, as the fused one."""
        if type(config) is CrossEntropyLoss.Config:
            return FusedLinearLoss.Config(loss_fn=config, num_chunks=1)
        if (
            type(config) is ChunkedLossWrapper.Config
            and type(config.loss_fn) is CrossEntropyLoss.Config
        ):
            return derive(config, FusedLinearLoss.Config)
        return config
