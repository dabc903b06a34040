"""npu_rotary_mul through torch: oracle, layouts and broadcast forms, autograd, compile, errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import (
    FLOAT_DTYPES,
    HALF_DTYPES,
    assert_ulp,
    check_retain_graph,
    check_threads,
    signed,
    strided_views,
)

MODES = ["half", "interleave"]


def rotate(x, mode):
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def rotary64(x, cos, sin, mode):
    x, cos, sin = x.double(), cos.double(), sin.double()
    width = cos.shape[-1]
    part = x[..., :width]
    return torch.cat((part * cos + rotate(part, mode) * sin, x[..., width:]), -1)


def gradients64(grad, x, cos, sin, mode):
    leaves = [t.detach().double().requires_grad_() for t in (x, cos, sin)]
    return torch.autograd.grad(rotary64(*leaves, mode), leaves, grad.double())


def check(actual, expected, terms, count=1, what=""):
    """One rounding at the store, plus the roundings in fp32 (fp64) relative to the terms (docs/ops/npu_rotary_mul.md)."""
    eps = 2.0**-53 if actual.dtype == torch.float64 else 2.0**-24
    # The fp64 oracle rounds as often as the fp64 kernel does.
    slack = 2.0 if actual.dtype == torch.float64 else 1.0
    assert_ulp(actual, expected, 0.5001, what, floor=terms * eps * (count + 1.01) * slack)


def check_all(x, cos, sin, grad, mode, what=""):
    y = ops.npu_rotary_mul(x, cos, sin, mode)
    assert y.dtype == x.dtype and y.stride() == torch.empty_like(x).stride()
    a, c, s, g = (t.double().abs() for t in (x, cos, sin, grad))
    check(y, rotary64(x, cos, sin, mode), terms_of(a, c, s, mode), what=f"y {what}")
    got = ops.npu_rotary_mul_backward(grad, x, cos, sin, mode)
    exact = gradients64(grad, x, cos, sin, mode)
    width = cos.shape[-1]
    part, g_part = a[..., :width], g[..., :width]
    sizes = (
        pad(g_part * c + rotate(g_part * s, mode).abs(), x),
        (g_part * part).sum_to_size(cos.shape),
        (g_part * rotate(part, mode).abs()).sum_to_size(cos.shape),
    )
    count = x.numel() // x.shape[-1] // max(1, cos.numel() // max(1, width)) + 1
    for i, (o, e, t) in enumerate(zip(got, exact, sizes, strict=True)):
        assert o.dtype == (x, cos, sin)[i].dtype and o.shape == (x, cos, sin)[i].shape
        check(o, e, t, count if i else 1, what=f"gradient {i} {what}")
    assert torch.equal(torch.ops.jumar.rotary_mul_backward(grad, cos, sin, mode), got[0])


def pad(t, x):
    return torch.nn.functional.pad(t, (0, x.shape[-1] - t.shape[-1]))


def terms_of(x, cos, sin, mode):
    part = x[..., : cos.shape[-1]]
    return pad(part * cos + rotate(part, mode).abs() * sin, x)


def tables(shape, dtype, seed=0):
    # Independent and signed: cos^2 + sin^2 = 1 is not assumed.
    return tuple(signed(*shape, dtype=dtype, seed=seed + i) for i in (10, 11))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_width(dtype, mode):
    for dim in (2, 6, 64, 80, 96, 128, 192, 256):
        for width in (dim, dim // 4 * 2):
            x, grad = (signed(2, 3, 5, dim, dtype=dtype, seed=i) for i in range(2))
            cos, sin = tables((1, 1, 5, width), dtype)
            check_all(x, cos, sin, grad, mode, f"{dim} {width}")


B, N, S, D = 2, 3, 5, 16
FORMS = {
    "BNSD": ((B, N, S, D), [(1, 1, S, D), (B, 1, S, D), (B, N, S, D)]),
    "BSND": ((B, S, N, D), [(1, S, 1, D), (B, S, 1, D), (B, S, N, D)]),
    "SBND": ((S, B, N, D), [(S, 1, 1, D), (S, B, 1, D), (S, B, N, D)]),
    "TND": ((S, N, D), [(S, 1, D), (S, N, D), (1, 1, D)]),
    "TD": ((S, D), [(S, D), (1, D)]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", FORMS)
def test_every_layout_and_broadcast_form(layout, mode):
    shape, forms = FORMS[layout]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for form in forms:
            cos, sin = tables(form, dtype)
            x, grad = (signed(*shape, dtype=dtype, seed=i) for i in range(2))
            check_all(x, cos, sin, grad, mode, f"{layout} {form}")
            # The same from memory in which two dimensions are exchanged.
            turned = x.transpose(0, -2).contiguous().transpose(0, -2)
            check_all(turned, cos, sin, grad, mode, f"{layout} {form} turned")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_fp32_tables_are_kept(dtype, mode):
    x, grad = (signed(2, 3, 5, 16, dtype=dtype, seed=i) for i in range(2))
    cos, sin = tables((1, 1, 5, 16), torch.float32)
    check_all(x, cos, sin, grad, mode)
    assert not torch.equal(
        ops.npu_rotary_mul(x, cos, sin, mode),
        ops.npu_rotary_mul(x, cos.to(dtype), sin.to(dtype), mode),
    )


@pytest.mark.parametrize("mode", MODES)
def test_strides_and_expanded_gradients(mode):
    x, grad = (signed(2, 3, 4, 10, dtype=torch.bfloat16, seed=i) for i in range(2))
    cos, sin = tables((1, 1, 4, 6), torch.float32)
    y = ops.npu_rotary_mul(x, cos, sin, mode)
    exact = ops.npu_rotary_mul_backward(grad, x, cos, sin, mode)
    for (name, a), c, g in zip(
        strided_views(x).items(),
        reversed(strided_views(cos).values()),
        strided_views(grad).values(),
        strict=True,
    ):
        assert torch.equal(ops.npu_rotary_mul(a, c, sin, mode), y), name
        got = ops.npu_rotary_mul_backward(g, a, c, sin, mode)
        assert all(torch.equal(o, e) for o, e in zip(got, exact, strict=True)), name
    leaf, other = (x.clone().requires_grad_() for _ in range(2))
    ops.npu_rotary_mul(leaf, cos, sin, mode).sum().backward()  # a stride-0 gradient
    ops.npu_rotary_mul(other, cos, sin, mode).backward(torch.ones_like(x))
    assert torch.equal(leaf.grad, other.grad)


def test_a_transposed_projection_keeps_its_memory():
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)
    cos, sin = tables((1, 1, 5, 8), torch.float32)
    assert ops.npu_rotary_mul(x, cos, sin).transpose(1, 2).is_contiguous()
    dx = torch.ops.jumar.rotary_mul_backward(x, cos, sin)
    assert dx.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode):
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    for shape in [(1, 1, 2, 6), (2, 1, 2, 4), (1, 1, 1, 2), (2, 3, 2, 6)]:
        cos, sin = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
        assert gradcheck(lambda *t: ops.npu_rotary_mul(*t, mode), (x, cos, sin))
        assert gradcheck(
            lambda a, c=cos, s=sin: ops.npu_rotary_mul(a, c.detach(), s.detach(), mode), (x,)
        )
        assert gradcheck(
            lambda c, s=sin: ops.npu_rotary_mul(x.detach(), c, s.detach(), mode), (cos,)
        )


def test_input_is_saved_only_for_the_gradients_of_the_tables():
    x = torch.randn(2, 3, 8, requires_grad=True)
    cos, sin = tables((2, 1, 8), torch.float32)
    jumar.reset_call_counts()
    ops.npu_rotary_mul(x, cos, sin).sum().backward()
    assert jumar.call_counts() == {"npu_rotary_mul": 1, "rotary_mul_backward": 1}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        ops.npu_rotary_mul(x, cos, sin)
    assert x.shape not in saved
    ops.npu_rotary_mul(x, cos.requires_grad_(), sin).sum().backward()
    assert jumar.call_counts()["npu_rotary_mul_backward"] == 1
    assert cos.grad.shape == cos.shape and sin.grad is None


def test_opcheck():
    x, cos, sin = (torch.randn(s, requires_grad=True) for s in [(2, 5, 3, 8)] + [(1, 1, 5, 6)] * 2)
    turned = x.transpose(1, 2)
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns)
        opcheck(op.npu_rotary_mul.default, (turned, cos, sin, "interleave"))
        args = [t.detach() for t in (turned, turned.clone(), cos, sin)]
        opcheck(op.npu_rotary_mul_backward.default, (*args, "half"))
    opcheck(torch.ops.jumar.npu_rotary_mul.default, (turned, cos.detach(), sin.detach()))
    opcheck(torch.ops.jumar.rotary_mul_backward.default, (args[0], *args[2:]))


def test_schemas_are_the_vendors():
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns)
        assert str(op.npu_rotary_mul.default._schema).replace('"', "'") == (
            f"{ns}::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', "
            "Tensor? rotate=None) -> Tensor"
        )
        assert str(op.npu_rotary_mul_backward.default._schema).replace('"', "'") == (
            f"{ns}::npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, "
            "str rotary_mode='half') -> (Tensor, Tensor, Tensor)"
        )


def test_retain_graph_and_double_backward():
    cos, sin = tables((2, 1, 8), torch.float32)
    check_retain_graph(lambda x: ops.npu_rotary_mul(x, cos, sin), torch.randn(2, 3, 8))
    check_retain_graph(ops.npu_rotary_mul, torch.randn(2, 3, 8), cos, sin)
    for tables_too in (False, True):
        x = torch.randn(2, 3, 8, requires_grad=True)
        c = cos.clone().requires_grad_(tables_too)
        y = ops.npu_rotary_mul(x, c, sin).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        with pytest.raises(RuntimeError, match="^npu_rotary_mul: not differentiable twice"):
            dx.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_partial_rotary_pairs_within_the_width(mode):
    # D = 4, width 2, position 1: the pair is (0, 1), not (0, 2).
    angle = torch.ones(1, 2)
    y = ops.npu_rotary_mul(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), angle.cos(), angle.sin(), mode)
    assert y[0].tolist() == pytest.approx([-1.142640, 1.922076, 3.0, 4.0], abs=1e-6)


def test_mode_is_about_lanes_only():
    """Frequencies placed by sections or strides are the caller's business: any tables, either mode."""
    x = torch.randn(1, 1, 3, 8)
    section = torch.tensor([0, 1, 2, 0])
    angles = torch.randn(3, 3, 4)[section, :, torch.arange(4)].T  # a T/H/W source for each pair
    angles = torch.cat((angles, angles), -1)[None, None]
    for mode in MODES:
        y = ops.npu_rotary_mul(x, angles.cos(), angles.sin(), mode)
        torch.testing.assert_close(y.double(), rotary64(x, angles.cos(), angles.sin(), mode))


def test_rotate_matrix():
    x = torch.randn(2, 3, 8)
    cos, sin = tables((2, 1, 8), torch.float32)
    identity = torch.eye(8)
    for mode in MODES:
        matrix = rotate(identity, mode)  # x @ matrix = R(x)
        y = ops.npu_rotary_mul(x, cos, sin, "half", matrix)
        torch.testing.assert_close(y, ops.npu_rotary_mul(x, cos, sin, mode), rtol=1e-6, atol=1e-6)
    matrix = torch.randn(8, 8)
    y = ops.npu_rotary_mul(x.bfloat16(), cos, sin, rotate=matrix)
    exact = x.bfloat16().double() * cos + x.bfloat16().double() @ matrix.double() * sin
    assert_ulp(y, exact, 0.5001, floor=2.0**-20)
    with pytest.raises(RuntimeError, match="^npu_rotary_mul: rotate is given"):
        ops.npu_rotary_mul(x.requires_grad_(), cos, sin, rotate=matrix)
    with pytest.raises(
        RuntimeError, match=r"^npu_rotary_mul: rotate must be \[8, 8\], got \[4, 4\]"
    ):
        ops.npu_rotary_mul(x.detach(), cos, sin, rotate=torch.eye(4))


def test_empty():
    x = torch.empty(0, 3, 5, 8, requires_grad=True)
    cos = torch.randn(1, 1, 5, 8, requires_grad=True)
    y = ops.npu_rotary_mul(x, cos, cos.detach())
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape and cos.grad.tolist() == torch.zeros(1, 1, 5, 8).tolist()
    x = torch.empty(2, 3, 0, 8, requires_grad=True)
    ops.npu_rotary_mul(x, cos[:, :, :0], cos[:, :, :0]).sum().backward()
    assert x.grad.shape == x.shape


def test_errors_name_the_operator_and_the_value():
    x, t = torch.randn(2, 3, 8), torch.randn(2, 1, 8)
    cases = [
        (
            "The rotary_mode of npu_rotary_mul should be half or interleave, but got quarter",
            lambda: ops.npu_rotary_mul(x, t, t, "quarter"),
        ),
        ("must be even, got 7", lambda: ops.npu_rotary_mul(x[..., :7], t[..., :6], t[..., :6])),
        ("must be even, got 5", lambda: ops.npu_rotary_mul(x, t[..., :5], t[..., :5])),
        (
            r"one shape, got \[2, 1, 8\] and \[2, 1, 6\]",
            lambda: ops.npu_rotary_mul(x, t, t[..., :6]),
        ),
        (
            "must not exceed that of input, got 8 and 6",
            lambda: ops.npu_rotary_mul(x[..., :6], t, t),
        ),
        (r"rank of input, got \[2, 8\]", lambda: ops.npu_rotary_mul(x, t[:, 0], t[:, 0])),
        (
            r"dimension 0 .* got \[3, 1, 8\] for input \[2, 3, 8\]",
            lambda: ops.npu_rotary_mul(x, torch.randn(3, 1, 8), torch.randn(3, 1, 8)),
        ),
        (
            "float64 does not go with input of float32",
            lambda: ops.npu_rotary_mul(x, t.double(), t.double()),
        ),
        ("int64", lambda: ops.npu_rotary_mul(x.long(), t, t)),
    ]
    for text, f in cases:
        with pytest.raises(RuntimeError, match=f"^npu_rotary_mul: .*{text}"):
            f()
    with pytest.raises(RuntimeError, match="npu_rotary_mul_backward: grad .*bfloat16 and float32"):
        ops.npu_rotary_mul_backward(x.bfloat16(), x, t, t)
    with pytest.raises(RuntimeError, match="half or interleave"):
        torch.compile(lambda a: ops.npu_rotary_mul(a, t, t, "quarter"))(x)


def test_compile_runs_the_operator():
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    cos, sin = tables((1, 1, 5, 8), torch.float32)
    cos.requires_grad_()

    def f(a, c):
        q = a.transpose(1, 2)
        return (ops.npu_rotary_mul(q, c, sin) * ops.npu_rotary_mul(q, sin, sin, "interleave")).sum()

    jumar.reset_call_counts()
    torch.compile(f, fullgraph=True)(x, cos).backward()
    counts = jumar.call_counts()
    assert counts == {"npu_rotary_mul": 2, "npu_rotary_mul_backward": 1, "rotary_mul_backward": 1}
    y, c = x.detach().clone().requires_grad_(), cos.detach().clone().requires_grad_()
    f(y, c).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cos.grad, c.grad, rtol=1e-6, atol=1e-6)


def test_autocast_keeps_the_input_dtype():
    t = torch.randn(2, 1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.npu_rotary_mul(torch.randn(2, 3, 4), t, t).dtype == torch.float32
        assert ops.npu_rotary_mul(torch.randn(2, 3, 4).bfloat16(), t, t).dtype == torch.bfloat16


def test_same_bits_for_every_thread_count():
    x, grad = torch.randn(2, 8, 300, 64), torch.randn(2, 8, 300, 64)
    cos, sin = tables((1, 1, 1, 64), torch.float32)
    check_threads(lambda: (ops.npu_rotary_mul(x, cos, sin), *ops.npu_rotary_mul_backward(grad, x, cos, sin)))


def test_equals_the_plain_rotation_of_a_model():
    """Rotation by real angles keeps norms and depends on relative positions only."""
    position = torch.arange(7, dtype=torch.float64)[:, None] * 10000 ** (-torch.arange(4) / 4)
    for mode in MODES:
        angles = torch.cat((position, position), -1)
        if mode == "interleave":
            angles = position.repeat_interleave(2, -1)
        q, k = torch.randn(2, 8, dtype=torch.float64)
        rows = [
            ops.npu_rotary_mul(t.expand(7, 8), angles.cos(), angles.sin(), mode) for t in (q, k)
        ]
        scores = rows[0] @ rows[1].T
        assert math.isclose(scores[1, 0].item(), scores[6, 5].item(), rel_tol=1e-12)
        assert math.isclose(scores[0, 3].item(), scores[3, 6].item(), rel_tol=1e-12)
        torch.testing.assert_close(rows[0].norm(dim=-1), q.norm().expand(7))


def test_interleave_rope():
    x = signed(2, 3, 5, 8, dtype=torch.float64, seed=1).requires_grad_()
    cos, sin = (signed(2, 1, 5, 8, dtype=torch.float64, seed=s).requires_grad_() for s in (2, 3))
    even, odd = x[..., 0::2], x[..., 1::2]
    want = torch.cat([even, odd], -1) * cos + torch.cat([-odd, even], -1) * sin
    y = ops.npu_interleave_rope(x, cos, sin)
    assert_ulp(y, want.detach(), 2.0, "y", floor=1e-15)
    assert gradcheck(ops.npu_interleave_rope, (x, cos, sin))
    # Scores are those of neighbours that stay neighbours.
    table = cos[..., :4].detach().repeat_interleave(2, -1), sin[..., :4].detach().repeat_interleave(2, -1)
    halves = [t[..., ::2].repeat(1, 1, 1, 2) for t in table]
    a, b = (f @ f.mT for f in (ops.npu_rotary_mul(x, *table, "interleave"), ops.npu_interleave_rope(x, *halves)))
    assert torch.allclose(a, b, rtol=0, atol=1e-12)
    for bad, text in (
        ((x[0], cos, sin), "x must be"),
        ((x[..., :7], cos, sin), "D even"),
        ((x, cos[..., :4], sin[..., :4]), "does not go with x"),
        ((x, cos, sin[:1]), r"cos .* and sin .* do not go with x"),
    ):
        with pytest.raises(RuntimeError, match=f"npu_interleave_rope: .*{text}"):
            ops.npu_interleave_rope(*bad)
