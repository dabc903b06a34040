"""npu_grouped_matmul and npu_grouped_matmul_add: every combination of arguments, gradients, errors by name."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import jumar
from jumar import ops

NAMESPACES = jumar._load.NAMESPACES
SIZES = [3, 0, 4, 1]
ENDS = [3, 3, 7, 8]


def data():
    x, w, b = torch.randn(8, 5), torch.randn(4, 5, 6), torch.randn(4, 6)
    y = torch.cat([a @ m + v for a, m, v in zip(x.split(SIZES), w, b, strict=True)])
    return x, w, b, y


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_groups_of_rows(namespace):
    op = getattr(torch.ops, namespace).npu_grouped_matmul
    x, w, b, expected = data()
    ends, counts = torch.tensor(ENDS), torch.tensor(SIZES)
    pairs = torch.tensor(list(enumerate(SIZES)))
    for kind, groups in enumerate((ends, counts, pairs)):
        for split in (2, 3):
            flags = {"group_list": groups, "split_item": split, "group_type": 0, "group_list_type": kind}
            (a,) = op([x], [w], bias=[b], **flags)  # one stacked weight
            (c,) = op([x], list(w), bias=list(b), **flags)  # a list
            torch.testing.assert_close(a, expected)
            assert torch.equal(a, c)
    parts = list(x.split(SIZES))
    for groups in (None, counts):
        (y,) = op(parts, list(w), bias=list(b), group_list=groups, split_item=2, group_type=0, group_list_type=1)
        torch.testing.assert_close(y, expected)
    (y,) = op([x], list(w), bias=list(b), group_list=ENDS, split_item=3)  # .List
    torch.testing.assert_close(y, expected)
    (y,) = op(parts, list(w), bias=list(b), group_list=[], split_item=3)
    torch.testing.assert_close(y, expected)


def test_transposed_weights_and_widths_that_differ():
    x, w, _, _ = data()
    stored = w.transpose(1, 2).contiguous()
    counts = torch.tensor(SIZES)
    flags = {"group_list": counts, "split_item": 2, "group_type": 0, "group_list_type": 1}
    op = torch.ops.jumar.npu_grouped_matmul
    assert torch.equal(op([x], [stored.transpose(1, 2)], **flags)[0], op([x], [w], **flags)[0])
    # x of different widths, one result
    parts, weights = [torch.randn(2, 3), torch.randn(4, 5)], [torch.randn(3, 6), torch.randn(5, 6)]
    (y,) = op(parts, weights, split_item=2, group_type=0)
    torch.testing.assert_close(y, torch.cat([a @ b for a, b in zip(parts, weights, strict=True)]))
    # weights of different widths, a list of results, from a list of ints
    weights = [torch.randn(5, n) for n in (6, 2, 1, 3)]
    results = op([x], weights, group_list=ENDS, split_item=0)
    for y, a, m in zip(results, x.split(SIZES), weights, strict=True):
        torch.testing.assert_close(y, a @ m)
    assert [y.shape[0] for y in op([x], weights, group_list=[1, 1, 2, 5], split_item=1)] == [1, 0, 1, 3]


def test_separate_lists():
    x = [torch.randn(2, 3, 5), torch.randn(4, 7), torch.randn(2, 2, 1, 2, 3)]
    w = [torch.randn(5, 2), torch.randn(7, 6), torch.randn(3, 4)]
    b = [torch.randn(n) for n in (2, 6, 4)]
    results = torch.ops.jumar.npu_grouped_matmul(x, w, bias=b, group_type=-1)
    for y, a, m, v in zip(results, x, w, b, strict=True):
        torch.testing.assert_close(y, a @ m + v)


def test_groups_of_the_reduced_dimension():
    """Weight gradients: x is a transposed view, a group without rows gives zeros."""
    x, g = torch.randn(8, 5), torch.randn(8, 6)
    (dw,) = torch.ops.jumar.npu_grouped_matmul(
        [x.T], [g], group_list=torch.tensor(SIZES), split_item=3, group_type=2, group_list_type=1
    )
    expected = torch.stack([a.T @ b for a, b in zip(x.split(SIZES), g.split(SIZES), strict=True)])
    torch.testing.assert_close(dw, expected)
    assert (dw[1] == 0).all()
    x.requires_grad_()
    g.requires_grad_()
    (dw,) = torch.ops.jumar.npu_grouped_matmul([x.T], [g], group_list=torch.tensor(ENDS), split_item=2, group_type=2)
    dw.square().sum().backward()
    a, b = x.detach().requires_grad_(), g.detach().requires_grad_()
    torch.stack([p.T @ q for p, q in zip(a.split(SIZES), b.split(SIZES), strict=True)]).square().sum().backward()
    torch.testing.assert_close(x.grad, a.grad)
    torch.testing.assert_close(g.grad, b.grad)


class VendorGmm(torch.autograd.Function):
    """The products as trainers on the card wrap them."""

    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x, weight, counts)
        flags = {"group_list": counts, "group_list_type": 1, "split_item": 2, "group_type": 0}
        return torch.ops.jumar.npu_grouped_matmul([x], [weight], **flags)[0]

    @staticmethod
    def backward(ctx, grad):
        x, weight, counts = ctx.saved_tensors
        op, flags = torch.ops.jumar.npu_grouped_matmul, {"group_list": counts, "group_list_type": 1}
        dx = op([grad], [weight.transpose(1, 2)], split_item=2, group_type=0, **flags)[0]
        dw = op([x.transpose(0, 1)], [grad], split_item=3, group_type=2, **flags)[0]
        return dx, dw, None


def test_differentiable_as_wrapped_and_by_itself():
    x, w, b, _ = data()
    counts = torch.tensor(SIZES)
    grads = []
    for wrapped in (False, True):
        a, m = x.clone().requires_grad_(), w.clone().requires_grad_()
        if wrapped:
            y = VendorGmm.apply(a, m, counts)
        else:
            (y,) = ops.npu_grouped_matmul([a], [m], group_list=counts, group_list_type=1, split_item=2, group_type=0)
        y.sum().backward()
        grads.append((a.grad, m.grad))
    torch.testing.assert_close(grads[0], grads[1])
    leaves = [*x.split(SIZES), *w, *b]
    leaves = [t.clone().requires_grad_() for t in leaves]
    results = ops.npu_grouped_matmul(leaves[:4], leaves[4:8], bias=leaves[8:], group_type=-1)
    sum(y.square().sum() for y in results[:2] + results[3:]).backward()  # one result is unused
    assert (leaves[6].grad == 0).all() and leaves[0].grad.abs().sum() > 0 and leaves[8].grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype):
    x, w, b, _ = (t.to(dtype) for t in data())
    bias = b.float() if dtype == torch.bfloat16 else b
    flags = {"group_list": torch.tensor(ENDS), "split_item": 2, "group_type": 0}
    (y,) = ops.npu_grouped_matmul([x], [w], bias=[bias], output_dtype=dtype, **flags)
    exact = torch.cat([a.double() @ m.double() + v.double() for a, m, v in zip(x.split(SIZES), w, b, strict=True)])
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-12)


def test_opcheck_and_compile():
    x, w, b, _ = data()
    flags = {"group_list": torch.tensor(ENDS), "split_item": 2, "group_type": 0}
    for namespace in NAMESPACES:
        packet = getattr(torch.ops, namespace).npu_grouped_matmul
        opcheck(packet.default, ([x], [w]), {"bias": [b], **flags})
        opcheck(packet.default, ([x.requires_grad_()], [w]), {"bias": [b], **flags})
        opcheck(packet.List, ([x.detach()], list(w)), {"group_list": ENDS})
        opcheck(packet.List, ([x.detach()], list(w)), {"group_list": ENDS, "split_item": 3})
        add = getattr(torch.ops, namespace).npu_grouped_matmul_add
        opcheck(add.default, (torch.randn(20, 6), x.detach(), torch.randn(8, 6), torch.tensor(ENDS)))
    function = torch.compile(lambda a, m: ops.npu_grouped_matmul([a], [m], **flags)[0].sum(), fullgraph=True)
    torch.testing.assert_close(function(x, w), ops.npu_grouped_matmul([x], [w], **flags)[0].sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_add(dtype, flat):
    x, g = torch.randn(8, 5).to(torch.bfloat16), torch.randn(8, 6).to(torch.bfloat16)
    sums = torch.randn(4, 5, 6).to(dtype)
    expected = torch.stack(
        [s.double() + a.double().T @ b.double() for s, a, b in zip(sums, x.split(SIZES), g.split(SIZES), strict=True)]
    ).to(dtype)
    start = sums.reshape(20, 6) if flat else sums
    before = start.clone()
    counts = torch.tensor(SIZES)
    out = ops.npu_grouped_matmul_add(start, x, g, counts, group_list_type=1)
    assert torch.equal(start, before) and out.shape == start.shape
    torch.testing.assert_close(out.reshape(4, 5, 6), expected)
    again = ops.npu_grouped_matmul_add(
        start, x.T.contiguous(), g.T.contiguous(), counts, transpose_x=False, transpose_weight=True, group_list_type=1
    )
    assert torch.equal(again, out)
    version = start._version
    same = torch.ops.jumar.npu_grouped_matmul_add_(start, x, g, counts, group_list_type=1)
    assert same is start or same.data_ptr() == start.data_ptr()
    assert torch.equal(start, out) and start._version > version


def test_errors():
    x, w, b, _ = data()
    ends = torch.tensor(ENDS)
    flags = {"group_list": ends, "split_item": 2, "group_type": 0}

    def fails(text, *args, **kwargs):
        with pytest.raises(RuntimeError, match=f"(?s)npu_grouped_matmul: .*{text}"):
            ops.npu_grouped_matmul(*args, **kwargs)

    fails("Requires manual passing group_type, current is None.", [x], [w], group_list=ends, split_item=2)
    fails("The group type must be -1, 0 or 2, but now is 1", [x], [w], **{**flags, "group_type": 1})
    fails("neither x nor weight could be empty", [x], [], **flags)
    fails("split_item is 4, which should only be one of 0/1/2/3", [x], [w], **{**flags, "split_item": 4})
    fails("split_item must be 2 or 3, got 0", [x], list(w), **{**flags, "split_item": 0})
    fails("group_list_type must be 0, 1 or 2, but now is 7", [x], [w], **flags, group_list_type=7)
    fails("group_list is required", [x], [w], split_item=2, group_type=0)
    fails("the num of x tensors must equal the num of weight tensors, got 1 and 4", [x], list(w), group_type=-1)
    fails("group_type -1 has no group_list", [x], [w[0]], group_type=-1, group_list=ends)
    fails("split_item must be 0 or 1, got 3", [x], [w[0]], group_type=-1, split_item=3)
    fails("the length of weight must equal x", [x.T], [w], group_list=ends, split_item=3, group_type=2)
    fails("group_type 2 has no bias", [x.T], [x], bias=[b], group_list=ends, split_item=3, group_type=2)
    fails("length of x equals 1", [x, x], list(w), group_list=ENDS)
    fails("length of x equals 1", [x], list(w)[:2], group_list=ENDS)
    fails(r"group_list\[0\] should be larger than or equal to 0, got -1", [x], list(w), group_list=[-1, 2, 3, 4])
    fails("should be larger than or equal to 0, got .*3, 2", [x], list(w), group_list=[3, 2, 3, 4])
    fails("beyond the 8 rows", [x], list(w), group_list=[3, 4, 5, 9])
    fails("The group type must be 0 or None, but now is 2", [x], list(w), group_list=ENDS, group_type=2)
    fails("group_list_type must be 0, got 1", [x], list(w), group_list=ENDS, group_list_type=1)
    fails("one dtype, got torch.bfloat16 and torch.float32", [x.bfloat16()], [w], **flags)
    fails("output_dtype must be that of x, torch.float32", [x], [w], **flags, output_dtype=torch.bfloat16)
    fails("act_type belongs to quantised products", [x], [w], **flags, act_type=4)
    fails("gives the groups .* rows, the x tensors have", list(x.split(SIZES)), list(w), **flags, group_list_type=1)
    for name in ("scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale", "activation_input"):
        fails(f"{name} belongs to quantised products", [x], [w], **flags, **{name: [b]})
    fails("x_dtype belongs to quantised", [x], [w], **flags, x_dtype=torch.float32)
    fails("bias must be one tensor", [x], [w], bias=list(b), **flags)
    with pytest.raises(RuntimeError, match="^npu_grouped_matmul: group_list has 3 groups, but there are 4 of weight"):
        ops.npu_grouped_matmul([x], [w], group_list=ends[:3], split_item=2, group_type=0)
    with pytest.raises(RuntimeError, match="^npu_grouped_matmul: .*beyond the 8 rows"):
        ops.npu_grouped_matmul([x], [w], group_list=ends + 1, split_item=2, group_type=0)


def test_a_group_list_beside_separate_x_is_checked():
    xs, ws = [torch.randn(2, 4), torch.randn(3, 4)], [torch.randn(4, 5), torch.randn(4, 5)]

    def product(group_list, kind):
        return ops.npu_grouped_matmul(
            xs, ws, group_list=torch.tensor(group_list), split_item=2, group_type=0, group_list_type=kind
        )[0]

    expected = torch.cat([x @ w for x, w in zip(xs, ws, strict=True)])
    for group_list, kind in (([2, 5], 0), ([2, 3], 1), ([[1, 3], [0, 2]], 2)):
        torch.testing.assert_close(product(group_list, kind), expected)
    for group_list, kind in (([2.0, 5.0], 0), ([[2], [5]], 0), ([2, 3], 2), ([True, True], 1), ([2, 3, 1], 1)):
        with pytest.raises(RuntimeError, match="npu_grouped_matmul: group_list must be int64 or int32 of shape"):
            product(group_list, kind)
    with pytest.raises(RuntimeError, match="npu_grouped_matmul: group_list must name each of the 2 groups once"):
        product([[0, 2], [5, 3]], 2)


def test_autocast_casts_what_differs():
    x, w, b, _ = data()
    arguments = {"group_list": torch.tensor(ENDS), "split_item": 2, "group_type": 0}
    expected = ops.npu_grouped_matmul([x.bfloat16()], [w.bfloat16()], **arguments)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.npu_grouped_matmul([x.bfloat16()], [w], **arguments)[0]
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)


def test_errors_of_add():
    sums, x, g, ends = torch.randn(4, 5, 6), torch.randn(8, 5), torch.randn(8, 6), torch.tensor(ENDS)
    add = ops.npu_grouped_matmul_add
    with pytest.raises(RuntimeError, match=r"npu_grouped_matmul_add: group_type must be 2, but now is 0"):
        add(sums, x, g, ends, group_type=0)
    with pytest.raises(RuntimeError, match=r"npu_grouped_matmul_add: input has shape \[3, 5, 6\], expected \[4, 5, 6\]"):
        add(sums[:3], x, g, ends)
    with pytest.raises(RuntimeError, match="npu_grouped_matmul_add: input must be float32 or of x's dtype, got float16"):
        add(sums.half(), x, g, ends)
    in_place = torch.ops.jumar.npu_grouped_matmul_add_
    with pytest.raises(RuntimeError, match="^npu_grouped_matmul_add_: input overlaps itself in memory"):
        in_place(sums[:1].expand(4, 5, 6), x, g, ends)
    with pytest.raises(RuntimeError, match="^npu_grouped_matmul_add_: .* overlap in memory"):
        in_place(x[:5, :5].view(1, 5, 5), x, x, ends[:1])
    with pytest.raises(RuntimeError, match="^npu_grouped_matmul_add_: all tensors must be on one device"):
        in_place(sums, x.to("meta"), g, ends)
    with pytest.raises(RuntimeError, match="npu_grouped_matmul_add: not differentiable"):
        add(sums, x.requires_grad_(), g, ends)
