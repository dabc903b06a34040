"""Rows of torchtitan's rotary caches for given positions, as the cos and sin that ``npu_rotary_mul`` takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from jumar.dtensor import local


def _rows(cache: Tensor, positions: Tensor | None, length: int) -> Tensor:
    """[S, W] -> [1 or B, length, 1, W]; positions [B, L] give every row of a batch its own angles."""
    rows = cache[:length].unsqueeze(0) if positions is None else F.embedding(positions, cache)
    return rows.unsqueeze(2)


def cos_sin(cache: Tensor, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """A cache [S, 2 D] of cos beside sin, for rotate-half: two views [1 or B, L, 1, D].

    Args:
        cache: fp32; a replicated DTensor is taken as its local part.
        positions: [B, L] or [1, L] row numbers, or None for 0 .. length - 1.
        length: L.
    """
    rows = _rows(local(cache), local(positions), length)
    half = rows.shape[-1] // 2
    return rows[..., :half], rows[..., half:]


def complex_pairs(cache: Tensor, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """A cache [S, D/2] of complex numbers, for the rotation of neighbours: cos and sin [1 or B, L, 1, D], each twice."""
    real = torch.view_as_real(local(cache)).flatten(1)
    pairs = _rows(real, local(positions), length).unflatten(-1, (-1, 2))
    return tuple(pairs[..., part].repeat_interleave(2, dim=-1) for part in (0, 1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """``npu_rotary_mul`` of [B, L, N, D]; a DTensor is turned part by part, since only the last axis is mixed."""
    from jumar import ops

    if isinstance(x, DTensor):
        y = ops.npu_rotary_mul(x.to_local(), cos, sin, mode)
        return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)
    return ops.npu_rotary_mul(x, cos, sin, mode)
