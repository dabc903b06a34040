"""npu_loss in torchtitan: jobs with the fused loss beside the plain one."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan")

from jumar import compat, titan
from jumar.convert.errors import ConverterError
from jumar.titan.models import model_spec
from jumar.train import runner
from jumar.train.errors import JobError
from train_util import CONVERTERS, no_sleep, write_job


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    compat.apply()
    no_sleep(monkeypatch)


def _run(folder: Path, converters: list[str], *overrides: str) -> dict:
    folder.mkdir()
    job = write_job(folder, converters)
    with contextlib.redirect_stderr(io.StringIO()):
        return runner.train(runner.prepare(str(job), ["training.steps=3", *overrides]))


WAYS = {
    "tied": (),
    "untied": ("model.flavor=tiny_untied",),
    "checkpointing": ("activation_checkpoint.mode=full",),
    "accumulation": ("training.global_batch_size=4", "training.loss_chunks=4"),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_same_numbers_as_the_plain_loss(way, tmp_path):
    plain = _run(tmp_path / "plain", [], *WAYS[way])
    fused = _run(tmp_path / "fused", ["npu_loss"], *WAYS[way])
    for a, b in zip(fused["losses"], plain["losses"], strict=True):
        assert abs(a - b) <= 1e-5 * b
    norms = [[r["grad_norm"] for r in run["records"]] for run in (fused, plain)]
    torch.testing.assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=1e-4, atol=0)
    (row,) = fused["operators"]
    micro = 6 if way == "accumulation" else 3
    assert (
        row["operator"] == "linear_cross_entropy"
        and row["modules"] == row["planned"] == row["replaced"] == 1
    )
    assert row["calls"] == row["backward_calls"] == micro


def test_with_every_converter_and_evaluation(tmp_path):
    fused = _run(
        tmp_path / "fused",
        [*CONVERTERS, "npu_loss"],
        "validation.enable=true",
        f"validation.dataset_path={tmp_path / 'fused' / 'text'}",
        "validation.freq=3",
        "validation.steps=2",
    )
    rows = {row["converter"]: row for row in fused["operators"]}
    assert rows["npu_loss"]["calls"] == 3 + 2 and rows["npu_loss"]["backward_calls"] == 3
    # The head's module is not called: its product is the loss operator's.
    assert rows["npu_linear"]["modules"] == 11
    assert fused["records"][-1]["validation_loss"] > 0


def test_the_plan_tells():
    report = titan.plan(model_spec("qwen3", "tiny"), ["loss"])
    assert [(s.path, s.converter, s.status) for s in report.sites] == [
        ("lm_head", "npu_loss", "replaced")
    ]
    spec = model_spec("qwen3", "tiny")
    spec.model.lm_head = (
        titan.lora.titan_lora.LoRAConverter(
            titan.lora.titan_lora.LoRAConverter.Config(
                rank=2, alpha=4.0, target_modules=["lm_head"]
            )
        )
        .convert(spec.model)
        .lm_head
    )
    with pytest.raises(ConverterError, match="matched nothing"):
        titan.plan(spec, ["npu_loss"])
    (site,) = titan.plan(spec, ["npu_loss?"]).sites
    assert "computes more than a linear layer" in site.reason


def test_a_sharded_head_is_refused(tmp_path):
    with pytest.raises(
        JobError, match="npu_loss needs the whole output head.*tensor_parallel_degree = 2 shards it"
    ):
        job = write_job(tmp_path, ["npu_loss"])
        prepared = runner.prepare(str(job), [])
        prepared.job["parallelism"]["tensor_parallel_degree"] = 2
        runner.train(prepared)
