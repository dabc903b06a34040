"""Which checkpoint a job resumes from, what it refuses, what it keeps."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from jumar.train import JobError
from train_util import quickly, train_job, write_job

SAVE = (
    "checkpoint.enable=true",
    "checkpoint.interval=2",
    "checkpoint.export_hf=false",
    "lr_scheduler.total_steps=8",
    "metrics.plot_file=",
)


_quick = pytest.fixture(autouse=True)(quickly)


def _run(job: Path, *overrides: str) -> dict:
    return train_job(job, *SAVE, *overrides)


def _saved(job: Path) -> list[str]:
    return sorted(p.name for p in (job.parent / "out" / "checkpoint").iterdir())


def _records(job: Path) -> list[dict]:
    return [json.loads(line) for line in (job.parent / "out" / "metrics.jsonl").read_text().splitlines()]


def _flip(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


def test_damage_is_passed_over(tmp_path, caplog):
    job = write_job(tmp_path)
    whole = _run(job, "training.steps=8", "checkpoint.keep_latest_k=3")
    assert _saved(job) == ["step-4", "step-6", "step-8"] and whole["resumed_from"] is None
    root = tmp_path / "out" / "checkpoint"
    _flip(root / "step-8")
    (root / "step-6" / "manifest.json").unlink()
    with caplog.at_level(logging.INFO, "jumar.train"):
        again = _run(job, "training.steps=8", "checkpoint.keep_latest_k=3")
    assert f"checkpoint {root / 'step-8'} is damaged: __0_0.distcp has other bytes than were written" in caplog.text
    assert f"checkpoint {root / 'step-6'} is damaged: manifest.json is missing" in caplog.text
    assert again["resumed_from"] == str(root / "step-4") and again["losses"] == whole["losses"][4:]
    # What was damaged is kept aside: it is neither counted nor resumed from.
    assert _saved(job) == ["step-4", "step-6", "step-6.damaged", "step-8", "step-8.damaged"]
    assert [r["step"] for r in _records(job)] == list(range(1, 9))
    # A step that is asked for by number is not exchanged for another.
    _flip(root / "step-6")
    with pytest.raises(JobError, match=r"step-6 is damaged: .*other bytes"):
        _run(job, "training.steps=8", "checkpoint.load_step=6")
    with pytest.raises(JobError, match=r"load_step = 5: no such checkpoint .*there: 4, 6, 8"):
        _run(job, "training.steps=8", "checkpoint.load_step=5")
    # Going back replaces what came after.
    back = _run(job, "training.steps=6", "checkpoint.load_step=4")
    assert back["losses"] == whole["losses"][4:6]
    assert "step-8.replaced" in _saved(job) and "step-8" not in _saved(job)


def test_nothing_whole_is_an_error(tmp_path):
    job = write_job(tmp_path)
    _run(job, "training.steps=2")
    _flip(tmp_path / "out" / "checkpoint" / "step-2")
    with pytest.raises(JobError, match="step-2 is damaged: .*no other checkpoint in .* is whole"):
        _run(job, "training.steps=4")


def test_what_a_rerun_does(tmp_path):
    job = write_job(tmp_path)
    with pytest.raises(JobError, match="checkpoint.resume is must, and .* holds no checkpoint"):
        _run(job, "training.steps=2", "checkpoint.resume=must")
    first = _run(job, "training.steps=4", "checkpoint.resume=never")
    # A job that is done has nothing left to do.
    done = _run(job, "training.steps=4", "checkpoint.resume=must")
    assert done["losses"] == [] and done["steps"] == 4 and len(_records(job)) == 4
    with pytest.raises(JobError, match="holds checkpoints up to step 4, and checkpoint.resume is never"):
        _run(job, "training.steps=6", "checkpoint.resume=never")
    with pytest.raises(JobError, match="up to step 4 of an earlier run, and checkpoint.enable is false"):
        _run(job, "training.steps=6", "checkpoint.enable=false")
    assert len(_records(job)) == 4 and [r["loss"] for r in _records(job)] == first["losses"]
    # Another model or other adapters do not fit; other data does, and changes the losses.
    with pytest.raises(JobError, match="was written with model = qwen3 tiny, the job has qwen3 tiny_untied"):
        _run(job, "training.steps=6", "model.flavor=tiny_untied")
    with pytest.raises(JobError, match="was written with lora = None"):
        _run(job, "training.steps=6", "lora.enable=true")


def test_changed_job_is_said(tmp_path, caplog):
    job = write_job(tmp_path)
    _run(job, "training.steps=2")
    with caplog.at_level(logging.WARNING, "jumar.train"):
        _run(job, "training.steps=4", "training.local_batch_size=3")
    assert "was written with training.local_batch_size = 2, the job has 3" in caplog.text


def test_weights_alone_are_not_resumed_from(tmp_path, caplog):
    job = write_job(tmp_path)
    whole = _run(job, "training.steps=3", "checkpoint.last_save_model_only=true")
    with caplog.at_level(logging.WARNING, "jumar.train"):
        more = _run(job, "training.steps=4")
    assert "step-3 holds the weights only" in caplog.text
    assert more["losses"][0] == whole["losses"][2] and len(more["losses"]) == 2
    # They are what a new job can start from.
    other = write_job(tmp_path / "other")
    start = tmp_path / "out" / "checkpoint" / "step-3.weights"
    fresh = _run(other, "training.steps=1", f"checkpoint.initial_load_path={start}")
    assert fresh["losses"][0] < whole["losses"][0]
    _flip(start)
    third = write_job(tmp_path / "third")
    with pytest.raises(JobError, match="step-3.weights is damaged"):
        _run(third, "training.steps=1", f"checkpoint.initial_load_path={start}")


def test_exported_model_starts_a_new_job(tmp_path):
    job = write_job(tmp_path)
    first = _run(job, "training.steps=4", "checkpoint.export_hf=true")
    other = write_job(tmp_path / "other")
    start = ["checkpoint.initial_load_in_hf=true", f"checkpoint.initial_load_path={first['hf_folder']}"]
    second = _run(other, "training.steps=1", *start)
    assert second["losses"][0] < first["losses"][0] - 0.05


@pytest.mark.parametrize(
    "more",
    [
        ["optimizer.name=jumar_adamw"],
        ["optimizer.name=jumar_adamw", "optimizer.master_weights=true", "training.dtype=bfloat16", "training.mixed_precision_param=bfloat16"],
        ["model.converters=npu_rms_norm,npu_rope,npu_swiglu,npu_linear,npu_loss", "activation_checkpoint.mode=full"],
        ["training.global_batch_size=4", "training.loss_chunks=2", "optimizer.name=Adam"],
    ],
    ids=["jumar_adamw", "master weights", "npu_loss", "accumulation"],
)
def test_what_else_a_job_holds_is_resumed(tmp_path, more):
    job = write_job(tmp_path)
    whole = _run(job, *more, "training.steps=6", "checkpoint.enable=false", f"job.dump_folder={tmp_path / 'whole'}")
    _run(job, *more, "training.steps=4")
    rest = _run(job, *more, "training.steps=6")
    assert rest["losses"] == whole["losses"][4:]
    assert [r["grad_norm"] for r in rest["records"]] == [r["grad_norm"] for r in whole["records"][4:]]
