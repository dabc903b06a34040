"""Converted models under FSDP2, and what conversion says about a model that is sharded already (one process)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import jumar
from jumar.convert import ConverterError


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.proj = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.proj(self.norm(x))


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def model():
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), nn.RMSNorm(8, eps=1e-6))


def shard(m, mesh, **kwargs):
    for layer in m[:2]:
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(m, mesh=mesh, **kwargs)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def gradients(m):
    (m(X) * torch.linspace(-1, 2, 8)).sum().backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in m.parameters()]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_convert_then_shard(mesh, dtype):
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)} if dtype else {}
    expected = gradients(shard(model(), mesh, **policy))
    m = model()
    report = jumar.convert(m, ["npu_rms_norm", "npu_linear"], strict=True)
    shard(m, mesh, **policy)
    jumar.reset_call_counts()
    actual = gradients(m)
    calls = jumar.call_counts()
    assert calls["npu_rms_norm"] == 3 and calls["npu_linear"] == 2
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype == torch.float32
        assert (a - e).abs().max() <= (0.03 if dtype else 1e-5) * e.abs().max()
    report.undo()  # the sharded containers are not among the converted modules
    jumar.reset_call_counts()
    gradients(m)
    assert not jumar.call_counts()


def test_a_sharded_site_cannot_be_undone_and_says_so(mesh):
    m = model()
    report = jumar.convert(m, ["npu_rms_norm"])
    fully_shard(m[2], mesh=mesh)
    with pytest.raises(ConverterError, match="2: its class is now FSDPRMSNorm"):
        report.undo()


def test_sharded_weights_are_left_alone(mesh):
    m = shard(model(), mesh)
    report = jumar.convert(m, ["npu_rms_norm", "npu_linear"])
    assert not report.replaced
    assert {s.reason for s in report.skipped} == {
        "its weight is a DTensor: convert before sharding"
    }
