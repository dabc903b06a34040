"""The loss of the indexers of sparse attention: of a step, over all layers and ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jumar.dsa import Meter


class IndexerLoss:
    """What the meters of a model's sparse attention have added up in the step that is under way."""

    def __init__(self, parts: Iterable[nn.Module], config: Any, dims: Any, passes: int):
        """``parts``: the stages of the model that are here; ``config``: that of the whole model; ``dims``: torchtitan's.

        ``passes``: backward passes of a step. A pipeline's stage runs once more before its first step, to learn its
        shapes, on memory as it lies.
        """
        self.dims, self.passes = dims, passes
        modules = (module for part in parts for module in part.modules())
        self.layers = [m for m in modules if isinstance(getattr(m, "meter", None), Meter)]
        attentions = (getattr(layer, "attention", None) for layer in getattr(config, "layers", []))
        inner = [getattr(attention, "inner_attention", None) for attention in attentions]
        self.queries = sum(n.step_queries for n in inner if hasattr(n, "step_queries") and n.loss_coeff)

    def __bool__(self) -> bool:
        return self.queries > 0

    def begin(self) -> None:
        """A step begins."""
        for layer in self.layers:
            layer.meter.take()

    def mean(self) -> float:
        """The mean over the queries and layers of the whole step, over all ranks. Every rank must call it."""
        total = sum((layer.meter.take(self.passes) for layer in self.layers), torch.zeros(())).double()
        for mesh in filter(None, map(self.dims.get_optional_mesh, ("loss", "pp"))):
            dist.all_reduce(total, group=mesh.get_group())
        return total.item() / self.queries
