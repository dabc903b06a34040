"""What a call of an operator must move and compute, from the shapes and dtypes of its arguments.

The one place for these formulas: ``jumar bench`` counts the calls that it times, ``jumar profile`` the calls of a trace.
``bytes`` is the traffic that cannot be avoided: every argument read once, every result written once. ``flops`` counts the
multiplications and additions of matrix products (a multiply-add is two); what is bound by memory alone has none. A call
that no formula knows, or whose dtype is unknown, has no cost: blank rather than wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Namespaces that hold jumar's operators, under the same names and schemas.
FUSED = ("jumar", "npu")


@dataclass(frozen=True)
class Arg:
    """A tensor as an argument: shape, dtype (None when unknown) and, where known, strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def item(self) -> int:
        """Bytes an element. Unknown: LookupError, which leaves the call without a cost."""
        if self.dtype is None:
            raise LookupError("dtype")
        return self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the elements that differ in memory: what is expanded (stride 0) is there once."""
        shape = self.shape
        if self.strides is not None and len(self.strides) == len(shape):
            shape = tuple(n for n, stride in zip(shape, self.strides, strict=True) if stride or n == 0)
        return math.prod(shape) * self.item

    @property
    def dense(self) -> int:
        """Bytes of a contiguous tensor of this shape and dtype."""
        return self.numel * self.item


@dataclass(frozen=True)
class Cost:
    """``flops`` None: bound by memory. ``dtype``: that of the arithmetic, whose peak is the limit."""

    bytes: float | None
    flops: float | None = None
    dtype: torch.dtype | None = None

    def __add__(self, other: Cost) -> Cost:
        """Both calls. A part that one of them does not know is unknown; flops count where there are any."""
        moved = None if self.bytes is None or other.bytes is None else self.bytes + other.bytes
        flops = None if self.flops is None and other.flops is None else (self.flops or 0.0) + (other.flops or 0.0)
        return Cost(moved, flops, self.dtype or other.dtype)

    def seconds(self, copy_gbs: float, gflops: float) -> tuple[float, str] | None:
        """(the least time, what sets it: ``bytes`` or ``flops``) on a machine with these limits; None when unknown."""
        times = []
        if self.bytes is not None and copy_gbs > 0:
            times.append((self.bytes / copy_gbs * 1e-9, "bytes"))
        if self.flops is not None:
            if gflops <= 0:
                return None
            times.append((self.flops / gflops * 1e-9, "flops"))
        return max(times, default=None)


Formula = Callable[..., Cost]


def _streams(count: int, results: float, like: int = 0) -> Formula:
    """The first ``count`` arguments are read, ``results`` tensors of the size of argument ``like`` are written."""

    def formula(*arguments: Any) -> Cost:
        if len(arguments) < count:
            raise LookupError("arguments")
        return Cost(sum(t.bytes for t in arguments[:count]) + results * arguments[like].dense)

    return formula


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


def _grouped(x: Arg, weight: Arg | list[Arg], groups: Arg, bias: Any = None, *_: Any) -> Cost:
    """As if every row belonged to a group. ``weight``: [E, K, N], or a list of [K, N], as ``bias``."""
    weights = weight if isinstance(weight, list) else [weight]
    biases = bias if isinstance(bias, list) else [bias] if bias else []
    k, n = weights[0].shape[-2:]
    moved = sum(t.bytes for t in (x, groups, *weights, *biases)) + x.shape[0] * n * x.item
    return Cost(moved, 2.0 * x.shape[0] * k * n, x.dtype)


def _grouped_dgrad(dy: Arg, weight: Arg | list[Arg], groups: Arg, *_: Any) -> Cost:
    weights = weight if isinstance(weight, list) else [weight]
    k, n = weights[0].shape[-2:]
    moved = sum(t.bytes for t in (dy, groups, *weights)) + dy.shape[0] * k * dy.item
    return Cost(moved, 2.0 * dy.shape[0] * k * n, dy.dtype)


def _grouped_wgrad(x: Arg, dy: Arg, groups: Arg, *_: Any) -> Cost:
    k, n = x.shape[1], dy.shape[1]
    moved = x.bytes + dy.bytes + groups.bytes + groups.shape[0] * k * n * x.item
    return Cost(moved, 2.0 * x.shape[0] * k * n, x.dtype)


def _grouped_add(sums: Arg, x: Arg, dy: Arg, groups: Arg, *_: Any) -> Cost:
    moved = x.bytes + dy.bytes + groups.bytes + 2 * sums.dense
    return Cost(moved, 2.0 * x.shape[0] * x.shape[1] * dy.shape[1], x.dtype)


def _grouped_bias_grad(dy: Arg, groups: Arg, *_: Any) -> Cost:
    return Cost(dy.bytes + groups.bytes + groups.shape[0] * dy.shape[1] * max(4, dy.item))


def _separate(x: list[Arg], weight: list[Arg], bias: list[Arg], *_: Any) -> Cost:
    _recorded(x)
    moved = sum(t.bytes for t in (*x, *weight, *bias))
    moved += sum(a.shape[0] * w.shape[1] * a.item for a, w in zip(x, weight, strict=True))
    flops = sum(2.0 * a.numel * w.shape[1] for a, w in zip(x, weight, strict=True))
    return Cost(moved, flops, x[0].dtype)


def _experts(x: Arg, ids: Arg, probs: Arg, gate_up: list[Arg], down: list[Arg], up: list[Arg], *_: Any) -> Cost:
    """As if every slot had an expert. ``down``: one [E, I, H], or a list of [I, H]."""
    _recorded(down)
    inner, width = down[0].shape[-2:]
    moved = sum(t.bytes for t in (x, ids, probs, *gate_up, *down, *up)) + x.dense
    return Cost(moved, 6.0 * ids.numel * inner * width, x.dtype)


def _experts_backward(
    dy: Arg, x: Arg, ids: Arg, probs: Arg, gate_up: list[Arg], down: list[Arg], up: list[Arg], saved: Arg, *needs: Any
) -> Cost:
    """Five products; down's (transposed) is needed for all but its own gradient."""
    forward = _experts(x, ids, probs, gate_up, down, up)
    need_x, need_probs, need_inner, need_outer = needs
    moved = forward.bytes - x.dense + dy.bytes + saved.bytes
    moved += x.dense * need_x + probs.dense * need_probs + sum(t.dense for t in down) * need_outer
    moved += sum(t.dense for t in (*gate_up, *up)) * need_inner
    products = (need_x or need_probs or need_inner) + 2 * need_x + 2 * need_inner + need_outer
    return Cost(moved, forward.flops / 3 * products, x.dtype)


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


def _recorded(tensors: list[Arg]) -> None:
    """Long lists are empty in a trace."""
    if not tensors:
        raise LookupError("list")


def _adamw(params: list[Arg], grads: list[Arg], first: list[Arg], second: list[Arg], masters: Any = (), *_: Any) -> Cost:
    """Parameters, moments and copies are read and written, gradients read."""
    _recorded(params)
    written = [*params, *first, *second, *(masters or ())]
    return Cost(sum(2 * t.dense for t in written) + sum(t.bytes for t in grads))


def _adamw_one(var: Arg, m: Arg, v: Arg, grad: Arg, largest: Arg | None = None, *_: Any) -> Cost:
    moved = _adamw([var], [grad], [m], [v]).bytes
    return Cost(moved + (largest.bytes if largest else 0))


def _power_sums(grads: list[Arg], *_: Any) -> Cost:
    _recorded(grads)
    return Cost(sum(t.bytes for t in grads))


def _scale(grads: list[Arg], *_: Any) -> Cost:
    _recorded(grads)
    return Cost(sum(2 * t.dense for t in grads))


def _given(*arguments: Arg | None) -> float:
    """Bytes of arguments of which some may be left out."""
    return sum(a.bytes for a in arguments if a is not None)


def _slots(rows: float, x: Arg, *read: Arg | None) -> Cost:
    """``read`` once, and ``rows`` rows of x's width written."""
    return Cost(_given(*read) + rows * x.shape[-1] * x.item)


def _moe_permute(x: Arg, indices: Arg, rows: int | None = None, *_: Any) -> Cost:
    kept = indices.numel
    if rows:
        kept = min(rows, kept) if rows > 0 else kept + rows
    return _slots(kept, x, x, indices) + Cost(4 * indices.numel)


def _moe_unpermute(rows: Arg, indices: Arg, probs: Arg | None = None, *_: Any) -> Cost:
    tokens = indices.numel if probs is None else probs.shape[0]
    return _slots(tokens, rows, rows, indices, probs)


def _moe_unpermute_grad(rows: Arg, grad: Arg, indices: Arg, probs: Arg | None = None, *_: Any) -> Cost:
    weights = 0 if probs is None else probs.dense + rows.bytes
    return _slots(rows.shape[0], rows, grad, indices, probs) + Cost(weights)


def _moe_unpermute_grad_v2(grad: Arg, indices: Arg, rows: int, dtype: Any, probs: Arg | None = None, *rest: Any) -> Cost:
    weights = 0 if probs is None else probs.dense + rest[-1].bytes
    return _slots(rows, grad, grad, indices, probs) + Cost(weights)


def _moe_permute_map(x: Arg, routing_map: Arg, probs: Arg | None, n: int | None, drop: bool) -> Cost:
    groups = routing_map.shape[1 if drop else 0]
    rows = (x.shape[0] if n is None else n) // max(1, groups) * groups
    return _slots(rows, x, x, routing_map) + Cost(rows * (4 + 2 * (probs.item if probs else 0)))


def _moe_permute_map_grad(grad: Arg, probs: Arg | None, indices: Arg, routing_map: Arg, experts: int, tokens: int, *_: Any) -> Cost:
    cells = tokens * experts * probs.item if probs else 0
    return _slots(tokens, grad, grad, probs, indices, routing_map) + Cost(cells)


def _moe_unpermute_map(rows: Arg, indices: Arg, shape: list[int], probs: Arg | None, *rest: Any) -> Cost:
    return _slots(shape[0], rows, rows, indices, probs, rest[0]) + Cost(8 * indices.numel)


def _moe_unpermute_map_grad(grad: Arg, index: Arg, ids: Arg, routing_map: Arg | None, rows: Arg | None, probs: Arg | None, *_: Any) -> Cost:
    read = (grad, index, ids, routing_map, probs, rows if probs else None)
    return _slots(index.numel, grad, *read) + Cost(probs.numel * grad.item if probs else 0)


def _moe_init(x: Arg, row_idx: Arg, ids: Arg, active: int) -> Cost:
    return _slots(min(active, x.shape[0]) * ids.shape[1], x, x, row_idx, ids) + Cost(8 * ids.numel)


def _moe_init_v2(x: Arg, ids: Arg, *_: Any) -> Cost:
    return _slots(ids.numel, x, x, ids) + Cost(4 * ids.numel)


def _moe_init_grad(grad: Arg, index: Arg, tokens: int, *_: Any) -> Cost:
    return _slots(tokens, grad, grad, index)


def _moe_finalize(rows: Arg, skip1: Arg | None, skip2: Arg | None, bias: Arg | None, scales: Arg | None, index: Arg, ids: Arg | None, *rest: Any) -> Cost:
    tokens = scales.shape[0] if scales else index.numel // ((rest[1] if len(rest) > 1 else 1) or 1)
    return _slots(tokens, rows, rows, skip1, skip2, bias, scales, index, ids)


def _moe_finalize_grad(grad: Arg, rows: Arg, bias: Arg | None, scales: Arg | None, index: Arg, ids: Arg | None, *_: Any) -> Cost:
    read = (grad, index, ids) if scales is None else (grad, rows, bias, scales, index, ids)
    return Cost(_given(*read) + rows.dense + (bias.dense if bias else 0) + (scales.dense if scales else 0))


def _moe_re_routing(x: Arg, counts: Arg, scales: Arg | None, *_: Any) -> Cost:
    return Cost(x.bytes + x.dense + counts.bytes + 4 * x.shape[0] + (2 * scales.bytes if scales else 0))


#: Operators in Python that call others of jumar: those have the cost.
COMPOSITES = (
    "npu_moe_token_permute_with_routing_map",
    "npu_moe_token_unpermute_with_routing_map",
    "_npu_moe_token_unpermute_with_routing_map",
    "npu_moe_init_routing_v2",
    "npu_moe_re_routing",
    "npu_apply_adam_w",
    "npu_grouped_matmul",
    "npu_grouped_matmul_add",
    "npu_grouped_matmul_add_",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax_v2",
)

#: Operator of ``torch.ops.jumar`` -> formula over its arguments in the order of the schema. Tensors are :class:`Arg`,
#: lists of tensors lists of them; what a trace does not record (strings, floats that were left out) is None.
FUSED_COSTS: dict[str, Formula] = {
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_gemma_rms_norm": _rms_norm,
    "gemma_rms_norm_backward": _rms_norm_backward,
    "npu_add_rms_norm": _add_rms_norm,
    "add_rms_norm_backward": _add_rms_norm_backward,
    "rms_norm_gated": _rms_norm_gated,
    "rms_norm_gated_backward": _rms_norm_gated_backward,
    "npu_swiglu": _streams(1, 0.5),
    "npu_swiglu_backward": _streams(2, 1, like=1),
    "swiglu_gate_up": _streams(2, 1),
    "swiglu_gate_up_backward": _streams(3, 2, like=1),
    "npu_rotary_mul": _streams(3, 1),
    "npu_rotary_mul_backward": _rotary_backward_all,
    "rotary_mul_backward": _streams(3, 1),
    "npu_linear": _linear,
    "linear_dgrad": _dgrad,
    "linear_wgrad": _wgrad,
    "linear_bias_grad": _bias_grad,
    "npu_linear_backward": _linear_backward,
    "grouped_matmul": _grouped,
    "grouped_matmul_dgrad": _grouped_dgrad,
    "grouped_matmul_wgrad": _grouped_wgrad,
    "grouped_matmul_bias_grad": _grouped_bias_grad,
    "grouped_matmul_list": _grouped,
    "grouped_matmul_list_dgrad": _grouped_dgrad,
    "grouped_matmul_list_wgrad": _grouped_wgrad,
    "grouped_matmul_add_": _grouped_add,
    "separate_matmul": _separate,
    "npu_moe_token_permute": _moe_permute,
    "npu_moe_token_permute_grad": lambda x, grad, ids, index, *_: _slots(x.shape[0], x, grad, index),
    "npu_moe_token_permute_grad_v2": _moe_init_grad,
    "npu_moe_token_unpermute": _moe_unpermute,
    "_npu_moe_token_unpermute": _moe_unpermute,
    "npu_moe_token_unpermute_grad": _moe_unpermute_grad,
    "npu_moe_token_unpermute_grad_v2": _moe_unpermute_grad_v2,
    "moe_permute_map": _moe_permute_map,
    "npu_moe_token_permute_with_routing_map_grad": _moe_permute_map_grad,
    "moe_unpermute_map": _moe_unpermute_map,
    "npu_moe_token_unpermute_with_routing_map_grad": _moe_unpermute_map_grad,
    "npu_moe_init_routing": _moe_init,
    "moe_init_routing_v2": _moe_init_v2,
    "moe_init_routing_grad": _moe_init_grad,
    "npu_moe_finalize_routing": _moe_finalize,
    "moe_finalize_routing_grad": _moe_finalize_grad,
    "moe_re_routing": _moe_re_routing,
    "moe_re_routing_grad": lambda grad, index: Cost(grad.bytes + grad.dense + index.bytes),
    "expert_counts": lambda indices, experts: Cost(indices.bytes + 8 * experts),
    "moe_ffn": _experts,
    "moe_ffn_backward": _experts_backward,
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
