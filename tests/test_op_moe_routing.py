"""npu_moe_init_routing, npu_moe_init_routing_v2 and npu_moe_re_routing through torch."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import (
    FLOAT_DTYPES,
    assert_schemas,
    assert_ulp,
    check_layouts_and_double_backward,
    expert_ids,
    signed,
)

jm = torch.ops.jumar


def columns(n, top_k):
    """row_idx[t, k] = k n + t"""
    return torch.arange(n * top_k, dtype=torch.int32).view(top_k, n).T.contiguous()


# --- init_routing ---


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("active", [0, 3, 6, 100])
def test_init_routing(dtype, active):
    x = signed(6, 9, dtype=dtype).requires_grad_()
    ids, row_idx = expert_ids(6, 3), columns(6, 3)
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
    ids = expert_ids(6, 2)
    expanded, index, _ = ops.npu_moe_init_routing(x, columns(6, 2), ids, 6)
    scales = torch.rand(6, 2, dtype=torch.float64)
    scales /= scales.sum(-1, keepdim=True)
    out = ops.npu_moe_finalize_routing(expanded, None, None, None, scales, index, ids)
    torch.testing.assert_close(out, x)
    expanded, index, _, _ = ops.npu_moe_init_routing_v2(x, ids, expert_num=5)
    out = ops.npu_moe_finalize_routing(expanded, None, None, None, scales, index, ids, 2)
    torch.testing.assert_close(out, x)


def test_init_routing_errors():
    x, ids, row_idx = torch.randn(4, 3), expert_ids(4, 2), columns(4, 2)
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
    ids = expert_ids(7, 3)
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
    x, ids = torch.randn(4, 3), expert_ids(4, 2, 3)
    for experts in (3, 7, 128):
        counts = ops.npu_moe_init_routing_v2(x, ids, expert_num=experts, expert_tokens_num_type=1)[
            2
        ]
        assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=experts))


@pytest.mark.parametrize("capacity", [1, 2, 4, 30])
def test_init_routing_v2_drops_and_pads(capacity):
    x, ids, scale = torch.randn(7, 3, requires_grad=True), expert_ids(7, 3, 4), torch.rand(7)
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
    x, ids = torch.randn(4, 3), expert_ids(4, 2)
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
        ((tokens[:5], counts), {}, "adds up to 6, but tokens has 5 rows"),
        ((torch.randn(7, 2), counts), {}, "adds up to 6, but tokens has 7 rows"),
        ((tokens, counts * 2**61), {}, "adds up to at least 9223372036854775807, but tokens has 6 rows"),
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
    x, ids, row_idx = torch.randn(4, 3, requires_grad=True), expert_ids(4, 2), columns(4, 2)
    counts = torch.tensor([[1, 2], [1, 0]])
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
        opcheck(op.npu_moe_re_routing.default, (x, counts), {"per_token_scales": torch.rand(4)})
        opcheck(op.npu_moe_re_routing.default, (x, counts))
    assert_schemas(
        {
            "npu_moe_init_routing": "(Tensor x, Tensor row_idx, Tensor expert_idx, int active_num) -> (Tensor, Tensor, Tensor)",
            "npu_moe_init_routing_v2": "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1, "
            "int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
            "bool expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[], "
            "int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
            "npu_moe_re_routing": "(Tensor tokens, Tensor expert_token_num_per_rank, *, Tensor? per_token_scales=None, "
            "int expert_token_num_type=1, int idx_type=0, int? tokens_dtype=None) "
            "-> (Tensor, Tensor, Tensor, Tensor)",
        }
    )
    opcheck(jm.moe_init_routing_grad.default, (torch.randn(8, 3), torch.arange(8), 4, True, 0))
    opcheck(jm.moe_re_routing_grad.default, (torch.randn(4, 3), torch.tensor([2, 0, 1, 3])))


def test_gradients_of_moves():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    ids = expert_ids(4, 2)
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
    x, ids, counts = signed(6, 8), expert_ids(6, 2), torch.tensor([[1, 2], [3, 0]])
    functions = {
        "npu_moe_init_routing": lambda t: ops.npu_moe_init_routing(t, columns(6, 2), ids, 6)[0],
        "npu_moe_re_routing": lambda t: ops.npu_moe_re_routing(t, counts)[0],
    }
    for name, f in functions.items():
        check_layouts_and_double_backward(name, f, x)
