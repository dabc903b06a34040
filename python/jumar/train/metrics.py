"""Metrics of a job: a record a step as JSON lines, and a progress line with the time that is left."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jumar import compat
from jumar.train.text import duration

compat.apply()

from torchtitan.components.metrics import MetricsProcessor, _get_metrics_rank  # noqa: E402

# Steps whose times give the estimate of what is left.
_WINDOW = 20


class JobMetrics(MetricsProcessor):
    """torchtitan's metrics, with records and a progress line of its own.

    Attributes:
        records: what was written, in order; on the rank that knows the loss, empty on others.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        jsonl: str | None = None
        """File of records, one JSON object a logged step; appended to when training resumes."""

        steps: int = 0
        """Steps of the whole job, for the time that is left."""

        label: str = ""
        """Shown at the start of the progress line."""

        progress: bool = True
        """Whether to print the progress line."""

    def __init__(self, config: Config, **kwargs: Any):
        super().__init__(config, **kwargs)
        rank = _get_metrics_rank(
            parallel_dims=self.parallel_dims, pp_schedule=kwargs.get("pp_schedule", "1F1B")
        )
        self.speaks = torch.distributed.get_rank() == rank
        self.records: list[dict[str, Any]] = []
        self._file = None
        self._last_step = 0
        if self.speaks and config.jsonl:
            Path(config.jsonl).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(config.jsonl, "a", encoding="utf-8")

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
        # A resumed run starts in the middle.
        steps = step - self._last_step if self._last_step else 1
        self._last_step = step
        record = {
            "step": step,
            "loss": global_avg_loss,
            "max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "lr": rates[0] if rates else None,
            "seconds_per_step": seconds / steps,
            "tokens_per_second": tokens / seconds,
            "tokens_seen": extra.get("n_tokens_seen"),
        }
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if not self.speaks:
            return
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self.config.progress:
            self._progress(record)

    def _progress(self, record: dict[str, Any]) -> None:
        # The first step carries set-up (and compilation), so it says little about the next ones.
        times = [r["seconds_per_step"] for r in self.records[1:]][-_WINDOW:] or [record["seconds_per_step"]]
        left = statistics.median(times) * (self.config.steps - record["step"])
        width = len(str(self.config.steps))
        line = (
            f"{self.config.label}step {record['step']:{width}}/{self.config.steps}  loss {record['loss']:.4f}  "
            f"grad norm {record['grad_norm']:.3f}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"left {duration(left)}"
        )
        if sys.stderr.isatty():
            end = "\n" if record["step"] >= self.config.steps else ""
            sys.stderr.write(f"\r\x1b[K{line}{end}")
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Closes the records."""
        super().close()
        if self._file is not None:
            self._file.close()
            self._file = None
