"""npu_fusion_attention through torch: oracle, layouts, masks, modes, packed sequences, hidden keys, threads."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F

import attention_ref as ref
from attention_ref import CAUSAL_MASK, UNBOUNDED
from attention_util import HALF_ULP, LAYOUTS, MODES, Case, arguments, normal
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp, check_threads, peak_memory, strided_views


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode, dtype):
    for rows, keys in ((33, 33), (20, 37), (37, 20), (150, 270)):
        given = arguments(mode, 2, 4, rows, keys)
        Case(dtype, 2, 4, 2, rows, keys, 24, 16, "BNSD", scale=0.3, **given).check()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    for size, value_size in ((8, 8), (65, 17), (128, 128)):
        given = arguments("lower right", 2, 6, 40, 40)
        Case(dtype, 2, 6, 3, 40, 40, size, value_size, layout, scale=size**-0.5, **given).check()


@pytest.mark.parametrize("shape", range(4))
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8], ids=str)
def test_shapes_of_the_mask(shape, kind):
    given = arguments("mask", 2, 4, 35, 50, shape)
    given["mask"] = given["mask"].to(kind) * 3 if kind == torch.uint8 else given["mask"]
    Case(torch.float32, 2, 4, 2, 35, 50, 16, 16, "BNSD", **given).check()


def test_masks_that_repeat_or_are_strided():
    # [B, N, 1, Skv] (D8 of the log of faults), and views of other memory.
    row = torch.rand(2, 4, 1, 50, generator=torch.Generator().manual_seed(1)) < 0.5
    plain = row.expand(2, 4, 35, 50)
    for mask in (row, plain, plain.contiguous().mT.contiguous().mT):
        Case(torch.float32, 2, 4, 2, 35, 50, 16, 16, "BSND", mode=1, mask=mask).check()


@pytest.mark.parametrize("size", [1, 8, 192, 576])
def test_head_sizes(size):
    for dtype in (torch.float32, torch.bfloat16):
        given = arguments("lower right", 1, 2, 19, 19)
        Case(
            dtype, 1, 2, 1, 19, 19, size, min(size, 512), "BSND", scale=size**-0.5, **given
        ).check()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_pse_and_sink(dtype):
    for shape in ((2, 4, 33, 50), (2, 4, 1, 50), (1, 4, 33, 50)):
        pse = normal(*shape, dtype=dtype, seed=9)
        sink = normal(4, dtype=torch.float64 if dtype == torch.float64 else torch.float32, seed=8)
        given = arguments("lower right", 2, 4, 33, 50)
        Case(dtype, 2, 4, 2, 33, 50, 16, 16, "BSH", scale=0.4, pse=pse, sink=sink, **given).check()


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_pse_compressed_to_its_last_rows(mode):
    """A bias of i - j alone: padded, packed, and what the rows that share an element give to it."""
    rows, heads, pse_rows = 1300, 2, 1024
    slopes = torch.tensor([0.05, -0.03], dtype=torch.float64)[:, None, None]
    offset = torch.arange(rows)[:, None] - torch.arange(rows)
    bias = (slopes * offset).unsqueeze(0)
    q, k, v, dy = (normal(1, heads, rows, 4, seed=i) for i in range(4))
    rule = {"atten_mask": CAUSAL_MASK, "sparse_mode": mode, "scale": 0.3}
    if mode == 0:
        rule.update(atten_mask=torch.zeros(1, 1, dtype=torch.bool), next_tockens=0)

    def run(pse):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, pse)]
        out = ops.npu_fusion_attention(*leaves[:3], heads, "BNSD", pse=leaves[3], **rule)[0]
        return out, *torch.autograd.grad(out, leaves, dy)

    whole, short = run(bias), run(bias[:, :, -pse_rows:])
    for a, b in zip(whole[:4], short[:4], strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    # Row f and those after it have an element of their own; those before share row f with it.
    first = rows - pse_rows
    want = whole[4][:, :, first:].clone()
    for i in range(first):
        want[0, :, 0, first - i : first + 1] += whole[4][0, :, i, : i + 1]
    assert torch.allclose(short[4], want, rtol=0, atol=1e-12)

    # Packed: each sequence reads by its own positions, whatever the length of the others.
    ends = [1100, 1107, 1107, 1300]
    packed = [x[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    lists = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    pse = bias[:, :, 1100 - pse_rows : 1100, :1100].contiguous().requires_grad_()
    out = ops.npu_fusion_attention(*packed, heads, "TND", pse=pse, **lists, **rule)[0]
    got = torch.autograd.grad(out, [*packed, pse], dy[0].transpose(0, 1))
    assert got[3].shape == pse.shape and got[3].isfinite().all()
    for begin, end in ((0, 1100), (1100, 1107), (1107, 1300)):
        n = end - begin
        part = [x[:, :, begin:end].clone().requires_grad_() for x in (q, k, v)]
        alone = ops.npu_fusion_attention(
            *part, heads, "BNSD", pse=bias[:, :, :n, :n].contiguous(), **rule
        )[0]
        want = torch.autograd.grad(alone, part, dy[:, :, begin:end])
        for a, b in zip((out, *got), (alone, *want), strict=False):
            assert torch.allclose(a[begin:end].transpose(0, 1), b[0], rtol=0, atol=1e-12)


def test_pse_that_packed_sequences_cannot_have():
    q = torch.zeros(6, 2, 4)
    given = {
        "actual_seq_qlen": [3, 6],
        "actual_seq_kvlen": [3, 6],
        "atten_mask": CAUSAL_MASK,
        "sparse_mode": 3,
    }
    for pse, change, text in (
        (torch.zeros(2, 2, 3, 3), {}, "pse of input_layout TND must be the compressed form"),
        (torch.zeros(3, 2, 1024, 3), {}, "pse compressed to 1024 rows has shape"),
        (torch.zeros(1, 2, 1024, 2), {}, "pse compressed to 1024 rows has shape"),
        (torch.zeros(1, 2, 1024, 5), {"actual_seq_kvlen": [2, 6]}, "as many queries as keys"),
        (torch.zeros(1, 2, 1024, 5), {"atten_mask": None}, "not causal by its sparse_mode"),
    ):
        with pytest.raises(RuntimeError, match=f"npu_fusion_attention: .*{text}|attention: {text}"):
            ops.npu_fusion_attention(q, q, q, 2, "TND", pse=pse, **{**given, **change})


def test_random_cases():
    choose = random.Random(0)
    for seed in range(60):
        batch, kv = choose.choice((1, 2)), choose.choice((1, 2, 3))
        heads, rows = kv * choose.choice((1, 2, 4)), choose.choice((1, 2, 16, 17, 64, 131))
        keys = choose.choice((rows, 1, 16, 133, 280))
        given = arguments(choose.choice(list(MODES)), batch, heads, rows, keys, choose.randrange(4))
        if "prefix" in given:
            given["prefix"] = given["prefix"][:batch]
        Case(
            choose.choice(FLOAT_DTYPES), batch, heads, kv, rows, keys, choose.choice((4, 17, 64)),
            choose.choice((3, 16)), choose.choice(LAYOUTS), seed=10 * seed, scale=choose.choice((0.3, 1.0, -0.5)),
            **given,
        ).check()  # fmt: skip


@pytest.mark.parametrize("mode", [-1, 0, 1, 2, 3, 4, 7, 8])
def test_packed_is_each_sequence_on_its_own(mode):
    ends, ends_kv = [5, 5, 40, 57], [9, 9, 30, 60]
    extra = {"pre_tockens": 70, "next_tockens": 0} if mode in (0, 4, 7, 8) else {}
    mask = None if mode < 0 else CAUSAL_MASK
    if mode in (0, 1):
        mask = torch.rand(35, 30, generator=torch.Generator().manual_seed(2)) < 0.4
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        q, k, v, dy = (
            normal(t, n, d, dtype=dtype, seed=i)
            for i, (t, n, d) in enumerate(((57, 4, 16), (60, 2, 16), (60, 2, 8), (57, 4, 8)))
        )
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        for tail in ([], [0, 0]):
            out, maximum, total, *_, numels = ops.npu_fusion_attention(
                *leaves, 4, "TND", atten_mask=mask, scale=0.3, sparse_mode=max(mode, 0), softmax_layout="TND",
                actual_seq_qlen=ends + tail, actual_seq_kvlen=ends_kv + tail, **extra,
            )  # fmt: skip
            assert numels == 4 * (5 * 9 + 35 * 21 + 17 * 30)
        got = torch.autograd.grad(out, leaves, dy)
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        want = ref.fusion_attention(
            *wide, 4, "TND", mask=mask, scale=0.3, mode=max(mode, 0), ends=ends, ends_kv=ends_kv,
            pre=extra.get("pre_tockens", UNBOUNDED), following=extra.get("next_tockens", UNBOUNDED),
        )  # fmt: skip
        exact = torch.autograd.grad(want.out, wide, dy.double())
        unit = 2.0**-45 if dtype == torch.float64 else 2.0**-17
        assert_ulp(out, want.out, 0.51, "out", floor=unit)
        assert_ulp(maximum[..., 0].T, want.maximum.clamp(min=ref.LOWEST), 1.0, "max", floor=unit)
        assert_ulp(total[..., 0].T, want.total, 1.0, "sum", floor=8 * unit)
        for a, b in zip(got, exact, strict=True):
            assert_ulp(a, b, 0.51, "gradient", floor=16 * unit + 64 * HALF_ULP[dtype])
        # The other order of the statistics holds the same numbers, heads first.
        by_head = ops.npu_fusion_attention(
            q, k, v, 4, "TND", atten_mask=mask, scale=0.3, sparse_mode=max(mode, 0), actual_seq_qlen=ends,
            actual_seq_kvlen=ends_kv, **extra,
        )[1]  # fmt: skip
        assert torch.equal(by_head.flatten().view(4, 57, 8), maximum.transpose(0, 1))


def test_packed_with_no_keys_or_no_queries():
    q, k = normal(6, 2, 8, dtype=torch.float32), normal(5, 2, 8, dtype=torch.float32, seed=1)
    leaves = [q.requires_grad_(), k.requires_grad_(), k.detach().clone().requires_grad_()]
    out = ops.npu_fusion_attention(
        *leaves, 2, "TND", actual_seq_qlen=[4, 6, 6], actual_seq_kvlen=[3, 3, 5]
    )[0]
    assert torch.equal(out[4:], torch.zeros(2, 2, 8))
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert torch.equal(dq[4:], torch.zeros(2, 2, 8))
    assert not dk[3:].any() and not dv[3:].any() and dv[:3].all()


@pytest.mark.parametrize("mode", [7, 8])
def test_the_cut_sequence_is_one_with_queries(mode):
    """A sequence that has queries and no keys may be the cut one; one without queries may not."""
    whole, cut, keys = (6, 6), (4, 0), (0, 5)
    order = [keys, cut, whole] if mode == 8 else [whole, cut, keys]
    ends, ends_kv = (list(itertools.accumulate(x)) for x in zip(*order, strict=True))
    mask = torch.ones(2048, 2048).triu(1).bool()
    q, k, v = (normal(n, 2, 8, seed=i) for i, n in enumerate((10, 11, 11)))
    out = ops.npu_fusion_attention(
        q, k, v, 2, "TND", atten_mask=mask, sparse_mode=mode, pre_tockens=1, next_tockens=0, actual_seq_qlen=ends,
        actual_seq_kvlen=ends_kv,
    )[0]  # fmt: skip
    i, j = (slice(4, 10), slice(5, 11)) if mode == 8 else (slice(0, 6), slice(0, 6))
    alone = ops.npu_fusion_attention(
        q[i], k[j], v[j], 2, "TND", atten_mask=mask, sparse_mode=2, actual_seq_qlen=[6], actual_seq_kvlen=[6]
    )[0]  # fmt: skip
    assert torch.equal(out[i], alone) and out.count_nonzero() == alone.count_nonzero()


def test_prefixes_of_ignored_ends():
    mask = torch.cat([torch.ones(2048, 2048).triu(1), torch.ones(1024, 2048)]).bool()
    mask[2048:, :1024] = False
    q = normal(5, 2, 8)

    def call(ends, prefix):
        return ops.npu_fusion_attention(
            q, q, q, 2, "TND", atten_mask=mask, sparse_mode=6, prefix=prefix, actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
        )[0]  # fmt: skip

    want = call([3, 5], [2, 0])
    assert torch.equal(call([3, 5, 0, 0], [2, 0]), want)
    assert torch.equal(call([3, 5, 0, 0], [2, 0, 0, 0]), want)
    for prefix in ([2], [2, 0, 0]):
        with pytest.raises(
            RuntimeError, match="npu_fusion_attention: sparse_mode 6 needs one prefix"
        ):
            call([3, 5, 0, 0], prefix)


@pytest.mark.parametrize("layout, mode", [("BSND", -1), ("BSND", 7), ("TND", 5), ("TND", 9)])
def test_a_mode_that_does_not_exist_is_refused_without_a_mask_too(layout, mode):
    q = torch.zeros(*([1] if layout == "BSND" else []), 3, 1, 4)
    ends = {"actual_seq_qlen": [3], "actual_seq_kvlen": [3]} if layout == "TND" else {}
    with pytest.raises(RuntimeError, match=f"^npu_fusion_attention: sparse_mode {mode} does not"):
        ops.npu_fusion_attention(q, q, q, 1, layout, sparse_mode=mode, **ends)


def test_lengths_are_cumulative():
    q = torch.zeros(5, 1, 4)
    for ends in ([2, 3], [3, 2], [2, 6]):
        with pytest.raises(RuntimeError, match="npu_fusion_attention: actual_seq_qlen"):
            ops.npu_fusion_attention(q, q, q, 1, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)


def test_without_a_mask_attention_is_full():
    q, v = torch.zeros(3, 1, 1), torch.tensor([0.0, 3.0, 6.0]).view(3, 1, 1)
    for mode in (0, 2, 3):
        out = ops.npu_fusion_attention(
            q,
            q,
            v,
            1,
            "TND",
            actual_seq_qlen=[3],
            actual_seq_kvlen=[3],
            sparse_mode=mode,
            next_tockens=0,
        )[0]
        assert out.flatten().tolist() == [3.0, 3.0, 3.0]
    out = ops.npu_fusion_attention(
        q,
        q,
        v,
        1,
        "TND",
        actual_seq_qlen=[3],
        actual_seq_kvlen=[3],
        sparse_mode=3,
        atten_mask=CAUSAL_MASK,
    )[0]
    assert out.flatten().tolist() == [0.0, 1.5, 3.0]


def test_the_scale_defaults_to_one():
    q, k = torch.ones(1, 1, 1, 4), torch.tensor([1.0, 0.0]).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    got = [
        ops.npu_fusion_attention(q, k, v, 1, "BNSD", **s)[0].item() for s in ({}, {"scale": 0.5})
    ]
    assert got == pytest.approx([1 / (1 + math.exp(-4)), 1 / (1 + math.exp(-2))], abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_hidden_keys_do_not_leak(bad):
    q, v = torch.zeros(1, 1, 1, 1), torch.tensor([0.0, 1, 2, float("nan"), 4]).view(1, 1, 5, 1)
    k = torch.zeros(1, 1, 5, 1)
    k[0, 0, 4] = bad
    mask = torch.tensor([[False, False, False, True, True]])
    assert ops.npu_fusion_attention(q, k, v, 1, "BNSD", atten_mask=mask)[0].item() == 1.0

    # In the middle of blocks, by mask and by position, forward and backward.
    for given in (
        {"mode": 1, "mask": torch.ones(140, 140, dtype=torch.bool).triu(1)},
        {"mode": 3, "mask": CAUSAL_MASK},
    ):
        case = Case(torch.float32, 1, 2, 1, 140, 140, 16, 16, "BNSD", scale=0.3, **given)
        clean = case.run()
        for at, raw in ((1, "k"), (2, "v")):
            poisoned = Case(torch.float32, 1, 2, 1, 140, 140, 16, 16, "BNSD", scale=0.3, **given)
            getattr(poisoned, raw)[:, :, 100:, at] = bad
            poisoned.dy[:, :, 100:] = 0
            before, after = case, poisoned
            before.dy[:, :, 100:] = 0
            clean = before.run()
            got = after.run()
            assert_ulp(
                got[0][0][:, :, :100], clean[0][0][:, :, :100].double(), 16, "out", floor=1e-6
            )
            assert_ulp(
                got[1]["dq"][:, :, :100], clean[1]["dq"][:, :, :100].double(), 64, "dq", floor=1e-5
            )


def test_left_padding_is_finite():
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).triu(1)
    mask[0, :, :, :2] = True
    case = Case(torch.float32, 2, 2, 1, 5, 5, 8, 8, "BNSD", mode=1, mask=mask)
    (out, *_), gradients = case.run()
    assert torch.equal(out[0, :, :2], torch.zeros(2, 2, 8))
    assert all(g.isfinite().all() for g in gradients.values())
    assert not gradients["dq"][0, :, :2].any() and not gradients["dk"][0, :, :2].any()
    case.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_further_from_fp64_than_eager(dtype):
    q, k, v, dy = (normal(2, 4, 96, 64, dtype=dtype, seed=i) for i in range(4))

    def run(f, *tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = f(*leaves)
        return y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))

    def eager(a, b, c):
        return F.scaled_dot_product_attention(a, b, c, is_causal=True)

    def fused(a, b, c):
        return ops.npu_fusion_attention(
            a, b, c, 4, "BNSD", scale=0.125, sparse_mode=2, atten_mask=CAUSAL_MASK
        )[0]

    exact = run(eager, q.double(), k.double(), v.double())
    for e, o, t in zip(exact, run(fused, q, k, v), run(eager, q, k, v), strict=True):
        (ours, rms), (theirs, their_rms) = (
            ((x.double() - e).abs().max(), (x.double() - e).square().mean().sqrt()) for x in (o, t)
        )
        # One rounding of the largest result. In fp32 both are at the noise of their sums, whose mean square tells.
        if dtype == torch.float32:
            assert rms <= 1.15 * their_rms
        else:
            assert ours <= max(theirs, 2 * e.abs().max() * HALF_ULP[dtype])


def test_results_do_not_depend_on_threads():
    given = arguments("lower right", 2, 4, 200, 200)
    case = Case(
        torch.bfloat16, 2, 4, 2, 200, 200, 64, 64, "BSND", scale=0.125, keep_prob=0.8, **given
    )

    def results():
        (out, maximum, total, *_), gradients = case.run(seed=7)
        return out, maximum, total, *gradients.values()

    check_threads(results)


def test_strides():
    q, k, v = (normal(2, 3, 20, 16, dtype=torch.float32, seed=i) for i in range(3))
    plain = ops.npu_fusion_attention(q, k, v, 3, "BNSD", scale=0.3)
    for name in strided_views(q):
        views = [strided_views(x)[name].detach().requires_grad_() for x in (q, k, v)]
        out = ops.npu_fusion_attention(*views, 3, "BNSD", scale=0.3)[0]
        assert torch.equal(out, plain[0]), name
        # An expanded gradient.
        got = torch.autograd.grad(out.sum(), views)
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        again = ops.npu_fusion_attention(*leaves, 3, "BNSD", scale=0.3)[0]
        want = torch.autograd.grad(again, leaves, torch.ones_like(again))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name


_LONG = """
import torch
from jumar import ops
mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
def run(rows):
    q, k, v, dy = (torch.full((1, rows, n, 16), 0.5, dtype=torch.bfloat16) for n in (2, 1, 1, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = peak()
    out = ops.npu_fusion_attention(*leaves, 2, "BSND", scale=0.25, sparse_mode=3, atten_mask=mask)[0]
    torch.autograd.grad(out, leaves, dy)
    return peak() - before
run(64)
print(run(8192), run(32768))
"""


def test_memory_grows_with_the_length():
    """Forward and backward of 32768 rows; a matrix of bf16 scores would be 2 GiB a head."""
    short, long = peak_memory(_LONG)
    # Inputs' gradients, statistics [2, S, 8] twice, delta, packed keys and values, sums of dk and dv.
    assert long < 64 << 10, f"{long} KiB"
    assert long < 8 * short + (8 << 10), f"{short} and {long} KiB"
