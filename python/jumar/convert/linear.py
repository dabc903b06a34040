"""``npu_linear``: plain ``torch.nn.Linear`` layers on the packed GEMM."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from jumar import ops
from jumar.convert import swap
from jumar.convert.registry import ModuleConverter, register
from jumar.convert.verdict import Match, Miss
from jumar.hf import probe


class LinearConverter(ModuleConverter):
    name = "npu_linear"
    aliases = ("linear",)
    operators = ("npu_linear",)
    summary = "torch.nn.Linear itself, never a subclass of it"

    def recognise(self, module):
        if not isinstance(module, nn.Linear):
            return None
        # A subclass exists because it does something else (quantised, lazy, parametrised, read by its owner).
        if swap.original_class(module) is not nn.Linear:
            return Miss("is a subclass of torch.nn.Linear, which may compute something else")
        weight = module.weight
        if type(weight) not in (nn.Parameter, torch.Tensor, DTensor):
            return Miss(f"its weight is a {type(weight).__name__}")
        if not weight.is_floating_point():
            return Miss(f"its weight has the type {weight.dtype}")
        return Match("npu_linear", ())

    def trial_parts(self, module, key):
        bias = None if module.bias is None else probe.randn(5, seed=26)
        return {"parameters": {"weight": probe.randn(5, 7, seed=25), "bias": bias}}, (
            probe.randn(2, 3, 7, seed=27),
        )

    def namespace(self, key, base):
        def forward(self, input):
            return ops.npu_linear(input, self.weight, self.bias)

        forward.__qualname__ = "Linear.forward"
        return {"forward": forward}


register(LinearConverter())
