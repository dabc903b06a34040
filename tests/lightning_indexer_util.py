"""What the tests of the lightning indexer share: data, and the inputs of both losses with the oracle's results."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st

import lightning_indexer_ref as ref
from attention_util import normal
from jumar import ops
from op_util import assert_ulp

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


def indexer(batch, rows, keys, heads, size, dtype=torch.float64, make=normal, seed=0):
    weights = (make(batch, rows, heads, dtype=torch.float64, seed=seed + 3) / 8).to(dtype)
    return (
        make(batch, rows, heads, size, dtype=dtype, seed=seed),
        make(batch, keys, 1, size, dtype=dtype, seed=seed + 2),
        weights,
    )


def wide(*tensors):
    return tuple(None if t is None else t.double() for t in tensors)


class Losses:
    """Inputs of both losses: attention with rope beside the indexer, and the statistics of attention."""

    ids = torch.int32

    def __init__(
        self, dtype, batch, rows, keys, heads, size, count, n, d, rope, kv=1, every=False, seed=0
    ):
        self.dtype = dtype
        self.indexer = indexer(batch, rows, keys, heads, size, dtype, seed=seed)

        def make(size, at):
            """Queries and keys of ``size`` columns."""
            shapes = (batch, rows, n, size), (batch, keys, kv, size)
            return tuple(normal(*x, dtype=dtype, seed=seed + at + i) for i, x in enumerate(shapes))

        self.query, self.key = make(d, 5)
        self.rope = make(rope, 7) if rope else None
        self.scale = (d + rope) ** -0.5
        self.seen = ref.visible(rows, keys).expand(batch, -1, -1)
        draw = torch.randint(
            -1, keys, (batch, rows, count), generator=torch.Generator().manual_seed(seed + 9)
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


drawn = settings(max_examples=25, deadline=None, derandomize=True)


few, many = st.integers(1, 20), st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 257]))
