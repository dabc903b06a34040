"""torchtitan 0.2.x's mixture of experts on fused operators: its modules get subclasses with another forward.

Parameters and buffers stay: the count of tokens per expert and the expert bias are what they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import GroupedExperts, MoE, TokenChoiceTopKRouter

from jumar import ops
from jumar.experts import StackedExperts, route


class FusedGroupedExperts(GroupedExperts, StackedExperts):
    """Experts by ``grouped_matmul`` and ``swiglu_gate_up``, in the dtype of x.

    No copy in padded groups is made. Rows after the last group, which expert parallelism adds, give zeros.
    """

    stacks = ("w1", "w3", "w2")

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return self.grouped(x, num_tokens_per_expert.to(torch.int64))


class FusedRouter(TokenChoiceTopKRouter):
    """Scores, groups, choice and weights of experts by ``router_top_k``, their tokens by ``expert_counts``."""

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        weights, ids, _ = route(self, self.gate(x), expert_bias)
        return weights, ids, ops.expert_counts(ids, self.num_experts)


class FusedMoE(MoE):
    """Rows in expert order by ``npu_moe_token_permute``, their weighted sums by ``npu_moe_token_unpermute``.

    ``moe_ffn`` does all of it where the experts are fused, whole and not hooked, and their results are weighed.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        scores, ids, counts = self.router(rows, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        shared = self.shared_experts(rows) if self.shared_experts is not None else None
        out = self._routed(rows, scores, ids, counts)
        return (out if shared is None else shared + out).view(x.shape)

    def _routed(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        experts = self.experts
        # Every form of parallelism of torchtitan 0.2 works by hooks.
        hooked = experts._forward_hooks or experts._forward_pre_hooks
        if isinstance(experts, FusedGroupedExperts) and not self.score_before_experts and not hooked:
            return experts.routed(x, ids, scores)
        rows, positions = ops.npu_moe_token_permute(x, ids)
        if self.score_before_experts:
            by_row, _ = ops.npu_moe_token_permute(scores.reshape(-1, 1), ids.reshape(-1))
            rows = (rows.float() * by_row).to(x.dtype)
            scores = torch.ones_like(scores)
        return ops.npu_moe_token_unpermute(experts(rows, counts), positions, scores).to(x.dtype)


#: For a converter, the class that it looks at, the one that it gives, and the operator.
_FORMS = {
    "npu_gmm": (GroupedExperts, FusedGroupedExperts, "grouped_matmul or moe_ffn"),
    "npu_permute": (MoE, FusedMoE, "npu_moe_token_permute or moe_ffn"),
    "npu_router": (TokenChoiceTopKRouter, FusedRouter, "router_top_k"),
}


def operator(name: str) -> str | None:
    """The operator of a converter; None for one that has nothing to do with experts."""
    return _FORMS[name][2] if name in _FORMS else None


def fused_class(name: str, module: nn.Module, parallel_dims: Any) -> type | str | None:
    """The class to give a module; why there is none, as text; None where the converter has nothing to say."""
    target, fused, _ = _FORMS[name]
    if not isinstance(module, target):
        return None
    if isinstance(module, fused):
        return "already converted"
    if type(module) is not target:
        return f"{type(module).__qualname__} computes more than {target.__qualname__}"
    if getattr(module, "_debug_force_load_balance", False):
        return "_debug_force_load_balance routes by position, not by scores"
    if name == "npu_permute" and parallel_dims.tp_enabled and parallel_dims.ep_enabled and parallel_dims.etp == 1:
        return "its tensor-parallel ranks share out the tokens, which the module's own reordering does"
    return fused
