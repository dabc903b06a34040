"""The converters as torchtitan 0.2.x takes them: a class with ``convert`` and ``post_optimizer_hook``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger

import jumar
from jumar import dtensor
from jumar.convert.errors import ConverterError
from jumar.convert.report import Report, Site
from jumar.titan02 import moe, rope

CONVERTERS = ("npu_rms_norm", "npu_rope", "npu_sdpa", "npu_swiglu", "npu_linear", "npu_gmm", "npu_permute", "npu_router")


def _report(model: nn.Module, name: str, parallel_dims: Any) -> Report:
    operator = "npu_rotary_mul" if name == "npu_rope" else moe.operator(name)
    if operator is None:
        return jumar.convert(model, [name])
    sites = []
    for path, module in model.named_modules():
        if name == "npu_rope":
            replacement = rope.fused_class(type(module))
        else:
            replacement = moe.fused_class(name, module, parallel_dims)
        if replacement is None:
            continue
        status, reason = "replaced", ""
        if isinstance(replacement, str):
            status, reason = "skipped", replacement
        else:
            module.__class__ = replacement
        sites.append(Site(path, name, operator, status, reason, type(module).__qualname__))
    return Report(sites, [name])


def _class(name: str, optional: bool) -> type:
    class FusedConverter:
        """Replaces modules of the built model by fused ones, before it is parallelised.

        Raises ConverterError when nothing matches, unless the converter is listed as ``name?``.
        """

        def __init__(self, job_config: Any, parallel_dims: Any):
            dtensor.register()
            self.parallel_dims = parallel_dims

        def convert(self, model: nn.Module) -> None:
            """In place; logs how many modules were replaced and why others were not."""
            report = _report(model, name, self.parallel_dims)
            reasons = sorted({f"{site.module_class}: {site.reason}" for site in report.skipped})
            skipped = f"; skipped {'; '.join(reasons)}" if reasons else ""
            if not report.replaced and not optional:
                raise ConverterError(f"{name} matched nothing in this model{skipped} (write {name}? if that is expected)")
            logger.info(f"{name}: {len(report.replaced)} modules replaced{skipped}")

        def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
            """Nothing to do after a step."""

    return FusedConverter


def register() -> None:
    """Registers every converter with torchtitan, also under ``name?``; again is harmless."""
    from torchtitan.protocols import model_converter

    for name in CONVERTERS:
        for spelled, optional in ((name, False), (f"{name}?", True)):
            if spelled not in model_converter._registry_model_converter_cls:
                register_model_converter(_class(name, optional), spelled)
