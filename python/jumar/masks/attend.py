"""The operator, called for a mask of :mod:`jumar.masks.ranges`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jumar import ops
from jumar.masks.ranges import Call, Ranges, calls


def _kept(make: Callable[[torch.device], Tensor]) -> Callable[[torch.device], Tensor]:
    """A mask that is made once a device; good in training, too, where inference mode was the first to need it."""

    @functools.cache
    @torch.inference_mode(False)
    def eager(device: torch.device) -> Tensor:
        return make(device)

    @functools.wraps(make)
    def kept(device: torch.device) -> Tensor:
        # What is made while tracing belongs to the graph.
        return make(device) if torch.compiler.is_compiling() else eager(device)

    return kept


@_kept
def compressed(device: torch.device) -> Tensor:
    """The mask that goes with the sparse modes."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


@_kept
def _nothing(device: torch.device) -> Tensor:
    """A mask that hides nothing; jumar's own operator takes one number for it."""
    return torch.zeros(1, 1, dtype=torch.bool, device=device)


def upper_left(device: torch.device) -> dict[str, Any]:
    """Arguments for causal attention from the upper left."""
    if device.type == "npu":
        return {"atten_mask": compressed(device), "sparse_mode": 2}
    return {"atten_mask": _nothing(device), "sparse_mode": 0, "next_tockens": 0}


def band(device: torch.device, queries: int, keys: int, window: int | None) -> dict[str, Any]:
    """Arguments for causal attention from the lower right, in a window or not, in one layout with a batch."""
    if device.type != "npu" and queries == keys:
        pre = {} if window is None else {"pre_tockens": window - 1}
        return {"atten_mask": _nothing(device), "sparse_mode": 0, "next_tockens": 0, **pre}
    return packed_band(device, window)


def packed_band(device: torch.device, window: int | None) -> dict[str, Any]:
    """Arguments for causal attention from the lower right of each sequence, in a window or not."""
    arguments: dict[str, Any] = {"atten_mask": compressed(device), "sparse_mode": 3}
    if window is not None:
        arguments |= {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0}
    return arguments


@dataclass
class Plan:
    """How an attention with one range of keys a query is computed; good for every layer that has the same mask.

    ``calls``: None where there would be too many; then ``hidden`` is the operator's matrix.
    """

    ranges: Ranges
    calls: list[Call] | None = field(init=False)

    def __post_init__(self) -> None:
        self.calls = calls(self.ranges)

    @functools.cached_property
    @torch.inference_mode(False)  # kept, and used in training as well
    def hidden(self) -> Tensor:
        """[B, 1, Q, K], True = hidden."""
        at = torch.arange(self.ranges.keys)
        return ~((at >= self.ranges.first[..., None]) & (at < self.ranges.last[..., None]))[:, None]

    @functools.cached_property
    def alike(self) -> tuple[int, int, bool, int | None] | None:
        """(first key, last key, causal, window) where all of the batch is one sequence each and the same; else None."""
        first, last = self.ranges.first, self.ranges.last
        batch, rows = first.shape
        if not self.calls or len(self.calls) != 1 or rows == 0:
            return None
        if batch > 1 and not (bool((first == first[:1]).all()) and bool((last == last[:1]).all())):
            return None
        call, keys = self.calls[0], self.ranges.keys
        ends = [0, *call.query_ends]
        served = [at for at in range(len(call.query_ends)) if ends[at + 1] > ends[at]]
        if len(served) != batch:
            return None
        before = call.key_ends[served[0] - 1] if served[0] else 0
        size = call.key_ends[served[0]] - before
        return (before, before + size, call.causal, call.window) if size and keys else None


def attend(query: Tensor, key: Tensor, value: Tensor, plan: Plan, **options: Any) -> Tensor:
    """Attention of [B, S, N, D] tensors, of any strides, under a plan; ``options`` of the operator."""
    device, heads = query.device, query.shape[2]
    if plan.ranges.order is not None:
        order = plan.ranges.order.to(device)
        key, value = key.index_select(1, order), value.index_select(1, order)
    if plan.alike is not None:
        first, last, causal, window = plan.alike
        key, value = key[:, first:last], value[:, first:last]
        if causal:
            options |= band(device, query.shape[1], last - first, window)
        return ops.npu_fusion_attention(query, key, value, heads, "BSND", **options)[0]
    if plan.calls is None:
        options |= {"atten_mask": plan.hidden.to(device), "sparse_mode": 1}
        return ops.npu_fusion_attention(query, key, value, heads, "BSND", **options)[0]
    total = None
    packed = [t.flatten(0, 1) for t in (query, key, value)]
    for call in plan.calls:
        out = ops.npu_fusion_attention(
            *packed,
            heads,
            "TND",
            actual_seq_qlen=call.query_ends,
            actual_seq_kvlen=call.key_ends,
            **options,
            **(packed_band(device, call.window) if call.causal else {}),
        )[0]
        total = out if total is None else total + out
    if total is None:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    return total.unflatten(0, query.shape[:2])
