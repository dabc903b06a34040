"""Model sizes for a CPU, beside those that torchtitan has, in the same form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Qwen3Size:
    """The dimensions of a dense Qwen3."""

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


#: ``demo`` is the size of the 4-layer step in bench/, ``tiny`` one for tests.
QWEN3_SIZES = {
    "demo": Qwen3Size(512, 1536, 4, 8, 4, 64, 4096),
    "tiny": Qwen3Size(64, 96, 2, 4, 2, 16, 512),
    "tiny_untied": Qwen3Size(64, 96, 2, 4, 2, 16, 512, tied=False),
}


def qwen3_config(size: Qwen3Size) -> Any:
    """torchtitan's configuration of a dense Qwen3, with its initialisation."""
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.config_utils import (
        get_attention_config,
        make_ffn_config,
        make_gqa_config,
    )
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    normal = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}

    def norm(width: int) -> Any:
        return RMSNorm.Config(normalized_shape=width, eps=1e-6, param_init={"weight": nn.init.ones_})

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
            feed_forward=make_ffn_config(
                dim=size.dim,
                hidden_dim=size.hidden_dim,
                w1_param_init=normal,
                w2w3_param_init=normal,
            ),
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


def model_names() -> list[str]:
    """Models of torchtitan that are language models."""
    from torchtitan.models import _supported_models

    return sorted(_supported_models - {"flux"})


def flavors(name: str) -> list[str]:
    """Sizes of a model, torchtitan's and those of this module. KeyError for an unknown model."""
    if name not in model_names():
        raise KeyError(name)
    module = import_module(f"torchtitan.models.{name}")
    # One table a model, whose name is not quite the model's.
    known = next(list(v) for k, v in vars(module).items() if k.endswith("_configs") and isinstance(v, dict))
    return known + ([*QWEN3_SIZES] if name == "qwen3" else [])


def model_spec(name: str, flavor: str) -> Any:
    """torchtitan's ModelSpec. KeyError for an unknown model or flavor."""
    if flavor not in flavors(name):
        raise KeyError(flavor)
    module = import_module(f"torchtitan.models.{name}")
    if name == "qwen3" and flavor in QWEN3_SIZES:
        spec = module.model_registry("debugmodel")
        spec.flavor, spec.model = flavor, qwen3_config(QWEN3_SIZES[flavor])
        return spec
    return module.model_registry(flavor, attn_backend="flex")
