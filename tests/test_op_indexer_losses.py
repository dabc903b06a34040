"""The losses of the lightning indexer through torch: oracle, statistics, slots, packed sequences, hidden keys, errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_util import normal
from jumar import ops
from lightning_indexer_util import LOSSES, Losses, drawn, few, many
from op_util import FLOAT_DTYPES, assert_ulp


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_losses(dtype):
    for shape in LOSSES:
        case = Losses(dtype, *shape)
        case.compare(case.sparse(), case.exact_sparse())
        for kv in {1, case.query.shape[2]}:
            case = Losses(dtype, *shape, kv=kv)
            case.compare(case.dense(), case.exact_dense())


@drawn
@given(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(1, 2), few, many, st.integers(1, 18),
    st.integers(1, 20), st.integers(1, 150), st.sampled_from([(1, 1), (2, 1), (6, 3), (17, 17)]), st.integers(1, 20),
    st.sampled_from([0, 5]), st.integers(0, 2**20),
)  # fmt: skip
def test_drawn_losses(dtype, batch, rows, keys, heads, size, count, attention, d, rope, seed):
    case = Losses(dtype, batch, rows, keys, heads, size, count, attention[0], d, rope, seed=seed)
    case.compare(case.sparse(), case.exact_sparse())
    case = Losses(
        dtype, batch, rows, keys, heads, size, count, attention[0], d, rope, attention[1], seed=seed
    )
    got = case.dense()
    case.compare(got, case.exact_dense())
    # A batch in another order gives the same in that order.
    for name in ("query", "key", "indices", "top", "total", "seen"):
        setattr(case, name, getattr(case, name).flip(0))
    case.indexer = tuple(x.flip(0) for x in case.indexer)
    case.rope = case.rope and tuple(x.flip(0) for x in case.rope)
    for a, b in zip(case.dense()[:3], got, strict=False):
        assert torch.equal(a, b.flip(0))


def test_sparse_loss_takes_statistics_of_other_keys():
    for sinks in (None, torch.randn(4, dtype=torch.float64)):
        case = Losses(torch.float64, *LOSSES[2])
        case.statistics_of(torch.ones_like(case.seen), sinks)
        case.compare(case.sparse(), case.exact_sparse())


def test_dense_loss_takes_any_statistics():
    case = Losses(torch.float64, *LOSSES[2], kv=2)
    case.top, case.total = case.top - 1, case.total * 3
    of_index = normal(2, 70, seed=1), normal(2, 70, seed=2).exp()
    case.compare(case.dense(*(x.unsqueeze(1) for x in of_index)), case.exact_dense(*of_index))


def test_sparse_over_all_keys_is_dense():
    case = Losses(torch.float64, 2, 40, 60, 4, 16, 0, 4, 16, 8, every=True)
    for a, b in zip(case.sparse(), case.dense(), strict=True):
        assert_ulp(a, b, 1, "sparse", floor=1e-14)


def test_slots():
    """-1 is skipped wherever it stands; a slot twice is two slots; the order of slots is of no account."""
    case = Losses(torch.float64, *LOSSES[2])
    got = case.sparse()
    case.indices = torch.cat(
        [case.indices.new_full((2, 70, 3), -1), case.indices, case.indices[..., :1] * 0 - 1], -1
    )
    for a, b in zip(case.sparse(), got, strict=True):
        assert torch.equal(a, b)
    case.indices = case.indices.repeat(1, 1, 2)
    case.compare(case.sparse(), case.exact_sparse())
    case.indices = case.indices.flip(-1)
    case.ids = torch.int64
    case.compare(case.sparse(), case.exact_sparse())
    case.indices[:, 7] = -1
    got = case.sparse()
    assert not got[0][:, 7].any() and not got[2][:, 7].any()
    case.compare(got, case.exact_sparse())


def test_known_loss():
    # D26 of the log of faults: scores 1, 0, -1 against probabilities .5, .5, 0.
    q, w = torch.ones(1, 1, 2, 1), torch.tensor([1.0, -1.0]).view(1, 1, 2)
    q[0, 0, 1] = -1
    k = torch.tensor([1.0, 0, -1]).view(1, 3, 1, 1)
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 0.0, -200.0]).view(1, 3, 1, 1)
    top, total = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), 2.0)
    ids = torch.arange(3, dtype=torch.int32).view(1, 1, 1, 3)
    *_, loss = ops.npu_sparse_lightning_indexer_grad_kl_loss(
        query, key, q, k, w, ids, top, total, 1.0
    )
    assert loss.item() == pytest.approx(0.214459, abs=1e-6)
    slope = torch.tensor([0.165241, -0.255272, 0.090031])
    dw = ops.npu_sparse_lightning_indexer_grad_kl_loss(query, key, q, k, w, ids, top, total, 1.0)[2]
    assert dw.flatten().tolist() == pytest.approx([slope[0].item(), slope[2].item()], abs=1e-6)


def test_packed_losses_are_each_sequence_on_its_own():
    case = Losses(torch.float64, 1, 50, 60, 4, 16, 20, 4, 16, 8)
    q_ends, k_ends = [20, 20, 50], [35, 40, 60]
    spans = [(slice(0, 20), slice(0, 35)), (slice(20, 50), slice(40, 60))]
    case.indices = case.indices % 20
    ropes = {n: x.squeeze(0) for n, x in case.options().items()}
    lists = {"actual_seq_qlen": q_ends, "actual_seq_klen": k_ends, "layout": "TND"}
    given = [x.squeeze(0) for x in (case.query, case.key, *case.indexer)]
    of_index = ops.npu_dense_lightning_indexer_softmax_lse(*given[2:], **lists)
    assert of_index[0].shape == (1, 50)
    sparse = ops.npu_sparse_lightning_indexer_grad_kl_loss(
        *given,
        case.indices.int().squeeze(0).unsqueeze(1),
        case.top,
        case.total,
        case.scale,
        **ropes,
        **lists,
    )
    dense = ops.npu_dense_lightning_indexer_grad_kl_loss(
        *given,
        *(x.squeeze(0).T.unsqueeze(-1) for x in (case.top, case.total)),
        *of_index,
        case.scale,
        **ropes,
        **lists,
    )
    losses = [0.0, 0.0]
    for rows, keys in spans:
        part = Losses.__new__(Losses)
        part.dtype, part.scale = case.dtype, case.scale
        q, k, w = case.indexer
        part.indexer = q[:, rows], k[:, keys], w[:, rows]
        part.query, part.key, part.rope = (
            case.query[:, rows],
            case.key[:, keys],
            (case.rope[0][:, rows], case.rope[1][:, keys]),
        )
        part.indices, part.top, part.total = (
            case.indices[:, rows],
            case.top[:, rows],
            case.total[:, rows],
        )
        for i, (got, want) in enumerate(((sparse, part.sparse()), (dense, part.dense()))):
            losses[i] += want[3].item()
            for a, b, span in zip(got, want, (rows, keys, rows), strict=False):
                assert_ulp(a[span], b.squeeze(0), 4, "part", floor=1e-16)
    assert [sparse[3].item(), dense[3].item()] == pytest.approx(losses, rel=1e-14)
    assert not dense[1][35:40].any()


def test_hidden_keys_do_not_leak():
    case = Losses(torch.float32, 1, 40, 60, 4, 16, 0, 4, 16, 8, every=True)
    clean = case.sparse(), case.dense()
    for x in (case.key, case.indexer[1], case.rope[1]):
        x[:, 50:] = float("nan")
    for got, want in zip((case.sparse(), case.dense()), clean, strict=True):
        for at in (0, 2):
            assert torch.equal(got[at][:, :30], want[at][:, :30])


@pytest.mark.parametrize("way", ["sparse", "dense"])
def test_gradients_are_those_of_the_loss(way):
    case = Losses(torch.float64, 1, 6, 9, 3, 4, 5, 2, 4, 2)
    got = getattr(case, way)()
    for at, x in enumerate(case.indexer):
        for i in range(0, x.numel(), 3):
            sides = []
            for step in (1e-6, -1e-6):
                x.view(-1)[i] += step
                sides.append(getattr(case, way)()[3].item())
                x.view(-1)[i] -= step
            assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(
                got[at].view(-1)[i].item(), abs=1e-7
            )


@pytest.mark.parametrize("bad", [-2, 12])
def test_errors_of_indices(bad):
    case = Losses(torch.float32, 1, 9, 12, 3, 8, 5, 2, 8, 0)
    case.indices[0, 3, 2] = bad
    with pytest.raises(
        RuntimeError, match=rf"kl_loss: sparse_indices is {bad} at position \[0, 3, 2\]"
    ):
        case.sparse()
    q, k, w = case.indexer
    with pytest.raises(RuntimeError, match=f"npu_lightning_indexer_grad: sparse_indices is {bad}"):
        ops.npu_lightning_indexer_grad(q, k, torch.zeros(1, 9, 5), case.indices.int(), w)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("top", torch.zeros(1, 9, 3), "softmax_max must be"),
        ("total", torch.zeros(1, 9, 2, dtype=torch.float64), "softmax_sum must be"),
        ("query", torch.zeros(1, 8, 2, 8), "query must be"),
        ("key", torch.zeros(1, 12, 1, 7), "key must be"),
        ("rope", (torch.zeros(1, 9, 2, 4), torch.zeros(1, 12, 1, 5)), "key_rope must be"),
        ("rope", (torch.zeros(1, 9, 2, 4),), "go together"),
    ],
)
def test_errors_of_the_losses(name, value, text):
    for way in ("sparse", "dense"):
        case = Losses(torch.float32, 1, 9, 12, 3, 8, 5, 2, 8, 4)
        setattr(case, name, value)
        with pytest.raises(
            RuntimeError, match=f"npu_{way}_lightning_indexer_grad_kl_loss: .*{text}"
        ):
            getattr(case, way)()
    case = Losses(torch.float32, 1, 9, 12, 3, 8, 5, 2, 8, 4)
    with pytest.raises(RuntimeError, match="go with layout TND"):
        ops.npu_dense_lightning_indexer_softmax_lse(
            *case.indexer, actual_seq_qlen=[9], actual_seq_klen=[12]
        )
