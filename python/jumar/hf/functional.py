"""Modules whose methods call torch's attention functions, by whatever name, themselves or in functions of their file."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention as flex

from jumar.convert.verdict import Match, Miss, Verdict
from jumar.hf import forwards
from jumar.masks import functions

#: Key of a class whose methods call the functions.
CALLS = "calls"
_SDPA = F.scaled_dot_product_attention
_OWN = {"scaled_dot_product_attention": functions.scaled_dot_product_attention}


@functools.cache
def _shadow(module: types.ModuleType) -> types.ModuleType:
    """A module with the attention functions exchanged in it, and in torch.nn.functional under it."""
    copy = types.ModuleType(module.__name__, module.__doc__)
    copy.__dict__.update(module.__dict__)
    if module is F:
        copy.__dict__.update(_OWN)
    elif module is flex:
        copy.flex_attention = functions.flex_attention_by(flex.flex_attention)
    else:
        for name, below in {"nn": nn, "functional": F}.items():
            if getattr(module, name, None) is below:
                setattr(copy, name, _shadow(below))
    return copy


#: What a method refers to under a module, to get at a function.
_PATHS = {
    F: {"scaled_dot_product_attention"},
    nn: {"functional", "scaled_dot_product_attention"},
    torch: {"nn", "functional", "scaled_dot_product_attention"},
    flex: {"flex_attention"},
}


def _is_flex(value: Any) -> bool:
    """FlexAttention, compiled or not."""
    return flex.flex_attention in (value, getattr(value, "_torchdynamo_orig_callable", None))


def _replacement(value: Any, names: set[str]) -> Any:
    """What a global stands for in converted methods, or None for no change."""
    if value is _SDPA:
        return functions.scaled_dot_product_attention
    if isinstance(value, types.ModuleType):
        path = next((names_of for module, names_of in _PATHS.items() if module is value), None)
        return _shadow(value) if path is not None and path <= names else None
    if isinstance(value, type):
        # torchtitan 0.2 keeps its compiled form on a class.
        own = {n: v for n, v in vars(value).items() if n in names and callable(v) and _is_flex(v)}
        own = {n: functions.flex_attention_by(v) for n, v in own.items()}
        return type(value)(value.__name__, (value,), own) if own else None
    return functions.flex_attention_by(value) if callable(value) and _is_flex(value) else None


def _names(function: types.FunctionType) -> set[str]:
    return set().union(*(forwards._names_in(layer.__code__) for layer in forwards._chain(function)))


def _direct(function: types.FunctionType) -> dict[str, Any]:
    names = _names(function)
    found = {
        name: _replacement(value, names) for name, value in forwards.globals_used(function).items()
    }
    return {name: new for name, new in found.items() if new is not None}


def _helpers(
    function: types.FunctionType, seen: set[int]
) -> Iterator[tuple[str, types.FunctionType]]:
    """Functions of the same file that a function calls, directly or not, and that call one of torch's; innermost first."""
    for name, value in forwards.globals_used(function).items():
        if not isinstance(value, types.FunctionType) or id(value) in seen:
            continue
        if value.__globals__ is not function.__globals__:
            continue
        seen.add(id(value))
        inner = list(_helpers(value, seen))
        yield from inner
        if inner or _direct(value):
            yield name, value


def _methods(cls: type) -> dict[str, tuple[types.FunctionType, list[tuple[str, Any]]]]:
    """Methods that reach one of torch's functions, each with the helpers on the way."""
    found = {}
    for name, method in forwards.methods(cls, nn.Module):
        helpers = list(_helpers(method, {id(method)}))
        if helpers or _direct(method):
            found[name] = (method, helpers)
    return found


@functools.cache
def recognise(cls: type) -> Verdict:
    """Whether a class calls torch's attention functions, and may get the fused ones."""
    if issubclass(cls, nn.MultiheadAttention):
        return Miss("torch's MultiheadAttention calls its attention inside torch")
    if (cls.__module__ or "").partition(".")[0] in ("torch", "jumar"):
        return None
    found = _methods(cls)
    if not found:
        return None
    try:
        for method, helpers in found.values():
            for function in (method, *(helper for _, helper in helpers)):
                forwards.check(function, _direct(function))
    except forwards.CannotRebuild as error:
        return Miss(str(error))
    return Match("npu_fusion_attention", (CALLS,))


def namespace(base: type) -> dict[str, Any]:
    """The methods of a class that :func:`recognise` matched, calling the fused functions."""
    spaces: dict[int, dict] = {}
    made: dict[str, Any] = {}
    for name, (method, helpers) in _methods(base).items():
        direct = _direct(method)
        fresh = {}
        for helper_name, helper in helpers:
            new = forwards.rebuild(helper, {**_direct(helper), **fresh}, spaces)
            fresh[helper_name] = new
            for space in spaces.values():
                space.update({helper_name: new} if helper_name in space else {})
        made[name] = forwards.rebuild(method, {**direct, **fresh}, spaces)
        for space in spaces.values():
            space.update({n: v for n, v in {**direct, **fresh}.items() if n in space})
    return {**made, "__jumar_attention_globals__": forwards.Keeper(spaces)}
