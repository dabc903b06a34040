"""FlexAttention's ``BlockMask`` as ranges of keys, or as the operator's matrix where its rows are no ranges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import BlockMask

from jumar.masks import ranges
from jumar.masks.ranges import Ranges

#: Elements of a mask that are looked at at once.
_PIECE = 1 << 22
_CACHE = "_jumar_ranges"
_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def _table(number: Tensor | None, indices: Tensor | None, columns: int) -> Tensor | None:
    """bool [B, H, rows, columns] of the blocks that a pair of tensors of a BlockMask names."""
    if number is None:
        return None
    named = torch.arange(indices.shape[-1], device=number.device) < number[..., None]
    table = torch.zeros((*number.shape, columns + 1), dtype=torch.bool, device=number.device)
    # What lies beyond the number goes to a column that is cut off.
    table.scatter_(-1, torch.where(named, indices, columns).long(), True)
    return table[..., :columns]


def _visible(mask: BlockMask, head: int, entry: int, low: int, high: int) -> Tensor:
    """bool [rows, K] for the rows of blocks ``low`` to ``high``: full blocks, and mask_mod in partial ones."""
    tall, wide = mask.BLOCK_SIZE
    queries, keys = mask.seq_lengths
    columns = -(-keys // wide)
    at = (slice(entry, entry + 1), slice(head, head + 1), slice(low, high))
    partial = _table(mask.kv_num_blocks[at], mask.kv_indices[at], columns)[0, 0]
    seen = torch.zeros(high - low, tall, columns, wide, dtype=torch.bool, device=partial.device)
    full = None
    if mask.full_kv_num_blocks is not None:
        full = _table(mask.full_kv_num_blocks[at], mask.full_kv_indices[at], columns)[0, 0]
        seen |= full[:, None, :, None]
    row, column = partial.nonzero(as_tuple=True)
    step = max(1, _PIECE // (tall * wide))
    for r, c in zip(row.split(step), column.split(step), strict=True):
        q = ((r + low)[:, None] * tall + torch.arange(tall, device=r.device)).clamp_(
            max=queries - 1
        )
        k = (c[:, None] * wide + torch.arange(wide, device=r.device)).clamp_(max=keys - 1)
        shape = (len(r), tall, wide)
        places = [t.expand(shape).reshape(-1) for t in (q[:, :, None], k[:, None, :])]
        with TransformGetItemToIndex():
            values = torch.vmap(mask.mask_mod, in_dims=(None, None, 0, 0))(
                *(torch.tensor(n, device=r.device) for n in (entry, head)), *places
            )
        seen[r, :, c] |= values.view(shape)
    rows = min(high * tall, queries) - low * tall
    return seen.view(-1, columns * wide)[:rows, :keys]


def _pieces(mask: BlockMask) -> list[tuple[int, int]]:
    tall = mask.BLOCK_SIZE[0]
    queries, keys = mask.seq_lengths
    blocks = -(-queries // tall)
    step = max(1, _PIECE // max(1, tall * keys))
    return [(low, min(low + step, blocks)) for low in range(0, blocks, step)]


def hidden(mask: BlockMask) -> Tensor:
    """The operator's ``atten_mask`` [B, H, Q, K], True = hidden, with B and H of the BlockMask."""
    batch, heads = mask.kv_num_blocks.shape[:2]
    rows = [
        torch.cat([_visible(mask, h, b, *piece) for piece in _pieces(mask)])
        for b in range(batch)
        for h in range(heads)
    ]
    return torch.stack(rows).view(batch, heads, *mask.seq_lengths).logical_not()


def _rearranged(mask_mod: Any) -> Tensor | None:
    """The order in which context parallelism has put the keys of a mask that it cut, or None."""
    if getattr(mask_mod, "__module__", None) != _PARALLEL:
        return None
    todo = [mask_mod]
    while todo:
        function = todo.pop()
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
            value = cell.cell_contents
            if (
                name == "qkv_rearrange_indices"
                and isinstance(value, Tensor)
                and value.shape[0] == 1
            ):
                return value[0].argsort()
            if getattr(value, "__module__", None) == _PARALLEL:
                todo.append(value)
    return None


def ranges_of(mask: BlockMask, batch: int) -> Ranges | None:
    """The mask as ranges for ``batch`` entries, or None; made once a mask and kept on it."""
    known = getattr(mask, _CACHE, None)
    if known is None:
        known = (_ranges(mask),)
        setattr(mask, _CACHE, known)
    found = known[0]
    if found is None or found.first.shape[0] == batch:
        return found
    return Ranges(
        found.first.expand(batch, -1), found.last.expand(batch, -1), found.keys, found.order
    )


def _ranges(mask: BlockMask) -> Ranges | None:
    batch, heads = mask.kv_num_blocks.shape[:2]
    if heads != 1:
        return None
    order = _rearranged(mask.mask_mod)
    rows = []
    for b in range(batch):
        for piece in _pieces(mask):
            seen = _visible(mask, 0, b, *piece)
            found = ranges.from_visible(seen if order is None else seen[:, order])
            if found is None:
                return None
            rows.append(found)
    if not rows:
        return None
    first, last = (torch.cat(parts).view(batch, -1) for parts in zip(*rows, strict=True))
    return Ranges(first, last, mask.seq_lengths[1], order)
