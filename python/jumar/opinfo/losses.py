"""The entries of the losses: formulas, data, bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jumar.opinfo.cases import Source, layouts, linear_bench, rows_bench, shape_text
from jumar.opinfo.spec import (
    MULTIPLIES,
    STREAMS,
    Bound,
    Case,
    OpInfo,
    Shape,
)

_IGNORED = -100


def _labels(source: Source, rows: tuple[int, ...], classes: int) -> Tensor:
    return torch.randint(0, classes, rows, generator=source.generator)


def _linear_plain(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = _IGNORED,
    reduction: str = "mean",
    z_loss: float = 0.0,
    **options: Any,
) -> tuple[Tensor]:
    """Logits in the input's dtype, the loss of them in fp32 (fp64), as models compute it."""
    logits = F.linear(input, weight, bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()).flatten(0, -2)
    labels = target.flatten()
    loss = F.cross_entropy(
        logits, labels, ignore_index=ignore_index, reduction=reduction, **options
    )
    if z_loss:
        squares = torch.where(labels == ignore_index, 0.0, logits.logsumexp(-1).square())
        total = squares if reduction == "none" else squares.sum()
        if reduction == "mean":
            total = total / (labels != ignore_index).sum()
        loss = loss + z_loss * total
    return (loss.reshape(target.shape) if reduction == "none" else loss,)


def _linear_terms(
    t: dict[str, Tensor],
    grads: list[Tensor],
    ignore_index: int = _IGNORED,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """What a logit may be off by, carried on; gradients of logits may be rounded to bf16 for bf16."""
    x, w = t["input"].flatten(0, -2), t["weight"]
    bias, labels = t.get("bias"), t["target"].flatten()
    logits = F.linear(x, w, bias)
    size = F.linear(x.abs(), w.abs(), None if bias is None else bias.abs()).amax(-1)
    size = size * max(1, x.shape[-1]) ** 0.5
    lse = logits.logsumexp(-1)
    counted = labels != ignore_index
    off = (1 + 2 * z_loss * lse.abs()) * (2 * size + 4 * lse.abs() + 4)
    loss = torch.where(counted, off, 0.0)
    g = grads[0].abs().flatten().expand(labels.shape)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss, g = loss / counted.sum(), g / counted.sum()
    g = torch.where(counted, g, 0.0).unsqueeze(-1)
    p = logits.softmax(-1) * (1 + 2 * z_loss * lse.abs()).unsqueeze(-1)
    hot = F.one_hot(labels.clamp(min=0), w.shape[0])
    magnitude = g * (p + label_smoothing / w.shape[0] + hot)
    narrow = 2.0**15 if dtype == torch.bfloat16 else 4.0
    error = g * p * off.unsqueeze(-1) + narrow * magnitude
    over_classes = error + magnitude * max(1, w.shape[0]) ** 0.5
    over_tokens = error + magnitude * max(1, x.shape[0]) ** 0.5
    terms = {
        "loss": loss.reshape(grads[0].shape),
        "d input": (over_classes @ w.abs()).reshape(t["input"].shape),
        "d weight": over_tokens.mT @ torch.where(counted.unsqueeze(-1), x.abs(), 0.0),
    }
    if bias is not None:
        terms["d bias"] = over_tokens.sum(0)
    return terms


def _linear_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """(rows.., features, classes, reduction, bias, options)"""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for rows, k, n, reduction, bias, options in (
        ((0,), 8, 5, "sum", True, {}),
        ((1,), 1, 1, "sum", False, {}),
        ((3,), 7, 5, "mean", True, {}),
        ((2, 9), 33, 17, "sum", False, {"label_smoothing": 0.1}),
        ((5,), 16, 130, "none", True, {"z_loss": 0.01}),
        ((37,), 65, 257, "mean", True, {"label_smoothing": 0.2, "z_loss": 0.01}),
    ):
        source = Source(dtype, seed + k + n)
        tensors = {
            "input": source.rows(*rows, k),
            "weight": source.normal(n, k, scale=k**-0.5),
            "target": _labels(source, rows, n),
        }
        if rows[-1] > 2:
            tensors["target"][..., 1] = _IGNORED
        if bias:
            tensors["bias"] = source.normal(n)
        grad = source.normal(*(rows if reduction == "none" else ()), dtype=compute)
        label = f"{shape_text(rows)} tokens, {k} -> {n}, {reduction}"
        case = Case(label, tensors, {"reduction": reduction, **options}, [grad])
        yield case
        if k == 65:
            yield from layouts(case)


def _linear_bench(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    return linear_bench(shape, dtype) | {"target": _labels(Source(dtype, 1), (shape["m"],), shape["n"])}


def _vendor_plain(
    input: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    weight = None if weight is None else weight.to(input.dtype)
    loss = F.cross_entropy(input, target, weight, **options)
    return loss.reshape(-1), F.log_softmax(input, -1)


def _vendor_terms(
    t: dict[str, Tensor],
    grads: list[Tensor],
    reduction: str = "mean",
    ignore_index: int = _IGNORED,
    label_smoothing: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """The backward takes e^log_prob of what was rounded."""
    x, labels = t["input"], t["target"]
    weight = t.get("weight", torch.ones(x.shape[-1], dtype=torch.float64))
    log_prob = F.log_softmax(x, -1)
    counted = (labels != ignore_index).double() if ignore_index >= 0 else torch.ones(len(labels))
    own = weight[labels] * counted
    size = x.abs().amax(-1, keepdim=True) + 4
    each = own * (log_prob.abs().gather(-1, labels[:, None]) + size)[:, 0]
    each = each + counted * label_smoothing / len(weight) * (weight * (log_prob.abs() + size)).sum(
        -1
    )
    g = grads[0].abs().expand(len(labels))
    if reduction != "none":
        each = each.sum(0, keepdim=True)
    if reduction == "mean":
        each, g = each / own.sum(), g / own.sum()
    rounded = log_prob.abs() * (
        torch.finfo(dtype).eps / 2 / 2.0 ** (-53 if dtype == torch.float64 else -24)
    )
    p = log_prob.exp() * (rounded + size + 4)
    hot = F.one_hot(labels, len(weight))
    d = own[:, None] * (p + 2 * hot) + counted[:, None] * label_smoothing / len(weight) * (
        p * weight.sum() + 2 * weight
    )
    return {"loss": each, "log_prob": size.expand(x.shape), "d input": g[:, None] * d}


def _vendor_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for n, c, reduction, weighted, options in (
        (0, 3, "sum", False, {}),
        (1, 1, "sum", False, {}),
        (5, 7, "mean", False, {}),
        (9, 33, "none", True, {"ignore_index": 3}),
        (37, 257, "mean", True, {"label_smoothing": 0.1, "ignore_index": 0}),
    ):
        source = Source(dtype, seed + n + c)
        tensors = {
            "input": source.rows(n, c, scale=3.0),
            "target": _labels(source, (n,), c),
        }
        if n > 2:
            tensors["target"][1] = options.get("ignore_index", 0)
        if weighted:
            tensors["weight"] = source.normal(c, dtype=torch.float32).abs() + 0.25
        grad = source.normal(n if reduction == "none" else 1)
        case = Case(f"{n}x{c}, {reduction}", tensors, {"reduction": reduction, **options}, [grad])
        yield case
        if c == 257:
            yield from layouts(case)


def _vendor_bench(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    target = _labels(Source(dtype, 1), (shape["rows"],), shape["cols"])
    return rows_bench(shape, dtype, ("input",)) | {"target": target}


_BOUND = Bound(half=1.0, single=2.0, double=2.0, terms=2.0)

ENTRIES = (
    OpInfo(
        name="linear_cross_entropy",
        formula="x = input · Wᵀ + b,  loss = log Σ exp x - x[target]",
        shapes="input [.., H], weight [V, H], target [..], bias [V] or none -> scalar or [..]",
        backward=("linear_cross_entropy_backward",),
        outputs=("loss",),
        bounds=dict.fromkeys(("loss", "d input", "d weight", "d bias"), _BOUND),
        plain=_linear_plain,
        terms=_linear_terms,
        cases=_linear_cases,
        bench=_linear_bench,
        fixed=("target",),
        target=MULTIPLIES,
    ),
    OpInfo(
        name="npu_cross_entropy_loss",
        formula="log_prob = x - log Σ exp x,  loss = -w[target] · log_prob[target]",
        shapes="input [N, C], target [N], weight [C] or none -> loss [1] or [N], log_prob [N, C]",
        backward=("npu_cross_entropy_loss_backward",),
        outputs=("loss", "log_prob"),
        bounds=dict.fromkeys(("loss", "log_prob", "d input"), _BOUND),
        plain=_vendor_plain,
        terms=_vendor_terms,
        cases=_vendor_cases,
        bench=_vendor_bench,
        shapes_file="cross_entropy",
        fixed=("target", "weight"),
        target=STREAMS,
    ),
)
