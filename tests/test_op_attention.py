"""npu_fusion_attention through torch: oracle, layouts, masks, modes, gradients, statistics, dropout, errors."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.library import opcheck

import attention_ref as ref
import jumar
from attention_ref import CAUSAL_MASK, PREFIX_MASK, UNBOUNDED
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp, check_retain_graph, strided_views

LAYOUTS = ("BSH", "SBH", "BNSD", "BSND")
HALF_ULP = {
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float32: 2.0**-25,
    torch.float64: 2.0**-54,
}


def normal(*shape, dtype=torch.float64, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype)


def sum_unit(dtype, size):
    """Rounding of a sum of `size` terms in the type that sums are taken in."""
    return (size + 16) * (2.0**-53 if dtype == torch.float64 else 2.0**-24)


class Case:
    """Inputs of one call in a padded layout, its arguments, and the oracle's results with bounds of their errors."""

    def __init__(
        self, dtype, batch, heads, kv, rows, keys, size, value_size, layout, seed=0, **arguments
    ):
        self.dtype, self.heads, self.layout, self.arguments = dtype, heads, layout, arguments
        shapes = [
            (batch, heads, rows, size),
            (batch, kv, keys, size),
            (batch, kv, keys, value_size),
        ]
        self.raw = [normal(*s, dtype=dtype, seed=seed + i) for i, s in enumerate(shapes)]
        self.raw_dy = normal(batch, heads, rows, value_size, dtype=dtype, seed=seed + 3)
        self.q, self.k, self.v, self.dy = (
            ref.in_layout(x, layout).contiguous() for x in (*self.raw, self.raw_dy)
        )

    def run(self, **more):
        a = self.arguments
        leaves = [x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v)]
        extra = {
            n: a[n].detach().clone().requires_grad_()
            for n in ("pse", "sink")
            if a.get(n) is not None
        }
        results = ops.npu_fusion_attention(
            *leaves, self.heads, self.layout, atten_mask=a.get("mask"), scale=a.get("scale", 1.0),
            keep_prob=a.get("keep_prob", 1.0), pre_tockens=a.get("pre", UNBOUNDED),
            next_tockens=a.get("following", UNBOUNDED), prefix=a.get("prefix"), sparse_mode=a.get("mode", 0),
            **extra, **more,
        )  # fmt: skip
        gradients = torch.autograd.grad(results[0], [*leaves, *extra.values()], self.dy)
        return results, dict(
            zip(("dq", "dk", "dv", *(f"d{n}" for n in extra)), gradients, strict=True)
        )

    def exact(self, patterns=None):
        a = {
            n: x.double() if n in ("pse", "sink") and x is not None else x
            for n, x in self.arguments.items()
        }
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        extra = [a[n].requires_grad_() for n in ("pse", "sink") if a.get(n) is not None]
        results = ref.fusion_attention(*leaves, self.heads, self.layout, patterns=patterns, **a)
        return results, torch.autograd.grad(results.out, [*leaves, *extra], self.dy.double())

    def check(self, patterns=None, **more):
        (out, maximum, total, empty, *_), gradients = self.run(**more)
        exact, exact_gradients = self.exact(patterns)
        assert out.dtype == self.dtype and out.is_contiguous() and empty.shape == (0,)
        statistics = torch.float64 if self.dtype == torch.float64 else torch.float32
        batch, rows, keys = self.raw[0].shape[0], self.raw[0].shape[2], self.raw[1].shape[2]
        for name, got, want in (("max", maximum, exact.maximum), ("sum", total, exact.total)):
            assert got.dtype == statistics and got.shape == (batch, self.heads, rows, 8)
            assert torch.equal(got, got[..., :1].expand_as(got)), name
            want = want.clamp(min=ref.LOWEST)
            unit = self.score_error() * (1 if name == "max" else want) + want.abs() * sum_unit(
                self.dtype, keys
            )
            assert_ulp(got[..., 0], want, 1.0, name, floor=unit)
        self.compare(out, exact.out, gradients, exact_gradients)

    def score_error(self):
        """Bound of the error of a score, the same for all of them."""
        q, k, _ = (x.double().abs() for x in self.raw)
        size = q.shape[-1]
        scale = abs(self.arguments.get("scale", 1.0))
        pse = self.arguments.get("pse")
        largest = (
            (q.amax((0, 1, 2)) * k.amax((0, 1, 2))).sum()
            if k.numel() and q.numel()
            else torch.zeros(())
        )
        largest = largest + (0 if pse is None else pse.double().abs().max())
        return scale * largest.item() * sum_unit(self.dtype, size)

    def compare(self, out, exact, gradients, exact_gradients):
        # The results of absolute values bound every term; each is off by the errors of its score and of its sum, and
        # gradients through delta by the rounding of the output.
        keys, rows = self.raw[1].shape[2], self.raw[0].shape[2]
        group = self.raw[0].shape[1] // self.raw[1].shape[1]
        unit = 4 * self.score_error() + sum_unit(self.dtype, max(keys, rows * group))
        keep = 1 / self.arguments.get("keep_prob", 1.0)
        q, k, v = (x.double().abs() for x in self.raw)
        dy = self.raw_dy.double().abs()
        assert_ulp(out, exact, 0.51, "out", floor=keep * unit * v.max() if v.numel() else 0.0)
        scale = abs(self.arguments.get("scale", 1.0))
        row = keep * dy.sum(-1).max() * (v.max() if v.numel() else 0.0)  # a row of |dp|, |delta|
        ds = row * (4 * unit + 2 * HALF_ULP[self.dtype])
        floors = {
            "dq": scale * ds * k.max() if k.numel() else 0.0,
            "dk": scale * ds * q.max() * rows * group if q.numel() else 0.0,
            "dv": 2 * keep * unit * dy.max() * rows * group if q.numel() else 0.0,
            "dpse": scale * ds * rows * self.raw[0].shape[0],
            "dsink": ds * rows * self.raw[0].shape[0],
        }
        for (name, got), want in zip(gradients.items(), exact_gradients, strict=True):
            assert got.shape == want.shape, name
            assert_ulp(got, want, 0.51 if name != "dsink" else 1.0, name, floor=floors[name])


MODES = {
    "none": {},
    "no mask, no mode": {"mode": 3, "pre": 1, "following": 0},
    "mask": {"mode": 1, "mask": "random"},
    "mask and band": {"mode": 0, "mask": "random", "pre": 12, "following": 3},
    "band": {"mode": 4, "mask": CAUSAL_MASK, "pre": 12, "following": 3},
    "band aside": {"mode": 4, "mask": CAUSAL_MASK, "pre": 20, "following": -3},
    "upper left": {"mode": 2, "mask": CAUSAL_MASK},
    "lower right": {"mode": 3, "mask": CAUSAL_MASK},
    "prefix mask": {"mode": 5, "mask": "random", "prefix": (0, 9)},
    "prefix": {"mode": 6, "mask": PREFIX_MASK, "prefix": (0, 9)},
}


def arguments(mode, batch, heads, rows, keys, shape=0):
    given = dict(MODES[mode])
    if isinstance(given.get("mask"), str):
        shapes = [
            (batch, heads, rows, keys),
            (batch, 1, rows, keys),
            (1, 1, rows, keys),
            (rows, keys),
        ]
        mask = torch.rand(shapes[shape], generator=torch.Generator().manual_seed(5)) < 0.4
        mask[..., rows // 2, :] = True  # a row that sees nothing
        given["mask"] = mask
    if "prefix" in given:
        given["prefix"] = [min(p, keys) for p in given["prefix"]]
    return given


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
    threads = torch.get_num_threads()
    runs = []
    try:
        for n in (1, 2, 3, 8):
            torch.set_num_threads(n)
            (out, maximum, total, *_), gradients = case.run(seed=7)
            runs.append([out, maximum, total, *gradients.values()])
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


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


def pattern_of(batch, heads, rows, keys, keep_prob, **seed):
    """1 where dropout keeps, read off with values that are rows of the identity."""
    zero = torch.zeros(batch, heads, rows, 1, dtype=torch.float64)
    identity = torch.eye(keys, dtype=torch.float64).expand(batch, heads, keys, keys)
    keyless = torch.zeros(batch, heads, keys, 1, dtype=torch.float64)
    out = ops.npu_fusion_attention(
        zero, keyless, identity, heads, "BNSD", keep_prob=keep_prob, **seed
    )[0]
    return (out > 0).double()


def test_dropout():
    case = Case(torch.float32, 2, 4, 2, 40, 150, 16, 16, "BNSD", scale=0.3, keep_prob=0.75)
    pattern = pattern_of(2, 4, 40, 150, 0.75, seed=11, offset=3)
    assert abs(pattern.mean().item() - 0.75) < 0.01
    case.check(patterns=list(pattern), seed=11, offset=3)
    for other in (
        {"seed": 12, "offset": 3},
        {"seed": 11, "offset": 4},
        {"seed": 11 + (1 << 40), "offset": 3},
    ):
        assert (pattern_of(2, 4, 40, 150, 0.75, **other) != pattern).double().mean() > 0.3
    # Drawn from torch's generator, returned, and good for the same pattern again.
    torch.manual_seed(0)
    first = ops.npu_fusion_attention(case.q, case.k, case.v, 4, "BNSD", keep_prob=0.75)
    second = ops.npu_fusion_attention(case.q, case.k, case.v, 4, "BNSD", keep_prob=0.75)
    torch.manual_seed(0)
    third = ops.npu_fusion_attention(case.q, case.k, case.v, 4, "BNSD", keep_prob=0.75)
    assert torch.equal(first[0], third[0]) and not torch.equal(first[0], second[0])
    again = ops.npu_fusion_attention(
        case.q, case.k, case.v, 4, "BNSD", keep_prob=0.75, seed=first[4], offset=first[5]
    )
    assert torch.equal(first[0], again[0])
    assert first[6] == 2 * 4 * 40 * 150


def test_dropout_mask():
    case = Case(torch.float64, 2, 4, 2, 10, 13, 8, 8, "BNSD", scale=0.3, keep_prob=0.5)
    bits = torch.randint(
        0, 256, (2 * 4 * 10 * 13 // 8,), generator=torch.Generator().manual_seed(0)
    )
    pattern = (bits[:, None] >> torch.arange(8) & 1).flatten().view(2, 4, 10, 13)
    case.check(patterns=list(pattern.double()), dropout_mask=bits.to(torch.uint8))


def test_gradcheck():
    def leaf(*shape, seed=0):
        return normal(*shape, seed=seed).requires_grad_()

    q, k, v = leaf(1, 5, 4, 3), leaf(1, 7, 2, 3, seed=1), leaf(1, 7, 2, 2, seed=2)
    sink, pse = leaf(4, seed=3), leaf(1, 4, 5, 7, seed=4)
    for mode, prefix in ((2, None), (3, None), (6, [4])):
        mask = PREFIX_MASK if mode == 6 else CAUSAL_MASK

        def call(a, b, c, d=None, e=None, mode=mode, mask=mask, prefix=prefix):
            return ops.npu_fusion_attention(
                a, b, c, 4, "BSND", pse=d, atten_mask=mask, scale=0.7, sparse_mode=mode, prefix=prefix, sink=e,
                keep_prob=0.8, seed=5,
            )[0]  # fmt: skip

        assert gradcheck(call, (q, k, v))
        assert gradcheck(call, (q, k, v, pse, sink))
    # One input alone.
    assert gradcheck(
        lambda x: ops.npu_fusion_attention(q.detach(), x, v.detach(), 4, "BSND")[0], (k,)
    )


def test_opcheck():
    q, k, v = (
        normal(2, n, 9, 8, dtype=torch.float32, seed=i).requires_grad_()
        for i, n in enumerate((4, 2, 2))
    )
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for ns in jumar._load.NAMESPACES:
        op, grad = (
            getattr(torch.ops, ns).npu_fusion_attention,
            getattr(torch.ops, ns).npu_fusion_attention_grad,
        )
        opcheck(op.default, (q, k, v, 4, "BNSD"))
        opcheck(op.default, (q, k, v, 4, "BNSD", None, None, mask, 0.3))
        opcheck(op.default, (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), 9, "TND"),
                {"actual_seq_qlen": [3, 8], "actual_seq_kvlen": [1, 4]}, raise_exception=True)  # fmt: skip
        with torch.no_grad():
            out, maximum, total, *_ = op(q, k, v, 4, "BNSD")
            opcheck(
                grad.default,
                (q.detach(), k.detach(), v.detach(), out, 4, "BNSD"),
                {"softmax_max": maximum, "softmax_sum": total, "attention_in": out},
            )


def test_double_backward_raises():
    q = normal(1, 2, 3, 4).requires_grad_()
    out = ops.npu_fusion_attention(q, q, q, 2, "BNSD")[0]
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="fusion_attention"):
        grad.sum().backward()


def test_statistics_take_no_gradient():
    q = normal(1, 2, 3, 4).requires_grad_()
    assert not any(x.requires_grad for x in ops.npu_fusion_attention(q, q, q, 2, "BNSD")[1:4])


def test_retain_graph():
    q, k, v = (normal(1, 2, 9, 8, dtype=torch.float32, seed=i) for i in range(3))
    check_retain_graph(lambda a, b, c: ops.npu_fusion_attention(a, b, c, 2, "BNSD")[0], q, k, v)


def test_compiles():
    def f(q, k, v):
        return ops.npu_fusion_attention(
            q, k, v, 2, "BSND", scale=0.3, sparse_mode=3, atten_mask=CAUSAL_MASK
        )[0].sin()

    q, k, v = (normal(1, 9, 2, 8, dtype=torch.float32, seed=i).requires_grad_() for i in range(3))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    want, got = f(q, k, v), compiled(q, k, v)
    assert torch.equal(want, got)
    for a, b in zip(
        torch.autograd.grad(want.sum(), (q, k, v)),
        torch.autograd.grad(got.sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_autocast():
    q, k, v = (normal(1, 2, 9, 8, dtype=torch.float32, seed=i) for i in range(3))
    sink = torch.zeros(2)
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.npu_fusion_attention(q, k, v, 2, "BNSD", sink=sink)[0]
    assert out.dtype == torch.bfloat16
    half = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, ops.npu_fusion_attention(*half, 2, "BNSD", sink=sink)[0])


def test_gradients_of_parts_add_up():
    """Backward of a part of the keys, with the statistics and the output of all of them."""
    case = Case(torch.float64, 1, 4, 2, 20, 30, 8, 8, "BNSD", scale=0.3)
    (out, maximum, total, *_), whole = case.run()
    parts = []
    for keys in (slice(0, 12), slice(12, 30)):
        parts.append(
            ops.npu_fusion_attention_grad(
                case.q,
                case.k[:, :, keys],
                case.v[:, :, keys],
                case.dy,
                4,
                "BNSD",
                softmax_max=maximum,
                softmax_sum=total,
                attention_in=out,
                scale_value=0.3,
            )  # fmt: skip
        )
    assert torch.allclose(parts[0][0] + parts[1][0], whole["dq"], atol=1e-13)
    assert torch.allclose(torch.cat([parts[0][1], parts[1][1]], 2), whole["dk"], atol=1e-13)


ERRORS = {
    "input_layout must be": {"input_layout": "BDSN"},
    "head_num must be positive": {"head_num": 0},
    "query has 2 heads, expected 3": {"head_num": 3},
    "padding_mask is not supported": {"padding_mask": torch.zeros(1)},
    "keep_prob must be in": {"keep_prob": 0.0},
    "softmax_layout must be": {"softmax_layout": "TND"},
    "actual_seq_qlen and actual_seq_kvlen go with": {
        "actual_seq_qlen": [3],
        "actual_seq_kvlen": [3],
    },
    "atten_mask must be bool or uint8": {"atten_mask": torch.zeros(3, 3)},
    "atten_mask must have 2 or 4": {"atten_mask": torch.zeros(1, 3, 3, dtype=torch.bool)},
    "atten_mask has shape": {"atten_mask": torch.zeros(3, 4, dtype=torch.bool)},
    "takes a compressed atten_mask": {
        "atten_mask": torch.zeros(3, 3, dtype=torch.bool),
        "sparse_mode": 2,
    },
    "does not hold ones above the diagonal": {"atten_mask": ~CAUSAL_MASK, "sparse_mode": 3},
    "needs one prefix per sequence": {"atten_mask": PREFIX_MASK, "sparse_mode": 6},
    "sparse_mode 7 does not exist": {"atten_mask": CAUSAL_MASK, "sparse_mode": 7},
    "leave an empty band": {
        "atten_mask": CAUSAL_MASK,
        "sparse_mode": 4,
        "pre_tockens": -2,
        "next_tockens": 1,
    },
    "pse has shape": {"pse": torch.zeros(1, 2, 4, 3)},
    "pse must have query's dtype": {"pse": torch.zeros(1, 2, 3, 3, dtype=torch.float64)},
    "sink has shape": {"sink": torch.zeros(3)},
    "dropout_mask has": {"dropout_mask": torch.zeros(1, dtype=torch.uint8), "keep_prob": 0.5},
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text):
    given = {"head_num": 2, "input_layout": "BNSD", **ERRORS[text]}
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(
        RuntimeError, match=f"npu_fusion_attention: .*{text}|npu_fusion_attention: {text}"
    ):
        torch.ops.jumar.npu_fusion_attention(q, q, q, **given)


def test_errors_of_tensors():
    q = torch.zeros(1, 2, 3, 4)
    for bad in (
        (q, q[:, :, :, :3], q),
        (q, q, q[:, :1]),
        (q, q.double(), q),
        (q[0], q, q),
        (q.long(), q, q),
    ):
        with pytest.raises(RuntimeError, match="npu_fusion_attention: "):
            torch.ops.jumar.npu_fusion_attention(*bad, 2, "BNSD")
    three = torch.zeros(1, 3, 3, 4)
    with pytest.raises(RuntimeError, match="must be a multiple"):
        torch.ops.jumar.npu_fusion_attention(three, q, q, 3, "BNSD")


def test_empty_tensors():
    for batch, rows, keys in ((0, 3, 3), (1, 0, 3), (1, 3, 0)):
        q = torch.zeros(batch, 2, rows, 4, requires_grad=True)
        k = torch.zeros(batch, 2, keys, 4, requires_grad=True)
        out, maximum, total, *_ = ops.npu_fusion_attention(q, k, k, 2, "BNSD")
        assert out.shape == q.shape and not out.any() and not total.any()
        grads = torch.autograd.grad(out.sum(), (q, k))
        assert not any(g.any() for g in grads)


def test_schemas_are_the_vendors():
    assert (
        "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
        in str(torch.ops.jumar.npu_fusion_attention.default._schema)
    )
    for ns in jumar._load.NAMESPACES:
        schema = getattr(torch.ops, ns).npu_fusion_attention.default._schema
        names = [a.name for a in schema.arguments]
        assert names[5:8] == ["pse", "padding_mask", "atten_mask"] and names[-3:] == [
            "dropout_mask",
            "seed",
            "offset",
        ]
        assert len(schema.returns) == 7
        grad = getattr(torch.ops, ns).npu_fusion_attention_grad.default._schema
        assert len(grad.returns) == 5 and grad.arguments[6].kwarg_only
