"""npu_cross_entropy_loss through torch: the vendor's rule, oracle, gradients, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp, signed, strided_views

REDUCTIONS = ["none", "mean", "sum"]
LABELS = torch.tensor([3, 0, 6, 3, 1])


def logits(dtype=torch.float64, classes=7):
    return signed(5, classes, dtype=dtype, scale=2.0).requires_grad_()


def weights(classes=7):
    return torch.linspace(0.25, 2.0, classes)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignore", [-100, 3])
def test_is_torchs_where_ignore_index_is_a_class(reduction, weighted, smoothing, ignore):
    x, w = logits(), weights().double() if weighted else None
    loss, log_prob, zloss, lse = ops.npu_cross_entropy_loss(
        x, LABELS, w, reduction, ignore, smoothing
    )
    right = F.cross_entropy(
        x, LABELS, w, reduction=reduction, ignore_index=ignore, label_smoothing=smoothing
    )
    assert loss.shape == ((5,) if reduction == "none" else (1,))
    torch.testing.assert_close(loss, right.reshape(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_prob, F.log_softmax(x, -1), rtol=1e-12, atol=1e-12)
    assert zloss.shape == lse.shape == (0,) and zloss.dtype == lse.dtype == x.dtype
    g = torch.randn_like(loss)
    (dx,) = torch.autograd.grad(loss, x, g)
    (want,) = torch.autograd.grad(right, x, g.reshape(right.shape))
    torch.testing.assert_close(dx, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("classes", [7, 333])
def test_against_fp64(dtype, classes):
    x = logits(dtype, classes)
    loss, log_prob, _, _ = ops.npu_cross_entropy_loss(x, LABELS, weights(classes), "none", 3, 0.1)
    assert loss.dtype == log_prob.dtype == dtype
    wide = x.detach().double()
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    right = F.cross_entropy(
        wide,
        LABELS,
        weights(classes).double(),
        reduction="none",
        ignore_index=3,
        label_smoothing=0.1,
    )
    assert_ulp(loss.detach(), right, 0.51, "loss", floor=100 * unit)
    assert_ulp(log_prob.detach(), F.log_softmax(wide, -1), 0.51, "log_prob", floor=20 * unit)


def test_a_negative_ignore_index_ignores_nothing():
    x, labels = logits(torch.float32), LABELS.clone()
    labels[2] = -100
    with pytest.raises(
        RuntimeError,
        match=r"npu_cross_entropy_loss: target -100 at position \[2\] is not in \[0, 7\)",
    ):
        ops.npu_cross_entropy_loss(x, labels)
    labels[2] = 7
    with pytest.raises(RuntimeError, match=r"target 7 at position \[2\] .* ignore_index, 3"):
        ops.npu_cross_entropy_loss(x, labels, ignore_index=3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck_and_opcheck(reduction):
    x, w = logits(), weights().double()
    assert gradcheck(
        lambda x: ops.npu_cross_entropy_loss(x, LABELS, w, reduction, 3, 0.2)[:2], (x,)
    )
    x = logits(torch.float32)
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns).npu_cross_entropy_loss.default
        opcheck(op, (x, LABELS, weights()), {"reduction": reduction})
        opcheck(op, (x, LABELS))
    loss, log_prob = ops.npu_cross_entropy_loss(x, LABELS, None, reduction)[:2]
    backward = torch.ops.jumar.npu_cross_entropy_loss_backward.default
    opcheck(
        backward,
        (torch.ones_like(loss).detach(), log_prob.detach(), LABELS),
        {"reduction": reduction},
    )


def test_the_gradient_through_log_prob_is_not_dropped():
    x = logits()
    loss, log_prob, _, _ = ops.npu_cross_entropy_loss(x, LABELS, reduction="sum")
    (dx,) = torch.autograd.grad(loss.sum() + log_prob.square().sum(), x)
    right = F.cross_entropy(x, LABELS, reduction="sum") + F.log_softmax(x, -1).square().sum()
    torch.testing.assert_close(dx, torch.autograd.grad(right, x)[0])


def test_backward_has_the_dtype_of_the_gradient():
    x = logits(torch.bfloat16)
    log_prob = ops.npu_cross_entropy_loss(x, LABELS)[1].detach()
    for dtype in (torch.float32, torch.bfloat16):
        dx = ops.npu_cross_entropy_loss_backward(torch.ones(1, dtype=dtype), log_prob, LABELS)
        assert dx.dtype == dtype and dx.shape == x.shape
        right = (log_prob.double().exp() - F.one_hot(LABELS, 7)) / 5
        assert_ulp(dx, right, 0.51, str(dtype), floor=1e-6)


def test_all_labels_ignored():
    x, labels = logits(torch.float32), torch.full((5,), 2)
    for reduction in REDUCTIONS:
        loss = ops.npu_cross_entropy_loss(x, labels, None, reduction, 2, 0.1)[0]
        assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
        assert (torch.autograd.grad(loss.sum(), x)[0] == 0).all()


def test_layouts():
    x = logits(torch.float32).detach()

    def run(x, g=None):
        x = x.detach().requires_grad_()
        loss, log_prob, _, _ = ops.npu_cross_entropy_loss(x, LABELS, weights(), "none")
        return (
            loss.detach(),
            log_prob.detach(),
            torch.autograd.grad(loss, x, torch.ones(5) if g is None else g)[0],
        )

    want = run(x)
    for view in strided_views(x).values():
        assert all(torch.equal(a, b) for a, b in zip(run(view), want, strict=True))
    assert torch.equal(run(x, torch.tensor(1.0).expand(5))[2], want[2])


def test_errors():
    x = logits(torch.float32)
    for arguments, text in (
        ((x[0], LABELS), r"\[rows, classes\], got \[7\]"),
        ((x, LABELS[:2]), r"target \[2\] does not match input \[5, 7\]"),
        ((x, LABELS, torch.ones(3)), r"weight float32\[3\]"),
        ((x, LABELS.float()), "int64 or int32, got float32"),
        ((x, LABELS, None, "avg"), "'avg'"),
        ((x, LABELS, None, "mean", -100, 2.0), "got 2"),
        ((x, LABELS, None, "mean", -100, 0.0, 0.1), "z-loss is not supported"),
        ((x, LABELS, None, "mean", -100, 0.0, 0.0, True), "z-loss is not supported"),
    ):
        with pytest.raises(RuntimeError, match=f"npu_cross_entropy_loss: .*{text}"):
            ops.npu_cross_entropy_loss(*arguments)
