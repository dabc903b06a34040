"""grouped_matmul through torch: oracle, gradients, group lists, lists of weights, rows of no group, errors."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp, signed, strided_views

jm = torch.ops.jumar

SIZES = [3, 0, 17, 1, 5]


def ends(sizes):
    return torch.tensor(sizes).cumsum(0)


def oracle(x, w, sizes, bias=None):
    """(y, sums of magnitudes) in fp64, row group by row group."""
    y = x.new_zeros((x.shape[0], w[0].shape[1]), dtype=torch.float64)
    size = torch.zeros_like(y)
    start = 0
    for e, n in enumerate(sizes):
        a, b = x[start : start + n].double(), w[e].double()
        y[start : start + n], size[start : start + n] = a @ b, a.abs() @ b.abs()
        if bias is not None:
            y[start : start + n] += bias[e].double()
            size[start : start + n] += bias[e].double().abs()
        start += n
    return y, size


def wgrad_oracle(x, g, sizes):
    parts = zip(x.double().split(sizes), g.double().split(sizes), strict=True)
    pairs = [(a.T @ b, a.abs().T @ b.abs()) for a, b in parts]
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


def close(actual, expected, terms, what):
    """Half an ulp of the result plus one fp32 (fp64) rounding a term, as src/kernels/gemm/gemm.h has it."""
    value, size = expected
    eps = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32).eps / 2
    assert_ulp(actual, value, 0.501, what, floor=size * (min(terms, 512) + 4) * eps)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("stored", ["EKN", "ENK", "list", "list of transposed"])
def test_forward_and_gradients_against_fp64(dtype, stored):
    rows, k, n = sum(SIZES), 33, 20
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    x = signed(rows, k, dtype=dtype).requires_grad_()
    turned = stored in ("ENK", "list of transposed")
    parameter = signed(*((5, n, k) if turned else (5, k, n)), dtype=dtype, seed=1)
    parameter.requires_grad_()
    w = parameter.transpose(1, 2) if turned else parameter
    bias = signed(5, n, dtype=compute, seed=2).requires_grad_()
    g = signed(rows, n, dtype=dtype, seed=3)
    if stored.startswith("list"):
        y = ops.grouped_matmul(x, list(w.unbind()), ends(SIZES), list(bias.unbind()))
    else:
        y = ops.grouped_matmul(x, w, ends(SIZES), bias)
    plain, dense = x.detach(), w.detach()
    close(y.detach(), oracle(plain, dense, SIZES, bias.detach()), k + 1, "y")
    dx, dw, db = torch.autograd.grad(y, (x, parameter, bias), g)
    assert dx.dtype == dw.dtype == dtype and db.dtype == compute
    assert dw.is_contiguous() or stored == "list of transposed"  # torch stacks those
    close(dx, oracle(g, dense.transpose(1, 2), SIZES), n, "dx")
    close(dw.transpose(1, 2) if turned else dw, wgrad_oracle(plain, g, SIZES), rows, "dw")
    ones = torch.ones(rows, 1)
    expected, size = wgrad_oracle(ones, g, SIZES)
    close(db, (expected[:, 0], size[:, 0]), rows, "db")


def test_gradient_of_a_transposed_parameter_is_not_copied():
    """What AccumulateGrad takes over lies as the parameter does."""
    p = torch.randn(5, 4, 6, requires_grad=True)
    x = torch.randn(sum(SIZES), 6)
    ops.grouped_matmul(x, p.transpose(1, 2), ends(SIZES)).sum().backward()
    assert p.grad.is_contiguous()
    (dw,) = torch.autograd.grad(
        ops.grouped_matmul(x, (w := p.transpose(1, 2)), ends(SIZES)).sum(), w
    )
    assert dw.stride() == w.stride()


@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
def test_group_list_types_mean_the_same(index):
    x, w = torch.randn(sum(SIZES), 4), torch.randn(5, 4, 6)
    expected = torch.cat([a @ b for a, b in zip(x.split(SIZES), w, strict=True)])
    pairs = torch.tensor(list(enumerate(SIZES)))
    for kind, groups in enumerate((ends(SIZES), torch.tensor(SIZES), pairs)):
        y = ops.grouped_matmul(x, w, groups.to(index), group_list_type=kind)
        torch.testing.assert_close(y, expected)
    swapped = torch.tensor([[1, 17], [0, 9]])  # in the order of rows, not of groups
    y = ops.grouped_matmul(x, w[:2], swapped, group_list_type=2)
    torch.testing.assert_close(y, torch.cat([x[:17] @ w[1], x[17:] @ w[0]]))


def test_rows_of_no_group_are_zero_and_never_read():
    x, w = torch.randn(9, 4), torch.randn(2, 4, 6)
    x[5:] = float("nan")
    x.requires_grad_()
    w.requires_grad_()
    bias = torch.randn(2, 6, requires_grad=True)
    y = ops.grouped_matmul(x, w, torch.tensor([3, 5]), bias)
    assert (y[5:] == 0).all() and y[:5].isfinite().all()
    g = torch.randn(9, 6)
    g[5:] = float("inf")
    dx, dw, db = torch.autograd.grad(y, (x, w, bias), g)
    assert (dx[5:] == 0).all() and dx.isfinite().all() and dw.isfinite().all() and db.isfinite().all()


def test_no_rows_and_no_groups():
    w = torch.randn(3, 4, 6, requires_grad=True)
    x = torch.randn(0, 4, requires_grad=True)
    y = ops.grouped_matmul(x, w, torch.zeros(3, dtype=torch.int64))
    y.sum().backward()
    assert y.shape == (0, 6) and x.grad.shape == (0, 4) and (w.grad == 0).all()
    y = ops.grouped_matmul(torch.randn(2, 4), w[:0], torch.zeros(0, dtype=torch.int64))
    assert y.shape == (2, 6) and (y == 0).all()


def test_strides_and_expanded_gradients():
    x, w, g = torch.randn(26, 10), torch.randn(5, 10, 6), torch.randn(26, 6)
    groups = ends(SIZES)
    expected = jm.grouped_matmul(x, w, groups)
    dx, dw = jm.grouped_matmul_dgrad(g, w, groups), jm.grouped_matmul_wgrad(x, g, groups)
    for layout, view in strided_views(x).items():
        for weight in strided_views(w).values():
            assert torch.equal(jm.grouped_matmul(view, weight, groups), expected), layout
            for grad in strided_views(g).values():
                assert torch.equal(jm.grouped_matmul_dgrad(grad, weight, groups), dx), layout
                assert torch.equal(jm.grouped_matmul_wgrad(view, grad, groups), dw), layout
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    jm.grouped_matmul(leaf, weight, groups).sum().backward()  # strides of 0
    close(weight.grad, wgrad_oracle(x, torch.ones(26, 6), SIZES), 26, "dw of an expanded gradient")


def test_a_batch_of_experts_that_is_expanded():
    x, one = torch.randn(26, 10), torch.randn(10, 6)
    y = jm.grouped_matmul(x, one.expand(5, 10, 6), ends(SIZES))
    torch.testing.assert_close(y, x @ one)


def test_gradcheck_twice_and_opcheck():
    groups = torch.tensor([2, 2, 5])
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, w, b: jm.grouped_matmul(x, w, groups, b), (x, w, b))
    assert gradgradcheck(lambda x, w: jm.grouped_matmul(x, w, groups), (x, w))
    g = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, g: jm.grouped_matmul_wgrad(x, g, groups), (x, g))
    weights, biases = list(w.detach().unbind()), list(b.detach().unbind())
    for t in (*weights, *biases):
        t.requires_grad_()
    assert gradcheck(lambda x, *rest: jm.grouped_matmul_list(x, rest[:3], groups, rest[3:]), (x, *weights, *biases))
    pairs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert gradcheck(lambda *t: jm.separate_matmul(t[:3], t[3:6], t[6:]), (*pairs, *weights, *biases))

    def leaf(t):
        return t.detach().float().requires_grad_()

    x, w, b, g = map(leaf, (x, w, b, g))
    weights, biases, pairs = ([leaf(t) for t in many] for many in (weights, biases, pairs))
    opcheck(jm.grouped_matmul.default, (x, w, groups, b))
    opcheck(jm.grouped_matmul.default, (x, w.detach().mT.contiguous().mT.requires_grad_(), groups))
    opcheck(jm.grouped_matmul_dgrad.default, (g, w, groups))
    opcheck(jm.grouped_matmul_wgrad.default, (x, g, groups))
    opcheck(jm.grouped_matmul_wgrad.default, (x, g, groups, 0, True))
    opcheck(jm.grouped_matmul_bias_grad.default, (g.detach(), groups))
    opcheck(jm.grouped_matmul_list.default, (x, weights, groups, biases))
    plain = [t.detach() for t in weights]
    opcheck(jm.grouped_matmul_list_dgrad.default, (g.detach(), plain, groups))
    opcheck(jm.grouped_matmul_list_wgrad.default, (x.detach(), g.detach(), groups))
    opcheck(jm.separate_matmul.default, (pairs, weights, biases))
    opcheck(jm.grouped_matmul_add_.default, (torch.randn(3, 3, 4), x.detach(), g.detach(), groups))


def test_only_needed_gradients_are_computed():
    x, w = torch.randn(26, 4), torch.randn(5, 4, 6, requires_grad=True)
    jumar.reset_call_counts()
    ops.grouped_matmul(x, w, ends(SIZES)).sum().backward()
    assert jumar.call_counts() == {"grouped_matmul": 1, "grouped_matmul_wgrad": 1}
    frozen = [m.detach() for m in w]
    y = ops.grouped_matmul(x.requires_grad_(), frozen, ends(SIZES))
    jumar.reset_call_counts()
    y.sum().backward()
    assert jumar.call_counts() == {"grouped_matmul_list_dgrad": 1}


def test_autocast_casts_like_linear():
    x, w = torch.randn(26, 4), torch.randn(5, 4, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.grouped_matmul(x, w, ends(SIZES))
        listed = ops.grouped_matmul(x, list(w), ends(SIZES))
    assert y.dtype == listed.dtype == torch.bfloat16 and torch.equal(y, listed)
    y.sum().backward()
    assert w.grad.dtype == torch.float32


def test_compile_runs_the_operators():
    groups = ends(SIZES)
    compiled = torch.compile(lambda a, b: ops.grouped_matmul(a, b, groups).relu().sum(), fullgraph=True)
    x, w = torch.randn(26, 8, requires_grad=True), torch.randn(5, 8, 6, requires_grad=True)
    jumar.reset_call_counts()
    compiled(x, w).backward()
    assert jumar.call_counts() == {"grouped_matmul": 1, "grouped_matmul_dgrad": 1, "grouped_matmul_wgrad": 1}
    a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
    ops.grouped_matmul(a, b, groups).relu().sum().backward()
    torch.testing.assert_close(w.grad, b.grad)


def test_errors_name_the_operator_and_the_value():
    x, w = torch.randn(5, 4), torch.randn(3, 4, 6)
    for groups, kind, text in (
        ([1, 2, 6], 0, r"beyond the 5 rows: group 2 ends at 6"),
        ([3, 2, 5], 0, r"larger than or equal to 0, got 3 followed by 2"),
        ([-1, 2, 5], 0, r"group_list\[0\] should be larger than or equal to 0, got -1"),
        ([1, -2, 5], 1, r"group_list\[1\] .* got -2"),
        ([1, 2, 3], 1, r"more than the 5 rows: group 2 has 3"),
        ([1, 2], 1, r"group_list has 2 groups, but there are 3 of weight"),
        ([1, 2, 5], 3, r"0, 1 or 2, but now is 3"),
    ):
        with pytest.raises(RuntimeError, match=f"grouped_matmul: .*{text}"):
            ops.grouped_matmul(x, w, torch.tensor(groups), group_list_type=kind)
    good = torch.tensor([1, 2, 5])
    with pytest.raises(RuntimeError, match="grouped_matmul: .*float32"):
        ops.grouped_matmul(x, w, good.float())
    with pytest.raises(RuntimeError, match="grouped_matmul: group_list must be int64 or int32, got bool"):
        ops.grouped_matmul(x, w, good.bool())
    for arguments in ((x, w, good.to("meta")), (x, list(w.to("meta")), good), (x.to("meta"), w, good)):
        with pytest.raises(RuntimeError, match="^grouped_matmul: all tensors must be on one device, got cpu and meta"):
            ops.grouped_matmul(*arguments)
    with pytest.raises(RuntimeError, match="grouped_matmul: .*one dtype, got .*bfloat16"):
        ops.grouped_matmul(x, w.bfloat16(), good)
    with pytest.raises(RuntimeError, match=r"grouped_matmul: .*\[4, 6\]"):
        ops.grouped_matmul(torch.randn(5, 7), w, good)
    with pytest.raises(RuntimeError, match=r"grouped_matmul: bias .*\[3, 5\]|grouped_matmul: bias .*\[5\]"):
        ops.grouped_matmul(x, w, good, torch.randn(3, 5))
    with pytest.raises(RuntimeError, match=r"grouped_matmul: bias should be .*float64"):
        ops.grouped_matmul(x, w, good, torch.randn(3, 6).double())
