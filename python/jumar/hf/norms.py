"""Recognise RMS norms: plain (w), zero-centred (1 + w) and gated, with their epsilon and their output dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from jumar.convert.verdict import Match, Miss, Verdict
from jumar.hf import probe

OPERATORS = {"plain": "npu_rms_norm", "one_plus": "npu_gemma_rms_norm", "gated": "rms_norm_gated"}


def looks_like_norm(module: nn.Module) -> bool:
    """A leaf that has an epsilon or is called a norm; only used to decide what is worth a line in the report."""
    if module._modules or isinstance(module, nn.Embedding):
        return False
    return bool(_epsilons(module)) or "norm" in type(module).__name__.lower()


def _epsilons(module: nn.Module) -> list[str]:
    def small(value) -> bool:
        return value is None or (isinstance(value, float) and 0 <= value < 0.1)

    return [name for name, value in vars(module).items() if "eps" in name.lower() and small(value)]


def recognise(module: nn.Module) -> Verdict:
    """Match with key (kind, epsilon's attribute, what None means there, dtype rule); Miss for other norms."""
    if not looks_like_norm(module):
        return None
    weight = module._parameters.get("weight")
    others = [name for name, p in module._parameters.items() if p is not None and name != "weight"]
    if weight is None:
        return Miss("has no weight: the operator needs a gamma")
    if others:
        return Miss(f"has a {others[0]}, which an RMS norm has not")
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return Miss("its weight is not initialised yet")
    if weight.ndim != 1 or weight.numel() == 0:
        return Miss(
            f"its weight has the shape {tuple(weight.shape)}: the operator normalises the last dimension"
        )
    epsilons = _epsilons(module)
    if not epsilons:
        return Miss("no attribute holds its epsilon")
    arguments = probe.tensor_arguments(type(module))
    if arguments is None or not 1 <= len(arguments[0]) + len(arguments[1]) <= 2 or not arguments[0]:
        return Miss("its forward takes other arguments than (x) or (x, gate)")
    gated = len(arguments[0]) + len(arguments[1]) == 2
    try:
        kind, epsilon = _kind(module, weight.numel(), epsilons, gated)
        if kind not in OPERATORS:
            return Miss(kind)
        width = weight.numel()
        default = (
            "none" if getattr(module, epsilon) is not None else _default_epsilon(module, width)
        )
        return Match(OPERATORS[kind], (kind, epsilon, default, _dtype_rule(module, width, gated)))
    except probe.ProbeFailed as error:
        return Miss(str(error))


def _inputs(width: int, eps: float) -> list[torch.Tensor]:
    """Signed rows, a constant row, a zero row; rows so small that epsilon decides, and rows that a clamp would cut."""
    x = probe.randn(4, width, seed=1) * 2
    x[1] = 1.75
    scales = [1.0, 40.0, 1e4]
    if eps > 0:
        x[2] = 0
        scales.append(eps**0.5)
    return [x * scale for scale in scales]


def _kind(module: nn.Module, width: int, epsilons: list[str], gated: bool) -> tuple[str, str]:
    """(kind, epsilon's attribute), or (why not, "")."""
    weight = probe.randn(width, seed=2)
    gate = probe.randn(4, width, seed=3)
    copies = [probe.stand_in(module, {"weight": weight}, training=t) for t in (False, True)]
    reasons = ["does not compute x / sqrt(mean(x^2) + eps) * weight"]
    for name in epsilons:
        value = getattr(module, name)
        eps = torch.finfo(torch.float32).eps if value is None else value
        cases = []
        for x in _inputs(width, eps):
            inputs = (x, gate) if gated else (x,)
            cases.append((inputs, [probe.run(copy, *inputs) for copy in copies]))
        for kind, formula in _FORMULAS.items():
            fits = [
                [
                    probe.same(out, formula(eps, weight.double(), *(t.double() for t in inputs)))
                    for out in outs
                ]
                for inputs, outs in cases
                if _takes(formula) == 2 + len(inputs)
            ]
            if fits and all(fit[0] for fit in fits):
                if kind not in OPERATORS:
                    reasons.insert(0, kind)
                elif not all(fit[1] for fit in fits):
                    reasons.insert(0, "computes something else in training mode")
                else:
                    return kind, name
    return reasons[0], ""


def _default_epsilon(module: nn.Module, width: int) -> str:
    """Whose machine epsilon an epsilon of None means for 16-bit input: the ``"input"``'s or fp32's, ``"compute"``.

    PyTorch documents the former and its CPU kernels do the latter, so it is measured.
    """
    weight = torch.ones(width, device="cpu", dtype=torch.bfloat16)
    x = (probe.randn(2, width, seed=1) * 1e-3).bfloat16()
    out = probe.run(probe.stand_in(module, {"weight": weight}), x)
    fits = probe.same(out, _rms(x.double(), torch.finfo(torch.float32).eps), 1e-2)
    return "compute" if fits else "input"


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


# Kinds that have an operator, then lookalikes, whose key is the reason that the report gives.
_FORMULAS = {
    "plain": lambda eps, w, x: _rms(x, eps) * w,
    "one_plus": lambda eps, w, x: _rms(x, eps) * (1 + w),
    "gated": lambda eps, w, x, gate: _rms(x, eps) * w * F.silu(gate),
    "subtracts the mean: a layer norm": lambda eps, w, x: (
        _rms(x - x.mean(-1, keepdim=True), eps) * w
    ),
    "gates before it normalises": lambda eps, w, x, gate: _rms(x * F.silu(gate), eps) * w,
    "gates with a sigmoid, not with SiLU": lambda eps, w, x, gate: (
        _rms(x, eps) * w * torch.sigmoid(gate)
    ),
}


def _takes(function) -> int:
    return function.__code__.co_argcount


def _dtype_rule(module: nn.Module, width: int, gated: bool) -> str:
    """What comes out when input and weight have different types: ``"promote"``, or ``"input"``'s type."""
    weight = probe.randn(width, seed=2)
    x = probe.randn(2, width, seed=1).bfloat16()
    copy = probe.stand_in(module, {"weight": weight})
    try:
        out = probe.run(copy, x, x) if gated else probe.run(copy, x)
    except probe.ProbeFailed:
        return "input"
    return "promote" if out.dtype == torch.float32 else "input"
