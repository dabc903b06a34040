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
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE, _maybe_check_max_pos

from jumar import ops
from jumar.titan import sharding

sharding.register()


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


def _rows(cache: Tensor, positions: Tensor | None, length: int) -> Tensor:
    """The table's rows for each token, [1 or B, L, W]; positions [B, L] give every row its own angles."""
    if positions is None:
        return cache[:length].unsqueeze(0)
    return F.embedding(positions, cache)


def _rotate(
    module: RoPE,
    tables: Callable[[Tensor | None, int], tuple[Tensor, Tensor]],
    mode: str,
    query: Tensor,
    key: Tensor,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    local_positions = positions.to_local() if isinstance(positions, DTensor) else positions
    if local_positions is not None:
        _maybe_check_max_pos(local_positions, max_valid_pos=module.cache.shape[0] - 1)
    length = query.to_local().shape[1] if isinstance(query, DTensor) else query.shape[1]
    cos, sin = tables(local_positions, length)

    def rotate(x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            # Rotation mixes nothing but the last axis, which is never sharded: every rank turns its own part.
            y = ops.npu_rotary_mul(x.to_local(), cos, sin, mode)
            return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)
        return ops.npu_rotary_mul(x, cos, sin, mode)

    return rotate(query), rotate(key)


class FusedCosSinRoPE(CosSinRoPE):
    """Rotate-half positions by ``npu_rotary_mul``; query and key [B, L, N, D], positions [B, L], [1, L] or None."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _tables(self, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        cache = self.cache.to_local() if isinstance(self.cache, DTensor) else self.cache
        rows = _rows(cache, positions, length).unsqueeze(2)
        half = rows.shape[-1] // 2
        return rows[..., :half], rows[..., half:]

    @adopt_signature(CosSinRoPE)
    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return _rotate(self, self._tables, "half", query, key, positions)


class FusedComplexRoPE(ComplexRoPE):
    """Rotation of adjacent pairs by ``npu_rotary_mul`` in interleave mode; shapes as :class:`FusedCosSinRoPE`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    def _tables(self, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        cache = self.cache.to_local() if isinstance(self.cache, DTensor) else self.cache
        # complex64 [S, D/2] as real [S, D]: cos and sin of each pair alternate.
        real = torch.view_as_real(cache).flatten(1)
        pairs = _rows(real, positions, length).unflatten(-1, (-1, 2)).unsqueeze(2)
        cos, sin = pairs[..., 0], pairs[..., 1]
        return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)

    @adopt_signature(ComplexRoPE)
    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return _rotate(self, self._tables, "interleave", query, key, positions)
