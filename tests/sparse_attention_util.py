"""What the tests of sparse attention share: inputs of one call, the oracle's results and bounds of their errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import sparse_attention_ref as ref
from attention_util import HALF_ULP, normal, sum_unit
from jumar import ops
from op_util import assert_ulp

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
