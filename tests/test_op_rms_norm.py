"""RMSNorm family through torch: oracle, autograd, strides, compile, errors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import (
    FLOAT_DTYPES,
    HALF_DTYPES,
    assert_ulp,
    max_ulp,
    signed,
    strided_views,
)


def norm64(x, gamma, eps, offset=0.0, gate=None):
    x, gamma = x.double(), gamma.double()
    dims = tuple(range(-gamma.dim(), 0))
    y = x * (x.square().mean(dims, keepdim=True) + eps).rsqrt() * (offset + gamma)
    return y if gate is None else y * F.silu(gate.double())


FORMS = {
    "npu_rms_norm": (lambda x, g, w: ops.npu_rms_norm(x, w)[0], lambda x, g, w: norm64(x, w, 1e-6)),
    "npu_gemma_rms_norm": (
        lambda x, g, w: ops.npu_gemma_rms_norm(x, w)[0],
        lambda x, g, w: norm64(x, w, 1e-6, 1.0),
    ),
    "npu_add_rms_norm": (
        lambda x, g, w: ops.npu_add_rms_norm(x, g, w)[0],
        lambda x, g, w: norm64(x + g, w, 1e-6),
    ),
    "rms_norm_gated": (
        lambda x, g, w: ops.rms_norm_gated(x, g, w)[0],
        lambda x, g, w: norm64(x, w, 1e-6, 0.0, g),
    ),
}
# Ulps of the stored dtype, docs/ops/npu_rms_norm.md.
BOUND = {torch.float32: 6.0, torch.float64: 8.0, torch.bfloat16: 0.51, torch.float16: 0.51}


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_forward_against_fp64(name, dtype):
    fused, oracle = FORMS[name]
    for cols in (1, 7, 16, 33, 130):
        x, g, w = (
            signed(6, cols, dtype=dtype),
            signed(6, cols, dtype=dtype, seed=1),
            signed(cols, dtype=dtype, seed=2),
        )
        reference = (x + g) if name == "npu_add_rms_norm" else x
        expected = oracle(x, g, w) if name != "npu_add_rms_norm" else norm64(reference, w, 1e-6)
        y = fused(x, g, w)
        assert y.dtype == dtype and y.is_contiguous()
        assert_ulp(y, expected, BOUND[dtype], f"{name} {cols}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_gradients_no_further_from_fp64_than_eager(name, dtype):
    fused, oracle = FORMS[name]
    tensors = [
        signed(5, 33, dtype=dtype),
        signed(5, 33, dtype=dtype, seed=1),
        signed(33, dtype=dtype, seed=2),
    ]
    tensors[0][-1] = 0.5  # the zero row's gradient of 1e3 size hides everything else
    grad = signed(5, 33, dtype=dtype, seed=3)

    def gradients(f, inputs, g):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        return torch.autograd.grad(f(*leaves), leaves, g, allow_unused=True)

    def eager(x, g, w):
        if name == "npu_add_rms_norm":
            x = x + g
        weight = w + 1 if name == "npu_gemma_rms_norm" else w
        h = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        y = weight * h.to(x.dtype)
        return y * F.silu(g) if name == "rms_norm_gated" else y

    at = [t.double() for t in tensors]
    if name == "npu_add_rms_norm":  # specified on the rounded sum
        at[:2] = [(tensors[0] + tensors[1]).double(), torch.zeros_like(at[1])]
    exact = gradients(oracle, at, grad.double())
    ours = gradients(fused, tensors, grad)
    theirs = gradients(eager, tensors, grad)
    for e, o, t in zip(exact, ours, theirs, strict=True):
        if e is None:
            continue
        assert o.dtype == dtype
        scale = e.abs().max().item()
        assert_ulp(
            o, e, max(1.0, max_ulp(t, e)), name, floor=scale * torch.finfo(torch.float32).eps * 8
        )


@pytest.mark.parametrize("name", FORMS)
def test_gradcheck_and_opcheck(name):
    fused, _ = FORMS[name]
    x, g, w = (
        signed(*s, dtype=torch.float64, seed=i).requires_grad_()
        for i, s in enumerate([(2, 5), (2, 5), (5,)])
    )
    assert gradcheck(fused, (x, g, w))
    for ns in jumar._load.NAMESPACES:
        op = getattr(getattr(torch.ops, ns), name, None)
        if op is None:
            continue
        inputs = [t.detach().float().requires_grad_() for t in (x, g, w)]
        args = inputs if name in ("npu_add_rms_norm", "rms_norm_gated") else [inputs[0], inputs[2]]
        opcheck(op.default, (*args, 1e-6))


def test_opcheck_of_backward_operators():
    x, g, w = torch.randn(3, 7), torch.randn(3, 7), torch.randn(7)
    rstd = torch.rand(3, 1) + 0.5
    jm = torch.ops.jumar
    opcheck(jm.npu_rms_norm_backward.default, (g, x, w, rstd))
    opcheck(jm.gemma_rms_norm_backward.default, (g, x, w, rstd))
    opcheck(jm.add_rms_norm_backward.default, (g, g.clone(), x, w, rstd))
    opcheck(jm.rms_norm_gated_backward.default, (g, x, g.clone(), w, rstd))


def test_gradient_of_the_returned_sum():
    x1, x2, w = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in [(3, 5), (3, 5), (5,)]
    )
    assert gradcheck(lambda a, b, c: ops.npu_add_rms_norm(a, b, c)[::2], (x1, x2, w))
    assert gradcheck(lambda a, b, c: ops.npu_add_rms_norm(a, b, c)[2], (x1, x2, w))

    def both(a, b, c):  # gradients of y and of the sum arrive in one backward
        y, _, total = ops.npu_add_rms_norm(a, b, c)
        return y + 2 * total

    assert gradcheck(both, (x1, x2, w))


def test_gamma_of_two_dimensions_and_rstd_shape():
    x, w = (
        torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True),
        torch.randn(4, 5, dtype=torch.float64),
    )
    y, rstd = ops.npu_rms_norm(x, w)
    assert rstd.shape == (2, 3, 1, 1) and not rstd.requires_grad
    assert_ulp(y, norm64(x, w, 1e-6), 8)
    assert gradcheck(lambda a, b: ops.npu_rms_norm(a, b)[0], (x, w.requires_grad_()))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_mixed_gamma_dtype(dtype):
    x, w = signed(4, 12, dtype=dtype).requires_grad_(), signed(12, seed=1).requires_grad_()
    y, rstd = ops.npu_rms_norm(x, w)
    assert y.dtype == dtype and rstd.dtype == torch.float32
    assert_ulp(y, norm64(x, w, 1e-6), 0.51)
    y.sum().backward()
    assert x.grad.dtype == dtype and w.grad.dtype == torch.float32
    assert (
        ops.npu_rms_norm_backward(torch.ones_like(y), x, w.to(dtype), rstd)[1].dtype
        == torch.float32
    )


def test_strides_and_expanded_gradients():
    x = torch.randn(3, 4, 10)
    w = torch.randn(10)
    expected, rstd = ops.npu_rms_norm(x, w)
    g = torch.randn_like(x)
    dx, dw = ops.npu_rms_norm_backward(g, x, w, rstd)
    for layout, view in strided_views(x).items():
        assert torch.equal(ops.npu_rms_norm(view, w)[0], expected), layout
        for grad_view in strided_views(g).values():
            again = ops.npu_rms_norm_backward(grad_view, view, w, rstd)
            assert torch.equal(again[0], dx) and torch.equal(again[1], dw), layout
    leaf = x.clone().requires_grad_()
    ops.npu_rms_norm(leaf, w)[0].sum().backward()  # a stride-0 gradient
    other = x.clone().requires_grad_()
    ops.npu_rms_norm(other, w)[0].backward(torch.ones_like(x))
    assert torch.equal(leaf.grad, other.grad)


# Field log: one rounding (D13), rows stay apart (D16), a norm with weight 1 is not doubled (C6), fp32 x with bf16
# gamma is computed in fp32 (C9), zero rows and eps (D17).
def test_field_log_values():
    x = torch.tensor([[-4, -0.75, 3.25, -3.75]], dtype=torch.bfloat16)
    w = torch.tensor([1.5, 1.75, 0.1875, 1.625], dtype=torch.bfloat16)
    assert ops.npu_rms_norm(x, w)[0].tolist() == [
        [-1.8671875, -0.408203125, 0.189453125, -1.8984375]
    ]
    assert torch.equal(
        ops.npu_gemma_rms_norm(x.float(), torch.zeros(4))[0],
        ops.npu_rms_norm(x.float(), torch.ones(4))[0],
    )
    rows = torch.tensor(
        [[1.0, 2.0], [3.0, -4.0], [0.5, 8.0]], dtype=torch.float64, requires_grad=True
    )
    (ours,) = torch.autograd.grad(
        (ops.npu_rms_norm(rows, torch.ones(2).double())[0] ** 2 * torch.arange(6).view(3, 2)).sum(),
        rows,
    )
    (exact,) = torch.autograd.grad(
        (norm64(rows, torch.ones(2), 1e-6) ** 2 * torch.arange(6).view(3, 2)).sum(), rows
    )
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-14)
    fp32 = torch.randn(2, 8)
    assert ops.npu_rms_norm(fp32, torch.ones(8, dtype=torch.bfloat16))[0].dtype == torch.float32
    zero = torch.zeros(1, 4)
    assert ops.npu_rms_norm(zero, torch.ones(4), 1e-6)[0].tolist() == [[0.0] * 4]
    assert ops.npu_rms_norm(zero, torch.ones(4), 0.0)[0].isnan().all()


def test_empty():
    for shape in [(0, 4), (2, 0, 4)]:
        x = torch.empty(shape, requires_grad=True)
        w = torch.ones(4, requires_grad=True)
        y, rstd = ops.npu_rms_norm(x, w)
        assert y.shape == x.shape and rstd.shape == (*shape[:-1], 1)
        y.sum().backward()
        assert w.grad.tolist() == [0.0] * 4 and x.grad.shape == x.shape


def test_errors_name_the_operator_and_the_value():
    x = torch.randn(2, 4)
    with pytest.raises(RuntimeError, match=r"npu_rms_norm: gamma \[5\] does not match .* \[2, 4\]"):
        ops.npu_rms_norm(x, torch.ones(5))
    with pytest.raises(
        RuntimeError, match=r"npu_rms_norm: The gamma shape should not be bigger than self shape"
    ):
        ops.npu_rms_norm(x, torch.ones(1, 2, 4))
    with pytest.raises(RuntimeError, match="npu_rms_norm: .*int64"):
        ops.npu_rms_norm(torch.ones(2, 4, dtype=torch.int64), torch.ones(4))
    with pytest.raises(RuntimeError, match="npu_add_rms_norm: x2 should be like the input"):
        ops.npu_add_rms_norm(x, torch.randn(2, 5), torch.ones(4))
    with pytest.raises(RuntimeError, match="rms_norm_gated: gate should be like the input"):
        ops.rms_norm_gated(x, x.bfloat16(), torch.ones(4))
    with pytest.raises(RuntimeError, match="gamma"):
        torch.compile(lambda a, b: ops.npu_rms_norm(a, b)[0])(x, torch.ones(5))


def test_schemas_are_the_vendors():
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns)
        assert str(op.npu_rms_norm.default._schema) == (
            f"{ns}::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)"
        )
        assert [a.name for a in op.npu_rms_norm_backward.default._schema.arguments] == [
            "dy",
            "input",
            "gamma",
            "rstd",
        ]
    assert torch.ops.npu.npu_rms_norm(input=torch.ones(1, 2), gamma=torch.ones(2))[0].shape == (
        1,
        2,
    )


def test_compile_runs_the_operator():
    x, w = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    compiled = torch.compile(lambda a, b: (ops.npu_rms_norm(a, b)[0] * 2).sum(), fullgraph=True)
    jumar.reset_call_counts()
    compiled(x, w).backward()
    counts = jumar.call_counts()
    assert counts["npu_rms_norm"] == 1 and counts["npu_rms_norm_backward"] == 1
    y, z = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    (ops.npu_rms_norm(y, z)[0] * 2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(w.grad, z.grad, rtol=1e-6, atol=1e-6)


def test_autocast_keeps_the_input_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.npu_rms_norm(torch.randn(2, 4), torch.ones(4))[0].dtype == torch.float32
        assert (
            ops.npu_rms_norm(torch.randn(2, 4).bfloat16(), torch.ones(4))[0].dtype == torch.bfloat16
        )


def test_bounds_on_every_target():
    x, w = torch.randn(300, 70), torch.randn(70)
    try:
        for target in jumar.simd_targets():
            jumar.set_simd_target(target)
            assert jumar.simd_target() == target
            assert_ulp(ops.npu_rms_norm(x, w)[0], norm64(x, w, 1e-6), BOUND[torch.float32], target)
    finally:
        jumar.set_simd_target("")


def test_deepcopy_of_results_under_no_grad():
    with torch.no_grad():
        y, _ = ops.npu_rms_norm(torch.randn(2, 4), torch.ones(4))
    assert torch.equal(copy.deepcopy(y), y)
