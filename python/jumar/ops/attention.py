"""``npu_fusion_attention``: softmax attention in tiles, without a matrix of scores. See docs/ops/npu_fusion_attention.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    compute_dtype,
    forbid_autograd,
    register_autocast,
    register_autograd,
    register_fake,
)

#: No bound of a band: the vendor's default of pre_tockens and next_tockens.
UNBOUNDED = 2147483647

_LAYOUTS = ("BSH", "SBH", "BNSD", "BSND", "TND")


@calls_operator
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED,
    next_tockens: int = UNBOUNDED,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """``dropout(softmax(mask(scale * (query @ key.T + pse)))) @ value`` per head.

    Args:
        query, key, value: fp32, bf16, fp16 or fp64, any strides, in the layout ``input_layout``: ``"BSH"``, ``"SBH"``,
            ``"BNSD"``, ``"BSND"``, or ``"TND"`` for packed sequences. ``head_num``: heads of query, a multiple of those
            of key and value. value may have another head size.
        pse: added to the scores before the scale: [B, N, Sq, Skv], [B, N, 1, Skv] or [1, N, Sq, Skv], query's dtype.
        padding_mask: must be None, as on the card.
        atten_mask: bool or uint8, **1 hides** (the opposite of ``scaled_dot_product_attention``): [B, N, Sq, Skv],
            [B, 1, Sq, Skv], [1, 1, Sq, Skv], [Sq, Skv], or the compressed mask of ``sparse_mode``. **Without a mask,
            ``sparse_mode``, ``pre_tockens`` and ``next_tockens`` have no effect: attention is full.**
        scale: of the scores. The default is 1, not 1 / sqrt(D).
        keep_prob: 1 - dropout. The pattern is a function of ``seed`` and ``offset``, drawn from torch's generator where
            both are 0; ``dropout_mask`` (one bit per score, 1 = keep) replaces it.
        prefix: for sparse_mode 6, visible keys at the start of each sequence.
        actual_seq_qlen, actual_seq_kvlen: for TND, where each sequence ends (cumulative, without a leading 0).
        sparse_mode: 0 mask and band, 1 mask, 2 causal from the upper left, 3 causal from the lower right, 4 band from
            the lower right, 5 mask with prefix, 6 causal with prefix, 7 and 8 packed sequences one of which was cut.
        softmax_layout: for TND, ``"TND"`` orders the statistics as the shape says, ``""`` by heads first.
        sink: [N] fp32, one more score per head without a value.
        inner_precise, gen_mask_parallel, sync: hints of the card, without effect.

    Returns:
        (out, softmax_max, softmax_sum, softmax_out, seed, offset, numels). out has query's layout and value's head
        size. Statistics: fp32 (fp64 for fp64), [B, N, Sq, 8] or [T, N, 8], each value eight times; the logarithm of the
        sum of exponentials is max + log(sum). softmax_out is empty. out is differentiable in query, key, value, pse
        and sink. A row that sees no key is 0, with sum 0; NaN in hidden keys or values has no effect.

    Raises:
        RuntimeError: shapes, dtypes, lengths or a compressed mask do not fit, or an argument is not supported.
    """


@calls_operator
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    **rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`npu_fusion_attention`: (dq, dk, dv, dpse, dsink), the last two empty without pse or sink.

    ``rest``: softmax_max, softmax_sum and attention_in (the output) of the forward, and its other arguments, by their
    names (scale is ``scale_value``).
    """


def _out_shape(
    op: str, query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str
) -> tuple[list[int], list[int]]:
    """Shapes of the output and of the statistics."""
    name = layout.upper()
    if name not in _LAYOUTS:
        raise RuntimeError(f"{op}: input_layout must be one of {_LAYOUTS}, got {layout!r}")
    if head_num <= 0:
        raise RuntimeError(f"{op}: head_num must be positive, got {head_num}")
    shape = list(query.shape)
    if name == "TND":
        return [*shape[:2], value.shape[2]], [shape[0], head_num, 8]
    if name in ("BNSD", "BSND"):
        rows = shape[2] if name == "BNSD" else shape[1]
        return [*shape[:3], value.shape[3]], [shape[0], head_num, rows, 8]
    heads_kv = key.shape[2] // (shape[2] // head_num)
    batch, rows = shape[:2] if name == "BSH" else (shape[1], shape[0])
    return [*shape[:2], value.shape[2] // heads_kv * head_num], [batch, head_num, rows, 8]


def _elements(
    query: Tensor, key: Tensor, head_num: int, layout: str, ends: Any, ends_kv: Any
) -> int:
    """Scores of the call: the last result."""
    if layout.upper() == "TND":
        total, q0, k0 = 0, 0, 0
        for q1, k1 in zip(ends or (), ends_kv or (), strict=True):
            total += max(0, q1 - q0) * max(0, k1 - k0)
            q0, k0 = q1, k1
        return head_num * total
    batch, row = {"BSH": (0, 1), "SBH": (1, 0), "BNSD": (0, 2), "BSND": (0, 1)}[layout.upper()]
    return query.shape[batch] * head_num * query.shape[row] * key.shape[row]


def _fake(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    op = "npu_fusion_attention"
    *_, dropout_mask, seed, offset = rest
    keep_prob, ends, ends_kv = rest[4], rest[9], rest[10]
    if keep_prob < 1 and dropout_mask is None and seed == 0 and offset == 0:
        raise RuntimeError(
            f"{op}: dropout in a compiled graph needs a seed, which would otherwise be drawn while tracing"
        )
    out, statistics = _out_shape(op, query, key, value, head_num, input_layout)
    dtype = compute_dtype(query.dtype)
    return (
        query.new_empty(out),
        query.new_empty(statistics, dtype=dtype),
        query.new_empty(statistics, dtype=dtype),
        query.new_empty((0,)),
        seed,
        offset,
        _elements(query, key, head_num, input_layout, ends, ends_kv),
    )


def _grad_fake(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str,
    *, pse: Tensor | None = None, sink: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = compute_dtype(query.dtype)
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        query.new_empty(pse.shape if pse is not None else (0,)),
        query.new_empty(sink.shape if sink is not None else (0,), dtype=dtype),
    )


def _backward_fake(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, out: Tensor, maximum: Tensor, total: Tensor, head_num: int,
    input_layout: str, pse: Tensor | None, atten_mask: Tensor | None, sink: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pse = pse if rest[-1] else None
    return _grad_fake(query, key, value, dy, head_num, input_layout, pse=pse, sink=sink)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, ctx.head_num, ctx.layout, *options = inputs
    pse, _, mask, scale, keep_prob, pre, following, _, prefix, ends, ends_kv, mode = options[:12]
    softmax_layout, sink, dropout_mask = options[14:17]
    out, maximum, total, softmax_out, seed, offset, _ = output
    ctx.save_for_backward(query, key, value, out, maximum, total, pse, mask, sink, dropout_mask)
    ctx.options = (
        scale,
        keep_prob,
        pre,
        following,
        seed,
        offset,
        prefix,
        ends,
        ends_kv,
        mode,
        softmax_layout,
    )
    ctx.mark_non_differentiable(maximum, total, softmax_out)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    query, key, value, out, maximum, total, pse, mask, sink, dropout_mask = ctx.saved_tensors
    needs = (*ctx.needs_input_grad, *[False] * 24)
    dq, dk, dv, dpse, dsink = torch.ops.jumar.fusion_attention_backward(
        query, key, value, grad, out, maximum, total, ctx.head_num, ctx.layout, pse, mask, sink, dropout_mask,
        *ctx.options, needs[5],
    )  # fmt: skip
    found = {0: dq, 1: dk, 2: dv, 5: dpse, 20: dsink}
    return tuple(found.get(at) if need else None for at, need in enumerate(ctx.needs_input_grad))


register_fake("npu_fusion_attention", _fake)
register_fake("npu_fusion_attention_grad", _grad_fake)
register_fake("fusion_attention_backward", _backward_fake)
register_autograd("npu_fusion_attention", _backward, _setup)
forbid_autograd("npu_fusion_attention_grad")
forbid_autograd("fusion_attention_backward")
# sink stays in fp32.
register_autocast("npu_fusion_attention", keep=range(8, 64))
