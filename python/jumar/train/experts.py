"""How a mixture of experts shares out its tokens: counts per expert of a step, over all ranks, and how even they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jumar.dtensor import local


def balance(counts: Sequence[float]) -> float:
    """The busiest expert's tokens over the mean: 1 when all have the same; 0 when there are no tokens."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 0.0


def summary(layers: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What the record of a step says of counts by layer."""
    values = [balance(counts) for counts in layers.values()]
    return {
        "expert_balance": sum(values) / len(values),
        "expert_balance_worst": max(values),
        "tokens_per_expert": {name: list(counts) for name, counts in layers.items()},
    }


class ExpertLoad:
    """Counts of the step that is under way, from the buffers that torchtitan's ``MoE`` keeps.

    The optimizer's step takes them away, so they are read between the backward pass and it.
    """

    def __init__(self, parts: Iterable[nn.Module], config: Any, dims: Any, device: torch.device):
        """``parts``: the stages of the model that are here; ``config``: that of the whole model; ``dims``: torchtitan's."""
        self.parts, self.dims = list(parts), dims
        mixtures = [getattr(layer, "moe", None) for layer in getattr(config, "layers", [])]
        self.names = [str(i) for i, moe in enumerate(mixtures) if moe is not None]
        experts = max((moe.num_experts for moe in mixtures if moe is not None), default=0)
        self._counts = torch.zeros(len(self.names), experts, device=device)

    def __bool__(self) -> bool:
        return bool(self.names)

    def _layers(self) -> Iterator[tuple[int, nn.Module]]:
        for part in self.parts if self.names else []:
            for name, block in part.layers.items():
                if getattr(block, "moe_enabled", False):
                    yield self.names.index(name), block

    @torch.no_grad()
    def begin(self) -> None:
        """A step begins: nobody else takes the counts away where the model has no expert bias to update."""
        for _, block in self._layers():
            block.moe.tokens_per_expert_E.zero_()

    @torch.no_grad()
    def read(self) -> None:
        """Keeps what was counted since :meth:`begin`."""
        for index, block in self._layers():
            counts = local(block.moe.tokens_per_expert_E)
            # A layer that is computed again in backward has counted twice.
            again = getattr(block, "checkpoint_impl", None) is not None
            self._counts[index, : counts.numel()] = counts / 2 if again else counts

    def total(self) -> dict[str, list[int]]:
        """Counts of every layer that has experts, by its number, over all ranks. Every rank must call it."""
        counts = self._counts.clone()
        # Under expert parallelism tensor-parallel ranks have tokens of their own, else the same ones.
        names = ["loss", "pp", *(["tp"] if self.dims.ep_enabled else [])]
        for mesh in filter(None, map(self.dims.get_optional_mesh, names)):
            dist.all_reduce(counts, group=mesh.get_group())
        return {name: counts[i].long().tolist() for i, name in enumerate(self.names)}
