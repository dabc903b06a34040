"""Selective activation checkpointing that knows the fused operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.distributed.activation_checkpoint import SelectiveAC

# Matrix products and attention cost most to compute again; the other fused operators are cheap.
_SAVED = (
    "npu_linear", "npu_fusion_attention", "sparse_attention", "lightning_indexer", "grouped_matmul", "head_matmul", "moe_ffn",
)  # fmt: skip


class FusedSelectiveAC(SelectiveAC):
    """torchtitan's policy; also kept are the results of fused matrix products and attention, and of the CPU's attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        """The operators whose results are kept."""
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return super().get_save_ops() | {attention, *(getattr(torch.ops.jumar, name).default for name in _SAVED)}
