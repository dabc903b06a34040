"""Rotary positions in torchtitan 0.2.x: a function of the model's module, taken from a class's globals.

Classes that call it get a subclass whose methods see another function under the same name; nobody else's do.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn

from jumar import rotary_tables
from jumar.hf import forwards

_NAME = "apply_rotary_emb"


def _half(
    xq: Tensor, xk: Tensor, rope_cache: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate-half with a cache [S, 2 D] of cos beside sin; [B, L, N, D]."""
    cos, sin = rotary_tables.cos_sin(rope_cache, positions, xq.shape[1])
    return tuple(rotary_tables.rotate(x, cos, sin, "half") for x in (xq, xk))


def _pairs(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rotation of neighbours with a complex cache [S, D/2]; [B, L, N, D]."""
    cos, sin = rotary_tables.complex_pairs(freqs_cis, positions, xq.shape[1])
    return tuple(rotary_tables.rotate(x, cos, sin, "interleave") for x in (xq, xk))


_FORMS = {tuple(inspect.signature(function).parameters): function for function in (_half, _pairs)}


@functools.cache
def fused_class(cls: type) -> type | str | None:
    """The class to give a module of class ``cls``; why there is none, as text; None where rotary positions are not used."""
    if not cls.__module__.startswith("torchtitan.models."):
        return None
    methods = {
        name: method
        for name, method in forwards.methods(cls, nn.Module)
        if _NAME in forwards.globals_used(method)
    }
    if not methods:
        return None
    function: Any = forwards.globals_used(next(iter(methods.values())))[_NAME]
    names = tuple(inspect.signature(function).parameters)
    if names not in _FORMS:
        return f"its {_NAME} takes ({', '.join(names)}), which has no fused form"
    spaces: dict[int, dict] = {}
    namespace: dict[str, Any] = {
        name: forwards.rebuild(method, {_NAME: _FORMS[names]}, spaces)
        for name, method in methods.items()
    }
    namespace |= {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__jumar_globals__": forwards.Keeper(spaces),
    }
    return type(cls)(cls.__name__, (cls,), namespace)
