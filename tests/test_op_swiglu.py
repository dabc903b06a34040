"""npu_swiglu and swiglu_gate_up through torch: oracle, autograd, strides, compile, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import (
    FLOAT_DTYPES,
    assert_ulp,
    max_ulp,
    signed,
    strided_views,
)

# Ulps of the stored dtype, docs/ops/npu_swiglu.md: y, dup, and dgate beside its part relative to the terms.
BOUND = {torch.float32: 4.0, torch.float64: 4.0, torch.bfloat16: 0.505, torch.float16: 0.505}
DUP_BOUND = {torch.float32: 5.0, torch.float64: 5.0, torch.bfloat16: 0.505, torch.float16: 0.505}
DGATE_TERMS = {
    torch.float32: 2.0**-21,
    torch.float64: 2.0**-50,
    torch.bfloat16: 2.0**-19,
    torch.float16: 2.0**-19,
}
SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 33, 257)


def gradients64(grad, gate, up):
    """dgate, dup and the size of dgate's two terms, in fp64."""
    grad, a, b = grad.double(), gate.double(), up.double()
    s, c = torch.sigmoid(a), torch.sigmoid(-a)
    terms = (grad * b * s).abs() * (1 + (a * c).abs())
    return grad * b * s * (1 + a * c), grad * a * s, terms


def check_gradients(grad, gate, up, dgate, dup, what=""):
    dtype = gate.dtype
    exact_gate, exact_up, terms = gradients64(grad, gate, up)
    assert dgate.dtype == dup.dtype == dtype
    assert_ulp(dup, exact_up, DUP_BOUND[dtype], f"dup {what}")
    assert_ulp(dgate, exact_gate, 0.501, f"dgate {what}", floor=terms * DGATE_TERMS[dtype])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_against_fp64(dtype):
    for cols in SIZES:
        gate, up, grad = (
            signed(5, cols, dtype=dtype, seed=i, scale=s) for i, s in enumerate((3.0, 1.0, 1.0))
        )
        y = ops.swiglu_gate_up(gate, up)
        assert y.dtype == dtype and y.is_contiguous()
        assert_ulp(y, F.silu(gate.double()) * up.double(), BOUND[dtype], f"{cols}")
        check_gradients(
            grad, gate, up, *torch.ops.jumar.swiglu_gate_up_backward(grad, gate, up), f"{cols}"
        )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("dim", [-1, 0, 1, -2])
def test_packed_over_any_dim(dtype, dim):
    x = signed(6, 10, 4, dtype=dtype, scale=2.0)
    gate, up = x.chunk(2, dim)
    y = ops.npu_swiglu(x, dim)
    assert y.is_contiguous() and torch.equal(y, ops.swiglu_gate_up(gate, up))
    grad = signed(*y.shape, dtype=dtype, seed=1)
    dx = ops.npu_swiglu_backward(grad, x, dim)
    assert dx.shape == x.shape and dx.is_contiguous()
    check_gradients(grad, gate, up, *dx.chunk(2, dim), str(dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_further_from_fp64_than_eager(dtype):
    gate, up, grad = (signed(40, 65, dtype=dtype, seed=i, scale=2.0) for i in range(3))

    def run(f, *tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = f(*leaves)
        return y, *torch.autograd.grad(y, leaves, grad.to(y.dtype))

    def eager(a, b):
        return F.silu(a) * b

    exact = run(eager, gate.double(), up.double())
    ours, theirs = run(ops.swiglu_gate_up, gate, up), run(eager, gate, up)
    for e, o, t in zip(exact, ours, theirs, strict=True):
        assert max_ulp(o, e) <= max(1.0 if dtype == torch.bfloat16 else 5.0, max_ulp(t, e))


def test_gradcheck():
    x, gate, up = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in [(2, 6, 3), (4,), (4,)]
    )
    for dim in (0, 1, -2):
        assert gradcheck(lambda t, d=dim: ops.npu_swiglu(t, d), (x,))
    assert gradcheck(ops.swiglu_gate_up, (gate, up))
    # One input alone.
    assert gradcheck(lambda t: ops.swiglu_gate_up(t, up.detach()), (gate,))
    assert gradcheck(lambda t: ops.swiglu_gate_up(gate.detach(), t), (up,))


def test_opcheck():
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns)
        opcheck(op.npu_swiglu.default, (torch.randn(3, 8, requires_grad=True),))
        opcheck(op.npu_swiglu.default, (torch.randn(4, 3, 5, requires_grad=True), 0))
        opcheck(op.npu_swiglu_backward.default, (torch.randn(3, 4), torch.randn(3, 8)))
    jm = torch.ops.jumar
    gate, up = torch.randn(3, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    opcheck(jm.swiglu_gate_up.default, (gate, up.T))
    opcheck(jm.swiglu_gate_up_backward.default, (torch.randn(3, 5), gate.detach(), up.detach().T))


def test_schemas_are_the_vendors():
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns)
        assert str(op.npu_swiglu.default._schema) == (
            f"{ns}::npu_swiglu(Tensor input, int dim=-1) -> Tensor"
        )
        assert str(op.npu_swiglu_backward.default._schema) == (
            f"{ns}::npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor"
        )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_strides_and_expanded_gradients(dtype):
    gate, up, grad = (signed(3, 4, 10, dtype=dtype, seed=i) for i in range(3))
    y = ops.swiglu_gate_up(gate, up)
    backward = torch.ops.jumar.swiglu_gate_up_backward
    exact = backward(grad, gate, up)
    for (name, a), b, g in zip(
        strided_views(gate).items(),
        reversed(strided_views(up).values()),
        strided_views(grad).values(),
        strict=True,
    ):
        assert torch.equal(ops.swiglu_gate_up(a, b), y), name
        for ours, right in zip(backward(g, a, b), exact, strict=True):
            assert torch.equal(ours, right), name
        assert torch.equal(ops.npu_swiglu(a), ops.npu_swiglu(gate)), name
    leaf, other = (gate.clone().requires_grad_() for _ in range(2))
    ops.npu_swiglu(leaf, 1).sum().backward()  # a stride-0 gradient
    ops.npu_swiglu(other, 1).backward(torch.ones(3, 2, 10, dtype=dtype))
    assert torch.equal(leaf.grad, other.grad)


def test_gradients_are_not_swapped_and_rows_stay_apart():
    gate, up = (torch.tensor([v], requires_grad=True) for v in (2.0, 3.0))
    y = ops.swiglu_gate_up(gate, up)
    y.backward(torch.ones(1))
    got = (y.item(), gate.grad.item(), up.grad.item())
    assert got == pytest.approx((5.284782, 3.272352, 1.761594), abs=1e-6)
    packed = torch.tensor([[2.0, 3.0]])
    assert ops.npu_swiglu(packed).item() == pytest.approx(5.284782, abs=1e-6)  # 5.715445 swapped
    # Three different rows: every row's gradient is its own, element by element.
    x = (torch.arange(12.0).view(3, 4) / 4 - 1).requires_grad_()
    grad = torch.arange(1.0, 7.0).view(3, 2)
    ops.npu_swiglu(x).backward(grad)
    exact = gradients64(grad, *x.detach().chunk(2, -1))
    torch.testing.assert_close(x.grad.double(), torch.cat(exact[:2], -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_non_finite_values_are_eagers(dtype):
    inf, nan = float("inf"), float("nan")
    values = [-inf, inf, nan, -200.0, 200.0, -0.0, 0.0] * 5
    ours, theirs = (torch.tensor(values, dtype=dtype, requires_grad=True) for _ in range(2))
    y, z = ops.swiglu_gate_up(ours, torch.ones_like(ours)), F.silu(theirs)
    torch.testing.assert_close(y, z, rtol=0, atol=1e-80, equal_nan=True)
    y.backward(torch.ones_like(y))
    z.backward(torch.ones_like(z))
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-80, equal_nan=True)
    assert torch.equal(y.signbit(), z.signbit() & ~z.isnan() | y.signbit() & z.isnan())


def test_empty():
    for shape, dim, out in [((0, 8), -1, (0, 4)), ((3, 0), 1, (3, 0)), ((2, 4, 0), 1, (2, 2, 0))]:
        x = torch.empty(shape, requires_grad=True)
        y = ops.npu_swiglu(x, dim)
        assert y.shape == out
        y.sum().backward()
        assert x.grad.shape == shape


def test_errors_name_the_operator_and_the_value():
    x = torch.randn(2, 4)
    for dim in (2, -3):
        with pytest.raises(RuntimeError, match=rf"npu_swiglu: dim out of range: {dim} .*\[2, 4\]"):
            ops.npu_swiglu(x, dim)
    with pytest.raises(RuntimeError, match=r"npu_swiglu: .* must be even, got 5 in \[2, 5\]"):
        ops.npu_swiglu(torch.randn(2, 5))
    with pytest.raises(RuntimeError, match="npu_swiglu: .*int64"):
        ops.npu_swiglu(torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="npu_swiglu: .*0-d"):
        ops.npu_swiglu(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="swiglu_gate_up: .*got bfloat16 and float32"):
        ops.swiglu_gate_up(x, x.bfloat16())
    with pytest.raises(RuntimeError, match=r"swiglu_gate_up: .*got \[2, 5\] and \[2, 4\]"):
        ops.swiglu_gate_up(x, torch.randn(2, 5))
    with pytest.raises(RuntimeError, match=r"npu_swiglu_backward: grad_output .*\[2, 4\]"):
        ops.npu_swiglu_backward(x, x)
    with pytest.raises(RuntimeError, match="must be even"):
        torch.compile(ops.npu_swiglu)(torch.randn(2, 5))


def test_compile_runs_the_operator():
    x = torch.randn(4, 16, requires_grad=True)

    def f(t):
        return (ops.npu_swiglu(t) * ops.swiglu_gate_up(*t.chunk(2, -1))).sum()

    compiled = torch.compile(f, fullgraph=True)
    jumar.reset_call_counts()
    compiled(x).backward()
    names = ("npu_swiglu", "npu_swiglu_backward", "swiglu_gate_up", "swiglu_gate_up_backward")
    assert [jumar.call_counts()[n] for n in names] == [1] * 4
    y = x.detach().clone().requires_grad_()
    f(y).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-6)


def test_autocast_keeps_the_input_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.npu_swiglu(torch.randn(2, 4)).dtype == torch.float32
        assert ops.npu_swiglu(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16
