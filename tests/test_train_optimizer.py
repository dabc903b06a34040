"""`[optimizer] name = "jumar_adamw"` in jobs: torchtitan's losses, its checkpoints, clipping, master weights."""

from __future__ import annotations

import pytest
import torch

import jumar
from jumar import train
from jumar.train import JobError
from train_util import quickly, write_job

OURS = "optimizer.name=jumar_adamw"
SHORT = ["training.steps=4", "metrics.plot_file=", "checkpoint.export_hf=false", "training.max_norm=0.5"]


_quick = pytest.fixture(autouse=True)(quickly)


def run(folder, *overrides):
    folder.mkdir(exist_ok=True)
    return train.run(str(write_job(folder)), [*SHORT, *overrides])


def test_losses_norms_and_resuming(tmp_path):
    theirs = run(tmp_path / "theirs")
    ours = run(tmp_path / "ours", OURS)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    for a, b in zip(ours["records"], theirs["records"], strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4) and a["lr"] == b["lr"]
    calls = ours["calls"]
    assert calls["adamw_"] == calls["grad_power_sums"] == calls["scale_grads_"] == 4
    assert not {"adamw_", "grad_power_sums"} & theirs["calls"].keys()
    # Stopped after two steps and resumed: the same bits.
    saving = [OURS, "checkpoint.enable=true", "checkpoint.interval=2"]
    run(tmp_path / "half", *saving, "training.steps=2", "lr_scheduler.total_steps=4")
    resumed = run(tmp_path / "half", *saving, "lr_scheduler.total_steps=4")
    assert resumed["losses"][-2:] == ours["losses"][-2:]


def test_master_weights(tmp_path):
    half = [OURS, "training.dtype=bfloat16", "training.mixed_precision_param=bfloat16", "optimizer.lr=1e-4"]
    jumar.reset_call_counts()
    with_copies = run(tmp_path / "copies", *half, "optimizer.master_weights=true")
    without = run(tmp_path / "plain", *half)
    assert with_copies["losses"][0] == without["losses"][0]
    assert with_copies["losses"][-1] != without["losses"][-1]
    with pytest.raises(JobError, match="master_weights is of optimizer.name = 'jumar_adamw'"):
        run(tmp_path / "stock", "optimizer.master_weights=true")


def test_containers_clipping_is_chosen_by_the_optimizer():
    from torchtitan.distributed import utils

    from jumar.optim import AdamW
    from jumar.titan import optimizer

    stock = utils.clip_grad_norm_
    p = torch.nn.Parameter(torch.ones(3))
    with optimizer.clipping([torch.optim.AdamW([p])]):
        assert utils.clip_grad_norm_ is stock
    with pytest.raises(KeyError), optimizer.clipping([AdamW([p])]):
        assert utils.clip_grad_norm_ is optimizer.clip_grad_norm_
        raise KeyError
    assert utils.clip_grad_norm_ is stock
    with pytest.raises(NotImplementedError, match="Sgd"):
        optimizer.Optimizers._resolve_optimizer_factory("Sgd")
    p.grad = torch.full((3,), torch.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    p.grad = torch.ones(3)
    assert optimizer.clip_grad_norm_(p, 1.0, 0.0) == 1  # what is no norm goes to torchtitan
    assert optimizer.clip_grad_norm_([], 1.0) == 0
