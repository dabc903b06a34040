"""``jumar_adamw`` for torchtitan: its container of optimizers with :class:`jumar.optim.AdamW`, and the clipping beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jumar import compat
from jumar.optim import AdamW, clip

compat.apply()

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import utils as dist_utils

#: The name in ``[optimizer]`` and in ``ParamGroupConfig.optimizer_name``.
NAME = "jumar_adamw"


class Optimizers(OptimizersContainer):
    """torchtitan's container; parameter groups may also name ``jumar_adamw``.

    ``master_weights`` goes in ``optimizer_factory_kwargs_by_name["jumar_adamw"]``. ``implementation`` is a hint.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return AdamW if name == NAME else OptimizersContainer._resolve_optimizer_factory(name)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: Any = None,
    ep_enabled: bool = False,
) -> Tensor:
    """torchtitan's ``clip_grad_norm_`` over all of pipeline, expert, data and tensor parallelism, in one pass.

    Every gradient is reduced over the mesh that it lies on, so parameters of experts need no treatment of their own.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm_type = float(norm_type)
    grads = [p.grad for p in parameters if p.grad is not None]
    if not clip.fits(grads, norm_type):
        return _stock(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach, pp_mesh, ep_enabled
        )
    stages = [] if pp_mesh is None else [pp_mesh.get_group()]
    return clip.clip(grads, float(max_norm), norm_type, error_if_nonfinite, stages)


_stock = dist_utils.clip_grad_norm_


@contextlib.contextmanager
def clipping(optimizers: Iterable[Any]) -> Iterator[None]:
    """torchtitan clips with :func:`clip_grad_norm_` within, where one of its optimizers is jumar's."""
    if not any(isinstance(optimizer, AdamW) for optimizer in optimizers):
        yield
        return
    before = dist_utils.clip_grad_norm_
    dist_utils.clip_grad_norm_ = clip_grad_norm_
    try:
        yield
    finally:
        dist_utils.clip_grad_norm_ = before
