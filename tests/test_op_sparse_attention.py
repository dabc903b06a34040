"""npu_sparse_flash_attention against the fp64 oracle, torch's attention with a scattered mask, and its own promises."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
import sparse_attention_ref as ref
from attention_util import HALF_ULP, normal, sum_unit
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp, check_retain_graph

NAMES = ("query", "key", "value", "query_rope", "key_rope", "sinks")


@dataclass
class Config:
    dtype: torch.dtype = torch.float32
    batch: int = 1
    queries: int = 9
    keys: int = 11
    heads: int = 4
    kv: int = 1
    size: int = 8
    rope: int = 0
    value_size: int = 8
    ids: int = 5
    block: int = 1
    mode: int = 3
    sinks: bool = False
    packed: bool = False
    q_lengths: list[int] | None = None
    k_lengths: list[int] | None = None


def make(c, seed=0):
    """Tensors of one call, by name, and its ids: a fifth of them -1, one row of -1 alone, some twice."""
    statistics = torch.float64 if c.dtype == torch.float64 else torch.float32

    def tokens(rows, heads, size, at):
        shape = (rows, heads, size) if c.packed else (c.batch, rows, heads, size)
        return normal(*shape, dtype=c.dtype, seed=seed + at)

    tensors = {
        "query": tokens(c.queries, c.heads, c.size, 0),
        "key": tokens(c.keys, c.kv, c.size, 1),
        "value": tokens(c.keys, c.kv, c.value_size, 2),
    }
    if c.rope:
        tensors["query_rope"] = tokens(c.queries, c.heads, c.rope, 3)
        tensors["key_rope"] = tokens(c.keys, c.kv, c.rope, 4)
    if c.sinks:
        tensors["sinks"] = normal(c.heads, dtype=statistics, seed=seed + 5)
    generator = torch.Generator().manual_seed(seed)
    shape = (c.batch, c.queries, c.kv, c.ids)
    ids = torch.randint(0, max(1, -(-c.keys // c.block)), shape, generator=generator)
    ids[torch.rand(shape, generator=generator) < 0.2] = -1
    ids[:, c.queries // 2 : c.queries // 2 + 1] = -1
    if c.keys == 0:
        ids[:] = -1
    return tensors, (ids[0] if c.packed else ids).int()


def call(c, tensors, ids, scale=0.4, **more):
    t = dict(tensors)
    lengths = {
        name: None if x is None else torch.tensor(x, dtype=torch.int32)
        for name, x in (
            ("actual_seq_lengths_query", c.q_lengths),
            ("actual_seq_lengths_kv", c.k_lengths),
        )
    }
    layout = "TND" if c.packed else "BSND"
    return ops.npu_sparse_flash_attention(
        t.pop("query"), t.pop("key"), t.pop("value"), ids, scale, sparse_block_size=c.block, sparse_mode=c.mode,
        layout_query=layout, layout_kv=layout, return_softmax_lse=True, **lengths, **t, **more,
    )  # fmt: skip


def oracle(c, tensors, ids, scale=0.4):
    t = dict(tensors)
    return ref.sparse_attention(
        t.pop("query"), t.pop("key"), t.pop("value"), ids, scale, block=c.block, mode=c.mode, q_lengths=c.q_lengths,
        k_lengths=c.k_lengths, **t,
    )  # fmt: skip


def check(c, seed=0, scale=0.4):
    tensors, ids = make(c, seed)
    leaves = {n: x.detach().clone().requires_grad_() for n, x in tensors.items()}
    exact = {n: x.double().requires_grad_() for n, x in tensors.items()}
    out, most, total = call(c, leaves, ids, scale)
    want = oracle(c, exact, ids, scale)
    dy = normal(*out.shape, dtype=c.dtype, seed=seed + 9)
    gradients = torch.autograd.grad(out, leaves.values(), dy)
    wanted = torch.autograd.grad(want.out, exact.values(), dy.double(), allow_unused=True)
    assert out.dtype == c.dtype and out.is_contiguous()

    # The results of absolute values bound every term; each is off by the errors of its score and of its sum, and
    # gradients through delta by the rounding of the output.
    size = {n: x.double().abs() for n, x in tensors.items()}
    if not out.numel() or not tensors["key"].numel():
        assert not out.any() and not any(g.any() for n, g in zip(tensors, gradients, strict=True))
        return
    largest = (size["query"].flatten(0, -2).amax(0) * size["key"].flatten(0, -2).amax(0)).sum()
    if c.rope:
        largest += (
            size["query_rope"].flatten(0, -2).amax(0) * size["key_rope"].flatten(0, -2).amax(0)
        ).sum()
    error = scale * largest.item() * sum_unit(c.dtype, c.size + c.rope)
    slots, rows = c.ids * c.block, c.queries * c.heads
    unit = 4 * error + sum_unit(c.dtype, max(slots, rows))
    assert most.dtype == total.dtype == (c.dtype if c.dtype == torch.float64 else torch.float32)
    assert_ulp(most, want.maximum, 1.0, "max", floor=error)
    assert_ulp(total, want.total, 1.0, "sum", floor=want.total * unit)
    assert_ulp(out, want.out, 0.51, "out", floor=unit * size["value"].max())
    row = dy.double().abs().sum(-1).max() * size["value"].max()
    ds = scale * row * (4 * unit + 2 * HALF_ULP[c.dtype])
    q, k = (max(size[n].max(), size[f"{n}_rope"].max() if c.rope else 0) for n in ("query", "key"))
    floors = {
        "query": ds * k,
        "key": ds * q * rows * slots,
        "value": 2 * unit * dy.double().abs().max() * rows * slots,
        "query_rope": ds * k,
        "key_rope": ds * q * rows * slots,
        "sinks": ds / scale * c.batch * c.queries,
    }
    for name, got, expected in zip(tensors, gradients, wanted, strict=True):
        expected = torch.zeros_like(exact[name]) if expected is None else expected
        assert got.dtype == tensors[name].dtype
        assert_ulp(got, expected, 1.0 if name == "sinks" else 0.51, f"d {name}", floor=floors[name])


CONFIGS = {
    "plain": Config(),
    "odd sizes": Config(
        batch=2, queries=7, keys=13, heads=3, size=33, rope=5, value_size=20, sinks=True
    ),
    "many heads": Config(queries=5, keys=40, heads=40, size=64, rope=16, value_size=64, ids=37),
    "key heads": Config(batch=2, heads=6, kv=3, mode=0, sinks=True),
    "blocks": Config(queries=12, keys=22, block=4, ids=4, rope=3),
    "more queries": Config(queries=15, keys=6),
    "lengths": Config(batch=3, q_lengths=[9, 0, 4], k_lengths=[5, 11, 0]),
    "packed": Config(
        queries=12, keys=15, packed=True, q_lengths=[5, 5, 12], k_lengths=[6, 9, 15], rope=2
    ),
    "trailing zeros": Config(
        queries=7, keys=9, packed=True, q_lengths=[3, 7, 0, 0], k_lengths=[4, 9, 0, 0]
    ),
    "one": Config(queries=1, keys=1, heads=1, size=1, value_size=1, ids=1),
    "no queries": Config(queries=0),
    "no keys": Config(keys=0),
}


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_matches_the_oracle(name, dtype):
    check(Config(**{**CONFIGS[name].__dict__, "dtype": dtype}), seed=len(name))


@settings(max_examples=40, deadline=None)
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


def test_gradcheck():
    c = Config(
        dtype=torch.float64, queries=4, keys=5, heads=2, size=3, rope=2, value_size=2, sinks=True
    )
    tensors, ids = make(c)
    leaves = [x.requires_grad_() for x in tensors.values()]
    assert gradcheck(lambda *xs: call(c, dict(zip(tensors, xs, strict=True)), ids)[0], leaves)
    # One input alone.
    frozen = {n: x.detach() for n, x in tensors.items()}
    assert gradcheck(lambda x: call(c, frozen | {"key_rope": x}, ids)[0], (tensors["key_rope"],))


def test_the_vendors_gradient_operator():
    c = Config(rope=4, batch=2)
    tensors, ids = make(c)
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    out, most, total = call(c, leaves, ids)
    dy = normal(*out.shape, dtype=torch.float32, seed=3)
    want = torch.autograd.grad(out, leaves.values(), dy)
    plain = [x.detach() for x in leaves.values()]
    got = ops.npu_sparse_flash_attention_grad(
        *plain[:3], ids, dy, out.detach(), most, total, 0.4, 1, *plain[3:]
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    got = ops.npu_sparse_flash_attention_grad(
        *plain[:3], ids, dy, out.detach(), most, total, 0.4, 1, layout=None
    )
    assert got[3].shape == got[4].shape == (0,)


def positional(c, tensors, ids, scale=0.4):
    """Arguments of jumar::sparse_attention."""
    t = {n: tensors.get(n) for n in NAMES}
    layout = "TND" if c.packed else "BSND"
    ends = [
        None if x is None else torch.tensor(x, dtype=torch.int32)
        for x in (c.q_lengths, c.k_lengths)
    ]
    return (
        t["query"], t["key"], t["value"], ids, scale, *ends, t["query_rope"], t["key_rope"], t["sinks"], c.block,
        layout, c.mode,
    )  # fmt: skip


def test_opcheck():
    for name in ("plain", "odd sizes", "key heads", "packed"):
        c = CONFIGS[name]
        tensors, ids = make(c)
        leaves = {n: x.requires_grad_() for n, x in tensors.items()}
        opcheck(torch.ops.jumar.sparse_attention.default, positional(c, leaves, ids))
        with torch.no_grad():
            arguments = positional(c, {n: x.detach() for n, x in tensors.items()}, ids)
            out, most, total = torch.ops.jumar.sparse_attention(*arguments)
            opcheck(torch.ops.jumar.sparse_attention_backward.default,
                    (*arguments[:4], out, out, most, total, *arguments[4:]))  # fmt: skip
            for ns in jumar._load.NAMESPACES:
                grad = getattr(torch.ops, ns).npu_sparse_flash_attention_grad.default
                opcheck(grad, (*arguments[:4], out, out, most, total, 0.4, c.block, *arguments[7:9], *arguments[5:7],
                               arguments[11]))  # fmt: skip


def test_double_backward_raises():
    tensors, ids = make(Config())
    query = tensors["query"].requires_grad_()
    out = call(Config(), tensors, ids)[0]
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="sparse_attention_backward: not differentiable"):
        gradient.sum().backward()


def test_statistics_take_no_gradient():
    tensors, ids = make(Config())
    tensors["query"].requires_grad_()
    out, most, total = call(Config(), tensors, ids)
    assert out.requires_grad and not most.requires_grad and not total.requires_grad
    # Gradients do not need them.
    t = tensors
    plain = ops.npu_sparse_flash_attention(t["query"], t["key"], t["value"], ids, 0.4)
    assert plain[1].shape == plain[2].shape == (0,)
    plain[0].sum().backward()
    assert t["query"].grad.any()


def test_retain_graph():
    c = Config(rope=3, sinks=True)
    tensors, ids = make(c)
    check_retain_graph(
        lambda *xs: call(c, dict(zip(tensors, xs, strict=True)), ids)[0], *tensors.values()
    )


def test_strides_and_expanded_gradients():
    c = Config(batch=2, rope=3)
    tensors, ids = make(c)
    moved = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in tensors.items()}
    moved["value"] = tensors["value"].repeat_interleave(2, -1)[..., ::2]
    results = []
    for t, index in ((tensors, ids), (moved, ids.repeat_interleave(2, -1)[..., ::2])):
        leaves = {n: x.detach().requires_grad_() for n, x in t.items()}
        out = call(c, leaves, index)[0]
        results.append((out, *torch.autograd.grad(out.sum(), leaves.values())))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compile():
    c = Config(rope=3)
    tensors, ids = make(c)
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}

    def step(*xs):
        return call(c, dict(zip(tensors, xs, strict=True)), ids)[0] * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for f in (step, compiled):
        out = f(*leaves.values())
        results.append((out, *torch.autograd.grad(out.sum(), leaves.values())))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast():
    c = Config(sinks=True, rope=3)
    tensors, ids = make(c)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(c, tensors, ids)[0]
    narrow = {n: x if n == "sinks" else x.bfloat16() for n, x in tensors.items()}
    assert out.dtype == torch.bfloat16 and torch.equal(out, call(c, narrow, ids)[0])


def test_bits_do_not_depend_on_threads():
    c = Config(queries=70, keys=70, heads=18, size=40, rope=8, ids=20)
    tensors, ids = make(c)
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            leaves = {k: x.detach().requires_grad_() for k, x in tensors.items()}
            out = call(c, leaves, ids)[0]
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves.values())))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_keys_that_nobody_picks_do_not_leak():
    c = Config(rope=3)
    tensors, _ = make(c)
    ids = torch.tensor([0, 1, 3, -1]).expand(1, c.queries, 1, 4).int()
    dirty = {n: x.clone() for n, x in tensors.items()}
    for n in ("key", "value", "key_rope"):
        dirty[n][:, 2] = torch.nan
        dirty[n][:, 4:] = torch.inf
    results = []
    for t in (tensors, dirty):
        leaves = {n: x.requires_grad_() for n, x in t.items()}
        out = call(c, leaves, ids)[0]
        results.append((out, *torch.autograd.grad(out.sum(), leaves.values())))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def tensor(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


ERRORS = {
    "the layout must be BSND or TND, got 'SBND'": {"layout_query": "SBND", "layout_kv": "SBND"},
    "layout_kv must be layout_query 'BSND', got 'PA_BSND'": {"layout_kv": "PA_BSND"},
    "block_table belongs to paged keys": {"block_table": tensor(1, 1, dtype=torch.int32)},
    "sparse_mode must be 0 or 3, got 4": {"sparse_mode": 4},
    "pre_tokens must keep its default": {"pre_tokens": 5},
    "next_tokens must keep its default": {"next_tokens": 0},
    "sparse_block_size must be at least 1, got 0": {"sparse_block_size": 0},
    "query of layout TND has 3 dimensions": {"layout_query": "TND", "layout_kv": "TND"},
    "query_rope and key_rope come together": {"query_rope": tensor(1, 4, 2, 3)},
    r"key_rope must be float32\[1, 5, 1, 3\]": {
        "query_rope": tensor(1, 4, 2, 3),
        "key_rope": tensor(1, 4, 1, 3),
    },
    r"sinks must be float32\[2\]": {"sinks": tensor(2, dtype=torch.float64)},
    r"actual_seq_lengths_kv is 6 at position 0, not within \[0, 5\]": {
        "actual_seq_lengths_kv": torch.tensor([6])
    },
    "actual_seq_lengths_query must be a list of int32 or int64": {
        "actual_seq_lengths_query": tensor(1)
    },
    "sparse_indices -2 at position": {"ids": torch.full((1, 4, 1, 2), -2)},
    r"sparse_indices 5 at position \[0, 0, 0, 0\]": {"ids": torch.full((1, 4, 1, 2), 5)},
    "sparse_indices must be int32 or int64, got float32": {"ids": tensor(1, 4, 1, 2)},
    r"sparse_indices must be int64\[1, 4, 1, 2\]": {"ids": torch.zeros(1, 3, 1, 2).long()},
    r"value must be float32": {"value": tensor(1, 5, 1, 3, dtype=torch.float64)},
    "number of query heads must be a multiple": {"key": tensor(1, 5, 3, 3)},
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text):
    given = {
        "query": tensor(1, 4, 2, 3), "key": tensor(1, 5, 1, 3), "value": tensor(1, 5, 1, 3),
        "ids": torch.zeros(1, 4, 1, 2, dtype=torch.int32),
    } | ERRORS[text]  # fmt: skip
    positional_ = [given.pop(n) for n in ("query", "key", "value", "ids")]
    with pytest.raises(RuntimeError, match=f"npu_sparse_flash_attention: .*{text}"):
        ops.npu_sparse_flash_attention(*positional_, 1.0, **given)


@pytest.mark.parametrize(
    ("ends", "ends_kv", "text"),
    [
        ([2, 3], [2, 5], "end at 3 and 5, but query and key have 4 and 5"),
        ([3, 2], [2, 5], "are cumulative"),
        ([4], [2, 5], "of one length"),
        (None, [5], "needs actual_seq_lengths_query"),
    ],
)
def test_errors_of_packed_lengths(ends, ends_kv, text):
    c = Config(queries=4, keys=5, packed=True, q_lengths=ends, k_lengths=ends_kv)
    tensors, ids = make(c)
    with pytest.raises(RuntimeError, match=f"npu_sparse_flash_attention: .*{text}"):
        call(c, tensors, ids)


_LONG = """
import resource, torch
from jumar import ops
s, heads, k = 32768, 4, 64
generator = torch.Generator().manual_seed(0)
def normal(*shape): return torch.randn(*shape, generator=generator).bfloat16().requires_grad_()
query, latent = normal(1, s, heads, 512), normal(1, s, 1, 512)
query_rope, key_rope = normal(1, s, heads, 64), normal(1, s, 1, 64)
ids = (torch.rand(1, s, 1, k, generator=generator) * torch.arange(1, s + 1)[:, None, None]).int()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
out = ops.npu_sparse_flash_attention(query, latent, latent, ids, 0.05, query_rope=query_rope, key_rope=key_rope)[0]
out.backward(torch.ones_like(out))
assert latent.grad.isfinite().all()
print(peak() - before)
"""


def test_memory_of_long_sequences():
    """32768 rows: a mask of all pairs alone would take 1 GiB, scores 16."""
    run = subprocess.run(
        [sys.executable, "-c", _LONG], capture_output=True, text=True, check=True, timeout=600
    )
    assert int(run.stdout) < 1 << 20, f"{run.stdout} KiB"
