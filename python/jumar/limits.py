"""What this machine can do at most, measured in the same run: the denominators of "percent of the limit"."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch

import jumar
from jumar._load import library


@dataclass
class Limits:
    """``copy_gbs``: bytes read plus written, out of cache. Peaks in GFLOP/s at the SIMD level in use."""

    copy_gbs: float
    fma_gflops: float
    bf16_gflops: float  # 0 where the CPU has no bf16 dot products
    threads: int
    simd: str

    @property
    def text(self) -> str:
        """For people."""
        bf16 = f", bf16 dot products {self.bf16_gflops:,.0f} GFLOP/s" if self.bf16_gflops else ""
        return (
            f"({self.threads} thread{'s' if self.threads != 1 else ''}, {self.simd}): copy {self.copy_gbs:.1f} GB/s, "
            f"fp32 multiply-add {self.fma_gflops:,.0f} GFLOP/s{bf16}"
        )

    def flops_limit(self, dtype: torch.dtype) -> float:
        """GFLOP/s that a matrix product in ``dtype`` could reach."""
        if dtype == torch.bfloat16 and self.bf16_gflops > 0:
            return self.bf16_gflops
        return self.fma_gflops / 2 if dtype == torch.float64 else self.fma_gflops

    def better(self, other: Limits) -> Limits:
        """The higher of both in each."""
        return replace(
            self,
            copy_gbs=max(self.copy_gbs, other.copy_gbs),
            fma_gflops=max(self.fma_gflops, other.fma_gflops),
            bf16_gflops=max(self.bf16_gflops, other.bf16_gflops),
        )


def _call(name: str, *arguments: float | int) -> float:
    function = getattr(library, name)
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_int if isinstance(a, int) else ctypes.c_double for a in arguments]
    value = function(*arguments)
    if value < 0:
        raise RuntimeError(f"{name} failed")
    return value


def measure(
    quick: bool = False, *, copy: bool = True, flops: bool = True, megabytes: int = 256
) -> Limits:
    """Copies memory and multiplies registers for about a second (a fraction of that when ``quick``).

    What is not asked for (``copy``, ``flops``) is 0. ``megabytes`` are copied: less than several times the last-level
    cache measures the cache.
    """
    threads = jumar.num_threads()
    short = 0.05 if quick else 0.3
    return Limits(
        copy_gbs=_call("jumar_measure_copy_gbs", threads, short, megabytes) if copy else 0.0,
        fma_gflops=_call("jumar_measure_fma_gflops", threads, short) if flops else 0.0,
        bf16_gflops=_call("jumar_measure_bf16_gflops", threads, short) if flops else 0.0,
        threads=threads,
        simd=jumar.simd_target(),
    )
