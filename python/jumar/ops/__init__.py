"""The fused operators under their Ascend names, differentiable, for CPU and (through ``torch_npu``) for the card.

Each function calls ``torch.ops.jumar.NAME``, or ``torch.ops.npu.NAME`` when its tensor lies on a real ``npu``.
"""

from __future__ import annotations

from jumar.ops.linear import npu_linear, npu_linear_backward
from jumar.ops.loss import (
    linear_cross_entropy,
    npu_cross_entropy_loss,
    npu_cross_entropy_loss_backward,
)
from jumar.ops.moe_permute import (
    expert_counts,
    npu_moe_token_permute,
    npu_moe_token_permute_grad,
    npu_moe_token_permute_grad_v2,
    npu_moe_token_unpermute,
    npu_moe_token_unpermute_grad,
    npu_moe_token_unpermute_grad_v2,
)
from jumar.ops.optimizer import npu_apply_adam_w
from jumar.ops.rms_norm import (
    npu_add_rms_norm,
    npu_gemma_rms_norm,
    npu_rms_norm,
    npu_rms_norm_backward,
    rms_norm_gated,
)
from jumar.ops.rotary import npu_rotary_mul, npu_rotary_mul_backward
from jumar.ops.swiglu import npu_swiglu, npu_swiglu_backward, swiglu_gate_up
from jumar.ops.ulp_error import ulp_error

__all__ = [
    "expert_counts",
    "linear_cross_entropy",
    "npu_add_rms_norm",
    "npu_apply_adam_w",
    "npu_cross_entropy_loss",
    "npu_cross_entropy_loss_backward",
    "npu_gemma_rms_norm",
    "npu_linear",
    "npu_linear_backward",
    "npu_moe_token_permute",
    "npu_moe_token_permute_grad",
    "npu_moe_token_permute_grad_v2",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_grad",
    "npu_moe_token_unpermute_grad_v2",
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_rotary_mul",
    "npu_rotary_mul_backward",
    "npu_swiglu",
    "npu_swiglu_backward",
    "rms_norm_gated",
    "swiglu_gate_up",
    "ulp_error",
]
