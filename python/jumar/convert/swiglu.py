"""``npu_swiglu``: the product silu(gate) * up of a gated MLP in one pass over both."""

from __future__ import annotations

from jumar import ops
from jumar.convert.registry import ModuleConverter, register
from jumar.hf import mlp, probe


# The projections stay modules and are called: adapters, hooks and converters on them keep working.
def _make_forward(gate: str, up: str, down: str):
    def forward(self, hidden_states):
        gated, linear = getattr(self, gate)(hidden_states), getattr(self, up)(hidden_states)
        return getattr(self, down)(ops.swiglu_gate_up(gated, linear))

    return forward


def _make_packed_forward(gate_up: str, down: str):
    def forward(self, hidden_states):
        return getattr(self, down)(ops.npu_swiglu(getattr(self, gate_up)(hidden_states), -1))

    return forward


class SwigluConverter(ModuleConverter):
    name = "npu_swiglu"
    aliases = ("swiglu",)
    operators = ("swiglu_gate_up", "npu_swiglu")
    summary = "gated MLPs: down(silu(gate(x)) * up(x))"

    def recognise(self, module):
        return mlp.recognise(module)

    def trial_parts(self, module, key):
        children, x = mlp.stand_ins(module, key)
        return {"children": children}, (x,)

    def namespace(self, key, base):
        make = _make_forward if len(key) == 3 else _make_packed_forward
        return {"forward": probe.adopt_signature(make(*key), base)}


register(SwigluConverter())
