"""The record of a run, ``run.json``, and its report: one HTML file that needs nothing else.

``with recording(job, ...) as record`` writes both, however the run ends. :func:`write` makes the report again from the
files of a run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import time
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jumar.train import durable
from jumar.train.errors import JobError
from jumar.train.files import replace_file
from jumar.train.job import Job
from jumar.train.records import read as read_metrics

log = logging.getLogger("jumar.train")

RECORD = "run.json"
REPORT = "report.html"
FORMAT = 1
#: Folder of the same job without converters, which ``make demo`` trains for comparison.
EAGER = "eager"

_RESULTS = ("model", "parameters", "processes", "operators", "calls", "tokens_per_second", "hf_folder", "seed_checkpoint")


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def _differences(job: Job) -> list[str]:
    """The values that the command line gave: ``section.key = value``."""
    with contextlib.suppress(OSError, ValueError):
        written = tomllib.loads(job.file.read_text(encoding="utf-8"))
        return [
            f"{name} = {json.dumps(job[section][key], ensure_ascii=False)}"
            for name in sorted(job.given)
            for section, key in [name.split(".", 1)]
            if written.get(section, {}).get(key) != job[section][key]
        ]
    return []


class Warnings(logging.Handler):
    """Keeps the warnings of a run."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self.texts:
            self.texts.append(text)


class Record:
    """What is known of a run; written to ``run.json`` when it begins and when it ends."""

    def __init__(self, job: Job, engine: str, conversion: dict[str, Any] | None):
        from jumar import environment

        self.job, self.folder = job, job.dump_folder
        self.session: dict[str, Any] = {
            "started": _now(),
            "ended": None,
            "state": "running",
            "process": f"{os.getpid()} on {socket.gethostname()}",
            "resumed_from": None,
            "steps": None,
            "error": None,
            "traceback": None,
        }
        earlier = read_record(self.folder) or {}
        self._earlier = [s for s in earlier.get("sessions", []) if isinstance(s, dict)]
        for session in self._earlier:
            if session.get("state") == "running":
                session["state"] = "killed"
        self._began = time.monotonic()
        try:
            text = job.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            text = ""
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "engine": engine,
            "job": {"file": job.file.name, "text": text, "overrides": _differences(job), "values": job.values},
            "environment": environment.collect(),
            "report": conversion,
        }

    def finish(self, result: dict[str, Any]) -> None:
        """Takes what the run returned, a document of :func:`jumar.train.run`."""
        self.data.update({key: result[key] for key in _RESULTS if key in result})
        self.data.setdefault("model", "")
        if result.get("report"):
            self.data["report"] = result["report"]
        self.session["resumed_from"] = result.get("resumed_from")
        self.session["steps"] = result.get("steps")
        signal = result.get("interrupted")
        self.session["state"] = "stopped" if signal else "finished"
        self.session["error"] = signal
        metrics = self.job["metrics"]["jsonl_file"]
        if not metrics:
            self.data["records"] = result.get("records", [])

    def fail(self, error: BaseException) -> None:
        """Takes the exception that ended the run."""
        lines = str(error).strip() or "no message"
        if isinstance(error, KeyboardInterrupt):
            self.session.update(state="stopped", error="SIGINT, twice")
        elif isinstance(error, JobError):
            self.session.update(state="failed", error=lines)
        else:
            text = "".join(traceback.format_exception(error))
            self.session.update(state="failed", error=f"{type(error).__name__}: {lines}", traceback=text[-20000:])

    def save(self, warnings: list[str]) -> None:
        """Writes ``run.json``. OSError when it cannot."""
        self.data["warnings"] = warnings
        # A run that began anew has replaced what was there.
        earlier = self._earlier if self.session["resumed_from"] or self.session["state"] == "running" else []
        if self.session["state"] == "failed" and self.session["steps"] is None:
            earlier = self._earlier  # whether it was resumed is not known
        self.data["sessions"] = [*earlier, self.session]
        replace_file(self.folder / RECORD, json.dumps(self.data, indent=1, default=str) + "\n")

    def close(self, warnings: list[str]) -> None:
        """Writes ``run.json`` for the last time, and the report."""
        self.session["ended"] = _now()
        self.session["seconds"] = round(time.monotonic() - self._began, 1)
        try:
            self.save(warnings)
            name = self.job["metrics"]["report_file"]
            if name:
                write(self.folder, self.folder / name, locked=True)
        except OSError as error:
            log.warning("the report of the run is not written: %s", error)


@contextlib.contextmanager
def recording(
    job: Job, *, rank: int = 0, engine: str = "torchtitan", conversion: dict[str, Any] | None = None
) -> Iterator[Record | None]:
    """Records a run. Call ``record.finish(result)`` at its end; an exception is recorded and goes on.

    Args:
        job: the checked job; call this with its folder locked.
        rank: others than 0 record nothing, and are given None.
        engine: torchtitan or transformers.
        conversion: the conversion report as plain data, for a run that fails before it returns one.
    """
    if rank != 0:
        yield None
        return
    warnings = Warnings()
    log.addHandler(warnings)
    try:
        record = Record(job, engine, conversion)
        with contextlib.suppress(OSError):  # the end of the run says so
            record.save(warnings.texts)
        try:
            yield record
        except BaseException as error:
            record.fail(error)
            raise
        finally:
            record.close(warnings.texts)
    finally:
        log.removeHandler(warnings)


def read_record(folder: Path) -> dict[str, Any] | None:
    """``run.json`` of a folder; None when there is none, or it is damaged."""
    try:
        data = json.loads((Path(folder) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


def _held(folder: Path) -> bool:
    """Whether a run works in the folder now."""
    try:
        handle = os.open(folder / durable.LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)


def collect(folder: str | Path, *, locked: bool = False) -> dict[str, Any]:
    """Everything that a report shows, from the files of a run.

    Args:
        folder: the run's ``dump_folder``.
        locked: the caller is the run itself.

    Raises:
        JobError: it is no folder of a run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise JobError(f"{folder}: no such folder")
    data = read_record(folder)
    values = (data or {}).get("job", {}).get("values", {})
    metrics = values.get("metrics", {}).get("jsonl_file", "metrics.jsonl")
    records = read_metrics(folder / metrics) if metrics else (data or {}).get("records", [])
    if data is None and not records:
        raise JobError(f"{folder}: no folder of a run: neither {RECORD} nor metrics.jsonl is in it, or both are damaged")
    run = {**(data or {}), "folder": str(folder), "records": records}
    warnings = list(run.get("warnings", []))
    if data is None:
        what = "is damaged" if (folder / RECORD).exists() else "is missing"
        warnings.append(f"{RECORD} {what}: the job, the environment and the conversion are not known")
    sessions = run.setdefault("sessions", [])
    if sessions and sessions[-1].get("state") == "running" and not (locked or _held(folder)):
        sessions[-1]["state"] = "killed"
    strange = [r["step"] for r in records if isinstance(r.get("loss"), float) and r["loss"] != r["loss"]]
    if strange:
        warnings.append(f"the loss is NaN in {len(strange)} step(s), first in step {strange[0]}")
    run["warnings"] = warnings
    run["eager"] = read_metrics(folder / EAGER / "metrics.jsonl")
    run["profile"] = _profile(folder / values.get("profiling", {}).get("save_traces_folder", "profiling/traces"))
    run["checkpoints"] = _checkpoints(folder / values.get("checkpoint", {}).get("folder", "checkpoint"))
    return run


def _profile(folder: Path) -> dict[str, Any] | None:
    """The newest table of operators, and which steps have one."""
    found = {}
    for file in folder.glob("iteration_*/rank0_operators.json"):
        number = file.parent.name.removeprefix("iteration_")
        if number.isdigit():
            found[int(number)] = file
    for step in sorted(found, reverse=True):
        with contextlib.suppress(OSError, ValueError):
            table = json.loads(found[step].read_text(encoding="utf-8"))
            return {**table, "step": step, "steps_profiled": sorted(found)}
    return None


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The checkpoints, those that were set aside included."""
    found = []
    for path in folder.glob("*") if folder.is_dir() else []:
        match = re.match(r"(?:step|checkpoint)-(\d+)(.*)", path.name)
        if match and path.is_dir():
            files = [p for p in path.rglob("*") if p.is_file()]
            found.append(
                {
                    "name": f"{folder.name}/{path.name}",
                    "step": int(match[1]),
                    "bytes": sum(p.stat().st_size for p in files),
                    "state": match[2].lstrip(".") or ("whole" if (path / durable.MANIFEST).is_file() else "no manifest"),
                }
            )
    return sorted(found, key=lambda c: (c["step"], c["name"]))


def write(folder: str | Path, file: str | Path | None = None, *, locked: bool = False) -> Path:
    """Makes the report of a run from its files; the file is the old one or the new one, never a part.

    Args:
        folder: the run's ``dump_folder``.
        file: where to write; None: the ``metrics.report_file`` of the run, or ``report.html`` in the folder.
        locked: the caller is the run itself.

    Raises:
        JobError: it is no folder of a run.
        OSError: the file cannot be written.
    """
    from jumar.train.report_html import render

    run = collect(folder, locked=locked)
    if file is None:
        name = run.get("job", {}).get("values", {}).get("metrics", {}).get("report_file") or REPORT
        file = Path(folder) / name
    file = Path(file)
    replace_file(file, render(run))
    return file


def again(job: Job) -> Path | None:
    """Makes the report of a run that has ended once more; None when the job wants none."""
    name = job["metrics"]["report_file"]
    return write(job.dump_folder, job.dump_folder / name) if name else None
