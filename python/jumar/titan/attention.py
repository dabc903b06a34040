"""torchtitan's inner attention on ``npu_fusion_attention``: [B, L, N, H] in and out, in the dtype that comes in.

A mask whose rows are ranges of keys, as packed documents, windows and padding give, becomes variable-length calls; it
is read once a step and kept on the mask. Any other mask is handed over as a matrix. Context parallelism, which cuts
the queries and puts the keys in another order, is read the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
    VarlenMetadata,
)

from jumar import ops
from jumar.masks import attend, functions
from jumar.titan.nodes import Converter

_OP = "npu_sdpa"


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


#: What to do about a refusal.
_LEAVE = "leave npu_sdpa out of the converters of this model"


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            shown = getattr(value, "__qualname__", value)
            raise NotImplementedError(f"{_OP}: {name} must be None, got {shown}; {_LEAVE}")


def _sinks(out_transform: Any, query: Tensor) -> Tensor | None:
    """The sinks of a gpt_oss layer, whose epilogue ``out * sigmoid(lse - sink)`` is one more term under the softmax."""
    model = sys.modules.get("torchtitan.models.gpt_oss.model")
    if model is None or getattr(out_transform, "__func__", None) is not model.Attention._apply_sinks:
        return None
    sinks = out_transform.__self__.sinks
    if isinstance(sinks, DTensor):
        sinks = sinks.to_local(grad_placements=sinks.placements)
    return functions.sinks_for(query, sinks)


class FusedFlexAttention(FlexAttention):
    """FlexAttention's place taken by ``npu_fusion_attention``, with the same BlockMask honoured exactly.

    Raises:
        NotImplementedError: a score modification, or an epilogue other than that of gpt_oss's sinks, is asked for.
        TypeError: the mask is no BlockMask.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        q_BLNH, k_BLNH, v_BLNH = functions.autocast(q_BLNH, k_BLNH, v_BLNH)
        sink = _sinks(out_transform, q_BLNH)
        _refuse(score_mod=score_mod, out_transform=out_transform if sink is None else None)
        if not isinstance(attention_masks, BlockMask):
            raise TypeError(f"{_OP}: attention_masks must be a BlockMask, got {type(attention_masks).__name__}")
        options = {"scale": _scale(q_BLNH, scale), "sink": sink}
        hidden = functions.plan_of(attention_masks, q_BLNH.shape[0])
        if isinstance(hidden, attend.Plan):
            return attend.attend(q_BLNH, k_BLNH, v_BLNH, hidden, **options)
        return ops.npu_fusion_attention(
            q_BLNH, k_BLNH, v_BLNH, q_BLNH.shape[2], "BSND", atten_mask=hidden, sparse_mode=1, **options
        )[0]


class FusedScaledDotProductAttention(ScaledDotProductAttention):
    """Causal or full attention without a mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        if attention_masks is not None:
            raise ValueError(f"{_OP}: ScaledDotProductAttention takes no attention_masks")
        q_BLNH, k_BLNH, v_BLNH = functions.autocast(q_BLNH, k_BLNH, v_BLNH)
        # torch's causal mask begins at the upper left.
        arguments = attend.upper_left(q_BLNH.device) if is_causal else {}
        return ops.npu_fusion_attention(
            q_BLNH, k_BLNH, v_BLNH, q_BLNH.shape[2], "BSND", scale=_scale(q_BLNH, scale), **arguments
        )[0]


class FusedVarlenAttention(VarlenAttention):
    """Packed sequences by their lengths, in the dtype that comes in (torchtitan's goes through bf16)."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        _refuse(out_transform=out_transform)
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(f"{_OP}: attention_masks must be VarlenMetadata, got {type(attention_masks).__name__}")
        left, right = self.window_size
        if right not in (0, -1) or (right == -1 and left != -1):
            raise NotImplementedError(
                f"{_OP}: window_size must be (n, 0), (-1, 0) or (-1, -1), got {self.window_size}; {_LEAVE}"
            )
        q_BLNH, k_BLNH, v_BLNH = functions.autocast(q_BLNH, k_BLNH, v_BLNH)
        arguments = {} if right == -1 else attend.packed_band(q_BLNH.device, None if left == -1 else left + 1)
        out = ops.npu_fusion_attention(
            *(t.flatten(0, 1) for t in (q_BLNH, k_BLNH, v_BLNH)),
            q_BLNH.shape[2],
            "TND",
            scale=_scale(q_BLNH, scale),
            actual_seq_qlen=attention_masks.cu_seq_q[1:].tolist(),
            actual_seq_kvlen=attention_masks.cu_seq_k[1:].tolist(),
            **arguments,
        )[0]
        return out.unflatten(0, q_BLNH.shape[:2])


_REPLACEMENTS = {
    FlexAttention.Config: FusedFlexAttention.Config,
    ScaledDotProductAttention.Config: FusedScaledDotProductAttention.Config,
    VarlenAttention.Config: FusedVarlenAttention.Config,
}


CONVERTER = Converter("npu_sdpa", "npu_fusion_attention", tuple(_REPLACEMENTS), _REPLACEMENTS)
