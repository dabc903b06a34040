"""Model sizes for a CPU, beside those that torchtitan has, in the same form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Qwen3Size:
    """The dimensions of a Qwen3; with ``experts`` every layer is a mixture of them, each of ``hidden_dim``."""

    dim: int
    hidden_dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int = 4096
    theta: float = 1000000.0
    tied: bool = True
    experts: int = 0
    top_k: int = 2


@dataclass(frozen=True)
class DeepSeekSize:
    """The dimensions of a DeepSeek-V3 as it is published: sigmoid scores, normed weights, dense layers first."""

    dim: int
    dense_dim: int
    expert_dim: int
    layers: int
    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    vocab_size: int
    experts: int
    top_k: int
    q_rank: int = 0
    shared: int = 2
    groups: int | None = None
    kept_groups: int | None = None
    scale: float = 1.0
    context: int = 4096 * 4
    dense_layers: int = 1
    mscale: float = 0.7


#: ``demo`` is the size of the 4-layer step in bench/, ``tiny`` one for tests.
QWEN3_SIZES = {
    "demo": Qwen3Size(512, 1536, 4, 8, 4, 64, 4096),
    "tiny": Qwen3Size(64, 96, 2, 4, 2, 16, 512),
    "tiny_untied": Qwen3Size(64, 96, 2, 4, 2, 16, 512, tied=False),
    "tiny_moe": Qwen3Size(64, 48, 2, 4, 2, 16, 512, tied=False, experts=8),
}

#: ``debugmodel_sigmoid`` has the dimensions of torchtitan's ``debugmodel``, whose softmax scores no other library knows.
DEEPSEEK_SIZES = {
    "debugmodel_sigmoid": DeepSeekSize(256, 1024, 256, 6, 16, 512, 128, 64, 128, 2048, 8, 3),
    "tiny": DeepSeekSize(
        64, 96, 32, 3, 4, 32, 16, 8, 16, 512, 8, 3, q_rank=48, shared=1, groups=4, kept_groups=2, scale=2.5
    ),
}


def qwen3_config(size: Qwen3Size) -> Any:
    """torchtitan's configuration of a Qwen3, with its initialisation."""
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.config_utils import (
        get_attention_config,
        make_ffn_config,
        make_gqa_config,
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    normal = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}

    def norm(width: int) -> Any:
        return RMSNorm.Config(normalized_shape=width, eps=1e-6, param_init={"weight": nn.init.ones_})

    def dense() -> Any:
        return make_ffn_config(
            dim=size.dim, hidden_dim=size.hidden_dim, w1_param_init=normal, w2w3_param_init=normal
        )

    def mixture() -> Any:
        return make_moe_config(
            num_experts=size.experts,
            router=make_router_config(
                dim=size.dim,
                num_experts=size.experts,
                gate_param_init=normal,
                top_k=size.top_k,
                score_func="softmax",
                route_norm=True,
            ),
            routed_experts=make_routed_experts_config(
                dim=size.dim,
                hidden_dim=size.hidden_dim,
                num_experts=size.experts,
                top_k=size.top_k,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), normal["weight"]),
                comm_backend="standard",
            ),
        )

    def layer() -> Any:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(size.dim),
            ffn_norm=norm(size.dim),
            attention=make_gqa_config(
                dim=size.dim,
                n_heads=size.heads,
                n_kv_heads=size.kv_heads,
                head_dim=size.head_dim,
                wqkv_param_init=normal,
                wo_param_init=normal,
                inner_attention=get_attention_config("flex"),
                fuse_qkv=True,
                rope=CosSinRoPE.Config(dim=size.head_dim, max_seq_len=size.context, theta=size.theta),
                qk_norm=norm(size.head_dim),
            ),
            feed_forward=None if size.experts else dense(),
            moe=mixture() if size.experts else None,
        )

    return Qwen3Model.Config(
        dim=size.dim,
        vocab_size=size.vocab_size,
        norm=norm(size.dim),
        enable_weight_tying=size.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=size.vocab_size,
            embedding_dim=size.dim,
            param_init={"weight": skip_param_init if size.tied else normal["weight"]},
        ),
        lm_head=Linear.Config(
            in_features=size.dim, out_features=size.vocab_size, param_init=normal
        ),
        layers=[layer() for _ in range(size.layers)],
    )


def deepseek_config(size: DeepSeekSize) -> Any:
    """torchtitan's configuration of a DeepSeek-V3, with every norm's epsilon as the published models have it."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.deepseek_v3 import DeepSeekV3Model, build_mla_moe_layers

    weight = partial(nn.init.trunc_normal_, std=0.02)
    normal = {"weight": weight, "bias": nn.init.zeros_}
    ones = {"weight": nn.init.ones_}
    layers = build_mla_moe_layers(
        n_layers=size.layers,
        n_dense_layers=size.dense_layers,
        dim=size.dim,
        n_heads=size.heads,
        q_lora_rank=size.q_rank,
        kv_lora_rank=size.kv_rank,
        qk_nope_head_dim=size.nope_dim,
        qk_rope_head_dim=size.rope_dim,
        v_head_dim=size.value_dim,
        mscale=size.mscale,
        dense_hidden_dim=size.dense_dim,
        moe_hidden_dim=size.expert_dim,
        num_experts=size.experts,
        num_shared_experts=size.shared,
        router_top_k=size.top_k,
        router_score_func="sigmoid",
        router_num_expert_groups=size.groups,
        router_num_limited_groups=size.kept_groups,
        router_route_scale=size.scale,
        router_route_norm=True,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        linear_init=normal,
        norm_init=ones,
        depth_init=lambda layer: normal,
        depth_experts_init=lambda layer: dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), weight),
        rope=ComplexRoPE.Config(
            dim=size.rope_dim, max_seq_len=size.context, scaling="yarn", rope_factor=40.0, original_seq_len=4096
        ),
    )
    model = DeepSeekV3Model.Config(
        dim=size.dim,
        vocab_size=size.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=size.vocab_size, embedding_dim=size.dim, param_init={"weight": nn.init.normal_}
        ),
        norm=RMSNorm.Config(normalized_shape=size.dim, param_init=ones),
        lm_head=Linear.Config(in_features=size.dim, out_features=size.vocab_size, param_init=normal),
        layers=layers,
    )
    for _, norm, _, _ in model.traverse(RMSNorm.Config, recurse=True):
        norm.eps = 1e-6
    return model


#: For a model, its sizes and what makes a configuration of one.
_SIZES = {"qwen3": (QWEN3_SIZES, qwen3_config), "deepseek_v3": (DEEPSEEK_SIZES, deepseek_config)}


#: Models that torchtitan does not have, packages of :mod:`jumar.titan` in the form of its own.
OWN = ("deepseek_v32",)


def _module(name: str) -> Any:
    return import_module(f"jumar.titan.{name}" if name in OWN else f"torchtitan.models.{name}")


def model_names() -> list[str]:
    """Language models of torchtitan and of :data:`OWN`."""
    from torchtitan.models import _supported_models

    return sorted({*_supported_models, *OWN} - {"flux"})


def flavors(name: str) -> list[str]:
    """Sizes of a model, its own and those of this module. KeyError for an unknown model."""
    if name not in model_names():
        raise KeyError(name)
    # One table a model, whose name is not quite the model's.
    known = next(list(v) for k, v in vars(_module(name)).items() if k.endswith("_configs") and isinstance(v, dict))
    return known + [*_SIZES.get(name, ({},))[0]]


def model_spec(name: str, flavor: str) -> Any:
    """torchtitan's ModelSpec. KeyError for an unknown model or flavor."""
    if flavor not in flavors(name):
        raise KeyError(flavor)
    module = _module(name)
    if name in OWN:
        return module.model_registry(flavor)
    sizes, config = _SIZES.get(name, ({}, None))
    if flavor in sizes:
        spec = module.model_registry("debugmodel")
        spec.flavor, spec.model = flavor, config(sizes[flavor])
        return spec
    return module.model_registry(flavor, attn_backend="flex")
