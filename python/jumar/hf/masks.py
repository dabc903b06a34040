"""Attention masks of transformers models as ranges of keys, made into a matrix only where somebody looks at it.

transformers describes a mask by a function of indices, composed of functions of its own. They are read, not evaluated:
causal, sliding window, padding on either side and packed sequences are ranges. What is not known to be one is made by
transformers' own ``sdpa_mask``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jumar.hf import lengths, traced_masks
from jumar.hf.lazy import Lazy
from jumar.masks.attend import Plan
from jumar.masks.ranges import Ranges, from_visible


class LazyMask(Lazy):
    """bool [B, 1, Q, K], True = visible, not made yet; ``plan`` says the same in ranges of keys."""

    plan: Plan

    @staticmethod
    def __new__(cls, plan: Plan, device: torch.device) -> LazyMask:
        batch, queries = plan.ranges.first.shape
        shape = (batch, 1, queries, plan.ranges.keys)
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.plan = plan
        self._value = None
        self._cut: dict[tuple[tuple[int, ...], ...], Plan] = {}
        return self

    def value(self) -> Tensor:
        """The mask as an ordinary tensor."""
        if self._value is None:
            self._value = self.plan.hidden.logical_not().to(self.device)
            self._version_made = self._value._version
        return self._value

    @property
    def changed(self) -> bool:
        """Whether somebody has written into the elements, so that the plan no longer holds."""
        return self._value is not None and self._value._version != self._version_made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in (Tensor.clone, Tensor.contiguous, Tensor.detach) and len(args) == 1:
            if not args[0].changed:
                return LazyMask(args[0].plan, args[0].device)
        return super().__torch_function__(func, types, args, kwargs)

    def within(self, starts: tuple[Tensor, Tensor]) -> Plan:
        """The plan cut to packed sequences: where those of queries and of keys begin, and the last one ends."""
        batch, queries = self.plan.ranges.first.shape
        found = lengths.check(starts, batch, queries, self.plan.ranges.keys)
        key = tuple(tuple(t.tolist()) for t in found)
        if key not in self._cut:
            self._cut[key] = Plan(lengths.cut(self.plan.ranges, found))
        return self._cut[key]

    def __repr__(self, **_: Any) -> str:
        return f"LazyMask(shape={tuple(self.shape)})"


@functools.cache
def _codes() -> dict[str, Any]:
    """Code of transformers' mask functions, by what makes them; what a version lacks is absent."""
    from transformers import masking_utils as known

    def inner(name: str, *arguments: Any) -> Any:
        make = getattr(known, name, None)
        return None if make is None else make(*arguments).__code__

    codes = {
        name: getattr(getattr(known, name, None), "__code__", None)
        for name in ("causal_mask_function", "bidirectional_mask_function")
    }
    codes["and_masks"] = inner("and_masks")
    for name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
        codes[name] = inner(name, 1)
    for name in ("padding_mask_function", "packed_sequence_mask_function"):
        codes[name] = inner(name, None)
    codes["remap_positions_for_packed_sequence"] = inner(
        "remap_positions_for_packed_sequence", None, None
    )
    return codes


def _cells(function: Callable) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return {n: c.cell_contents for n, c in zip(names, function.__closure__ or (), strict=True)}


class _Reader:
    """Folds a composed mask function into ranges. ``positions``: the index of each query; ``offset``: of the first key."""

    def __init__(self, ranges: Ranges, positions: Tensor, offset: int):
        self.ranges, self.positions, self.offset = ranges, positions, offset
        self.remapped: list[Tensor] = []
        self.packed: list[Tensor] = []

    def read(self, function: Callable) -> bool:
        """Cuts the ranges to what the function lets through; False where it is not known."""
        code = getattr(function, "__code__", None)
        name = next(
            (n for n, known in _codes().items() if known is not None and known is code), None
        )
        if name is None:
            return False
        cells = _cells(function)
        at = self.positions - self.offset
        if name == "causal_mask_function":
            self._cut(torch.zeros_like(at), at + 1)
        elif name == "sliding_window_overlay":
            self._cut(at - cells["sliding_window"] + 1, torch.full_like(at, self.ranges.keys))
        elif name == "sliding_window_bidirectional_overlay":
            self._cut(at - cells["sliding_window"], at + cells["sliding_window"] + 1)
        elif name == "padding_mask_function":
            return self.pad(cells["padding_mask"])
        elif name == "and_masks":
            return all(self.read(part) for part in cells["mask_functions"])
        elif name == "remap_positions_for_packed_sequence":
            self.remapped.append(cells["position_ids"])
            return self.read(cells["mask_function"])
        elif name == "packed_sequence_mask_function":
            return self.pack(cells["packed_sequence_mask"])
        return True

    def _cut(self, first: Tensor, last: Tensor) -> None:
        self.ranges = self.ranges.within(first.clamp(min=0), last)

    def pad(self, mask: Tensor) -> bool:
        """Keys where a mask [B, ..] is True, if they are one range."""
        local = mask[:, self.offset : self.offset + self.ranges.keys].bool()
        found = from_visible(local)
        if found is not None:
            self._cut(found[0][:, None], found[1][:, None])
        return found is not None

    def pack(self, ids: Tensor) -> bool:
        """Sequences of equal ids that follow each other."""
        whole = tuple(ids.shape) == tuple(self.ranges.first.shape) and self.offset == 0
        if not whole or ids.shape[1] != self.ranges.keys or not bool((ids.diff() >= 0).all()):
            return False
        self.packed.append(ids)
        self.ranges = self.ranges.documents(ids)
        return True

    def sound(self) -> bool:
        """Whether positions, where they stand for indices, differ as indices do within a sequence."""
        if self.remapped and not self.packed:
            return False
        return all(
            bool(((positions.diff() == 1) | (ids.diff() != 0)).all())
            for positions in self.remapped
            for ids in self.packed
        )


def _read(
    batch: int,
    positions: Tensor,
    keys: int,
    offset: int,
    function: Callable,
    padding: Tensor | None,
) -> Ranges | None:
    positions = positions.cpu()
    reader = _Reader(Ranges.full(batch, len(positions), keys), positions, offset)
    if padding is not None:
        short = offset + keys - padding.shape[-1]
        padding = torch.nn.functional.pad(padding, (0, short)) if short > 0 else padding
        if padding.dim() != 2 or not reader.pad(padding):
            return None
    return reader.ranges if reader.read(function) and reader.sound() else None


def attention_mask(
    *args: Any,
    q_length: int | None = None,
    q_offset: Any = 0,
    cache_position: Tensor | None = None,
    **rest: Any,
) -> Tensor | traced_masks.TracedMask | None:
    """The function of ``AttentionMaskInterface``: a :class:`LazyMask`; None and matrices where ``sdpa`` has them.

    In a compiled graph a :class:`jumar.hf.traced_masks.TracedMask`.

    ``cache_position`` is transformers 4.57's form of ``q_length`` and ``q_offset``.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    given = {"cache_position": cache_position} if cache_position is not None else {}
    if q_length is not None:
        given = {"q_length": q_length, "q_offset": q_offset}
    known = not args and given and {"batch_size", "kv_length"} <= rest.keys()
    if known and torch.compiler.is_compiling() and cache_position is None:
        return traced_masks.attention_mask({**given, **rest})
    if not known or torch.compiler.is_compiling() or rest.get("use_vmap"):
        return sdpa_mask(*args, **given, **rest)
    if cache_position is None:
        positions = torch.arange(q_length) + int(q_offset)
    else:
        positions = cache_position
    ranges = _read(
        rest["batch_size"],
        positions,
        rest["kv_length"],
        int(rest.get("kv_offset", 0)),
        rest.get("mask_function", causal_mask_function),
        rest.get("attention_mask"),
    )
    if ranges is None:
        return sdpa_mask(**given, **rest)
    if _needless(ranges, rest):
        return None
    return LazyMask(Plan(ranges), torch.device(rest.get("device") or positions.device))


def _needless(ranges: Ranges, rest: dict[str, Any]) -> bool:
    """Whether the attention is the plain one: without a mask causal from the upper left, or full."""
    queries, keys = ranges.first.shape[1], ranges.keys
    if bool((ranges.first != 0).any()):
        return False
    full = bool((ranges.last == keys).all())
    if rest.get("allow_is_causal_skip", True) and queries == keys and queries > 1:
        if bool((ranges.last == torch.arange(1, keys + 1)).all()):
            return True
    alone = rest.get("allow_is_causal_skip", True) and queries == 1
    return full and bool(alone or rest.get("allow_is_bidirectional_skip"))
