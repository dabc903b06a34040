"""The fused operators under their Ascend names, differentiable, for CPU and (through ``torch_npu``) for the card.

Each function calls ``torch.ops.jumar.NAME``, or ``torch.ops.npu.NAME`` when its tensor lies on a real ``npu``.
"""

from __future__ import annotations

from jumar.ops.attention import (
    npu_fusion_attention,
    npu_fusion_attention_grad,
    npu_fusion_attention_grad_v2,
    npu_fusion_attention_grad_v3,
    npu_fusion_attention_v2,
    npu_fusion_attention_v3,
)
from jumar.ops.attention_update import npu_attention_update, npu_ring_attention_update
from jumar.ops.balance import expert_bias_update, load_balance_loss, router_z_loss
from jumar.ops.grouped_matmul import grouped_matmul
from jumar.ops.lightning_indexer import (
    npu_dense_lightning_indexer_grad_kl_loss,
    npu_dense_lightning_indexer_softmax_lse,
    npu_lightning_indexer,
    npu_lightning_indexer_grad,
    npu_sparse_lightning_indexer_grad_kl_loss,
)
from jumar.ops.linear import npu_linear, npu_linear_backward
from jumar.ops.loss import (
    linear_cross_entropy,
    npu_cross_entropy_loss,
    npu_cross_entropy_loss_backward,
)
from jumar.ops.masked_softmax import (
    npu_scaled_masked_softmax,
    npu_scaled_masked_softmax_backward,
)
from jumar.ops.moe_ffn import moe_ffn
from jumar.ops.moe_permute import (
    expert_counts,
    npu_moe_token_permute,
    npu_moe_token_permute_grad,
    npu_moe_token_permute_grad_v2,
    npu_moe_token_unpermute,
    npu_moe_token_unpermute_grad,
    npu_moe_token_unpermute_grad_v2,
)
from jumar.ops.moe_routing import (
    npu_moe_finalize_routing,
    npu_moe_init_routing,
    npu_moe_init_routing_v2,
    npu_moe_re_routing,
)
from jumar.ops.moe_routing_map import (
    npu_moe_token_permute_with_routing_map,
    npu_moe_token_permute_with_routing_map_grad,
    npu_moe_token_unpermute_with_routing_map,
    npu_moe_token_unpermute_with_routing_map_grad,
)
from jumar.ops.npu_grouped_matmul import npu_grouped_matmul, npu_grouped_matmul_add
from jumar.ops.optimizer import npu_apply_adam_w
from jumar.ops.rms_norm import (
    npu_add_rms_norm,
    npu_gemma_rms_norm,
    npu_rms_norm,
    npu_rms_norm_backward,
    rms_norm_gated,
)
from jumar.ops.rotary import npu_interleave_rope, npu_rotary_mul, npu_rotary_mul_backward
from jumar.ops.router import (
    npu_moe_gating_top_k,
    npu_moe_gating_top_k_backward,
    npu_moe_gating_top_k_softmax,
    npu_moe_gating_top_k_softmax_v2,
    router_top_k,
)
from jumar.ops.sparse_attention import (
    npu_sparse_flash_attention,
    npu_sparse_flash_attention_grad,
)
from jumar.ops.swiglu import npu_swiglu, npu_swiglu_backward, swiglu_gate_up
from jumar.ops.ulp_error import ulp_error

__all__ = [
    "expert_bias_update",
    "expert_counts",
    "grouped_matmul",
    "linear_cross_entropy",
    "load_balance_loss",
    "moe_ffn",
    "npu_add_rms_norm",
    "npu_apply_adam_w",
    "npu_attention_update",
    "npu_cross_entropy_loss",
    "npu_cross_entropy_loss_backward",
    "npu_dense_lightning_indexer_grad_kl_loss",
    "npu_dense_lightning_indexer_softmax_lse",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_fusion_attention_grad_v2",
    "npu_fusion_attention_grad_v3",
    "npu_fusion_attention_v2",
    "npu_fusion_attention_v3",
    "npu_gemma_rms_norm",
    "npu_grouped_matmul",
    "npu_grouped_matmul_add",
    "npu_interleave_rope",
    "npu_lightning_indexer",
    "npu_lightning_indexer_grad",
    "npu_linear",
    "npu_linear_backward",
    "npu_moe_finalize_routing",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_backward",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_gating_top_k_softmax_v2",
    "npu_moe_init_routing",
    "npu_moe_init_routing_v2",
    "npu_moe_re_routing",
    "npu_moe_token_permute",
    "npu_moe_token_permute_grad",
    "npu_moe_token_permute_grad_v2",
    "npu_moe_token_permute_with_routing_map",
    "npu_moe_token_permute_with_routing_map_grad",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_grad",
    "npu_moe_token_unpermute_grad_v2",
    "npu_moe_token_unpermute_with_routing_map",
    "npu_moe_token_unpermute_with_routing_map_grad",
    "npu_ring_attention_update",
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_rotary_mul",
    "npu_rotary_mul_backward",
    "npu_scaled_masked_softmax",
    "npu_scaled_masked_softmax_backward",
    "npu_sparse_flash_attention",
    "npu_sparse_flash_attention_grad",
    "npu_sparse_lightning_indexer_grad_kl_loss",
    "npu_swiglu",
    "npu_swiglu_backward",
    "rms_norm_gated",
    "router_top_k",
    "router_z_loss",
    "swiglu_gate_up",
    "ulp_error",
]
