"""Runs that are killed, signalled, damaged or out of disk go on to the bits of a run that was left alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from jumar.train import durable
from train_forks import Forks
from train_util import sentences, write_job

LONG = bool(os.environ.get("JUMAR_LONG_TESTS"))
STEPS = 8
JOB = ["training.steps=8", "lr_scheduler.total_steps=8", "validation.enable=true", "validation.freq=3", "validation.dataset_path=held_out", "metrics.plot_file="]
SAVE = ["checkpoint.enable=true", "checkpoint.interval=2", "checkpoint.keep_latest_k=2"]

# Training that draws from every generator: what a checkpoint forgets of them changes all later losses.
NOISE = """
import random, numpy, torch
from jumar.train.trainer import JobTrainer
step = JobTrainer.forward_backward_step
def noisy(self, *, global_valid_tokens, **kwargs):
    noise = 1 + 0.1 * (random.random() + numpy.random.rand() + torch.rand(()))
    return step(self, global_valid_tokens=global_valid_tokens * noise, **kwargs)
JobTrainer.forward_backward_step = noisy
"""


@pytest.fixture(scope="module")
def forks():
    with Forks() as server:
        yield server


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "held_out").mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in sentences(80)[60:]]
    (folder / "held_out" / "data.jsonl").write_text("".join(lines))
    return write_job(folder)


def _options(out: Path, *more: str) -> list[str]:
    return [*JOB, f"job.dump_folder={out}", *more]


def _result(out: Path) -> dict:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    weights = (out / "hf" / "model.safetensors").read_bytes()
    return {
        "steps": [r["step"] for r in records],
        "losses": [r["loss"] for r in records],
        "held out": {r["step"]: r["validation_loss"] for r in records if "validation_loss" in r},
        "tokens": [r["tokens_seen"] for r in records],
        "lr": [r["lr"] for r in records],
        "weights": hashlib.sha256(weights).hexdigest(),
    }


def _no_leftovers(out: Path) -> None:
    odd = [p for p in out.rglob("*") if re.search(r"\.(tmp|old|gone)-", p.name)]
    assert not odd
    for path in durable.numbered(out / "checkpoint").values():
        durable.check_folder(path)


@pytest.fixture(scope="module")
def reference(forks, job, tmp_path_factory) -> dict:
    """A run that saves nothing on its way."""
    out = tmp_path_factory.mktemp("reference")
    run = forks.run(job, _options(out))
    assert run["status"] == 0, run["output"]
    assert "val loss" in run["output"]
    result = _result(out)
    assert result["steps"] == list(range(1, STEPS + 1)) and sorted(result["held out"]) == [3, 6, 8]
    return result


def test_kills_at_random_moments(forks, job, reference, tmp_path):
    """Some by the clock, some at a call in the middle of a save: a sync, a rename, the making of a file or folder."""
    seed = int.from_bytes(os.urandom(4))
    dice = random.Random(seed)
    kills, rounds = 0, 0
    wanted = 20 if LONG else 3
    calls, seconds = None, None
    while kills < wanted:
        rounds += 1
        out = tmp_path / f"out{rounds}"
        options = _options(out, *SAVE, f"checkpoint.async_mode={('async', 'disabled')[rounds % 2]}")
        for _ in range(4):
            if calls is None:
                how = {"kill_at": ["fsync", dice.randrange(15, 45)]}
            elif dice.random() < 0.5:
                how = {"kill_after": dice.uniform(0.2, 1) * seconds}
            else:
                name = dice.choice(sorted(calls))
                how = {"kill_at": [name, dice.randint(1, max(1, calls[name]))]}
            run = forks.run(job, options, **how)
            if run["status"] == 0:
                calls, seconds = run["calls"], run["seconds"]
                break
            assert run["status"] == -signal.SIGKILL, f"seed {seed}, {how}: {run['output']}"
            kills += 1
            calls, seconds = calls or {"fsync": 40, "rename": 10, "mkdir": 12}, seconds or run["seconds"]
            if kills == wanted:
                break
        final = forks.run(job, options)
        assert final["status"] == 0, f"seed {seed}: {final['output']}"
        assert _result(out) == reference, f"seed {seed}, round {rounds}"
        _no_leftovers(out)


def test_every_generator_is_restored(forks, job, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert forks.run(job, _options(whole), before=NOISE)["status"] == 0
    options = _options(broken, *SAVE)
    killed = forks.run(job, options, before=NOISE, signal=(signal.SIGKILL, "step 5/"))
    assert killed["status"] == -signal.SIGKILL
    resumed = forks.run(job, options, before=NOISE)
    assert resumed["status"] == 0 and "resuming from" in resumed["output"]
    assert _result(broken) == _result(whole)


def test_a_slow_save_in_the_background_holds_one_moment(forks, job, reference, tmp_path):
    """Training goes on while a checkpoint is written; the checkpoint is of its own step."""
    slow = """
import time
from torch.distributed.checkpoint import FileSystemWriter
write = FileSystemWriter.write_data
def slowly(self, *args):
    time.sleep(1)
    return write(self, *args)
FileSystemWriter.write_data = slowly
"""
    options = _options(tmp_path, "checkpoint.enable=true", "checkpoint.interval=3", "checkpoint.async_mode=async")
    run = forks.run(job, options, before=slow, signal=(signal.SIGKILL, "step 7/"), kill_after=60)
    assert run["status"] == -signal.SIGKILL
    # The save of step 6 waited for that of step 3, which began three steps earlier.
    steps = durable.numbered(tmp_path / "checkpoint")
    if not steps:
        pytest.skip("the machine was too slow to save anything")
    assert list(steps) == [3]
    run = forks.run(job, options)
    assert run["status"] == 0 and "step-3" in run["output"]
    assert _result(tmp_path) == reference


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_end(forks, job, reference, tmp_path, number, status):
    # An interval that never comes: what is resumed from was saved because of the signal.
    options = _options(tmp_path, "checkpoint.enable=true", "checkpoint.interval=100")
    run = forks.run(job, options, signal=(number, "step 3/"))
    assert run["status"] == status, run["output"]
    done = int(re.search(rf"{number.name}: ended after step (\d+)", run["output"])[1])
    assert f"{tmp_path}/checkpoint/step-{done}" in run["output"] and "goes on" in run["output"]
    assert not (tmp_path / "hf").exists() and 3 <= done < STEPS
    run = forks.run(job, options)
    assert run["status"] == 0 and f"resuming from {tmp_path}/checkpoint/step-{done}" in run["output"]
    assert _result(tmp_path) == reference
    _no_leftovers(tmp_path)


def test_signal_without_checkpoints(forks, job, tmp_path):
    run = forks.run(job, _options(tmp_path), signal=(signal.SIGTERM, "step 2/"))
    assert run["status"] == 143 and "checkpoint.enable is false" in run["output"]


LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))
"""


@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_full_disk(forks, job, reference, tmp_path, mode):
    options = _options(tmp_path, *SAVE, f"checkpoint.async_mode={mode}")
    assert forks.run(job, [*options, "training.steps=2", "checkpoint.export_hf=false"])["status"] == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoint").rglob("*")}
    run = forks.run(job, options, before=LIMIT.format(100_000))
    assert run["status"] == 2, run["output"]
    assert "step-4 could not be written: a file is larger than the limit" in run["output"]
    assert "Traceback" not in run["output"]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoint").rglob("*")} == before
    _no_leftovers(tmp_path)
    run = forks.run(job, options)
    assert run["status"] == 0, run["output"]
    result = _result(tmp_path)
    # The first run was over at step 2, and evaluated it.
    assert result["held out"].pop(2) and result == reference


@pytest.mark.long
def test_small_file_system(forks, job, reference, tmp_path):
    """A real one, where that can be had: room for one checkpoint and a half, then for all."""
    if not LONG:
        pytest.skip("long; set JUMAR_LONG_TESTS=1")

    def mount(*options: str) -> bool:
        return subprocess.run(["mount", *options, str(tmp_path)], capture_output=True).returncode == 0

    if not mount("-t", "tmpfs", "-o", "size=3m", "none"):
        pytest.skip("mounting is not allowed here")
    try:
        out = tmp_path / "out"
        run = forks.run(job, _options(out, *SAVE))
        assert run["status"] == 2 and "Traceback" not in run["output"], run["output"]
        assert re.search(r"checkpoint .*step-4 could not be written: no space left on the disk", run["output"])
        assert list(durable.numbered(out / "checkpoint")) == [2]
        _no_leftovers(out)
        assert mount("-o", "remount,size=30m", "none")
        run = forks.run(job, _options(out, *SAVE))
        assert run["status"] == 0, run["output"]
        assert _result(out) == reference
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk_for_the_exported_model(forks, job, tmp_path):
    options = _options(tmp_path, "training.steps=1")
    assert forks.run(job, options)["status"] == 0
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    run = forks.run(job, options, before=LIMIT.format(100_000))
    assert run["status"] == 2 and "larger than the limit" in run["output"], run["output"]
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before
    _no_leftovers(tmp_path)


def test_two_runs_in_one_folder(forks, job, tmp_path):
    with durable.RunLock(tmp_path):
        run = forks.run(job, _options(tmp_path))
    assert run["status"] == 2
    assert f"{tmp_path} is in use by another run (process {os.getpid()} on " in run["output"]
    assert [p.name for p in tmp_path.iterdir()] == [durable.LOCK]


# Two processes.


def _children(process: int) -> list[int]:
    """The ids of a process's children."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _two(job: Path, overrides: list[str], *, kill: tuple[int, str] | None = None) -> tuple[int, str]:
    """`torchrun -m jumar train`; ``kill`` sends a signal once the output has a text. Returns status and output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "jumar", "train"]
    command += [f"--job.config_file={job}", *(f"--{o}" for o in overrides)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output = ""
    try:
        for line in run.stdout:
            output += line
            if kill and kill[1] in line:
                # torchrun hands a signal on to its processes; it cannot do so with this one.
                ended = [run.pid, *_children(run.pid)] if kill[0] == signal.SIGKILL else [run.pid]
                for process in ended:
                    os.kill(process, kill[0])
                kill = None
        return run.wait(60), output
    finally:
        for process in [*_children(run.pid), run.pid] if run.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        run.wait()
        run.stdout.close()


@pytest.mark.long
@pytest.mark.parametrize("layout", ["data", "tensor", "pipeline"])
def test_two_processes_resume(job, tmp_path, layout):
    if not LONG:
        pytest.skip("long; set JUMAR_LONG_TESTS=1")
    degree = {"data": "parallelism.data_parallel_shard_degree=2"}.get(layout, f"parallelism.{layout}_parallel_degree=2")
    more = ["model.flavor=tiny_untied", degree, *(["lora.enable=true"] if layout == "tensor" else [])]
    whole, broken, stopped = (tmp_path / name for name in ("whole", "broken", "stopped"))
    status, output = _two(job, [*_options(whole), *more])
    assert status == 0, output
    options = [*_options(broken, *SAVE), *more]
    status, output = _two(job, options, kill=(signal.SIGKILL, "step 5/"))
    assert status == -signal.SIGKILL, output
    status, output = _two(job, options)
    assert status == 0 and "resuming from" in output, output
    assert _result(broken) == _result(whole)
    _no_leftovers(broken)
    options = [*_options(stopped, "checkpoint.enable=true"), *more]
    status, output = _two(job, options, kill=(signal.SIGTERM, "step 3/"))
    assert "SIGTERM: ended after step" in output, output
    status, output = _two(job, options)
    assert status == 0, output
    assert _result(stopped) == _result(whole)
