"""Jobs of transformers.Trainer with npu_sdpa: padded and packed batches, text and adapters, checkpointing."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from hf_util import CONVERTERS, write_hf_job
from train_util import one_thread, train_job

FUSED = [*CONVERTERS, "npu_sdpa"]


_one_thread = pytest.fixture(autouse=True)(one_thread)


@pytest.mark.parametrize("packed", [False, True])
def test_batches(tmp_path, packed):
    job = write_hf_job(tmp_path)
    more = ["training.steps=3", f"training.packing={str(packed).lower()}", "metrics.plot_file="]
    plain = train_job(job, f"job.dump_folder={tmp_path / 'plain'}", *more, f"model.converters={','.join(CONVERTERS)}")
    fused = train_job(job, f"job.dump_folder={tmp_path / 'fused'}", *more, f"model.converters={','.join(FUSED)}")
    assert fused["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    row = next(row for row in fused["operators"] if row["converter"] == "npu_sdpa")
    assert (row["replaced"], row["skipped"]) == (2, 0)
    # Rows of padding on the right see all keys before them, in a call of their own.
    calls = 2 * 3 if packed else row["calls"]
    assert row["calls"] == row["backward_calls"] == calls >= 2 * 3
    full = ["activation_checkpoint.mode=full", f"model.converters={','.join(FUSED)}"]
    again = train_job(job, f"job.dump_folder={tmp_path / 'full'}", *more, *full)
    assert again["losses"] == fused["losses"]
