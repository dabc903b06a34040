"""torch's attention functions on ``npu_fusion_attention``: ``scaled_dot_product_attention`` and ``flex_attention``.

Each takes the arguments of the function that it stands for. What the operator does not have goes to that function,
unchanged, so that results and errors are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from jumar import ops
from jumar.masks import attend, blocks

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DEVICES = ("cpu", "meta", "npu")
_PLANS = "_jumar_plans"


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype that autocast gives torch's attention, where it is on; one that comes twice stays one."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    made: list[Tensor] = []
    for at, t in enumerate(tensors):
        first = next(i for i, other in enumerate(tensors) if other is t)
        wide = t.is_floating_point() and t.dtype != torch.float64
        made.append(made[first] if first < at else t.to(dtype) if wide else t)
    return tuple(made)


def sinks_for(query: Tensor, sinks: Tensor) -> Tensor:
    """Sinks in the dtype that the operator has them in beside a query."""
    return sinks.to(torch.promote_types(query.dtype, torch.float32))


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why [B, N, S, D] tensors are nothing for the operator, or None."""
    tensors = (query, key, value)
    if any(isinstance(t, DTensor) or t.is_nested for t in tensors):
        return "its tensors are nested or distributed"
    if len({(t.dtype, t.device) for t in tensors}) != 1 or query.dtype not in _DTYPES:
        return "its tensors differ in dtype or device, or are no floats"
    if query.device.type not in _DEVICES:
        return f"there is no kernel for device {query.device.type!r}"
    if any(t.dim() != 4 or t.numel() == 0 for t in tensors):
        return "its tensors have not four dimensions, or no elements"
    same = query.shape[0] == key.shape[0] == value.shape[0] and key.shape[1:3] == value.shape[1:3]
    if not same or query.shape[3] != key.shape[3] or query.shape[1] % key.shape[1]:
        return "its shapes are broadcast"
    return None


def bias_arguments(bias: Tensor, query: Tensor, keys: int, scale: float) -> dict[str, Any] | None:
    """The operator's arguments for an additive bias [B | 1, N | 1, Q | 1, K], or None where it would not be exact.

    Minus infinity hides. So does the lowest finite number, where its row has another: its exponential is 0. Anything
    else is a bias, divided by the scale because the operator scales it; in 16 bits that must be a power of two, unless all
    that is not hidden is 0.
    """
    (bias,) = autocast(bias)
    if bias.dtype != query.dtype or torch.compiler.is_compiling():
        return None
    values = bias.detach()
    hidden = values <= torch.finfo(bias.dtype).min / 2
    alive = ~hidden.all(-1)
    if not bool((alive | (values == -torch.inf).all(-1)).all()):
        return None
    pse = torch.where(hidden, torch.zeros((), dtype=bias.dtype, device=bias.device), bias) / scale
    inexact = query.dtype.itemsize == 2 and math.frexp(scale)[0] != 0.5
    if not bool(pse.detach().isfinite().all()) or (inexact and bool(pse.detach().any())):
        return None
    shape = (query.shape[0], query.shape[1], query.shape[2], keys)
    return {"pse": pse.expand(shape), "atten_mask": hidden.expand(shape), "sparse_mode": 1}


def _four(mask: Tensor, query: Tensor, keys: int) -> Tensor:
    """A mask that broadcasts to [B, N, Q, K], with four dimensions and all of its columns."""
    mask = mask[(None,) * (4 - mask.dim())]
    batch = mask.shape[0] if mask.shape[1] == 1 else query.shape[0]
    return mask.expand(batch, mask.shape[1], query.shape[2], keys)


def _heads_together(query: Tensor) -> bool:
    """Whether [B, N, S, D] lies as [B, S, N, D]. Results lie as the query does, as torch's do: callers take views."""
    return query.stride(1) < query.stride(2)


def _call(query: Tensor, key: Tensor, value: Tensor, scale: float | None, **options: Any) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    together = _heads_together(query)
    tensors = (t.transpose(1, 2) if together else t for t in (query, key, value))
    layout = "BSND" if together else "BNSD"
    out = ops.npu_fusion_attention(*tensors, query.shape[1], layout, scale=scale, **options)[0]
    return out.transpose(1, 2) if together else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``."""

    def torchs() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    if query.dim() == key.dim() == value.dim() == 3 and (attn_mask is None or attn_mask.dim() <= 3):
        mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask.unsqueeze(1)
        wide = (t.unsqueeze(1) for t in (query, key, value))
        out = scaled_dot_product_attention(*wide, mask, dropout_p, is_causal, scale, enable_gqa)
        return out.squeeze(1)
    q, k, v = autocast(query, key, value)
    if dropout_p == 1.0 or unsupported(q, k, v) or (q.shape[1] != k.shape[1] and not enable_gqa):
        return torchs()
    if attn_mask is not None and (
        is_causal or attn_mask.dim() > 4 or isinstance(attn_mask, DTensor)
    ):
        return torchs()
    keys, options = k.shape[2], {}
    if is_causal:
        options = attend.upper_left(q.device)
    elif attn_mask is not None:
        mask = _four(attn_mask, q, keys)
        if mask.dtype == torch.bool:
            # The operator's sense: True hides.
            options = {"atten_mask": mask.logical_not(), "sparse_mode": 1}
        else:
            size = q.shape[-1] ** -0.5 if scale is None else scale
            options = bias_arguments(mask, q, keys, size)
            if options is None:
                return torchs()
    return _call(q, k, v, scale, keep_prob=1.0 - dropout_p, **options)


def _traced(mask: BlockMask) -> Tensor:
    batch, heads = mask.kv_num_blocks.shape[:2]
    device = str(mask.kv_num_blocks.device)
    return create_mask(mask.mask_mod, batch, heads, *mask.seq_lengths, device=device).logical_not()


def plan_of(mask: BlockMask, batch: int) -> attend.Plan | Tensor:
    """A plan for a BlockMask, or the operator's matrix where it has none; made once a mask and kept on it.

    Compiled code makes the matrix, anew each time.
    """
    if torch.compiler.is_compiling():
        return _traced(mask)
    plans = mask.__dict__.setdefault(_PLANS, {})
    if batch not in plans:
        with torch.inference_mode(False):
            found = blocks.ranges_of(mask, batch)
            plans[batch] = blocks.hidden(mask) if found is None else attend.Plan(found)
    return plans[batch]


def _fits(mask: BlockMask | None, query: Tensor, key: Tensor) -> bool:
    if mask is None:
        return True
    batch, heads = mask.kv_num_blocks.shape[:2]
    lengths = (query.shape[2], key.shape[2])
    sizes = batch in (1, query.shape[0]) and heads in (1, query.shape[1])
    return sizes and tuple(mask.seq_lengths) == lengths


def flex_attention_by(original: Callable) -> Callable:
    """``torch.nn.attention.flex_attention.flex_attention`` or a compiled form of it: block masks, no score_mod."""

    def flex_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: BlockMask | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        **rest: Any,
    ) -> Any:
        other = score_mod is not None or return_lse or any(v is not None for v in rest.values())
        q, k, v = autocast(query, key, value)
        other = other or bool(unsupported(q, k, v))
        other = other or (q.shape[1] != k.shape[1] and not enable_gqa)
        if other or not _fits(block_mask, q, k):
            return original(
                query,
                key,
                value,
                score_mod,
                block_mask,
                scale,
                enable_gqa,
                return_lse,
                kernel_options,
                **rest,
            )
        if block_mask is None:
            return _call(q, k, v, scale)
        plan = plan_of(block_mask, q.shape[0])
        if isinstance(plan, Tensor):
            return _call(q, k, v, scale, atten_mask=plan, sparse_mode=1)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        packed = (t.transpose(1, 2) for t in (q, k, v))
        out = attend.attend(*packed, plan, scale=scale).transpose(1, 2)
        return out if _heads_together(q) else out.contiguous()

    return flex_attention
