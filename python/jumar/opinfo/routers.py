"""The entries of routers and of what balances experts: formulas, data, bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jumar import ops
from jumar.opinfo.cases import Source, layouts
from jumar.opinfo.spec import STREAMS, Bound, Case, OpInfo, Shape
from jumar.ops._wiring import compute_dtype

_K = 8  # of models, and of shapes to be timed


def _distinct(source: Source, rows: int, experts: int) -> Tensor:
    """Logits without equals in a row, a 32nd apart, so that no choice hangs on a rounding."""
    order = torch.rand((rows, experts), generator=source.generator).argsort(-1)
    return ((order - experts // 2) / 32 + 1 / 64).to(source.dtype)


def _route(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    k: int = _K,
    scoring: str = "softmax",
    renorm: bool = False,
    groups: int = 1,
    kept: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, indices, scores), the weights not yet rounded to x's dtype; equal choices by their number."""
    wide = x.to(compute_dtype(x.dtype))
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    choice = scores.detach() if bias is None else scores.detach() + bias.to(scores.dtype)
    if groups > 1:
        parts = choice.unflatten(-1, (groups, -1))
        best = parts.topk(2, -1).values.sum(-1)
        chosen = best.argsort(dim=-1, descending=True, stable=True)[..., :kept]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
        choice = parts.masked_fill(~mask.unsqueeze(-1), float("-inf")).flatten(-2)
    indices = choice.argsort(dim=-1, descending=True, stable=True)[..., :k]
    weights = scores.gather(-1, indices)
    if renorm:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, indices, scores


def _plain(x: Tensor, bias: Tensor | None = None, **options: Any) -> tuple[Tensor]:
    return (_route(x, bias, **options)[0].to(x.dtype),)


def _eager(x: Tensor, k: int = _K, renorm: bool = False) -> tuple[Tensor]:
    """As models write it."""
    scores = torch.softmax(x, -1, dtype=compute_dtype(x.dtype))
    weights = torch.topk(scores, k, dim=-1).values
    if renorm:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights.to(x.dtype),)


def _terms(
    t: dict[str, Tensor], grads: list[Tensor], dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, Tensor]:
    """Exponents carry a rounding of their own size; a gradient subtracts a mean."""
    name = next(iter(t))
    x = t[name]
    weights, indices, scores = _route(x, t.get("bias"), **options)
    spread = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True) + 8
    g = grads[0].abs() * options.get("scale", 1.0)
    if options.get("renorm"):
        total = scores.gather(-1, indices).sum(-1, keepdim=True)
        g = (g + (g * weights).sum(-1, keepdim=True)) / total
    u = torch.zeros_like(scores).scatter(-1, indices, g)
    if options.get("scoring") == "sigmoid":
        slope = scores * (1 - scores) * u
    else:
        slope = scores * (u + (scores * u).sum(-1, keepdim=True))
    return {"weights": weights * spread, f"d {name}": slope * spread}


def _cases(dtype: torch.dtype, seed: int, name: str, each: tuple[dict, ...]) -> Iterator[Case]:
    for rows, experts, k in ((0, 8, 2), (1, 1, 1), (5, 16, 4), (9, 33, 33), (37, 128, 8)):
        for options in each:
            source = Source(dtype, seed + rows + experts)
            groups = options.get("groups", 1)
            if experts % groups or k > experts // groups * options.get("kept", 1):
                continue
            tensors = {name: _distinct(source, rows, experts)}
            if options.get("scoring") == "sigmoid":
                tensors["bias"] = torch.linspace(-0.2, 0.1, experts, dtype=torch.float64).to(dtype)
            case = Case(
                f"{rows}x{experts}, k {k}", tensors, {"k": k, **options}, [source.normal(rows, k)]
            )
            yield case
            if experts == 128:
                yield from layouts(case)


def _bench(shape: Shape, dtype: torch.dtype, name: str) -> dict[str, Tensor]:
    return {name: _distinct(Source(dtype, 1), shape["rows"], shape["cols"])}


def _router_top_k(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    k: int = _K,
    groups: int = 1,
    kept: int = 1,
    **options: Any,
) -> tuple[Tensor, ...]:
    return ops.router_top_k(logits, k, bias=bias, n_group=groups, topk_group=kept, **options)


def _softmax(x: Tensor, k: int = _K) -> tuple[Tensor, ...]:
    return ops.npu_moe_gating_top_k_softmax(x, None, k)


def _softmax_v2(x: Tensor, k: int = _K, renorm: bool = False) -> tuple[Tensor, ...]:
    return ops.npu_moe_gating_top_k_softmax_v2(x, k=k, renorm=int(renorm))


def _gating(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    k: int = _K,
    groups: int = 1,
    kept: int = 1,
    scoring: str = "softmax",
    renorm: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, ...]:
    return ops.npu_moe_gating_top_k(
        x, k, bias=bias, k_group=kept, group_count=groups, group_select_mode=1,
        norm_type=int(scoring == "sigmoid"), routed_scaling_factor=scale,
    )  # fmt: skip


_BOUND = Bound(half=0.51, single=1.0, double=1.0, terms=2.0)
_DEEPSEEK = {"scoring": "sigmoid", "renorm": True, "scale": 2.5}
_GROUPS = {**_DEEPSEEK, "groups": 4, "kept": 2}


def _router(
    name: str, formula: str, call: Callable[..., tuple[Tensor]], each: tuple[dict, ...], **own: Any
) -> OpInfo:
    x = "logits" if name == "router_top_k" else "x"
    fields = {
        "shapes": f"{x} [.., E] -> weights [.., k], expert numbers [.., k]",
        "backward": (f"{name}_backward",),
        "outputs": ("weights",),
        "bounds": {"weights": _BOUND, f"d {x}": _BOUND},
        "plain": _plain,
        "eager": _eager,
        "terms": _terms,
        "cases": partial(_cases, name=x, each=each),
        "bench": partial(_bench, name=x),
        "shapes_file": "router",
        "fixed": ("bias",),
        "target": STREAMS,
        **own,
    }
    return OpInfo(name=name, formula=formula, call=call, **fields)


def _balance_plain(logits: Tensor, mask: Tensor | None = None, *, k: int = _K) -> tuple[Tensor]:
    wide = logits.to(compute_dtype(logits.dtype))
    p = wide.softmax(-1)
    m = p.new_ones(p.shape[0]) if mask is None else mask.to(p.dtype)
    chosen = wide.argsort(dim=-1, descending=True, stable=True)[:, :k]
    hot = torch.zeros_like(p).scatter(-1, chosen, 1.0)
    return (p.shape[-1] * ((m @ hot) / m.sum() * ((m @ p) / m.sum())).sum(),)


def _balance_call(logits: Tensor, mask: Tensor | None = None, *, k: int = _K) -> Tensor:
    return ops.load_balance_loss(logits, logits.shape[-1], k, mask)


def _balance_terms(
    t: dict[str, Tensor], grads: list[Tensor], k: int = _K, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    x, mask = t["logits"], t.get("mask")
    experts, p = x.shape[-1], x.softmax(-1)
    m = p.new_ones(len(p)) if mask is None else mask.to(p.dtype)
    chosen = x.argsort(dim=-1, descending=True, stable=True)[:, :k]
    share = (m @ torch.zeros_like(p).scatter(-1, chosen, 1.0)) / m.sum()
    v = grads[0].abs() * experts * share / m.sum() * m.unsqueeze(-1)
    spread = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True) + 8
    loss = experts * (share * ((m.unsqueeze(-1) * p * spread).sum(0) / m.sum())).sum()
    return {"loss": loss, "d logits": p * (v + (p * v).sum(-1, keepdim=True)) * spread}


def _balance_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for rows, experts, k, masked in (
        (1, 1, 1, False),
        (5, 7, 2, False),
        (37, 33, 4, True),
        (300, 64, 8, False),
    ):
        source = Source(dtype, seed + rows + experts)
        tensors = {"logits": _distinct(source, rows, experts)}
        if masked:
            tensors["mask"] = torch.arange(rows) % 3
        grad = source.normal(dtype=compute_dtype(dtype))
        case = Case(f"{rows}x{experts}, k {k}", tensors, {"k": k}, [grad])
        yield case
        if masked:
            yield from layouts(case)


def _z_plain(logits: Tensor) -> tuple[Tensor]:
    return (logits.to(compute_dtype(logits.dtype)).logsumexp(-1).square().mean(),)


def _z_terms(
    t: dict[str, Tensor], grads: list[Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    x = t["logits"]
    lse = x.logsumexp(-1, keepdim=True)
    size = x.abs().amax(-1, keepdim=True) + 8
    rows = x.numel() // x.shape[-1]
    gradient = 2 * grads[0].abs() / rows * x.softmax(-1) * (lse.abs() + 1) * 2 * size
    return {"loss": (lse.abs() * size + 1).mean() * 2, "d logits": gradient}


def _z_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for shape in ((1, 1), (5, 7), (2, 9, 33), (300, 64)):
        source = Source(dtype, seed + sum(shape))
        case = Case("x".join(map(str, shape)), {"logits": source.rows(*shape, scale=2.0)})
        case.grads = [source.normal(dtype=compute_dtype(dtype))]
        yield case
        if shape[-1] == 33:
            yield from layouts(case)


_LOSS = {
    "outputs": ("loss",),
    "bounds": {"loss": _BOUND, "d logits": _BOUND},
    "bench": partial(_bench, name="logits"),
    "shapes_file": "router",
    "doc": "docs/ops/balance.md",
    "target": STREAMS,
}

ENTRIES = (
    _router(
        "router_top_k",
        "s = softmax or sigmoid of x,  w = s of the k largest s + bias,  over their sum",
        _router_top_k,
        ({}, {"renorm": True}, _DEEPSEEK, _GROUPS),
    ),
    _router(
        "npu_moe_gating_top_k_softmax",
        "s = softmax x,  y = the k largest s",
        _softmax,
        ({},),
    ),
    _router(
        "npu_moe_gating_top_k_softmax_v2",
        "s = softmax x,  y = the k largest s, or softmax of the k largest x",
        _softmax_v2,
        ({}, {"renorm": True}),
        doc="docs/ops/npu_moe_gating_top_k_softmax.md",
    ),
    _router(
        "npu_moe_gating_top_k",
        "s = softmax or sigmoid of x,  y = s of the k largest s + bias in the best groups · scale",
        _gating,
        ({}, _DEEPSEEK, _GROUPS),
    ),
    OpInfo(
        name="load_balance_loss",
        formula="E · Σ_e (share of tokens that chose e) · (mean of softmax x [e])",
        shapes="logits of layers [rows, E], mask [rows] or none -> scalar",
        backward=("load_balance_loss_backward",),
        plain=_balance_plain,
        call=_balance_call,
        terms=_balance_terms,
        cases=_balance_cases,
        fixed=("mask",),
        **_LOSS,
    ),
    OpInfo(
        name="router_z_loss",
        formula="mean of (log Σ exp x)²",
        shapes="logits [.., E] -> scalar",
        backward=("router_z_loss_backward",),
        plain=_z_plain,
        terms=_z_terms,
        cases=_z_cases,
        **_LOSS,
    ),
)
