"""Takes traces of training steps: torch.profiler on a schedule, with the machine's limits and a table beside each trace."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from jumar.limits import Limits, measure
from jumar.profile.table import table
from jumar.profile.trace import METADATA, TraceError, read

log = logging.getLogger("jumar.train")

# Kineto reports every start and stop on standard error; the first use of it reads this.
_QUIET = ("KINETO_LOG_LEVEL", "99")
_RECORD = (torch.profiler.ProfilerAction.RECORD, torch.profiler.ProfilerAction.RECORD_AND_SAVE)


@dataclass(frozen=True)
class Settings:
    """The keys of ``[profiling]``, under torchtitan's names.

    In every cycle of ``profile_freq`` steps the last ``profiler_active`` are recorded, after ``profiler_warmup`` steps
    that warm the profiler up. ``profiler_repeat`` bounds the cycles; None: all of them.
    """

    enable_profiling: bool = True
    save_traces_folder: str = "profiling/traces"
    profile_freq: int = 10
    profiler_active: int = 1
    profiler_warmup: int = 3
    profiler_repeat: int | None = None
    profiler_skip_first: int | None = None
    profiler_skip_first_wait: int | None = None

    def schedule(self) -> Any:
        """torch.profiler's schedule. ValueError when a cycle is shorter than what is to happen in it."""
        wait = self.profile_freq - self.profiler_active - self.profiler_warmup
        if wait < 0:
            raise ValueError(
                f"profile_freq = {self.profile_freq} is less than profiler_warmup = {self.profiler_warmup} "
                f"and profiler_active = {self.profiler_active} together"
            )
        more = {
            name: getattr(self, f"profiler_{name}")
            for name in ("repeat", "skip_first", "skip_first_wait")
            if getattr(self, f"profiler_{name}") is not None
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that without a warm-up the first recorded step is slower: it was asked for
            return torch.profiler.schedule(
                wait=wait, warmup=self.profiler_warmup, active=self.profiler_active, **more
            )

    def recorded(self, first: int, last: int) -> bool:
        """Whether any step from ``first`` to ``last`` (counted from 1) is recorded."""
        schedule = self.schedule()
        return any(schedule(step - 1) in _RECORD for step in range(first, last + 1))


class _Profile(torch.profiler.profile):
    """torch's profiler, which notes in each trace the limits of the machine, and the bytes that optimizers move.

    Of lists of tensors, as optimizers take them, torch records no dtypes, and of long ones nothing.
    """

    limits: Limits
    optimizers: dict[str, int]

    def prepare_trace(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that events of earlier cycles are forgotten, which is what we want
            super().prepare_trace()

    def start_trace(self) -> None:
        self.optimizers = {}
        super().start_trace()

    def stop_trace(self) -> None:
        # The step is over. Once more: another process may have disturbed the first measurement.
        self.limits = self.limits.better(measure(quick=True))
        notes = {"limits": asdict(self.limits), "optimizers": self.optimizers}
        self.add_metadata_json(METADATA, json.dumps(notes))
        super().stop_trace()

    def note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called after every step of every optimizer."""
        if self.current_action in _RECORD:
            for group in optimizer.param_groups:
                name = _step_operator(optimizer, group)
                if name is not None:
                    self.optimizers[name] = self.optimizers.get(name, 0) + _step_bytes(optimizer, group)


def _step_operator(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    """The operator that takes the step of a group in one pass; None where there is none."""
    if type(optimizer).__module__.startswith("jumar.optim"):
        return "jumar::adamw_"
    if isinstance(optimizer, torch.optim.Adam) and group.get("fused"):
        return "aten::_fused_adamw_" if group.get("decoupled_weight_decay") else "aten::_fused_adam_"
    return None


def _step_bytes(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """Parameters and states are read and written, gradients read: of distributed tensors what is here."""

    def size(tensor: torch.Tensor) -> int:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return local.numel() * local.itemsize

    moved = 0
    for p in group["params"]:
        if p.grad is not None:
            states = [t for t in optimizer.state.get(p, {}).values() if isinstance(t, torch.Tensor) and t.dim() > 0]
            moved += size(p.grad) + 2 * sum(size(t) for t in (p, *states))
    return moved


class StepProfiler:
    """``with StepProfiler(settings, folder) as session:`` and ``session.step()`` after every training step.

    Writes ``FOLDER/save_traces_folder/iteration_STEP/rankRANK_trace.json.gz``, and beside it ``rankRANK_operators.csv``
    and ``.json``. Each file appears whole. What cannot be written is a warning: training goes on.

    Attributes:
        traces: the traces that were written, in order.
    """

    def __init__(self, settings: Settings, folder: str | Path, *, rank: int = 0, step: int = 0):
        """``step``: the steps that were done before, when a run is resumed."""
        self.settings, self.rank, self.first = settings, rank, step
        self.folder = Path(folder) / settings.save_traces_folder
        self.traces: list[Path] = []
        self._profiler: _Profile | None = None
        self._recorded = 0  # whole steps in the window that is being recorded

    def __enter__(self) -> StepProfiler:
        if not self.settings.enable_profiling:
            return self
        for left in self.folder.glob(f"iteration_*/.*.rank{self.rank}_*"):  # by a killed run
            left.unlink(missing_ok=True)
        os.environ.setdefault(*_QUIET)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = _Profile(
            activities=activities,
            schedule=self.settings.schedule(),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        # Before the first step, not beside a recorded one: it would slow that down.
        self._profiler.limits = measure(quick=True)
        self._profiler.step_num = self.first
        self._profiler.current_action = self._profiler.schedule(self.first)
        self._hook = register_optimizer_step_post_hook(self._profiler.note)
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Writes what was recorded so far when a run ends within a recorded step."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._hook.remove()
        # Between two steps, the next one has not begun: a window without steps is nothing to write.
        if not any(error) and not self._recorded:
            profiler.on_trace_ready = None
        profiler.__exit__(*error)

    def step(self) -> None:
        """Call it after every training step."""
        if self._profiler is not None:
            self._recorded += self._profiler.current_action in _RECORD
            self._profiler.step()

    def _write(self, profiler: Any) -> None:
        self._recorded = 0
        folder = self.folder / f"iteration_{profiler.step_num}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"rank{self.rank}_trace.json.gz"
            # export_chrome_trace compresses when the name says so.
            with _whole(file) as place:
                profiler.export_chrome_trace(str(place))
            self.traces.append(file)
            found = table(read(file))
            for suffix, text in (("csv", found.to_csv()), ("json", found.to_json())):
                with _whole(folder / f"rank{self.rank}_operators.{suffix}") as place:
                    place.write_text(text, encoding="utf-8")
        except (OSError, TraceError) as error:
            log.warning("the profile of step %d is not whole: %s", profiler.step_num, error)


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """Gives a file beside ``file``, which takes its name when the body ends well."""
    place = file.with_name(f".{os.getpid()}.{file.name}")
    try:
        yield place
        os.replace(place, file)
    finally:
        place.unlink(missing_ok=True)


@contextlib.contextmanager
def profiling(
    settings: Settings | dict[str, Any] | None, folder: str | Path, *, rank: int = 0, step: int = 0
) -> Iterator[StepProfiler]:
    """A :class:`StepProfiler` for ``settings``, or for the section ``[profiling]`` of a job.

    >>> with profiling(job["profiling"], job.dump_folder, rank=rank, step=done) as session:
    ...     for _ in range(steps):
    ...         train_step()
    ...         session.step()

    With ``enable_profiling = false``, or None for settings, ``step`` does nothing.
    """
    if settings is None:
        settings = Settings(enable_profiling=False)
    elif isinstance(settings, dict):
        settings = Settings(**settings)
    with StepProfiler(settings, folder, rank=rank, step=step) as session:
        yield session
