"""npu_fusion_attention_v2 and _v3: ropes, numbers in tensors, schemas, autograd, compile, errors."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

import attention_ref as ref
import jumar
from attention_ref import CAUSAL_MASK
from attention_util import LAYOUTS, normal, sum_unit
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp


def leaves(dtype, *shapes, seed=0):
    return [normal(*s, dtype=dtype, seed=seed + i).requires_grad_() for i, s in enumerate(shapes)]


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ropes_are_more_columns(layout, dtype):
    batch, heads, kv, rows, keys = 2, 4, 2, 70, 150
    for size, rope, value_size in ((16, 8, 16), (33, 7, 20)):
        shapes = [
            (heads, rows, size),
            (kv, keys, size),
            (kv, keys, value_size),
            (heads, rows, rope),
            (kv, keys, rope),
        ]
        raw = [normal(batch, *s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
        inputs = [ref.in_layout(x, layout).contiguous().requires_grad_() for x in raw]
        pse = normal(batch, heads, rows, keys, dtype=dtype, seed=9).requires_grad_()
        dy = ref.in_layout(normal(batch, heads, rows, value_size, dtype=dtype, seed=8), layout)
        q, k, v, q_rope, k_rope = inputs
        out = ops.npu_fusion_attention_v2(
            q, k, v, heads, layout, query_rope=q_rope, key_rope=k_rope, scale=0.2, sparse_mode=3, pse=pse,
            atten_mask=CAUSAL_MASK,
        )[0]  # fmt: skip
        got = torch.autograd.grad(out, [*inputs, pse], dy)
        wide = [x.detach().double().requires_grad_() for x in (*raw, pse)]
        query, key = torch.cat([wide[0], wide[3]], -1), torch.cat([wide[1], wide[4]], -1)
        exact = ref.fusion_attention(
            query, key, wide[2], heads, "BNSD", scale=0.2, mask=CAUSAL_MASK, mode=3, pse=wide[5]
        )
        want = torch.autograd.grad(exact.out, wide, ref.heads_first(dy.double(), layout, heads))
        unit = 40 * sum_unit(dtype, size + rope) + sum_unit(dtype, keys)
        ulp = torch.finfo(dtype).eps
        assert_ulp(out, ref.in_layout(exact.out, layout), 0.51, "out", floor=4 * unit)
        for name, g, w in zip(
            ("dq", "dk", "dv", "dq_rope", "dk_rope", "dpse"), got, want, strict=True
        ):
            w = w if name == "dpse" else ref.in_layout(w, layout)
            # Rows cancel to 0; a gradient sums up to `rows` of them for each of two heads.
            assert_ulp(g, w, 0.51, name, floor=(200 * unit + 40 * ulp) * w.abs().max())


def test_ropes_give_the_bits_of_joined_columns():
    q, k, v, q_rope, k_rope = leaves(
        torch.bfloat16,
        (1, 70, 4, 33),
        (1, 150, 2, 33),
        (1, 150, 2, 20),
        (1, 70, 4, 18),
        (1, 150, 2, 18),
    )
    out = ops.npu_fusion_attention_v2(
        q, k, v, 4, "BSND", query_rope=q_rope, key_rope=k_rope, scale=0.2
    )[0]
    joined = [torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1)]
    want = ops.npu_fusion_attention(*joined, v, 4, "BSND", scale=0.2)[0]
    inputs, dy = (q, k, v, q_rope, k_rope), torch.ones_like(out)
    assert torch.equal(out, want)
    assert same(torch.autograd.grad(out, inputs, dy), torch.autograd.grad(want, inputs, dy))


def test_no_ropes_is_the_first_version():
    q, k, v = leaves(torch.float32, (1, 4, 33, 16), (1, 2, 33, 16), (1, 2, 33, 8))
    sink = normal(4, dtype=torch.float32, seed=5).requires_grad_()
    given = {
        "atten_mask": CAUSAL_MASK,
        "scale": 0.3,
        "sparse_mode": 3,
        "keep_prob": 0.8,
        "sink": sink,
    }
    first = ops.npu_fusion_attention(q, k, v, 4, "BNSD", **given, seed=3, offset=4)
    second = ops.npu_fusion_attention_v2(q, k, v, 4, "BNSD", **given, seed=3, offset=4)
    assert same(first[:4], second[:4]) and first[4:] == second[4:]
    dy = torch.ones_like(first[0])
    inputs = (q, k, v, sink)
    assert same(
        torch.autograd.grad(first[0], inputs, dy), torch.autograd.grad(second[0], inputs, dy)
    )
    # v3 draws its seed from torch's generator and returns it.
    torch.manual_seed(1)
    third = ops.npu_fusion_attention_v3(q, k, v, 4, "BNSD", **given)
    seed, offset = (x.item() for x in third[4:])
    again = ops.npu_fusion_attention(q, k, v, 4, "BNSD", **given, seed=seed, offset=offset)
    assert same(third[:4], again[:4])
    got = torch.autograd.grad(third[0], inputs, dy)
    assert same(got, torch.autograd.grad(again[0], inputs, dy))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_lengths_as_tensors(kind):
    q, k, v = leaves(torch.float64, (20, 4, 8), (23, 2, 8), (23, 2, 8))
    ends, ends_kv = [5, 5, 20], [9, 12, 23]
    first = ops.npu_fusion_attention(
        q, k, v, 4, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends_kv, sparse_mode=6, prefix=[1, 0, 3],
        atten_mask=ref.PREFIX_MASK,
    )  # fmt: skip
    third = ops.npu_fusion_attention_v3(
        q, k, v, 4, "TND", actual_seq_qlen=torch.tensor(ends, dtype=kind), sparse_mode=6, prefix=[1, 0, 3],
        actual_seq_kvlen=torch.tensor([[e, 0] for e in ends_kv], dtype=kind)[:, 0], atten_mask=ref.PREFIX_MASK,
    )  # fmt: skip
    assert same(first[:4], third[:4]) and [x.item() for x in third[4:]] == [0, 0]
    want, got = (torch.autograd.grad(x[0].square().sum(), (q, k, v)) for x in (first, third))
    assert same(got, want)


def test_gradients_by_name():
    """The _grad operators give what autograd gives."""
    q, k, v, q_rope, k_rope = leaves(
        torch.float64, (9, 4, 6), (9, 2, 6), (9, 2, 5), (9, 4, 3), (9, 2, 3)
    )
    sink = normal(4, seed=7).requires_grad_()
    ends = [4, 9]
    lists = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    mask = {"atten_mask": CAUSAL_MASK, "sparse_mode": 2, "softmax_layout": "TND"}
    for version in (1, 2, 3):
        given = {**mask, **lists, "sink": sink}
        inputs, extra, seeds = [q, k, v], {}, {"seed": 3, "offset": 2}
        if version == 2:
            extra = {"query_rope": q_rope, "key_rope": k_rope}
        if version == 3:
            given.update({n: torch.tensor(x) for n, x in lists.items()})
        name = "npu_fusion_attention" + ("" if version == 1 else f"_v{version}")
        forward = {**given, **extra, "keep_prob": 0.7, "scale": 0.4}
        if version < 3:
            forward.update(seeds)
        results = getattr(ops, name)(*inputs, 4, "TND", **forward)
        out, maximum, total, _, seed, offset, *_ = results
        dy = normal(*out.shape, seed=11)
        want = torch.autograd.grad(out, [*inputs, *extra.values(), sink], dy)
        grad = name.replace("attention", "attention_grad")
        with torch.no_grad():
            got = getattr(ops, grad)(
                q, k, v, dy, 4, "TND", softmax_max=maximum, softmax_sum=total, attention_in=out, scale_value=0.4,
                keep_prob=0.7, seed=seed, offset=offset, **given, **extra,
            )  # fmt: skip
        assert got[3].shape == (0,) and len(got) == (7 if version == 2 else 5)
        assert same([*got[:3], *got[4:]], want), version


def test_gradcheck_of_ropes():
    inputs = leaves(
        torch.float64, (1, 4, 5, 3), (1, 2, 7, 3), (1, 2, 7, 2), (1, 4, 5, 2), (1, 2, 7, 2)
    )

    def call(q, k, v, q_rope, k_rope):
        return ops.npu_fusion_attention_v2(
            q, k, v, 4, "BNSD", query_rope=q_rope, key_rope=k_rope, scale=0.7, keep_prob=0.8, seed=5
        )[0]

    assert gradcheck(call, inputs)


def test_opcheck():
    q, k, v, q_rope, k_rope = leaves(
        torch.float32, (9, 4, 8), (9, 2, 8), (9, 2, 5), (9, 4, 4), (9, 2, 4)
    )
    lists = {"actual_seq_qlen": [3, 9], "actual_seq_kvlen": [4, 9]}
    opcheck(
        torch.ops.jumar.fusion_attention_v2.default,
        (q, k, v, 4, "TND", None, None, None, q_rope, k_rope, 0.3, 1.0, 9, 9, None, [3, 9], [4, 9], 0, "", None, None, 0, 0),
    )  # fmt: skip
    tensors = {n: torch.tensor(x) for n, x in lists.items()}
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns)
        opcheck(op.npu_fusion_attention_v3.default, (q, k, v, 4, "TND"), tensors)
        with torch.no_grad():
            out, maximum, total, *_ = op.npu_fusion_attention_v2(
                q, k, v, 4, "TND", query_rope=q_rope, key_rope=k_rope, **lists
            )
            results = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out}
            inputs = [x.detach() for x in (q, k, v)]
            ropes = {"query_rope": q_rope.detach(), "key_rope": k_rope.detach()}
            opcheck(
                op.npu_fusion_attention_grad_v2.default,
                (*inputs, out, 4, "TND"),
                {**results, **lists, **ropes},
            )
            opcheck(
                op.npu_fusion_attention_grad_v3.default,
                (*inputs, out, 4, "TND"),
                {**results, **tensors},
            )


def test_compiles_and_double_backward_raises():
    q, k, v, q_rope, k_rope = leaves(
        torch.float32, (9, 4, 8), (9, 2, 8), (9, 2, 5), (9, 4, 4), (9, 2, 4)
    )
    ends = torch.tensor([4, 9])

    def second(q, k, v, q_rope, k_rope):
        return ops.npu_fusion_attention_v2(
            q, k, v, 4, "TND", query_rope=q_rope, key_rope=k_rope, actual_seq_qlen=[4, 9], actual_seq_kvlen=[4, 9]
        )[0].sin()  # fmt: skip

    def third(q, k, v, q_rope, k_rope):
        return ops.npu_fusion_attention_v3(
            q, k, v, 4, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends
        )[0].sin()

    for f, inputs in ((second, (q, k, v, q_rope, k_rope)), (third, (q, k, v))):
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        want, got = f(q, k, v, q_rope, k_rope), compiled(q, k, v, q_rope, k_rope)
        assert torch.equal(want, got)
        wanted, *_ = (torch.autograd.grad(x.sum(), inputs) for x in (want,))
        assert same(torch.autograd.grad(got.sum(), inputs), wanted)
        (grad,) = torch.autograd.grad(f(q, k, v, q_rope, k_rope).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="fusion_attention"):
            grad.sum().backward()


def test_autocast():
    q, k, v, q_rope, k_rope = leaves(
        torch.float32, (1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9, 4), (1, 2, 9, 4)
    )
    sink = torch.zeros(2)
    ropes = {"query_rope": q_rope, "key_rope": k_rope}
    half = [x.bfloat16() for x in (q, k, v)]
    half_ropes = {n: x.bfloat16() for n, x in ropes.items()}
    with torch.autocast("cpu", torch.bfloat16):
        second = ops.npu_fusion_attention_v2(q, k, v, 2, "BNSD", sink=sink, **ropes)[0]
        third = ops.npu_fusion_attention_v3(q, k, v, 2, "BNSD", sink=sink)[0]
    assert torch.equal(
        second, ops.npu_fusion_attention_v2(*half, 2, "BNSD", sink=sink, **half_ropes)[0]
    )
    assert torch.equal(third, ops.npu_fusion_attention_v3(*half, 2, "BNSD", sink=sink)[0])


def test_errors():
    q = torch.zeros(1, 2, 3, 4)
    v2, v3 = torch.ops.jumar.npu_fusion_attention_v2, torch.ops.jumar.npu_fusion_attention_v3
    for given, text in (
        ({"pse_type": 0}, "pse_type must be 1, got 0"),
        ({"q_start_idx": [1]}, r"q_start_idx must be None, got \[1\]"),
        ({"kv_start_idx": [2]}, r"kv_start_idx must be None, got \[2\]"),
    ):
        with pytest.raises(NotImplementedError, match=f"npu_fusion_attention_v2: {text}"):
            v2(q, q, q, 2, "BNSD", **given)
    for given, text in (
        ({"query_rope": q}, "query_rope and key_rope go together"),
        ({"query_rope": q[0], "key_rope": q}, "query_rope must have 4 dimensions"),
        ({"query_rope": q, "key_rope": q[..., :3]}, "key_rope has shape"),
        (
            {"query_rope": q.double(), "key_rope": q.double()},
            "query_rope and key_rope must have query's dtype",
        ),
        ({"padding_mask": q}, "padding_mask is not supported"),
    ):
        with pytest.raises(RuntimeError, match=f"npu_fusion_attention_v2: {text}"):
            v2(q, q, q, 2, "BNSD", **given)
    for ends, text in (
        (torch.tensor([[3]]), r"actual_seq_\w+ must be int64 or int32 with one dimension"),
        (torch.tensor([3.0]), r"actual_seq_\w+ must be int64 or int32 with one dimension"),
        (torch.tensor([1]), "actual_seq_qlen and actual_seq_kvlen end at 1 and 1"),
    ):
        with pytest.raises(RuntimeError, match=f"npu_fusion_attention_v3: {text}"):
            v3(q[0], q[0], q[0], 3, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)


def test_schemas_are_the_vendors():
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns)
        v2 = op.npu_fusion_attention_v2.default._schema
        names = [a.name for a in v2.arguments]
        assert all(a.kwarg_only for a in v2.arguments[5:]) and not v2.arguments[4].kwarg_only
        assert names[5:12] == [
            "pse",
            "padding_mask",
            "atten_mask",
            "query_rope",
            "key_rope",
            "scale",
            "keep_prob",
        ]
        assert names[12:14] == ["pre_tokens", "next_tokens"] and names[-1] == "offset"
        assert len(op.npu_fusion_attention_grad_v2.default._schema.returns) == 7
        v3 = op.npu_fusion_attention_v3.default._schema
        assert str(v3.arguments[14].type) == "Optional[Tensor]" and len(v3.returns) == 6
        assert not any(a.kwarg_only for a in v3.arguments)
