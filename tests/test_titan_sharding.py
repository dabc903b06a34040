"""Operators on DTensors: every placement rule gives what the operator gives on whole tensors, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp

pytest.importorskip("torchtitan")


def _check(rank: int, port: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from jumar import dtensor, ops

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    dtensor.register()

    def compare(function, inputs, placements):
        torch.manual_seed(0)
        whole = [torch.randn(shape).requires_grad_() for shape in inputs]
        parts = [
            distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
            for t, p in zip(whole, placements, strict=True)
        ]
        expected, got = function(*whole), function(*parts)
        assert isinstance(got, DTensor)
        torch.testing.assert_close(got.full_tensor(), expected)
        weight = torch.randn_like(expected)
        expected.backward(weight)
        got.backward(distribute_tensor(weight, mesh, [Replicate()]).redistribute(placements=got.placements)
                     if not got.placements[0].is_partial() else distribute_tensor(weight, mesh, [Replicate()]))
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(b.grad.full_tensor(), a.grad)

    def whole_bias(x):
        bias = torch.linspace(-0.2, 0.2, x.shape[-1])
        return distribute_tensor(bias, mesh, [Replicate()]) if isinstance(x, DTensor) else bias

    rows, columns = Shard(1), Shard(2)
    for placement in (Replicate(), Shard(0), rows, columns):
        compare(lambda x, w: ops.npu_rms_norm(x, w, 1e-6)[0], [(2, 4, 6), (6,)], [placement, Replicate()])
        compare(ops.swiglu_gate_up, [(2, 4, 6), (2, 4, 6)], [placement, placement])
    compare(ops.npu_linear, [(2, 4, 6), (8, 6)], [rows, Replicate()])
    compare(ops.npu_linear, [(2, 4, 6), (8, 6)], [Replicate(), Shard(0)])
    compare(ops.npu_linear, [(2, 4, 6), (8, 6)], [columns, Shard(1)])
    compare(ops.npu_linear, [(2, 4, 6), (8, 6), (8,)], [Replicate(), Shard(0), Shard(0)])

    def adapted(x, a, b):
        """Low-rank adapters of a row-wise layer: partial sums stay partial, as the layer's own are."""
        return ops.npu_linear(ops.npu_linear(x, a), b)

    compare(adapted, [(2, 4, 6), (3, 6), (8, 3)], [columns, Shard(1), Replicate()])
    compare(adapted, [(2, 4, 6), (3, 6), (8, 3)], [Replicate(), Replicate(), Shard(0)])
    compare(ops.npu_linear, [(2, 4, 6), (8, 6), (8,)], [Shard(0), Replicate(), Replicate()])

    def route(logits, bias):
        weights, ids, scores = ops.router_top_k(
            logits, 2, scoring="sigmoid", renorm=True, bias=bias, n_group=2, wide_weights=True, output_scores=True
        )
        assert type(ids) is type(logits)
        return weights.sum(-1, keepdim=True) * scores

    for placement in (Replicate(), Shard(0), rows):
        compare(lambda x: route(x, whole_bias(x)), [(2, 4, 8)], [placement])
    dist.destroy_process_group()


def test_placements():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_check, args=(port,), nprocs=2)
