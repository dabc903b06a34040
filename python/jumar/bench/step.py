"""Whole training steps of a job file: the job as it is (jumar), without converters (eager), and that compiled (Inductor).

Each contender trains in a process of its own, the way ``jumar train`` does; between two steps a process waits for its
turn.  So they share one run of the machine, and each has a peak of memory of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from jumar.bench.machine import facts

#: Relative differences of the loss to eager's, in the first steps, that are no error.
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 1e-2}
#: A contender is not timed beyond this many seconds once it has two counted steps.
BUDGET = 60.0
_COMPARED = 3


class StepError(Exception):
    """A contender cannot run; the text is one line."""


@dataclass
class Contender:
    """One form of the job. ``seconds`` of its counted steps; ``losses`` from the first step on; bytes of memory.

    ``peak`` is the most in physical memory during the counted steps, ``state`` what is there before one: weights,
    optimizer states, code. ``operators``: rows of the profile of one step.
    """

    name: str
    overrides: list[str]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: float = 0.0
    peak: int = 0
    state: int = 0
    operators: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""
    wrong: str = ""

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.median


@dataclass
class StepResult:
    """All contenders on one job. ``ok``: no loss strays from eager's."""

    job: str
    description: str
    dtype: str
    machine: dict[str, Any]
    contenders: list[Contender]

    @property
    def ok(self) -> bool:
        return not any(c.wrong for c in self.contenders)

    def find(self, name: str) -> Contender | None:
        """The contender, if it was timed."""
        return next((c for c in self.contenders if c.name == name and c.seconds and not c.wrong), None)

    def ratio(self, name: str, of: str = "minimum") -> float | None:
        """How many times longer ``name`` takes than jumar."""
        other, own = self.find(name), self.find("jumar")
        return None if other is None or own is None else getattr(other, of) / getattr(own, of)


class _Process:
    """The process of a contender. It says what it did after every step and waits for the next word."""

    def __init__(self, contender: Contender, config: str, log: IO[str]):
        self.contender, self.log = contender, log
        ours, theirs = os.pipe(), os.pipe()  # theirs -> ours, ours -> theirs
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jumar.bench.step_child", str(theirs[0]), str(ours[1]), config]
            + contender.overrides,
            pass_fds=(theirs[0], ours[1]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        os.close(theirs[0])
        os.close(ours[1])
        self.reader = os.fdopen(ours[0], encoding="utf-8")
        self.writer = os.fdopen(theirs[1], "w", encoding="utf-8")

    def receive(self) -> dict[str, Any]:
        """The next message. StepError when the process has ended."""
        line = self.reader.readline()
        if line:
            message = json.loads(line)
            if "error" in message:
                raise StepError(message["error"])
            return message
        self.process.wait()
        self.log.flush()
        with open(self.log.name, encoding="utf-8", errors="replace") as file:
            lines = [text.strip() for text in file if text.strip()]
        raise StepError(lines[-1] if lines else f"ended with status {self.process.returncode}")

    def tell(self, word: str) -> dict[str, Any]:
        """Sends ``step``, ``count``, ``profile`` or ``end``, and returns the answer."""
        with contextlib.suppress(BrokenPipeError):
            self.writer.write(word + "\n")
            self.writer.flush()
        return self.receive()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.writer.close()
        self.reader.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def contenders(job: Any, config_overrides: list[str], folder: Path, inductor: bool) -> list[Contender]:
    """The forms of a job, each with its overrides."""
    from jumar.train.schema import SECTIONS

    common = list(config_overrides)
    quiet = {
        "training.steps": "1000000",
        "lr_scheduler.total_steps": str(job["lr_scheduler"]["total_steps"] or job["training"]["steps"]),
        "checkpoint.enable": "false",
        "checkpoint.export_hf": "false",
        "validation.enable": "false",
        "profiling.enable_profiling": "false",
        "metrics.plot_file": "",
        "metrics.report_file": "",
        "metrics.log_freq": "1",
        "metrics.jsonl_file": "metrics.jsonl",
    }
    known = {f"{section}.{key.name}" for section, keys in SECTIONS.items() for key in keys}
    common += [f"{key}={value}" for key, value in quiet.items() if key in known]
    plain = ["model.converters="]
    if job["optimizer"]["name"].startswith("jumar"):
        plain.append("optimizer.name=AdamW")
    forms = [("eager", plain), ("jumar", [])]
    if inductor:
        forms.append(("inductor", [*plain, "compile.enable=true"]))
    return [
        Contender(name, [*common, *extra, f"job.dump_folder={folder / name}"])
        for name, extra in forms
    ]


@contextlib.contextmanager
def _running(forms: list[Contender], config: str, folder: Path) -> Iterator[list[_Process]]:
    with contextlib.ExitStack() as stack:
        processes = []
        for contender in forms:
            log = stack.enter_context((folder / f"{contender.name}.log").open("w", encoding="utf-8"))
            processes.append(_Process(contender, config, log))
            stack.callback(processes[-1].close)
        yield processes


def _compare(forms: list[Contender], dtype: str) -> None:
    """Notes a contender whose first losses stray from eager's: its times count for nothing."""
    eager = next((c for c in forms if c.name == "eager" and c.losses), None)
    if eager is None:
        return
    for other in forms:
        for step, (a, b) in enumerate(zip(eager.losses[:_COMPARED], other.losses, strict=False), 1):
            apart = abs(a - b) / max(abs(a), 1e-30)
            if not apart <= LOSS_TOLERANCE[dtype]:
                other.wrong = f"loss of step {step} is {b:.7g}, eager's {a:.7g}"
                break
        else:
            if other.losses and not all(math.isfinite(loss) for loss in other.losses):
                other.wrong = "a loss is not finite"


def measure(
    config: str,
    overrides: list[str],
    *,
    steps: int = 5,
    inductor: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> StepResult:
    """Times ``steps`` steps of each contender in turns, after one that is not counted.

    Raises:
        BenchError: the job file is wrong, or jumar or eager cannot run it. Inductor may fail: its note says why.
    """
    from jumar.bench.command import BenchError
    from jumar.train.errors import JobError
    from jumar.train.job import load

    try:
        job = load(config, overrides)
    except JobError as error:
        raise BenchError(" ".join(str(error).split())) from error
    with tempfile.TemporaryDirectory(prefix="jumar-bench-") as name:
        folder = Path(name)
        forms = contenders(job, overrides, folder, inductor)
        with _running(forms, config, folder) as processes:
            alive = []
            for process in processes:
                try:
                    process.receive()  # it is built and about to begin its first step
                    progress(f"{process.contender.name}: first step")
                    process.tell("step")
                    alive.append(process)
                except StepError as error:
                    if process.contender.name != "inductor":
                        raise BenchError(f"{process.contender.name}: {error}") from error
                    process.contender.note = f"Inductor: {error}"
            try:
                _turns(alive, steps, progress)
                _end(alive)
            except StepError as error:
                raise BenchError(str(error)) from error
    dtype = job["training"]["mixed_precision_param"]
    _compare(forms, dtype)
    return StepResult(Path(config).name, describe(job), dtype, facts(), forms)


def describe(job: Any) -> str:
    """What one step is: model, sequences (of all accumulated passes) x tokens, dtype."""
    model = " ".join(str(job["model"].get(key) or "") for key in ("name", "flavor")).strip()
    training = job["training"]
    batch = max(training["local_batch_size"], training["global_batch_size"])
    return f"{model}, {batch} x {training['seq_len']} tokens, {training['mixed_precision_param']}"


def _end(processes: list[_Process]) -> None:
    for process in processes:
        if process.contender.name == "jumar":
            process.tell("profile")
        done = process.tell("end")
        for key in ("losses", "tokens", "peak", "state", "operators"):
            setattr(process.contender, key, done[key])


def _turns(processes: list[_Process], steps: int, progress: Callable[[str], None]) -> None:
    for turn in range(steps):
        shift = turn % max(1, len(processes))
        for process in processes[shift:] + processes[:shift]:
            contender = process.contender
            if len(contender.seconds) >= 2 and sum(contender.seconds) > BUDGET:
                continue
            contender.seconds.append(process.tell("count")["seconds"])
            progress(f"{contender.name}: step {turn + 1}/{steps} {contender.seconds[-1]:.3f} s")
