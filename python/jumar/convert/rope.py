"""``npu_rope``: the rotary embedding that a model calls as a function of its module."""

from __future__ import annotations

import torch
from torch import nn

from jumar import ops
from jumar.convert.errors import ConverterError
from jumar.convert.registry import ModuleConverter, register
from jumar.convert.verdict import Match, Miss, Verdict
from jumar.hf import forwards, probe, rotary


def _make_apply(mode: str, keeps_input_dtype: bool):
    def apply(x, cos, sin):
        dtype = torch.promote_types(x.dtype, cos.dtype)
        # Kept input type: the operator's own contract, 16-bit input, wider tables, one rounding at the end.
        x = x if keeps_input_dtype else x.to(dtype)
        return ops.npu_rotary_mul(*rotary.as_half(x, cos.to(dtype), sin.to(dtype), mode))

    return apply


def _at_least_fp32(table: torch.Tensor) -> torch.dtype:
    return torch.promote_types(table.dtype, torch.float32)


def _make_function(found: rotary.Rotary):
    """A function with the signature of the recognised one.  The tables come from the model, as ever."""
    apply = _make_apply(found.mode, found.dtype_rule == "input")
    axis = found.axis

    if found.form == "vision":

        def function(q, k, cos, sin):
            cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
            cos, sin = cos.to(_at_least_fp32(cos)), sin.to(_at_least_fp32(sin))
            return apply(q, cos, sin), apply(k, cos, sin)

    elif found.form == "plain":

        def function(q, k, cos, sin, unsqueeze_dim):
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            return apply(q, cos, sin), apply(k, cos, sin)

    elif found.form == "positions":

        def function(q, k, cos, sin, position_ids, unsqueeze_dim):
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            return apply(q, cos, sin), apply(k, cos, sin)

    else:

        def function(q, k, cos, sin, mrope_section, unsqueeze_dim):
            cos = rotary.select_sections(cos, mrope_section).unsqueeze(unsqueeze_dim)
            sin = rotary.select_sections(sin, mrope_section).unsqueeze(unsqueeze_dim)
            return apply(q, cos, sin), apply(k, cos, sin)

    function = probe.rename_arguments(function, list(found.names))
    function.__defaults__ = found.defaults or None
    return function


class RopeConverter(ModuleConverter):
    name = "npu_rope"
    aliases = ("rope", "rotary")
    operators = ("npu_rotary_mul",)
    summary = "rotary functions (text, multimodal sections, vision) that attention modules call as a global"

    def __init__(self):
        self._classes: dict[type, Verdict] = {}
        self._functions: dict[int, tuple] = {}

    def plan(self, model):
        self._classes, self._functions = {}, {}
        yield from super().plan(model)
        self._classes, self._functions = {}, {}

    def recognise(self, module):
        cls = type(module)
        if cls not in self._classes:
            self._classes[cls] = self._recognise_class(cls)
        return self._classes[cls]

    def _recognise_function(self, value):
        if id(value) not in self._functions:
            self._functions[id(value)] = (value, rotary.recognise(value))
        return self._functions[id(value)][1]

    def _recognise_class(self, cls: type) -> Verdict:
        candidates: dict[str, object] = {}
        methods = []
        for _, method in forwards.methods(cls, nn.Module):
            for name, value in forwards.globals_used(method).items():
                if rotary.looks_rotary(name, value):
                    if candidates.setdefault(name, value) is not value:
                        return Miss(f"its methods mean two functions by {name}")
                    methods.append(method)
        verdicts = {name: self._recognise_function(value) for name, value in candidates.items()}
        good = {name: found for name, found in verdicts.items() if isinstance(found, rotary.Rotary)}
        if not good:
            return (
                Miss("; ".join(f"{n}: {why}" for n, why in verdicts.items())) if verdicts else None
            )
        try:
            for method in methods:
                forwards.check(method, good)
        except forwards.CannotRebuild as error:
            return Miss(str(error))
        return Match("npu_rotary_mul", tuple(sorted(good.items())))

    def trials(self, site):
        used: dict[str, object] = {}
        for _, method in forwards.methods(type(site.action.module), nn.Module):
            used = {**forwards.globals_used(method), **used}
        for name, found in site.action.patch.key:
            yield rotary.trial(found, used[name], _make_function(found))

    def namespace(self, key, base):
        functions = {name: _make_function(found) for name, found in key}
        spaces: dict[int, dict] = {}
        namespace = {}
        for name, method in forwards.methods(base, nn.Module):
            if any(n in functions for n in forwards.globals_used(method)):
                namespace[name] = forwards.rebuild(method, functions, spaces)
        if not namespace:
            raise ConverterError(
                f"npu_rope: no method of {base.__qualname__} refers to {', '.join(functions)} "
                "in this version of its library"
            )
        namespace["__jumar_globals__"] = forwards.Keeper(spaces)
        return namespace


register(RopeConverter())
