"""How the operators act on DTensors: which placements of their arguments give which placement of the result.

Registered once with torch, so that fused modules work under tensor and sequence parallelism without any plan of their
own. Every operator here treats rows alone; only the matrix product and the weight gradients reduce over a sharded axis,
and their results are then partial sums.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_R = Replicate()
# Arguments of router_top_k after logits and k.
_ROUTER_OPTIONS = 11


def local(tensor: Tensor | None) -> Tensor | None:
    """This rank's part of a DTensor; anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(rank: int, but: tuple[int, ...] = (-1,)) -> list[Shard]:
    """Shard placements along every axis of a tensor of this rank that an operator does not reduce over."""
    excluded = {axis % rank for axis in but} if rank else set()
    return [Shard(axis) for axis in range(rank) if axis not in excluded]


def _rms_norm(input: Any, gamma: Any, *rest: Any) -> list:
    other = [None] * len(rest)
    return [([p, p], [p, _R, *other]) for p in [_R, *_rows(len(input.shape))]]


def _rms_norm_backward(dy: Any, input: Any, gamma: Any, rstd: Any) -> list:
    cases = [([_R, _R], [_R, _R, _R, _R])]
    return cases + [([p, Partial()], [p, p, _R, p]) for p in _rows(len(input.shape))]


def _pointwise(results: int) -> Any:
    def rule(first: Any, *rest: Any) -> list:
        tensors = [hasattr(arg, "shape") for arg in rest]
        placements = [_R, *_rows(len(first.shape), but=())]
        return [
            ([p] * results, [p, *(p if is_tensor else None for is_tensor in tensors)])
            for p in placements
        ]

    return rule


def _linear(input: Any, weight: Any, bias: Any = None) -> list:
    last = Shard(len(input.shape) - 1)
    has_bias = hasattr(bias, "shape")

    def case(out: Any, x: Any, w: Any, b: Any) -> tuple[list, list]:
        return [out], [x, w, b if has_bias else None]

    cases = [case(p, p, _R, _R) for p in [_R, *_rows(len(input.shape))]]
    cases.append(case(last, _R, Shard(0), Shard(0)))
    if not has_bias:
        cases.append(case(Partial(), last, Shard(1), None))
        # The second of two low-rank products under row-wise parallelism.
        cases.append(case(Partial(), Partial(), _R, None))
    return cases


def _linear_dgrad(grad: Any, weight: Any) -> list:
    last = Shard(len(grad.shape) - 1)
    cases = [([p], [p, _R]) for p in [_R, Partial(), *_rows(len(grad.shape))]]
    return [*cases, ([Partial()], [last, Shard(0)]), ([last], [_R, Shard(1)])]


def _linear_wgrad(grad: Any, input: Any) -> list:
    last = Shard(len(grad.shape) - 1)
    cases = [([_R], [_R, _R]), ([Shard(0)], [last, _R]), ([Shard(1)], [_R, last])]
    return cases + [([Partial()], [p, p]) for p in _rows(len(grad.shape))]


def _linear_bias_grad(grad: Any) -> list:
    last = Shard(len(grad.shape) - 1)
    return [([_R], [_R]), ([Shard(0)], [last]), *(([Partial()], [p]) for p in _rows(len(grad.shape)))]


def _like(p: Any, *args: Any) -> list:
    """``p`` for tensors, None for everything else."""
    return [p if hasattr(arg, "shape") else None for arg in args]


def _router(logits: Any, k: int, *options: Any) -> list:
    # The last of its options asks for the scores; torch leaves it out where it is not given.
    scores = len(options) == _ROUTER_OPTIONS and options[-1]
    return [
        ([p, p, p if scores else _R], [p, None, *_like(_R, *options)]) for p in [_R, *_rows(len(logits.shape))]
    ]


def _router_backward(grad_weights: Any, grad_scores: Any, logits: Any, indices: Any, *options: Any) -> list:
    tensors = (grad_weights, grad_scores, logits, indices)
    return [([p], [*_like(p, *tensors), *_like(_R, *options)]) for p in [_R, *_rows(len(logits.shape))]]


_RULES = {
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "swiglu_gate_up": _pointwise(1),
    "swiglu_gate_up_backward": _pointwise(2),
    "npu_linear": _linear,
    "linear_dgrad": _linear_dgrad,
    "linear_wgrad": _linear_wgrad,
    "linear_bias_grad": _linear_bias_grad,
    "router_top_k": _router,
    "router_top_k_backward": _router_backward,
}


@functools.cache
def register() -> None:
    """Registers every rule with torch, once a process. Operators that the library does not have are left out."""
    for name, rule in _RULES.items():
        if hasattr(torch.ops.jumar, name):
            register_sharding(getattr(torch.ops.jumar, name).default)(rule)
