"""Which checkpoint a run goes on from: the same rules for every engine."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from jumar.train import durable
from jumar.train.errors import JobError

log = logging.getLogger("jumar.train")

STAMP = "job.json"
# Differences in these cannot be resumed over; any other one is said.
_FIRM = ("model", "lora")


def write_stamp(folder: Path, stamp: dict[str, Any]) -> None:
    """Writes what a checkpoint says about its job."""
    (folder / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")


def read_stamp(path: Path) -> dict[str, Any]:
    """What a checkpoint says about its job; empty where it says nothing."""
    try:
        return json.loads((path / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def choose(
    root: Path, *, step: int, how: str, stamp: dict[str, Any], initial: Path | None = None, load_only: bool = False
) -> Path | None:
    """The checkpoint to resume from, checked; None to start anew. Call it with the run's lock held.

    Args:
        root: folder of the checkpoints ``step-N``.
        step: the one to take; -1 for the newest that is whole.
        how: "auto", "must" (there has to be one) or "never" (there must be none).
        stamp: what the job is, compared with what the checkpoint was written for.
        initial: where the weights come from when there is no checkpoint; checked when it is one itself.
        load_only: change nothing in ``root``.

    Raises:
        JobError: as ``how`` and ``step`` demand, or the checkpoint is another model's.
        DamagedCheckpoint: none that would do is whole.
    """
    durable.sweep_temporaries(root)
    if not load_only:
        _aside_weights_only(root)
    found = durable.numbered(root)
    if found and how == "never":
        raise JobError(
            f"{root} holds checkpoints up to step {max(found)}, and checkpoint.resume is never; "
            "remove them or give another job.dump_folder"
        )
    if step == -1:
        chosen = durable.newest_good(root)
    elif step in found:
        durable.check_folder(found[step])
        chosen = found[step]
    else:
        known = ", ".join(map(str, found)) or "none"
        raise JobError(f"checkpoint.load_step = {step}: no such checkpoint in {root} (there: {known})")
    if chosen is None:
        if how == "must":
            raise JobError(f"checkpoint.resume is must, and {root} holds no checkpoint")
        if initial and (initial / durable.MANIFEST).is_file():
            durable.check_folder(initial)
        return None
    _compare(chosen, stamp)
    if not load_only:
        for number, path in found.items():
            if number > int(chosen.name.removeprefix("step-")):
                why = "replaced" if step != -1 else "damaged"
                log.warning("%s is kept aside as %s", path, durable.set_aside(path, why).name)
    log.info("resuming from %s", chosen)
    return chosen


def _aside_weights_only(root: Path) -> None:
    """A last checkpoint without optimizer cannot be resumed from; an earlier one with it can."""
    for path in durable.numbered(root).values():
        if read_stamp(path).get("model_only"):
            place = durable.set_aside(path, "weights")
            log.warning("%s holds the weights only and cannot be resumed from; kept aside as %s", path, place.name)


def _compare(path: Path, stamp: dict[str, Any]) -> None:
    """Compares a checkpoint's job with this one."""
    old = read_stamp(path)
    for name, value in stamp.items():
        if name not in old or old[name] == value:
            continue
        if name in _FIRM:
            raise JobError(
                f"checkpoint {path} was written with {name} = {old[name]}, the job has {value}; "
                "give another job.dump_folder, or take only its weights by checkpoint.initial_load_path"
            )
        log.warning(
            "%s was written with %s = %s, the job has %s: losses will not be those of an unbroken run",
            path, name, old[name], value,
        )


def refuse_leftovers(root: Path) -> None:
    """For a job without checkpoints: JobError when the folder holds those of an earlier run."""
    found = durable.numbered(root)
    if found:
        raise JobError(
            f"{root} holds checkpoints up to step {max(found)} of an earlier run, and checkpoint.enable is false; "
            "enable it to go on from there, or give another job.dump_folder"
        )
