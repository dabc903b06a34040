"""npu_sparse_flash_attention: autograd, compile, autocast, errors, schemas, memory."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from attention_util import normal
from jumar import ops
from op_util import assert_schemas, peak_memory
from sparse_attention_util import CONFIGS, NAMES, Config, call, make


def test_schemas():
    unbounded = "pre_tokens=9223372036854775807, int{} next_tokens=9223372036854775807"
    assert_schemas({
        "npu_sparse_flash_attention": "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices,"
        " float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None,"
        " Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None,"
        ' int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, int '
        + unbounded.format("")
        + ", int attention_mode=0, bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
        "npu_sparse_flash_attention_grad": "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices,"
        " Tensor d_out, Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value, int sparse_block_size,"
        " Tensor? query_rope=None, Tensor? key_rope=None, Tensor? actual_seq_qlen=None,"
        ' Tensor? actual_seq_kvlen=None, str? layout="BSND", int? sparse_mode=3, int? '
        + unbounded.format("?")
        + ", int? attention_mode=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    })  # fmt: skip


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
    "unsupported dtype int16;": {"ids": torch.zeros(1, 4, 1, 2, dtype=torch.int16)},
    "unsupported dtype uint8;": {"ids": torch.zeros(1, 4, 1, 2, dtype=torch.uint8)},
    "all tensors must be on one device, got cpu and meta": {"ids": tensor(1, 4, 1, 2, dtype=torch.int32).to("meta")},
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
import torch
from jumar import ops
s, heads, k = 32768, 4, 64
generator = torch.Generator().manual_seed(0)
def normal(*shape): return torch.randn(*shape, generator=generator).bfloat16().requires_grad_()
query, latent = normal(1, s, heads, 512), normal(1, s, 1, 512)
query_rope, key_rope = normal(1, s, heads, 64), normal(1, s, 1, 64)
ids = (torch.rand(1, s, 1, k, generator=generator) * torch.arange(1, s + 1)[:, None, None]).int()
before = peak()
out = ops.npu_sparse_flash_attention(query, latent, latent, ids, 0.05, query_rope=query_rope, key_rope=key_rope)[0]
out.backward(torch.ones_like(out))
assert latent.grad.isfinite().all()
print(peak() - before, 0)
"""


def test_memory_of_long_sequences():
    """32768 rows: a mask of all pairs alone would take 1 GiB, scores 16."""
    assert peak_memory(_LONG)[0] < 1 << 20
