"""Routers through torch: against the models' own, in fp64, gradients, ties, errors."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp, signed, strided_views, threads

NAMESPACES = jumar._load.NAMESPACES


def distinct(rows, experts, dtype=torch.float32, seed=0):
    """Logits whose order does not hang on a rounding: multiples of 1/32, shuffled in each row."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, experts, generator=generator).argsort(-1)
    return ((order - experts // 2) / 32).to(dtype)


def plain(
    x, k, scoring="softmax", renorm=False, bias=None, n_group=1, topk_group=1, scale=1.0, eps=0.0,
    fill=float("-inf"), score="top2",
):  # fmt: skip
    """(weights, indices, scores) in the dtype of x."""
    s = x.softmax(-1) if scoring == "softmax" else x.sigmoid()
    choice = s.detach() if bias is None else s.detach() + bias
    if n_group > 1:
        groups = choice.unflatten(-1, (n_group, -1))
        best = groups.topk(2, -1)[0].sum(-1) if score == "top2" else groups.amax(-1)
        kept = best.argsort(dim=-1, descending=True, stable=True)[..., :topk_group]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter(-1, kept, True)
        choice = groups.masked_fill(~mask.unsqueeze(-1), fill).flatten(-2)
    indices = choice.argsort(dim=-1, descending=True, stable=True)[..., :k]
    weights = s.gather(-1, indices)
    if renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * scale, indices, s


CASES = [
    {},
    {"renorm": True},
    {"scoring": "sigmoid", "scale": 2.5},
    {
        "scoring": "sigmoid",
        "renorm": True,
        "bias": True,
        "n_group": 4,
        "topk_group": 2,
        "eps": 1e-20,
    },
    {"scoring": "sigmoid", "renorm": True, "n_group": 2, "score": "max", "fill": 0.0, "eps": 0.25},
    {"bias": True, "renorm": True, "scale": 1.5},
]


def options_of(case, experts, dtype=torch.float64):
    """Of :func:`plain`, and of the operator."""
    given = dict(case)
    if given.get("bias"):
        given["bias"] = torch.linspace(-0.3, 0.4, experts, dtype=dtype)
    own = dict(given)
    for ours, theirs in (("fill", "group_fill"), ("score", "group_score")):
        if ours in own:
            own[theirs] = own.pop(ours)
    return given, own


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 24), (16,)], ids=str)
def test_against_fp64(dtype, case, shape):
    experts = shape[-1]
    x = distinct(6, experts, dtype)[: 1 if len(shape) == 1 else 6]
    x = x.reshape(shape).requires_grad_()
    given, _ = options_of(case, experts)
    _, own = options_of(case, experts, torch.float64 if dtype == torch.float64 else torch.float32)
    wide = x.detach().double().requires_grad_()
    want_w, want_i, want_s = plain(wide, 4, **given)
    w, i, s = ops.router_top_k(x, 4, output_scores=True, **own)
    assert w.dtype == dtype and i.dtype == torch.int64 and w.shape == (*shape[:-1], 4)
    assert s.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(i, want_i)
    exact = 0.51 if dtype in (torch.bfloat16, torch.float16) else 8
    assert_ulp(w.detach(), want_w.detach(), exact, "weights")
    assert_ulp(s.detach(), want_s.detach(), 8, "scores")
    gw, gs = torch.randn_like(w), torch.randn_like(s)
    torch.autograd.backward([w, s], [gw, gs])
    torch.autograd.backward([want_w, want_s], [gw.double(), gs.double()])
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    assert_ulp(x.grad, wide.grad, 0.51, "gradient", floor=100 * unit)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scores", [False, True])
def test_gradcheck(case, scores):
    x = distinct(3, 16, torch.float64).requires_grad_()
    _, own = options_of(case, 16)

    def run(x):
        w, _, s = ops.router_top_k(x, 4, output_scores=scores, **own)
        return (w, s) if scores else w

    assert gradcheck(run, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    x = distinct(5, 16, dtype).requires_grad_()
    bias = torch.linspace(-0.1, 0.1, 16)
    op = torch.ops.jumar.router_top_k.default
    opcheck(op, (x, 3))
    opcheck(op, (x, 3, "sigmoid", True, bias, 4, 2, 2.5, 1e-20, 0.0, "max", True, True))
    w, i, s = ops.router_top_k(x.detach(), 3, output_scores=True)
    opcheck(
        torch.ops.jumar.router_top_k_backward.default,
        (w, s, x.detach(), i, "softmax", True, 1.0, 0.0),
    )
    opcheck(
        torch.ops.jumar.router_top_k_backward.default,
        (None, s, x.detach(), i, "sigmoid", False, 1.0, 0.0),
    )
    finished = torch.tensor([True, False, False, True, False])
    for ns in NAMESPACES:
        space = getattr(torch.ops, ns)
        opcheck(space.npu_moe_gating_top_k_softmax.default, (x, finished, 3))
        opcheck(space.npu_moe_gating_top_k_backward.default, (s, w, i.int()), {"norm_type": 1})
    opcheck(torch.ops.jumar.npu_moe_gating_top_k_softmax_backward.default, (w, x.detach(), i.int()))
    for renorm, whole in ((0, True), (0, False), (1, True)):
        opcheck(
            torch.ops.jumar.moe_gating_top_k_softmax_v2.default, (x, 3, finished, renorm, whole)
        )
    opcheck(
        torch.ops.jumar.npu_moe_gating_top_k_softmax_v2_backward.default,
        (w, s, x.detach(), i.int(), 0),
    )
    for norm_type in (0, 1):
        opcheck(
            torch.ops.jumar.moe_gating_top_k.default,
            (x, 3, bias.to(dtype), 2, 4, 1, 0, norm_type, 2.5, 1e-20),
        )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 33)], ids=str)
def test_gating_top_k_softmax(dtype, shape):
    rows = shape[:-1]
    x = distinct(torch.Size(rows).numel(), shape[-1], dtype).reshape(shape).requires_grad_()
    finished = torch.arange(torch.Size(rows).numel()).reshape(rows) % 3 == 0
    wide = x.detach().double().requires_grad_()
    want, order, _ = plain(wide, 4)
    for ns in NAMESPACES:
        x.grad = wide.grad = None
        y, experts, row_idx = getattr(torch.ops, ns).npu_moe_gating_top_k_softmax(x, finished, 4)
        assert y.dtype == dtype and experts.dtype == row_idx.dtype == torch.int32
        assert_ulp(y.detach(), want.detach(), 0.51 if dtype.itemsize == 2 else 8)
        assert torch.equal(experts, order.masked_fill(finished.unsqueeze(-1), shape[-1]).int())
        total = torch.Size(rows).numel()
        numbers = torch.arange(4) * total + torch.arange(total).unsqueeze(-1)
        assert torch.equal(row_idx, numbers.reshape(*rows, 4).int())
        # The weights of a finished row stay, and so does their gradient.
        g = torch.randn_like(y)
        y.backward(g)
        want.backward(g.double(), retain_graph=True)
        unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
        assert_ulp(x.grad, wide.grad, 0.51, "gradient", floor=16 * unit)


@pytest.mark.parametrize("renorm", [0, 1, None])
def test_gating_top_k_softmax_v2(renorm):
    x = distinct(6, 24, torch.float64).requires_grad_()
    finished = torch.arange(6) == 2
    want, order, s = plain(x, 4, renorm=bool(renorm))
    for ns in NAMESPACES:
        op = getattr(torch.ops, ns).npu_moe_gating_top_k_softmax_v2
        y, experts, softmax = op(x, k=4, finished=finished, renorm=renorm, output_softmax=True)
        torch.testing.assert_close(y, want)
        assert torch.equal(experts, order.masked_fill(finished.unsqueeze(-1), 24).int())
        assert softmax.shape == ((0,) if renorm else x.shape)
        if not renorm:
            torch.testing.assert_close(softmax, s)
            assert gradcheck(
                lambda x, op=op: op(x, k=4, finished=finished, output_softmax=True)[::2], (x,)
            )
        assert op(x, k=4)[2].shape == (0,)
        assert gradcheck(lambda x, op=op: op(x, k=4, finished=finished, renorm=renorm)[0], (x,))
    assert (
        ops.npu_moe_gating_top_k_softmax_v2(x.float(), output_softmax=True)[2].dtype
        == torch.float32
    )


@pytest.mark.parametrize("norm_type", [0, 1])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("biased", [False, True])
def test_gating_top_k(norm_type, mode, biased):
    x = distinct(6, 24, torch.float64, 3).requires_grad_()
    bias = torch.linspace(0.2, -0.2, 24, dtype=torch.float64) if biased else None
    want, order, s = plain(
        x, 3, "sigmoid" if norm_type else "softmax", norm_type == 1, bias, 6, 2, 2.5, 1e-20,
        score="top2" if mode else "max",
    )  # fmt: skip
    options = {
        "bias": bias, "k_group": 2, "group_count": 6, "group_select_mode": mode, "norm_type": norm_type,
        "routed_scaling_factor": 2.5,
    }  # fmt: skip
    for ns in NAMESPACES:
        op = getattr(torch.ops, ns).npu_moe_gating_top_k
        y, experts, norm_out = op(x, 3, **options)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(norm_out, s)  # without out_flag too
        assert torch.equal(experts, order.int())
        assert gradcheck(lambda x, op=op: op(x, 3, **options)[0], (x,))
        assert gradcheck(lambda x, op=op: op(x, 3, **options)[::2], (x,))
        g = torch.randn_like(y)
        backward = getattr(torch.ops, ns).npu_moe_gating_top_k_backward
        dx = backward(s.detach(), g, order, norm_type=norm_type, routed_scaling_factor=2.5)
        torch.testing.assert_close(dx, torch.autograd.grad(want, x, g, retain_graph=True)[0])
        assert backward(s.float(), g.bfloat16(), order.int()).dtype == torch.bfloat16
    assert ops.npu_moe_gating_top_k(x.bfloat16(), 3)[2].dtype == torch.float32


def test_the_bias_has_no_gradient():
    x, bias = distinct(4, 8).requires_grad_(), torch.zeros(8, requires_grad=True)
    ops.router_top_k(x, 2, bias=bias)[0].sum().backward()
    assert bias.grad is None and x.grad is not None


@pytest.mark.parametrize("count", [1, 2, 5])
def test_ties_are_in_order_for_every_thread_count(count):
    x = torch.randint(-2, 3, (600, 64)).bfloat16()
    with threads(count):
        _, indices, _ = ops.router_top_k(x, 9)
    assert torch.equal(indices, x.float().argsort(dim=-1, descending=True, stable=True)[:, :9])


def test_wide_weights_empty_and_all_experts():
    x = distinct(4, 8, torch.bfloat16)
    narrow, wide = (ops.router_top_k(x, 2, wide_weights=w)[0] for w in (False, True))
    assert wide.dtype == torch.float32 and torch.equal(wide.bfloat16(), narrow)
    w, i, s = ops.router_top_k(x.new_empty(0, 8).requires_grad_(), 2, output_scores=True)
    assert w.shape == i.shape == (0, 2) and s.shape == (0, 8)
    w.sum().backward()
    leaf = x.clone().requires_grad_()
    w, i, s = ops.router_top_k(leaf, 0, output_scores=True)
    assert w.shape == i.shape == (4, 0)
    (w.sum() + s.square().sum()).backward()
    right = x.float().requires_grad_()
    right.softmax(-1).square().sum().backward()
    torch.testing.assert_close(leaf.grad.float(), right.grad, rtol=2**-8, atol=1e-6)
    for finished in (None, torch.zeros(0, dtype=torch.bool)):
        y, e, r = ops.npu_moe_gating_top_k_softmax(x[:0], finished, 3)
        assert y.shape == e.shape == r.shape == (0, 3)
    assert ops.npu_moe_gating_top_k_softmax(x, k=0)[0].shape == (4, 0)
    w, i, _ = ops.router_top_k(x, 8, renorm=True)
    assert torch.equal(i.sort(-1)[0], torch.arange(8).expand(4, 8))


def test_nan_is_seen():
    x = distinct(3, 8)
    x[1, 5] = float("nan")
    w, i, _ = ops.router_top_k(x.requires_grad_(), 2, renorm=True)
    assert w[1].isnan().all() and i[1].tolist() == [0, 1] and w[[0, 2]].isfinite().all()
    w.sum().backward()
    assert x.grad[1].isnan().all() and x.grad[[0, 2]].isfinite().all()
    w, i, _ = ops.router_top_k(x.detach(), 2, scoring="sigmoid")
    assert i[1, 0] == 5 and w[1, 0].isnan() and w[1, 1].isfinite()


def test_layouts():
    x = distinct(6, 16, torch.bfloat16)
    want = ops.router_top_k(x, 4, output_scores=True)
    for view in strided_views(x).values():
        assert all(map(torch.equal, ops.router_top_k(view, 4, output_scores=True), want))
    leaf = x.clone().requires_grad_()
    y = ops.router_top_k(leaf, 4)[0]
    one = torch.tensor(1.0, dtype=y.dtype)
    (a,) = torch.autograd.grad(y, leaf, one.expand(6, 4), retain_graph=True)
    (b,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    assert torch.equal(a, b)


def test_compiles_in_one_graph():
    x = distinct(6, 16).requires_grad_()

    def run(x):
        a = ops.router_top_k(x, 4, renorm=True)[0]
        b = ops.npu_moe_gating_top_k(x, 4, norm_type=1)[0]
        return a + b + ops.npu_moe_gating_top_k_softmax_v2(x, k=4)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    (a,) = torch.autograd.grad(run(x).square().sum(), x)
    (b,) = torch.autograd.grad(compiled(x).square().sum(), x)
    assert torch.equal(a, b)


def test_autocast_leaves_the_arguments_alone():
    x = distinct(6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.router_top_k(x, 4)[0].dtype == torch.float32
        assert ops.npu_moe_gating_top_k_softmax(x, None, 4)[0].dtype == torch.float32


def test_errors():
    x = distinct(4, 12)
    for call, text in (
        (lambda: ops.router_top_k(x, 13), r"router_top_k: k must be in \[0, 12\].*got 13"),
        (lambda: ops.router_top_k(x, -1), r"router_top_k: k must not be negative, got -1"),
        (lambda: ops.router_top_k(x, 2, scoring="relu"), "router_top_k: scoring .* got 'relu'"),
        (lambda: ops.router_top_k(x, 2, n_group=5), "12 experts do not form 5 groups"),
        (lambda: ops.router_top_k(x, 2, n_group=4, topk_group=5), "5 of 4 groups"),
        (lambda: ops.router_top_k(x, 5, n_group=4, topk_group=1), "k = 5 exceeds the 3 experts"),
        (lambda: ops.router_top_k(x, 2, bias=torch.ones(3)), r"bias \[3\]"),
        (lambda: ops.router_top_k(x, 2, bias=torch.ones(12, device="meta")), "one device, got cpu and meta"),
        (lambda: ops.router_top_k(x.long(), 2), "got int64"),
        (lambda: ops.npu_moe_gating_top_k_softmax(x[0]), "The x should be 2D or 3D"),
        (lambda: ops.npu_moe_gating_top_k_softmax(x, k=13), r"The k should be in \[0, 12\], got 13"),
        (lambda: ops.npu_moe_gating_top_k_softmax(x.int()), "float16, float32 or bfloat16 tensor expected"),
        (lambda: ops.npu_moe_gating_top_k_softmax(x, torch.ones(4)), "bool tensor expected"),
        (lambda: ops.npu_moe_gating_top_k_softmax(x, x[:3, 0] > 0), "Input rows shoud be same."),
        (lambda: ops.npu_moe_gating_top_k_softmax_v2(x, renorm=2), "renorm must be 0 or 1, but got 2"),
        (lambda: ops.npu_moe_gating_top_k(x, 2, renorm=1), "renorm must be 0 .* got 1"),
        (lambda: ops.npu_moe_gating_top_k(x, 2, norm_type=2), "norm_type .* got 2"),
        (lambda: ops.npu_moe_gating_top_k(x, 2, group_select_mode=2), "group_select_mode .* got 2"),
        (lambda: ops.npu_moe_gating_top_k(x, 2, group_count=5), "12 experts do not form 5 groups"),
        (lambda: ops.npu_moe_gating_top_k(x, 2, bias=torch.ones(12).half()), "one dtype, got float16"),
        (
            lambda: ops.npu_moe_gating_top_k(x, 2, input_ids=torch.ones(4, dtype=torch.long)),
            r"hash routing is not supported, got input_ids \[4\]",
        ),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=text):
            call()
    s, g = x.softmax(-1), torch.ones(4, 2)
    for bad in (-1, 12, 13):
        indices = torch.tensor([[0, 1], [2, 3], [4, bad], [5, 6]])
        text = rf"npu_moe_gating_top_k_backward: expert {bad} of row 2 is not in \[0, 12\)"
        with pytest.raises(RuntimeError, match=text):
            ops.npu_moe_gating_top_k_backward(s, g, indices)


def test_call_counts():
    jumar.reset_call_counts()
    x = distinct(4, 8).requires_grad_()
    ops.router_top_k(x, 2)[0].sum().backward()
    ops.npu_moe_gating_top_k(x, 2)[0].sum().backward()
    counts = jumar.call_counts()
    for name in ("router_top_k", "npu_moe_gating_top_k"):
        assert counts[name] == counts[f"{name}_backward"] == 1


def test_signed_data_is_ordered_as_torch_orders_it():
    x = signed(64, 128, dtype=torch.float64, seed=5)[1:-1]
    for k in (1, 8, 100):
        values, indices = x.topk(k)
        got = ops.router_top_k(x, k)
        assert torch.equal(got[1], indices)
        torch.testing.assert_close(got[0], x.softmax(-1).gather(-1, indices))
        assert (values.diff(dim=-1) <= 0).all()
