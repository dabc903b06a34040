"""What calls of routers and of their losses must move; part of :data:`jumar.opinfo.costs.FUSED_COSTS`.

Numbers of experts are left out, as small vectors are; scores of all experts count with the dtype of the logits.
"""

from __future__ import annotations

from typing import Any

from jumar.opinfo.cost_types import Arg, Cost, Formula, recorded


def _forward(x: Arg, k: int, *_: Any) -> Cost:
    rows = x.numel // max(1, x.shape[-1])
    return Cost(x.bytes + rows * k * x.item)


def _backward(grad: Arg | None, grad_scores: Arg | None, x: Arg, *_: Any) -> Cost:
    arrives = sum(g.bytes for g in (grad, grad_scores) if g)
    return Cost(arrives + x.bytes + x.dense)


def _balance(layers: list[Arg], *_: Any) -> Cost:
    recorded(layers)
    return Cost(sum(t.bytes for t in layers))


def _balance_backward(grad: Arg, layers: list[Arg], *_: Any) -> Cost:
    return Cost(_balance(layers).bytes + sum(t.dense for t in layers))


ROUTER_COSTS: dict[str, Formula] = {
    "router_top_k": _forward,
    "router_top_k_backward": _backward,
    "npu_moe_gating_top_k_softmax": lambda x, finished, k: _forward(x, 1 if k is None else k),
    "npu_moe_gating_top_k_softmax_backward": lambda grad, x, *_: _backward(grad, None, x),
    "moe_gating_top_k_softmax_v2": _forward,
    "npu_moe_gating_top_k_softmax_v2_backward": _backward,
    "moe_gating_top_k": _forward,
    "npu_moe_gating_top_k_backward": lambda x, grad, *_: Cost(grad.bytes + 2 * x.numel * grad.item),
    "load_balance_loss": _balance,
    "load_balance_loss_backward": _balance_backward,
    "router_z_loss": lambda x: Cost(x.bytes),
    "router_z_loss_backward": lambda grad, x: Cost(x.bytes + x.dense),
    "expert_bias_update": lambda bias, tokens, *_: Cost(bias.bytes + bias.dense + tokens.bytes),
}
