"""What ``jumar bench`` was asked for: checked whole before anything is measured, then run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from jumar.bench import checks, report, runner
from jumar.bench.cases import Job, layouts_of, parse_case, plan
from jumar.bench.timing import EMULATE, emulating
from jumar.opinfo import dtype_name
from jumar.spelling import unknown


class BenchError(Exception):
    """A mistake of the user that shows while it runs; its text is one line."""


@dataclass
class Outcome:
    """A result to print: as data, and as tables on a console."""

    ok: bool
    data: dict[str, Any]
    show: Callable[[Console], None]


@dataclass
class Request:
    """The options of the command, as ``jumar bench --help`` describes them."""

    op: list[str] | None = None
    dtypes: list[torch.dtype] | None = None
    shape: str | None = None
    layout: str | None = None
    cases: list[str] = field(default_factory=list)
    shapes: str | None = None
    mode: str = "speed"
    quick: bool = False
    inductor: bool | None = None
    emulate: str | None = None
    csv: str | None = None
    plot: str | None = None
    step: str | None = None
    steps: int = 5
    overrides: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def check(self) -> None:
        """Fills in :attr:`jobs`. ValueError that names what is wrong, before minutes of measuring."""
        if self.mode not in checks.MODES:
            raise ValueError(unknown("mode", self.mode, checks.MODES))
        if self.emulate is not None:
            if self.emulate not in EMULATE:
                raise ValueError(f"--emulate {self.emulate}: known are {', '.join(EMULATE)}")
            if not emulating(self.emulate):
                raise ValueError("--emulate needs a process of its own: run it as `jumar bench`")
        for name, path in (("--csv", self.csv), ("--plot", self.plot)):
            if path is not None and self.step is None and self.mode != "speed":
                raise ValueError(f"{name} goes with --mode speed, not {self.mode}")
            if path is not None and not Path(path).resolve().parent.is_dir():
                raise ValueError(f"no folder for {path}")
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib")
        if self.step is not None:
            self._check_step()
        else:
            self._plan()

    def _check_step(self) -> None:
        given = {
            "--op": self.op,
            "--dtype": self.dtypes,
            "--shape": self.shape,
            "--layout": self.layout,
            "--case": self.cases,
            "--shapes": self.shapes,
            "--mode": self.mode != "speed",
        }
        for name, value in given.items():
            if value:
                raise ValueError(f"{name} goes with operators, not with --step")

    def _plan(self) -> None:
        if self.cases:
            if self.op or self.dtypes or self.shape or self.layout or self.shapes or self.quick:
                raise ValueError(
                    "--case says it all; leave out --op, --dtype, --shape, --shapes, --layout, --quick"
                )
            self.jobs = [parse_case(text) for text in self.cases]
        else:
            dtypes, shape, layouts = checks.defaults(self.mode, self.quick)
            self.jobs = plan(
                self.op,
                self.dtypes or dtypes,
                self.shape or (None if self.shapes else shape),
                quick=self.quick and self.mode == "speed" and self.shapes is None,
                layouts=layouts_of(self.layout, layouts),
                shapes_file=self.shapes,
                every_dtype=self.mode == "support",
            )
        if self.mode == "gradient":
            for job in self.jobs:
                if job.dtype != torch.float64:
                    raise ValueError(
                        f"--mode gradient takes finite differences in fp64, not in {dtype_name(job.dtype)}; "
                        "--mode correctness compares gradients in any dtype with the fp64 oracle"
                    )
                if job.layout == "expanded":
                    raise ValueError("--mode gradient makes its own gradients: no layout expanded")

    def run(self, progress: Callable[[str], None]) -> Outcome:
        """Measures or checks, and writes the files that were asked for."""
        if self.step is not None:
            return self._run_step(progress)
        if self.mode != "speed":
            rows = checks.check(self.jobs, self.mode, progress)
            ok = all(row.ok for row in rows)
            data = {"mode": self.mode, "ok": ok, "rows": [vars(row) for row in rows]}
            return Outcome(ok, data, lambda console: checks.show(rows, self.mode, console))
        result = runner.run(
            self.jobs,
            quick=self.quick,
            inductor=True if self.inductor is None else self.inductor,
            progress=progress,
        )
        if self.csv is not None:
            report.write_csv(result, self.csv)
        if self.plot is not None:
            report.draw(result, self.plot)
        data = {"mode": "speed", **report.to_dict(result)}
        return Outcome(result.ok, data, lambda console: report.show(result, console))

    def _run_step(self, progress: Callable[[str], None]) -> Outcome:
        from jumar.bench import step, step_report

        result = step.measure(
            self.step,
            self.overrides,
            steps=self.steps,
            inductor=bool(self.inductor),
            progress=progress,
        )
        if self.csv is not None:
            step_report.write_csv(result, self.csv)
        if self.plot is not None:
            step_report.draw(result, self.plot)
        return Outcome(
            result.ok, step_report.to_dict(result), lambda console: step_report.show(result, console)
        )
