"""The choice of the lightning indexer through torch: oracle, ties, layouts, lengths, special values, gradients, errors."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import jumar
import lightning_indexer_ref as ref
from attention_util import normal
from jumar import ops
from lightning_indexer_util import SHAPES, Losses, drawn, few, indexer, many, whole, wide
from op_util import FLOAT_DTYPES, assert_ulp, strided_views


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_choice(dtype):
    for batch, rows, keys, heads, size, count in SHAPES:
        given = indexer(batch, rows, keys, heads, size, dtype, whole)
        for mode in (0, 3):
            got, values = ops.npu_lightning_indexer(
                *given, sparse_count=count, sparse_mode=mode, return_value=True
            )
            want, exact = ref.choose(*wide(*given), count, ref.visible(rows, keys, mode))
            assert got.dtype == torch.int32 and torch.equal(got.squeeze(2).long(), want)
            assert torch.equal(values.squeeze(2), exact.to(dtype))
            alone, nothing = ops.npu_lightning_indexer(*given, sparse_count=count, sparse_mode=mode)
            assert torch.equal(alone, got) and nothing.shape == (0,)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_scores(dtype):
    given = indexer(2, 60, 400, 16, 128, dtype)
    got, values = ops.npu_lightning_indexer(*given, sparse_count=150, return_value=True)
    exact = ref.scores(*wide(*given))
    unit = (2.0**-53 if dtype == torch.float64 else 2.0**-24) * 16
    size = ref.scores(*(x.abs() for x in wide(*given))).amax()
    chosen = exact.gather(-1, got.squeeze(2).long())
    assert_ulp(values.squeeze(2), chosen, 0.51, "values", floor=unit * size)
    # Nothing that was left out is larger, but for the rounding of scores.
    rest = exact.masked_fill(~ref.visible(60, 400), ref.NINF).scatter(
        -1, got.squeeze(2).long(), ref.NINF
    )
    assert (rest.amax(-1) <= chosen.amin(-1) + 2 * unit * size).all()
    assert (values.diff(dim=-1) <= 0).all()


def test_rising_and_equal_scores():
    # Every key beats the last one; every key is as good as the first; the other way round.
    key = torch.arange(3000, dtype=torch.float32).view(1, -1, 1, 1)
    query, weights = torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1)
    for k in (1, 5, 700, 2999, 4000):
        for keys, want in ((key, range(2999, -1, -1)), (key * 0, range(3000)), (-key, range(3000))):
            got = ops.npu_lightning_indexer(query, keys, weights, sparse_count=k, sparse_mode=0)[0]
            padded = [*want, *[-1] * 1000][:k]
            assert got[0, 0, 0].tolist() == padded and got[0, 1, 0].tolist() == padded
    # D24 of the log of faults.
    q = torch.tensor([[1.0, -1.0], [0.0, 2.0]]).view(1, 1, 2, 2)
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]).view(1, 3, 1, 2)
    w = torch.tensor([1.0, 0.5]).view(1, 1, 2)
    got, values = ops.npu_lightning_indexer(q, k, w, sparse_count=3, return_value=True)
    assert got.flatten().tolist() == [0, 1, 2] and values.flatten().tolist() == [1, 1, 0]


def test_lengths_and_packed_sequences():
    q_len, k_len = [20, 0, 33], [45, 7, 20]
    for dtype in (torch.float64, torch.bfloat16):
        q, k, w = indexer(3, 33, 45, 4, 16, dtype, whole)
        lengths = {
            "actual_seq_lengths_query": torch.tensor(q_len, dtype=torch.int32),
            "actual_seq_lengths_key": torch.tensor(k_len, dtype=torch.int32),
        }
        padded = ops.npu_lightning_indexer(q, k, w, sparse_count=12, return_value=True, **lengths)
        want, exact = ref.choose(*wide(q, k, w), 12, ref.visible(33, 45, 3, q_len, k_len))
        assert torch.equal(padded[0].squeeze(2).long(), want)
        assert torch.equal(padded[1].squeeze(2), exact.to(dtype))
        packed = [
            torch.cat([x[i, :n] for i, n in enumerate(lens)])
            for x, lens in ((q, q_len), (k, k_len), (w, q_len))
        ]
        ends = {n: x.cumsum(0, dtype=torch.int32) for n, x in lengths.items()}
        got = ops.npu_lightning_indexer(
            *packed,
            sparse_count=12,
            return_value=True,
            layout_query="TND",
            layout_key="TND",
            **ends,
        )
        for a, b in zip(got, padded, strict=True):
            assert torch.equal(a, torch.cat([b[i, :n] for i, n in enumerate(q_len)]))


def test_special_values():
    q, k, w = indexer(1, 40, 300, 4, 8, torch.float32, whole)
    clean = ops.npu_lightning_indexer(q, k, w, sparse_count=50, return_value=True)
    hidden = k.clone()
    hidden[:, 280:] = float("nan")
    got = ops.npu_lightning_indexer(q, hidden, w, sparse_count=50, return_value=True)
    for a, b in zip(clean, got, strict=True):
        assert torch.equal(a[:, :20], b[:, :20])
    # A NaN that is seen comes first, as in torch.topk, and NaNs in order of position.
    assert (
        got[0][0, 39, 0, :20].tolist() == list(range(280, 300))
        and got[1][0, 39, 0, :20].isnan().all()
    )
    # A visible key whose score is -inf is still a key.
    low = ops.npu_lightning_indexer(torch.ones(1, 1, 1, 1), torch.tensor([1.0, 0, 2]).view(1, 3, 1, 1),
                                    torch.tensor([-math.inf]).view(1, 1, 1), sparse_count=4, return_value=True)  # fmt: skip
    assert low[0].flatten().tolist() == [1, 0, 2, -1] or low[1].flatten()[0].isnan()


def test_strides_and_weights_of_another_dtype():
    q, k, w = indexer(2, 20, 30, 3, 8, torch.bfloat16)
    plain = ops.npu_lightning_indexer(q, k, w, sparse_count=10, return_value=True)
    for name in strided_views(q):
        views = [strided_views(x)[name] for x in (q, k, w)]
        got = ops.npu_lightning_indexer(*views, sparse_count=10, return_value=True)
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True)), name
    got = ops.npu_lightning_indexer(q, k, w.float(), sparse_count=10, return_value=True)
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_gradient_of_values(dtype):
    for batch, rows, keys, heads, size, count in SHAPES:
        leaves = [x.requires_grad_() for x in indexer(batch, rows, keys, heads, size, dtype)]
        indices, values = ops.npu_lightning_indexer(*leaves, sparse_count=count, return_value=True)
        # What comes in at slots of -1 is ignored, NaN too.
        dy = normal(*values.shape, dtype=dtype, seed=9).masked_fill(indices < 0, float("nan"))
        got = torch.autograd.grad(values, leaves, dy)
        at = indices.squeeze(2).clamp(min=0).long()
        slope = dy.double().squeeze(2).masked_fill(indices.squeeze(2) < 0, 0)
        exact, sizes = ref.through_scores(
            slope, slope.abs(), at, *(x.detach().double() for x in leaves)
        )
        unit = (2.0**-53 if dtype == torch.float64 else 2.0**-24) * (size + rows + count) ** 0.5 * 2
        for a, b, s in zip(got, exact, sizes, strict=True):
            assert_ulp(a, b, 0.51, "gradient", floor=unit * s)


@drawn
@given(
    st.sampled_from(FLOAT_DTYPES), st.integers(1, 3), few, many, st.integers(1, 18), st.integers(1, 20),
    st.integers(1, 300), st.sampled_from([0, 3]), st.integers(0, 2**20),
)  # fmt: skip
def test_drawn_choices(dtype, batch, rows, keys, heads, size, count, mode, seed):
    make = partial(whole, seed=seed)
    q, k = make(batch, rows, heads, size, dtype=dtype), make(batch, keys, 1, size, dtype=dtype)
    w = make(batch, rows, heads, dtype=dtype)
    options = {"sparse_count": count, "sparse_mode": mode}
    got, values = ops.npu_lightning_indexer(q, k, w, return_value=True, **options)
    want, exact = ref.choose(*wide(q, k, w), count, ref.visible(rows, keys, mode))
    assert torch.equal(got.squeeze(2).long(), want) and torch.equal(
        values.squeeze(2), exact.to(dtype)
    )
    # Packed documents are documents on their own.
    ends = {
        f"actual_seq_lengths_{n}": torch.arange(1, batch + 1).int() * length
        for n, length in (("query", rows), ("key", keys))
    }
    flat = [x.flatten(0, 1) for x in (q, k, w)]
    packed = ops.npu_lightning_indexer(
        *flat, layout_query="TND", layout_key="TND", **ends, **options
    )[0]
    assert torch.equal(packed, got.flatten(0, 1))


def test_gradcheck():
    leaves = [x.requires_grad_() for x in indexer(1, 5, 9, 3, 4)]
    assert gradcheck(
        lambda *x: ops.npu_lightning_indexer(*x, sparse_count=4, return_value=True)[1][:, 2:],
        leaves,
    )
    indices, values = ops.npu_lightning_indexer(*leaves, sparse_count=4, return_value=True)
    assert not indices.requires_grad and values.requires_grad
    assert not ops.npu_lightning_indexer(*leaves, sparse_count=4)[1].requires_grad
    (grad,) = torch.autograd.grad(values[..., 0].sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="^npu_lightning_indexer: not differentiable twice"):
        grad.sum().backward()


def test_opcheck():
    given = [x.requires_grad_() for x in indexer(2, 9, 12, 3, 8, torch.float32)]
    case = Losses(torch.float32, 2, 9, 12, 3, 8, 5, 2, 8, 4)
    ids = case.indices.int().unsqueeze(2)
    ends = torch.tensor([9, 18], dtype=torch.int32), torch.tensor([12, 24], dtype=torch.int32)
    plain = [x.detach() for x in given]
    padded = None, None, None, "BSND", "BSND", 5, 3, 99, 99, True
    packed = *ends, None, "TND", "TND", 5, 0, 99, 99, False
    op = torch.ops.jumar.lightning_indexer.default
    torch.library.opcheck(op, (*plain, *padded))
    torch.library.opcheck(op, (*(x.flatten(0, 1) for x in plain), *packed))
    # opcheck's own check of gradients adds integers and numbers; test_compiles does it here.
    torch.library.opcheck(op, (*given, *padded), test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))  # fmt: skip
    for ns in jumar._load.NAMESPACES:
        table = getattr(torch.ops, ns)
        # The kernels of both are the same.
        opcheck = (
            partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
            if ns == "npu"
            else torch.library.opcheck
        )
        opcheck(
            table.npu_lightning_indexer.default,
            tuple(plain),
            {"sparse_count": 5, "return_value": True},
        )
        opcheck(
            table.npu_lightning_indexer_grad.default,
            (plain[0], plain[1], torch.randn(2, 9, 1, 5), ids, plain[2]),
        )
        opcheck(table.npu_dense_lightning_indexer_softmax_lse.default, tuple(plain))
        of_index = table.npu_dense_lightning_indexer_softmax_lse(*plain)
        opcheck(table.npu_sparse_lightning_indexer_grad_kl_loss.default,
                (case.query, case.key, *plain, ids, case.top[:, None], case.total[:, None], 0.3), case.options())  # fmt: skip
        opcheck(table.npu_dense_lightning_indexer_grad_kl_loss.default,
                (case.query, case.key, *plain, *case.by_head(), *of_index, 0.3), case.options())  # fmt: skip
    with pytest.raises(RuntimeError, match="grad_kl_loss: not differentiable"):
        case.indexer[0].requires_grad_()
        case.sparse()[3].backward()


def test_compiles():
    given = [x.requires_grad_() for x in indexer(1, 9, 12, 3, 8, torch.float32)]

    def f(*x):
        return ops.npu_lightning_indexer(*x, sparse_count=5, return_value=True)[1][..., :2].sum()

    got = torch.autograd.grad(torch.compile(f, fullgraph=True)(*given), given)
    assert all(
        torch.equal(a, b) for a, b in zip(got, torch.autograd.grad(f(*given), given), strict=True)
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layout_key": "PA_BSND"}, "paged keys"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, "paged keys"),
        ({"layout_query": "TND"}, "layout_query and layout_key"),
        ({"layout_query": "BNSD", "layout_key": "BNSD"}, "layout must be BSND or TND, got 'BNSD'"),
        ({"layout_query": "TND", "layout_key": "TND"}, "query must have 3 dimensions"),
        ({"sparse_count": 0}, "sparse_count must be positive, got 0"),
        ({"sparse_mode": 2}, "sparse_mode must be 0 or 3, got 2"),
        ({"sparse_mode": 0, "next_tokens": 0}, "must not hide keys"),
        ({"actual_seq_lengths_query": torch.tensor([10])}, "actual_seq_lengths_query"),
        ({"key": torch.zeros(1, 12, 2, 8)}, "one head"),
        ({"key": torch.zeros(1, 12, 1, 7)}, "key must have query's batch and head size"),
        ({"key": torch.zeros(1, 0, 1, 8)}, "must not be empty"),
        ({"key": torch.zeros(1, 12, 1, 8, dtype=torch.float64)}, "one floating dtype"),
        ({"weights": torch.zeros(1, 9, 3, dtype=torch.float64)}, "weights must be float32, got float64"),
        ({"weights": torch.zeros(1, 9, 4)}, "weights must be"),
    ],
)  # fmt: skip
def test_errors_of_the_choice(changes, text):
    given = (
        dict(zip(("query", "key", "weights"), indexer(1, 9, 12, 3, 8, torch.float32), strict=True))
        | changes
    )
    with pytest.raises(RuntimeError, match=f"npu_lightning_indexer: .*{text}"):
        ops.npu_lightning_indexer(**given)
