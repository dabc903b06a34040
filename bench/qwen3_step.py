"""A whole training step, eager against converted: a Qwen3 of 4 layers, forward, loss, backward and AdamW.

Hidden 512, intermediate 1536, 8 heads, 4 key-value heads, head size 64, vocabulary 4096, batch 2 x 256.  Attention,
loss and AdamW are torch's on both sides.  Both models start from the same weights and see the same tokens; they take
turns step by step, and the first step of each (allocation, first use of kernels) is not counted.

    python bench/qwen3_step.py                   # fp32 and bf16 on this machine
    python bench/qwen3_step.py --emulate avx2    # both sides held to AVX2, in a child process
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

#: Read by ATen, oneDNN, MKL and jumar when they start.
AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "DNNL_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "JUMAR_SIMD": "AVX2",
}
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def build_model(dtype: Any) -> Any:
    """The model of the measurement, random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config).to(dtype).train()


class Trainee:
    """One model with its optimizer."""

    def __init__(self, model: Any):
        import torch

        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, ids: Any) -> None:
        """One training step on [batch, length] tokens."""
        begin = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - begin)


def measure(
    dtype_name: str,
    steps: int,
    eager_steps: int,
    batch: int,
    length: int,
    converters: list[str] | None = None,
) -> dict:
    """Times ``steps`` converted steps and ``eager_steps`` eager ones, in turns; seconds and ratios."""
    import torch

    import jumar

    model = build_model(getattr(torch, dtype_name))
    converted = copy.deepcopy(model)
    if converters is None:
        report = jumar.kernelize(converted)
    else:
        report = jumar.convert(converted, converters)
    eager, fused = Trainee(model), Trainee(converted)
    generator = torch.Generator().manual_seed(1)
    for step in range(max(steps, eager_steps) + 1):
        ids = torch.randint(0, 4096, (batch, length), generator=generator)
        if step <= eager_steps:
            eager.step(ids)
        if step <= steps:
            fused.step(ids)
    pairs = list(zip(eager.losses, fused.losses, strict=False))[:3]
    apart = max(abs(a - b) / abs(a) for a, b in pairs)
    eager_seconds, fused_seconds = eager.seconds[1:], fused.seconds[1:]
    return {
        "dtype": dtype_name,
        "simd": jumar.simd_target(),
        "aten": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "sites": len(report.replaced),
        "eager_min": min(eager_seconds),
        "eager_median": statistics.median(eager_seconds),
        "jumar_min": min(fused_seconds),
        "jumar_median": statistics.median(fused_seconds),
        "ratio_min": min(eager_seconds) / min(fused_seconds),
        "ratio_median": statistics.median(eager_seconds) / statistics.median(fused_seconds),
        "tokens_per_second": batch * length / min(fused_seconds),
        "losses_apart": apart,
        "ok": apart <= LOSS_TOLERANCE[dtype_name],
    }


def show(row: dict) -> None:
    """One line for people."""
    print(
        f"{row['dtype']:9} eager {row['eager_min']:8.3f} s  jumar {row['jumar_min']:8.3f} s  "
        f"ratio {row['ratio_min']:.2f} (medians {row['ratio_median']:.2f})  "
        f"{row['tokens_per_second']:.0f} tokens/s  {row['sites']} sites  "
        f"losses {row['losses_apart']:.1e} apart{'' if row['ok'] else '  TOO FAR'}  "
        f"[{row['simd']}, torch {row['aten']}, {row['threads']} threads]",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 when the losses of the first steps disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32,bfloat16", help="comma-separated")
    parser.add_argument(
        "--steps", type=int, default=10, help="counted steps of the converted model"
    )
    parser.add_argument("--eager-steps", type=int, help="counted eager steps; default as many")
    parser.add_argument("--converters", help="comma-separated; default all that apply")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument(
        "--emulate", choices=["avx2"], help="hold both sides to this instruction set"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.emulate and any(os.environ.get(k) != v for k, v in AVX2_ONLY.items()):
        arguments = sys.argv[1:] if argv is None else argv
        return subprocess.run(
            [sys.executable, os.path.abspath(__file__), *arguments],
            env={**os.environ, **AVX2_ONLY},
        ).returncode
    rows = []
    for dtype in options.dtype.split(","):
        eager_steps = options.eager_steps or options.steps
        converters = options.converters.split(",") if options.converters else None
        rows.append(
            measure(dtype, options.steps, eager_steps, options.batch, options.length, converters)
        )
        if not options.json:
            show(rows[-1])
    if options.json:
        print(json.dumps(rows, indent=2))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
