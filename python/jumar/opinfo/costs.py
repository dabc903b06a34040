"""What a call of an operator must move and compute, from the shapes and dtypes of its arguments.

The one place for these formulas: ``jumar bench`` counts the calls that it times, ``jumar profile`` the calls of a trace.
``bytes`` is the traffic that cannot be avoided: every argument read once, every result written once. ``flops`` counts the
multiplications and additions of matrix products (a multiply-add is two); what is bound by memory alone has none. A call
that no formula knows, or whose dtype is unknown, has no cost: blank rather than wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jumar.opinfo.attention import ATTENTION_COSTS
from jumar.opinfo.attention_parts import PART_COSTS
from jumar.opinfo.cost_types import Arg, Cost, Formula, recorded, streams
from jumar.opinfo.lightning_indexer import LIGHTNING_INDEXER_COSTS
from jumar.opinfo.moe_costs import MOE_COSTS
from jumar.opinfo.router_costs import ROUTER_COSTS
from jumar.opinfo.sparse_attention import SPARSE_ATTENTION_COSTS

#: Namespaces that hold jumar's operators, under the same names and schemas.
FUSED = ("jumar", "npu")


def _statistic(x: Arg, gamma: Arg) -> float:
    """Bytes of rstd: fp32 (fp64 for fp64), one for each row."""
    rows = x.numel // max(1, gamma.numel)
    return rows * max(4, x.item)


def _weight_gradient(x: Arg, gamma: Arg) -> float:
    return gamma.numel * max(4, x.item)


def _rms_norm(x: Arg, gamma: Arg, *_: Any) -> Cost:
    return Cost(x.bytes + x.dense + gamma.bytes + _statistic(x, gamma))


def _rms_norm_backward(dy: Arg, x: Arg, gamma: Arg, rstd: Arg, *_: Any) -> Cost:
    return Cost(dy.bytes + x.bytes + x.dense + gamma.bytes + rstd.bytes + _weight_gradient(x, gamma))


def _add_rms_norm(x1: Arg, x2: Arg, gamma: Arg, *_: Any) -> Cost:
    return Cost(x1.bytes + x2.bytes + 2 * x1.dense + gamma.bytes + _statistic(x1, gamma))


def _add_rms_norm_backward(dy: Arg, dx: Arg, x: Arg, gamma: Arg, rstd: Arg, *_: Any) -> Cost:
    both = _rms_norm_backward(dy, x, gamma, rstd)
    return Cost(both.bytes + dx.bytes)


def _rms_norm_gated(x: Arg, gate: Arg, gamma: Arg, *_: Any) -> Cost:
    return Cost(x.bytes + gate.bytes + x.dense + gamma.bytes + _statistic(x, gamma))


def _rms_norm_gated_backward(dy: Arg, x: Arg, gate: Arg, gamma: Arg, rstd: Arg, *_: Any) -> Cost:
    both = _rms_norm_backward(dy, x, gamma, rstd)
    return Cost(both.bytes + gate.bytes + x.dense)


def _rotary_backward_all(dy: Arg, x: Arg, r1: Arg, r2: Arg, *_: Any) -> Cost:
    return Cost(dy.bytes + x.bytes + x.dense + r1.bytes + r2.bytes + r1.dense + r2.dense)


def _linear(x: Arg, weight: Arg, bias: Arg | None = None, *_: Any) -> Cost:
    outputs, inputs = weight.shape
    rows = x.numel // max(1, inputs)
    moved = x.bytes + weight.bytes + rows * outputs * x.item + (bias.bytes if bias else 0)
    return Cost(moved, 2.0 * rows * inputs * outputs, x.dtype)


def _dgrad(dy: Arg, weight: Arg, *_: Any) -> Cost:
    outputs, inputs = weight.shape
    rows = dy.numel // max(1, outputs)
    return Cost(dy.bytes + weight.bytes + rows * inputs * dy.item, 2.0 * rows * inputs * outputs, dy.dtype)


def _wgrad(dy: Arg, x: Arg, *_: Any) -> Cost:
    outputs, inputs = dy.shape[-1], x.shape[-1]
    rows = dy.numel // max(1, outputs)
    return Cost(dy.bytes + x.bytes + outputs * inputs * x.item, 2.0 * rows * inputs * outputs, dy.dtype)


def _linear_backward(dy: Arg, x: Arg, weight: Arg, *_: Any) -> Cost:
    return _dgrad(dy, weight) + _wgrad(dy, x)


def _bias_grad(dy: Arg, *_: Any) -> Cost:
    return Cost(dy.bytes + dy.shape[-1] * dy.item)


def _head_loss(x: Arg, weight: Arg, target: Arg, bias: Arg | None = None, *_: Any) -> Cost:
    """As if no target were ignored: which ones are is data, which no shape tells. Logits need not move."""
    classes, inputs = weight.shape
    tokens = x.numel // max(1, inputs)
    moved = x.bytes + weight.bytes + target.bytes + tokens * max(4, x.item) + (bias.bytes if bias else 0)
    return Cost(moved, 2.0 * tokens * inputs * classes, x.dtype)


def _head_loss_backward(
    grad: Arg, x: Arg, weight: Arg, target: Arg, bias: Arg | None, lse: Arg, logits: Arg, *options: Any
) -> Cost:
    """The products that are needed for a gradient; computing logits once more is the operator's own choice."""
    forward = _head_loss(x, weight, target, bias)
    need_input, need_weight, need_bias = options[-3:]
    if not all(isinstance(need, bool) for need in (need_input, need_weight, need_bias)):
        raise LookupError("need_input")
    moved = forward.bytes + grad.bytes
    moved += x.dense * need_input + weight.dense * need_weight + (bias.dense if bias and need_bias else 0)
    return Cost(moved, forward.flops * (need_input + need_weight), x.dtype)


def _class_loss(x: Arg, target: Arg, weight: Arg | None = None, *_: Any) -> Cost:
    """The log-probabilities are a result."""
    return Cost(x.bytes + x.dense + target.bytes + (weight.bytes if weight else 0))


def _class_loss_backward(grad: Arg, log_prob: Arg, target: Arg, weight: Arg | None = None, *_: Any) -> Cost:
    return Cost(grad.bytes + log_prob.bytes + target.bytes + log_prob.numel * grad.item + (weight.bytes if weight else 0))


def _adamw(params: list[Arg], grads: list[Arg], first: list[Arg], second: list[Arg], masters: Any = (), *_: Any) -> Cost:
    """Parameters, moments and copies are read and written, gradients read."""
    recorded(params)
    written = [*params, *first, *second, *(masters or ())]
    return Cost(sum(2 * t.dense for t in written) + sum(t.bytes for t in grads))


def _adamw_one(var: Arg, m: Arg, v: Arg, grad: Arg, largest: Arg | None = None, *_: Any) -> Cost:
    moved = _adamw([var], [grad], [m], [v]).bytes
    return Cost(moved + (largest.bytes if largest else 0))


def _power_sums(grads: list[Arg], *_: Any) -> Cost:
    recorded(grads)
    return Cost(sum(t.bytes for t in grads))


def _scale(grads: list[Arg], *_: Any) -> Cost:
    recorded(grads)
    return Cost(sum(2 * t.dense for t in grads))


#: Operator of ``torch.ops.jumar`` -> formula over its arguments in the order of the schema. Tensors are :class:`Arg`,
#: lists of tensors lists of them; what a trace does not record (strings, floats that were left out) is None. Composites in
#: Python have none: the operators that they call do.
FUSED_COSTS: dict[str, Formula] = {
    **ATTENTION_COSTS,
    **PART_COSTS,
    **LIGHTNING_INDEXER_COSTS,
    **MOE_COSTS,
    **ROUTER_COSTS,
    **SPARSE_ATTENTION_COSTS,
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_gemma_rms_norm": _rms_norm,
    "gemma_rms_norm_backward": _rms_norm_backward,
    "npu_add_rms_norm": _add_rms_norm,
    "add_rms_norm_backward": _add_rms_norm_backward,
    "rms_norm_gated": _rms_norm_gated,
    "rms_norm_gated_backward": _rms_norm_gated_backward,
    "npu_swiglu": streams(1, 0.5),
    "npu_swiglu_backward": streams(2, 1, like=1),
    "swiglu_gate_up": streams(2, 1),
    "swiglu_gate_up_backward": streams(3, 2, like=1),
    "npu_rotary_mul": streams(3, 1),
    "npu_rotary_mul_backward": _rotary_backward_all,
    "rotary_mul_backward": streams(3, 1),
    "npu_linear": _linear,
    "linear_dgrad": _dgrad,
    "linear_wgrad": _wgrad,
    "linear_bias_grad": _bias_grad,
    "npu_linear_backward": _linear_backward,
    "linear_cross_entropy": _head_loss,
    "linear_cross_entropy_backward": _head_loss_backward,
    "npu_cross_entropy_loss": _class_loss,
    "npu_cross_entropy_loss_backward": _class_loss_backward,
    "adamw_": _adamw,
    "apply_adam_w_": _adamw_one,
    "grad_power_sums": _power_sums,
    "scale_grads_": _scale,
}


def known(name: str) -> bool:
    """Whether there is a formula for ``namespace::operator``."""
    return _formula(name) is not None


def _formula(name: str) -> Formula | None:
    from jumar.opinfo.aten_costs import ATEN_COSTS

    namespace, _, operator = name.partition("::")
    if namespace in FUSED:
        return FUSED_COSTS.get(operator)
    return ATEN_COSTS.get(operator) if namespace == "aten" else None


def cost(name: str, arguments: list[Any]) -> Cost | None:
    """The cost of one call of ``namespace::operator``.

    Args:
        name: as in a trace: ``jumar::npu_linear``, ``aten::mm``.
        arguments: in the order of the schema: :class:`Arg`, lists of them, numbers, None.

    Returns:
        None where no formula knows the operator, or the arguments are not what it expects.
    """
    formula = _formula(name)
    if formula is None:
        return None
    try:
        return formula(*arguments)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None  # a dtype or an argument that was not recorded


def arguments_of(values: Any) -> list[Any]:
    """Arguments of a call with tensors as :class:`Arg`."""

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Arg(tuple(value.shape), value.dtype, tuple(value.stride()))
        return [one(v) for v in value] if isinstance(value, list | tuple) else value

    return [one(value) for value in values]


class _Counter(TorchDispatchMode):
    """Adds up the cost of fused operators that are called, and of torch's where ``torch_too``."""

    def __init__(self, torch_too: bool):
        super().__init__()
        self.torch_too, self.calls, self.total = torch_too, 0, Cost(0.0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if self.torch_too or name.split("::")[0] in FUSED:
            names = [argument.name for argument in function._schema.arguments]
            values = [*args, *(None for _ in names[len(args) :])]
            for key, value in (kwargs or {}).items():
                values[names.index(key)] = value
            found = cost(name, arguments_of(values))
            if found is not None:
                self.total += found
                self.calls += 1
        return function(*args, **(kwargs or {}))


def count(function: Callable[[], Any], *, torch_too: bool = False) -> Cost:
    """Runs ``function`` and returns the cost of all fused operators in it, backward ones included.

    Args:
        function: what is run; under ``FakeTensorMode`` nothing is computed.
        torch_too: also count torch's own operators.
    """
    with _Counter(torch_too) as counter:
        function()
    return counter.total


def of_operator(info: Any, tensors: dict[str, Any]) -> tuple[Cost, Cost]:
    """(forward, forward + backward) of an entry of the operator table on tensors that ``jumar bench`` would time.

    The operator and its backward run on fake tensors: nothing is computed, and the operators that its autograd formula
    calls are those that are counted.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():

        def fake(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
            leaf = mode.from_tensor(tensor.detach())
            return leaf.requires_grad_(wanted and leaf.is_floating_point())

        leaves = []
        for name, value in tensors.items():
            wanted = bool(info.differentiable) and name not in info.constants
            many = isinstance(value, list | tuple)
            leaves.append([fake(t, wanted) for t in value] if many else fake(value, wanted))
        with torch.no_grad():
            forward = count(lambda: info.fused(*leaves))

        def both() -> None:
            roots = info.carrying(info.fused(*leaves))
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

        return forward, count(both) if info.differentiable else forward
