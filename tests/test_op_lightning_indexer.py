"""The lightning indexer through torch: oracle, ties, layouts, lengths, special values, losses, gradients, errors."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck

import jumar
import lightning_indexer_ref as ref
from attention_util import normal
from jumar import ops
from op_util import FLOAT_DTYPES, assert_ulp, strided_views

SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 5, 7, 3, 8, 4),
    (1, 40, 33, 4, 16, 64),
    (2, 150, 300, 16, 32, 20),
    (1, 700, 700, 2, 8, 100),
]


def whole(*shape, dtype=torch.float32, seed=0):
    """Small whole numbers: scores are exact in every dtype, and many are alike."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def indexer(batch, rows, keys, heads, size, dtype=torch.float64, make=normal):
    weights = (make(batch, rows, heads, dtype=torch.float64, seed=3) / 8).to(dtype)
    return (
        make(batch, rows, heads, size, dtype=dtype),
        make(batch, keys, 1, size, dtype=dtype, seed=2),
        weights,
    )


def wide(*tensors):
    return tuple(None if t is None else t.double() for t in tensors)


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


class Losses:
    """Inputs of both losses: attention with rope beside the indexer, and the statistics of attention."""

    ids = torch.int32

    def __init__(self, dtype, batch, rows, keys, heads, size, count, n, d, rope, kv=1, every=False):
        self.dtype = dtype
        self.indexer = indexer(batch, rows, keys, heads, size, dtype)

        def make(*shape, seed):
            return normal(*shape, dtype=dtype, seed=seed)

        self.query, self.key = make(batch, rows, n, d, seed=5), make(batch, keys, kv, d, seed=6)
        self.rope = (
            (make(batch, rows, n, rope, seed=7), make(batch, keys, kv, rope, seed=8))
            if rope
            else None
        )
        self.scale = (d + rope) ** -0.5
        self.seen = ref.visible(rows, keys).expand(batch, -1, -1)
        draw = torch.randint(
            -1, keys, (batch, rows, count), generator=torch.Generator().manual_seed(9)
        )
        self.indices = torch.arange(keys).expand(batch, rows, -1) if every else draw
        self.statistics_of(self.seen)

    def statistics_of(self, seen, sinks=None):
        stored = torch.float64 if self.dtype == torch.float64 else torch.float32
        pair = ref.statistics(
            *wide(self.query, self.key), self.scale, seen, self.wide_rope(), sinks
        )
        self.top, self.total = (x.to(stored) for x in pair)

    def wide_rope(self):
        return self.rope and wide(*self.rope)

    def options(self):
        return dict(zip(("query_rope", "key_rope"), self.rope or (), strict=False))

    def sparse(self):
        return ops.npu_sparse_lightning_indexer_grad_kl_loss(
            self.query, self.key, *self.indexer, self.indices.to(self.ids).unsqueeze(2), self.top[:, None],
            self.total[:, None], self.scale, **self.options(),
        )  # fmt: skip

    def exact_sparse(self):
        return ref.sparse_loss(
            *wide(self.query, self.key), wide(*self.indexer), self.indices, *wide(self.top, self.total), self.scale,
            self.seen, self.wide_rope(),
        )  # fmt: skip

    def by_head(self):
        return [x.transpose(1, 2).unsqueeze(-1) for x in (self.top, self.total)]

    def dense(self, *of_index):
        of_index = of_index or ops.npu_dense_lightning_indexer_softmax_lse(*self.indexer)
        return ops.npu_dense_lightning_indexer_grad_kl_loss(
            self.query,
            self.key,
            *self.indexer,
            *self.by_head(),
            *of_index,
            self.scale,
            **self.options(),
        )

    def exact_dense(self, *of_index):
        if not of_index:
            found = ref.scores(*wide(*self.indexer)).masked_fill(~self.seen, ref.NINF)
            top = found.amax(-1).clamp(min=ref.LOWEST)
            of_index = top, (found - top[..., None]).exp().sum(-1)
        return ref.dense_loss(
            *wide(self.query, self.key), wide(*self.indexer), *wide(self.top, self.total), *of_index, self.scale,
            self.seen, self.wide_rope(),
        )  # fmt: skip

    def compare(self, got, exact):
        """An error of a score moves the probabilities of its row by that much."""
        size = ref.scores(*(x.abs() for x in wide(*self.indexer))).amax()
        heads, d = self.indexer[0].shape[2:]
        unit = 2.0**-53 if self.dtype == torch.float64 else 2.0**-24
        unit = unit * 2 * (size * (heads + d) ** 0.5 + sum(self.query.shape[1:]) ** 0.5 + 16)
        for a, b, s, like in zip(got, exact.gradients, exact.sizes, self.indexer, strict=False):
            assert a.dtype == like.dtype
            assert_ulp(a, b, 0.51, "gradient", floor=unit * s)
        assert got[3].shape == (1,)
        assert_ulp(got[3], exact.loss[None], 0.51, "loss", floor=unit * self.seen.sum() ** 0.5)


LOSSES = [
    (1, 1, 1, 1, 1, 1, 1, 1, 0),
    (2, 5, 7, 3, 8, 4, 2, 8, 4),
    (2, 70, 150, 8, 16, 40, 4, 24, 8),
    (1, 33, 20, 16, 128, 300, 8, 40, 0),
]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_losses(dtype):
    for shape in LOSSES:
        case = Losses(dtype, *shape)
        case.compare(case.sparse(), case.exact_sparse())
        for kv in {1, case.query.shape[2]}:
            case = Losses(dtype, *shape, kv=kv)
            case.compare(case.dense(), case.exact_dense())


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


def test_results_do_not_depend_on_threads():
    threads = torch.get_num_threads()
    runs = []
    case = Losses(torch.bfloat16, 1, 300, 400, 8, 32, 150, 4, 32, 16)
    leaves = [x.clone().requires_grad_() for x in case.indexer]
    try:
        for n in (1, 2, 3, 8):
            torch.set_num_threads(n)
            indices, values = ops.npu_lightning_indexer(
                *leaves, sparse_count=100, return_value=True
            )
            grads = torch.autograd.grad(
                values, leaves, torch.ones_like(values).masked_fill(indices < 0, 0)
            )
            runs.append([indices, values, *grads, *case.sparse(), *case.dense()])
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


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
    with pytest.raises(RuntimeError, match="npu_lightning_indexer_grad: not differentiable"):
        grad.sum().backward()


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
