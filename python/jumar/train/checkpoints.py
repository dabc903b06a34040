"""torchtitan's checkpoints, made to survive kills, full disks and damage.

torchtitan and torch.distributed.checkpoint write and read the states. Here: where they are written (a temporary name, then
:func:`jumar.train.durable.seal`), which one is resumed from, what is kept, and what is said when something is wrong.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from jumar import compat
from jumar.train import durable, resume
from jumar.train.errors import JobError
from jumar.train.rng import RngState

compat.apply()

from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import CheckpointManager

log = logging.getLogger("jumar.train")

RNG = "rng"


def _everywhere(value: Any) -> Any:
    """The first rank's value, on every rank."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _first(error: BaseException) -> BaseException:
    """The error of one rank, where torch.distributed.checkpoint collected those of all."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


@contextlib.contextmanager
def _clear_errors(path: Path, place: Path) -> Iterator[None]:
    with durable.clear_errors(path, place=place):
        try:
            yield
        except CheckpointException as error:
            if durable.disk_full(error, place):
                raise
            raise RuntimeError(f"checkpoint {path} could not be written: {_first(error)}") from error


class DurableCheckpoints(CheckpointManager):
    """torchtitan's manager; each checkpoint is whole or absent.

    Attributes:
        stopping: True makes the next call of ``save`` write a checkpoint whatever the step.
        resumed_from: the folder that was loaded, or None.
        before_save: called before anything is written.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        stamp: dict[str, Any] = field(default_factory=dict)
        """What the job is, written beside the states and compared when they are loaded."""

        resume: str = "auto"
        """"auto": from the newest; "must": there has to be one; "never": there must be none."""

    def __init__(self, config: Config, **kwargs: Any):
        self.stopping = False
        self.resumed_from: Path | None = None
        self.before_save = lambda: None
        self._place: Path | None = None
        self._source: Path | None = None
        self.stamp, self.resume = config.stamp, config.resume
        # Old checkpoints go by a rename, after the new one is sealed; torchtitan's thread removes file by file.
        super().__init__(replace(config, keep_latest_k=0), **kwargs)
        self.rng = RngState(dist.get_rank())
        if not self.enable:
            return
        self.keep = config.keep_latest_k
        self.first = dist.get_rank() == 0
        self.states[RNG] = self.rng
        self._pid = _everywhere(os.getpid())

    # Saving.

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return super()._should_save(curr_step, last_step) or (self.stopping and not self.load_only)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return str(self._place) if self._place else super()._create_checkpoint_id(step, folder)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        self.before_save()
        path = Path(self.folder) / f"step-{curr_step}"
        place = path.with_name(f".{path.name}.tmp-{self._pid}")
        stamp = {**self.stamp, "step": curr_step, "model_only": last_step and self.last_save_model_only}
        try:
            with _clear_errors(path, place):
                if self.first:
                    shutil.rmtree(place, ignore_errors=True)
                    place.mkdir(parents=True)
                    resume.write_stamp(place, stamp)
                if dist.get_world_size() > 1:
                    dist.barrier()
                self._place = place
                super()._save(curr_step, last_step)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        finally:
            self._place = None
        if self.save_future is not None:
            self.save_future = self._sealed_later(self.save_future, place, path)
            return True
        error = None
        if self.first:
            try:
                self._seal(place, path)
            except JobError as caught:
                error = str(caught)
        error = _everywhere(error)
        if error:
            raise durable.DiskFull(error)
        return True

    def _seal(self, place: Path, path: Path) -> None:
        durable.seal(place, path)
        durable.keep_latest(path.parent, self.keep)

    def _sealed_later(self, written: Future, place: Path, path: Path) -> Future:
        """A future of the sealed checkpoint; sealing runs in the thread that wrote it."""
        sealed: Future = Future()

        def finish(written: Future) -> None:
            try:
                with _clear_errors(path, place):
                    written.result()
                    if self.first:
                        self._seal(place, path)
            except BaseException as error:
                shutil.rmtree(place, ignore_errors=True)
                sealed.set_exception(error)
            else:
                sealed.set_result(None)

        written.add_done_callback(finish)
        return sealed

    def raise_failed(self) -> None:
        """Raises what went wrong in the background, if it is known by now."""
        if self.enable and self.save_future is not None and self.save_future.done():
            self.maybe_wait_for_saving()

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None
        future.result()

    def _close(self) -> None:
        future, self.save_future = getattr(self, "save_future", None), None
        if future is not None:
            future.exception()
        super()._close()

    # Loading.

    def _load(self, step: int = -1) -> bool:
        chosen: Path | None = None
        error: JobError | None = None
        if self.first:
            try:
                chosen = self._choose(step)
            except JobError as caught:
                error = caught
        chosen, error = _everywhere((chosen, error))
        if error is not None:
            raise error
        self.resumed_from = chosen
        self._source = chosen or (Path(self.initial_load_path) if self.initial_load_path else None)
        self._chosen = -1 if chosen is None else int(chosen.name.removeprefix("step-"))
        try:
            return super()._load(-1)
        except (OSError, RuntimeError, ValueError, AssertionError, CheckpointException) as caught:
            raise JobError(f"checkpoint {self._source} cannot be loaded: {_first(caught)}") from caught

    def _find_load_step(self, folder: str = "") -> int:
        return self._chosen

    def _choose(self, step: int) -> Path | None:
        """The checkpoint to resume from, checked; None to start anew. Runs on the first rank."""
        return resume.choose(
            Path(self.folder),
            step=step,
            how=self.resume,
            stamp=self.stamp,
            initial=Path(self.initial_load_path) if self.initial_load_path else None,
            load_only=self.load_only,
        )

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        states = super()._states_to_load(model_only)
        if self._source is None or not (self._source / ".metadata").is_file():
            return _without_adapters(states) if model_only else states
        names = FileSystemReader(self._source).read_metadata().state_dict_metadata
        if RNG in states and not any(name.startswith(f"{RNG}.{self.rng.key}.") for name in names):
            log.warning("%s holds no state of random numbers for rank %d", self._source, dist.get_rank())
            states = {name: state for name, state in states.items() if name != RNG}
        if model_only and not any(".lora_" in name for name in names):
            states = _without_adapters(states)
        return states


def _without_adapters(states: dict[str, Any]) -> dict[str, Any]:
    """States that a checkpoint of the base model has."""
    return {name: state for name, state in states.items() if ".lora_a." not in name and ".lora_b." not in name}


__all__ = ["MODEL", "DurableCheckpoints"]
