"""Lengths of packed sequences, as callers of flash attention give them, beside a mask: a query sees what both let it see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar.masks.ranges import Ranges

_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k")


def given(options: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Where sequences of queries and of keys begin, and the last one ends; None unless both are given."""
    starts = tuple(options.get(name) for name in _NAMES)
    return None if starts[0] is None or starts[1] is None else starts


def check(starts: tuple[Tensor, Tensor], batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """The starts on the CPU, after a look whether they are those of all tokens; in a graph it looks when it runs."""
    found = []
    for name, values, size in zip(_NAMES, starts, (queries, keys), strict=True):
        values = values.cpu().to(torch.int64)
        text = f"npu_sdpa: {name} must rise from 0 to the {batch} x {size} tokens beside the mask"
        sound = (values[:1] == 0).all() & (values.diff() >= 0).all() & (values[-1:] == batch * size).all()
        if torch.compiler.is_compiling():
            torch._assert_async(sound, text)
        elif not bool(sound):
            raise RuntimeError(f"{text}, got {values.tolist()}")
        found.append(values)
    if found[0].shape != found[1].shape:
        raise RuntimeError(
            f"npu_sdpa: cu_seq_lens_q and cu_seq_lens_k must be of as many sequences, got {len(found[0])} and {len(found[1])} numbers"
        )
    return found[0], found[1]


def cut(ranges: Ranges, starts: tuple[Tensor, Tensor]) -> Ranges:
    """The ranges, cut to the keys of the sequence that a query is in."""
    batch, queries = ranges.first.shape
    mine = torch.arange(len(starts[0]) - 1).repeat_interleave(starts[0].diff()).view(batch, queries)
    row = torch.arange(batch)[:, None] * ranges.keys
    first, last = ((starts[1][at] - row).clamp(0, ranges.keys) for at in (mine, mine + 1))
    return ranges.within(first, last)


def together(starts: tuple[Tensor, Tensor], batch: int, queries: int, keys: int) -> Tensor:
    """Whether query and key are in one sequence, bool [B, 1, Q, K]; in a graph, to which lengths are no numbers."""
    sequences = (
        torch.bucketize(torch.arange(batch * size), ends[1:], right=True).view(batch, size)
        for ends, size in zip(starts, (queries, keys), strict=True)
    )
    query, key = sequences
    return (query[:, :, None] == key[:, None])[:, None]


def merged(ends: Tensor, starts: tuple[Tensor, Tensor]) -> Tensor:
    """Ends of sequences that are cut at the starts as well; in a graph. Ends that come twice are no sequence."""
    return torch.cat([ends, starts[0][1:].to(ends.device)]).sort().values
