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


def limits(device: torch.device, before: int | None, after: int | None) -> dict[str, Any]:
    """Arguments for so many keys before and behind a query, None: all, where every sequence has as many of both."""
    if before is None and after is None:
        return {}
    if before is None and after == 0 and device.type == "npu":
        return packed_band(device, None)
    bounds = {"pre_tockens": before, "next_tockens": after}
    form = (compressed(device), 4) if device.type == "npu" else (_nothing(device), 0)
    return {"atten_mask": form[0], "sparse_mode": form[1], **{k: v for k, v in bounds.items() if v is not None}}


def band(device: torch.device, queries: int, keys: int, window: int | None) -> dict[str, Any]:
    """Arguments for causal attention from the lower right, in a window or not, in one layout with a batch."""
    return packed_band(device, window, alike=queries == keys)


def packed_band(device: torch.device, window: int | None, alike: bool = False) -> dict[str, Any]:
    """Arguments for causal attention from the lower right of each sequence, in a window or not.

    ``alike``: every sequence has as many keys as queries, which needs no large mask.
    """
    if alike and device.type != "npu":
        return limits(device, None if window is None else window - 1, 0)
    arguments: dict[str, Any] = {"atten_mask": compressed(device), "sparse_mode": 3}
    if window is not None:
        arguments |= {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0}
    return arguments


@dataclass
class Plan:
    """How an attention with one range of keys a query is computed; good for every layer that has the same mask.

    Attributes:
        calls: None where there would be too many; then ``hidden`` is the operator's matrix.
        ends: of each call, whether its sequences have as many keys as queries, and its lengths in tensors, for compiled
            graphs, to which numbers are constants.
        alike: (first key, last key, causal, window) where all of the batch is one sequence each and the same; else None.
    """

    ranges: Ranges
    calls: list[Call] | None = field(init=False)
    ends: list[tuple[bool, Tensor, Tensor]] = field(init=False)
    alike: tuple[int, int, bool, int | None] | None = field(init=False)

    @torch.inference_mode(False)  # what is kept may be used in training as well
    def __post_init__(self) -> None:
        self.calls = calls(self.ranges)
        self.ends = [
            (c.query_ends == c.key_ends, torch.tensor(c.query_ends), torch.tensor(c.key_ends)) for c in self.calls or ()
        ]
        self.alike = self._alike()

    @functools.cached_property
    @torch.inference_mode(False)
    def hidden(self) -> Tensor:
        """[B, 1, Q, K], True = hidden."""
        return self.matrix()

    def matrix(self) -> Tensor:
        """``hidden``, made anew."""
        at = torch.arange(self.ranges.keys)
        return ~((at >= self.ranges.first[..., None]) & (at < self.ranges.last[..., None]))[:, None]

    def _alike(self) -> tuple[int, int, bool, int | None] | None:
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


def whole(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """The operator on [B, S, N, D] tensors, each row of the batch a sequence."""
    # In a graph it is the form with numbers in tensors that can draw the seed of a dropout pattern.
    draws = options.get("keep_prob", 1.0) < 1 and torch.compiler.is_compiling()
    operator = ops.npu_fusion_attention_v3 if draws else ops.npu_fusion_attention
    return operator(query, key, value, query.shape[2], "BSND", **options)[0]


def packed(query: Tensor, key: Tensor, value: Tensor, ends: tuple[Any, Any], options: dict[str, Any]) -> Tensor:
    """The operator on [B, S, N, D] tensors whose tokens, one after another, are sequences; ``ends``: lists or tensors."""
    operator = ops.npu_fusion_attention_v3 if isinstance(ends[0], Tensor) else ops.npu_fusion_attention
    tokens = (t.flatten(0, 1) for t in (query, key, value))
    lengths = {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
    return operator(*tokens, query.shape[2], "TND", **lengths, **options)[0].unflatten(0, query.shape[:2])


def attend(query: Tensor, key: Tensor, value: Tensor, plan: Plan, **options: Any) -> Tensor:
    """Attention of [B, S, N, D] tensors, of any strides, under a plan; ``options`` of the operator."""
    device = query.device
    if plan.ranges.order is not None:
        order = plan.ranges.order.to(device)
        key, value = key.index_select(1, order), value.index_select(1, order)
    compiling = torch.compiler.is_compiling()
    if plan.alike is not None and not (compiling and plan.alike[:2] != (0, plan.ranges.keys)):
        first, last, causal, window = plan.alike
        key, value = key[:, first:last], value[:, first:last]
        if causal:
            options |= band(device, query.shape[1], last - first, window)
        return whole(query, key, value, options)
    if plan.calls is None:
        hidden = plan.matrix() if compiling else plan.hidden
        return whole(query, key, value, options | {"atten_mask": hidden.to(device), "sparse_mode": 1})
    total = None
    for call, (even, *tensors) in zip(plan.calls, plan.ends, strict=True):
        hides = packed_band(device, call.window, even) if call.causal else {}
        ends = tensors if compiling else (call.query_ends, call.key_ends)
        out = packed(query, key, value, ends, options | hides)
        total = out if total is None else total + out
    return query.new_zeros(*query.shape[:3], value.shape[3]) if total is None else total
