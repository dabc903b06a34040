"""Hugging Face jobs that are killed, signalled, damaged or out of disk go on to the bits of a run that was left alone."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from hf_util import make_folder, write_hf_job
from jumar.train import durable
from train_forks import Forks

LONG = bool(os.environ.get("JUMAR_LONG_TESTS"))
STEPS = 8
# Five samples a pass over the data: steps cross from one to the next. Dropout draws random numbers.
KINDS = {
    "whole": ["training.packing=true", "training.local_batch_size=1", "training.global_batch_size=3"],
    "adapters": ["lora.enable=true", "lora.dropout=0.3", "optimizer.lr=3e-2"],
    # Another model, beside the job.
    "indexers": [
        "model.hf_assets_path=sparse", "model.converters=npu_dsa", "model.indexer_stage=sparse", "training.packing=true",
        "training.local_batch_size=1", "training.global_batch_size=2",
    ],
    "jumar_adamw": ["optimizer.name=jumar_adamw", "training.dtype=bfloat16", "training.mixed_precision_param=bfloat16"],
}
JOB = ["training.steps=8", "lr_scheduler.total_steps=8", "validation.enable=true", "validation.freq=3", "validation.part=0.2"]
SAVE = ["checkpoint.enable=true", "checkpoint.interval=2", "checkpoint.keep_latest_k=2"]


@pytest.fixture(scope="module")
def forks():
    with Forks("hf_warm") as server:
        yield server


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    make_folder(folder / "sparse", "deepseek_v32")
    return write_hf_job(folder)


def _options(out: Path, kind: str, *more: str) -> list[str]:
    return [*JOB, *KINDS[kind], f"job.dump_folder={out}", *more]


def _result(out: Path) -> dict:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "lr", "tokens_seen")
    return {
        **{name: [r[name] for r in records] for name in names},
        "indexers": [r["indexer_loss"] for r in records if "indexer_loss" in r],
        "held out": {r["step"]: r["validation_loss"] for r in records if "validation_loss" in r},
        "weights": hashlib.sha256((out / "hf" / "model.safetensors").read_bytes()).hexdigest(),
    }


def _no_leftovers(out: Path) -> None:
    assert not [p for p in out.rglob("*") if re.search(r"\.(tmp|old|gone)-", p.name)]
    for path in durable.numbered(out / "checkpoint").values():
        durable.check_folder(path)


@pytest.fixture(scope="module")
def reference(forks, job, tmp_path_factory):
    """Runs that save nothing on their way, by kind."""
    found: dict[str, dict] = {}

    def of(kind: str) -> dict:
        if kind not in found:
            out = tmp_path_factory.mktemp(kind)
            run = forks.run(job, _options(out, kind))
            assert run["status"] == 0, run["output"]
            found[kind] = _result(out)
            assert found[kind]["step"] == list(range(1, STEPS + 1)) and sorted(found[kind]["held out"]) == [3, 6, 8]
        return found[kind]

    return of


def test_kills_at_random_moments(forks, job, reference, tmp_path):
    """Some by the clock, some at a call in the middle of a save: a sync, a rename, the making of a file or folder."""
    seed = int.from_bytes(os.urandom(4))
    dice = random.Random(seed)
    kills, rounds, wanted = 0, 0, 20 if LONG else 4
    calls, seconds = {"fsync": 60}, 0.0
    while kills < wanted:
        kind = list(KINDS)[rounds % len(KINDS)]
        rounds += 1
        out = tmp_path / f"out{rounds}"
        options = _options(out, kind, *SAVE)
        for _ in range(4 if LONG else 1):
            if seconds and dice.random() < 0.5:
                how = {"kill_after": dice.uniform(0.2, 1) * seconds}
            else:
                name = dice.choice(sorted(calls))
                how = {"kill_at": [name, dice.randint(max(1, calls[name] // 4), max(1, calls[name]))]}
            run = forks.run(job, options, **how)
            if run["status"] == 0:
                break
            assert run["status"] == -signal.SIGKILL, f"seed {seed}, {how}: {run['output']}"
            kills += 1
        final = forks.run(job, options)
        assert final["status"] == 0, f"seed {seed}: {final['output']}"
        calls, seconds = {name: n for name, n in final["calls"].items() if name != "open"} or calls, final["seconds"]
        assert _result(out) == reference(kind), f"seed {seed}, round {rounds}, {how}"
        _no_leftovers(out)


def test_killed_in_the_middle_and_damaged(forks, job, reference, tmp_path):
    """A checkpoint that is no longer whole is refused by name, and the one before it used."""
    options = _options(tmp_path, "adapters", *SAVE)
    run = forks.run(job, options, signal=(signal.SIGKILL, "step 7/"))
    assert run["status"] == -signal.SIGKILL
    newest = max(durable.numbered(tmp_path / "checkpoint").items())[1]
    content = bytearray((newest / "optimizer.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "optimizer.pt").write_bytes(content)
    run = forks.run(job, options)
    assert run["status"] == 0, run["output"]
    assert f"checkpoint {newest} is damaged: optimizer.pt has other bytes than were written" in run["output"]
    assert re.search(r"resuming from .*step-[24]", run["output"])
    assert _result(tmp_path) == reference("adapters")


def test_sigterm_saves_and_ends(forks, job, reference, tmp_path):
    options = _options(tmp_path, "whole", "checkpoint.enable=true", "checkpoint.interval=100")
    run = forks.run(job, options, signal=(signal.SIGTERM, "step 3/"))
    assert run["status"] == 143, run["output"]
    done = int(re.search(r"SIGTERM: ended after step (\d+)", run["output"])[1])
    assert not (tmp_path / "hf").exists() and 3 <= done < STEPS
    run = forks.run(job, options)
    assert run["status"] == 0 and f"resuming from {tmp_path}/checkpoint/step-{done}" in run["output"], run["output"]
    assert _result(tmp_path) == reference("whole")
    # A run that is over stays so.
    again = forks.run(job, options)
    assert again["status"] == 0 and _result(tmp_path) == reference("whole"), again["output"]


LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))
"""


def test_full_disk(forks, job, reference, tmp_path):
    options = _options(tmp_path, "whole", *SAVE)
    assert forks.run(job, options, signal=(signal.SIGKILL, "step 3/"))["status"] == -signal.SIGKILL
    assert list(durable.numbered(tmp_path / "checkpoint")) == [2]
    run = forks.run(job, options, before=LIMIT.format(100_000))
    assert run["status"] == 2, run["output"]
    assert "step-4 could not be written: a file is larger than the limit" in run["output"]
    assert "Traceback" not in run["output"]
    _no_leftovers(tmp_path)
    run = forks.run(job, options)
    assert run["status"] == 0 and _result(tmp_path) == reference("whole"), run["output"]


def test_refusals(forks, job, tmp_path):
    with durable.RunLock(tmp_path):
        run = forks.run(job, _options(tmp_path, "whole"))
    assert run["status"] == 2 and f"{tmp_path} is in use by another run (process {os.getpid()} on " in run["output"]
    assert forks.run(job, _options(tmp_path, "whole", *SAVE, "training.steps=2"))["status"] == 0
    run = forks.run(job, _options(tmp_path, "adapters", *SAVE))
    assert run["status"] == 2 and "was written with" in run["output"] and "the job has" in run["output"]
    run = forks.run(job, _options(tmp_path, "whole", *SAVE, "checkpoint.resume=never"))
    assert run["status"] == 2 and "checkpoint.resume is never" in run["output"]
    run = forks.run(job, _options(tmp_path, "whole"))
    assert run["status"] == 2 and "checkpoint.enable is false" in run["output"]
