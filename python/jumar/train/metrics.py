"""Metrics of a job: a record a step as JSON lines, and a progress line with the time that is left."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jumar import compat
from jumar.train.records import Records, of_step

compat.apply()

from torchtitan.components.metrics import MetricsProcessor, _get_metrics_rank


class JobMetrics(MetricsProcessor):
    """torchtitan's metrics, with records and a progress line of its own.

    Attributes:
        records: what this run wrote, in order; on the rank that knows the loss, empty on others.
        earlier: the records of the steps before, when the run was resumed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        jsonl: str | None = None
        """File of records, one JSON object a logged step; a resumed run goes on after the step it resumes from."""

        steps: int = 0
        """Steps of the whole job, for the time that is left."""

        label: str = ""
        """Shown at the start of the progress line."""

        progress: bool = True
        """Whether to print the progress line."""

        validation_freq: int = 0
        """Steps between evaluations, which are logged whatever ``log_freq``; 0: none."""

    def __init__(self, config: Config, **kwargs: Any):
        super().__init__(config, **kwargs)
        rank = _get_metrics_rank(
            parallel_dims=self.parallel_dims, pp_schedule=kwargs.get("pp_schedule", "1F1B")
        )
        self.speaks = torch.distributed.get_rank() == rank
        file = Path(config.jsonl) if self.speaks and config.jsonl else None
        self.log_file = Records(file, config.steps, label=config.label, progress=config.progress)
        self._pending: dict[str, Any] | None = None
        self._last_step = 0

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.log_file.written

    @property
    def earlier(self) -> list[dict[str, Any]]:
        return self.log_file.earlier

    def resume(self, step: int) -> None:
        """Opens the file of records and drops those after ``step``: a killed run was ahead of its last checkpoint."""
        self._last_step = step
        self.log_file.resume(step)

    def should_log(self, step: int) -> bool:
        """Every ``log_freq`` steps, the first, the last, and those that are evaluated."""
        freq = self.config.validation_freq
        return super().should_log(step) or step == self.config.steps or bool(freq and step % freq == 0)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Called by the trainer for every logged step."""
        seconds = time.perf_counter() - self.time_last_log
        dims = self.parallel_dims
        tokens = self.ntokens_since_last_log * dims.dp_replicate * dims.dp_shard
        extra = extra_metrics or {}
        rates = [value for name, value in extra.items() if name.startswith("lr/")]
        self._pending = of_step(
            seconds,
            step - self._last_step,
            tokens,
            step=step,
            loss=global_avg_loss,
            max_loss=global_max_loss,
            grad_norm=grad_norm,
            lr=rates[0] if rates else None,
            tokens_seen=extra.get("n_tokens_seen"),
        )
        self._last_step = step
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Called by the validator: the loss goes into the record of the step."""
        super().log_validation(loss, step, extra_metrics)
        if self._pending is not None:
            self._pending["validation_loss"] = loss

    def note(self, values: dict[str, Any]) -> None:
        """Adds to the record of the step that was logged."""
        if self._pending is not None:
            self._pending |= values

    def commit(self) -> None:
        """Writes the record of a step, and the progress line."""
        record, self._pending = self._pending, None
        if record is None or not self.speaks:
            return
        self.log_file.add(record)

    def sync(self) -> None:
        """Waits until the records are on the disk."""
        self.log_file.sync()

    def close(self) -> None:
        """Closes the records."""
        super().close()
        self.log_file.close()
