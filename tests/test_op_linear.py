"""npu_linear through torch: oracle, gradients, autocast, strides, frozen weights, errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp, signed, strided_views

# (tokens.., in, out): tails of every register block, K = 0, no tokens, a single element, wgrad with many tokens.
SHAPES = [
    ((1,), 1, 1),
    ((3, 5), 33, 17),
    ((64,), 64, 64),
    ((7,), 300, 129),
    ((2, 0), 8, 4),
    ((4,), 0, 3),
    ((5,), 3, 0),
    ((600,), 31, 9),
    ((9,), 8, 1030),
]


def assert_matmul(actual, a, b, what, bias=None):
    """`actual` within half an ulp of a @ b (fp64) plus the fp32 accumulation bound K * eps * |a| @ |b|."""
    a, b = a.double(), b.double()
    expected, size = a @ b, a.abs() @ b.abs()
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    eps = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32).eps / 2
    # Blocks of at most 512 terms: see src/kernels/gemm/gemm.h.
    length = min(a.shape[-1], 512) + a.shape[-1] // 512 + 2
    assert_ulp(actual, expected, 0.501, what, floor=size * length * eps)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients_against_fp64(shape, dtype):
    lead, n_in, n_out = shape
    x = signed(*lead, n_in, dtype=dtype).requires_grad_()
    w = signed(n_out, n_in, dtype=dtype, seed=1).requires_grad_()
    b = signed(n_out, dtype=dtype, seed=2).requires_grad_()
    g = signed(*lead, n_out, dtype=dtype, seed=3)
    tokens = math.prod(lead)
    flat_x, flat_g = x.detach().reshape(tokens, n_in), g.reshape(tokens, n_out)
    y = ops.npu_linear(x, w, b)
    assert y.shape == (*lead, n_out) and y.dtype == dtype
    assert_matmul(y.detach().reshape(tokens, n_out), flat_x, w.detach().T, "y", b.detach())
    dx, dw, db = torch.autograd.grad(y, (x, w, b), g)
    assert_matmul(dx.reshape(tokens, n_in), flat_g, w.detach(), "dx")
    assert_matmul(dw, flat_g.T, flat_x, "dw")
    assert_matmul(db.unsqueeze(0), torch.ones(1, flat_g.shape[0]), flat_g, "db")
    without = ops.npu_linear(x, w)
    assert_matmul(without.detach().reshape(tokens, n_out), flat_x, w.detach().T, "no bias")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_on_small_integers(dtype):
    """Products and sums that fp32 holds exactly must come out exactly, on every SIMD target."""
    x = torch.arange(-7 * 40, 7 * 40).remainder(7).sub(3).reshape(14, 40).to(dtype)
    w = torch.arange(19 * 40).remainder(5).sub(2).reshape(19, 40).to(dtype)
    expected = (x.double() @ w.double().T).to(dtype)
    try:
        for target in jumar.simd_targets():
            jumar.set_simd_target(target)
            assert torch.equal(ops.npu_linear(x, w), expected), target
    finally:
        jumar.set_simd_target("")


def test_gradcheck_and_opcheck():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(ops.npu_linear, (x, w, b))
    assert gradcheck(ops.npu_linear, (x, w))
    inputs = [t.detach().float().requires_grad_() for t in (x, w, b)]
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns).npu_linear.default
        opcheck(op, inputs)
        opcheck(op, (*inputs[:2], None))
    g = torch.randn(2, 3, 5)
    jm = torch.ops.jumar
    opcheck(jm.npu_linear_backward.default, (g, x.detach().float(), w.detach().float()))
    opcheck(jm.linear_dgrad.default, (g, w.detach().float()))
    opcheck(jm.linear_wgrad.default, (g, x.detach().float()))
    opcheck(jm.linear_bias_grad.default, (g,))


def test_vendor_backward():
    x, w, g = torch.randn(6, 4), torch.randn(5, 4), torch.randn(6, 5)
    dx, dw = ops.npu_linear_backward(g, x, w)
    assert_matmul(dx, g, w, "dx")
    assert_matmul(dw, g.T, x, "dw")


def test_only_needed_gradients_are_computed():
    x, w = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    jumar.reset_call_counts()
    ops.npu_linear(x, w).sum().backward()
    counts = jumar.call_counts()
    assert counts == {"npu_linear": 1, "linear_wgrad": 1}
    frozen = torch.randn(5, 4)
    y = ops.npu_linear(x.requires_grad_(), frozen)
    jumar.reset_call_counts()
    y.sum().backward()
    assert jumar.call_counts() == {"linear_dgrad": 1}


def test_strides_and_expanded_gradients():
    x, w, g = torch.randn(3, 4, 10), torch.randn(6, 10), torch.randn(3, 4, 6)
    expected = ops.npu_linear(x, w)
    dx, dw = ops.npu_linear_backward(g, x, w)
    for layout, view in strided_views(x).items():
        for weight in strided_views(w).values():
            assert torch.equal(ops.npu_linear(view, weight), expected), layout
            for grad in strided_views(g).values():
                again = ops.npu_linear_backward(grad, view, weight)
                assert torch.equal(again[0], dx) and torch.equal(again[1], dw), layout
    for y in (ops.npu_linear(x.requires_grad_(), w.requires_grad_(), torch.zeros(6, requires_grad=True)),):
        y.sum().backward()  # a stride-0 gradient
    assert_matmul(w.grad, torch.ones(6, 12), x.detach().reshape(12, 10), "dw of an expanded gradient")


def test_autocast_casts_like_torch():
    x, w, b = torch.randn(4, 6), torch.randn(5, 6, requires_grad=True), torch.randn(5)
    with torch.autocast("cpu", torch.bfloat16):
        y, eager = ops.npu_linear(x, w, b), F.linear(x, w, b)
        assert y.dtype == eager.dtype == torch.bfloat16
        assert ops.npu_linear(x.double(), w.detach().double()).dtype == torch.float64
    y.sum().backward()
    assert w.grad.dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        assert ops.npu_linear(x, w, b).dtype == torch.float32


def test_compile_runs_the_operators():
    compiled = torch.compile(lambda a, b: ops.npu_linear(a, b).relu().sum(), fullgraph=True)
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    jumar.reset_call_counts()
    compiled(x, w).backward()
    counts = jumar.call_counts()
    assert counts == {"npu_linear": 1, "linear_dgrad": 1, "linear_wgrad": 1}
    y, z = x.detach().requires_grad_(), w.detach().requires_grad_()
    F.linear(y, z).relu().sum().backward()
    torch.testing.assert_close(w.grad, z.grad, rtol=1e-5, atol=1e-5)


def test_not_finite_values_propagate():
    x = torch.tensor([[1.0, float("inf")], [float("nan"), 1.0], [1.0, 2.0]])
    y = ops.npu_linear(x, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert y[0, 0] == float("inf") and y[0, 1].isnan() and y[1].isnan().all() and y[2].tolist() == [3.0, 0.0]


def test_errors_name_the_operator_and_the_value():
    x, w = torch.randn(2, 4), torch.randn(3, 4)
    with pytest.raises(RuntimeError, match=r"npu_linear: .*\[2, 5\].*\[3, 4\]"):
        ops.npu_linear(torch.randn(2, 5), w)
    with pytest.raises(RuntimeError, match=r"npu_linear: input and weight should have one dtype, got .*bfloat16"):
        ops.npu_linear(x, w.bfloat16())
    with pytest.raises(RuntimeError, match=r"npu_linear: .*\[4\]"):
        ops.npu_linear(x, torch.randn(4))
    with pytest.raises(RuntimeError, match=r"npu_linear: .*bias.*\[4\]"):
        ops.npu_linear(x, w, torch.randn(4))
    with pytest.raises(RuntimeError, match="npu_linear: .*int"):
        ops.npu_linear(x.long(), w.long())
    with pytest.raises(RuntimeError, match=r"npu_linear_backward: "):
        ops.npu_linear_backward(torch.randn(2, 9), x, w)
