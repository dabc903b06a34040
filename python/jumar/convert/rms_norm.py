"""``npu_rms_norm``: RMS norms of every kind that an operator exists for."""

from __future__ import annotations

import torch

from jumar import ops
from jumar.convert.registry import ModuleConverter, register
from jumar.hf import norms, probe


def _epsilon(module: torch.nn.Module, name: str, default: str, dtype: torch.dtype) -> float:
    """The module's epsilon; None stands for the machine epsilon of the input or of the type computed in."""
    value = getattr(module, name)
    if value is not None:
        return value
    if default != "input" and dtype != torch.float64:
        dtype = torch.float32
    return torch.finfo(dtype).eps


def _input(x: torch.Tensor, weight: torch.Tensor, keeps_input_dtype: bool) -> torch.Tensor:
    """The input in the type that the result is to have; the operator takes a weight of another width as it is."""
    if keeps_input_dtype and weight.dtype != torch.float64:
        return x
    return x.to(torch.promote_types(x.dtype, weight.dtype))


def _weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.to(x.dtype) if x.dtype == torch.float64 else weight


def _make_forward(operator, epsilon: str, default: str, keeps_input_dtype: bool):
    def forward(self, hidden_states):
        x = _input(hidden_states, self.weight, keeps_input_dtype)
        y = operator(x, _weight(x, self.weight), _epsilon(self, epsilon, default, x.dtype))[0]
        return y.to(hidden_states.dtype) if keeps_input_dtype else y

    return forward


def _make_gated_forward(epsilon: str, default: str, keeps_input_dtype: bool):
    def forward(self, hidden_states, gate):
        x = _input(hidden_states, self.weight, keeps_input_dtype)
        eps = _epsilon(self, epsilon, default, x.dtype)
        y = ops.rms_norm_gated(x, gate.to(x.dtype), _weight(x, self.weight), eps)[0]
        return y.to(hidden_states.dtype) if keeps_input_dtype else y

    return forward


class RmsNormConverter(ModuleConverter):
    name = "npu_rms_norm"
    aliases = ("rms_norm",)
    operators = ("npu_rms_norm", "npu_gemma_rms_norm", "rms_norm_gated")
    summary = "RMS norms: weight, 1 + weight (zero-centred), and norm-then-gate"

    def recognise(self, module):
        return norms.recognise(module)

    def trial_parts(self, module, key):
        width = module.weight.numel()
        inputs = [
            probe.randn(3, width, seed=seed) for seed in ((21, 22) if key[0] == "gated" else (21,))
        ]
        return {"parameters": {"weight": probe.randn(width, seed=23)}}, tuple(inputs)

    def namespace(self, key, base):
        kind, epsilon, default, rule = key
        if kind == "gated":
            forward = _make_gated_forward(epsilon, default, rule == "input")
        else:
            operator = ops.npu_rms_norm if kind == "plain" else ops.npu_gemma_rms_norm
            forward = _make_forward(operator, epsilon, default, rule == "input")
        return {"forward": probe.adopt_signature(forward, base)}


register(RmsNormConverter())
