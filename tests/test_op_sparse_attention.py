"""npu_sparse_flash_attention against the fp64 oracle, torch's attention with a scattered mask, and its own promises."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from attention_util import normal
from jumar import ops
from op_util import FLOAT_DTYPES
from sparse_attention_util import CONFIGS, Config, call, check, make


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_matches_the_oracle(name, dtype):
    check(Config(**{**CONFIGS[name].__dict__, "dtype": dtype}), seed=len(name))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_call_matches_the_oracle(data):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    c = Config(
        dtype=data.draw(st.sampled_from(FLOAT_DTYPES)), batch=draw(1, 3), queries=draw(1, 12), keys=draw(1, 20),
        kv=draw(1, 2), size=draw(1, 20), rope=draw(0, 5), value_size=draw(1, 20), ids=draw(0, 40), block=draw(1, 5),
        mode=data.draw(st.sampled_from((0, 3))), sinks=data.draw(st.booleans()), packed=data.draw(st.booleans()),
    )  # fmt: skip
    c.heads = c.kv * draw(1, 18)
    if c.packed:
        c.batch = 1
        cuts = draw(0, 2)
        c.q_lengths, c.k_lengths = (
            [*sorted(draw(0, n) for _ in range(cuts)), n] for n in (c.queries, c.keys)
        )
    elif data.draw(st.booleans()):
        c.q_lengths, c.k_lengths = (
            [draw(0, n) for _ in range(c.batch)] for n in (c.queries, c.keys)
        )
    check(c, seed=draw(0, 1000))


def test_like_torch_with_a_scattered_mask():
    c = Config(dtype=torch.float64, batch=2, queries=30, keys=30, heads=6, size=16, value_size=16)
    tensors, _ = make(c)
    order = torch.rand(2, 30, 30, generator=torch.Generator().manual_seed(1)).argsort(-1)
    ids = order[..., :8].int().unsqueeze(2)
    mask = torch.zeros(2, 30, 30, dtype=torch.bool).scatter(-1, order[..., :8], True).tril()
    mask[:, 0, 0] = True  # rows without keys are checked elsewhere
    ids[:, 0] = torch.tensor([3, -1, -1, 0, -1, -1, -1, 7])
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    q, k, v = (x.transpose(1, 2) for x in leaves.values())
    want = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask[:, None], scale=0.4, enable_gqa=True
    ).transpose(1, 2)
    out = call(c, leaves, ids)[0]
    dy = normal(*out.shape, seed=3)
    rows = mask.any(-1)
    dy[~rows] = 0
    torch.testing.assert_close(out[rows], want[rows], rtol=0, atol=1e-13)
    for a, b in zip(
        *(torch.autograd.grad(y, leaves.values(), dy) for y in (out, want)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_minus_one_is_skipped_wherever_it_stands():
    c = Config(dtype=torch.float64, queries=1, keys=6, size=4, value_size=4)
    tensors, _ = make(c)
    results = [
        call(c, tensors, torch.tensor(ids, dtype=dtype).view(1, 1, 1, -1))
        for ids, dtype in (
            ([4, 0, 2], torch.int32),
            ([-1, 4, -1, 0, -1, 2], torch.int64),
            ([4, -1, 0, 2], torch.int32),
        )
    ]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    # Twice in the list, twice in the softmax.
    q, k, v = (tensors[n] for n in ("query", "key", "value"))
    twice = call(c, tensors, torch.tensor([4, 0, 4], dtype=torch.int32).view(1, 1, 1, -1))[0]
    p = (0.4 * q[0, 0] @ k[0, [4, 0, 4], 0].mT).softmax(-1)
    torch.testing.assert_close(twice[0, 0], p @ v[0, [4, 0, 4], 0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("block", [12, 2**31, 2**62, 2**63 - 1])
def test_block_longer_than_the_keys_is_all_keys(block):
    whole = Config(queries=3, block=11, ids=2)
    tensors, _ = make(whole)
    ids = torch.tensor([0, -1], dtype=torch.int32).expand(1, 3, 1, 2)
    results = []
    for c in (whole, dataclasses.replace(whole, block=block)):
        leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
        out = call(c, leaves, ids)[0]
        results.append((out, *torch.autograd.grad(out.sum(), leaves.values())))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rows_without_keys():
    c = Config(rope=4, queries=4)
    tensors, ids = make(c)
    ids[:] = -1
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    out, most, total = call(c, leaves, ids)
    assert not out.any() and not total.any() and (most == torch.finfo(torch.float32).min).all()
    for gradient in torch.autograd.grad(out, leaves.values(), torch.ones_like(out)):
        assert not gradient.any()


def test_packed_is_each_document_alone():
    c = Config(queries=20, keys=20, packed=True, rope=3)
    tensors, ids = make(c)
    ends = [0, 6, 6, 20]
    parts = list(zip(ends[:-1], ends[1:], strict=True))
    for a, b in parts:
        ids[a:b] = ids[a:b] % max(1, b - a)
    c.q_lengths = c.k_lengths = ends[1:]
    whole = call(c, tensors, ids)
    for a, b in parts:
        one = Config(queries=b - a, keys=b - a, packed=True, q_lengths=[b - a], k_lengths=[b - a])
        if a == b:
            continue
        alone = call(one, {n: x[a:b] for n, x in tensors.items()}, ids[a:b])
        assert torch.equal(alone[0], whole[0][a:b])
        assert torch.equal(alone[1], whole[1][:, a:b]) and torch.equal(alone[2], whole[2][:, a:b])


def test_batch_entries_do_not_meet():
    c = Config(batch=3, sinks=True)
    tensors, ids = make(c)
    order = torch.tensor([2, 0, 1])
    moved = {n: x if n == "sinks" else x[order] for n, x in tensors.items()}
    for a, b in zip(call(c, tensors, ids), call(c, moved, ids[order]), strict=True):
        assert torch.equal(a[order], b)


def test_key_that_is_value():
    """One latent tensor: autograd adds both gradients; the absorbed form is the expanded one."""
    heads, nope, rope, rank, rows = 3, 6, 4, 10, 12
    weight = normal(heads, nope + 5, rank, seed=1).requires_grad_()
    latent = normal(1, rows, 1, rank, seed=2).requires_grad_()
    q_nope, q_rope = normal(1, rows, heads, nope, seed=3), normal(1, rows, heads, rope, seed=4)
    k_rope = normal(1, rows, 1, rope, seed=5)
    ids = torch.arange(rows, dtype=torch.int32).expand(1, rows, 1, rows)
    absorbed = torch.einsum("bshq,hqr->bshr", q_nope, weight[:, :nope])
    out = ops.npu_sparse_flash_attention(
        absorbed, latent, latent, ids, 0.3, query_rope=q_rope, key_rope=k_rope, attention_mode=2
    )[0]
    out = torch.einsum("bshr,hvr->bshv", out, weight[:, nope:])
    k = torch.cat(
        [
            torch.einsum("bsr,hqr->bhsq", latent[:, :, 0], weight[:, :nope]),
            k_rope.transpose(1, 2).expand(-1, heads, -1, -1),
        ],
        -1,
    )
    v = torch.einsum("bsr,hvr->bhsv", latent[:, :, 0], weight[:, nope:])
    q = torch.cat([q_nope, q_rope], -1).transpose(1, 2)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    dy = normal(*out.shape, seed=6)
    for a, b in zip(
        *(torch.autograd.grad(y, (weight, latent), dy) for y in (out, want)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
