"""linear_cross_entropy through torch: oracle, PyTorch's rules, gradients, memory, errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from jumar.ops import loss as loss_module
from op_util import (
    FLOAT_DTYPES,
    assert_ulp,
    check_threads,
    peak_memory,
    signed,
    strided_views,
)

REDUCTIONS = ["none", "mean", "sum"]


def problem(lead, width, classes, dtype=torch.float32, bias=True, ignored=()):
    x = signed(*lead, width, dtype=dtype).requires_grad_()
    w = signed(classes, width, dtype=dtype, seed=1, scale=0.5).requires_grad_()
    b = signed(classes, dtype=dtype, seed=2).requires_grad_() if bias else None
    t = torch.randint(0, classes, lead, generator=torch.Generator().manual_seed(3))
    for i in ignored:
        t.view(-1)[i] = -100
    return x, w, t, b


def eager(x, w, t, b=None, z_loss=0.0, **options):
    """The same in fp64, from torch's own operations."""
    logits = F.linear(x, w, b).flatten(0, -2) if x.dim() > 1 else F.linear(x, w, b)
    if logits.dim() == 1:
        logits = logits.unsqueeze(0)
    loss = F.cross_entropy(logits, t.reshape(-1), **options)
    counted = t.reshape(-1) != options.get("ignore_index", -100)
    squares = torch.where(counted, logits.logsumexp(-1).square(), 0.0)
    reduction = options.get("reduction", "mean")
    total = squares if reduction == "none" else squares.sum()
    if reduction == "mean":
        total = total / counted.sum()
    loss = loss + z_loss * total
    return loss.reshape(t.shape) if reduction == "none" else loss


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}], ids=["plain", "terms"]
)
@pytest.mark.parametrize("lead,width,classes", [((3, 5), 8, 7), ((21,), 33, 301), ((1,), 1, 1)])
def test_against_fp64(lead, width, classes, dtype, reduction, options):
    x, w, t, b = problem(lead, width, classes, dtype, ignored=(1,) if math.prod(lead) > 1 else ())
    loss = ops.linear_cross_entropy(x, w, t, b, reduction=reduction, **options)
    wide = [v.detach().double().requires_grad_() for v in (x, w, b)]
    expected = eager(wide[0], wide[1], t, wide[2], reduction=reduction, **options)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    assert loss.dtype == compute and loss.shape == expected.shape
    unit = torch.finfo(compute).eps
    assert_ulp(
        loss.detach(),
        expected.detach(),
        1,
        "loss",
        floor=unit * width * 4 * max(1, loss.numel() and 16),
    )
    g = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    ).to(compute)
    grads = torch.autograd.grad(loss, (x, w, b), g)
    rights = torch.autograd.grad(expected, wide, g.double())
    # bf16 instructions take gradients of logits in bf16.
    floor = {torch.bfloat16: 2.0**-7}.get(dtype, 64 * width * unit)
    for name, got, right in zip(("input", "weight", "bias"), grads, rights, strict=True):
        assert got.dtype == dtype
        scale = right.abs().max().clamp(min=g.abs().max() / 4)
        assert_ulp(got, right, 0.51, f"d {name}", floor=floor * float(scale))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_pytorchs_rules(reduction):
    """ignore_index may be a class; smoothing counts the classes; ignored tokens have neither loss nor gradient."""
    x, w, t, _ = problem((6,), 4, 5, torch.float64, bias=False)
    t[:3] = torch.tensor([2, 0, 2])
    for ignore in (2, -100, -1):
        labels = t.clone()
        if ignore < 0:
            labels[1] = ignore
        got = ops.linear_cross_entropy(
            x, w, labels, ignore_index=ignore, reduction=reduction, label_smoothing=0.3
        )
        right = F.cross_entropy(
            x @ w.T, labels, ignore_index=ignore, reduction=reduction, label_smoothing=0.3
        )
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(4,), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_labels_ignored(shape, reduction):
    x = torch.randn(*shape, 3, requires_grad=True)
    w, b = torch.randn(5, 3, requires_grad=True), torch.randn(5, requires_grad=True)
    t = torch.full(shape, -100)
    loss = ops.linear_cross_entropy(
        x, w, t, b, reduction=reduction, label_smoothing=0.1, z_loss=0.1
    )
    right = F.cross_entropy(torch.randn(t.numel(), 5), t.flatten(), reduction=reduction)
    torch.testing.assert_close(loss, right.reshape(loss.shape), equal_nan=True)
    if reduction == "sum":
        assert loss == 0
    loss.sum().backward()
    assert all(torch.equal(v.grad, torch.zeros_like(v)) for v in (x, w, b))


@pytest.mark.parametrize("labels", [[1, 5, 0], [1, -7, 0], [-100, 0, 99999999999]])
def test_label_out_of_range(labels):
    x, w = torch.randn(1, 3, 2), torch.randn(5, 2)
    bad = next(i for i, v in enumerate(labels) if v != -100 and not 0 <= v < 5)
    with pytest.raises(
        RuntimeError, match=rf"linear_cross_entropy: target {labels[bad]} at position \[0, {bad}\]"
    ):
        ops.linear_cross_entropy(x, w, torch.tensor([labels]))


def test_divisor():
    x, w, t, _ = problem((6,), 4, 5, bias=False, ignored=(2,))
    total = ops.linear_cross_entropy(x, w, t, reduction="sum")
    for divisor in (7, 7.0, torch.tensor(7)):
        assert torch.equal(
            ops.linear_cross_entropy(x, w, t, reduction="sum", divisor=divisor), total / 7
        )
    with pytest.raises(ValueError, match="divisor goes with reduction 'sum', not 'mean'"):
        ops.linear_cross_entropy(x, w, t, divisor=7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck_and_opcheck(reduction):
    x, w, t, b = problem((2, 3), 4, 5, torch.float64, ignored=(1,))

    def f(x, w, b):
        return ops.linear_cross_entropy(
            x, w, t, b, reduction=reduction, label_smoothing=0.2, z_loss=0.1
        )

    assert gradcheck(f, (x, w, b))
    op = torch.ops.jumar.linear_cross_entropy.default
    x, w, b = (v.detach().float().requires_grad_() for v in (x, w, b))
    opcheck(op, (x, w, t, b), {"reduction": reduction})
    opcheck(op, (x, w, t))
    loss, lse, logits = op(x, w, t, b, -100, reduction)
    backward = torch.ops.jumar.linear_cross_entropy_backward.default
    for mask in ((True, True, True), (True, False, False), (False, True, False)):
        arguments = (
            torch.ones_like(loss),
            x,
            w,
            t,
            b,
            lse,
            logits,
            -100,
            reduction,
            0.0,
            0.0,
            *mask,
        )
        opcheck(backward, [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments])


@pytest.mark.parametrize("classes", [999, 1000, 4160])
def test_vocabulary_is_no_multiple_of_a_block(classes, monkeypatch):
    """Kept logits and logits that are computed again give the same gradients, up to the order of sums."""
    x, w, t, b = problem((2100,), 3, classes, ignored=(5,))
    right = [v.detach().double().requires_grad_() for v in (x, w, b)]
    loss, reference = ops.linear_cross_entropy(x, w, t, b), eager(right[0], right[1], t, right[2])
    assert (classes * 2100 > loss_module.KEPT_LOGITS) == (classes == 4160)
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=0)
    for got, want in zip(
        torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(reference, right), strict=True
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-7)


def test_tied_embeddings_get_both_gradients():
    table = torch.randn(11, 4, requires_grad=True)
    tokens, labels = torch.tensor([1, 4, 4]), torch.tensor([4, 2, 10])

    def run(head):
        return torch.autograd.grad(head(F.embedding(tokens, table).tanh()), table)[0]

    fused = run(lambda x: ops.linear_cross_entropy(x, table, labels))
    torch.testing.assert_close(
        fused, run(lambda x: F.cross_entropy(x @ table.T, labels)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_frozen_arguments(frozen):
    x, w, t, b = problem((5,), 4, 6)
    want = torch.autograd.grad(ops.linear_cross_entropy(x, w, t, b), (x, w, b))
    leaves = [v.detach().requires_grad_(i not in frozen) for i, v in enumerate((x, w, b))]
    ops.linear_cross_entropy(leaves[0], leaves[1], t, leaves[2]).backward()
    for i, (leaf, grad) in enumerate(zip(leaves, want, strict=True)):
        assert leaf.grad is None if i in frozen else torch.equal(leaf.grad, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(dtype):
    x, w, t, b = (v.detach() for v in problem((3, 4), 6, 9, dtype, ignored=(2,)))
    g = torch.randn(3, 4)

    def run(x, w, t, b, g):
        x, w, b = (v.detach().requires_grad_() for v in (x, w, b))
        loss = ops.linear_cross_entropy(x, w, t, b, reduction="none")
        return (loss.detach(), *torch.autograd.grad(loss, (x, w, b), g))

    want = run(x, w, t, b, g)
    labels = {"contiguous": t, "transposed": t.T.contiguous().T, "int32": t.int()}
    labels["stepped"] = t.repeat_interleave(2, -1)[:, ::2]
    for xs in strided_views(x).values():
        for ws in strided_views(w).values():
            for ts in labels.values():
                for gs in strided_views(g).values():
                    assert all(
                        torch.equal(a, c) for a, c in zip(run(xs, ws, ts, b, gs), want, strict=True)
                    )
    one = torch.tensor(0.5)
    same = (run(x, w, t, b, g) for g in (one.expand(3, 4), one.expand(3, 4).contiguous()))
    assert all(torch.equal(a, c) for a, c in zip(*same, strict=True))


def test_same_bits_for_every_thread_count():
    x, w, t, b = problem((130,), 70, 1500, torch.bfloat16, ignored=(7,))

    def results():
        loss = ops.linear_cross_entropy(x, w, t, b, z_loss=0.01)
        return loss, *torch.autograd.grad(loss, (x, w, b))

    check_threads(results)


def test_autocast_casts_like_linear():
    x, w, t, b = problem((4,), 6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = ops.linear_cross_entropy(x, w, t, b)
        cast = [v.detach().bfloat16() for v in (x, w, b)]
    assert loss.dtype == torch.float32
    assert torch.equal(loss, ops.linear_cross_entropy(cast[0], cast[1], t, cast[2]))
    loss.backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32


def test_compile_runs_the_operator():
    x, w, t, _ = problem((6,), 4, 9, bias=False)
    compiled = torch.compile(
        lambda x, w: ops.linear_cross_entropy(x * 2, w, t) * 3, fullgraph=True, backend="aot_eager"
    )
    jumar.reset_call_counts()
    grads = torch.autograd.grad(compiled(x, w), (x, w))
    assert jumar.call_counts() == {"linear_cross_entropy": 1, "linear_cross_entropy_backward": 1}
    for got, want in zip(
        grads, torch.autograd.grad(ops.linear_cross_entropy(x * 2, w, t) * 3, (x, w)), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_infinite_gradient_of_an_ignored_token():
    x, w, t, _ = problem((3,), 4, 5, bias=False, ignored=(1,))
    loss = ops.linear_cross_entropy(x, w, t, reduction="none")
    dx, dw = torch.autograd.grad(loss, (x, w), torch.tensor([1.0, float("inf"), 1.0]))
    assert dx.isfinite().all() and (dx[1] == 0).all() and dw.isfinite().all()


def test_large_logits():
    x = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    w = torch.tensor([[1.0], [0.5], [-1.0]])
    loss = ops.linear_cross_entropy(x, w, torch.tensor([0, 0]), reduction="none")
    assert loss.tolist() == [0.0, 2e4]
    assert torch.autograd.grad(loss.sum(), x)[0].tolist() == [[0.0], [-2.0]]


_PEAK = """
import torch, torch.nn.functional as F
from jumar import ops
torch.set_num_threads(2)
torch.manual_seed(0)
classes, tokens, width = 151936, 512, 16
x = torch.randn(tokens, width).bfloat16().requires_grad_()
w = torch.randn(classes, width).bfloat16().requires_grad_()
t = torch.randint(0, classes, (tokens,))
w.grad, x.grad = torch.zeros_like(w), torch.zeros_like(x)
for m in (64, 2):  # what libraries set up once
    ops.linear_cross_entropy(x[:m], w[:999], t[:m] % 999).backward()
    F.cross_entropy((x[:m].float() @ w[:999].float().T), t[:m] % 999).backward()
before = peak()
ops.linear_cross_entropy(x, w, t).backward()
fused = peak()
F.cross_entropy(F.linear(x, w).float(), t).backward()
print(fused - before, peak() - before)
"""


def test_peak_memory_is_a_quarter_of_eagers():
    """Above parameters and gradients, at Qwen's vocabulary and 512 tokens."""
    fused, eager = peak_memory(_PEAK)
    assert fused * 4 <= eager, (fused, eager)


def test_errors_name_the_operator_and_the_value():
    x, w, t = torch.randn(2, 3, 4), torch.randn(5, 4), torch.zeros(2, 3, dtype=torch.long)
    for arguments, text in (
        ((x, torch.randn(5, 6), t), r"input \[2, 3, 4\] does not match weight \[5, 6\]"),
        ((x, w, t[:1]), r"target \[1, 3\] does not match input \[2, 3, 4\]"),
        ((x, w, t.float()), "int64 or int32, got float32"),
        ((x, w.bfloat16(), t), r"one dtype, got float32\[2, 3, 4\] and bfloat16\[5, 4\]"),
        ((x, w, t, torch.randn(4)), r"bias \[4\] does not match weight \[5, 4\]"),
        ((x, torch.randn(0, 4), t), "no classes"),
    ):
        with pytest.raises(RuntimeError, match=f"linear_cross_entropy: .*{text}"):
            ops.linear_cross_entropy(*arguments)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: reduction must be .* got 'avg'"):
        ops.linear_cross_entropy(x, w, t, reduction="avg")
    with pytest.raises(
        RuntimeError, match=r"linear_cross_entropy: label_smoothing must be in \[0, 1\], got 1.5"
    ):
        ops.linear_cross_entropy(x, w, t, label_smoothing=1.5)
