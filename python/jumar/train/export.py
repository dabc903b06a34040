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
    head_dim = attention.head_dim or model.dim // attention.n_heads
    return {
        "hidden_size": model.dim,
        "intermediate_size": layer.feed_forward.w1.out_features,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": head_dim,
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


def _qwen3(model: Any, context: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_decoder(model, context),
        "use_sliding_window": False,
    }


def _llama3(model: Any, context: int) -> dict[str, Any]:
    rope = model.layers[0].attention.rope
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_decoder(model, context),
        "mlp_bias": False,
    }
    if rope.scaling == "llama":
        scaling = {
            "rope_type": "llama3",
            "factor": rope.scaling_factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
        config["rope_scaling"] = scaling
        config["rope_parameters"] = {**scaling, "rope_theta": rope.theta}
    return config


_CONFIGS = {"qwen3": _qwen3, "llama3": _llama3}


def hf_config(name: str, model: Any, assets: Path | None) -> dict[str, Any] | None:
    """The ``config.json`` of a model: that of the assets folder where there is one, else made from torchtitan's.

    Call it before the trainer is built, which shortens the position table to the sequence length of training. None when
    neither is possible.
    """
    if assets is not None and (assets / "config.json").is_file():
        return json.loads((assets / "config.json").read_text(encoding="utf-8"))
    if name not in _CONFIGS or any(layer.feed_forward is None for layer in model.layers):
        return None
    return _CONFIGS[name](model, model.max_seq_len)


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)


def gather(parts: list[nn.Module], dtype: torch.dtype, pipelined: bool) -> dict[str, Tensor] | None:
    """All weights, whole, on the first rank; None on the others. Every rank must call it.

    Under pipeline parallelism a rank holds its stages only; the first rank collects them.
    """
    weights = {
        name: _whole(tensor, dtype)
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
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in added.items()}


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
    named = {name: tensor.contiguous() for name, tensor in adapter.to_hf(weights).items()}
    if not named:
        raise JobError("export: torchtitan's adapter gave no weights")
    with replace_folder(folder) as place:
        save_torch_state_dict(named, place, max_shard_size=_SHARD)
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in _TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, place / name)
    return folder
