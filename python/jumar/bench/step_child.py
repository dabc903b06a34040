"""The process of one contender of ``jumar bench --step``: trains a job, one step at a word from its parent.

    python -m jumar.bench.step_child READ_FD WRITE_FD CONFIG [section.key=value ...]

Words: ``step`` (not counted), ``count``, ``profile``, ``end``. Answers are JSON, a line each.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class Finished(BaseException):
    """Ends the training from within."""


def _status(key: str) -> int:
    """Bytes of a line of /proc/self/status; 0 where there is none."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    found = [line.split()[1] for line in text.splitlines() if line.startswith(f"{key}:")]
    return int(found[0]) * 1024 if found else 0


def _forget_peak() -> None:
    """Lets the peak of physical memory begin anew, from what is really in use."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (OSError, AttributeError):
        pass  # not Linux, not glibc: the peak since the start


class Turns:
    """The hook of every step: reports the step that ended, waits for the word that begins the next one."""

    def __init__(self, reader: Any, writer: Any):
        self.reader, self.writer = reader, writer
        self.began: float | None = None
        self.state = self.peak = 0
        self.session: Any = None
        self.folder = tempfile.TemporaryDirectory(prefix="jumar-bench-trace-")
        self.operators: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        """One line to the parent."""
        self.writer.write(json.dumps(message) + "\n")
        self.writer.flush()

    def __call__(self) -> None:
        seconds = 0.0 if self.began is None else time.perf_counter() - self.began
        if self.session is not None:
            self._profiled()
        self.send({"seconds": seconds})
        word = self.reader.readline().strip()
        if word not in ("step", "count", "profile"):
            raise Finished
        if word == "count" and not self.state:
            _forget_peak()
            self.state = _status("VmRSS")
        if word == "profile":
            self.peak = _status("VmHWM")
            self._profile()
        self.began = time.perf_counter()

    def _profile(self) -> None:
        from jumar.profile import Settings, StepProfiler

        settings = Settings(
            enable_profiling=True, profile_freq=1, profiler_active=1, profiler_warmup=0
        )
        self.session = StepProfiler(settings, self.folder.name)
        self.session.__enter__()

    def _profiled(self) -> None:
        self.session.step()
        self.session.__exit__(None, None, None)
        tables = sorted(Path(self.folder.name).rglob("rank0_operators.json"))
        self.session = None
        if tables:
            self.operators = json.loads(tables[0].read_text(encoding="utf-8"))["operators"]


def main(argv: list[str]) -> int:
    """Exit status 0 also where the job is wrong: the parent is told why."""
    reader = os.fdopen(int(argv[0]), encoding="utf-8")
    writer = os.fdopen(int(argv[1]), "w", encoding="utf-8")
    config, overrides = argv[2], argv[3:]
    from jumar.train import runner
    from jumar.train.errors import JobError
    from jumar.train.pace import set_hook
    from jumar.train.records import read

    turns = Turns(reader, writer)
    set_hook(turns)
    folder = Path(next(o for o in reversed(overrides) if o.startswith("job.dump_folder=")).split("=", 1)[1])
    try:
        runner.train(runner.prepare(config, overrides))
    except Finished:
        pass
    except JobError as error:
        turns.send({"error": " ".join(str(error).split())})
        return 0
    except Exception as error:
        lines = str(error).splitlines() or [""]
        turns.send({"error": f"{type(error).__name__}: {lines[0][:200]}"})
        raise
    records = read(folder / "metrics.jsonl")
    tokens = [r["tokens_per_second"] * r["seconds_per_step"] for r in records]
    turns.send(
        {
            "losses": [r["loss"] for r in records],
            "tokens": statistics.median(tokens) if tokens else 0.0,
            "peak": turns.peak or _status("VmHWM"),
            "state": turns.state,
            "operators": turns.operators,
        }
    )
    turns.folder.cleanup()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # threads of the trainer may still wait for work
