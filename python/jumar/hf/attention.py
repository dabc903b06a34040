"""Attention of transformers models through the library's own extension points.

A model names its attention by ``config._attn_implementation``; attention modules look the function up in
``AttentionInterface``, masks are made by the function of the same name in ``AttentionMaskInterface``.  This file
registers a pair under names of its own and recognises the modules that ask for it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from jumar import ops
from jumar.convert.verdict import Match, Miss, Verdict
from jumar.hf import forwards

#: Names of the fused attention, by the implementation that a model had before.
FUSED = {"sdpa": "npu_sdpa"}
#: Attributes of modules that stand for arithmetic the operator is not given.
_EXTRAS = {
    "attn_logit_softcapping": "its scores are capped",
    "logit_softcapping": "its scores are capped",
    "sinks": "it has attention sinks",
}


def original_of(name: str | None) -> str | None:
    """What a fused name stands for, or None for another name."""
    return next((original for original, fused in FUSED.items() if fused == name), None)


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """The vendor's compressed mask; jumar's own operator takes one number for a mask that hides nothing."""
    if device.type == "npu":
        return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)
    return torch.zeros(1, 1, dtype=torch.bool, device=device)


def _by_position(query: Tensor, keys: int, window: int | None) -> dict[str, Any]:
    """Arguments for causal attention from the upper left, in a window or not."""
    mask = _causal_mask(query.device)
    band = {} if window is None or query.shape[2] != keys else {"pre_tockens": window - 1}
    mode = 0 if mask.numel() == 1 else 4 if band else 2
    return {"atten_mask": mask, "sparse_mode": mode, "next_tockens": 0, **band}


def _fall_back(module: nn.Module, reason: str, *tensors: Any, **rest: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import logging

    logging.get_logger(__name__).warning_once(
        f"npu_sdpa: {type(module).__name__} runs torch's attention here: {reason}"
    )
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *tensors, **rest)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The function of ``AttentionInterface``: [B, N, S, D] in, [B, S, N, D] out, as ``sdpa`` has it."""
    reason = None
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        reason = f"its mask is an additive bias of {attention_mask.dtype}"
    elif rest.get("position_bias") is not None or rest.get("softcap") is not None:
        reason = "its scores take a bias or a cap"
    elif rest.get("s_aux") is not None:
        reason = "it has attention sinks"
    if reason is not None:
        rest = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **rest}
        return _fall_back(module, reason, query, key, value, attention_mask, **rest)
    rows, keys = query.shape[2], key.shape[2]
    arguments: dict[str, Any] = {}
    if attention_mask is not None:
        mask = attention_mask if attention_mask.dim() == 4 else attention_mask[:, None]
        # The operator's sense: True hides.
        arguments = {"atten_mask": mask[..., :keys].logical_not(), "sparse_mode": 1}
    else:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if causal and rows > 1:
            arguments = _by_position(query, keys, rest.get("sliding_window"))
    out = ops.npu_fusion_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        query.shape[1],
        "BSND",
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        keep_prob=1.0 - dropout,
        **arguments,
    )[0]
    return out, None


def _is_window(mask_function: Any, window: int | None) -> bool:
    """Whether a mask function is transformers' causal sliding window of that length and nothing else."""
    from transformers import masking_utils

    if window is None or not hasattr(masking_utils, "sliding_window_causal_mask_function"):
        return False
    model = masking_utils.sliding_window_causal_mask_function(window)

    def parts(function: Any) -> Any:
        cells = [c.cell_contents for c in getattr(function, "__closure__", None) or ()]
        inner = [
            tuple(parts(f) if callable(f) else f for f in (c if isinstance(c, tuple) else (c,)))
            for c in cells
        ]
        return getattr(function, "__code__", function), tuple(inner)

    return parts(mask_function) == parts(model)


def attention_mask(
    *args: Any,
    allow_is_causal_skip: bool = True,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **rest: Any,
) -> Tensor | None:
    """The function of ``AttentionMaskInterface``: None where the operator needs no matrix, else as ``sdpa`` has it."""
    from transformers.masking_utils import sdpa_mask

    rows, keys = rest.get("q_length"), rest.get("kv_length")
    if (
        not args
        and allow_is_causal_skip
        and rows is not None
        and rows == keys
        and not torch.compiler.is_compiling()
        and all(
            isinstance(rest.get(n, 0), int) and rest.get(n, 0) == 0
            for n in ("q_offset", "kv_offset")
        )
        and _is_window(rest.get("mask_function"), local_size)
        and (attention_mask is None or bool(attention_mask.all()))
    ):
        return None
    return sdpa_mask(
        *args,
        allow_is_causal_skip=allow_is_causal_skip,
        attention_mask=attention_mask,
        local_size=local_size,
        **rest,
    )


def register() -> None:
    """Makes the names of :data:`FUSED` known to transformers; twice is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in FUSED.values():
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, attention_mask)


def config_of(module: nn.Module) -> Any:
    """The configuration that names a module's attention, or None."""
    config = module.__dict__.get("config")
    return config if hasattr(config, "_attn_implementation") else None


@functools.cache
def _uses_interface(cls: type) -> bool:
    from transformers import AttentionInterface

    return any(
        isinstance(value, AttentionInterface)
        for _, method in forwards.methods(cls, nn.Module)
        for value in forwards.globals_used(method).values()
    )


def _consistent_window(module: nn.Module, config: Any) -> bool:
    """Whether the layer's mask is that of a sliding window exactly if the layer says so to its attention."""
    window = getattr(module, "sliding_window", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is None or index is None or index >= len(kinds):
        return True
    return (window is not None) == (kinds[index] == "sliding_attention")


def recognise(module: nn.Module) -> Verdict:
    """Whether a module asks ``AttentionInterface`` for its attention, and may get the fused one."""
    from transformers import PreTrainedModel

    config = config_of(module)
    if config is None or isinstance(module, PreTrainedModel) or not _uses_interface(type(module)):
        return None
    name = config._attn_implementation
    if name == "eager":
        return Miss("its attention is 'eager', which can return weights; choose 'sdpa' first")
    if name not in FUSED:
        return Miss(f"its attention is {name!r}")
    for attribute, reason in _EXTRAS.items():
        if getattr(module, attribute, None) is not None:
            return Miss(reason)
    if not _consistent_window(module, config):
        return Miss("its sliding window and the type of its layer differ")
    if "attention_interface" not in _source(type(module)):
        return Miss("its forward does not call the function that it looks up")
    return Match("npu_fusion_attention", (name,))


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return "attention_interface"


register()
