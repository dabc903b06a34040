"""The entries of what merges parts of attention, and of the masked softmax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jumar.opinfo.cases import Source, layouts
from jumar.opinfo.cost_types import Arg, Cost, Formula
from jumar.opinfo.spec import STREAMS, Bound, Case, OpInfo, Shape, compute_epsilon
from jumar.ops._wiring import compute_dtype

_PARTS = ("attn_out", "softmax_max", "softmax_sum")
_NAMES = tuple(f"{when}_{name}" for when in ("prev", "cur") for name in _PARTS)
_NUMBER = Bound(half=6.0, single=6.0, double=6.0)  # of fp32 statistics


def _weights(m1: Tensor, l1: Tensor, m2: Tensor, l2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(max, sum, weight, weight), the weights [S, B, N, 1]."""
    m = torch.maximum(m1, m2)
    a, b = l1 * torch.exp(m1 - m), l2 * torch.exp(m2 - m)
    total = a + b
    safe = torch.where(total == 0, 1, total)
    return m, total, *((x / safe)[..., :1].permute(2, 0, 1, 3) for x in (a, b))


def _ring_plain(*tensors: Tensor) -> tuple[Tensor, ...]:
    o1, m1, l1, o2, m2, l2 = tensors
    m, total, w1, w2 = _weights(m1, l1, m2, l2)
    heads = (o.to(m.dtype).unflatten(-1, (m.shape[1], -1)) for o in (o1, o2))
    out = sum(o * w for o, w in zip(heads, (w1, w2), strict=True))
    return out.flatten(2).to(o1.dtype), m, total


def _ring_terms(t: dict[str, Tensor], grads: list[Tensor], **_: Any) -> dict[str, Tensor]:
    o1, m1, l1, o2, m2, l2 = (t[n] for n in _NAMES)
    return {"attn_out": _ring_plain(o1.abs(), m1, l1, o2.abs(), m2, l2)[0]}


def _ring_part(source: Source, batch: int, heads: int, rows: int, cols: int) -> list[Tensor]:
    wide = compute_dtype(source.dtype)
    numbers = [source.normal(batch, heads, rows, 1, dtype=wide, scale=s) for s in (4.0, 1.0)]
    m, total = (x.expand(-1, -1, -1, 8).contiguous() for x in numbers)
    return [source.rows(rows, batch, heads * cols), m, total.abs() + 1]


def _ring_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for batch, heads, rows, cols in ((1, 1, 0, 4), (1, 1, 1, 1), (2, 3, 37, 19), (1, 4, 50, 64)):
        source = Source(dtype, seed + rows)
        parts = [x for _ in range(2) for x in _ring_part(source, batch, heads, rows, cols)]
        case = Case(f"{batch} x {rows} rows, {heads} heads of {cols}", dict(zip(_NAMES, parts, strict=True)))
        yield case
        if rows == 37:
            yield from layouts(case)


def _ring_bench(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    source = Source(dtype, 1)
    parts = [x for _ in range(2) for x in _ring_part(source, 1, shape["heads"], shape["rows"], shape["d"])]
    return dict(zip(_NAMES, parts, strict=True))


def _lse_plain(lse: list[Tensor], local_out: list[Tensor]) -> tuple[Tensor, Tensor]:
    total = torch.stack(list(lse)).logsumexp(0)
    out = sum(o.to(total.dtype) * torch.exp(x - total)[:, None] for x, o in zip(lse, local_out, strict=True))
    return out.to(local_out[0].dtype), total


def _lse_terms(t: dict[str, Any], grads: list[Tensor], **_: Any) -> dict[str, Any]:
    size = torch.stack(list(t["lse"])).abs().amax(0)
    return {"out": _lse_plain(t["lse"], [o.abs() for o in t["local_out"]])[0] * (2 + size)[:, None], "lse": size + 2}


def _lse_inputs(source: Source, parts: int, rows: int, cols: int) -> dict[str, Any]:
    wide = compute_dtype(source.dtype)
    return {
        "lse": [source.normal(rows, dtype=wide, scale=4.0) for _ in range(parts)],
        "local_out": [source.rows(rows, cols) for _ in range(parts)],
    }


def _lse_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for parts, rows, cols in ((1, 0, 8), (1, 3, 8), (2, 70, 33), (5, 17, 64)):
        case = Case(f"{parts} parts of {rows}x{cols}", _lse_inputs(Source(dtype, seed + rows), parts, rows, cols))
        yield case
        if parts == 2:
            yield from layouts(case)


def _softmax_plain(x: Tensor, mask: Tensor, scale: float = 1.0) -> tuple[Tensor]:
    t = (x.to(compute_dtype(x.dtype)) * scale).masked_fill(mask, -10000.0)
    return (t.softmax(-1).to(x.dtype),)


def _softmax_terms(
    t: dict[str, Tensor], grads: list[Tensor], scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The gradient is taken from the rounded y."""
    x, dy = t["x"], grads[0].abs()
    (y,) = _softmax_plain(x, t["mask"], scale)
    most = (scale * x).abs().amax(-1, keepdim=True) if x.shape[-1] else 0.0
    terms = (12 + 2 * most + x.shape[-1] / 8) * y
    size = abs(scale) * y * (dy + (dy * y).sum(-1, keepdim=True))
    slopes = size * (24 + 4 * most + x.shape[-1] / 4)
    if dtype not in (torch.float32, torch.float64):
        # y is off by half an ulp, which below the normal numbers is half the smallest one.
        kind = torch.finfo(dtype)
        off = (y * kind.eps).clamp_min(kind.tiny * kind.eps / 2) / compute_epsilon(dtype)
        slopes = slopes + abs(scale) * (off * (dy + (dy * y).sum(-1, keepdim=True)) + y * (dy * off).sum(-1, keepdim=True))
    return {"y": terms, "d x": slopes}


def _softmax_inputs(source: Source, *shape: int) -> dict[str, Tensor]:
    hidden = torch.rand((shape[0], 1, *shape[2:]), generator=source.generator) < 0.4
    if shape[2] > 1:
        hidden[..., 1, :] = True
    return {"x": source.rows(*shape, scale=3.0), "mask": hidden}


def _softmax_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for shape in ((1, 1, 0, 4), (1, 1, 1, 1), (2, 3, 5, 7), (2, 2, 33, 65), (1, 2, 4, 1030)):
        source = Source(dtype, seed + shape[-1])
        case = Case("x".join(map(str, shape)), _softmax_inputs(source, *shape), {"scale": 0.7})
        case.grads = [source.normal(*shape)]
        yield case
        if shape[-1] == 65:
            yield from layouts(case)


def _update_cost(*a: Any) -> Cost:
    """Outputs and statistics of both parts are read, those of the result written."""
    tensors: list[Arg] = [x for x in a[:6] if isinstance(x, Arg)]
    return Cost(sum(x.bytes for x in tensors) + sum(x.dense for x in tensors[:3]))


def _lse_cost(lse: list[Arg], parts: list[Arg], kind: int, *_: Any) -> Cost:
    return Cost(sum(x.bytes for x in (*lse, *parts)) + parts[0].dense + (lse[0].dense if kind == 1 else 0))


#: Part of :data:`jumar.opinfo.costs.FUSED_COSTS`.
PART_COSTS: dict[str, Formula] = {
    "npu_ring_attention_update": _update_cost,
    "npu_attention_update": _lse_cost,
    "scaled_masked_softmax": lambda x, mask, *_: Cost(x.bytes + mask.bytes + x.dense),
    "scaled_masked_softmax_backward": lambda g, y, mask, *_: Cost(g.bytes + y.bytes + mask.bytes + y.dense),
}

_SUM = Bound(half=0.51, single=1.0, double=1.0, terms=16.0)

ENTRIES = (
    OpInfo(
        name="npu_ring_attention_update",
        formula="m = max(m₁, m₂),  l = Σ lᵢ · exp(mᵢ - m),  out = Σ outᵢ · lᵢ · exp(mᵢ - m) / l",
        shapes="two parts of out [S, B, N · D], max and sum [B, N, S, 8], and layout TND -> one",
        outputs=_PARTS,
        differentiable=(),
        bounds={"attn_out": _SUM, "softmax_max": Bound(half=0.0, single=0.0, double=0.0), "softmax_sum": _NUMBER},
        plain=_ring_plain,
        terms=_ring_terms,
        cases=_ring_cases,
        bench=_ring_bench,
        target=STREAMS,
    ),
    OpInfo(
        name="npu_attention_update",
        formula="lse = log Σ exp lseᵢ,  out = Σ outᵢ · exp(lseᵢ - lse)",
        shapes="lse [M] and local_out [M, D], lists -> out [M, D], lse [M]",
        doc="docs/ops/npu_ring_attention_update.md",
        outputs=("out", "lse"),
        differentiable=(),
        bounds=dict.fromkeys(("out", "lse"), _SUM),
        plain=_lse_plain,
        terms=_lse_terms,
        cases=_lse_cases,
        bench=lambda shape, dtype: _lse_inputs(Source(dtype, 1), 4, shape["rows"] * shape["heads"], shape["d"]),
        call=lambda lse, local_out: torch.ops.jumar.npu_attention_update(lse, local_out, 1),
        shapes_file="ring_attention_update",
        target=STREAMS,
    ),
    OpInfo(
        name="npu_scaled_masked_softmax",
        formula="y = softmax(where(mask, -10000, scale · x))",
        shapes="x [.., W], mask broadcasts to it -> like x",
        backward=("npu_scaled_masked_softmax_backward", "scaled_masked_softmax_backward"),
        bounds=dict.fromkeys(("y", "d x"), Bound(half=1.0, single=1.0, double=1.0, terms=1.0)),
        plain=_softmax_plain,
        terms=_softmax_terms,
        cases=_softmax_cases,
        bench=lambda shape, dtype: _softmax_inputs(Source(dtype, 1), 1, shape["heads"], shape["s"], shape["s"]),
        target=STREAMS,
    ),
)
