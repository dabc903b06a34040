"""DeepSeek-V3.2 for torchtitan: ``model_registry(flavor)`` gives its ModelSpec, as torchtitan's own models do.

It is torchtitan's DeepSeek-V3 with sparse attention: an indexer of a few small heads chooses the keys that a query attends
to. Nothing of it needs a fused operator; the converter ``npu_dsa`` puts them in.
"""

# The shims come before anything of torchtitan.
from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import nn

from jumar import compat

compat.apply()

from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3
from torchtitan.protocols.model_spec import ModelSpec

from jumar.titan.deepseek_v32.adapter import DeepSeekV32StateDictAdapter
from jumar.titan.deepseek_v32.model import (
    DeepSeekV32Attention,
    DeepSeekV32Model,
    Indexer,
    SparseAttention,
)
from jumar.titan.models import DeepSeekSize, deepseek_config


@dataclass(frozen=True, kw_only=True)
class DeepSeekV32Size(DeepSeekSize):
    """The dimensions of a DeepSeek-V3 and its indexers: their heads, the heads' dimension, keys a query."""

    index_heads: int
    index_dim: int
    index_topk: int


#: ``debugmodel`` has the dimensions of torchtitan's of DeepSeek-V3, ``671B`` those of the published model.
deepseek_v32_configs = {
    "debugmodel": DeepSeekV32Size(
        256, 1024, 256, 6, 16, 512, 128, 64, 128, 2048, 8, 3, q_rank=256, index_heads=8, index_dim=128, index_topk=64
    ),
    "671B": DeepSeekV32Size(
        7168, 18432, 2048, 61, 128, 512, 128, 64, 128, 129280, 256, 8, q_rank=1536, shared=1, groups=8, kept_groups=4,
        scale=2.5, context=163840, dense_layers=3, mscale=1.0, index_heads=64, index_dim=128, index_topk=2048,
    ),
    "tiny": DeepSeekV32Size(
        64, 96, 32, 3, 4, 32, 16, 8, 16, 512, 8, 3, q_rank=48, shared=1, groups=4, kept_groups=2, scale=2.5,
        index_heads=8, index_dim=16, index_topk=12,
    ),
}  # fmt: skip


def deepseek_v32_config(size: DeepSeekV32Size) -> DeepSeekV32Model.Config:
    """torchtitan's configuration of a DeepSeek-V3 with sparse attention."""
    weight = {"weight": partial(nn.init.trunc_normal_, std=0.02)}

    def linear(inputs: int, outputs: int) -> Linear.Config:
        return Linear.Config(in_features=inputs, out_features=outputs, param_init=weight)

    def sparse(attention: Any) -> DeepSeekV32Attention.Config:
        rope = {f.name: getattr(attention.rope, f.name) for f in fields(attention.rope) if f.init}
        return _turned(
            attention,
            DeepSeekV32Attention.Config,
            indexer=Indexer.Config(
                n_heads=size.index_heads,
                head_dim=size.index_dim,
                wq_b=linear(size.q_rank, size.index_heads * size.index_dim),
                wk=linear(size.dim, size.index_dim),
                k_norm=LayerNorm.Config(
                    normalized_shape=size.index_dim,
                    eps=1e-6,
                    param_init={"weight": nn.init.ones_, "bias": nn.init.zeros_},
                ),
                weights_proj=linear(size.dim, size.index_heads),
                rope=CosSinRoPE.Config(**rope),
            ),
            inner_attention=SparseAttention.Config(topk=size.index_topk),
        )

    model = _turned(deepseek_config(size), DeepSeekV32Model.Config)
    for layer in model.layers:
        layer.attention = sparse(layer.attention)
    return model


def _turned(config: Any, target: type, **changed: Any) -> Any:
    """A configuration as one of a derived class."""
    return target(**{f.name: getattr(config, f.name) for f in fields(config) if f.init} | changed)


def _balance(optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
    """torchtitan's movement of the experts' bias, but where everything outside the indexers is frozen."""
    if model_parts[0].config.stage != "warmup":
        register_moe_load_balancing_hook(optimizers, model_parts, parallel_dims)


def model_registry(flavor: str) -> ModelSpec:
    """The model of a flavor of :data:`deepseek_v32_configs`. KeyError for another one."""
    return ModelSpec(
        name="deepseek_v32",
        flavor=flavor,
        model=deepseek_v32_config(deepseek_v32_configs[flavor]),
        parallelize_fn=parallelize_deepseekv3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=_balance,
        state_dict_adapter=DeepSeekV32StateDictAdapter,
    )
