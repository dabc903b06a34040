"""The trained model as a folder that transformers loads: config.json, safetensors, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jumar.train.errors import JobError
from jumar.train.files import replace_folder
from jumar.train.tokenizer import end_of_text

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_SHARD = "4GB"


def _decoder(model: Any, context: int) -> dict[str, Any]:
    """What every decoder's config.json says, from torchtitan's configuration."""
    layer = model.layers[0]
    attention, rope = layer.attention, layer.attention.rope
    dense = {"intermediate_size": layer.feed_forward.w1.out_features} if layer.feed_forward is not None else {}
    return {
        "hidden_size": model.dim,
        **dense,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": context,
        "rms_norm_eps": model.norm.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": model.enable_weight_tying,
        "use_cache": True,
        # transformers 5 reads rope_parameters, 4.x rope_theta.
        "rope_theta": rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
    }


def _heads(model: Any) -> dict[str, Any]:
    attention = model.layers[0].attention
    return {
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
    }


def _scaled(rope: Any, **scaling: Any) -> dict[str, Any]:
    """Positions that were stretched, under the names of transformers 4 and 5."""
    return {"rope_scaling": scaling, "rope_parameters": {**scaling, "rope_theta": rope.theta}}


def _qwen3(model: Any, context: int) -> dict[str, Any]:
    common = {**_decoder(model, context), **_heads(model), "use_sliding_window": False}
    moe = model.layers[0].moe
    if moe is None:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **common}
    router = moe.router
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **common,
        "moe_intermediate_size": moe.routed_experts.inner_experts.hidden_dim,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": router.route_norm,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _deepseek_v3(model: Any, context: int) -> dict[str, Any]:
    attention, rope = model.layers[0].attention, model.layers[0].attention.rope
    moe = next(layer.moe for layer in model.layers if layer.moe is not None)
    router, width = moe.router, moe.routed_experts.inner_experts.hidden_dim
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_decoder(model, context),
        "num_key_value_heads": attention.n_heads,
        "q_lora_rank": attention.q_lora_rank or None,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "rope_interleave": True,
        "first_k_dense_replace": [layer.moe is None for layer in model.layers].index(False),
        "moe_intermediate_size": width,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts.w1.out_features // width,
        "num_experts_per_tok": router.top_k,
        "n_group": router.num_expert_groups or 1,
        "topk_group": router.num_limited_groups or 1,
        "norm_topk_prob": router.route_norm,
        "routed_scaling_factor": router.route_scale,
        "num_nextn_predict_layers": 0,
    }
    if rope.scaling == "yarn" and rope.rope_factor > 1:
        config |= _scaled(
            rope,
            rope_type="yarn",
            factor=rope.rope_factor,
            beta_fast=rope.beta_fast,
            beta_slow=rope.beta_slow,
            # Equal: the scale is of the softmax alone, cos and sin have none.
            mscale=attention.mscale,
            mscale_all_dim=attention.mscale,
            original_max_position_embeddings=rope.original_seq_len,
        )
    return config


def _deepseek_v32(model: Any, context: int) -> dict[str, Any]:
    attention = model.layers[0].attention
    config = _deepseek_v3(model, context)
    # Its queries are always low-rank, its pairs always rotated as neighbours.
    del config["rope_interleave"]
    return config | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_n_heads": attention.indexer.n_heads,
        "index_head_dim": attention.indexer.head_dim,
        "index_topk": attention.inner_attention.topk,
    }


def _llama3(model: Any, context: int) -> dict[str, Any]:
    rope = model.layers[0].attention.rope
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_decoder(model, context),
        **_heads(model),
        "mlp_bias": False,
    }
    if rope.scaling == "llama":
        config |= _scaled(
            rope,
            rope_type="llama3",
            factor=rope.scaling_factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_position_embeddings=rope.original_max_position_embeddings,
        )
    return config


_CONFIGS = {"qwen3": _qwen3, "llama3": _llama3, "deepseek_v3": _deepseek_v3, "deepseek_v32": _deepseek_v32}
# The epsilon of the norms inside latent attention is no part of transformers' configuration.
_LATENT_EPS = 1e-6


def obstacle(name: str, model: Any) -> str | None:
    """Why transformers has no model that computes what torchtitan's does; None when it has one."""
    if name not in _CONFIGS:
        return f"no config.json can be made for {name}; one in model.hf_assets_path is taken"
    mixtures = [layer.moe for layer in model.layers if getattr(layer, "moe", None) is not None]
    if not mixtures:
        return None
    if name == "qwen3":
        if len(mixtures) < len(model.layers):
            return "some layers are dense"
        if any(moe.load_balance_coeff is not None for moe in mixtures):
            return "Qwen3MoeForCausalLM has no expert bias; model.load_balance_coeff = 0 trains without one"
    if name in ("deepseek_v3", "deepseek_v32"):
        theirs = f"Deepseek{name.removeprefix('deepseek_').upper()}ForCausalLM"
        if any(moe.router.score_func != "sigmoid" for moe in mixtures):
            return f"{theirs} scores experts by sigmoid, this model by softmax"
        eps = model.layers[0].attention.kv_norm.eps
        if eps != _LATENT_EPS:
            return f"{theirs} norms latent keys with an epsilon of {_LATENT_EPS}, this model with {eps}"
        if getattr(model, "mtp_layers", None):
            return "layers that predict further tokens are not exported"
    return None


def hf_config(name: str, model: Any, assets: Path | None) -> dict[str, Any] | None:
    """The ``config.json`` of a model: that of the assets folder where there is one, else made from torchtitan's.

    Call it before the trainer is built, which shortens the position table to the sequence length of training. None when
    neither is possible, see :func:`obstacle`.
    """
    if assets is not None and (assets / "config.json").is_file():
        return json.loads((assets / "config.json").read_text(encoding="utf-8"))
    return None if obstacle(name, model) else _CONFIGS[name](model, model.max_seq_len)


# What chooses experts is no smaller than fp32 anywhere: rounding would choose others.
_WIDE = "expert_bias_E"


def _whole(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    narrow = tensor.is_floating_point() and not name.endswith(_WIDE)
    return tensor.detach().to("cpu", dtype if narrow else tensor.dtype)


def gather(parts: list[nn.Module], dtype: torch.dtype, pipelined: bool) -> dict[str, Tensor] | None:
    """All weights, whole, on the first rank; None on the others. Every rank must call it.

    Under pipeline parallelism a rank holds its stages only; the first rank collects them.
    """
    weights = {
        name: _whole(name, tensor, dtype)
        for part in parts
        for name, tensor in part.state_dict().items()
    }
    first = torch.distributed.get_rank() == 0
    if pipelined:
        collected = [None] * torch.distributed.get_world_size() if first else None
        torch.distributed.gather_object(weights, collected)
        if first:
            weights = {name: tensor for share in collected for name, tensor in share.items()}
    return weights if first else None


def merge_adapters(
    weights: dict[str, Tensor], scaling: float, model: Any, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Whole fp32 weights of ``model`` (a configuration) with low-rank adapters added to their layers, in ``dtype``."""
    from jumar.titan import lora

    attention = model.layers[0].attention
    head_dim = getattr(attention, "head_dim", None) or model.dim // attention.n_heads
    added = lora.merged(weights, scaling, head_dim)
    return {n: t.to(dtype) if t.is_floating_point() and not n.endswith(_WIDE) else t for n, t in added.items()}


def _own(tensor: Tensor) -> Tensor:
    """A tensor that is alone in its memory: the adapter gives experts as parts of one."""
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.contiguous().clone()


def write(
    folder: Path,
    weights: dict[str, Tensor],
    adapter: Any,
    config: dict[str, Any],
    tokenizer: Path,
    dtype: torch.dtype,
) -> Path:
    """Writes the folder: to a temporary name, synced, then renamed; a crash leaves the old one.

    Args:
        weights: torchtitan's names to whole tensors.
        adapter: torchtitan's StateDictAdapter of the model.
        config: content of ``config.json`` (dtype and end-of-text token are filled in).
        tokenizer: folder whose tokenizer files are copied.
        dtype: dtype of the floating weights.
    """
    from huggingface_hub import save_torch_state_dict

    config = dict(config)
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    eos = end_of_text(tokenizer)
    config.setdefault("bos_token_id", None)
    config["eos_token_id"] = eos
    config["pad_token_id"] = config.get("pad_token_id", eos)
    named = {name: _own(tensor) for name, tensor in adapter.to_hf(weights).items()}
    if config.get("model_type") in ("deepseek_v3", "deepseek_v32"):
        for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
            # A model that was trained without expert bias has none.
            bias = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
            named.setdefault(bias, torch.zeros(config["n_routed_experts"]))
    if not named:
        raise JobError("export: torchtitan's adapter gave no weights")
    with replace_folder(folder) as place:
        save_torch_state_dict(named, place, max_shard_size=_SHARD)
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in _TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, place / name)
    return folder
