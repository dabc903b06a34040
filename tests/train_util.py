"""Small jobs for the tests of training."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from op_util import threads

CONVERTERS = ["npu_rms_norm", "npu_rope", "npu_swiglu", "npu_linear"]

_JOB = """
[job]
dump_folder = "{out}"
[model]
name = "qwen3"
flavor = "tiny"
converters = {converters}
[training]
dataset_path = "text"
local_batch_size = 2
seq_len = 64
steps = 10
mixed_precision_param = "float32"
[optimizer]
lr = 1e-3
# The first steps of Adam divide by gradients: keep tiny ones from turning rounding into sign.
eps = 1e-6
[lr_scheduler]
warmup_steps = 2
"""


def sentences(count: int = 60) -> list[str]:
    """Documents of different lengths, some shorter and some longer than a sequence."""
    words = "the rope holds a climber who reads one page of every book that the wall has kept".split()
    return [
        " ".join(words[(i * 7 + j * j + j) % len(words)] for j in range(5 + (i * 13) % 60)) + f" {i}."
        for i in range(count)
    ]


def write_job(folder: Path, converters: list[str] = CONVERTERS, text: list[str] | None = None) -> Path:
    """A job file and its data in ``folder``; returns the job file."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": t}) for t in (sentences() if text is None else text))
    (folder / "text" / "data.jsonl").write_text("".join(line + "\n" for line in lines))
    file = folder / "job.toml"
    file.write_text(_JOB.format(out=folder / "out", converters=json.dumps(converters)))
    return file


def no_sleep(monkeypatch: Any) -> None:
    """The trainer sleeps two seconds at its end, for ranks that are still busy."""
    clock = SimpleNamespace(**{name: getattr(time, name) for name in ("perf_counter", "monotonic", "time")})
    clock.sleep = lambda seconds: None
    monkeypatch.setattr("torchtitan.trainer.time", clock)


def one_thread() -> Iterator[None]:
    """The body of a fixture: torch on one thread."""
    with threads(1):
        yield


def quickly() -> Iterator[None]:
    """The body of a fixture: torchtitan with the shims and without its sleep, on one thread."""
    from jumar import compat

    with pytest.MonkeyPatch.context() as patch, threads(1):
        compat.apply()
        no_sleep(patch)
        yield


def train_job(job: Path, *overrides: str) -> dict:
    """Trains a job without its progress; returns its document."""
    from jumar.train import runner

    with contextlib.redirect_stderr(io.StringIO()):
        return runner.train(runner.prepare(str(job), list(overrides)))


def check_resumes(run: Callable[..., dict], folder: Path, steps: int, *keys: str) -> tuple[dict, dict]:
    """A run that stops halfway and one that resumes it log the bits of one that does not stop.

    ``run``: of a folder and overrides. Returns the documents of the whole run and of the resumed one.
    """
    options = [f"training.steps={steps}", f"lr_scheduler.total_steps={steps}", "metrics.plot_file="]
    saved = [*options, "checkpoint.enable=true", f"checkpoint.interval={steps // 2}"]
    whole = run(folder / "whole", *options)
    first = run(folder / "parts", *saved, f"training.steps={steps // 2}")
    second = run(folder / "parts", *saved)
    assert len(first["records"]) == steps // 2
    for key in ("loss", *keys):
        assert [r[key] for r in first["records"] + second["records"]] == [r[key] for r in whole["records"]], key
    return whole, second


def torchrun(job: Path, *overrides: str, processes: int = 2) -> dict:
    """Trains a job on several processes; returns its document."""
    script = job.parent / "run.py"
    script.write_text("import sys; from jumar import train; train.run(sys.argv[1], sys.argv[2:], json=True)")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
    done = subprocess.run(
        [*command, str(script), str(job), *overrides],
        env=environment, capture_output=True, text=True, timeout=300, cwd=job.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
