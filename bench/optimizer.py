"""jumar.optim.AdamW and clip_grad_norm_ beside torch's forms, interleaved, on the parameters of a Qwen3 layer stack.

    python bench/optimizer.py [--dtype bfloat16] [--layers 4] [--threads 2]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

from jumar import bench
from jumar.optim import AdamW, clip_grad_norm_

# Qwen3-0.6B: q and o, k and v, gate, up and down, norms.
LAYER = [(2048, 1024), (1024, 2048), (1024, 1024), (1024, 1024), (3072, 1024), (3072, 1024), (1024, 3072)]
LAYER += [(1024,), (1024,), (128,), (128,)]


def parameters(layers: int, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in LAYER * layers
    ]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    return params


def show(title: str, calls: dict[str, Callable[[], object]], bytes_: float, copy_gbs: float) -> None:
    print(title)
    timings = bench.interleave(calls)
    best = timings["jumar"].minimum
    for name, timing in timings.items():
        percent = f", {100e-9 * bytes_ / timing.minimum / copy_gbs:.0f} % of copy bandwidth" if name == "jumar" else ""
        print(f"  {name:24} {timing.minimum * 1e3:9.2f} ms  {timing.minimum / best:6.2f}x{percent}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    limits = bench.measure(flops=False)
    elements = sum(p.numel() for p in parameters(options.layers, dtype))
    print(f"{elements:,} parameters, {options.dtype}, {options.threads} threads, copy {limits.copy_gbs:.1f} GB/s")

    steps: dict[str, Callable[[], object]] = {
        "jumar": AdamW(parameters(options.layers, dtype)).step,
        "torch fused": torch.optim.AdamW(parameters(options.layers, dtype), fused=True).step,
        "torch foreach": torch.optim.AdamW(parameters(options.layers, dtype), foreach=True).step,
        "torch for-loop": torch.optim.AdamW(parameters(options.layers, dtype), foreach=False).step,
    }
    if dtype == torch.bfloat16:
        steps["jumar, master weights"] = AdamW(parameters(options.layers, dtype), master_weights=True).step
    show("AdamW step", steps, 7.0 * elements * dtype.itemsize, limits.copy_gbs)

    params = parameters(options.layers, dtype)
    torchs = torch.nn.utils.clip_grad_norm_
    once, thrice = 1.0 * elements * dtype.itemsize, 3.0 * elements * dtype.itemsize
    show(
        "norm within max_norm",
        {"jumar": lambda: clip_grad_norm_(params, 1e30), "torch": lambda: torchs(params, 1e30)},
        once,
        limits.copy_gbs,
    )
    # max_norm 0 scales at every call.
    show(
        "norm and scaling",
        {"jumar": lambda: clip_grad_norm_(params, 0.0), "torch": lambda: torchs(params, 0.0)},
        thrice,
        limits.copy_gbs,
    )


if __name__ == "__main__":
    main()
