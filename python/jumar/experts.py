"""What mixtures of experts of either release of torchtitan run on fused operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar import ops
from jumar.dtensor import local


class StackedExperts:
    """For a class of stacked experts, ``w2(silu(w1 x) * w3 x)`` each: their parameters [E, F, D] are used as they lie."""

    #: Names of w1, w3 and w2.
    stacks: tuple[str, str, str]

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """(gate [E, D, F], up [E, D, F], down [E, F, D]): views of this rank's part of the parameters."""
        return tuple(local(getattr(self, name)).to(dtype).transpose(1, 2) for name in self.stacks)

    def grouped(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, by ``grouped_matmul`` and ``swiglu_gate_up`` in the dtype of x; rows of none give 0."""
        *gate_up, down = self.weights(x.dtype)
        gated = ops.swiglu_gate_up(*(ops.grouped_matmul(x, w, counts, group_list_type=1) for w in gate_up))
        return ops.grouped_matmul(gated, down, counts, group_list_type=1)

    def routed(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        """The weighted sum of every token's experts by ``moe_ffn``: x [T, D], ids and scores [T, K] -> [T, D]."""
        gate, up, down = self.weights(x.dtype)
        return ops.moe_ffn(x, ids, scores, gate, down, up)


def route(router: Any, logits: Tensor, bias: Tensor | None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``router_top_k`` by the settings of a ``TokenChoiceTopKRouter``; ``bias`` takes part in the choice only."""
    return ops.router_top_k(
        logits,
        router.top_k,
        scoring=router.score_func,
        renorm=router.route_norm,
        bias=bias,
        n_group=router.num_expert_groups or 1,
        topk_group=router.num_limited_groups or 1,
        scale=router.route_scale,
        eps=1e-20,
        wide_weights=True,
        **options,
    )
