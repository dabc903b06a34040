"""Attention of transformers models through the library's own extension points.

A model names its attention by ``config._attn_implementation``; attention modules look the function up in
``AttentionInterface``, masks are made by the function of the same name in ``AttentionMaskInterface``.  This file
registers a pair under names of its own and recognises the modules that ask for it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn

from jumar.convert.swap import original_class
from jumar.convert.verdict import Match, Miss, Verdict
from jumar.hf import forwards, lengths, traced_masks
from jumar.hf.masks import LazyMask, attention_mask
from jumar.hf.traced_masks import TracedMask
from jumar.masks import attend, functions

#: Names of the fused attention that a conversion sets, by the implementation that a model had before.
FUSED = {"sdpa": "npu_sdpa_for_sdpa", "eager": "npu_sdpa_for_eager"}
#: Names of the same for those who choose it themselves, by ``attn_implementation="npu_sdpa"``; no conversion takes them back.
PUBLIC = ("npu_sdpa", "jumar")
#: Attributes of modules that stand for arithmetic the operator does not have.
_EXTRAS = ("attn_logit_softcapping", "logit_softcapping")


def original_of(name: str | None) -> str | None:
    """What a name that a conversion has set stands for, or None for another name."""
    return next((original for original, fused in FUSED.items() if fused == name), None)


def is_fused(name: str | None) -> bool:
    """Whether an implementation's name is one of those that are registered here."""
    return name in PUBLIC or original_of(name) is not None


def function_of(module: nn.Module) -> Any:
    """The function that a module's configuration names; ``eager`` is a function of the module's file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    file = sys.modules[original_class(module).__module__]
    eager = getattr(file, "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get(config_of(module)._attn_implementation, eager)


def _fall_back(module: nn.Module, reason: str, *tensors: Any, **rest: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import logging

    logging.get_logger(__name__).warning_once(
        f"npu_sdpa: {type(module).__name__} runs torch's attention here: {reason}"
    )
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *tensors, **rest)


def _attend_lazily(
    tensors: list[Tensor], mask: LazyMask, starts: tuple[Tensor, Tensor] | None, options: dict[str, Any]
) -> Tensor:
    """Attention under a mask of ranges, cut to sequences that begin at ``starts``."""
    if starts is None:
        return attend.attend(*tensors, mask.plan, **options)
    if not torch.compiler.is_compiling():
        return attend.attend(*tensors, mask.within(starts), **options)
    plan, device = mask.plan, tensors[0].device
    batch, rows = plan.ranges.first.shape
    starts = lengths.check(starts, batch, rows, plan.ranges.keys)
    if plan.calls is not None and len(plan.calls) == 1 and plan.ends[0][0]:
        ends = lengths.merged(plan.ends[0][1], starts)
        hides = attend.packed_band(device, plan.calls[0].window, True) if plan.calls[0].causal else {}
        return attend.packed(*tensors, (ends, ends), options | hides)
    hidden = plan.matrix() | ~lengths.together(starts, batch, rows, plan.ranges.keys)
    return attend.whole(*tensors, options | {"atten_mask": hidden.to(device), "sparse_mode": 1})


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
    """The function of ``AttentionInterface``: [B, N, S, D] in, [B, S, N, D] out, as ``sdpa`` has it.

    Without a mask it is causal from the upper left or full, as ``sdpa`` decides, in sequences where ``cu_seq_lens_q`` and
    ``cu_seq_lens_k`` are given. ``s_aux``: one more score per head. Raises NotImplementedError where a layer with sinks
    also has what the operator lacks, and where keys are chosen by indices; the operator's RuntimeError where lengths do not
    add up to the tokens.
    """
    if rest.get("indices") is not None:
        raise NotImplementedError(
            f"npu_sdpa: {type(module).__name__} chooses its keys by indices {list(rest['indices'].shape)}; "
            "convert it with npu_dsa, or set another attn_implementation"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sink = rest.get("s_aux")
    if isinstance(attention_mask, LazyMask) and attention_mask.changed:
        attention_mask = attention_mask.value()
    lazy = isinstance(attention_mask, LazyMask | TracedMask)
    starts = lengths.given(rest)
    options: dict[str, Any] = {}
    query, key, value = functions.autocast(query, key, value)
    reason = functions.unsupported(query, key, value)
    if rest.get("position_bias") is not None or rest.get("softcap") is not None:
        reason = "its scores take a bias or a cap"
    elif attention_mask is not None and not lazy:
        keys = key.shape[2]
        mask = attention_mask if attention_mask.dim() == 4 else attention_mask[:, None]
        mask = mask[..., :keys]
        if mask.dtype == torch.bool:
            if starts is not None:
                sizes = query.shape[0], query.shape[2], keys
                mask = mask & lengths.together(lengths.check(starts, *sizes), *sizes).to(mask.device)
            # The operator's sense: True hides.
            options = {"atten_mask": mask.logical_not(), "sparse_mode": 1}
        elif reason is None:
            options = functions.bias_arguments(mask, query, keys, scale)
            if options is None:
                reason = f"its mask is an additive bias of {mask.dtype}"
    if reason is not None:
        if sink is not None:
            raise NotImplementedError(
                f"npu_sdpa: {type(module).__name__} has sinks, and {reason}; set attn_implementation to 'eager'"
            )
        attention_mask = attention_mask.value() if lazy else attention_mask
        rest = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **rest}
        return _fall_back(module, reason, query, key, value, attention_mask, **rest)
    options |= {"scale": scale, "keep_prob": 1.0 - dropout}
    if sink is not None:
        options["sink"] = functions.sinks_for(query, sink)
    tensors = [t.transpose(1, 2) for t in (query, key, value)]
    if isinstance(attention_mask, TracedMask):
        return attention_mask.attend(*tensors, starts, options), None
    if lazy:
        return _attend_lazily(tensors, attention_mask, starts, options), None
    if attention_mask is None:
        rows = query.shape[2]
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        causal = bool(causal and rows > 1)
        if starts is not None:
            # Compiled code has no numbers to look at.
            numbers = not torch.compiler.is_compiling()
            ends = tuple(t[1:].tolist() if numbers else t[1:].cpu() for t in starts)
            alike = ends[0] == ends[1] if numbers else starts[0] is starts[1]
            band = attend.packed_band(query.device, None, alike) if causal else {}
            return attend.packed(*tensors, ends, options | band), None
        if causal:
            options |= attend.upper_left(query.device)
    return attend.whole(*tensors, options), None


def register() -> None:
    """Makes the names of :data:`FUSED` and :data:`PUBLIC` known to transformers; twice is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (*FUSED.values(), *PUBLIC):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, attention_mask)
    traced_masks.register()


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


def recognise(module: nn.Module) -> Verdict:
    """Whether a module asks ``AttentionInterface`` for its attention, and may get the fused one."""
    from transformers import PreTrainedModel

    config = config_of(module)
    if config is None or isinstance(module, PreTrainedModel) or not _uses_interface(type(module)):
        return None
    if any(getattr(module, attribute, None) is not None for attribute in _EXTRAS):
        return Miss("its scores are capped")
    name = config._attn_implementation
    source = _source(type(module))
    # Layers with sinks have no other form on a CPU.
    sinks = getattr(module, "sinks", None) is not None
    if name == "eager" and not (sinks and "s_aux=" in source):
        return Miss("its attention is 'eager', which can return weights; choose 'sdpa' first")
    if "topk_indices" in source:
        return Miss("its keys are chosen by an indexer, as npu_dsa does it")
    if name not in FUSED:
        return Miss(f"its attention is {name!r}")
    if sinks and "s_aux=" not in source:
        return Miss("it has attention sinks, which it does not hand to its attention")
    if "attention_interface" not in source:
        return Miss("its forward does not call the function that it looks up")
    return Match("npu_fusion_attention", (PACKED,) if _splits(type(module)) else ())


#: Key of a class whose forward takes sequences apart that the operator takes as they are.
PACKED = "packed"
_FLASH = "is_flash_attention_requested"
_FLASH_457 = "flash_attention_2"


def _consts(code: types.CodeType) -> set[Any]:
    return {c for c in code.co_consts if isinstance(c, str)}.union(
        *(c for c in code.co_consts if isinstance(c, tuple))
    )


def _splits(cls: type) -> bool:
    """Whether ``cls.forward`` has a path with ``cu_seq_lens_q``, and takes it for flash attention only."""
    forward = inspect.getattr_static(cls, "forward", None)
    if not isinstance(forward, types.FunctionType) or hasattr(forward, "__wrapped__"):
        return False
    consts = _consts(forward.__code__)
    asks = _FLASH in forwards.globals_used(forward) or _FLASH_457 in consts
    return asks and "cu_seq_lens_q" in consts


def packed_namespace(base: type) -> dict[str, Any]:
    """The methods of a class that :func:`_splits`, taking the path of whole sequences."""
    spaces: dict[int, dict] = {}
    forward = inspect.getattr_static(base, "forward")
    new = forwards.rebuild(forward, {_FLASH: lambda *args, **kwargs: True}, spaces)
    consts = tuple(FUSED["sdpa"] if c == _FLASH_457 else c for c in new.__code__.co_consts)
    new.__code__ = new.__code__.replace(co_consts=consts)
    return {"forward": new, "__jumar_attention_globals__": forwards.Keeper(spaces)}


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return "attention_interface"


register()
