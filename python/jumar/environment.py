"""What ``jumar env`` shows: versions, the SIMD level, threads, settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict
from typing import Any

import torch

import jumar
from jumar._load import NAMESPACES, has_torch_npu

_PACKAGES = ("transformers", "torchtitan", "tokenizers", "datasets", "safetensors", "torch_npu")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shims() -> list[dict[str, str]]:
    """The compatibility shims and what became of each. ShimError when ``JUMAR_SHIMS`` names an unknown one."""
    from jumar import compat

    compat.registry.switched_off()
    return [asdict(status) for status in compat.status()]


def collect() -> dict[str, Any]:
    """Everything that ``jumar env`` prints, as plain data."""
    return {
        "jumar": jumar.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {package: _version(package) for package in _PACKAGES},
        "torch_npu": "real" if has_torch_npu() else "absent",
        "namespaces": [f"torch.ops.{ns}" for ns in NAMESPACES],
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "simd": {"in_use": jumar.simd_target(), "usable": jumar.simd_targets()},
        "threads": jumar.num_threads(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith("JUMAR_")},
        "shims": _shims(),
    }
