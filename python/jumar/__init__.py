"""Fused Ascend operators in C++ for any machine: operators, model converters, verification, training.

>>> import jumar
>>> report = jumar.kernelize(model)      # swap modules of a Hugging Face model for fused operators
>>> report.undo()                        # and back, bit for bit
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jumar import ops
from jumar._load import (
    call_counts,
    has_torch_npu,
    num_threads,
    reset_call_counts,
    set_simd_target,
    simd_target,
    simd_targets,
)

if TYPE_CHECKING:
    from jumar import optim
    from jumar.convert import convert, kernelize

__version__ = "0.1.0"


# Converters import transformers when they meet one of its models; `import jumar` alone stays light.
def __getattr__(name: str) -> Any:
    import importlib

    if name in ("convert", "optim"):
        return importlib.import_module(f"jumar.{name}")
    if name == "kernelize":
        return importlib.import_module("jumar.convert").kernelize
    raise AttributeError(f"module 'jumar' has no attribute {name!r}")


__all__ = [
    "call_counts",
    "convert",
    "has_torch_npu",
    "kernelize",
    "num_threads",
    "ops",
    "optim",
    "reset_call_counts",
    "set_simd_target",
    "simd_target",
    "simd_targets",
]
