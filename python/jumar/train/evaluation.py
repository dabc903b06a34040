"""Evaluation while training: the mean loss over a set of held-out text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jumar import compat
from jumar.train import rng
from jumar.train.errors import JobError

compat.apply()

from torchtitan.components.validate import Validator


class _InStep:
    """Batches for as long as every data-parallel rank has one: the ranks' shares may differ by a few."""

    def __init__(self, loader: Any, mesh: Any, device: torch.device | str):
        self.loader, self.mesh, self.device = loader, mesh, device

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for batch in self._together(iter(self.loader)):
            count += 1
            yield batch
        if count == 0:
            raise JobError("validation.dataset_path holds less than one sequence of training.seq_len tokens a rank")

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            batch = next(batches, None)
            if self.mesh is not None:
                some = torch.tensor(int(batch is not None), device=self.device)
                dist.all_reduce(some, dist.ReduceOp.MIN, group=self.mesh.get_group())
                if not some.item():
                    return
            if batch is None:
                return
            yield batch


class _InStepConfig:
    """A data loader's configuration whose loader ends on all ranks together."""

    def __init__(self, config: Any, mesh: Any, device: torch.device | str):
        self.config, self.mesh, self.device = config, mesh, device

    def build(self, **kwargs: Any) -> _InStep:
        return _InStep(self.config.build(**kwargs), self.mesh, self.device)


class JobValidator(Validator):
    """torchtitan's validator, called before the checkpoint of a step is written rather than after it.

    A run that is killed between the two would lose the evaluation otherwise. It leaves the random numbers of training
    alone.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        last_step: int = 0
        """The last step of the job, which is evaluated too."""

    def __init__(self, config: Config, **kwargs: Any):
        super().__init__(config, **kwargs)
        dims = self.parallel_dims
        mesh = dims.get_mesh("batch") if dims.dp_enabled else None
        self.dl_config = _InStepConfig(self.dl_config, mesh, compat_device())

    def due(self, step: int) -> bool:
        """Whether a step is evaluated: every ``freq`` steps, and the last one."""
        return step % self.config.freq == 0 or step == self.config.last_step

    def should_validate(self, step: int) -> bool:
        """False: torchtitan's loop asks after the checkpoint."""
        return False

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        with rng.untouched():
            super().validate(model_parts, step)


def compat_device() -> str:
    """The kind of device that torchtitan trains on."""
    from torchtitan.tools.utils import device_type

    return device_type
