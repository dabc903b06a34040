"""Masks as ranges of keys: sequences and calls hide exactly what the matrix hides; BlockMask; context parallelism's order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, create_block_mask

import jumar
from jumar.masks import blocks, ranges
from jumar.masks.attend import Plan, attend
from jumar.masks.ranges import Ranges
from op_util import assert_ulp


def visible(r: Ranges) -> torch.Tensor:
    at = torch.arange(r.keys)
    return (at >= r.first[..., None]) & (at < r.last[..., None])


def seen_by(call, queries: int, keys: int) -> torch.Tensor:
    """What a call lets each of all queries see, written down pair by pair."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    q0 = k0 = 0
    for q1, k1 in zip(call.query_ends, call.key_ends, strict=True):
        assert q0 <= q1 and k0 <= k1, "the operator refuses ends that go back"
        for i in range(q0, q1):
            end = k1 if not call.causal else k1 - (q1 - 1 - i)
            begin = k0 if call.window is None else max(k0, end - call.window)
            seen[i, begin : max(begin, end)] = True
        q0, k0 = q1, k1
    assert (q0, k0) == (queries, keys)
    return seen


def check(r: Ranges) -> list | None:
    made = ranges.calls(r)
    if made is None:
        return None
    batch, rows = r.first.shape
    want = torch.block_diag(*visible(r)).bool() if batch else torch.zeros(0, 0, dtype=torch.bool)
    total = sum(seen_by(c, batch * rows, batch * r.keys).int() for c in made)
    assert torch.equal(total, want.int())
    return made


@st.composite
def row_ranges(draw):
    """Rows of random ranges and of what masks are made of: documents, windows, padding, offsets."""
    batch, rows, keys = draw(st.integers(1, 3)), draw(st.integers(1, 12)), draw(st.integers(1, 12))
    if draw(st.booleans()):
        ends = st.lists(st.integers(0, keys), min_size=batch * rows, max_size=batch * rows)
        first, last = (torch.tensor(draw(ends)).view(batch, rows) for _ in range(2))
        return Ranges(first, last, keys)
    window = draw(st.none() | st.integers(1, 5))
    made = Ranges.full(batch, rows, rows)
    if draw(st.booleans()):
        made = Ranges.causal(batch, rows, rows, 0, window)
    if draw(st.booleans()):
        ids = torch.tensor(
            draw(st.lists(st.integers(0, 1), min_size=batch * rows, max_size=batch * rows))
        )
        made = made.documents(ids.view(batch, rows).cumsum(-1))
    low = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=batch, max_size=batch)))[:, None]
    return made.within(low, torch.full_like(low, rows - draw(st.integers(0, 3))))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(row_ranges())
def test_calls_see_what_the_ranges_say(made):
    check(made)


def test_how_many_calls_a_mask_takes():
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1]])
    (call,) = check(Ranges.causal(2, 8, 8).documents(ids))
    assert call.query_ends == call.key_ends == (3, 5, 8, 15, 16) and call.causal
    (call,) = check(Ranges.full(2, 8, 8).documents(ids))
    assert not call.causal
    (call,) = check(Ranges.causal(2, 8, 8, window=3).documents(ids))
    assert call.window == 3
    # Padding on the left: rows without keys, and keys that nobody sees.
    left = Ranges.causal(2, 6, 6).within(torch.tensor([[2], [0]]), torch.tensor([[6], [6]]))
    (call,) = check(left)
    assert call.query_ends == (2, 2, 6, 12) and call.key_ends == (0, 2, 6, 12)
    # On the right: the rows of padding see all keys, which are those of a call of their own.
    assert len(check(Ranges.causal(1, 6, 6).within(torch.tensor([[0]]), torch.tensor([[4]])))) == 2
    # Rows that share some of their keys, but not all.
    assert len(check(Ranges(torch.tensor([[0, 1]]), torch.tensor([[3, 5]]), 5))) == 2
    # One query after the other of a cache.
    (call,) = check(Ranges.causal(1, 1, 9, offset=4))
    assert call.key_ends == (5, 9)
    assert check(Ranges(torch.arange(8).flip(0)[None], torch.full((1, 8), 8), 8)) is None


def operands(batch, queries, keys, dtype=torch.float32, size=8, value_size=8, heads=(4, 2)):
    gen = torch.Generator().manual_seed(0)
    shapes = ((queries, heads[0], size), (keys, heads[1], size), (keys, heads[1], value_size))
    return [torch.randn(batch, *s, generator=gen).to(dtype).requires_grad_() for s in shapes]


def reference(q, k, v, seen, scale):
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=scale, enable_gqa=True
    ).transpose(1, 2)


def compare(seen, run, batch, queries, keys, **more):
    """Output and gradients beside fp64 attention with the matrix ``seen``."""
    tensors = operands(batch, queries, keys, **more)
    out = run(*tensors)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    got = [out, *torch.autograd.grad((out * weight).sum(), tensors)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = reference(*wide, seen, 0.3)
    wanted = [want, *torch.autograd.grad((want * weight.double()).sum(), wide)]
    for a, b in zip(got, wanted, strict=True):
        assert_ulp(
            a,
            b.detach(),
            8.0,
            floor=2e-6 * b.abs().max().item() if a.dtype == torch.float32 else 1e-2,
        )


MASKS = {
    "causal": Ranges.causal(2, 9, 9),
    "window": Ranges.causal(2, 9, 9, window=3),
    "offset": Ranges.causal(2, 4, 9, offset=5),
    "offset_window": Ranges.causal(2, 4, 9, offset=5, window=3),
    "cache": Ranges.causal(2, 3, 9, offset=2),
    "full": Ranges.full(2, 5, 9),
    "documents": Ranges.causal(2, 9, 9).documents(
        torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] + [2] * 6])
    ),
    "windowed_documents": Ranges.causal(2, 9, 9, window=2).documents(
        torch.tensor([[0] * 4 + [1] * 5] * 2)
    ),
    "left": Ranges.causal(2, 9, 9).within(torch.tensor([[4], [0]]), torch.tensor([[9], [9]])),
    "right": Ranges.causal(2, 9, 9).within(torch.tensor([[0], [0]]), torch.tensor([[5], [9]])),
    "nothing": Ranges.causal(2, 9, 9).within(torch.tensor([[9], [0]]), torch.tensor([[9], [0]])),
    "many": Ranges(torch.arange(9).flip(0)[None].expand(2, -1), torch.full((2, 9), 9), 9),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("value_size", [8, 12])
def test_attend(name, value_size):
    made = MASKS[name]
    plan = Plan(made)
    queries = made.first.shape[1]
    compare(
        visible(made)[:, None],
        lambda *t: attend(*t, plan, scale=0.3),
        2,
        queries,
        made.keys,
        value_size=value_size,
    )
    assert (plan.alike is not None) == (
        name in {"causal", "window", "offset", "offset_window", "cache", "full"}
    )
    assert (plan.calls is None) == (name == "many")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attend_in_16_bits(dtype):
    made = MASKS["documents"]
    compare(
        visible(made)[:, None], lambda *t: attend(*t, Plan(made), scale=0.3), 2, 9, 9, dtype=dtype
    )


def causal(b, h, q, k):
    return q >= k


def document(ids):
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def dense(mod, batch, queries, keys):
    return torch.stack(
        [
            mod(
                torch.tensor(b),
                torch.tensor(0),
                torch.arange(queries)[:, None],
                torch.arange(keys)[None],
            )
            for b in range(batch)
        ]
    )


@pytest.mark.parametrize("size", [16, (128, 32)])
@pytest.mark.parametrize("full", [True, False])
def test_block_masks(size, full):
    gen = torch.Generator().manual_seed(0)
    ids = (torch.rand(2, 150, generator=gen) < 0.05).cumsum(-1)
    for mod, rows in (
        (causal, 1),
        (and_masks(causal, document(ids)), 2),
        (document(ids), 2),
        (and_masks(causal, lambda b, h, q, k: q - k < 40), 1),
    ):
        mask = create_block_mask(
            mod, rows, None, 150, 150, device="cpu", BLOCK_SIZE=size, separate_full_blocks=full
        )
        found = blocks.ranges_of(mask, rows)
        assert torch.equal(visible(found), dense(mod, rows, 150, 150))
        assert torch.equal(blocks.hidden(mask)[:, 0], ~dense(mod, rows, 150, 150))
        assert len(check(found)) == 1
        assert blocks.ranges_of(mask, rows) is found
    holes = create_block_mask(
        lambda b, h, q, k: (q + k) % 3 == 0, None, None, 150, 150, device="cpu"
    )
    assert blocks.ranges_of(holes, 2) is None
    heads = create_block_mask(lambda b, h, q, k: q - k < h + 2, None, 2, 40, 40, device="cpu")
    assert blocks.ranges_of(heads, 1) is None and blocks.hidden(heads).shape == (1, 2, 40, 40)


def test_block_tables_decide_without_the_function():
    """Of a block that the tables name full, mask_mod is not asked: as FlexAttention has it."""
    mask = create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    mask.mask_mod = lambda b, h, q, k: q < 0
    seen = ~blocks.hidden(mask)[0, 0]
    want = torch.ones(4, 4).tril(-1).bool().repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(seen, want)


def test_call_counts_of_a_packed_batch():
    plan = Plan(MASKS["documents"])
    jumar.reset_call_counts()
    attend(*operands(2, 9, 9), plan, scale=1.0).sum().backward()
    assert jumar.call_counts() == {"npu_fusion_attention": 1, "npu_fusion_attention_grad": 1}
