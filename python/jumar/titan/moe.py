"""torchtitan's mixture of experts with its forward on fused operators: router, token dispatch, experts.

Parameters, buffers, initialisation, sharding and the exchange of tokens between ranks are the parents'. ``MoE`` itself is
torchtitan's: its count of tokens per expert and its expert bias are what they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torchtitan.distributed.spmd_types import current_spmd_mesh, maybe_set_sparse_mesh
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
    LocalTokenDispatcher,
)

from jumar import ops
from jumar.dtensor import local
from jumar.experts import StackedExperts, route
from jumar.titan.modules import FusedLinear, adopt_signature
from jumar.titan.nodes import Converter


class FusedGroupedExperts(GroupedExperts, StackedExperts):
    """Experts by ``grouped_matmul`` and ``swiglu_gate_up``, in the dtype of x.

    The parent rounds to bf16 whatever the dtype, because torch's grouped product knows nothing else.
    """

    stacks = ("w1_EFD", "w3_EFD", "w2_EDF")

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    @adopt_signature(GroupedExperts)
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        if spmd.is_type_checking():
            return GroupedExperts.forward(self, x, counts)
        return self.grouped(x, local(counts))


def _combine(rows: Tensor, metadata: LocalDispatchMetadata, x: Tensor) -> Tensor:
    """The weighted sum of every token's rows: [T * K, D] -> [T, D]."""
    positions, scores = metadata.token_indices_experts_sorted_N, metadata.topk_scores_experts_sorted_N
    return ops.npu_moe_token_unpermute(rows, positions, scores).type_as(x)


class FusedLocalTokenDispatcher(LocalTokenDispatcher):
    """Rows in expert order by ``npu_moe_token_permute``, their weighted sums by ``npu_moe_token_unpermute``.

    In the parent's metadata stand the row of each slot [T * K] and the scores as they came [T, K].
    """

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        pass

    def _local_reorder(self, x: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if spmd.is_type_checking():
            return LocalTokenDispatcher._local_reorder(self, x, scores, ids)
        rows, positions = ops.npu_moe_token_permute(x, ids)
        return rows, positions, scores

    def combine(self, rows: Tensor, metadata: LocalDispatchMetadata, x: Tensor) -> Tensor:
        if spmd.is_type_checking():
            return LocalTokenDispatcher.combine(self, rows, metadata, x)
        return _combine(rows, metadata, x)


class FusedAllToAllTokenDispatcher(AllToAllTokenDispatcher):
    """The same with torchtitan's exchange of tokens between the ranks that share the experts.

    What comes in from the ranks, ordered by rank, then expert, is put in the order of experts by the same operators.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    _local_reorder = FusedLocalTokenDispatcher._local_reorder

    def _permute(self, rows: Tensor, counts: Tensor) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
        if spmd.is_type_checking():
            return super()._permute(rows, counts)
        by_rank = counts.view(self.ep_mesh.size(), -1)
        experts = torch.arange(by_rank.shape[1], device=counts.device).repeat(by_rank.shape[0])
        ids = experts.repeat_interleave(counts, output_size=rows.shape[0])
        permuted, positions = ops.npu_moe_token_permute(rows, ids)
        return rows.shape, permuted, positions, by_rank.sum(0)

    def _unpermute(self, rows: Tensor, shape: torch.Size, positions: Tensor) -> Tensor:
        if spmd.is_type_checking():
            return super()._unpermute(rows, shape, positions)
        return ops.npu_moe_token_unpermute(rows, positions)

    def combine(self, rows: Tensor, metadata: LocalDispatchMetadata, x: Tensor) -> Tensor:
        if spmd.is_type_checking():
            return super().combine(rows, metadata, x)
        if self.ep_mesh is not None:
            rows = self._unpermute(rows, metadata.input_shape, metadata.permuted_indices)
            with maybe_set_sparse_mesh():
                mesh = current_spmd_mesh() if get_spmd_backend() == "spmd_types" else None
                group = self.ep_mesh.get_group() if mesh is None else mesh.get_group("ep")
                rows = self._combine_token_exchange(rows, group, metadata.input_splits, metadata.output_splits)
        return _combine(rows, metadata, x)


_DISPATCHERS = (FusedLocalTokenDispatcher, FusedAllToAllTokenDispatcher)


class FusedRoutedExperts(RoutedExperts):
    """Dispatch, experts, combine; by ``moe_ffn`` where experts and dispatcher are fused and no ranks share the experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    @adopt_signature(RoutedExperts)
    def forward(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        experts, dispatcher = self.inner_experts, self.token_dispatcher
        local = isinstance(dispatcher, _DISPATCHERS) and getattr(dispatcher, "ep_mesh", None) is None
        whole = local and isinstance(experts, FusedGroupedExperts)
        # What hooks the experts wants to see them called.
        if not whole or spmd.is_type_checking() or experts._forward_hooks or experts._forward_pre_hooks:
            return RoutedExperts.forward(self, x, scores, ids, counts)
        out = experts.routed(*(part.flatten(0, 1) for part in (x, ids, scores)))
        return out.view(x.shape[0], -1, x.shape[-1])


class _Wide:
    """A gate in fp32, whatever the dtype of its weight: torchtitan asks autocast for it, which CPUs do not have."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return ops.npu_linear(input.float(), self.weight.float(), bias)


class WideLinear(_Wide, Linear):
    """:class:`_Wide` for torchtitan's layer."""


class WideFusedLinear(_Wide, FusedLinear):
    """:class:`_Wide` for a layer that ``npu_linear`` has converted."""


_WIDE = {Linear: WideLinear, FusedLinear: WideFusedLinear}


class FusedRouter(TokenChoiceTopKRouter):
    """Scores, groups, choice and weights of experts by ``router_top_k``, in fp32; the same choice order in every run.

    The bias takes part in the choice only. All scores are returned too, as the parent does.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self.gate.__class__ = _WIDE.get(type(self.gate), type(self.gate))

    @adopt_signature(TokenChoiceTopKRouter)
    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return route(self, self.gate(x), expert_bias, output_scores=True)


class DispatchConverter(Converter):
    """``npu_permute``: its site is the dispatcher of a node of routed experts; both change class."""

    dispatchers = {
        LocalTokenDispatcher.Config: FusedLocalTokenDispatcher.Config,
        AllToAllTokenDispatcher.Config: FusedAllToAllTokenDispatcher.Config,
    }

    def obstacle(self, config: Any) -> str | None:
        found = super().obstacle(config)
        kind = type(config.token_dispatcher)
        if found is None and kind not in self.dispatchers:
            return f"{kind._owner.__qualname__} exchanges and orders tokens by kernels of its own"
        return found

    def turn(self, config: Any) -> None:
        config.token_dispatcher.__class__ = self.dispatchers[type(config.token_dispatcher)]
        super().turn(config)


class RouterConverter(Converter):
    """``npu_router``: routers of every kind that torchtitan has, but for its debugging switch."""

    def obstacle(self, config: Any) -> str | None:
        found = super().obstacle(config)
        if found is None and config._debug_force_load_balance:
            return "_debug_force_load_balance routes by position, not by scores"
        return found


CONVERTERS = (
    Converter(
        "npu_gmm",
        "grouped_matmul or moe_ffn",
        GroupedExperts.Config,
        {GroupedExperts.Config: FusedGroupedExperts.Config},
    ),
    DispatchConverter(
        "npu_permute",
        "npu_moe_token_permute or moe_ffn",
        RoutedExperts.Config,
        {RoutedExperts.Config: FusedRoutedExperts.Config},
    ),
    RouterConverter(
        "npu_router",
        "router_top_k",
        TokenChoiceTopKRouter.Config,
        {TokenChoiceTopKRouter.Config: FusedRouter.Config},
    ),
)
