"""What keeps experts evenly used: ``load_balance_loss``, ``router_z_loss``, ``expert_bias_update``. See docs/ops/balance.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    compute_dtype,
    forbid_autograd,
    gradient,
    register_autograd,
    register_fake,
)


def load_balance_loss(
    gate_logits: Tensor | Sequence[Tensor],
    num_experts: int,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """The auxiliary loss of transformers' MoE models: E * sum over experts of (share of tokens * mean probability).

    Args:
        gate_logits: router logits [rows, E] of one layer or of several, one dtype.
        num_experts: E.
        top_k: experts per token, 1 to E.
        attention_mask: a number per row, the same for every layer; bool, int32, int64 or floating, any shape. Rows of 0 take no part.

    Returns:
        A scalar in fp32 (fp64 for fp64), differentiable in gate_logits. Shares and means are over all layers together.
    """
    layers = [gate_logits] if isinstance(gate_logits, Tensor) else list(gate_logits)
    if not layers:  # no tensor, no kernel that could say so
        raise RuntimeError(
            "load_balance_loss: gate_logits must hold the logits of at least one layer"
        )
    return torch.ops.jumar.load_balance_loss(layers, num_experts, top_k, attention_mask)[0]


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean over rows of logsumexp(logits)**2.

    Args:
        logits: [.., E], fp32, bf16, fp16 or fp64, any strides.

    Returns:
        A scalar in fp32 (fp64 for fp64), differentiable.
    """
    return torch.ops.jumar.router_z_loss(logits)


def expert_bias_update(
    bias: Tensor, tokens_per_expert: Tensor, rate: float, center: bool = True
) -> Tensor:
    """The next bias of balancing without an auxiliary loss: up by ``rate`` for experts below the mean load, down above it.

    Args:
        bias: [.., E]; every row is a layer of its own.
        tokens_per_expert: numbers of bias's shape, int32, int64 or floating.
        rate: the step.
        center: subtract the mean of the steps (torchtitan); without it, DeepSeek-V3's rule.

    Returns:
        The new bias; ``bias`` is not written.
    """
    return torch.ops.jumar.expert_bias_update(bias, tokens_per_expert, rate, center)


def _loss_fake(
    gate_logits: list[Tensor], num_experts: int, *_: Any
) -> tuple[Tensor, Tensor]:
    first, dtype = gate_logits[0], compute_dtype(gate_logits[0].dtype)
    return first.new_empty((), dtype=dtype), first.new_empty((num_experts,), dtype=dtype)


def _loss_backward_fake(grad: Tensor, gate_logits: list[Tensor], *_: Any) -> list[Tensor]:
    return [layer.new_empty(layer.shape) for layer in gate_logits]


def _loss_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    layers, _, _, mask = inputs
    tokens = output[1]
    ctx.save_for_backward(mask, tokens, *layers)
    ctx.mark_non_differentiable(tokens)
    ctx.set_materialize_grads(False)


def _loss_backward(ctx: Any, grad: Tensor, _: None) -> list[Tensor]:
    mask, tokens, *layers = ctx.saved_tensors
    return torch.ops.jumar.load_balance_loss_backward(grad, layers, mask, tokens)


def _z_setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _z_backward(ctx: Any, grad: Tensor) -> Tensor:
    return torch.ops.jumar.router_z_loss_backward(grad, ctx.saved_tensors[0])


register_fake("load_balance_loss", _loss_fake)
gradient("load_balance_loss_backward", _loss_backward_fake)
register_autograd("load_balance_loss", _loss_backward, _loss_setup)
register_fake(
    "router_z_loss", lambda logits: logits.new_empty((), dtype=compute_dtype(logits.dtype))
)
gradient("router_z_loss_backward", lambda grad, logits: logits.new_empty(logits.shape))
register_autograd("router_z_loss", _z_backward, _z_setup)
register_fake("expert_bias_update", lambda bias, *_: bias.new_empty(bias.shape))
forbid_autograd("expert_bias_update")
