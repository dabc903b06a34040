"""Converters: switch a model to fused operators by name, with a report and a way back.

``jumar.convert`` is this package and also the function: ``jumar.convert(model, ["npu_rms_norm"])``.
"""

from __future__ import annotations

import sys
import types

from jumar.convert.errors import ConverterError
from jumar.convert.planner import Plan, convert, kernelize, plan
from jumar.convert.registry import Converter, ModuleConverter, known_converters, register, resolve
from jumar.convert.report import Report, Site
from jumar.convert.swap import revert
from jumar.convert.verdict import Match, Miss

__all__ = [
    "Converter",
    "ConverterError",
    "Match",
    "Miss",
    "ModuleConverter",
    "Plan",
    "Report",
    "Site",
    "convert",
    "kernelize",
    "known_converters",
    "plan",
    "register",
    "resolve",
    "revert",
]


class _CallablePackage(types.ModuleType):
    """Importing ``jumar.convert`` binds that name in ``jumar`` to this module: let it be called as well."""

    __call__ = staticmethod(convert)


sys.modules[__name__].__class__ = _CallablePackage
