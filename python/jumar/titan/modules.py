"""torchtitan's modules with their forward on fused operators.

Parameters, buffers, initialisation and sharding are the parents': only ``forward`` differs, and it carries the parent's
parameter names, because torchtitan keys its sharding by them. Nothing here counts calls or looks at values: the
operators count themselves, in C++, which keeps the modules compilable as one graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE, _maybe_check_max_pos

from jumar import dtensor, ops, rotary_tables

dtensor.register()


def adopt_signature(parent: type) -> Callable[[Callable], Callable]:
    """Gives a forward the parameter names of ``parent.forward``; they change between torchtitan's releases.

    Arguments are matched by position; a call by keyword works under the parent's names.
    """
    signature = inspect.signature(parent.forward)
    theirs = list(signature.parameters)

    def decorate(forward: Callable) -> Callable:
        ours = list(inspect.signature(forward).parameters)
        if ours == theirs:
            return forward
        if len(ours) > len(theirs):
            raise TypeError(f"{parent.__qualname__}.forward takes {theirs[1:]}, the fused one {ours[1:]}")

        @functools.wraps(forward)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            return forward(*bound.arguments.values())

        renamed.__signature__ = signature
        return renamed

    return decorate


class FusedRMSNorm(RMSNorm):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis by ``npu_rms_norm``: one rounding, fp32 inside."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    @adopt_signature(RMSNorm)
    def forward(self, x: Tensor) -> Tensor:
        # torch's eps of None is that of the dtype.
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return ops.npu_rms_norm(x, self.weight, eps)[0]


class FusedFeedForward(FeedForward):
    """``w2(silu(w1 x) * w3 x)`` with the product by ``swiglu_gate_up``: no concatenation, one pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    @adopt_signature(FeedForward)
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ops.swiglu_gate_up(self.w1(x), self.w3(x)))


class FusedSigmoidGatedFeedForward(SigmoidGatedFeedForward, FusedFeedForward):
    """The gated form; its parent calls ``super().forward``, which is the fused one here."""

    @dataclass(kw_only=True, slots=True)
    class Config(SigmoidGatedFeedForward.Config):
        pass


class FusedLinear(Linear):
    """``x Wᵀ + b`` by ``npu_linear``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    @adopt_signature(Linear)
    def forward(self, input: Tensor) -> Tensor:
        return ops.npu_linear(input, self.weight, self.bias)


def _rotate(
    module: RoPE,
    tables: Callable,
    mode: str,
    query: Tensor,
    key: Tensor,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if positions is not None:
        _maybe_check_max_pos(positions, max_valid_pos=module.cache.shape[0] - 1)
    length = dtensor.local(query).shape[1]
    cos, sin = tables(module.cache, positions, length)
    return tuple(rotary_tables.rotate(x, cos, sin, mode) for x in (query, key))


class FusedCosSinRoPE(CosSinRoPE):
    """Rotate-half positions by ``npu_rotary_mul``; query and key [B, L, N, D], positions [B, L], [1, L] or None."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    @adopt_signature(CosSinRoPE)
    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return _rotate(self, rotary_tables.cos_sin, "half", query, key, positions)


class FusedComplexRoPE(ComplexRoPE):
    """Rotation of adjacent pairs by ``npu_rotary_mul`` in interleave mode; shapes as :class:`FusedCosSinRoPE`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    @adopt_signature(ComplexRoPE)
    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return _rotate(self, rotary_tables.complex_pairs, "interleave", query, key, positions)
