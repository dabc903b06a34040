"""npu_fusion_attention: dropout, autograd, compile, autocast, parts of the keys, errors, schemas."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from attention_ref import CAUSAL_MASK, PREFIX_MASK
from attention_util import Case, normal
from jumar import ops


def pattern_of(batch, heads, rows, keys, keep_prob, **seed):
    """1 where dropout keeps, read off with values that are rows of the identity."""
    zero = torch.zeros(batch, heads, rows, 1, dtype=torch.float64)
    identity = torch.eye(keys, dtype=torch.float64).expand(batch, heads, keys, keys)
    keyless = torch.zeros(batch, heads, keys, 1, dtype=torch.float64)
    out = ops.npu_fusion_attention(
        zero, keyless, identity, heads, "BNSD", keep_prob=keep_prob, **seed
    )[0]
    return (out > 0).double()


def test_dropout():
    case = Case(torch.float32, 2, 4, 2, 40, 150, 16, 16, "BNSD", scale=0.3, keep_prob=0.75)
    pattern = pattern_of(2, 4, 40, 150, 0.75, seed=11, offset=3)
    assert abs(pattern.mean().item() - 0.75) < 0.01
    case.check(patterns=list(pattern), seed=11, offset=3)
    for other in (
        {"seed": 12, "offset": 3},
        {"seed": 11, "offset": 4},
        {"seed": 11 + (1 << 40), "offset": 3},
    ):
        assert (pattern_of(2, 4, 40, 150, 0.75, **other) != pattern).double().mean() > 0.3
    # Drawn from torch's generator, returned, and good for the same pattern again.
    torch.manual_seed(0)
    first = ops.npu_fusion_attention(case.q, case.k, case.v, 4, "BNSD", keep_prob=0.75)
    second = ops.npu_fusion_attention(case.q, case.k, case.v, 4, "BNSD", keep_prob=0.75)
    torch.manual_seed(0)
    third = ops.npu_fusion_attention(case.q, case.k, case.v, 4, "BNSD", keep_prob=0.75)
    assert torch.equal(first[0], third[0]) and not torch.equal(first[0], second[0])
    again = ops.npu_fusion_attention(
        case.q, case.k, case.v, 4, "BNSD", keep_prob=0.75, seed=first[4], offset=first[5]
    )
    assert torch.equal(first[0], again[0])
    assert first[6] == 2 * 4 * 40 * 150


def test_dropout_mask():
    case = Case(torch.float64, 2, 4, 2, 10, 13, 8, 8, "BNSD", scale=0.3, keep_prob=0.5)
    bits = torch.randint(
        0, 256, (2 * 4 * 10 * 13 // 8,), generator=torch.Generator().manual_seed(0)
    )
    pattern = (bits[:, None] >> torch.arange(8) & 1).flatten().view(2, 4, 10, 13)
    case.check(patterns=list(pattern.double()), dropout_mask=bits.to(torch.uint8))


def test_gradcheck():
    def leaf(*shape, seed=0):
        return normal(*shape, seed=seed).requires_grad_()

    q, k, v = leaf(1, 5, 4, 3), leaf(1, 7, 2, 3, seed=1), leaf(1, 7, 2, 2, seed=2)
    sink, pse = leaf(4, seed=3), leaf(1, 4, 5, 7, seed=4)
    for mode, prefix in ((2, None), (3, None), (6, [4])):
        mask = PREFIX_MASK if mode == 6 else CAUSAL_MASK

        def call(a, b, c, d=None, e=None, mode=mode, mask=mask, prefix=prefix):
            return ops.npu_fusion_attention(
                a, b, c, 4, "BSND", pse=d, atten_mask=mask, scale=0.7, sparse_mode=mode, prefix=prefix, sink=e,
                keep_prob=0.8, seed=5,
            )[0]  # fmt: skip

        assert gradcheck(call, (q, k, v))
        assert gradcheck(call, (q, k, v, pse, sink))
    # One input alone.
    assert gradcheck(
        lambda x: ops.npu_fusion_attention(q.detach(), x, v.detach(), 4, "BSND")[0], (k,)
    )


def test_opcheck():
    q, k, v = (
        normal(2, n, 9, 8, dtype=torch.float32, seed=i).requires_grad_()
        for i, n in enumerate((4, 2, 2))
    )
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for ns in jumar._load.NAMESPACES:
        op, grad = (
            getattr(torch.ops, ns).npu_fusion_attention,
            getattr(torch.ops, ns).npu_fusion_attention_grad,
        )
        opcheck(op.default, (q, k, v, 4, "BNSD"))
        opcheck(op.default, (q, k, v, 4, "BNSD", None, None, mask, 0.3))
        opcheck(op.default, (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), 9, "TND"),
                {"actual_seq_qlen": [3, 8], "actual_seq_kvlen": [1, 4]}, raise_exception=True)  # fmt: skip
        with torch.no_grad():
            out, maximum, total, *_ = op(q, k, v, 4, "BNSD")
            opcheck(
                grad.default,
                (q.detach(), k.detach(), v.detach(), out, 4, "BNSD"),
                {"softmax_max": maximum, "softmax_sum": total, "attention_in": out},
            )


def test_statistics_take_no_gradient():
    q = normal(1, 2, 3, 4).requires_grad_()
    assert not any(x.requires_grad for x in ops.npu_fusion_attention(q, q, q, 2, "BNSD")[1:4])


def test_compiles():
    def f(q, k, v):
        return ops.npu_fusion_attention(
            q, k, v, 2, "BSND", scale=0.3, sparse_mode=3, atten_mask=CAUSAL_MASK
        )[0].sin()

    q, k, v = (normal(1, 9, 2, 8, dtype=torch.float32, seed=i).requires_grad_() for i in range(3))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    want, got = f(q, k, v), compiled(q, k, v)
    assert torch.equal(want, got)
    for a, b in zip(
        torch.autograd.grad(want.sum(), (q, k, v)),
        torch.autograd.grad(got.sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_autocast():
    q, k, v = (normal(1, 2, 9, 8, dtype=torch.float32, seed=i) for i in range(3))
    sink = torch.zeros(2)
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.npu_fusion_attention(q, k, v, 2, "BNSD", sink=sink)[0]
    assert out.dtype == torch.bfloat16
    half = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, ops.npu_fusion_attention(*half, 2, "BNSD", sink=sink)[0])


def test_gradients_of_parts_add_up():
    """Backward of a part of the keys, with the statistics and the output of all of them."""
    case = Case(torch.float64, 1, 4, 2, 20, 30, 8, 8, "BNSD", scale=0.3)
    (out, maximum, total, *_), whole = case.run()
    parts = []
    for keys in (slice(0, 12), slice(12, 30)):
        parts.append(
            ops.npu_fusion_attention_grad(
                case.q,
                case.k[:, :, keys],
                case.v[:, :, keys],
                case.dy,
                4,
                "BNSD",
                softmax_max=maximum,
                softmax_sum=total,
                attention_in=out,
                scale_value=0.3,
            )  # fmt: skip
        )
    assert torch.allclose(parts[0][0] + parts[1][0], whole["dq"], atol=1e-13)
    assert torch.allclose(torch.cat([parts[0][1], parts[1][1]], 2), whole["dk"], atol=1e-13)


ERRORS = {
    "input_layout must be": {"input_layout": "BDSN"},
    "head_num must be positive": {"head_num": 0},
    "query has 2 heads, expected 3": {"head_num": 3},
    "padding_mask is not supported": {"padding_mask": torch.zeros(1)},
    "keep_prob must be in": {"keep_prob": 0.0},
    "softmax_layout must be": {"softmax_layout": "TND"},
    "actual_seq_qlen and actual_seq_kvlen go with": {
        "actual_seq_qlen": [3],
        "actual_seq_kvlen": [3],
    },
    "atten_mask must be bool or uint8": {"atten_mask": torch.zeros(3, 3)},
    "atten_mask must have 2 or 4": {"atten_mask": torch.zeros(1, 3, 3, dtype=torch.bool)},
    "atten_mask has shape": {"atten_mask": torch.zeros(3, 4, dtype=torch.bool)},
    "takes a compressed atten_mask": {
        "atten_mask": torch.zeros(3, 3, dtype=torch.bool),
        "sparse_mode": 2,
    },
    "does not hold ones above the diagonal": {"atten_mask": ~CAUSAL_MASK, "sparse_mode": 3},
    "needs one prefix per sequence": {"atten_mask": PREFIX_MASK, "sparse_mode": 6},
    "sparse_mode 7 does not exist": {"atten_mask": CAUSAL_MASK, "sparse_mode": 7},
    "leave an empty band": {
        "atten_mask": CAUSAL_MASK,
        "sparse_mode": 4,
        "pre_tockens": -2,
        "next_tockens": 1,
    },
    "pse has shape": {"pse": torch.zeros(1, 2, 4, 3)},
    "pse must have query's dtype": {"pse": torch.zeros(1, 2, 3, 3, dtype=torch.float64)},
    "sink has shape": {"sink": torch.zeros(3)},
    "dropout_mask has": {"dropout_mask": torch.zeros(1, dtype=torch.uint8), "keep_prob": 0.5},
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text):
    given = {"head_num": 2, "input_layout": "BNSD", **ERRORS[text]}
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(
        RuntimeError, match=f"npu_fusion_attention: .*{text}|npu_fusion_attention: {text}"
    ):
        torch.ops.jumar.npu_fusion_attention(q, q, q, **given)


def test_errors_of_tensors():
    q = torch.zeros(1, 2, 3, 4)
    for bad in (
        (q, q[:, :, :, :3], q),
        (q, q, q[:, :1]),
        (q, q.double(), q),
        (q[0], q, q),
        (q.long(), q, q),
    ):
        with pytest.raises(RuntimeError, match="npu_fusion_attention: "):
            torch.ops.jumar.npu_fusion_attention(*bad, 2, "BNSD")
    three = torch.zeros(1, 3, 3, 4)
    with pytest.raises(RuntimeError, match="must be a multiple"):
        torch.ops.jumar.npu_fusion_attention(three, q, q, 3, "BNSD")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("layout", ["BSH", "SBH"])
def test_errors_of_heads_that_do_not_fit(layout, device):
    """More heads of query than columns, and a key narrower than a head; in a graph, too."""
    for query, key in ((3, 3), (32, 4)):
        q, k = (torch.zeros(2, 5, width, device=device) for width in (query, key))
        with pytest.raises(RuntimeError, match="^npu_fusion_attention: "):
            torch.ops.jumar.npu_fusion_attention(q, k, k, 4, layout)


def test_empty_tensors():
    for batch, rows, keys in ((0, 3, 3), (1, 0, 3), (1, 3, 0)):
        q = torch.zeros(batch, 2, rows, 4, requires_grad=True)
        k = torch.zeros(batch, 2, keys, 4, requires_grad=True)
        out, maximum, total, *_ = ops.npu_fusion_attention(q, k, k, 2, "BNSD")
        assert out.shape == q.shape and not out.any() and not total.any()
        grads = torch.autograd.grad(out.sum(), (q, k))
        assert not any(g.any() for g in grads)


def test_schemas_are_the_vendors():
    assert (
        "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
        in str(torch.ops.jumar.npu_fusion_attention.default._schema)
    )
    for ns in jumar._load.NAMESPACES:
        schema = getattr(torch.ops, ns).npu_fusion_attention.default._schema
        names = [a.name for a in schema.arguments]
        assert names[5:8] == ["pse", "padding_mask", "atten_mask"] and names[-3:] == [
            "dropout_mask",
            "seed",
            "offset",
        ]
        assert len(schema.returns) == 7
        grad = getattr(torch.ops, ns).npu_fusion_attention_grad.default._schema
        assert len(grad.returns) == 5 and grad.arguments[6].kwarg_only
