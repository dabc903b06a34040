"""moe_ffn through torch: the chain of plain operators in fp64, layouts and lists of weights, memory, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp

T, K, E, H, N = 23, 3, 5, 16, 12


def plain(hidden, ids, probs, gate, up, down):
    """The loop over experts; weights [E, H, N], [E, H, N], [E, N, H]."""
    y = hidden.new_zeros(hidden.shape)
    for e in range(gate.shape[0]):
        token, k = torch.where(ids == e)
        h = F.silu(hidden[token] @ gate[e]) * (hidden[token] @ up[e])
        y = y.index_add(0, token, (h @ down[e]) * probs[token, k, None].to(y.dtype))
    return y


def data(dtype=torch.float32, probs_dtype=None, sentinel=True, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

    ids = torch.stack([torch.randperm(E + sentinel, generator=g)[:K] for _ in range(T)])
    probs = torch.rand(T, K, generator=g, dtype=torch.float64).to(probs_dtype or dtype)
    weights = normal(E, H, N, scale=H**-0.5), normal(E, H, N, scale=H**-0.5), normal(E, N, H, scale=N**-0.5)
    return normal(T, H), ids, probs, *weights, normal(T, H)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("stored", ["joined", "joined, transposed", "apart", "lists of transposed"])
def test_against_fp64(dtype, stored):
    """16-bit results may be off by what the rounded h, g and u carry on: some ulps of the largest value."""
    hidden, ids, probs, gate, up, down, g = data(dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    wide = [t.double().requires_grad_() for t in (hidden, probs, gate, up, down)]
    expected = plain(wide[0], ids, *wide[1:])
    grads = torch.autograd.grad(expected, wide, g.double())
    leaves = [t.clone().requires_grad_() for t in (hidden, probs)]
    if stored.startswith("joined"):
        both = torch.cat([gate, up], -1)
        if stored.endswith("transposed"):
            parameters = [t.mT.contiguous().requires_grad_() for t in (both, down)]
            y = ops.moe_ffn(leaves[0], ids, leaves[1], parameters[0].mT, parameters[1].mT)
        else:
            parameters = [t.clone().requires_grad_() for t in (both, down)]
            y = ops.moe_ffn(leaves[0], ids, leaves[1], *parameters)
    elif stored == "apart":
        parameters = [t.clone().requires_grad_() for t in (gate, down, up)]
        y = ops.moe_ffn(leaves[0], ids, leaves[1], *parameters)
    else:
        lists = [[m.T.contiguous().requires_grad_() for m in w] for w in (gate, down, up)]
        y = ops.moe_ffn(leaves[0], ids, leaves[1], *([m.T for m in w] for w in lists))
        parameters = sum(lists, [])
    got = torch.autograd.grad(y, [*leaves, *parameters], g)
    for leaf, grad in zip([*leaves, *parameters], got, strict=True):
        assert grad.dtype == leaf.dtype and grad.stride() == leaf.stride()
    if stored == "joined, transposed":
        got = [*got[:2], got[2].mT, got[3].mT]
    if stored.startswith("joined"):
        got = [*got[:2], got[2][..., :N], got[2][..., N:], got[3]]
    elif stored == "apart":
        got = [*got[:2], got[2], got[4], got[3]]
    else:
        got = [*got[:2], *(torch.stack([m.T for m in got[a : a + E]]) for a in (2, 2 + 2 * E, 2 + E))]
    narrow = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}.get(dtype, 2.0**-53 if dtype == torch.float64 else 2.0**-24)
    for name, a, b in zip(("y", "hidden", "probs", "gate", "up", "down"), (y.detach(), *got), (expected.detach(), *grads), strict=True):
        floor = 8 * narrow * b.abs().max()
        assert_ulp(a, b, 0.51 if dtype.itemsize == 2 else 1.0, f"{stored} {name}", floor=floor)
    assert (got[1][ids == E] == 0).all()


def test_equals_the_chain_of_operators():
    """In fp32 both are within rounding of each other; permute, two products, SwiGLU, product, un-permute."""
    hidden, ids, probs, gate, up, down, _ = data(sentinel=False)
    rows, order = ops.npu_moe_token_permute(hidden, ids)
    counts = ops.expert_counts(ids, E)
    both = ops.grouped_matmul(rows, torch.cat([gate, up], -1), counts, group_list_type=1)
    y = ops.grouped_matmul(ops.npu_swiglu(both), down, counts, group_list_type=1)
    chain = ops.npu_moe_token_unpermute(y, order, probs)
    torch.testing.assert_close(ops.moe_ffn(hidden, ids, probs, gate, down, up), chain, rtol=1e-5, atol=1e-6)


def test_routing_extremes():
    hidden, ids, probs, gate, up, down, _ = data()
    for routed in (torch.full_like(ids, 2), torch.full_like(ids, E), ids % 2):
        y = ops.moe_ffn(hidden, routed, probs, gate, down, up)
        expected = plain(hidden.double(), routed, probs.double(), gate.double(), up.double(), down.double())
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    one = ops.moe_ffn(hidden[:1], ids[:1], probs[:1], gate, down, up)
    assert torch.equal(one, ops.moe_ffn(hidden, ids, probs, gate, down, up)[:1])
    assert ops.moe_ffn(hidden[:0], ids[:0], probs[:0], gate, down, up).shape == (0, H)


def test_without_probs_every_slot_weighs_one():
    hidden, ids, probs, gate, up, down, _ = data()
    expected = ops.moe_ffn(hidden, ids, torch.ones_like(probs), gate, down, up)
    assert torch.equal(ops.moe_ffn(hidden, ids, None, gate, down, up), expected)
    hidden.requires_grad_()
    ops.moe_ffn(hidden, ids, None, gate, down, up).sum().backward()
    assert hidden.grad.abs().sum() > 0


def test_sums_over_experts_in_fp32():
    """256 + 7 * 1 rounds once, to 264; added one by one in bf16 each 1 would be lost."""
    gate = torch.ones(8, 1, 1).bfloat16()
    hidden = torch.ones(1, 1).bfloat16()
    h = float(F.silu(torch.ones(())))
    down = torch.tensor([256.0] + [1.0] * 7).reshape(8, 1, 1).bfloat16()
    ids, probs = torch.arange(8).reshape(1, 8), torch.full((1, 8), 1 / float(torch.tensor(h).bfloat16()))
    assert ops.moe_ffn(hidden, ids, probs, gate, down, gate).item() == 264.0


def test_gradcheck_and_opcheck():
    hidden, ids, probs, gate, up, down, g = (t[:4] if t.shape[0] == T else t for t in data(torch.float64))
    leaves = [t[..., :6].clone().requires_grad_() for t in (hidden[:, :6], gate[:, :6], down, up[:, :6])]
    p = probs.clone().requires_grad_()
    leaves[2] = down[:, :6, :6].clone().requires_grad_()
    assert gradcheck(lambda x, p, *w: ops.moe_ffn(x, ids, p, *w), (leaves[0], p, *leaves[1:]))
    x, *w = (t.detach().float().requires_grad_() for t in leaves)
    p = p.detach().float().requires_grad_()
    op = torch.ops.jumar.moe_ffn.default
    opcheck(op, (x, ids, p, [w[0]], [w[1]], [w[2]], True))
    turned = [t.detach().mT.contiguous().mT.requires_grad_() for t in w]
    opcheck(op, (x, ids, p, [turned[0]], [turned[1]], [turned[2]], True))
    opcheck(op, (x.detach(), ids, p.detach(), list(w[0].detach()), list(w[1].detach()), list(w[2].detach()), False))
    saved = op(x, ids, p, [w[0]], [w[1]], [w[2]], True)[1].detach()
    plain_w = [[t.detach()] for t in w]
    opcheck(torch.ops.jumar.moe_ffn_backward.default,
            (torch.randn(4, 6), x.detach(), ids, p.detach(), *plain_w, saved, True, True, True, True))  # fmt: skip


def test_only_what_is_needed():
    hidden, ids, probs, gate, up, down, _ = data()
    hidden.requires_grad_()
    y = ops.moe_ffn(hidden, ids, probs, gate, down, up)
    y.sum().backward()  # an expanded gradient
    assert hidden.grad is not None
    with torch.no_grad():
        assert torch.equal(ops.moe_ffn(hidden, ids, probs, gate, down, up), y)
    jumar.reset_call_counts()
    torch.autograd.grad(ops.moe_ffn(hidden, ids, probs, gate, down, up).square().sum(), hidden)
    assert jumar.call_counts() == {"moe_ffn": 1, "moe_ffn_backward": 1}
    with pytest.raises(RuntimeError, match="moe_ffn: called with save=False"):
        torch.ops.jumar.moe_ffn(hidden, ids, probs, [gate], [down], [up], False)[0].sum().backward()


def test_autocast_compile():
    hidden, ids, probs, gate, up, down, _ = data()
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.moe_ffn(hidden, ids, probs, gate, down, up)
    expected = ops.moe_ffn(*(hidden.bfloat16(), ids, probs, gate.bfloat16(), down.bfloat16(), up.bfloat16()))
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    leaves = [t.clone().requires_grad_() for t in (hidden, probs, gate, down, up)]
    compiled = torch.compile(lambda x, p, *w: ops.moe_ffn(x, ids, p, *w).sum(), fullgraph=True)
    compiled(*leaves).backward()
    others = [t.detach().clone().requires_grad_() for t in leaves]
    ops.moe_ffn(others[0], ids, *others[1:]).sum().backward()
    for a, b in zip(leaves, others, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_errors():
    hidden, ids, probs, gate, up, down, _ = data()
    with pytest.raises(RuntimeError, match=r"moe_ffn: .*6.*\[0, 1\]|moe_ffn: .*\[0, 1\].*6"):
        wrong = ids.clone()
        wrong[0, 1] = E + 1
        ops.moe_ffn(hidden, wrong, probs, gate, down, up)
    for arguments in ((hidden, ids.to("meta"), probs, gate, down, up), (hidden, ids, probs, gate, down.to("meta"), up)):
        with pytest.raises(RuntimeError, match="moe_ffn: all tensors must be on one device, got cpu and meta"):
            ops.moe_ffn(*arguments)
    with pytest.raises(RuntimeError, match=r"moe_ffn: .*-1"):
        ops.moe_ffn(hidden, ids - 1 - ids, probs, gate, down, up)
    with pytest.raises(RuntimeError, match=r"moe_ffn: gate must be \[16, 24\], got \[16, 12\]"):
        ops.moe_ffn(hidden, ids, probs, gate, down)
    with pytest.raises(RuntimeError, match="moe_ffn: .*gate and hidden should have one dtype, got bfloat16 and float32"):
        ops.moe_ffn(hidden, ids, probs, gate.bfloat16(), down, up)
    with pytest.raises(RuntimeError, match=r"moe_ffn: up has 4 experts, expected 5"):
        ops.moe_ffn(hidden, ids, probs, gate, down, up[:4])
    with pytest.raises(RuntimeError, match=r"moe_ffn: probs must be floating and like ids \[23, 3\]"):
        ops.moe_ffn(hidden, ids, probs[:, :2], gate, down, up)
