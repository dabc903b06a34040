"""Models to inspect and verify: built-in tiny ones of random weights, and folders with a ``config.json``.

The built-in models have the classes and the structure of their families at a width that runs in milliseconds.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jumar.spelling import nearest

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_heads": 2,
    "out_hidden_size": _TEXT["hidden_size"],
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.15,
}
_IMAGE, _VIDEO, _VISION_START, _VISION_END = 90, 91, 92, 93
_TOKENS = {
    "image_token_id": _IMAGE,
    "video_token_id": _VIDEO,
    "vision_start_token_id": _VISION_START,
    "vision_end_token_id": _VISION_END,
}


def _rope(config_class: type, theta: float, **scaling: Any) -> dict[str, Any]:
    """The rotary settings under the name that this version of transformers gives them."""
    if "rope_parameters" in inspect.signature(config_class.__init__).parameters or _has_field(
        config_class
    ):
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}
    return {
        "rope_theta": theta,
        **({"rope_scaling": {"rope_type": "default", **scaling}} if scaling else {}),
    }


def _has_field(config_class: type) -> bool:
    return any("rope_parameters" in getattr(c, "__annotations__", {}) for c in config_class.__mro__)


def _text(family: str, **more: Any) -> Callable[[], Any]:
    def config() -> Any:
        import transformers

        cls = getattr(transformers, f"{family}Config")
        return cls(**{**_TEXT, **_rope(cls, 10000.0), **more})

    return config


def _qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

    vision = {**_VISION, "window_size": 8, "fullatt_block_indexes": [1]}
    text = {**_TEXT, **_rope(Qwen2_5_VLTextConfig, 10000.0, mrope_section=[2, 2, 2])}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_TOKENS)


def _qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

    vision = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    rope = _rope(Qwen3VLTextConfig, 10000.0, mrope_section=[2, 2, 2], mrope_interleaved=True)
    text = {**_TEXT, "head_dim": 12, **rope}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **_TOKENS)


_KINDS = 6
_ROUTED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_SHARED = {**_ROUTED, "shared_expert_intermediate_size": 28}
_DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
_DEEPSEEK = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
}


def _qwen3_vl_moe() -> Any:
    from transformers import Qwen3VLMoeConfig
    from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig

    vision = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    rope = _rope(Qwen3VLMoeTextConfig, 10000.0, mrope_section=[2, 2, 2], mrope_interleaved=True)
    text = {**_TEXT, "head_dim": 12, "tie_word_embeddings": False, **_ROUTED, **rope}
    return Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **_TOKENS
    )


def _qwen3_5_moe() -> Any:
    from transformers import Qwen3_5MoeConfig

    rope = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
    rope |= {"rope_type": "default", "rope_theta": 10000.0}
    text = {**_TEXT, **_SHARED, **_DELTA_NET, "rope_parameters": rope}
    vision = {**_VISION, "num_position_embeddings": 16}
    return Qwen3_5MoeConfig(text_config=text, vision_config=vision, **_TOKENS)


#: name -> (name of the model class in transformers, maker of its configuration)
BUILT_IN: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("LlamaForCausalLM", _text("Llama")),
    "qwen2": ("Qwen2ForCausalLM", _text("Qwen2")),
    "qwen3": ("Qwen3ForCausalLM", _text("Qwen3", head_dim=16)),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", _qwen3_vl),
    "mixtral": ("MixtralForCausalLM", _text("Mixtral", num_local_experts=8, num_experts_per_tok=3)),
    "qwen2_moe": ("Qwen2MoeForCausalLM", _text("Qwen2Moe", **_SHARED)),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        _text("Qwen3Moe", **_ROUTED, head_dim=16, norm_topk_prob=True),
    ),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        _text("Qwen3Next", **_SHARED, **_DELTA_NET, partial_rotary_factor=0.5),
    ),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", _qwen3_5_moe),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _text("DeepseekV3", **_DEEPSEEK)),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        _text("DeepseekV32", **_DEEPSEEK, index_n_heads=8, index_head_dim=16, index_topk=5),
    ),
}


def available() -> list[str]:
    """The built-in models that the installed transformers has."""
    import transformers

    return [name for name, (cls, _) in BUILT_IN.items() if hasattr(transformers, cls)]


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A built-in tiny model with random weights, norm weights and biases included; in eval mode.

    Raises ValueError for an unknown name, with the nearest one, and for a model that transformers lacks.
    """
    if name not in BUILT_IN:
        raise ValueError(_unknown(name))
    import transformers

    cls_name, make_config = BUILT_IN[name]
    if not hasattr(transformers, cls_name):
        raise ValueError(f"{name!r}: transformers {transformers.__version__} has no {cls_name}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, cls_name)(make_config())
        _randomise(model)
        _separate_experts(model)
    return model.to(dtype).eval()


def _randomise(model: nn.Module) -> None:
    """Weights that start as ones or zeros hide mistakes: give them values of their own."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)


def _separate_experts(model: nn.Module) -> None:
    """Let routers decide clearly: tokens come in kinds, and each kind prefers its experts by a wide margin.

    Where two experts are nearly tied the last bit of the hidden state decides, and no two dtypes can be compared.
    """
    routers = [m.gate for m in model.modules() if {"gate", "experts"} <= m._modules.keys()]
    if routers:
        biases = [getattr(router, "e_score_correction_bias", None) for router in routers]
        weights = [(router.weight, bias) for router, bias in zip(routers, biases, strict=True)]
        separate_experts(model.get_input_embeddings().weight, weights)


def separate_experts(embedding: torch.Tensor, routers: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Changes the embedding, and the weight [experts, hidden] and bias of every router, as :func:`_separate_experts` says."""
    with torch.no_grad():
        kinds = torch.randn(_KINDS, embedding.shape[1]).sign()
        embedding += kinds[torch.arange(len(embedding)) % _KINDS]
        for weight, bias in routers:
            experts = len(weight)
            order = torch.stack([torch.randperm(experts) for _ in range(_KINDS)])
            preference = (order.float() - experts / 2).T @ kinds
            weight.mul_(0.05).add_(preference, alpha=1.0 / kinds.shape[1])
            if bias is not None:
                bias.add_(torch.randn_like(bias), alpha=0.02)


def _unknown(name: str) -> str:
    hint = nearest(name, BUILT_IN)
    return f"{name!r} is neither a folder with a config.json nor a built-in model{hint} (known: {', '.join(BUILT_IN)})"


_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def load(model: str | Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model that a built-in name or a folder in Hugging Face layout stands for, in eval mode.

    A folder that has a ``config.json`` but no weights gives a model with random ones.  Nothing is downloaded, and
    no code from the folder is run.  Raises ValueError for a folder or name that gives no model.
    """
    if str(model) in BUILT_IN:
        return build(str(model), seed=seed, dtype=dtype)
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ValueError(_unknown(str(model)))
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, KeyError, ValueError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    cls = getattr(transformers, (getattr(config, "architectures", None) or [""])[0] or "", None)
    if cls is None:
        cls = _class_for(config)
    if cls is None:
        raise ValueError(f"{folder}: no model class for the configuration {type(config).__name__}")
    if any((folder / name).is_file() for name in _WEIGHTS):
        return cls.from_pretrained(folder, local_files_only=True, dtype=dtype).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cls(config).to(dtype).eval()


def _class_for(config: Any) -> type | None:
    """The class that transformers pairs with a configuration which does not name one itself."""
    import transformers

    with torch.device("meta"):
        for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM):
            try:
                return type(auto.from_config(config))
            except ValueError:  # not a configuration of this kind of model
                continue
    return None


def example_inputs(
    model: nn.Module, *, seed: int = 0, batch: int = 2, length: int = 12
) -> dict[str, torch.Tensor]:
    """Random tokens and labels, [batch, length], for a causal language model; one image a row where it sees images.

    Images are added in the layout of the Qwen vision-language models (``pixel_values``, ``image_grid_thw``).
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    text = config.get_text_config()
    special = [getattr(config, name, None) for name in _TOKENS]
    high = min([text.vocab_size, *(token for token in special if isinstance(token, int))])
    ids = torch.randint(min(3, high - 1), high, (batch, length), generator=generator)
    vision = getattr(config, "vision_config", None)
    if vision is None or not hasattr(config, "image_token_id"):
        return {"input_ids": ids, "labels": ids.clone()}
    rows, columns = 4, 6
    merge = vision.spatial_merge_size
    tokens = rows * columns // merge**2
    image = [
        config.vision_start_token_id,
        *[config.image_token_id] * tokens,
        config.vision_end_token_id,
    ]
    ids = torch.cat([ids[:, :3], torch.tensor([image]).expand(batch, -1), ids[:, 3:]], dim=1)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(batch * rows * columns, width, generator=generator)
    inputs = {
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels.to(next(model.parameters()).dtype),
        "image_grid_thw": torch.tensor([[1, rows, columns]] * batch),
    }
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = (ids == config.image_token_id).long()
    return inputs
