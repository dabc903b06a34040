"""Masks in which each query sees one range of keys: causal attention, windows, padding, documents in a row.

Such a mask is two numbers a query, and the operator takes it as packed sequences of different lengths, so that no matrix
is made. Rows that continue each other are one sequence; keys that nobody sees, and rows that see nothing, are sequences
whose other side is empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: More calls than this for one attention are not worth it.
_MOST_CALLS = 4


@dataclass(frozen=True)
class Ranges:
    """Query i of batch entry b sees the keys ``first[b, i] <= j < last[b, i]``; int64 [B, Q] on the CPU.

    ``order``: where given, key j is ``key[order[j]]`` of the tensor that holds the keys.
    """

    first: Tensor
    last: Tensor
    keys: int
    order: Tensor | None = None

    def __post_init__(self) -> None:
        empty = self.last <= self.first
        object.__setattr__(self, "first", self.first.masked_fill(empty, 0))
        object.__setattr__(self, "last", self.last.masked_fill(empty, 0))

    @staticmethod
    def causal(
        batch: int, queries: int, keys: int, offset: int = 0, window: int | None = None
    ) -> Ranges:
        """Query i sees the keys up to ``i + offset``, the last ``window`` of them where that is given."""
        last = torch.arange(queries).add_(offset + 1)
        first = torch.zeros_like(last) if window is None else (last - window).clamp_(min=0)
        return Ranges(*(t.expand(batch, -1) for t in (first, last.clamp(0, keys))), keys)

    @staticmethod
    def full(batch: int, queries: int, keys: int) -> Ranges:
        """Every query sees every key."""
        first = torch.zeros(batch, queries, dtype=torch.int64)
        return Ranges(first, torch.full_like(first, keys), keys)

    def within(self, first: Tensor, last: Tensor) -> Ranges:
        """These ranges cut to others of a shape that expands to theirs."""
        return Ranges(
            torch.maximum(self.first, first), torch.minimum(self.last, last), self.keys, self.order
        )

    def documents(self, ids: Tensor) -> Ranges:
        """Cut to the run of equal ``ids`` [B, Q] that the query is in; queries and keys are the same tokens."""
        first, last = runs(ids)
        return self.within(first, last)


def runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Begin and end of the run of equal numbers that each element is in, along the last axis."""
    ids = ids.cpu()
    at = torch.arange(ids.shape[-1]).expand(ids.shape)
    new = torch.ones_like(ids, dtype=torch.bool)
    new[..., 1:] = ids[..., 1:] != ids[..., :-1]
    first = torch.where(new, at, 0).cummax(-1).values
    ends = torch.where(new, at, ids.shape[-1]).roll(-1, -1)
    ends[..., -1] = ids.shape[-1]
    return first, ends.flip(-1).cummin(-1).values.flip(-1)


def from_visible(visible: Tensor) -> tuple[Tensor, Tensor] | None:
    """(first, last) of a mask bool [.., Q, K], True = visible; None where a row is not one range."""
    if visible.shape[-1] == 0:
        return (torch.zeros(visible.shape[:-1], dtype=torch.int64),) * 2
    count = visible.sum(-1)
    first = visible.to(torch.uint8).argmax(-1)
    last = visible.shape[-1] - visible.flip(-1).to(torch.uint8).argmax(-1)
    last = torch.where(count == 0, first, last)
    return (first.cpu(), last.cpu()) if bool((last - first == count).all()) else None


@dataclass(frozen=True)
class Sequence:
    """Rows that one packed sequence holds: queries [begin, end) and keys [first, last).

    ``causal``: the last query sees the last key, each one before it one key less; ``window``: how many keys at most.
    """

    begin: int
    end: int
    first: int
    last: int
    causal: bool | None
    window: int | None


@dataclass(frozen=True)
class Call:
    """Arguments of one call: lengths as the operator takes them (ends of sequences), and what hides keys in them."""

    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]
    causal: bool
    window: int | None


#: How a row continues the one before it: with one key more, with its range moved on by one, with the same range.
_NEW, _GROWS, _SLIDES, _SAME = range(4)


def sequences(first: Tensor, last: Tensor) -> list[Sequence]:
    """The rows of one batch entry as sequences, in order."""
    rows = first.shape[0]
    if rows == 0:
        return []
    down, up = first.diff(), last.diff()
    kinds = torch.where(
        (up == 0) & (down == 0), _SAME, torch.where((up == 1) & (down == 0), _GROWS, _NEW)
    )
    # A range that has nothing in common with the one before begins a document.
    kinds = torch.where((up == 1) & (down == 1) & (first[1:] < last[:-1]), _SLIDES, kinds)
    changes = (torch.nonzero(kinds.diff()).flatten() + 1).tolist() if rows > 1 else []
    begins, how = [0], [_NEW]
    # Transitions low .. high - 1 are alike; transition t leads from row t to row t + 1.
    for low, high in zip([0, *changes], [*changes, rows - 1], strict=True):
        kind = int(kinds[low]) if rows > 1 else _NEW
        if kind == _NEW:
            begins += range(low + 1, high + 1)
            how += [_NEW] * (high - low)
        elif how[-1] in (_NEW, kind) or (how[-1], kind) == (_GROWS, _SLIDES):
            how[-1] = kind
        else:
            begins.append(low + 1)
            how.append(kind if high > low + 1 else _NEW)
    ends = [*begins[1:], rows]
    final = torch.tensor(ends) - 1
    found = zip(
        begins,
        ends,
        how,
        first[begins].tolist(),
        last[final].tolist(),
        first[final].tolist(),
        strict=True,
    )
    return [
        Sequence(
            begin, end, low, high,
            None if kind == _NEW else kind != _SAME,
            high - bottom if kind == _SLIDES else None,
        )
        for begin, end, kind, low, high, bottom in found
    ]  # fmt: skip


def calls(ranges: Ranges) -> list[Call] | None:
    """The calls whose sum is the attention; None where it takes too many of them.

    Queries are numbered ``b * Q + i`` and keys ``b * K + j``. Each call goes over all queries; those that another call
    serves are a sequence without keys in it, and give 0.
    """
    batch, rows = ranges.first.shape
    keys = ranges.keys
    found: list[Sequence] = []
    for b in range(batch):
        for s in sequences(ranges.first[b], ranges.last[b]):
            at, key = b * rows, b * keys if s.last > s.first else 0
            found.append(
                Sequence(s.begin + at, s.end + at, s.first + key, s.last + key, s.causal, s.window)
            )
    made: list[Call] = []
    while found:
        if len(made) == _MOST_CALLS:
            return None
        call, found = _take(found, batch * rows, batch * keys)
        made.append(call)
    return made


def _take(found: list[Sequence], queries: int, keys: int) -> tuple[Call, list[Sequence]]:
    """One call of the first sequences that go together, and what is left."""
    taken, rest = [], []
    cursor, causal, window, longest = 0, None, None, 0
    for s in found:
        size = s.last - s.first
        wider = max(longest, size if s.window is None else 0)
        new = s.window if window is None else window
        if size == 0:
            continue
        if (
            s.first < cursor
            or None not in (causal, s.causal)
            and causal != s.causal
            or s.window not in (None, new)
            or new is not None
            and wider > new
        ):
            rest.append(s)
            continue
        taken.append(s)
        cursor, window, longest = s.last, new, wider
        causal = s.causal if causal is None else causal
    return _call(taken, queries, keys, bool(causal), window), rest


def _call(taken: list[Sequence], queries: int, keys: int, causal: bool, window: int | None) -> Call:
    query_ends: list[int] = []
    key_ends: list[int] = []
    query, key = 0, 0

    def add(to_query: int, to_key: int) -> None:
        nonlocal query, key
        if (to_query, to_key) != (query, key):
            query, key = to_query, to_key
            query_ends.append(query)
            key_ends.append(key)

    for s in taken:
        add(s.begin, key)  # rows of other calls, or without keys
        add(query, s.first)  # keys that nobody sees
        add(s.end, s.last)
    add(queries, key)
    add(query, keys)
    return Call(tuple(query_ends), tuple(key_ends), causal, window)
