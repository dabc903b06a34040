"""npu_scaled_masked_softmax: oracle, masks that broadcast, hidden rows, autograd, errors."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

from jumar import ops
from op_util import (
    FLOAT_DTYPES,
    assert_schemas,
    assert_ulp,
    check_layouts_and_double_backward,
    check_threads,
    signed,
)


def exact(x, mask, scale):
    return (x.double() * scale).masked_fill(mask, -10000.0).softmax(-1)


def masks(shape):
    generator = torch.Generator().manual_seed(1)
    for size in (
        shape,
        (shape[0], 1, *shape[2:]),
        shape[2:],
        (1, 1, 1, shape[3]),
        (shape[1], 1, 1),
    ):
        mask = torch.rand(size, generator=generator) < 0.4
        if len(size) == 4 and size[2] > 1:
            mask[..., 1, :] = True  # a row that is hidden whole
        yield mask


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_values_and_gradients(dtype):
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for shape in ((2, 3, 5, 7), (1, 2, 4, 65), (2, 1, 3, 1030)):
        for mask, scale in zip(masks(shape), (0.7, -0.4, 1, 2, 0.1), strict=True):
            x = signed(*shape, dtype=dtype, scale=3).requires_grad_()
            dy = signed(*shape, dtype=dtype, seed=2)
            y = ops.npu_scaled_masked_softmax(x, mask, scale)
            want = exact(x.detach(), mask, scale)
            most = (scale * x.detach().double()).abs().amax(-1, keepdim=True)
            assert_ulp(y, want, 0.51, "y", floor=(6 + most + shape[3] / 16) * unit * want)
            (dx,) = torch.autograd.grad(y, x, dy)
            # From the rounded y, as the vendor's formula has it.
            p, g = y.detach().double(), dy.double()
            total = (g * p).sum(-1, keepdim=True)
            size = abs(scale) * p * (g.abs() + (g * p).abs().sum(-1, keepdim=True))
            wanted = (scale * p * (g - total)).masked_fill(mask, 0.0)
            assert_ulp(dx, wanted, 0.51, "dx", floor=(3 + shape[3] / 16) * unit * size)
            hidden = mask.expand(shape).all(-1)
            assert (
                torch.equal(y[hidden], torch.full_like(y[hidden], 1 / shape[3]))
                and not dx[hidden].any()
            )


def test_gradcheck_and_opcheck():
    x = signed(2, 2, 3, 5, dtype=torch.float64).requires_grad_()
    for mask in masks((2, 2, 3, 5)):
        assert gradcheck(lambda t, m=mask: ops.npu_scaled_masked_softmax(t, m, 0.7), (x,))
    mask = torch.rand(3, 5) < 0.4
    opcheck(torch.ops.jumar.scaled_masked_softmax.default, (x, mask, 0.7))
    y = ops.npu_scaled_masked_softmax(x, mask, 0.7).detach()
    opcheck(torch.ops.jumar.scaled_masked_softmax_backward.default, (y, y, mask, 0.7))
    assert torch.equal(
        ops.npu_scaled_masked_softmax_backward(y, y, mask, 2, False),
        torch.ops.jumar.scaled_masked_softmax_backward(y, y, mask, 2.0),
    )


def test_behaves_as_an_operator():
    mask = torch.rand(1, 1, 9, 33, generator=torch.Generator().manual_seed(3)) < 0.4
    x = signed(2, 3, 9, 33)

    def f(t):
        return ops.npu_scaled_masked_softmax(t, mask, 0.5)

    check_layouts_and_double_backward("npu_scaled_masked_softmax", f, x)
    check_threads(lambda: [f(x)])
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    assert torch.equal(compiled(leaf), f(leaf))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(f(x), ops.npu_scaled_masked_softmax(x.bfloat16(), mask, 0.5))
    strided = torch.full((2, 3, 9, 66), torch.nan)[..., ::2].copy_(x)
    wide = mask.expand(2, 3, 9, 33).contiguous().mT.contiguous().mT
    assert torch.equal(ops.npu_scaled_masked_softmax(strided, wide, 0.5), f(x))
    assert ops.npu_scaled_masked_softmax(x[:0], mask, 0.5).shape == (0, 3, 9, 33)
    assert_schemas(
        {
            "npu_scaled_masked_softmax": "(Tensor x, Tensor mask, Scalar scale=1, bool fixed_triu_mask=False) -> Tensor",
            "npu_scaled_masked_softmax_backward": "(Tensor y_grad, Tensor y, Tensor mask, Scalar scale, "
            "bool fixed_triu_mask) -> Tensor",
        }
    )


def test_nan_is_seen_unless_it_is_hidden():
    x, mask = signed(3, 40), torch.zeros(3, 40, dtype=torch.bool)
    mask[:, 7] = True
    clean = ops.npu_scaled_masked_softmax(x, mask)
    x[:, 7], x[1, 9] = torch.nan, torch.nan
    y = ops.npu_scaled_masked_softmax(x, mask)
    assert torch.equal(y[::2], clean[::2]) and y[1].isnan().all()


def test_errors():
    x, mask = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    op = torch.ops.jumar.npu_scaled_masked_softmax
    backward = ops.npu_scaled_masked_softmax_backward
    for y, hidden, text in ((x.long(), mask, "y must be floating point"), (x, mask[:, :2], "not broadcast to y")):
        with pytest.raises(RuntimeError, match=f"npu_scaled_masked_softmax_backward: .*{text}"):
            backward(y, y, hidden, 1.0, False)
    for args, text in (
        ((x, mask, 1, True), "fixed_triu_mask must be False"),
        ((x, mask, True), "scale must be an integer or a float, got True"),
        ((x, mask.int()), "mask must be bool, got int32"),
        ((x, mask[:, :2]), "does not broadcast"),
        ((x.long(), mask), "x must be floating point"),
    ):
        with pytest.raises(
            RuntimeError, match=f"npu_scaled_masked_softmax: .*{text}|softmax: {text}"
        ):
            op(*args)
