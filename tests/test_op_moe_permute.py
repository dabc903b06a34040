"""npu_moe_token_permute, npu_moe_token_unpermute and their gradients through torch."""

from __future__ import annotations

from functools import partial

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
    expert_ids,
    signed,
    strided_views,
)

jm = torch.ops.jumar
EPS = {torch.float64: 2.0**-53}
ids_of = partial(expert_ids, dtype=torch.int64)


def rows_of(ids):
    """slot -> row"""
    return ids.flatten().argsort(stable=True).argsort()


def kept_rows(slots, n):
    return slots if not n else min(n, slots) if n > 0 else slots + n


def permute64(tokens, ids, n=None):
    order = ids.flatten().argsort(stable=True)
    top_k = 1 if ids.dim() == 1 else ids.shape[1]
    return tokens[order[: kept_rows(ids.numel(), n)] // top_k]


def unpermute64(permuted, rows, probs):
    """With the sum of the terms' magnitudes."""
    padded = torch.cat(
        (permuted, permuted.new_zeros(max(0, len(rows) - len(permuted)), permuted.shape[1]))
    )
    terms = padded[rows.long()].view(*probs.shape, -1) * probs.unsqueeze(-1)
    return terms.sum(1), terms.abs().sum(1)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("n", [None, 0, 4, 18, 100, -5, -18])
def test_permute_is_exact(dtype, n):
    tokens = signed(6, 9, dtype=dtype)
    for index_dtype in (torch.int32, torch.int64):
        for ids in (ids_of(6, 3, dtype=index_dtype), ids_of(6, 1, dtype=index_dtype)[:, 0]):
            if n is not None and -n > ids.numel():
                continue
            permuted, rows = ops.npu_moe_token_permute(tokens, ids, n)
            assert rows.dtype == torch.int32 and torch.equal(rows.long(), rows_of(ids))
            assert permuted.dtype == dtype and torch.equal(permuted, permute64(tokens, ids, n))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("probs_dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("n", [None, 17])
def test_values_and_gradients_of_every_mix(dtype, probs_dtype, n):
    ids = ids_of(10, 3)
    tokens = signed(10, 33, dtype=dtype).requires_grad_()
    probs = signed(10, 3, dtype=probs_dtype, seed=1).requires_grad_()
    grad = signed(10, 33, dtype=dtype, seed=2)
    permuted, rows = ops.npu_moe_token_permute(tokens, ids, n)
    middle = permuted.detach().requires_grad_()
    out = ops.npu_moe_token_unpermute(middle, rows, probs)
    assert out.dtype == dtype
    out.backward(grad)
    assert middle.grad.dtype == dtype and probs.grad.dtype == probs_dtype

    eps = EPS.get(dtype, 2.0**-24)
    # Where probs carry more than the compute type their own rounding comes on top.
    exact, size = unpermute64(middle.detach().double(), rows, probs.detach().double())
    assert_ulp(out.detach(), exact, 0.51, "out", floor=7 * eps * size)
    kept = (rows < len(permuted)).view(10, 3)
    g = grad.double().unsqueeze(1)
    spread = (g * probs.detach().double().unsqueeze(-1)).flatten(0, 1)
    exact = torch.zeros(len(permuted), 33, dtype=torch.float64)
    exact[rows.long()[kept.flatten()]] = spread[kept.flatten()]
    assert_ulp(middle.grad, exact, 0.51, "d permuted", floor=2 * eps * exact.abs())
    read = torch.zeros(30, 33, dtype=torch.float64)
    read[kept.flatten()] = middle.detach().double()[rows.long()[kept.flatten()]]
    terms = g * read.view(10, 3, 33)
    assert_ulp(probs.grad, terms.sum(-1), 0.51, "d probs", floor=33 * eps * terms.abs().sum(-1))
    permuted.backward(middle.grad)
    back = torch.zeros(30, 33, dtype=torch.float64)
    back[kept.flatten()] = middle.grad.double()[rows.long()[kept.flatten()]]
    back = back.view(10, 3, 33)
    assert_ulp(tokens.grad, back.sum(1), 0.51, "d tokens", floor=3 * eps * back.abs().sum(1))


def test_the_vendors_example_and_one_that_is_not_its_own_inverse():
    x = torch.arange(4.0).view(4, 1)
    assert ops.npu_moe_token_permute(x, torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]]))[1].tolist() == [
        0, 5, 6, 4, 7, 3, 1, 2,
    ]  # fmt: skip
    x = torch.arange(1.0, 4.0).view(3, 1)
    permuted, rows = ops.npu_moe_token_permute(x, torch.tensor([[2, 0], [0, 2], [1, 0]]))
    assert rows.tolist() == [4, 0, 1, 5, 3, 2]
    assert permuted.flatten().tolist() == [1, 2, 3, 3, 1, 2]
    experts = permuted * torch.arange(1.0, 7.0).view(6, 1)
    probs = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
    # 7.75, 8.5 and 1 by the order instead of its inverse
    assert ops.npu_moe_token_unpermute(experts, rows, probs).flatten().tolist() == [2, 8, 12]


def test_sums_are_kept_in_fp32():
    rows = torch.ones(8, 4, dtype=torch.bfloat16)
    rows[0] = 256
    index = torch.arange(8, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        out = ops.npu_moe_token_unpermute(rows, index, torch.ones(1, 8, dtype=dtype))
        assert (out == 264).all()  # 256 where each 1 is lost
    tokens = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    permuted, _ = ops.npu_moe_token_permute(tokens, torch.arange(8).view(1, 8))
    permuted.backward(rows)
    assert (tokens.grad == 264).all()


def test_round_trip_and_probs_none():
    tokens = signed(7, 5, dtype=torch.bfloat16)
    ids = ids_of(7, 1)
    permuted, rows = ops.npu_moe_token_permute(tokens, ids)
    assert torch.equal(ops.npu_moe_token_unpermute(permuted, rows), tokens)
    ids = ids_of(7, 3)
    permuted, rows = ops.npu_moe_token_permute(tokens, ids)
    plain = ops.npu_moe_token_unpermute(permuted, rows)  # slot by slot, not summed
    assert torch.equal(plain, tokens.repeat_interleave(3, 0))
    inner, kept = jm._npu_moe_token_unpermute(permuted, rows)
    assert torch.equal(inner, plain) and kept is None
    # Special values move bit for bit.
    bits = torch.tensor([[0x7FC1, 0x7F80, 0x8000, 0xFF81, 0x0001]] * 7, dtype=torch.int32)
    odd = bits.to(torch.int16).view(torch.bfloat16)
    moved, rows = ops.npu_moe_token_permute(odd, ids)
    assert torch.equal(moved.view(torch.int16), bits.to(torch.int16).repeat(3, 1))


def test_rows_that_nothing_addresses_have_no_gradient():
    permuted = torch.full((5, 3), float("nan"))
    permuted[1:3] = 1.0
    permuted.requires_grad_()
    probs = torch.rand(2, 1, requires_grad=True)
    index = torch.tensor([2, 1], dtype=torch.int32)
    out = ops.npu_moe_token_unpermute(permuted, index, probs)
    out.sum().backward()
    assert not out.isnan().any() and (permuted.grad[[0, 3, 4]] == 0).all()
    assert torch.equal(probs.grad, torch.full((2, 1), 3.0))


def test_what_is_saved():
    def saved(probs):
        kept = []
        permuted, index = torch.randn(6, 4, requires_grad=True), torch.arange(6, dtype=torch.int32)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.data_ptr()), lambda t: t
        ):
            ops.npu_moe_token_unpermute(permuted, index, probs)
        return permuted.data_ptr() in kept

    assert not saved(None)
    assert saved(torch.ones(3, 2, requires_grad=True))


def test_gradcheck():
    tokens = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    ids = ids_of(5, 3)
    for n in (None, 0, 4, 18, 100, -5):
        assert gradcheck(lambda t, n=n: ops.npu_moe_token_permute(t, ids, n)[0], (tokens,))
    assert gradcheck(lambda t: ops.npu_moe_token_permute(t, ids[:, 0])[0], (tokens,))
    for rows in (rows_of(ids), rows_of(ids).int()):
        permuted = torch.randn(15, 4, dtype=torch.float64, requires_grad=True)
        for op in (ops.npu_moe_token_unpermute, lambda *a: jm._npu_moe_token_unpermute(*a)[0]):
            assert gradcheck(lambda p, w, f=op, i=rows: f(p, i, w), (permuted, probs))
            assert gradcheck(lambda p, f=op, i=rows: f(p, i), (permuted,))
        short = permuted.detach()[:9].requires_grad_()
        assert gradcheck(lambda p, w, i=rows: ops.npu_moe_token_unpermute(p, i, w), (short, probs))
    twice = torch.tensor([0, 1, 1, 0, 1, 3])  # rows that several slots share
    permuted = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda p, w: ops.npu_moe_token_unpermute(p, twice, w), (permuted, weights))


def test_opcheck():
    ids = ids_of(4, 2)
    tokens = torch.randn(4, 6, requires_grad=True)
    permuted = torch.randn(8, 6, requires_grad=True)
    rows = rows_of(ids).int()
    probs = torch.rand(4, 2, requires_grad=True)
    grad, plain = torch.randn(4, 6), permuted.detach()
    weights = probs.detach()
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns)
        for extra in ((), (3,), (-3,)):
            opcheck(op.npu_moe_token_permute.default, (tokens, ids, *extra))
        opcheck(op.npu_moe_token_permute.default, (tokens, ids[:, 0]))
        for name in ("npu_moe_token_unpermute", "_npu_moe_token_unpermute"):
            opcheck(getattr(op, name).default, (permuted, rows, probs))
            opcheck(getattr(op, name).default, (permuted, rows))
        opcheck(op.npu_moe_token_permute_grad.default, (grad, plain, ids, rows))
        opcheck(op.npu_moe_token_permute_grad_v2.default, (plain, rows, 4, torch.float32, 2))
        opcheck(op.npu_moe_token_unpermute_grad.default, (plain, grad, rows, weights))
        opcheck(op.npu_moe_token_unpermute_grad.default, (plain, plain, rows))
        v2 = op.npu_moe_token_unpermute_grad_v2.default
        opcheck(v2, (grad, rows, 8, torch.float32, weights, False, None, plain))
        opcheck(v2, (plain, rows, 8, torch.float32))
    opcheck(jm.expert_counts.default, (ids, 5))


def test_schemas_are_the_vendors():
    right = {
        "npu_moe_token_permute": "(Tensor tokens, Tensor indices, int? num_out_tokens=None, "
        "bool padded_mode=False) -> (Tensor, Tensor)",
        "npu_moe_token_permute_grad_v2": "(Tensor grad_permuted_tokens, Tensor sorted_indices, int tokens_size_0, "
        "ScalarType tokens_dtype, int num_topK, bool padded_mode=False) -> Tensor",
        "npu_moe_token_unpermute": "(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
        "_npu_moe_token_unpermute": "(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None) -> "
        "(Tensor unpermuted_tokens, Tensor permuted_tokens_for_backward)",
        "npu_moe_token_unpermute_grad_v2": "(Tensor grad_unpermuted_tokens, Tensor sorted_indices, "
        "int permuted_tokens_size_0, ScalarType permuted_tokens_dtype, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None, Tensor? permuted_tokens=None) -> (Tensor, Tensor)",
    }
    assert_schemas(right)


def test_strides_and_expanded_gradients():
    tokens, ids = signed(6, 10), ids_of(6, 3)
    permuted, rows = ops.npu_moe_token_permute(tokens, ids)
    probs = signed(6, 3, seed=1)
    out = ops.npu_moe_token_unpermute(permuted, rows, probs)
    grads = jm.npu_moe_token_unpermute_grad(permuted, tokens, rows, probs)
    dtokens = jm.npu_moe_token_permute_grad(tokens, permuted, ids, rows)
    for (name, x), p, w, i in zip(
        strided_views(tokens).items(),
        strided_views(permuted).values(),
        strided_views(probs).values(),
        (ids, ids.T.contiguous().T, torch.stack((ids, ids), -1)[..., 0], ids.int()),
        strict=True,
    ):
        got, index = ops.npu_moe_token_permute(x, i)
        assert torch.equal(got, permuted) and torch.equal(index, rows), name
        wide = torch.stack((rows, rows), -1)[:, 0]
        assert torch.equal(ops.npu_moe_token_unpermute(p, wide, w), out), name
        ours = jm.npu_moe_token_unpermute_grad(p, x, wide, w)
        assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True)), name
        assert torch.equal(jm.npu_moe_token_permute_grad(x, p, i, wide), dtokens), name
    leaves = [t.clone().requires_grad_() for t in (tokens, probs)]
    permuted, rows = ops.npu_moe_token_permute(leaves[0], ids)
    ops.npu_moe_token_unpermute(permuted, rows, leaves[1]).sum().backward()
    ones = torch.ones(6, 10)
    dpermuted, dprobs = jm.npu_moe_token_unpermute_grad(permuted.detach(), ones, rows, probs)
    assert torch.equal(leaves[1].grad, dprobs)
    assert torch.equal(leaves[0].grad, jm.npu_moe_token_permute_grad(tokens, dpermuted, ids, rows))


def test_empty():
    for tokens, top_k, width in ((0, 2, 8), (3, 2, 0), (3, 0, 4)):
        x = torch.empty(tokens, width, requires_grad=True)
        permuted, rows = ops.npu_moe_token_permute(x, torch.zeros(tokens, top_k, dtype=torch.int64))
        assert permuted.shape == (tokens * top_k, width) and rows.shape == (tokens * top_k,)
        permuted.sum().backward()
        assert x.grad.shape == x.shape and (x.grad == 0).all()
        if top_k:
            out = ops.npu_moe_token_unpermute(permuted, rows, torch.ones(tokens, top_k))
            assert out.shape == (tokens, width)


def test_ids_of_any_size():
    tokens = torch.randn(5, 3)
    ids = torch.tensor([2**40, 7, 2**63 - 1, 7, 0])
    permuted, rows = ops.npu_moe_token_permute(tokens, ids)
    assert rows.tolist() == [3, 1, 4, 2, 0]
    assert torch.equal(permuted, tokens[[4, 1, 3, 0, 2]])


def test_expert_counts():
    ids = ids_of(300, 8, 60)
    assert torch.equal(ops.expert_counts(ids, 64), torch.bincount(ids.flatten(), minlength=64))
    assert torch.equal(
        ops.expert_counts(ids.int().view(2, 150, 8), 60), torch.bincount(ids.flatten())
    )
    assert ops.expert_counts(torch.tensor([3, 1, 3]), 3).tolist() == [0, 1, 0]  # 3: no expert
    assert ops.expert_counts(torch.tensor([3, 1, 3]), 4).tolist() == [0, 1, 0, 2]
    assert ops.expert_counts(torch.empty(0, dtype=torch.int64), 2).tolist() == [0, 0]
    for bad, text in (
        (4, r"indices 4 at position \[0, 1\] is not in \[0, 4\)"),
        (-1, "indices -1"),
    ):
        with pytest.raises(RuntimeError, match=f"expert_counts: {text}"):
            ops.expert_counts(torch.tensor([[0, bad]]), 3)
    with pytest.raises(
        RuntimeError, match="expert_counts: indices must be int32 or int64, got float32"
    ):
        ops.expert_counts(torch.ones(3), 3)


def test_errors_name_the_operator_and_the_value():
    x, ids = torch.randn(3, 4), ids_of(3, 2)
    name = "npu_moe_token_permute: "
    for arguments, text in (
        ((x[0], ids), r"The dims of input tokens should be 2 dimensional, got \[4\]"),
        ((x, ids.view(1, 3, 2)), "The dims of input indices should be 2 or 1 dimensional"),
        ((x, ids[:2]), r"indices \[2, 2\] does not go with tokens \[3, 4\]"),
        ((x, ids - 5), r"indices must not be below 0, got -\d at position \[0, 0\]"),
        ((x, ids.float()), "indices must be int32 or int64, got float32"),
        ((x, ids.bool()), "bool|Bool|dtype"),
        ((x.long(), ids), "int64"),
        ((x, ids, -7), "num_out_tokens -7 drops more than the 6 rows"),
        ((x, ids, None, True), "padded_mode=True is not supported"),
    ):
        with pytest.raises(RuntimeError, match=f"{name}.*{text}"):
            ops.npu_moe_token_permute(*arguments)
    rows, probs, permuted = rows_of(ids).int(), torch.rand(3, 2), torch.randn(6, 4)
    name = "npu_moe_token_unpermute: "
    for arguments, text in (
        ((permuted[0], rows), "The dims of input permuted_tokens should be 2 dimensional"),
        ((permuted, rows.view(3, 2)), "The dims of input sorted_indices should be 1 dimensional"),
        ((permuted, rows, probs[0]), "The dims of input probs should be 2 dimensional"),
        ((permuted, rows, torch.rand(3, 0)), "The topk should be greater than zero"),
        ((permuted, rows[:5], probs), r"probs \[3, 2\] does not go with 5 sorted_indices"),
        ((permuted, rows + 1, probs), r"sorted_indices 6 at position \[\d\] is not in \[0, 6\)"),
        ((permuted, rows - 1), r"sorted_indices -1 at"),
        ((permuted, rows.float()), "sorted_indices must be int32 or int64, got float32"),
        ((permuted, rows, probs.long()), "probs must be float.* got int64"),
        ((permuted, rows, None, True), "padded_mode=True is not supported"),
    ):
        with pytest.raises(RuntimeError, match=f"{name}.*{text}"):
            ops.npu_moe_token_unpermute(*arguments)
    with pytest.raises(RuntimeError, match=r"_grad: grad_unpermuted_tokens \[3, 3\] does not go with .* \[6, 4\]"):
        jm.npu_moe_token_unpermute_grad(permuted, x[:, :3], rows, probs)
    with pytest.raises(RuntimeError, match="grad_v2: .*needs permuted_tokens"):
        jm.npu_moe_token_unpermute_grad_v2(x, rows, 6, torch.float32, probs)
    with pytest.raises(
        RuntimeError, match="grad_v2: grad_permuted_tokens must be bfloat16, got float32"
    ):
        jm.npu_moe_token_permute_grad_v2(permuted, rows, 3, torch.bfloat16, 2)
    with pytest.raises(RuntimeError, match="grad_v2: tokens_size_0 must not be negative, got -3"):
        jm.npu_moe_token_permute_grad_v2(permuted, rows, -3, torch.float32, 2)
    with pytest.raises(RuntimeError, match="padded_mode"):
        jm.npu_moe_token_permute_grad_v2(permuted, rows, 3, torch.float32, 2, True)


def test_tensors_on_several_devices():
    x, ids = torch.randn(3, 4), ids_of(3, 2)
    with pytest.raises(
        RuntimeError, match="npu_moe_token_permute: .* one device, got cpu and meta"
    ):
        ops.npu_moe_token_permute(x, ids.to("meta"))
    permuted, rows = ops.npu_moe_token_permute(x, ids)
    for arguments in (
        (permuted, rows.to("meta")),
        (permuted, rows, torch.rand(3, 2, device="meta")),
    ):
        with pytest.raises(RuntimeError, match="npu_moe_token_unpermute: .* one device"):
            ops.npu_moe_token_unpermute(*arguments)
    meta, _ = ops.npu_moe_token_permute(x.to("meta"), ids.to("meta"))
    assert meta.device.type == "meta" and meta.shape == permuted.shape


def test_compile_runs_the_operators():
    ids = ids_of(8, 2)

    def f(tokens, probs):
        permuted, rows = ops.npu_moe_token_permute(tokens, ids)
        return ops.npu_moe_token_unpermute(permuted * 2, rows, probs).square().sum()

    leaves = [torch.randn(8, 4, requires_grad=True), torch.rand(8, 2, requires_grad=True)]
    compiled = torch.compile(f, fullgraph=True)
    jumar.reset_call_counts()
    compiled(*leaves).backward()
    names = ("npu_moe_token_permute", "npu_moe_token_unpermute")
    grads = ("npu_moe_token_permute_grad_v2", "npu_moe_token_unpermute_grad_v2")
    assert [jumar.call_counts()[n] for n in names + grads] == [1] * 4
    right = [t.detach().clone().requires_grad_() for t in leaves]
    f(*right).backward()
    for a, b in zip(leaves, right, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6)
