"""The machine of a measurement: what a table of ratios has to say beside its numbers."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path

import torch

import jumar


def cpu_name() -> str:
    """The CPU as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return " ".join(names[0].split()) if names and names[0] else platform.machine()


def facts() -> dict[str, str | int]:
    """CPU, instruction sets in use, threads, torch, date."""
    return {
        "cpu": cpu_name(),
        "simd": jumar.simd_target(),
        "aten": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
