"""Recognise gated MLPs: down(silu(gate(x)) * up(x)), under the names that model libraries give the three."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from jumar.convert.verdict import Match, Miss, Verdict
from jumar.hf import probe

#: (gate, up, down) attribute names: Hugging Face's, and the w1/w3/w2 of Llama's own code and torchtitan.
NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))

_ACTIVATIONS = {
    "SiLU": F.silu,
    "GELU": F.gelu,
    "tanh GELU": lambda x: F.gelu(x, approximate="tanh"),
    "ReLU": F.relu,
    "squared ReLU": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


class _Gather(nn.Module):
    """A linear map that costs nothing at any width: every output is one input, scaled."""

    def __init__(self, inputs: int, outputs: int, seed: int):
        super().__init__()
        self.index = torch.randint(
            inputs, (outputs,), generator=probe.generator(seed), device="cpu"
        )
        self.scale = probe.randn(outputs, seed=seed)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x[..., self.index] * self.scale.to(x.dtype)


def _width(projection: nn.Module, names: tuple[str, ...], default: int) -> int:
    sizes = [getattr(projection, name, None) for name in names]
    return next((size for size in sizes if isinstance(size, int) and size > 0), default)


def stand_ins(
    module: nn.Module, names: tuple[str, ...]
) -> tuple[dict[str, nn.Module], torch.Tensor]:
    """Children of the module's own widths for the three projections, and an input for them."""
    gate, down = module._modules[names[0]], module._modules[names[2]]
    hidden = _width(gate, ("in_features",), 6)
    inner = _width(gate, ("out_features",), 10)
    outer = _width(down, ("out_features",), hidden)
    layers = _Gather(hidden, inner, 5), _Gather(hidden, inner, 6), _Gather(inner, outer, 7)
    return dict(zip(names, layers, strict=True)), probe.randn(2, 3, hidden, seed=4)


def recognise(module: nn.Module) -> Verdict:
    """Match with key = the three attribute names, a Miss for a gated MLP of another kind, None for anything else."""
    names = next(
        (n for n in NAMES if all(isinstance(module._modules.get(a), nn.Module) for a in n)), None
    )
    if names is None:
        return None
    arguments = probe.tensor_arguments(type(module))
    if arguments is None or len(arguments[0]) != 1 or arguments[1]:
        return Miss("its forward takes other arguments than (x)")
    hooked = [
        n
        for n, child in module._modules.items()
        if n not in names and child is not None and _has_hooks(child)
    ]
    if hooked:
        return Miss(f"{hooked[0]} has hooks, which the operator would not run")
    for training in (False, True):
        children, x = stand_ins(module, names)
        copy = probe.stand_in(module, children=children, training=training)
        try:
            out = probe.run(copy, x)
        except probe.ProbeFailed as error:
            return Miss(str(error))
        layers = list(children.values())
        calls = [layer.calls for layer in layers]
        if calls != [1, 1, 1]:
            return Miss(f"its forward calls {', '.join(names)} {calls} times, not once each")
        found = _activation(out, x.double(), *layers)
        if found != "SiLU":
            return Miss(
                found if found.startswith("does not") else f"its activation is {found}, not SiLU"
            )
    return Match("swiglu_gate_up", names)


def _has_hooks(module: nn.Module) -> bool:
    return any(
        vars(m).get(h)
        for m in module.modules()
        for h in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    )


def _activation(out, x: torch.Tensor, gate: _Gather, up: _Gather, down: _Gather) -> str:
    g, u = gate(x), up(x)
    for name, function in _ACTIVATIONS.items():
        if probe.same(out, down(function(g) * u)):
            return name
        if probe.same(out, down(g * function(u))):
            return f"does not compute act(gate) * up: {name} is on up"
    return "does not compute down(act(gate(x)) * up(x))"
