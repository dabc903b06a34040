"""npu_fusion_attention over drawn layouts, rules, masks, lengths and heads: oracle, torch, permutations, packing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import attention_ref as ref
from attention_ref import CAUSAL_MASK, PREFIX_MASK
from attention_util import LAYOUTS, MODES, Case, arguments, normal
from jumar import ops
from op_util import FLOAT_DTYPES

heads_of = st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (3, 3)])
lengths = st.one_of(st.integers(1, 40), st.sampled_from([64, 131, 132, 133, 265, 513]))
sizes = st.integers(1, 40)
runs = settings(max_examples=30, deadline=None, derandomize=True)


@runs
@given(
    st.sampled_from(FLOAT_DTYPES), st.sampled_from(LAYOUTS), st.sampled_from(list(MODES)), st.integers(0, 3),
    st.integers(1, 2), heads_of, lengths, lengths, sizes, sizes, st.sampled_from([0.3, 1.0, -0.5]), st.booleans(),
    st.booleans(), st.integers(0, 2**20),
)  # fmt: skip
def test_oracle(
    dtype, layout, mode, shape, batch, heads, rows, keys, size, value_size, scale, bias, sink, seed
):
    rule = arguments(mode, batch, heads[0], rows, keys, shape)
    if "prefix" in rule:
        rule["prefix"] = rule["prefix"][:batch]
    if bias:
        rule["pse"] = normal(batch, heads[0], rows, keys, dtype=dtype, seed=seed + 7)
    if sink:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rule["sink"] = normal(heads[0], dtype=wide, seed=seed + 8)
    case = Case(
        dtype, batch, *heads, rows, keys, size, value_size, layout, seed=seed, scale=scale, **rule
    )
    case.check()

    # Rows that see nothing are 0, and so are their gradients.
    (out, maximum, total, *_), gradients = case.run()
    hidden = (
        (total[..., 0] == 0) if not sink else torch.zeros(batch, heads[0], rows, dtype=torch.bool)
    )
    assert (maximum[..., 0][hidden] == ref.LOWEST).all()
    for x in (out, gradients["dq"]):
        assert not ref.heads_first(x, layout, heads[0])[hidden].any()


@runs
@given(st.integers(1, 2), heads_of, lengths, sizes, sizes, st.booleans(), st.integers(0, 2**20))
def test_torch(batch, heads, rows, size, value_size, causal, seed):
    shapes = ((heads[0], size), (heads[1], size), (heads[1], value_size), (heads[0], value_size))
    q, k, v, dy = (normal(batch, n, rows, d, seed=seed + i) for i, (n, d) in enumerate(shapes))
    mask = torch.rand(batch, 1, rows, rows, generator=torch.Generator().manual_seed(seed)) < 0.5
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rule = (
        {"sparse_mode": 2, "atten_mask": CAUSAL_MASK}
        if causal
        else {"sparse_mode": 1, "atten_mask": mask}
    )
    got = ops.npu_fusion_attention(*leaves, heads[0], "BNSD", scale=0.4, **rule)[0]
    want = F.scaled_dot_product_attention(
        *leaves, attn_mask=None if causal else ~mask, is_causal=causal, scale=0.4, enable_gqa=True
    )
    grads = [torch.autograd.grad(x, leaves, dy) for x in (got, want)]
    for a, b in zip((got, *grads[0]), (want, *grads[1]), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@runs
@given(
    st.sampled_from(FLOAT_DTYPES), heads_of, st.lists(st.tuples(st.integers(0, 70), st.integers(0, 150)), min_size=1, max_size=5),
    st.integers(0, 6).filter(lambda mode: mode != 5), sizes, sizes, st.integers(0, 2**20), st.randoms(use_true_random=False),
)  # fmt: skip
def test_packed_is_each_document_and_order_does_not_matter(
    dtype, heads, documents, mode, size, value_size, seed, choose
):
    if not any(a for a, _ in documents) or not any(b for _, b in documents):
        documents = [*documents, (3, 5)]
    mask = {2: CAUSAL_MASK, 3: CAUSAL_MASK, 4: CAUSAL_MASK, 6: PREFIX_MASK}.get(mode)
    if mask is None:
        rows, keys = (max(n) for n in zip(*documents, strict=True))
        mask = torch.rand(rows, keys, generator=torch.Generator().manual_seed(seed)) < 0.4
    band = {"pre_tockens": 30, "next_tockens": 4} if mode in (0, 4) else {}
    parts = []
    for i, (rows, keys) in enumerate(documents):
        shapes = (
            (rows, heads[0], size),
            (keys, heads[1], size),
            (keys, heads[1], value_size),
            (rows, heads[0], value_size),
        )
        parts.append([normal(*s, dtype=dtype, seed=seed + 4 * i + j) for j, s in enumerate(shapes)])
    prefixes = [min(2 * i, keys) for i, (_, keys) in enumerate(documents)]

    def run(order):
        """Results of each document, calling all in one row of tokens in this order."""
        joined = [torch.cat([parts[i][j] for i in order]) for j in range(4)]
        leaves = [x.requires_grad_() for x in joined[:3]]
        ends = [torch.tensor([documents[i][j] for i in order]).cumsum(0).tolist() for j in range(2)]
        given = {"prefix": [prefixes[i] for i in order]} if mode == 6 else {}
        out, maximum, total, *_ = ops.npu_fusion_attention(
            *leaves, heads[0], "TND", scale=0.3, sparse_mode=mode, atten_mask=mask, softmax_layout="TND",
            actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], **given, **band,
        )  # fmt: skip
        results = [out, maximum, total, *torch.autograd.grad(out, leaves, joined[3])]
        split = [[documents[i][j] for i in order] for j in (0, 0, 0, 0, 1, 1)]
        pieces = [x.split(s) for x, s in zip(results, split, strict=True)]
        return {i: [p[at] for p in pieces] for at, i in enumerate(order)}

    order = list(range(len(documents)))
    together = run(order)
    choose.shuffle(order)
    shuffled = run(order)
    for i, (rows, keys) in enumerate(documents):
        assert all(torch.equal(a, b) for a, b in zip(together[i], shuffled[i], strict=True))
        if rows and keys:
            alone = run([i])[i]
            assert all(torch.equal(a, b) for a, b in zip(together[i], alone, strict=True))


@runs
@given(
    st.sampled_from(FLOAT_DTYPES),
    st.sampled_from(LAYOUTS),
    heads_of,
    lengths,
    sizes,
    st.integers(0, 2**20),
)
def test_batch_entries_are_permuted_with_their_results(dtype, layout, heads, rows, size, seed):
    shapes = (
        (heads[0], rows, size),
        (heads[1], rows, size),
        (heads[1], rows, size),
        (heads[0], rows, size),
    )
    raw = [normal(3, *s, dtype=dtype, seed=seed + i) for i, s in enumerate(shapes)]
    mask = torch.rand(3, 1, rows, rows, generator=torch.Generator().manual_seed(seed)) < 0.4

    def run(order):
        q, k, v, dy = (ref.in_layout(x[order], layout).contiguous() for x in raw)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = ops.npu_fusion_attention(
            *leaves, heads[0], layout, scale=0.3, sparse_mode=1, atten_mask=mask[order]
        )[0]
        grads = torch.autograd.grad(out, leaves, dy)
        count = (heads[0], heads[0], heads[1], heads[1])
        return [ref.heads_first(x, layout, n) for x, n in zip((out, *grads), count, strict=True)]

    plain, permuted = run([0, 1, 2]), run([2, 0, 1])
    assert all(torch.equal(a[[2, 0, 1]], b) for a, b in zip(plain, permuted, strict=True))


@pytest.mark.parametrize("shape", [(2, 1, 5, 5), (1, 1, 5, 5), (1, 1, 1, 5), (2, 1, 1, 5)])
def test_pse_repeats_wherever_it_has_one_and_layouts_may_be_in_lower_case(shape):
    """Not what the card takes: a bias of all heads, as masks of transformers are."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64, generator=gen).requires_grad_() for _ in range(3))
    pse = torch.randn(shape, dtype=torch.float64, generator=gen).requires_grad_()
    want = ((q @ k.transpose(-1, -2) + pse) * 0.3).softmax(-1) @ v
    weight = torch.randn(want.shape, dtype=torch.float64, generator=gen)
    layouts = {"bnsd": lambda t: t, "bsnd": lambda t: t.transpose(1, 2)}
    layouts |= {"bsh": lambda t: t.transpose(1, 2).flatten(2), "sbh": lambda t: t.permute(2, 0, 1, 3).flatten(2)}
    grads = torch.autograd.grad((want * weight).sum(), (q, k, v, pse))
    for layout, lay in layouts.items():
        out = ops.npu_fusion_attention(lay(q), lay(k), lay(v), 4, layout, pse=pse, scale=0.3)[0]
        torch.testing.assert_close(out, lay(want))
        got = torch.autograd.grad((out * lay(weight)).sum(), (q, k, v, pse))
        for a, b in zip(got, grads, strict=True):
            torch.testing.assert_close(a, b)
