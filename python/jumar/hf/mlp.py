"""Recognise gated MLPs: down(silu(gate(x)) * up(x)), under the names that model libraries give the projections."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from jumar.convert.verdict import Match, Miss, Verdict
from jumar.hf import probe

#: (gate, up, down) attribute names: Hugging Face's, and the w1/w3/w2 of Llama's own code and torchtitan;
#: or (gate and up in one, down).
NAMES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate_up_proj", "down_proj"),
)

ACTIVATIONS = {
    "SiLU": F.silu,
    "GELU": F.gelu,
    "tanh GELU": lambda x: F.gelu(x, approximate="tanh"),
    "ReLU": F.relu,
    "squared ReLU": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


# Of the probe's inputs: the larger ones reach what a clamp would cut.
SCALES = (1.0, 40.0, 1e4)


class _Gather(nn.Module):
    """A linear map that costs nothing at any width: every output is one input, scaled."""

    def __init__(self, inputs: int, outputs: int, seed: int):
        super().__init__()
        generator = probe.generator(seed)
        self.index = torch.randint(inputs, (outputs,), generator=generator, device="cpu")
        self.scale = probe.randn(outputs, seed=seed)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x[..., self.index] * self.scale.to(x.dtype)


def _width(projection: nn.Module, name: str, default: int) -> int:
    size = getattr(projection, name, None)
    return size if isinstance(size, int) and size > 0 else default


def stand_ins(
    module: nn.Module, names: tuple[str, ...]
) -> tuple[dict[str, nn.Module], torch.Tensor]:
    """Children of the module's own widths for the projections, and an input for them."""
    first, down = module._modules[names[0]], module._modules[names[-1]]
    hidden = _width(first, "in_features", 6)
    inner = _width(down, "in_features", 10)
    outer = _width(down, "out_features", hidden)
    into = [inner, inner] if len(names) == 3 else [2 * inner]
    layers = [_Gather(hidden, width, 5 + i) for i, width in enumerate(into)]
    layers.append(_Gather(inner, outer, 7))
    return dict(zip(names, layers, strict=True)), probe.randn(2, 3, hidden, seed=4)


def recognise(module: nn.Module) -> Verdict:
    """Match with key = the attribute names, a Miss for a gated MLP of another kind, None for anything else."""
    names = next((n for n in NAMES if all(module._modules.get(a) is not None for a in n)), None)
    if names is None:
        return None
    arguments = probe.tensor_arguments(type(module))
    if arguments is None or len(arguments[0]) != 1 or arguments[1]:
        return Miss("its forward takes other arguments than (x)")
    others = {
        n: child for n, child in module._modules.items() if n not in names and child is not None
    }
    hooked = [name for name, child in others.items() if has_hooks(child)]
    if hooked:
        return Miss(f"{hooked[0]} has hooks, which the operator would not run")
    for training, scale in itertools.product((False, True), SCALES):
        children, x = stand_ins(module, names)
        x = x * scale
        copy = probe.stand_in(module, children=children, training=training)
        try:
            out = probe.run(copy, x)
        except probe.ProbeFailed as error:
            return Miss(str(error))
        layers = list(children.values())
        calls = [layer.calls for layer in layers]
        if set(calls) != {1}:
            return Miss(f"its forward calls {', '.join(names)} {calls} times, not once each")
        reason = _difference(out, x.double(), layers)
        if reason and training:
            return Miss("computes something else in training mode")
        if reason:
            return Miss(reason if scale == 1 else "computes something else for large values")
    return Match("swiglu_gate_up" if len(names) == 3 else "npu_swiglu", names)


def has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(vars(m).get(kind) for m in module.modules() for kind in kinds)


def _difference(out, x: torch.Tensor, layers: list[_Gather]) -> str | None:
    """What the module computes instead of down(silu(gate) * up), or None."""
    *into, down = layers
    g, u = (layer(x) for layer in into) if len(into) == 2 else into[0](x).chunk(2, -1)
    for name, function in ACTIVATIONS.items():
        if probe.same(out, down(function(g) * u)):
            return None if name == "SiLU" else f"its activation is {name}, not SiLU"
        if probe.same(out, down(g * function(u))):
            return f"does not compute act(gate) * up: {name} is on up"
    return "does not compute down(act(gate(x)) * up(x))"
