"""Gradient clipping by the norm of all gradients: one multithreaded pass for the norm, one for the scaling."""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jumar.ops.optimizer import grad_power_sums, scale_grads_
from jumar.optim.local import is_dtensor, is_plain, memory


def _reduced(grad: Tensor) -> tuple[Tensor, Any]:
    """The part of a gradient that this process adds to the norm, and over which (mesh, axes) parts are added."""
    if not is_dtensor(grad):
        return memory(grad), None
    if any(placement.is_partial() for placement in grad.placements):
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if p.is_partial() else p for p in grad.placements]
        grad = grad.redistribute(placements=whole)
    mesh = grad.device_mesh
    axes = tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate() and mesh.size(i) > 1)
    return memory(grad), (mesh, axes)


def _all_reduce(sums: Tensor, group: Any, norm_type: float) -> None:
    """Adds, or takes the largest, over the processes of a group. A maximum over gloo would lose NaN."""
    if not math.isinf(norm_type):
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        return
    bad = sums.isnan().double()
    dist.all_reduce(bad, dist.ReduceOp.SUM, group=group)
    sums.nan_to_num_(nan=0.0, posinf=math.inf)
    dist.all_reduce(sums, dist.ReduceOp.MAX, group=group)
    sums[bad > 0] = math.nan


def fits(grads: list[Tensor], norm_type: float) -> bool:
    """Whether :func:`power_sum` takes these gradients; torch's own functions take the rest."""
    return norm_type > 0 and all(is_plain(g) and g.is_floating_point() for g in grads)


def power_sum(grads: list[Tensor], norm_type: float, groups: Iterable[Any] = ()) -> Tensor:
    """The sum of ``|x| ** norm_type`` (the largest ``|x|`` for infinity) over all gradients, fp64, one element.

    Over DTensors it is the sum over the whole tensors; every process of their meshes has to take part.

    Args:
        grads: see :func:`fits`.
        norm_type: positive or infinity.
        groups: process groups over which the result is reduced once more (pipeline stages).
    """
    keys: dict[Any, int] = {}
    locals_, index = [], []
    for grad in grads:
        local, key = _reduced(grad)
        locals_.append(local)
        index.append(keys.setdefault(key, len(keys)))
    if not grads:
        total = torch.zeros(1, dtype=torch.float64)
    else:
        sums = grad_power_sums(locals_, index, len(keys), norm_type)
        for key, at in keys.items():
            for axis in () if key is None else key[1]:
                _all_reduce(sums[at : at + 1], key[0].get_group(axis), norm_type)
        total = (sums.max() if math.isinf(norm_type) else sums.sum()).view(1)
    for group in groups:
        _all_reduce(total, group, norm_type)
    return total


def norm_of(total: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """The norm, 0-dim, from a :func:`power_sum`."""
    if norm_type == 2.0:
        total = total.sqrt()
    elif norm_type != 1.0 and not math.isinf(norm_type):
        total = total.pow(1.0 / norm_type)
    return total.to(dtype).view(())


def scale(grads: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiplies every gradient by ``min(1, max_norm / (norm + 1e-6))``; a factor of 1 changes nothing."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).item()
    if grads and factor != 1.0:
        scale_grads_([memory(g) for g in grads], factor)


def check_finite(norm: Tensor, norm_type: float) -> None:
    """RuntimeError, torch's, where the norm is NaN or infinite."""
    if not math.isfinite(norm.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def clip(
    grads: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    groups: Iterable[Any] = (),
) -> Tensor:
    """Clips gradients that :func:`fits` takes; returns their norm, in the dtype that torch's has."""
    dtype = functools.reduce(torch.promote_types, {g.dtype for g in grads}) if grads else torch.float32
    norm = norm_of(power_sum(grads, norm_type, groups), norm_type, dtype)
    if error_if_nonfinite:
        check_finite(norm, norm_type)
    scale(grads, max_norm, norm)
    return norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` in one pass for the norm and, where it is needed, one for the scaling.

    The norm is accumulated in fp64 over a fixed tree of sums: the same value for every thread count, rounded once to
    the dtype that torch's has.

    Args:
        parameters: tensors whose ``grad`` is clipped, in place. DTensors: the norm is that of the whole tensors, and
            every process of their meshes has to call.
        max_norm: the largest norm that is left alone.
        norm_type: any positive number or infinity; 0 and negative ones, complex, sparse and other devices go to torch.
        error_if_nonfinite: raise where the norm is NaN or infinite, with nothing written.
        foreach: accepted, without effect.

    Returns:
        The norm before clipping, 0-dim, never a DTensor. Of no gradients: 0.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    else:
        generator = isinstance(parameters, types.GeneratorType)
        parameters = list(parameters)
        if generator and not parameters:
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3
            )
    norm_type, max_norm = float(norm_type), float(max_norm)
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    if not fits(grads, norm_type):
        return torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
    return clip(grads, max_norm, norm_type, error_if_nonfinite)
