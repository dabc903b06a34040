"""The routing-map forms of permute and unpermute through torch, in both modes."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import (
    FLOAT_DTYPES,
    HALF_DTYPES,
    assert_schemas,
    assert_ulp,
    signed,
    strided_views,
)

jm = torch.ops.jumar


def map_of(tokens, experts, top_k, seed=0):
    """Every token with top_k experts."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).topk(top_k, -1).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


def free_map(tokens, experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator) < 0.4


def cells_of(routing_map, rows, drop_and_pad):
    """(token, expert) of each row."""
    experts = routing_map.shape[1]
    if not drop_and_pad:
        expert, token = routing_map.T.nonzero(as_tuple=True)
        return token, expert
    capacity = rows // experts
    order = routing_map.T.int().argsort(dim=1, descending=True, stable=True)
    return order[:, :capacity].flatten(), torch.arange(experts).repeat_interleave(capacity)


def forward(tokens, routing_map, probs, rows, drop_and_pad):
    token, expert = cells_of(routing_map, rows, drop_and_pad)
    index = token
    if not drop_and_pad:
        index = (token * routing_map.shape[1] + expert).argsort()
    return tokens[token], None if probs is None else probs[token, expert], index


def backward_oracle(permuted, probs, routing_map, drop_and_pad, tokens):
    """Unpermute by its definition, over rows and their cells; with the terms' magnitudes."""
    token, expert = cells_of(routing_map, len(permuted), drop_and_pad)
    weights = (
        torch.ones(len(permuted), dtype=permuted.dtype) if probs is None else probs[token, expert]
    )
    terms = permuted * weights.unsqueeze(-1)
    zero = torch.zeros(tokens, permuted.shape[1], dtype=permuted.dtype)
    return zero.index_add(0, token, terms), zero.index_add(0, token, terms.abs())


MODES = [(False, map_of(7, 5, 3), 21), (True, free_map(7, 5), 20), (True, free_map(7, 5), 33)]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=["map", "drop", "all tokens"])
def test_values_and_gradients(dtype, probs_dtype, mode):
    drop, routing_map, n = mode
    tokens = signed(7, 19, dtype=dtype).requires_grad_()
    probs = signed(7, 5, dtype=probs_dtype, seed=1).requires_grad_()
    permuted, moved, index = ops.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=n, drop_and_pad=drop
    )
    rows = n // 5 * 5 if drop else 21
    right = forward(tokens.detach(), routing_map, probs.detach(), rows, drop)
    assert torch.equal(permuted, right[0]) and permuted.dtype == dtype
    assert torch.equal(moved, right[1]) and moved.dtype == probs_dtype
    assert index.dtype == torch.int32 and torch.equal(index.long(), right[2])
    as_int8 = ops.npu_moe_token_permute_with_routing_map(
        tokens, routing_map.to(torch.int8), probs=probs, num_out_tokens=n, drop_and_pad=drop
    )
    assert all(torch.equal(a, b) for a, b in zip(as_int8, (permuted, moved, index), strict=True))

    grads = signed(rows, 19, dtype=dtype, seed=2), signed(rows, 1, dtype=probs_dtype, seed=3)[:, 0]
    torch.autograd.backward([permuted, moved], grads)
    exact, size = backward_oracle(grads[0].double(), None, routing_map, drop, 7)
    assert_ulp(
        tokens.grad, exact, 0.51, "d tokens", floor=size * 5 * 2.0**-24 * (dtype != torch.float64)
    )
    token, expert = cells_of(routing_map, rows, drop)
    dprobs = torch.zeros(7, 5, dtype=probs_dtype)
    dprobs[token, expert] = grads[1]
    assert torch.equal(probs.grad, dprobs) and probs.grad.dtype == probs_dtype

    middle = permuted.detach().requires_grad_()
    weights = probs.detach().requires_grad_()
    out = ops.npu_moe_token_unpermute_with_routing_map(
        middle, index, [7, 19], probs=weights, routing_map=routing_map, drop_and_pad=drop
    )
    eps = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    exact, size = backward_oracle(
        middle.detach().double(), weights.detach().double(), routing_map, drop, 7
    )
    assert_ulp(out.detach(), exact, 0.51, "out", floor=10 * eps * size)
    grad = signed(7, 19, dtype=dtype, seed=4)
    out.backward(grad)
    g = grad.double()[token]
    scaled = g * weights.detach().double()[token, expert].unsqueeze(-1)
    assert_ulp(middle.grad, scaled, 0.51, "d permuted", floor=2 * eps * scaled.abs())
    terms = g * middle.detach().double()
    exact, size = (torch.zeros(7, 5, dtype=torch.float64) for _ in range(2))
    exact[token, expert] = terms.sum(-1)
    size[token, expert] = terms.abs().sum(-1)
    assert weights.grad.dtype == probs_dtype
    # Rounded to the gradient's dtype by the operator and to that of probs by autograd.
    got, bound = weights.grad, 0.51
    if dtype in HALF_DTYPES:
        got, bound = (got.to(dtype), bound) if probs_dtype != torch.bfloat16 else (got, 0.6)
    assert_ulp(got, exact, bound, "d probs", floor=25 * eps * size)


def test_the_same_rows_as_permute_by_indices():
    routing_map = map_of(9, 6, 2)
    ids = routing_map.nonzero()[:, 1].view(9, 2)
    tokens, probs = torch.randn(9, 4), torch.rand(9, 2)
    permuted, rows = ops.npu_moe_token_permute(tokens, ids)
    ours, _, index = ops.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, num_out_tokens=18
    )
    assert torch.equal(ours, permuted) and torch.equal(index, rows)
    full = torch.zeros(9, 6).masked_scatter_(routing_map, probs)
    out = ops.npu_moe_token_unpermute_with_routing_map(
        permuted, rows, [9, 4], probs=full, routing_map=routing_map
    )
    assert torch.equal(out, ops.npu_moe_token_unpermute(permuted, rows, probs))


def test_default_number_of_rows_is_that_of_one_expert_a_token():
    tokens = torch.randn(4, 3)
    one = map_of(4, 3, 1)
    permuted, probs, index = ops.npu_moe_token_permute_with_routing_map(tokens, one)
    assert permuted.shape == (4, 3) and probs is None
    back = ops.npu_moe_token_unpermute_with_routing_map(permuted, index, [4, 3])
    assert torch.equal(back, tokens)
    with pytest.raises(RuntimeError, match="row 0 of routing_map has 2 experts; .* asks for 1"):
        ops.npu_moe_token_permute_with_routing_map(tokens, map_of(4, 3, 2))


def test_extra_results_of_the_inner_operator():
    drop, routing_map, _ = MODES[1]
    tokens, probs = torch.randn(7, 3), torch.rand(7, 5)
    permuted, moved, index = ops.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=20, drop_and_pad=drop
    )
    _, out_index, ids, weights = jm._npu_moe_token_unpermute_with_routing_map(
        permuted, index, [7, 3], probs=probs, drop_and_pad=True
    )
    assert torch.equal(out_index.long(), index.argsort(stable=True))
    assert torch.equal(ids, index.sort(stable=True).values) and torch.equal(weights, moved)
    routing_map = MODES[0][1]
    permuted, moved, index = ops.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=21
    )
    _, out_index, ids, weights = jm._npu_moe_token_unpermute_with_routing_map(
        permuted, index, [7, 3], probs=probs, routing_map=routing_map
    )
    assert torch.equal(out_index, index) and torch.equal(ids, index) and torch.equal(weights, moved)


def unpermuting(**options):
    return lambda p, i, w: ops.npu_moe_token_unpermute_with_routing_map(
        p, i, [7, 3], probs=w, **options
    )


def test_gradcheck():
    permute = ops.npu_moe_token_permute_with_routing_map
    for drop, routing_map, n in MODES:
        tokens, probs = (torch.randn(7, c, dtype=torch.float64, requires_grad=True) for c in (3, 5))
        options = {"num_out_tokens": n, "drop_and_pad": drop}
        assert gradcheck(
            lambda t, p, m=routing_map, o=options: permute(t, m, probs=p, **o)[:2], (tokens, probs)
        )
        assert gradcheck(lambda t, m=routing_map, o=options: permute(t, m, **o)[0], (tokens,))
        _, _, index = permute(tokens, routing_map, **options)
        permuted = torch.randn(len(index), 3, dtype=torch.float64, requires_grad=True)
        for f in (
            unpermuting(routing_map=routing_map, drop_and_pad=drop),
            lambda p, i, w, m=routing_map, d=drop: jm._npu_moe_token_unpermute_with_routing_map(
                p, i, [7, 3], probs=w, routing_map=m, drop_and_pad=d
            )[0],
        ):
            assert gradcheck(lambda p, w, f=f, i=index: f(p, i, w), (permuted, probs))
            assert gradcheck(lambda p, f=f, i=index: f(p, i, None), (permuted,))
        # One gradient alone.
        fixed = permuted.detach()
        f = unpermuting(routing_map=routing_map, drop_and_pad=drop)
        assert gradcheck(lambda w, f=f, i=index, p=fixed: f(p, i, w), (probs,))


def test_opcheck():
    for drop, routing_map, n in MODES[:2]:
        tokens, probs = (torch.randn(7, c, requires_grad=True) for c in (3, 5))
        args = {"num_out_tokens": n, "drop_and_pad": drop}
        for ns in jumar._load.NAMESPACES:
            op = getattr(torch.ops, ns)
            permute = op.npu_moe_token_permute_with_routing_map.default
            opcheck(permute, (tokens, routing_map), args | {"probs": probs})
            opcheck(permute, (tokens, routing_map), args)
            permuted, moved, index = permute(tokens, routing_map, probs=probs, **args)
            permuted, moved = permuted.detach(), moved.detach()
            leaf, rest = (
                permuted.clone().requires_grad_(),
                {"routing_map": routing_map, "drop_and_pad": drop},
            )
            for name in ("", "_"):
                unpermute = getattr(op, f"{name}npu_moe_token_unpermute_with_routing_map").default
                opcheck(unpermute, (leaf, index, [7, 3]), rest | {"probs": probs})
                opcheck(unpermute, (leaf, index, [7, 3]), rest)
            _, out_index, ids, _ = jm._npu_moe_token_unpermute_with_routing_map(
                permuted, index, [7, 3], **rest
            )
            grad = op.npu_moe_token_permute_with_routing_map_grad.default
            opcheck(grad, (permuted, moved, index, routing_map, 5, 7, drop))
            opcheck(grad, (permuted, None, index, routing_map, 5, 7, drop))
            grad = op.npu_moe_token_unpermute_with_routing_map_grad.default
            weights = probs.detach()
            opcheck(
                grad,
                (torch.randn(7, 3), out_index, ids, routing_map, permuted, weights, drop, [7, 3]),
            )
            opcheck(grad, (torch.randn(7, 3), out_index, ids, None, None, None, drop, [7, 3]))


def test_the_gradient_of_probs_has_the_dtype_of_the_gradient():
    drop, routing_map, n = MODES[0]
    tokens, probs = torch.randn(7, 3).bfloat16(), torch.rand(7, 5)
    permuted, _, index = ops.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, num_out_tokens=n
    )
    dpermuted, dprobs = ops.npu_moe_token_unpermute_with_routing_map_grad(
        tokens, index, index, routing_map, permuted, probs, drop, [7, 3]
    )
    assert dpermuted.dtype == dprobs.dtype == torch.bfloat16


def test_schemas_are_the_vendors():
    right = {
        "npu_moe_token_permute_with_routing_map": "(Tensor tokens, Tensor routing_map, *, Tensor? probs=None, "
        "int? num_out_tokens=None, bool drop_and_pad=False) -> (Tensor, Tensor, Tensor)",
        "npu_moe_token_permute_with_routing_map_grad": "(Tensor permuted_token_out_grad, Tensor? probs_grad, "
        "Tensor sorted_indices, Tensor routing_map, SymInt experts_num, SymInt tokens_num, bool drop_and_pad) -> "
        "(Tensor, Tensor)",
        "npu_moe_token_unpermute_with_routing_map": "(Tensor permuted_tokens, Tensor sorted_indices, "
        "int[] restore_shape, *, Tensor? probs=None, Tensor? routing_map=None, bool drop_and_pad=False) -> Tensor",
        "_npu_moe_token_unpermute_with_routing_map": "(Tensor permuted_tokens, Tensor sorted_indices, "
        "int[] restore_shape, *, Tensor? probs=None, Tensor? routing_map=None, bool drop_and_pad=False) -> "
        "(Tensor, Tensor, Tensor, Tensor)",
        "npu_moe_token_unpermute_with_routing_map_grad": "(Tensor unpermuted_tokens_grad, Tensor out_index, "
        "Tensor permuted_token_id, Tensor? routing_map, Tensor? permuted_tokens, Tensor? probs, "
        "bool drop_and_pad, int[] restore_shape) -> (Tensor, Tensor)",
    }
    assert_schemas(right)


def test_layouts_and_expanded_gradients():
    for drop, routing_map, n in MODES[:2]:
        tokens, probs = signed(7, 12), signed(7, 5, seed=1)
        options = {"num_out_tokens": n, "drop_and_pad": drop}
        want = ops.npu_moe_token_permute_with_routing_map(
            tokens, routing_map, probs=probs, **options
        )
        rest = {"routing_map": routing_map, "drop_and_pad": drop}
        out = ops.npu_moe_token_unpermute_with_routing_map(
            want[0], want[2], [7, 12], probs=probs, **rest
        )
        maps = (
            routing_map,
            routing_map.T.contiguous().T,
            torch.stack((routing_map, ~routing_map), -1)[..., 0],
        )
        for x, w, m in zip(
            strided_views(tokens).values(),
            strided_views(probs).values(),
            (*maps, maps[1]),
            strict=True,
        ):
            got = ops.npu_moe_token_permute_with_routing_map(x, m, probs=w, **options)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        for p, w, m in zip(
            strided_views(want[0]).values(),
            strided_views(probs).values(),
            (*maps, maps[2]),
            strict=True,
        ):
            got = ops.npu_moe_token_unpermute_with_routing_map(
                p, want[2], [7, 12], probs=w, routing_map=m, drop_and_pad=drop
            )
            assert torch.equal(got, out)
        leaves = [t.clone().requires_grad_() for t in (tokens, probs)]
        permuted, moved, _ = ops.npu_moe_token_permute_with_routing_map(
            leaves[0], routing_map, probs=leaves[1], **options
        )
        (permuted.sum() + moved.sum()).backward()
        token, expert = cells_of(routing_map, len(permuted), drop)
        assert torch.equal(leaves[0].grad[:, 0], torch.bincount(token, minlength=7).float())
        assert leaves[1].grad.sum() == len(permuted) and (leaves[1].grad[token, expert] == 1).all()


def test_empty():
    for drop in (False, True):
        x = torch.empty(0, 3, requires_grad=True)
        permuted, _, index = ops.npu_moe_token_permute_with_routing_map(
            x, torch.empty(0, 5, dtype=torch.bool), drop_and_pad=drop
        )
        assert permuted.shape == (0, 3)
        out = ops.npu_moe_token_unpermute_with_routing_map(
            permuted, index, [0, 3], drop_and_pad=drop
        )
        out.sum().backward()
        assert x.grad.shape == (0, 3)


def test_errors_name_the_operator_and_the_value():
    drop, routing_map, n = MODES[0]
    tokens, probs = torch.randn(7, 3), torch.rand(7, 5)
    name = "npu_moe_token_permute_with_routing_map: "
    for arguments, options, text in (
        ((tokens[0], routing_map), {}, "The dims of input tokens should be 2 dimensional"),
        ((tokens, routing_map[0]), {}, "The dims of input routing_map should be 2 dimensional"),
        ((tokens, routing_map[:5]), {}, r"routing_map \[5, 5\] does not go with 7 tokens"),
        ((tokens, routing_map.float()), {}, "routing_map must be bool or int8, got float32"),
        (
            (tokens, routing_map.to(torch.int8) * 3),
            {"num_out_tokens": n},
            "must hold 0 and 1, got 3 at position",
        ),
        (
            (tokens, routing_map),
            {"probs": probs[:, :4]},
            r"probs \[7, 4\] does not go with routing_map \[7, 5\]",
        ),
        (
            (tokens, routing_map),
            {"num_out_tokens": -1},
            "num_out_tokens must not be negative, got -1",
        ),
        (
            (tokens, routing_map),
            {"num_out_tokens": 14},
            "row 0 of routing_map has 3 experts; .* asks for 2 in each",
        ),
        (
            (tokens, routing_map),
            {"num_out_tokens": 40, "drop_and_pad": True},
            "asks for 8 rows an expert, of 7",
        ),
    ):
        with pytest.raises(RuntimeError, match=name + ".*" + text):
            ops.npu_moe_token_permute_with_routing_map(*arguments, **options)
    permuted, _, index = ops.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, num_out_tokens=n
    )
    name = "npu_moe_token_unpermute_with_routing_map: "
    for arguments, options, text in (
        ((permuted, index, [7]), {}, "restore_shape must be"),
        (
            (permuted, index, [7, 4]),
            {},
            r"restore_shape \[7, 4\] does not go with permuted_tokens \[21, 3\]",
        ),
        ((permuted, index, [8, 3]), {}, "21 rows cannot be shared out to 8 tokens"),
        ((permuted, index[:20], [7, 3]), {}, "20 sorted_indices do not go with 21 rows"),
        (
            (permuted, index + 1, [7, 3]),
            {},
            r"sorted_indices 21 at position \[\d+\] is not in \[0, 21\)",
        ),
        (
            (permuted, index, [7, 3]),
            {"drop_and_pad": True},
            r"sorted_indices \d+ at .* is not in \[0, 7\)",
        ),
        ((permuted, index, [7, 3]), {"probs": probs}, r"probs \[7, 5\] need a routing_map"),
    ):
        with pytest.raises(RuntimeError, match=name + ".*" + text):
            ops.npu_moe_token_unpermute_with_routing_map(*arguments, **options)
    with pytest.raises(RuntimeError, match="map_grad: .*needs permuted_tokens"):
        ops.npu_moe_token_unpermute_with_routing_map_grad(
            tokens, index, index, routing_map, None, probs, drop, [7, 3]
        )


def test_compile():
    _, routing_map, n = MODES[0]

    def f(tokens, probs):
        permuted, moved, index = ops.npu_moe_token_permute_with_routing_map(
            tokens, routing_map, probs=probs, num_out_tokens=n
        )
        out = ops.npu_moe_token_unpermute_with_routing_map(
            permuted * moved.unsqueeze(-1), index, [7, 3], probs=probs, routing_map=routing_map
        )
        return out.square().sum()

    leaves = [torch.randn(7, 3, requires_grad=True), torch.rand(7, 5, requires_grad=True)]
    jumar.reset_call_counts()
    torch.compile(f, fullgraph=True)(*leaves).backward()
    assert jumar.call_counts()["npu_moe_token_permute_with_routing_map"] == 1
    right = [t.detach().clone().requires_grad_() for t in leaves]
    f(*right).backward()
    for a, b in zip(leaves, right, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6)
