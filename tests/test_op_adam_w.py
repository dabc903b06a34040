"""npu_apply_adam_w and the operators behind jumar.optim, through torch."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp, signed, strided_views

NUMBERS = {
    "beta1_power": 0.9**3,
    "beta2_power": 0.95**3,
    "lr": 1e-2,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
}
SCALARS = (
    "Scalar beta1_power, Scalar beta2_power, Scalar lr, Scalar weight_decay, Scalar beta1, Scalar beta2, "
    "Scalar epsilon, Tensor grad, Tensor? max_grad_norm, bool? amsgrad, bool? maximize"
)


def state(dtype, *shape):
    return [
        signed(*shape, dtype=dtype),
        signed(*shape, dtype=dtype, seed=1, scale=0.1),
        signed(*shape, dtype=dtype, seed=2, scale=0.1).square(),
    ]


def oracle(grad, var, m, v, maximum=None, maximize=False):
    """The vendor's formula in fp64."""
    n = NUMBERS
    g = -grad.double() if maximize else grad.double()
    m = n["beta1"] * m.double() + (1 - n["beta1"]) * g
    v = n["beta2"] * v.double() + (1 - n["beta2"]) * g * g
    b1, b2 = n["beta1_power"] * n["beta1"], n["beta2_power"] * n["beta2"]
    largest = v if maximum is None else torch.maximum(maximum.double(), v)
    var = var.double() * (1 - n["lr"] * n["weight_decay"])
    return var - n["lr"] * (m / (1 - b1)) / ((largest / (1 - b2)).sqrt() + n["epsilon"]), m, v


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("maximize", [False, True, None])
def test_against_fp64(dtype, maximize):
    grad, maximum = signed(5, 33, dtype=dtype, seed=3), signed(5, 33, dtype=dtype, seed=4).abs()
    bound = 4.0 if dtype == torch.float64 else 0.52
    floor = 1e-15 if dtype == torch.float64 else 0.0
    for most in (None, maximum):
        out = state(dtype, 5, 33)
        expected = oracle(grad, *out, most, bool(maximize))
        kept = maximum.clone()
        got = ops.npu_apply_adam_w(
            *NUMBERS.values(), grad, most, most is not None, maximize, out=out
        )
        for ours, right, target in zip(got, expected, out, strict=True):
            assert ours is target
            assert_ulp(ours, right, bound, floor=floor)
        assert torch.equal(maximum, kept)
    # A maximum without amsgrad is not looked at.
    first, second = state(dtype, 5, 33), state(dtype, 5, 33)
    ops.npu_apply_adam_w(*NUMBERS.values(), grad, maximum, False, maximize, out=first)
    ops.npu_apply_adam_w(*NUMBERS.values(), grad, out=second, maximize=maximize)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_powers_are_of_the_step_before():
    """beta ** (t - 1) goes in; then it is torch.optim.AdamW."""
    p = torch.nn.Parameter(torch.randn(7, dtype=torch.float64))
    var, m, v = p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)
    optimizer = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for t in range(4):
        p.grad = torch.randn_like(p)
        optimizer.step()
        torch.ops.jumar.npu_apply_adam_w(
            0.9**t, 0.95**t, 1e-2, 0.1, 0.9, 0.95, 1e-8, p.grad, None, None, None, out=[var, m, v]
        )
        torch.testing.assert_close(var, p.detach(), rtol=1e-14, atol=1e-15)


def test_schemas_are_the_vendors():
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns).npu_apply_adam_w
        result = "(Tensor, Tensor, Tensor)"
        assert str(op.default._schema) == f"{ns}::npu_apply_adam_w({SCALARS}) -> {result}"
        assert (
            str(op.out._schema)
            == f"{ns}::npu_apply_adam_w.out({SCALARS}, *, Tensor[] out) -> {result}"
        )


def test_errors():
    grad = torch.randn(3, 4)
    out = state(torch.float32, 3, 4)
    before = [t.clone() for t in out]

    def call(grad=grad, most=None, amsgrad=None, out=out):
        return ops.npu_apply_adam_w(*NUMBERS.values(), grad, most, amsgrad, out=out)

    with pytest.raises(RuntimeError, match="npu_apply_adam_w is not implemented for Tensor"):
        call(out=None)
    with pytest.raises(RuntimeError, match="expected tuple of 3 elements but got 2"):
        call(out=out[:2])
    with pytest.raises(RuntimeError, match="if amsgrad is true, max_gard_norm input must be entered"):
        call(amsgrad=True)
    with pytest.raises(RuntimeError, match=r"npu_apply_adam_w: grad\[0\] must have the shape \[3, 4\]"):
        call(grad=torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="npu_apply_adam_w: .*int64"):
        call(grad=torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="npu_apply_adam_w: .*overlap in memory"):
        call(out=[out[0], out[1], out[1]])
    with pytest.raises(RuntimeError, match="npu_apply_adam_w: .*overlaps itself"):
        call(out=[torch.randn(1, 4).expand(3, 4), *out[1:]])
    with pytest.raises(RuntimeError, match="requires grad"):
        call(out=[out[0].clone().requires_grad_(), *out[1:]])
    assert all(torch.equal(a, b) for a, b in zip(out, before, strict=True))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_strides(dtype):
    grad = signed(3, 4, 10, dtype=dtype, seed=3)
    exact = ops.npu_apply_adam_w(*NUMBERS.values(), grad, out=state(dtype, 3, 4, 10))
    for name in strided_views(grad):
        out = [strided_views(t)[name] for t in state(dtype, 3, 4, 10)]
        ops.npu_apply_adam_w(*NUMBERS.values(), strided_views(grad)[name], out=out)
        assert all(torch.equal(a, b) for a, b in zip(out, exact, strict=True)), name


def test_opcheck():
    jm = torch.ops.jumar
    p, g, m, v = torch.randn(3, 4), torch.randn(3, 4), torch.zeros(3, 4), torch.zeros(3, 4)
    opcheck(jm.apply_adam_w_.default, (p, m, v, g, None, 1.0, 1.0, 1e-3, 0.1, 0.9, 0.99, 1e-8, False))
    lists = ([p, m], [g, g], [v, torch.zeros(3, 4)], [torch.zeros(3, 4), torch.zeros(3, 4)], [], [])
    steps = [torch.tensor(0.0), torch.tensor(3.0)]
    opcheck(
        jm.adamw_.default, (*lists, steps, [2], [1e-3], [0.9], [0.99], [1e-8], [0.0], [0])
    )
    opcheck(jm.grad_power_sums.default, ([p, g.bfloat16()], [1, 0], 2, 2.0))
    opcheck(jm.scale_grads_.default, ([p, g.bfloat16()], 0.5))


def test_versions_are_counted():
    p, x = torch.randn(4), torch.randn(4, requires_grad=True)
    loss = (p * x).sum()
    out = [p, torch.zeros(4), torch.zeros(4)]
    ops.npu_apply_adam_w(*NUMBERS.values(), torch.randn(4), out=out)
    assert all(t._version for t in out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compile():
    def f(grad, var, m, v):
        a, b, c = ops.npu_apply_adam_w(*NUMBERS.values(), grad * 2, out=(var, m, v))
        return a + b, var * 2, c

    grad = torch.randn(6, 5)
    out, other = state(torch.float32, 6, 5), state(torch.float32, 6, 5)
    jumar.reset_call_counts()
    with torch.no_grad():
        got = torch.compile(f, fullgraph=True, backend="aot_eager")(grad, *out)
        assert jumar.call_counts()["npu_apply_adam_w"] == 1
        right = f(grad, *other)
    for a, b in zip((*got, *out), (*right, *other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        tensors = [torch.randn(3), torch.randn(4)]
        kept = [t * 3 for t in tensors]

        def g(a, b):
            torch.ops.jumar.scale_grads_([a, b], 3.0)
            return a + 1

        torch.compile(g, fullgraph=True, backend="aot_eager")(*tensors)
        assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
