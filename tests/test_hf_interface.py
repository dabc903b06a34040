"""Fused experts and attention by their names in a configuration, on one process and on two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

import jumar
import jumar.hf

pytest.register_assert_rewrite("convert_hf_suite", "moe_hf_suite")
transformers = pytest.importorskip("transformers", minversion="5.0")

from convert_hf_suite import assert_close, assert_same_step, counted, step
from jumar import models
from jumar.convert.registry import ALREADY
from moe_hf_suite import FAMILIES, assert_same, blocks, exact_step

jumar.hf.register()
OVERRIDDEN = "forward is overridden on the instance"


@pytest.mark.parametrize("name", FAMILIES)
def test_named_experts_are_the_converted_ones(name):
    model = models.build(name).train()
    inputs, count = models.example_inputs(model), len(blocks(model))
    expected, exact = step(model, inputs), exact_step(model, inputs)
    model.set_experts_implementation("npu_gmm")
    named, calls = counted(lambda: step(model, inputs))
    assert calls == {"moe_ffn": count, "moe_ffn_backward": count}
    assert_same(named, expected, exact=exact)
    report = jumar.convert(model, ["npu_gmm", "npu_permute"], strict=True)
    converted, calls = counted(lambda: step(model, inputs))
    assert len(report.replaced) == 2 * count and calls["moe_ffn"] == count
    assert_same_step(converted, named, relative=0)


def test_names_are_loaded_and_not_saved(tmp_path):
    model = models.build("qwen3_moe").train()
    inputs = models.example_inputs(model)
    expected = step(model, inputs)
    model.save_pretrained(tmp_path)
    names = {"experts_implementation": "npu_gmm", "attn_implementation": "npu_sdpa"}
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32, **names).train()
    actual, calls = counted(lambda: step(again, inputs))
    assert calls["moe_ffn"] == calls["npu_fusion_attention"] == 2
    assert_same_step(actual, expected)
    attention = jumar.kernelize(again).sites
    assert {s.reason for s in attention if s.converter == "npu_sdpa"} == {ALREADY}
    again.save_pretrained(tmp_path / "again")
    assert "npu_" not in (tmp_path / "again" / "config.json").read_text()


def test_compiled():
    model = models.build("qwen3_moe").eval()
    block, hidden = blocks(model)[0], torch.randn(1, 5, model.config.hidden_size)
    expected = block(hidden)
    model.set_experts_implementation("npu_gmm")
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    actual, calls = counted(lambda: compiled(hidden))
    assert calls["moe_ffn"] == 1
    assert_close(actual, expected, 1e-5)


def test_experts_of_another_kind_are_refused_by_name():
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
    config = transformers.GptOssConfig(num_local_experts=4, num_experts_per_tok=2, **sizes, **heads)
    model = transformers.GptOssForCausalLM(config)
    model.set_experts_implementation("npu_gmm")
    with pytest.raises(ValueError, match="npu_gmm: GptOssExperts: its experts have biases"):
        model(input_ids=torch.arange(4)[None])


# ---- two processes ----


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _step(model, inputs, shared):
    """The step of a sharded model, whole; ``shared``: each process had a part of the batch."""
    model.zero_grad(set_to_none=True)
    out = model(**inputs)
    out.loss.backward()
    loss, logits = _whole(out.loss).detach().clone(), _whole(out.logits).detach()
    if shared:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, logits.contiguous())
        logits = torch.cat(parts)
    return loss, logits, {n: _whole(p.grad).clone() for n, p in model.named_parameters()}


def _fully_sharded(name, inputs, part, expected):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    def shard(model):
        for layer in model.model.layers:
            if "experts" in layer.mlp._modules:
                fully_shard(layer.mlp.experts, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    model = models.build(name).train()
    count = len(blocks(model))
    jumar.kernelize(model)
    model = shard(model)
    actual, calls = counted(lambda: _step(model, part, True))
    assert calls["moe_ffn"] == calls["moe_ffn_backward"] == calls["router_top_k_backward"] == count
    assert_same_step(actual, expected)
    late = shard(models.build(name).train())
    report = jumar.convert(late, ["npu_gmm", "npu_permute", "npu_router"])
    assert {s.reason for s in report.sites} == {"its weight is a DTensor: convert before sharding"}
    assert_same_step(_step(late, part, True), expected)


def _planned(folder, inputs, part, expected, shared, sizes):
    """A model that transformers shards by its own plans: named experts run, conversion leaves them alone."""
    from transformers.distributed import DistributedConfig

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        distributed_config=DistributedConfig(**sizes),
        experts_implementation="npu_gmm",
    ).train()
    inputs = part if shared else inputs
    actual, calls = counted(lambda: _step(model, inputs, shared))
    assert calls == {"moe_ffn": 2, "moe_ffn_backward": 2}
    assert_same_step(actual, expected)
    report = jumar.kernelize(model)
    reasons = {s.reason for s in report.skipped if s.converter in ("npu_gmm", "npu_permute")}
    assert len(reasons) == 1 and reasons.pop().startswith(OVERRIDDEN)
    actual, calls = counted(lambda: _step(model, inputs, shared))
    assert calls["moe_ffn"] == 2 and calls.get("router_top_k", 0) == (0 if shared else 2)
    assert_same_step(actual, expected)


def _ranks(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for name in ("deepseek_v3", "qwen3_moe"):
        model = models.build(name).train()
        torch.manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size, (4, 9))
        inputs, part = ({"input_ids": i, "labels": i} for i in (ids, ids.chunk(2)[rank]))
        expected = step(model, inputs)
        _fully_sharded(name, inputs, part, expected)
    if rank == 0:
        model.save_pretrained(f"{folder}/model")
    dist.barrier()
    for shared, sizes in (
        (False, {"tp_size": 2, "tp_plan": "auto"}),
        (False, {"tp_size": 2, "ep_size": 2}),
        (True, {"fsdp_size": 2, "tp_size": 1, "ep_size": 2, "tp_plan": {}}),
    ):
        _planned(f"{folder}/model", inputs, part, expected, shared, sizes)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    mp.spawn(_ranks, args=(str(tmp_path),), nprocs=2)
