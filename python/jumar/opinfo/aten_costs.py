"""Costs of torch's own operators, for the parts of a step that are not fused. See :mod:`jumar.opinfo.costs`.

Composite operators (``aten::linear``, ``aten::matmul``, ``aten::to``) have none: the operators that they call do.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from jumar.opinfo.cost_types import Arg, Cost, Formula, streams
from jumar.opinfo.costs import _adamw


def _product(a: Arg, b: Arg, extra: float = 0.0) -> Cost:
    """[.., m, k] x [.., k, n]."""
    *batch, m, k = a.shape
    *_, n = b.shape
    count = math.prod(batch)
    return Cost(a.bytes + b.bytes + count * m * n * a.item + extra, 2.0 * count * m * k * n, a.dtype)


def _mm(a: Arg, b: Arg, *_: Any) -> Cost:
    return _product(a, b)


def _addmm(c: Arg, a: Arg, b: Arg, *_: Any) -> Cost:
    return _product(a, b, c.bytes)


def _visible(queries: int, keys: int, causal: Any) -> int:
    """Pairs of a query and a key that it sees."""
    if not causal:
        return queries * keys
    corner = min(queries, keys)
    return corner * (corner + 1) // 2 + (queries - corner) * keys


def _attention(
    q: Arg, k: Arg, v: Arg, dropout: Any = 0.0, causal: Any = False, mask: Arg | None = None, *_: Any
) -> Cost:
    """Two products over the visible pairs; a mask is read, and all pairs count."""
    *batch, queries, width = q.shape
    pairs = math.prod(batch) * _visible(queries, k.shape[-2], causal)
    moved = q.bytes + k.bytes + v.bytes + q.numel // width * v.shape[-1] * q.item
    moved += mask.bytes if isinstance(mask, Arg) else 0
    return Cost(moved, 2.0 * pairs * (width + v.shape[-1]), q.dtype)


def _attention_backward(
    dy: Arg, q: Arg, k: Arg, v: Arg, out: Arg, lse: Arg, dropout: Any = 0.0, causal: Any = False,
    mask: Arg | None = None, *_: Any,
) -> Cost:  # fmt: skip
    """Five products: the scores again, and the gradients of scores, query, key and value."""
    *batch, queries, width = q.shape
    pairs = math.prod(batch) * _visible(queries, k.shape[-2], causal)
    moved = dy.bytes + out.bytes + lse.bytes + 2 * (q.bytes + k.bytes + v.bytes)
    moved += mask.bytes if isinstance(mask, Arg) else 0
    return Cost(moved, 2.0 * pairs * (3 * width + 2 * v.shape[-1]), q.dtype)


def _tensors(values: tuple[Any, ...]) -> list[Arg]:
    return [value for value in values if isinstance(value, Arg)]


def _broadcast(tensors: list[Arg]) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a pointwise result. Numbers, which a trace shows as tensors without dimensions, yield."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    ranked = [t for t in tensors if t.shape] or tensors
    dtype = ranked[0].dtype
    for other in ranked[1:]:
        if dtype is None or other.dtype is None:
            raise LookupError("dtype")
        dtype = torch.promote_types(dtype, other.dtype)
    if dtype is None or not (dtype.is_floating_point or dtype.is_complex):
        raise LookupError("dtype")  # integers: the result may be floating or bool
    return tuple(shape), dtype


def _pointwise(*values: Any) -> Cost:
    tensors = _tensors(values)
    shape, dtype = _broadcast(tensors)
    return Cost(sum(t.bytes for t in tensors) + math.prod(shape) * dtype.itemsize)


def _in_place(out: Arg, *values: Any) -> Cost:
    return Cost(2 * out.bytes + sum(t.bytes for t in _tensors(values)))


def _fill(out: Arg, *_: Any) -> Cost:
    return Cost(out.bytes)


def _reduction(x: Arg, dims: Any = None, *_: Any) -> Cost:
    """Read once; the result has the sizes that are not reduced."""
    kept = 1
    if isinstance(dims, list) and dims:
        reduced = {d % len(x.shape) for d in dims}
        kept = math.prod(n for i, n in enumerate(x.shape) if i not in reduced)
    return Cost(x.bytes + kept * x.item)


def _norm(x: Arg, order: Any = 2, dims: Any = None, *_: Any) -> Cost:
    return _reduction(x, dims)


_two_passes = streams(1, 1)
_from_two = streams(2, 1, like=1)


def _embedding(weight: Arg, index: Arg, *_: Any) -> Cost:
    return Cost(index.bytes + 2 * index.numel * weight.shape[-1] * weight.item)


def _embedding_backward(dy: Arg, index: Arg, rows: Any, *_: Any) -> Cost:
    return Cost(dy.bytes + index.bytes + int(rows) * dy.shape[-1] * dy.item)


_UNARY = "abs cos erf exp gelu log log1p neg reciprocal relu rsqrt sigmoid silu sin sqrt tanh"
_BINARY = "add div maximum minimum mul pow rsub sub where"

#: Operator of ``torch.ops.aten`` -> formula over its arguments in the order of the schema.
ATEN_COSTS: dict[str, Formula] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    **{name: _pointwise for name in (*_UNARY.split(), *_BINARY.split())},
    **{f"{name}_": _in_place for name in (*_UNARY.split(), *_BINARY.split())},
    "_fused_adam_": _adamw,
    "_fused_adamw_": _adamw,
    "addcmul_": _in_place,
    "addcdiv_": _in_place,
    "lerp_": _in_place,
    "copy_": streams(2, 0),
    "fill_": _fill,
    "zero_": _fill,
    "sum": _reduction,
    "mean": _reduction,
    "linalg_vector_norm": _norm,
    "_softmax": _two_passes,
    "_log_softmax": _two_passes,
    "_softmax_backward_data": _from_two,
    "_log_softmax_backward_data": _from_two,
    "silu_backward": _from_two,
    "sigmoid_backward": _from_two,
    "tanh_backward": _from_two,
    "threshold_backward": _from_two,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
}
