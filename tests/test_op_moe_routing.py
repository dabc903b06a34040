"""npu_moe_init_routing, npu_moe_init_routing_v2, npu_moe_finalize_routing and npu_moe_re_routing through torch."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp, check_retain_graph, signed, strided_views

jm = torch.ops.jumar


def ids_of(n, top_k, experts=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, experts, (n, top_k), generator=generator, dtype=torch.int32)


def columns(n, top_k):
    """row_idx[t, k] = k n + t"""
    return torch.arange(n * top_k, dtype=torch.int32).view(top_k, n).T.contiguous()


# --- init_routing ---


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("active", [0, 3, 6, 100])
def test_init_routing(dtype, active):
    x = signed(6, 9, dtype=dtype).requires_grad_()
    ids, row_idx = ids_of(6, 3), columns(6, 3)
    expanded, index, experts = ops.npu_moe_init_routing(x, row_idx, ids, active)
    order = ids.flatten().argsort(stable=True)
    source = row_idx.flatten()[order]
    rows = min(active, 6) * 3
    assert torch.equal(expanded, x[source % 6][:rows])
    assert torch.equal(experts, ids.flatten()[order]) and experts.dtype == torch.int32
    assert (
        torch.equal(index[source], torch.arange(18, dtype=torch.int32))
        and index.dtype == torch.int32
    )
    grad = signed(rows, 9, dtype=dtype, seed=1)
    expanded.backward(grad)
    terms = grad.double()
    exact = torch.zeros(6, 9, dtype=torch.float64).index_add(0, (source % 6)[:rows], terms)
    size = torch.zeros(6, 9, dtype=torch.float64).index_add(0, (source % 6)[:rows], terms.abs())
    eps = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    assert_ulp(x.grad, exact, 0.51, "dx", floor=3 * eps * size)


def test_init_routing_then_finalize_is_the_identity():
    """With weights that add up to 1: the column convention of both operators."""
    x = torch.randn(6, 4, dtype=torch.float64)
    ids = ids_of(6, 2)
    expanded, index, _ = ops.npu_moe_init_routing(x, columns(6, 2), ids, 6)
    scales = torch.rand(6, 2, dtype=torch.float64)
    scales /= scales.sum(-1, keepdim=True)
    out = ops.npu_moe_finalize_routing(expanded, None, None, None, scales, index, ids)
    torch.testing.assert_close(out, x)
    expanded, index, _, _ = ops.npu_moe_init_routing_v2(x, ids, expert_num=5)
    out = ops.npu_moe_finalize_routing(expanded, None, None, None, scales, index, ids, 2)
    torch.testing.assert_close(out, x)


def test_init_routing_errors():
    x, ids, row_idx = torch.randn(4, 3), ids_of(4, 2), columns(4, 2)
    for arguments, text in (
        ((x[0], row_idx, ids, 4), "The dims of input x should be 2 dimensional"),
        ((x, row_idx, ids[:3], 4), r"expert_idx \[3, 2\] does not go with x"),
        ((x, row_idx[:3], ids, 4), r"row_idx \[3, 2\] must be like expert_idx \[4, 2\]"),
        ((x, row_idx, ids, -1), "active_num must be a non-negative number, got -1"),
        ((x, row_idx, ids - 9, 4), r"expert_idx -\d at position \[0, 0\]"),
        ((x, row_idx + 1, ids, 4), "row_idx 8 at position"),
        ((x, row_idx * 0, ids, 4), r"row_idx 0 occurs twice, again at position \[0, 1\]"),
        ((x, row_idx, ids.float(), 4), "expert_idx must be int32 or int64"),
    ):
        with pytest.raises(RuntimeError, match="npu_moe_init_routing: .*" + text):
            ops.npu_moe_init_routing(*arguments)


# --- init_routing_v2 ---


def v2_oracle(x, ids, start, end, active=-1):
    """expanded_x, slot -> row, order"""
    flat = ids.flatten().long()
    inside = (flat >= start) & (flat < end)
    order = torch.where(inside, flat, 1 << 40).argsort(stable=True)[: int(inside.sum())]
    rows = flat.numel() if active <= 0 else min(active, flat.numel())
    expanded = torch.zeros(rows, x.shape[1], dtype=x.dtype)
    kept = order[:rows]
    expanded[: len(kept)] = x[kept // ids.shape[1]]
    index = torch.full((flat.numel(),), -1)
    index[kept] = torch.arange(len(kept))
    return expanded, index, order


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("bounds", [(0, 5), (1, 3), (2, 5), (4, 5)], ids=str)
@pytest.mark.parametrize("active", [-1, 0, 4, 100])
def test_init_routing_v2(dtype, bounds, active):
    x = signed(7, 9, dtype=dtype).requires_grad_()
    ids = ids_of(7, 3)
    scale = torch.rand(7)
    options = {"expert_num": 5, "active_expert_range": list(bounds), "active_num": active}
    right, slots, order = v2_oracle(x.detach(), ids, *bounds, active)
    counts = torch.bincount(ids.flatten(), minlength=5)[bounds[0] : bounds[1]]
    for row_idx_type in (0, 1):
        expanded, index, cumulative, moved = ops.npu_moe_init_routing_v2(
            x, ids, scale=scale, row_idx_type=row_idx_type, **options
        )
        assert torch.equal(expanded, right) and expanded.dtype == dtype
        if row_idx_type == 0:
            assert torch.equal(index.long(), slots)
        else:
            assert (
                torch.equal(index[: len(order)].long(), order) and (index[len(order) :] == -1).all()
            )
        assert torch.equal(cumulative, counts.cumsum(0)) and cumulative.dtype == torch.int64
        kept = order[: len(expanded)]
        assert torch.equal(moved[: len(kept)], scale[kept // 3]) and (moved[len(kept) :] == 0).all()
        grad = signed(*expanded.shape, dtype=dtype, seed=1)
        (dx,) = torch.autograd.grad(expanded, x, grad)
        exact, size = torch.zeros(2, 7, 9, dtype=torch.float64)
        exact = exact.index_add(0, kept // 3, grad.double()[: len(kept)])
        size = size.index_add(0, kept // 3, grad.double()[: len(kept)].abs())
        eps = 2.0**-53 if dtype == torch.float64 else 2.0**-24
        assert_ulp(dx, exact, 0.51, "dx", floor=3 * eps * size)
    assert torch.equal(
        ops.npu_moe_init_routing_v2(x, ids, expert_tokens_num_type=1, **options)[2], counts
    )
    pairs = ops.npu_moe_init_routing_v2(x, ids, expert_tokens_num_type=2, **options)[2]
    present = [[bounds[0] + e, c] for e, c in enumerate(counts.tolist()) if c]
    assert pairs.tolist() == present + [[0, 0]] * (5 - len(present))


def test_the_default_range_is_that_of_each_call():
    x, ids = torch.randn(4, 3), ids_of(4, 2, 3)
    for experts in (3, 7, 128):
        counts = ops.npu_moe_init_routing_v2(x, ids, expert_num=experts, expert_tokens_num_type=1)[
            2
        ]
        assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=experts))


@pytest.mark.parametrize("capacity", [1, 2, 4, 30])
def test_init_routing_v2_drops_and_pads(capacity):
    x, ids, scale = torch.randn(7, 3, requires_grad=True), ids_of(7, 3, 4), torch.rand(7)
    expanded, index, counts, moved = ops.npu_moe_init_routing_v2(
        x,
        ids,
        scale=scale,
        expert_num=5,
        expert_capacity=capacity,
        drop_pad_mode=1,
        expert_tokens_num_type=1,
    )
    assert expanded.shape == (5, capacity, 3) and moved.shape == (5 * capacity,)
    right, rows = torch.zeros(5, capacity, 3), torch.full((21,), -1, dtype=torch.int32)
    scales, source = torch.zeros(5 * capacity), []
    for expert in range(5):
        slots = (ids.flatten() == expert).nonzero().flatten()[:capacity]
        for c, slot in enumerate(slots.tolist()):
            right[expert, c] = x.detach()[slot // 3]
            rows[slot] = expert * capacity + c
            scales[expert * capacity + c] = scale[slot // 3]
            source.append(slot // 3)
    assert torch.equal(expanded, right) and torch.equal(index, rows) and torch.equal(moved, scales)
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=5))
    expanded.sum().backward()
    assert torch.equal(x.grad[:, 0], torch.bincount(torch.tensor(source), minlength=7).float())


def test_init_routing_v2_errors():
    x, ids = torch.randn(4, 3), ids_of(4, 2)
    for options, text in (
        ({}, r"active_expert_range \[0, -1\) holds no expert .* expert_num -1"),
        ({"active_expert_range": [3, 2]}, r"\[3, 2\) holds no expert"),
        ({"active_expert_range": [-1, 2]}, r"\[-1, 2\) holds no expert"),
        ({"expert_num": 5, "active_expert_range": [3, 7]}, r"\[3, 7\) is not within expert_num 5"),
        ({"expert_num": 5, "quant_mode": 0}, "quantisation is not supported, got quant_mode 0"),
        ({"expert_num": 5, "offset": x}, "offset and x_dtype"),
        ({"expert_num": 5, "x_dtype": 1}, "offset and x_dtype"),
        ({"expert_num": 5, "drop_pad_mode": 2}, "drop_pad_mode must be 0 or 1, got 2"),
        ({"expert_num": 5, "drop_pad_mode": 1}, "drop_pad_mode 1 needs expert_capacity, got -1"),
        (
            {"expert_num": 5, "expert_tokens_num_type": 3},
            "expert_tokens_num_type must be 0, 1 or 2, got 3",
        ),
        ({"active_expert_range": [0, 5], "expert_tokens_num_type": 2}, "needs expert_num, got -1"),
        ({"expert_num": 5, "row_idx_type": 2}, "row_idx_type must be 0 or 1, got 2"),
        ({"expert_num": 5, "scale": torch.rand(3)}, r"scale must be \[4\], got \[3\]"),
        (
            {
                "expert_num": 5,
                "drop_pad_mode": 1,
                "expert_capacity": 2,
                "active_expert_range": [1, 5],
            },
            r"takes all experts, got active_expert_range \[1, 5\)",
        ),
        (
            {"expert_num": 5, "drop_pad_mode": 1, "expert_capacity": 2, "row_idx_type": 1},
            "takes row_idx_type 0",
        ),
        ({"expert_num": 5, "scale": torch.rand(4, requires_grad=True)}, "scale has no gradient"),
    ):
        with pytest.raises(RuntimeError, match="npu_moe_init_routing_v2: .*" + text):
            ops.npu_moe_init_routing_v2(x, ids, **options)
    with pytest.raises(
        RuntimeError, match=r"npu_moe_init_routing_v2: expert_idx must not be below 0, got -"
    ):
        ops.npu_moe_init_routing_v2(x, ids - 9, expert_num=5)


# --- finalize_routing ---


def finalize64(rows, skip1, skip2, bias, scales, index, ids, mode, k):
    """The result, and the sum of its terms' magnitudes."""
    rows = rows.flatten(0, -2)
    top_k = scales.shape[1] if scales is not None else k
    n = len(index) // top_k
    slot = index.view(n, top_k) if mode >= 2 else index.view(top_k, n).T
    picked = torch.where(slot.unsqueeze(-1) >= 0, rows[slot.clamp(min=0).long()], 0.0)
    weights = torch.ones(n, top_k, dtype=rows.dtype) if scales is None else scales
    terms = [picked * weights.unsqueeze(-1)]
    if bias is not None:
        terms.append(bias[ids.long()] * weights.unsqueeze(-1))
    value, size = sum(t.sum(1) for t in terms), sum(t.abs().sum(1) for t in terms)
    for skip in (skip1, skip2):
        if skip is not None:
            value, size = value + skip, size + skip.abs()
    return value, size


def finalize_inputs(dtype, scales_dtype, n=6, top_k=3, width=9, dropped=False):
    generator = torch.Generator().manual_seed(5)
    index = torch.randperm(n * top_k, generator=generator).int()
    if dropped:
        index[::4] = -1
    return {
        "rows": signed(n * top_k, width, dtype=dtype),
        "skip1": signed(n, width, dtype=dtype, seed=1),
        "skip2": signed(n, width, dtype=dtype, seed=2),
        "bias": signed(5, width, dtype=dtype, seed=3),
        "scales": signed(n, top_k, dtype=scales_dtype, seed=4),
        "index": index,
        "ids": ids_of(n, top_k),
    }


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_finalize_routing(dtype, scales_dtype, mode):
    inputs = finalize_inputs(dtype, scales_dtype, dropped=mode % 2 == 1)
    eps = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    for left_out in ((), ("skip2",), ("skip1", "skip2"), ("bias",), ("skip1", "skip2", "bias")):
        given = {
            k: None if k in left_out else v.clone().requires_grad_() if v.is_floating_point() else v
            for k, v in inputs.items()
        }
        out = ops.npu_moe_finalize_routing(*given.values(), mode)
        assert out.dtype == dtype
        wide = [
            v if v is None or not v.is_floating_point() else v.detach().double()
            for v in given.values()
        ]
        exact, size = finalize64(*wide, mode, None)
        assert_ulp(out.detach(), exact, 0.51, str(left_out), floor=10 * eps * size)
        grad = signed(6, 9, dtype=dtype, seed=7)
        out.backward(grad)
        leaves = [w if w is None or not w.is_floating_point() else w.requires_grad_() for w in wide]
        finalize64(*leaves, mode, None)[0].backward(grad.double())
        for name, leaf in zip(given, leaves, strict=True):
            if leaf is None or not leaf.is_floating_point():
                continue
            got = given[name].grad
            assert got.dtype == given[name].dtype
            # Terms: at most 18 products of values below 4, and the rounding of each.
            assert_ulp(got, leaf.grad, 0.51, name, floor=24 * eps * 18 * 16)


def test_finalize_without_scales():
    x, index, ids = torch.randn(6, 4), torch.tensor([5, 3, 1, 0, 2, 4]), ids_of(3, 2)
    out = ops.npu_moe_finalize_routing(x, None, None, None, None, index, None, 0, 2)
    torch.testing.assert_close(out, x[index.view(2, 3).T].sum(1))
    out = ops.npu_moe_finalize_routing(x.view(2, 3, 4), None, None, None, None, index, None, 2, 2)
    torch.testing.assert_close(out, x[index.view(3, 2)].sum(1))
    out = ops.npu_moe_finalize_routing(x, x, None, None, None, index, None)
    assert torch.equal(out, x + x[index])
    bias = torch.randn(5, 4)
    out = ops.npu_moe_finalize_routing(x, None, None, bias, None, index, ids, None, 2)
    torch.testing.assert_close(out, x[index.view(2, 3).T].sum(1) + bias[ids.long()].sum(1))


def test_finalize_gradcheck():
    inputs = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in finalize_inputs(torch.float64, torch.float64, dropped=True).items()}  # fmt: skip
    floats = [v for v in inputs.values() if v.is_floating_point()]
    for mode in (0, 3):
        assert gradcheck(
            lambda *t, m=mode: ops.npu_moe_finalize_routing(*t, inputs["index"], inputs["ids"], m),
            floats,
        )
    index = torch.arange(6)
    assert gradcheck(
        lambda r: ops.npu_moe_finalize_routing(r, None, None, None, None, index, None, 0, 2),
        (floats[0].detach()[:6].requires_grad_(),),
    )


def test_finalize_errors():
    i = finalize_inputs(torch.float32, torch.float32)

    def call(**changed):
        return ops.npu_moe_finalize_routing(*(i | changed).values())

    for changed, text in (
        ({"rows": i["rows"][0]}, "expanded_permuted_rows must have at least 2 dimensions"),
        ({"skip1": None}, "skip2 needs skip1"),
        ({"skip1": i["skip1"].bfloat16()}, "skip1 must be float32, got bfloat16"),
        ({"skip1": i["skip1"][:5]}, r"skip1 \[5, 9\] does not go with 6 tokens"),
        (
            {"bias": i["bias"][:, :4]},
            r"bias \[5, 4\] does not go with expanded_permuted_rows \[18, 9\]",
        ),
        ({"ids": None}, r"bias \[5, 9\] needs export_for_source_row"),
        ({"ids": i["ids"] + 4}, r"export_for_source_row \d at position .* is not in \[0, 5\)"),
        ({"ids": i["ids"][:4]}, r"export_for_source_row must be \[6, 3\], got \[4, 3\]"),
        (
            {"scales": i["scales"][:4]},
            r"18 elements of expanded_src_to_dst_row do not go with k 3 and scales \[4, 3\]",
        ),
        (
            {"index": i["index"] + 1},
            r"expanded_src_to_dst_row 18 at position .* is not in \[-1, 18\)",
        ),
        ({"index": i["index"] - 2}, "expanded_src_to_dst_row -2 at"),
        ({"index": i["index"].float()}, "must be int32 or int64, got float32"),
    ):
        with pytest.raises(RuntimeError, match="npu_moe_finalize_routing: .*" + text):
            call(**changed)
    for mode, k, text in (
        (4, 1, "drop_pad_mode must be 0, 1, 2 or 3, got 4"),
        (0, 0, "k must be positive, got 0"),
    ):
        with pytest.raises(RuntimeError, match="npu_moe_finalize_routing: " + text):
            ops.npu_moe_finalize_routing(
                i["rows"], None, None, None, None, i["index"], None, mode, k
            )


# --- re_routing ---


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("counts_dtype", [torch.int32, torch.int64], ids=str)
def test_re_routing(dtype, counts_dtype):
    counts = torch.tensor([[1, 2, 1], [2, 1, 3]], dtype=counts_dtype)
    tokens, scales = signed(10, 5, dtype=dtype).requires_grad_(), torch.rand(10)
    permuted, moved, index, totals = ops.npu_moe_re_routing(tokens, counts, per_token_scales=scales)
    assert index.tolist() == [0, 4, 5, 1, 2, 6, 3, 7, 8, 9] and index.dtype == torch.int32
    assert totals.tolist() == [3, 3, 4] and totals.dtype == counts_dtype
    assert torch.equal(permuted, tokens[index]) and torch.equal(moved, scales[index])
    grad = signed(10, 5, dtype=dtype, seed=1)
    permuted.backward(grad)
    assert torch.equal(tokens.grad[index], grad)
    assert ops.npu_moe_re_routing(tokens, counts)[1].shape == (0,)
    empty = ops.npu_moe_re_routing(tokens[:0], torch.zeros(2, 3, dtype=counts_dtype))
    assert empty[0].shape == (0, 5) and empty[3].tolist() == [0, 0, 0]


def test_re_routing_errors():
    counts, tokens = torch.tensor([[1, 2], [2, 1]]), torch.randn(6, 2)
    for arguments, options, text in (
        ((tokens[0], counts), {}, "The dims of input tokens should be 2 dimensional"),
        (
            (tokens, counts[0]),
            {},
            "The dims of input expert_token_num_per_rank should be 2 dimensional",
        ),
        ((tokens[:5], counts), {}, "adds up to more than the 5 rows"),
        ((torch.randn(7, 2), counts), {}, "adds up to 6, but tokens has 7 rows"),
        ((tokens, counts * 2**61), {}, "adds up to more than the 6 rows"),
        (
            (tokens, counts - 2),
            {},
            r"expert_token_num_per_rank must not be below 0, got -1 at position \[0, 0\]",
        ),
        ((tokens, counts.float()), {}, "must be int32 or int64, got float32"),
        ((tokens, counts), {"expert_token_num_type": 0}, "expert_token_num_type must be 1, got 0"),
        ((tokens, counts), {"idx_type": 1}, "idx_type must be 0, got 1"),
        ((tokens, counts), {"tokens_dtype": 1}, "tokens_dtype is not supported, got 1"),
        (
            (tokens, counts),
            {"per_token_scales": torch.rand(5)},
            r"per_token_scales must be \[6\], got \[5\]",
        ),
        (
            (tokens, counts),
            {"per_token_scales": torch.rand(6, requires_grad=True)},
            "has no gradient",
        ),
    ):
        with pytest.raises(RuntimeError, match="npu_moe_re_routing: .*" + text):
            ops.npu_moe_re_routing(*arguments, **options)


# --- all of them ---


def test_opcheck_and_schemas():
    x, ids, row_idx = torch.randn(4, 3, requires_grad=True), ids_of(4, 2), columns(4, 2)
    counts = torch.tensor([[1, 2], [1, 0]])
    f = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in finalize_inputs(torch.float32, torch.float32).items()}  # fmt: skip
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns)
        opcheck(op.npu_moe_init_routing.default, (x, row_idx, ids, 3))
        for options in (
            {"expert_num": 5},
            {
                "active_expert_range": [1, 4],
                "active_num": 3,
                "row_idx_type": 1,
                "scale": torch.rand(4),
            },
            {
                "expert_num": 5,
                "drop_pad_mode": 1,
                "expert_capacity": 2,
                "expert_tokens_num_type": 2,
            },
        ):
            opcheck(op.npu_moe_init_routing_v2.default, (x, ids), options)
        opcheck(op.npu_moe_finalize_routing.default, tuple(f.values()))
        opcheck(
            op.npu_moe_finalize_routing.default,
            (f["rows"], None, None, None, None, f["index"], None, 2, 3),
        )
        opcheck(op.npu_moe_re_routing.default, (x, counts), {"per_token_scales": torch.rand(4)})
        opcheck(op.npu_moe_re_routing.default, (x, counts))
        for name, schema in (
            (
                "npu_moe_init_routing",
                "(Tensor x, Tensor row_idx, Tensor expert_idx, int active_num) -> (Tensor, Tensor, Tensor)",
            ),
            (
                "npu_moe_init_routing_v2",
                "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1, "
                "int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
                "bool expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[], "
                "int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
            ),
            (
                "npu_moe_finalize_routing",
                "(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, Tensor? scales, "
                "Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, int? k=1) "
                "-> Tensor",
            ),
            (
                "npu_moe_re_routing",
                "(Tensor tokens, Tensor expert_token_num_per_rank, *, Tensor? per_token_scales=None, "
                "int expert_token_num_type=1, int idx_type=0, int? tokens_dtype=None) "
                "-> (Tensor, Tensor, Tensor, Tensor)",
            ),
        ):
            assert str(getattr(op, name).default._schema) == f"{ns}::{name}{schema}"
    plain = {k: v.detach() for k, v in f.items()}
    opcheck(jm.moe_init_routing_grad.default, (torch.randn(8, 3), torch.arange(8), 4, True, 0))
    opcheck(
        jm.moe_finalize_routing_grad.default,
        (torch.randn(6, 9), *(plain[k] for k in ("rows", "bias", "scales", "index", "ids")), 0, 1),
    )
    opcheck(jm.moe_re_routing_grad.default, (torch.randn(4, 3), torch.tensor([2, 0, 1, 3])))


def test_gradients_of_moves():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    ids = ids_of(4, 2)
    for active in (0, 2, 9):
        assert gradcheck(
            lambda t, a=active: ops.npu_moe_init_routing(t, columns(4, 2), ids, a)[0], (x,)
        )
    for options in (
        {"expert_num": 5},
        {"expert_num": 5, "active_expert_range": [1, 4], "row_idx_type": 1, "active_num": 3},
        {"expert_num": 5, "drop_pad_mode": 1, "expert_capacity": 2},
    ):
        assert gradcheck(lambda t, o=options: ops.npu_moe_init_routing_v2(t, ids, **o)[0], (x,))
    counts = torch.tensor([[1, 2], [1, 0]])
    assert gradcheck(lambda t: ops.npu_moe_re_routing(t, counts)[0], (x,))


def test_layouts_retain_graph_and_double_backward():
    x, ids, counts = signed(6, 8), ids_of(6, 2), torch.tensor([[1, 2], [3, 0]])
    functions = {
        "moe_init_routing_grad": lambda t: ops.npu_moe_init_routing(t, columns(6, 2), ids, 6)[0],
        "moe_re_routing_grad": lambda t: ops.npu_moe_re_routing(t, counts)[0],
        "moe_finalize_routing_grad": lambda t: ops.npu_moe_finalize_routing(
            t, None, None, None, None, torch.tensor([5, 4, 0, 2, 1, 3]), None, 2, 3
        ),
    }
    for name, f in functions.items():
        want = f(x)
        for layout in strided_views(x).values():
            assert torch.equal(f(layout), want)
        check_retain_graph(f, x)
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(f(leaf).square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match=f"{name}: not differentiable"):
            dx.sum().backward()
        f(leaf).sum().backward()  # a stride-0 gradient
        assert torch.equal(leaf.grad, torch.autograd.grad(f(leaf), leaf, torch.ones_like(want))[0])


def test_same_bits_for_every_thread_count():
    inputs = finalize_inputs(torch.bfloat16, torch.float32, n=300, top_k=4, width=65)
    x, ids = inputs["rows"][:300], inputs["ids"]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            expanded, index, counts, _ = ops.npu_moe_init_routing_v2(x, ids, expert_num=5)
            out = ops.npu_moe_finalize_routing(*inputs.values())
            rest = [inputs[k] for k in ("rows", "bias", "scales", "index", "ids")]
            grads = jm.moe_finalize_routing_grad(x, *rest, 0, 1)
            results.append((expanded, index, counts, out, *grads))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
