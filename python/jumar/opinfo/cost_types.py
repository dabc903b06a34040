"""What a cost is made of. See :mod:`jumar.opinfo.costs`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Arg:
    """A tensor as an argument: shape, dtype (None when unknown) and, where known, strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def item(self) -> int:
        """Bytes an element. Unknown: LookupError, which leaves the call without a cost."""
        if self.dtype is None:
            raise LookupError("dtype")
        return self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the elements that differ in memory: what is expanded (stride 0) is there once."""
        shape = self.shape
        if self.strides is not None and len(self.strides) == len(shape):
            shape = tuple(
                n for n, stride in zip(shape, self.strides, strict=True) if stride or n == 0
            )
        return math.prod(shape) * self.item

    @property
    def dense(self) -> int:
        """Bytes of a contiguous tensor of this shape and dtype."""
        return self.numel * self.item


@dataclass(frozen=True)
class Cost:
    """``flops`` None: bound by memory. ``dtype``: that of the arithmetic, whose peak is the limit."""

    bytes: float | None
    flops: float | None = None
    dtype: torch.dtype | None = None

    def __add__(self, other: Cost) -> Cost:
        """Both calls. A part that one of them does not know is unknown; flops count where there are any."""
        moved = None if self.bytes is None or other.bytes is None else self.bytes + other.bytes
        flops = (
            None
            if self.flops is None and other.flops is None
            else (self.flops or 0.0) + (other.flops or 0.0)
        )
        return Cost(moved, flops, self.dtype or other.dtype)

    def seconds(self, copy_gbs: float, gflops: float) -> tuple[float, str] | None:
        """(the least time, what sets it: ``bytes`` or ``flops``) on a machine with these limits; None when unknown."""
        times = []
        if self.bytes is not None and copy_gbs > 0:
            times.append((self.bytes / copy_gbs * 1e-9, "bytes"))
        if self.flops is not None:
            if gflops <= 0:
                return None
            times.append((self.flops / gflops * 1e-9, "flops"))
        return max(times, default=None)


Formula = Callable[..., Cost]


def recorded(tensors: list[Arg]) -> None:
    """Long lists are empty in a trace."""
    if not tensors:
        raise LookupError("list")


def streams(count: int, results: float, like: int = 0) -> Formula:
    """The first ``count`` arguments are read, ``results`` tensors of the size of argument ``like`` are written."""

    def formula(*arguments: Any) -> Cost:
        if len(arguments) < count:
            raise LookupError("arguments")
        return Cost(sum(t.bytes for t in arguments[:count]) + results * arguments[like].dense)

    return formula
