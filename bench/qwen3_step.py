"""A whole training step, eager against converted: a Qwen3 of 4 layers, forward, loss, backward and AdamW.

Hidden 512, intermediate 1536, 8 heads, 4 key-value heads, head size 64, vocabulary 4096, batch 2 x 256.  Attention is
torch's on every side; the converted model trains with jumar's AdamW unless told otherwise.  All models start from the
same weights and see the same tokens; they take turns step by step, and the first step of each (allocation, first use of
kernels, compilation) is not counted.  A job file is measured by `jumar bench --step`, which also tells memory.

    python bench/qwen3_step.py                   # fp32 and bf16 on this machine
    python bench/qwen3_step.py --inductor        # torch.compile of the plain model takes part
    python bench/qwen3_step.py --emulate avx2    # every side held to AVX2, in a child process
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

    def __init__(self, model: Any, optimizer: Any):
        self.model = model
        self.optimizer = optimizer(model.parameters(), lr=1e-4)
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
    inductor: bool = False,
    optimizer: str = "jumar",
) -> dict:
    """Times ``steps`` converted steps and ``eager_steps`` eager and compiled ones, in turns; seconds and ratios."""
    import torch

    import jumar
    from jumar.optim import AdamW

    model = build_model(getattr(torch, dtype_name))
    converted = copy.deepcopy(model)
    if converters is None:
        report = jumar.kernelize(converted)
    else:
        report = jumar.convert(converted, converters)
    plain = torch.optim.AdamW
    compiled = Trainee(torch.compile(copy.deepcopy(model), dynamic=False), plain) if inductor else None
    eager = Trainee(model, plain)
    fused = Trainee(converted, AdamW if optimizer == "jumar" else plain)
    generator = torch.Generator().manual_seed(1)
    for step in range(max(steps, eager_steps) + 1):
        ids = torch.randint(0, 4096, (batch, length), generator=generator)
        if step <= eager_steps:
            eager.step(ids)
            if compiled is not None:
                compiled.step(ids)
        if step <= steps:
            fused.step(ids)
    pairs = list(zip(eager.losses, fused.losses, strict=False))[:3]
    apart = max(abs(a - b) / abs(a) for a, b in pairs)
    eager_seconds, fused_seconds = eager.seconds[1:], fused.seconds[1:]
    more = {}
    if compiled is not None:
        seconds = compiled.seconds[1:]
        more = {
            "inductor_min": min(seconds),
            "inductor_median": statistics.median(seconds),
            "inductor_ratio_min": min(seconds) / min(fused_seconds),
            "inductor_ratio_median": statistics.median(seconds) / statistics.median(fused_seconds),
        }
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
        **more,
    }


def show(row: dict) -> None:
    """One line for people."""
    compiled = (
        f"Inductor {row['inductor_min']:.3f} s, ratio {row['inductor_ratio_min']:.2f}  "
        if "inductor_min" in row
        else ""
    )
    print(
        f"{row['dtype']:9} eager {row['eager_min']:8.3f} s  jumar {row['jumar_min']:8.3f} s  "
        f"ratio {row['ratio_min']:.2f} (medians {row['ratio_median']:.2f})  "
        f"{compiled}{row['tokens_per_second']:.0f} tokens/s  {row['sites']} sites  "
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
    parser.add_argument("--inductor", action="store_true", help="also the compiled plain model")
    parser.add_argument("--optimizer", choices=["jumar", "torch"], default="jumar", help="of the converted model")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument(
        "--emulate", choices=["avx2"], help="hold both sides to this instruction set"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.emulate:
        from jumar.bench.timing import EMULATE, emulating

        if not emulating(options.emulate):
            arguments = sys.argv[1:] if argv is None else argv
            return subprocess.run(
                [sys.executable, os.path.abspath(__file__), *arguments],
                env={**os.environ, **EMULATE[options.emulate]},
            ).returncode
    rows = []
    for dtype in options.dtype.split(","):
        eager_steps = options.eager_steps or options.steps
        converters = options.converters.split(",") if options.converters else None
        rows.append(
            measure(
                dtype,
                options.steps,
                eager_steps,
                options.batch,
                options.length,
                converters,
                options.inductor,
                options.optimizer,
            )
        )
        if not options.json:
            show(rows[-1])
    if options.json:
        print(json.dumps(rows, indent=2))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
