"""Routers of mixtures of experts. See docs/ops/router_top_k.md, docs/ops/npu_moe_gating_top_k_softmax.md and
docs/ops/npu_moe_gating_top_k.md; the losses and the bias rule are in :mod:`jumar.ops.balance`.

Experts that are chosen come in descending order, equal ones by their number; results are the same for every thread count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    compute_dtype,
    define_by_position,
    gradient,
    register_autograd,
    register_fake,
)


def router_top_k(
    logits: Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    renorm: bool = False,
    bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
    eps: float = 0.0,
    group_fill: float | None = None,
    group_score: str = "top2",
    wide_weights: bool = False,
    output_scores: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The router of Qwen, Mixtral and DeepSeek models: scores, top-k, weights.

    Args:
        logits: [.., E], fp32, bf16, fp16 or fp64, any strides. Everything is computed in fp32 (fp64 for fp64).
        k: experts per token, 0 to E.
        scoring: ``"softmax"`` over the experts or ``"sigmoid"``.
        renorm: weights over (their sum + ``eps``).
        bias: [E], added to the scores for the choice alone; it has no gradient.
        n_group, topk_group: of the n_group groups of neighbours the topk_group with the largest score are chosen from.
        scale: factor of the weights.
        group_fill: the choice value of experts in dropped groups; None: -infinity.
        group_score: ``"top2"``, the sum of a group's two largest choice values, or ``"max"``.
        wide_weights: weights in fp32 (fp64 for fp64) instead of logits' dtype.
        output_scores: also return the scores of all experts.

    Returns:
        (weights [.., k], indices [.., k] int64, scores [.., E] in fp32 (fp64 for fp64), or [0] without
        ``output_scores``). Differentiable in logits through weights and scores.

    Raises:
        RuntimeError: sizes or options do not fit.
    """
    return torch.ops.jumar.router_top_k(
        logits, k, scoring, renorm, bias, n_group, topk_group, scale, eps, group_fill, group_score, wide_weights,
        output_scores,
    )  # fmt: skip


@calls_operator
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest probabilities of softmax(x).

    Args:
        x: [R, E] or [B, S, E], fp32, bf16, fp16 or fp64, any strides.
        finished: bool, x without its last dimension: expert numbers of these rows become E, weights stay.
        k: 0 to E.

    Returns:
        (y [.., k] in x's dtype, expert_idx [.., k] int32, row_idx [.., k] int32). Entry j of row r of row_idx is
        j * rows + r, with the rows of a 3-D x counted through. y is differentiable in x (not so on the card).
    """


@calls_operator
def npu_moe_gating_top_k_softmax_v2(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`npu_moe_gating_top_k_softmax`; with ``renorm=1`` the softmax is over the k largest logits.

    Returns:
        (y [.., k] in x's dtype, expert_idx [.., k] int32, softmax [.., E] in fp32 (fp64 for fp64) when ``renorm`` is 0
        and ``output_softmax``, else [0]). y and softmax are differentiable in x (not so on the card).
    """


@calls_operator
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """DeepSeek's router: groups, a bias that chooses but does not weigh, scaling.

    Args:
        x: [R, E] or [B, S, E], fp32, bf16, fp16 or fp64, any strides.
        k: 0 to E.
        bias: [E] of x's dtype, or None. No gradient.
        input_ids, tid2eid: hash routing is not supported: None.
        k_group, group_count: of group_count groups the best k_group are chosen from.
        group_select_mode: 0: a group's score is its largest choice value, 1: the sum of its two largest.
        renorm: 0.
        norm_type: 0: softmax. 1: sigmoid, weights over (their sum + ``eps``).
        out_flag: normOut is returned in any case.

    Returns:
        (y [.., k] in x's dtype, expert_idx [.., k] int32, normOut [.., E] in fp32 (fp64 for fp64), the scores).
        Differentiable in x through y and normOut.
    """


def _rows(x: Tensor, cols: int, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], cols), dtype=dtype)


def _fake(logits: Tensor, k: int, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, wide_weights, output_scores = options
    if logits.dim() < 1 or not 0 <= k <= logits.shape[-1]:
        raise RuntimeError(f"router_top_k: k = {k} does not fit logits {list(logits.shape)}")
    wide = compute_dtype(logits.dtype)
    return (
        _rows(logits, k, wide if wide_weights else None),
        _rows(logits, k, torch.int64),
        logits.new_empty(logits.shape if output_scores else (0,), dtype=wide),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, ctx.scoring, ctx.renorm, _, _, _, ctx.scale, ctx.eps, *_ = inputs
    _save(ctx, logits, output[1], output[2] if not inputs[-1] else None)


def _save(ctx: Any, logits: Tensor, indices: Tensor, *others: Tensor | None) -> None:
    """Of the results, ``indices`` and ``others`` carry no gradient."""
    ctx.save_for_backward(logits, indices)
    ctx.mark_non_differentiable(indices, *(t for t in others if t is not None))
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_weights: Tensor | None, _: None, grad_scores: Tensor | None
) -> Tensor:
    return torch.ops.jumar.router_top_k_backward(
        grad_weights, grad_scores, *ctx.saved_tensors, ctx.scoring, ctx.renorm, ctx.scale, ctx.eps
    )


def _check_vendor(op: str, x: Tensor, k: int) -> None:
    if x.dim() not in (2, 3):
        raise RuntimeError(f"{op}: The x should be 2D or 3D, got {list(x.shape)}")
    if not 0 <= k <= x.shape[-1]:
        raise RuntimeError(f"{op}: The k should be in [0, {x.shape[-1]}], got {k}")


def _softmax_fake(
    x: Tensor, finished: Tensor | None, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check_vendor("npu_moe_gating_top_k_softmax", x, k)
    return _rows(x, k), _rows(x, k, torch.int32), _rows(x, k, torch.int32)


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs[0], output[1], output[2])


def _softmax_backward(ctx: Any, grad_y: Tensor, *_: None) -> Tensor:
    return torch.ops.jumar.npu_moe_gating_top_k_softmax_backward(grad_y, *ctx.saved_tensors)


def _v2(
    x: Tensor, k: int, finished: Tensor | None, renorm: int | None, output_softmax: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.jumar.moe_gating_top_k_softmax_v2(
        x, k, finished, renorm or 0, bool(output_softmax)
    )


def _v2_fake(
    x: Tensor, k: int, finished: Tensor | None, renorm: int, output_softmax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check_vendor("npu_moe_gating_top_k_softmax_v2", x, k)
    softmax = x.shape if output_softmax and not renorm else (0,)
    return (
        _rows(x, k),
        _rows(x, k, torch.int32),
        x.new_empty(softmax, dtype=compute_dtype(x.dtype)),
    )


def _v2_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, _, ctx.renorm, output_softmax = inputs
    _save(ctx, x, output[1], None if output_softmax and not ctx.renorm else output[2])


def _v2_backward(
    ctx: Any, grad_y: Tensor | None, _: None, grad_softmax: Tensor | None
) -> Tensor:
    backward = torch.ops.jumar.npu_moe_gating_top_k_softmax_v2_backward
    return backward(grad_y, grad_softmax, *ctx.saved_tensors, ctx.renorm)


def _gating(
    x: Tensor, k: int, bias: Tensor | None, input_ids: Tensor | None, tid2eid: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    for name, value in (("input_ids", input_ids), ("tid2eid", tid2eid)):
        if value is not None:
            raise RuntimeError(
                f"npu_moe_gating_top_k: hash routing is not supported, got {name} {list(value.shape)}"
            )
    *choice, _, scale, eps = options  # out_flag: the scores are returned in any case
    return torch.ops.jumar.moe_gating_top_k(x, k, bias, *choice, scale, eps)


def _gating_fake(x: Tensor, k: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_vendor("npu_moe_gating_top_k", x, k)
    return (
        _rows(x, k),
        _rows(x, k, torch.int32),
        x.new_empty(x.shape, dtype=compute_dtype(x.dtype)),
    )


def _gating_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    names = ("norm_type", "routed_scaling_factor", "eps")
    ctx.options = dict(zip(names, inputs[-3:], strict=True))
    ctx.save_for_backward(inputs[0], output[1], output[2])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gating_backward(
    ctx: Any, grad_y: Tensor | None, _: None, grad_norm: Tensor | None
) -> Tensor:
    x, indices, norm_out = ctx.saved_tensors
    if grad_norm is not None:
        sigmoid = ctx.options["norm_type"] == 1
        scoring = "sigmoid" if sigmoid else "softmax"
        scale, eps = ctx.options["routed_scaling_factor"], ctx.options["eps"]
        backward = torch.ops.jumar.router_top_k_backward
        return backward(grad_y, grad_norm, x, indices, scoring, sigmoid, scale, eps)
    return npu_moe_gating_top_k_backward(norm_out, grad_y, indices, **ctx.options)


def _like_logits(grad_weights: Any, grad_scores: Any, logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


register_fake("router_top_k", _fake)
gradient("router_top_k_backward", _like_logits)
register_autograd("router_top_k", _backward, _setup)
register_fake("npu_moe_gating_top_k_softmax", _softmax_fake)
gradient(
    "npu_moe_gating_top_k_softmax_backward", lambda grad_y, x, expert_idx: x.new_empty(x.shape)
)
register_autograd("npu_moe_gating_top_k_softmax", _softmax_backward, _softmax_setup)
register_fake(
    "moe_gating_top_k_softmax_v2", _v2_fake, shown="npu_moe_gating_top_k_softmax_v2"
)
gradient("npu_moe_gating_top_k_softmax_v2_backward", _like_logits)
register_autograd("moe_gating_top_k_softmax_v2", _v2_backward, _v2_setup)
register_fake("moe_gating_top_k", _gating_fake, shown="npu_moe_gating_top_k")
npu_moe_gating_top_k_backward = gradient(
    "npu_moe_gating_top_k_backward",
    lambda x_norm, grad_y, expertIdx, **_: grad_y.new_empty(x_norm.shape),
    "Gradient of :func:`npu_moe_gating_top_k` for x from normOut: shape of x_norm, dtype of grad_y.",
)
register_autograd("moe_gating_top_k", _gating_backward, _gating_setup)
define_by_position(
    "npu_moe_gating_top_k_softmax_v2(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, "
    "bool? output_softmax=False) -> (Tensor, Tensor, Tensor)",
    _v2,
)
define_by_position(
    "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, "
    "int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, "
    "bool out_flag=False, float routed_scaling_factor=1.0, float eps=1e-20) -> (Tensor, Tensor, Tensor)",
    _gating,
)
