"""``make demo``: trains a small Qwen3 on fused operators, and the same model on torch's own for a few steps.

Same weights, same data, same learning rates, one process; what is compared is the loss of each step and the speed.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from jumar.train import plot, report, runner, summary
from jumar.train.errors import JobError
from jumar.train.records import settled
from jumar.train.report_plots import curve
from jumar.train.text import duration

# Eager bf16 takes 20 s a step where the CPU has no bf16 instructions.
EAGER_STEPS = 4


def compare(
    config_file: str, overrides: list[str], eager_steps: int, console: Console
) -> dict[str, Any]:
    """Trains the job fused, then ``eager_steps`` steps of it without converters.

    Returns:
        ``fused`` and ``eager`` (documents of :func:`jumar.train.run`), ``ratio`` of their tokens a second, ``plot``, ``page``.
    """
    fused_job = runner.prepare(config_file, overrides)
    steps = fused_job.job["training"]["steps"]
    runner.introduce(fused_job, 1, console)
    fused = runner.train(fused_job, label="fused  ")
    # The schedule of the whole job, cut off after a few steps.
    eager_job = runner.prepare(
        config_file,
        [
            *overrides,
            "model.converters=",
            f"training.steps={min(eager_steps, steps)}",
            f"lr_scheduler.total_steps={fused_job.job['lr_scheduler']['total_steps'] or steps}",
            f"job.dump_folder={fused_job.job.dump_folder / report.EAGER}",
            f"model.hf_assets_path={fused_job.tokenizer}",
            "checkpoint.enable=false",
            "checkpoint.export_hf=false",
            "metrics.plot_file=",
        ],
    )
    console.print(f"\nThe same on torch's own operators, {min(eager_steps, steps)} steps:")
    eager = runner.train(eager_job, label="eager  ")
    curves = {"fused": curve(fused["records"], "loss"), "eager": curve(eager["records"], "loss")}
    file = fused_job.job.dump_folder / "loss.png"
    plot.draw(file, curves, f"{fused['model']}, {fused_job.job['training']['mixed_precision_param']}")
    page = report.again(fused_job.job)  # with the comparison in it
    return {
        "fused": fused,
        "eager": eager,
        "ratio": fused["tokens_per_second"] / eager["tokens_per_second"],
        "plot": str(file),
        "page": None if page is None else str(page),
    }


def losses(result: dict[str, Any]) -> Table:
    """The loss of fused and eager by step: every step that both ran, then a few of the fused ones."""
    fused = {record["step"]: record["loss"] for record in result["fused"]["records"]}
    eager = {record["step"]: record["loss"] for record in result["eager"]["records"]}
    last = max(fused)
    stride = max(1, last // 6)
    shown = [step for step in fused if step in eager or step % stride == 0 or step == last]
    table = Table(title="Loss by step, same seed", title_justify="left", title_style="bold", header_style="bold")
    for heading in ("step", "fused", "eager", "difference"):
        table.add_column(heading, justify="right")
    for step in shown:
        other = eager.get(step)
        table.add_row(
            str(step),
            f"{fused[step]:.4f}",
            "" if other is None else f"{other:.4f}",
            "" if other is None else f"{fused[step] - other:+.4f}",
        )
    return table


def conclude(result: dict[str, Any], seconds: float, console: Console) -> None:
    """Prints what the demo shows."""
    fused, eager = result["fused"], result["eager"]
    ours, theirs = (settled(run["records"], "seconds_per_step") for run in (fused, eager))
    console.print()
    console.print(summary.table(fused["operators"]))
    console.print(losses(result))
    console.print(
        f"fused {fused['tokens_per_second']:,.0f} tokens/s ({ours:.3f} s a step), "
        f"eager {eager['tokens_per_second']:,.0f} tokens/s ({theirs:.3f} s a step): "
        f"[bold]{result['ratio']:.1f}x[/bold]"
    )
    console.print(f"loss plot: {result['plot']}", soft_wrap=True)
    if result["page"]:
        console.print(f"report: {result['page']}", soft_wrap=True)
    console.print(f"metrics: {fused['metrics_file']}", soft_wrap=True)
    console.print(f"model, loads in transformers: {fused['hf_folder']}", soft_wrap=True)
    console.print(f"{duration(seconds)} in all")


def main(argv: list[str] | None = None) -> int:
    """Command line of the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jumar.train.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/qwen3_debug.toml", help="the job file")
    parser.add_argument("--eager-steps", type=int, default=EAGER_STEPS, help="steps without converters")
    arguments, overrides = parser.parse_known_args(argv)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    start = time.monotonic()
    try:
        result = compare(arguments.config, overrides, max(1, arguments.eager_steps), console)
    except JobError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    conclude(result, time.monotonic() - start, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
