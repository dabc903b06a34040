"""Selective activation checkpointing that knows the fused operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.distributed.activation_checkpoint import SelectiveAC

# Matrix products and attention cost most to compute again; the other fused operators are cheap.
_SAVED = ("npu_linear", "npu_fusion_attention", "grouped_matmul", "moe_ffn")


class FusedSelectiveAC(SelectiveAC):
    """torchtitan's policy with the fused matrix products and attention, and the CPU's, among the operations whose results are kept."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        """torchtitan's set, the fused matrix products and attention, and the CPU's attention."""
        ops = super().get_save_ops()
        ops.add(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
        for name in _SAVED:
            if hasattr(torch.ops.jumar, name):
                ops.add(getattr(torch.ops.jumar, name).default)
        return ops
