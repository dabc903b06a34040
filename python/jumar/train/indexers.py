"""The indexers of sparse attention in a job: its keys, and their loss of a step, over all layers and ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jumar.dsa import Meter
from jumar.train.errors import JobError
from jumar.train.job import Job

WARMUP = "warmup"


def given(job: Job) -> dict[str, Any]:
    """``stage`` and ``loss_coeff``, where the job gives them. JobError where they leave nothing to train."""
    section = job["model"]
    if section["indexer_stage"] == WARMUP and section["indexer_loss_coeff"] == 0:
        raise JobError("model.indexer_stage = 'warmup' trains the indexers alone, and model.indexer_loss_coeff is 0")
    found = {name: section[f"indexer_{name}"] for name in ("stage", "loss_coeff")}
    return {name: value for name, value in found.items() if value is not None}


def absent(job: Job, model: str) -> JobError:
    """The error of a job that gives keys of indexers to a model that has none."""
    name, value = next(iter(given(job).items()))
    return JobError(f"model.indexer_{name} = {value!r}: {model} has no indexers")


def untrained(job: Job) -> JobError:
    """The error of a job that gives keys of indexers, and has adapters on none of their layers."""
    return JobError(
        f"model.indexer_{next(iter(given(job)))}: lora.target_modules names no layer of the indexers, so nothing of them is trained"
    )


def stamp(job: Job) -> str:
    """What the name of a model in checkpoints ends with: another stage trains other parameters."""
    return " (warm-up of its indexers)" if job["model"]["indexer_stage"] == WARMUP else ""


class IndexerLoss:
    """What the meters of a model's sparse attention have added up in the step that is under way.

    Attributes:
        queries: of the step, over all layers and ranks; 0: no indexer learns.
    """

    def __init__(self, meters: Iterable[Meter], passes: int, *, queries: int = 0, groups: Iterable[Any] = ()):
        """``passes``: backward passes of a step; ``groups``: the processes whose losses are added up."""
        self.meters, self.passes, self.queries, self.groups = list(meters), passes, queries, list(groups)

    def __bool__(self) -> bool:
        return self.queries > 0

    def begin(self) -> None:
        """A step begins."""
        for meter in self.meters:
            meter.take()

    def mean(self) -> float:
        """The mean over the queries and layers of the whole step, over all ranks. Every rank must call it."""
        total = sum((meter.take(self.passes) for meter in self.meters), torch.zeros(())).double()
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total.item() / self.queries


def of_parts(parts: Iterable[nn.Module], config: Any, dims: Any, passes: int) -> IndexerLoss:
    """The loss of torchtitan's model.

    ``parts``: the stages of the model that are here; ``config``: that of the whole model; ``dims``: torchtitan's. A
    pipeline's stage runs once more before its first step, to learn its shapes, on memory as it lies, so that only the last
    ``passes`` backward passes count.
    """
    modules = (module for part in parts for module in part.modules())
    meters = [meter for m in modules if isinstance(meter := getattr(m, "meter", None), Meter)]
    attentions = (getattr(layer, "attention", None) for layer in getattr(config, "layers", []))
    inner = [getattr(attention, "inner_attention", None) for attention in attentions]
    queries = sum(n.step_queries for n in inner if hasattr(n, "step_queries") and n.loss_coeff)
    meshes = filter(None, map(dims.get_optional_mesh, ("loss", "pp")))
    return IndexerLoss(meters, passes, queries=queries, groups=[mesh.get_group() for mesh in meshes])
