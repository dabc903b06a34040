"""``npu_sparse_flash_attention``: attention of each query to keys of its own choice.

See docs/ops/npu_sparse_flash_attention.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    compute_dtype,
    define_composite,
    gradient,
    register_autocast,
    register_autograd,
    register_fake,
)

_NAME = "npu_sparse_flash_attention"
#: The only value that pre_tokens and next_tokens have.
_UNBOUNDED = 9223372036854775807


@calls_operator
def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``softmax(scale_value * [query|query_rope] @ [key|key_rope].T over the picked keys) @ value`` per head.

    Args:
        query: [B, S1, N, D], or [T1, N, D] with ``layout_query="TND"``; fp32, bf16, fp16 or fp64, any strides.
        key, value: [B, S2, Nk, D] and [B, S2, Nk, Dv], or [T2, Nk, ..]; may be one tensor.
        sparse_indices: [B, S1, Nk, K] or [T1, Nk, K] int32 or int64: ids of blocks of ``sparse_block_size`` keys,
            counted within the sequence. -1 is skipped wherever it stands, an id that comes twice counts twice.
        options: actual_seq_lengths_query, actual_seq_lengths_kv (int32: lengths, for TND cumulative ends), query_rope,
            key_rope ([.., Dr], more columns of query and key), sparse_block_size, layout_query and layout_kv,
            sparse_mode (0 all keys, 3 causal from the lower right), return_softmax_lse, sinks ([N] fp32). block_table,
            pre_tokens and next_tokens must keep their defaults; attention_mode has no effect.

    Returns:
        (out, softmax_max, softmax_sum): out [B, S1, N, Dv], statistics [B, Nk, S1, N / Nk] (TND: [Nk, T1, N / Nk]) in
        fp32 (fp64 for fp64), [0] without ``return_softmax_lse``. out is differentiable in query, key, value, the ropes
        and sinks. A row without keys is 0.

    Raises:
        RuntimeError: shapes, dtypes, lengths or ids do not fit, or an argument is not supported.
    """


def _fake(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *batch, rows, heads, _ = query.shape
    kv_heads = key.shape[-2]
    statistics = [
        query.new_empty(
            (*batch, kv_heads, rows, heads // kv_heads), dtype=compute_dtype(query.dtype)
        )
        for _ in range(2)
    ]
    return query.new_empty((*batch, rows, heads, value.shape[-1])), *statistics


def _like(query: Tensor, x: Tensor | None) -> Tensor:
    return query.new_empty((0,)) if x is None else x.new_empty(x.shape)


def _gradients(query: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(_like(query, x) for x in (query, *others))


npu_sparse_flash_attention_grad = gradient(
    f"{_NAME}_grad",
    lambda *args: _gradients(*args[:3], *args[10:12]),
    """(dq, dk, dv, dq_rope, dk_rope) of :func:`npu_sparse_flash_attention`; those of the ropes are [0] without ropes.

    Args:
        d_out: gradient of ``out``. out, softmax_max, softmax_sum: of the forward with ``return_softmax_lse``.
        actual_seq_qlen, actual_seq_kvlen: the lengths. layout: that of query and key.
    """,
)
_sparse_attention_backward = gradient(
    "sparse_attention_backward",
    lambda *args: _gradients(*args[:3], *args[11:14]),
    shown=f"{_NAME}_grad",
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, indices, ctx.scale, *optional = inputs
    *tensors, block, layout, mode = optional
    ctx.save_for_backward(query, key, value, indices, *output, *tensors)
    ctx.options = (block, layout, mode)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * 10
    query, key, value, indices, out, most, total, *tensors = ctx.saved_tensors
    results = _sparse_attention_backward(
        query, key, value, indices, grad, out, most, total, ctx.scale, *tensors, *ctx.options
    )
    for at, result in zip((0, 1, 2, 7, 8, 9), results, strict=True):
        if ctx.needs_input_grad[at]:
            grads[at] = result
    return tuple(grads)


def _fail(text: str) -> None:
    raise RuntimeError(f"{_NAME}: {text}")


def _composite(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float, *,
    block_table: Tensor | None = None, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None, query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    sparse_block_size: int = 1, layout_query: str = "BSND", layout_kv: str = "BSND", sparse_mode: int = 3,
    pre_tokens: int = _UNBOUNDED, next_tokens: int = _UNBOUNDED, attention_mode: int = 0,
    return_softmax_lse: bool = False, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if block_table is not None:
        _fail(
            f"block_table belongs to paged keys, which are not supported; got {list(block_table.shape)}"
        )
    if layout_kv != layout_query:
        _fail(f"layout_kv must be layout_query '{layout_query}', got '{layout_kv}'")
    for name, bound in (("pre_tokens", pre_tokens), ("next_tokens", next_tokens)):
        if bound != _UNBOUNDED:
            _fail(f"{name} must keep its default {_UNBOUNDED}, got {bound}")
    out, most, total = torch.ops.jumar.sparse_attention(
        query, key, value, sparse_indices, scale_value, actual_seq_lengths_query, actual_seq_lengths_kv, query_rope,
        key_rope, sinks, sparse_block_size, layout_query, sparse_mode,
    )  # fmt: skip
    if not return_softmax_lse:
        most, total = (most.new_empty((0,)) for _ in range(2))
    return out, most, total


register_fake("sparse_attention", _fake, shown=_NAME)
register_autograd("sparse_attention", _backward, _setup)
# sinks stay in fp32.
register_autocast("sparse_attention", keep=(9,))
define_composite(
    f"{_NAME}(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *, "
    "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND', "
    f"str layout_kv='BSND', int sparse_mode=3, int pre_tokens={_UNBOUNDED}, int next_tokens={_UNBOUNDED}, "
    "int attention_mode=0, bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
    _composite,
)
