"""What the attention tests share: inputs of one call with the oracle's results and bounds of their errors."""

from __future__ import annotations

import torch

import attention_ref as ref
from attention_ref import CAUSAL_MASK, PREFIX_MASK, UNBOUNDED
from jumar import ops
from op_util import assert_ulp

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
