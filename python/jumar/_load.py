"""Loads the C++ library and registers its operators with torch.

The operators appear as ``torch.ops.jumar.*``. When no real ``torch_npu`` is installed, those that carry a vendor's name
also appear as ``torch.ops.npu.*``; a real ``torch_npu`` is never shadowed.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from pathlib import Path

#: The library links to libtorch, which must be loaded first.
importlib.import_module("torch")

LIBRARY_PATH = Path(__file__).parent / "_lib" / "libjumar_torch.so"


def has_torch_npu() -> bool:
    """True when the vendor's ``torch_npu`` can be imported (the module itself is not imported)."""
    try:
        spec = importlib.util.find_spec("torch_npu")
    except (ImportError, ValueError):
        return False
    return spec is not None


def _open() -> ctypes.CDLL:
    if not LIBRARY_PATH.exists():
        raise ImportError(
            f"jumar: {LIBRARY_PATH.name} is missing beside the package ({LIBRARY_PATH.parent}); build it with "
            "`pip install .` or `make build`"
        )
    library = ctypes.CDLL(os.fspath(LIBRARY_PATH))
    for name in ("jumar_register", "jumar_set_simd_target"):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_char_p
    for name in ("jumar_simd_target", "jumar_simd_targets", "jumar_call_counts"):
        getattr(library, name).restype = ctypes.c_char_p
    library.jumar_reset_call_counts.restype = None
    return library


def _check(error: bytes | None, kind: type[Exception]) -> None:
    if error is not None:
        raise kind(error.decode())


library = _open()
#: Namespaces of ``torch.ops`` that hold the operators.
NAMESPACES = ("jumar",) if has_torch_npu() else ("jumar", "npu")
for _namespace in NAMESPACES:
    _check(library.jumar_register(_namespace.encode()), ImportError)


def simd_target() -> str:
    """Name of the SIMD level that kernels run at (a Highway target's name), under the cap of ``JUMAR_SIMD``."""
    return library.jumar_simd_target().decode()


def simd_targets() -> list[str]:
    """SIMD levels that were compiled and that this CPU has, best first."""
    return library.jumar_simd_targets().decode().split(",")


def set_simd_target(name: str) -> None:
    """Caps the SIMD level of the whole process at ``name``; ``""`` removes the cap. ValueError for an unknown name."""
    _check(library.jumar_set_simd_target(name.encode()), ValueError)


def num_threads() -> int:
    """Threads that a kernel call uses at most; ``torch.set_num_threads`` changes it."""
    return library.jumar_num_threads()


def call_counts() -> dict[str, int]:
    """How often each operator ran since start or :func:`reset_call_counts`, counted in C++ where the kernel is entered.

    Operators that did not run are absent. Both namespaces count under the same name.
    """
    text = library.jumar_call_counts().decode()
    return {
        name: int(calls) for name, calls in (pair.split("=") for pair in text.split(",") if pair)
    }


def reset_call_counts() -> None:
    """Sets all call counts to zero."""
    library.jumar_reset_call_counts()


__all__ = [
    "LIBRARY_PATH",
    "NAMESPACES",
    "call_counts",
    "has_torch_npu",
    "num_threads",
    "reset_call_counts",
    "set_simd_target",
    "simd_target",
    "simd_targets",
]
