"""torchtitan's trainer with what a job adds: evaluation, exact resuming, an orderly end on a signal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jumar import compat
from jumar.train import experts, indexers, pace, rng
from jumar.train.signals import Stop

compat.apply()

from torchtitan.trainer import Trainer

from jumar.titan.optimizer import clipping


class JobTrainer(Trainer):
    """A step is: train, evaluate when due, write its record, save when due.

    A record is therefore always written before the checkpoint of its step, and a resumed run drops the records of later
    steps: together they give one record a step, whenever a run is killed.

    Attributes:
        stop: set by a signal; read after every step, by all ranks together.
        stopping: the run ends after this step.
        load: tokens per expert; empty for a model without experts.
        indexer_loss: that of a model with sparse attention.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config):
        self.stop, self.stopping = Stop(), False
        rng.seed(config.debug.seed or 0)
        super().__init__(config)
        self.checkpointer.before_save = self.metrics_processor.sync
        self.load = experts.ExpertLoad(self.model_parts, self.model_config, self.parallel_dims, self.device)
        passes = self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches
        self.indexer_loss = indexers.of_parts(self.model_parts, self.model_config, self.parallel_dims, passes)

    def batch_generator(self, data_iterable: Iterable) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """torchtitan's. It is called when a checkpoint was loaded and no step begun: all goes on from there."""
        self.metrics_processor.resume(self.step)
        batches = iter(data_iterable)  # draws a random number
        self.checkpointer.rng.apply()
        return super().batch_generator(batches)

    def forward_backward_step(self, *, global_valid_tokens: Tensor, **kwargs: Any) -> Tensor:
        """torchtitan's; a batch whose every label is ignored has loss 0, not 0 / 0."""
        loss = super().forward_backward_step(global_valid_tokens=global_valid_tokens.clamp(min=1), **kwargs)
        self.load.read()
        return loss

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        pace.step_begins()
        self.checkpointer.raise_failed()
        self.load.begin()
        self.indexer_loss.begin()
        with clipping(self.optimizers):
            super().train_step(data_iterator)
        if self.metrics_processor.should_log(self.step):
            if self.load:
                self.metrics_processor.note(experts.summary(self.load.total()))
            if self.indexer_loss:
                self.metrics_processor.note({"indexer_loss": self.indexer_loss.mean()})
        if self.config.validator.enable and self.validator.due(self.step):
            self.validator.validate(self.model_parts, self.step)
        self.metrics_processor.commit()
        self.stopping = self.checkpointer.stopping = self._asked_to_stop()

    def _asked_to_stop(self) -> bool:
        asked = self.stop.signal is not None
        if dist.get_world_size() == 1:
            return asked
        votes = torch.tensor(int(asked), device=self.device)
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes.item())

    def should_continue_training(self) -> bool:
        """False after the last step, and when the run was asked to end."""
        if not super().should_continue_training():
            return False
        # Before the first step no rank has voted.
        return not (self.stopping or (dist.get_world_size() == 1 and self.stop.signal))

    def train(self) -> None:
        super().train()
        self.checkpointer.maybe_wait_for_saving()
