"""The lightning indexer of DeepSeek sparse attention and its losses. See docs/ops/npu_lightning_indexer.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    compute_dtype,
    define_by_position,
    forbid_autograd,
    gradient,
    register_autocast,
    register_autograd,
    register_fake,
)


@calls_operator
def npu_lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The keys with the largest ``(weights * relu(query @ key.T)).sum(heads)`` for each query.

    Args:
        query: [B, S1, N, D], or [T1, N, D] with both layouts ``"TND"``; fp32, bf16, fp16 or fp64, any strides.
        key: [B, S2, 1, D] or [T2, 1, D].
        weights: [B, S1, N] or [T1, N], query's dtype or fp32. There is no other scale.
        options: ``actual_seq_lengths_query``, ``actual_seq_lengths_key``: int32 tensors, lengths per batch entry, for
            TND ends of sequences (cumulative, needed). ``layout_query``, ``layout_key``. ``sparse_count`` (2048): how
            many keys. ``sparse_mode``: 3, causal from the lower right, or 0. ``return_value``.

    Returns:
        (indices, values): int32 [B, S1, 1, sparse_count] or [T1, 1, sparse_count], positions within the sequence, the
        larger score first, of equal ones the lower position, -1 beyond the visible keys; the scores in query's dtype,
        -inf beside -1, or an empty tensor without ``return_value``. values are differentiable.

    Raises:
        RuntimeError: shapes, dtypes or lengths do not fit; paged keys.
    """


@calls_operator
def npu_dense_lightning_indexer_softmax_lse(
    query_index: Tensor, key_index: Tensor, weights: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exponentials of a row's scores over all keys that it sees: [B, 1, S1], for TND [1, T1].

    ``options``: ``actual_seq_qlen``, ``actual_seq_klen`` (lists of ends, TND), ``layout``.
    """


@calls_operator
def npu_sparse_lightning_indexer_grad_kl_loss(
    query: Tensor, key: Tensor, query_index: Tensor, key_index: Tensor, weights: Tensor, sparse_indices: Tensor,
    softmax_max: Tensor, softmax_sum: Tensor, scale_value: float, **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The divergence of the indexer's softmax from attention over the chosen keys, and its gradients.

    Args:
        query, key: of the attention, [B, S1, N1, D] and [B, S2, 1, D], with ``query_rope`` and ``key_rope`` in
            ``options``. softmax_max, softmax_sum: [B, 1, S1, N1], as ``npu_sparse_flash_attention`` returns them.
        query_index, key_index, weights: as :func:`npu_lightning_indexer` takes them; sparse_indices [B, S1, 1, K].
        scale_value: of the attention's scores.
        options: also ``actual_seq_qlen``, ``actual_seq_klen`` (lists of ends, TND), ``layout``.

    Returns:
        (d_query_index, d_key_index, d_weights, loss): gradients, and the loss [1] in fp32 (fp64 for fp64), **summed** over all
        rows.
        Slots of -1 and keys that a row does not see are skipped wherever they stand; duplicates count separately.
    """


@calls_operator
def npu_dense_lightning_indexer_grad_kl_loss(
    query: Tensor, key: Tensor, query_index: Tensor, key_index: Tensor, weights: Tensor, softmax_max: Tensor,
    softmax_sum: Tensor, softmax_max_index: Tensor, softmax_sum_index: Tensor, scale_value: float, **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As :func:`npu_sparse_lightning_indexer_grad_kl_loss` over all keys that a row sees.

    query [B, S1, N1, D] and key [B, S2, Nk, D] are those of attention with heads; softmax_max and softmax_sum are
    [B, N1, S1, 1] (TND: [N1, T1, 1]), the last two of :func:`npu_dense_lightning_indexer_softmax_lse`.
    """


define_by_position(
    "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None,"
    " Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', str layout_key='BSND',"
    " int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807,"
    " int next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)",
    lambda *args: torch.ops.jumar.lightning_indexer(*args),
)


def _fake(query: Tensor, key: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    sparse_count, return_value = rest[5], rest[9]
    shape = [*query.shape[:-2], 1, sparse_count]
    values = query.new_empty(shape if return_value else [0])
    return query.new_empty(shape, dtype=torch.int32), values


def _grads(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs)


def _lse_fake(
    query_index: Tensor, key_index: Tensor, weights: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    rows = query_index.shape[:-2]
    shape = [1, *rows] if len(rows) == 1 else [rows[0], 1, rows[1]]
    dtype = compute_dtype(query_index.dtype)
    return query_index.new_empty(shape, dtype=dtype), query_index.new_empty(shape, dtype=dtype)


def _loss_fake(
    query: Tensor, key: Tensor, query_index: Tensor, key_index: Tensor, weights: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    loss = query_index.new_empty([1], dtype=compute_dtype(query_index.dtype))
    return *_grads(query_index, key_index, weights), loss


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, weights, lengths_query, lengths_key, _, ctx.layout, *_ = inputs
    indices, values = output
    ctx.save_for_backward(query, key, weights, lengths_query, lengths_key, indices)
    ctx.mark_non_differentiable(indices, *([] if inputs[-1] else [values]))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, _: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    query, key, weights, lengths_query, lengths_key, indices = ctx.saved_tensors
    grads = torch.ops.jumar.npu_lightning_indexer_grad(
        query, key, dy, indices, weights, lengths_query, lengths_key, ctx.layout
    )
    return tuple(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False))


register_fake("lightning_indexer", _fake, shown="npu_lightning_indexer")
register_autograd("lightning_indexer", _backward, _setup)
# weights stay as they are: fp32 beside 16-bit queries and keys.
register_autocast("lightning_indexer", keep=range(2, 13))
npu_lightning_indexer_grad = gradient(
    "npu_lightning_indexer_grad",
    lambda query, key, dy, sparse_indices, weights, *_: _grads(query, key, weights),
    "Gradients of the values of :func:`npu_lightning_indexer`: (d_query, d_key, d_weights). Slots of -1 are skipped.",
)
register_fake("npu_dense_lightning_indexer_softmax_lse", _lse_fake)
for _name in ("sparse", "dense"):
    register_fake(f"npu_{_name}_lightning_indexer_grad_kl_loss", _loss_fake)
    forbid_autograd(f"npu_{_name}_lightning_indexer_grad_kl_loss")
forbid_autograd("npu_dense_lightning_indexer_softmax_lse")
