"""``npu_swiglu``: the product silu(gate) * up of a gated MLP in one pass over both."""

from __future__ import annotations

from jumar import ops
from jumar.convert.registry import ModuleConverter, register
from jumar.hf import mlp, probe


def _make_forward(gate: str, up: str, down: str):
    # The projections stay modules and are called: adapters, hooks and converters on them keep working.
    def forward(self, hidden_states):
        product = ops.swiglu_gate_up(
            getattr(self, gate)(hidden_states), getattr(self, up)(hidden_states)
        )
        return getattr(self, down)(product)

    return forward


class SwigluConverter(ModuleConverter):
    name = "npu_swiglu"
    aliases = ("swiglu",)
    operators = ("swiglu_gate_up",)
    summary = "gated MLPs: down(silu(gate(x)) * up(x))"

    def recognise(self, module):
        return mlp.recognise(module)

    def trial_parts(self, module, key):
        children, x = mlp.stand_ins(module, key)
        return {"children": children}, (x,)

    def namespace(self, key, base):
        return {"forward": probe.adopt_signature(_make_forward(*key), base)}


register(SwigluConverter())
