"""FlexAttention's place taken by ``F.scaled_dot_product_attention``, with the same block mask honoured exactly.

The subclass keeps what torchtitan attaches to FlexAttention: the BlockMask as its mask input, the gathering of keys and
values under context parallelism, the sharding by argument name. Packed documents therefore stay apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.models.common.attention import FlexAttention

_DENSE = "_jumar_dense"


def _slow_bfloat16() -> bool:
    """Without bf16 instructions torch's attention multiplies bf16 matrices ten times slower than fp32 ones."""
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        return True
    return torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()


WIDEN = _slow_bfloat16()


def dense_mask(block_mask: BlockMask) -> Tensor:
    """The mask as bool [B or 1, H or 1, Q, K]: True where a query sees a key.

    Made where it is first needed and kept on the mask, but for compiled graphs, which make it anew. Built from
    ``mask_mod``, so it is exact at any length, also for the part of a mask that a rank holds under context parallelism.
    """
    mask = getattr(block_mask, _DENSE, None)
    if mask is None:
        batch, heads = block_mask.kv_num_blocks.shape[:2]
        queries, keys = block_mask.seq_lengths
        device = block_mask.kv_num_blocks.device
        mask = create_mask(block_mask.mask_mod, batch, heads, queries, keys, device=str(device))
        if not torch.compiler.is_compiling():
            setattr(block_mask, _DENSE, mask)
    return mask


class SdpaFlexAttention(FlexAttention):
    """Inner attention of a language model on a CPU; [B, L, N, H] in and out.

    bf16 is computed in fp32, and rounded once at the end, on CPUs that have no bf16 instructions.

    Raises:
        NotImplementedError: a score modification, or an epilogue that needs the log-sum-exp, is asked for.
    """

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
        for name, given in (("score_mod", score_mod), ("out_transform", out_transform)):
            if given is not None:
                shown = getattr(given, "__qualname__", given)
                raise NotImplementedError(
                    f"SdpaFlexAttention: {name} must be None on a CPU, got {shown}; npu_sdpa among the converters has gpt_oss's "
                    "sinks, else train this model on a device that has FlexAttention"
                )
        if not isinstance(attention_masks, BlockMask):
            raise TypeError(f"attention_masks must be a BlockMask, got {type(attention_masks).__name__}")
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        dtype = q.dtype
        if WIDEN and dtype == torch.bfloat16:
            q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=dense_mask(attention_masks), scale=scale, enable_gqa=enable_gqa
        )
        return out.to(dtype).transpose(1, 2)


