"""Masks of transformers models in compiled graphs: what a mask is is known while tracing, and no matrix is made.

Dynamo shows nothing of what a function closes over. So it is given other bodies for those functions of transformers that
make mask functions: the same arithmetic, and a note of what was made of what. Outside of compiled graphs nothing changes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from jumar.hf import lengths
from jumar.masks import attend


def _noted(function: Any, name: str, made: Any) -> Any:
    """The function with a note: by which function of transformers, of what."""
    function._jumar_made = (name, made)
    return function


def _and_masks(*mask_functions: Any) -> Any:
    def function(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = q_idx.new_ones((), dtype=torch.bool)
        for part in mask_functions:
            result = result & part(batch_idx, head_idx, q_idx, kv_idx).to(result.device)
        return result

    return _noted(function, "and_masks", mask_functions)


def _sliding_window_overlay(sliding_window: int) -> Any:
    def function(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx > q_idx - sliding_window

    return _noted(function, "sliding_window_overlay", sliding_window)


def _sliding_window_bidirectional_overlay(sliding_window: int) -> Any:
    def function(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return abs(q_idx - kv_idx) <= sliding_window

    return _noted(function, "sliding_window_bidirectional_overlay", sliding_window)


def _packed_sequence_mask_function(packed_sequence_mask: Tensor) -> Any:
    def function(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return packed_sequence_mask[batch_idx, q_idx] == packed_sequence_mask[batch_idx, kv_idx]

    return _noted(function, "packed_sequence_mask_function", packed_sequence_mask)


def _remap_positions_for_packed_sequence(mask_function: Any, position_ids: Tensor) -> Any:
    def function(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_idx, kv_idx = position_ids[batch_idx, q_idx], position_ids[batch_idx, kv_idx]
        return mask_function(batch_idx, head_idx, q_idx, kv_idx)

    return _noted(function, "remap_positions_for_packed_sequence", mask_function)


_BODIES = (
    _and_masks,
    _sliding_window_overlay,
    _sliding_window_bidirectional_overlay,
    _packed_sequence_mask_function,
    _remap_positions_for_packed_sequence,
)


@functools.cache
def register() -> None:
    """Gives Dynamo the bodies, where this version of transformers has the functions; once a process."""
    from transformers import masking_utils as known

    for body in _BODIES:
        theirs = getattr(known, body.__name__[1:], None)
        if theirs is not None:
            torch.compiler.substitute_in_graph(theirs, skip_signature_check=True)(body)


class TracedMask:
    """Which of as many keys as queries each query sees: those in a band, in its sequence, that are no padding.

    Whatever else is done with it is done with the matrix, bool [B, 1, S, S], True = visible.

    Attributes:
        before, after: how many keys before and behind a query; None: all.
        ends: int64 [B * S], where sequences end, of all rows one after another; ends that come twice are no sequence.
        padding: bool [B, 1, 1, S], True = hidden.
    """

    def __init__(self, make: Any, before: int | None, after: int | None, ends: Any, padding: Any):
        self.make, self.before, self.after, self.ends, self.padding = make, before, after, ends, padding

    def value(self) -> Tensor:
        """The matrix."""
        return self.make()

    def __getattr__(self, name: str) -> Any:
        if name == "make" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.make(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.make()[index]

    def __invert__(self) -> Tensor:
        return ~self.make()

    def __and__(self, other: Any) -> Tensor:
        return self.make() & other

    def __or__(self, other: Any) -> Tensor:
        return self.make() | other

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        def made(x: Any) -> Any:
            return x.make() if isinstance(x, TracedMask) else x

        return func(*(made(a) for a in args), **{k: made(v) for k, v in (kwargs or {}).items()})

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: tuple[Tensor, Tensor] | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Attention of [B, S, N, D] tensors; ``starts``: where sequences begin as well, if the caller knows."""
        band, ends, sizes = attend.limits(query.device, self.before, self.after), self.ends, (*query.shape[:2], key.shape[1])
        if starts is not None:
            starts = lengths.check(starts, *sizes)
            if self.padding is not None:
                hidden = self.padding | ~lengths.together(starts, *sizes).to(self.padding.device)
                return attend.whole(query, key, value, options | {"sparse_mode": 0} | band | {"atten_mask": hidden})
            rows = torch.arange(1, sizes[0] + 1) * sizes[1]
            ends = lengths.merged(rows if ends is None else ends, starts)
        if ends is not None:
            return attend.packed(query, key, value, (ends, ends), options | band)
        if self.padding is not None:
            hidden = self.padding
            if query.device.type == "npu":
                hidden = hidden.expand(-1, 1, query.shape[1], key.shape[1])
            options = options | {"sparse_mode": 0} | band | {"atten_mask": hidden}
        return attend.whole(query, key, value, options | band if self.padding is None else options)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _read(function: Any) -> tuple[int | None, int | None, Tensor | None, bool] | None:
    """(before, after, ids of sequences, whether positions stand for indices), or None."""
    from transformers import masking_utils as known

    if function is known.causal_mask_function:
        return None, 0, None, False
    if function is getattr(known, "bidirectional_mask_function", None):
        return None, None, None, False
    if not hasattr(function, "_jumar_made"):
        return None
    name, made = function._jumar_made
    if name == "sliding_window_overlay":
        return made - 1, None, None, False
    if name == "sliding_window_bidirectional_overlay":
        return made, made, None, False
    if name == "packed_sequence_mask_function":
        return None, None, made, False
    if name == "remap_positions_for_packed_sequence":
        inner = _read(made)
        return None if inner is None else (*inner[:3], True)
    before, after, ids, remapped = None, None, None, False
    for part in made:
        found = _read(part)
        if found is None or (ids is not None and found[2] is not None):
            return None
        before, after = _least(before, found[0]), _least(after, found[1])
        ids = found[2] if ids is None else ids
        remapped = remapped or found[3]
    return before, after, ids, remapped


def ends_of(ids: Tensor) -> Tensor:
    """Where runs of equal numbers in each row of [B, S] end, of all rows one after another: int64 [B * S], with repeats."""
    last = torch.ones_like(ids, dtype=torch.bool)
    last[:, :-1] = ids[:, 1:] != ids[:, :-1]
    at = torch.arange(1, ids.numel() + 1, device=ids.device)
    return torch.where(last.flatten(), at, ids.numel()).sort().values


def attention_mask(arguments: dict[str, Any]) -> TracedMask | Tensor | None:
    """transformers' ``sdpa_mask``, of which a mask that needs no matrix is a :class:`TracedMask`."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    length, offsets = arguments.get("q_length"), (arguments.get("q_offset", 0), arguments.get("kv_offset", 0))
    found = None
    # Numbers that tensors hold, those of a static cache, are not known while tracing.
    if all(isinstance(offset, int) and offset == 0 for offset in offsets) and not arguments.get("use_vmap"):
        if isinstance(length, int) and arguments.get("kv_length") == length:
            found = _read(arguments.get("mask_function", causal_mask_function))
    padding = arguments.get("attention_mask")
    if found is None or (padding is not None and padding.dim() != 2):
        return sdpa_mask(**arguments)
    before, after, ids, remapped = found
    # Positions count on within a sequence by the way in which transformers finds sequences.
    if (remapped and ids is None) or (ids is not None and padding is not None):
        return sdpa_mask(**arguments)
    if ids is None and padding is None and before is None:
        skip = "allow_is_bidirectional_skip" if after is None else "allow_is_causal_skip"
        if length > 1 and arguments.get(skip, after == 0):
            return None
    ends = None if ids is None else ends_of(ids)
    if padding is not None:
        padding = torch.nn.functional.pad(padding[:, :length].bool(), (0, max(0, length - padding.shape[1])))
        padding = padding.logical_not()[:, None, None]
    return TracedMask(functools.partial(sdpa_mask, **arguments), before, after, ends, padding)
