"""``npu_apply_adam_w`` and the operators behind :mod:`jumar.optim`. See docs/ops/npu_apply_adam_w.md and docs/optim.md.

All of them but ``grad_power_sums`` write their arguments, return nothing and say so in their schema. They bump the
version counters of what they write, as torch's own in-place operators do, and refuse to be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    define_composite,
    forbid_autograd,
    register_fake,
    register_in_place,
    resolve,
)

_Scalar = float | int | bool

_NAME = "npu_apply_adam_w"
_SCALARS = (
    "Scalar beta1_power, Scalar beta2_power, Scalar lr, Scalar weight_decay, Scalar beta1, Scalar beta2, "
    "Scalar epsilon, Tensor grad, Tensor? max_grad_norm, bool? amsgrad, bool? maximize"
)


def npu_apply_adam_w(
    beta1_power: _Scalar,
    beta2_power: _Scalar,
    lr: _Scalar,
    weight_decay: _Scalar,
    beta1: _Scalar,
    beta2: _Scalar,
    epsilon: _Scalar,
    grad: Tensor,
    max_grad_norm: Tensor | None = None,
    amsgrad: bool | None = None,
    maximize: bool | None = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW step of one parameter, in place.

    Args:
        beta1_power, beta2_power: the powers of the *previous* step, ``beta ** (t - 1)``: the operator multiplies once
            more.
        lr, weight_decay, beta1, beta2, epsilon: as in ``torch.optim.AdamW``; kept in fp64.
        grad: fp32, bf16, fp16 or fp64, any strides.
        max_grad_norm: with ``amsgrad``, the largest second moment so far, of grad's shape. Not written.
        amsgrad, maximize: None means False.
        out: (var, m, v), of grad's shape, any of these dtypes each: updated and returned.

    Raises:
        RuntimeError: without ``out``, as the vendor's; amsgrad without max_grad_norm; shapes or dtypes that do not fit;
            tensors that overlap. Nothing is written then.
    """
    arguments = (beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon)
    written = {} if out is None else {"out": list(out)}
    return resolve(_NAME, grad)(*arguments, grad, max_grad_norm, amsgrad, maximize, **written)


def _functional(*args: Any) -> Any:
    raise RuntimeError(f"{_NAME} is not implemented for Tensor; give out=(var, m, v)")


def _out(*arguments: Any, out: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    *numbers, grad, max_grad_norm, amsgrad, maximize = arguments
    if len(out) != 3:
        raise RuntimeError(f"{_NAME}: expected tuple of 3 elements but got {len(out)}")
    if amsgrad and max_grad_norm is None:
        raise RuntimeError(f"{_NAME}: if amsgrad is true, max_gard_norm input must be entered")
    var, m, v = out
    largest = max_grad_norm if amsgrad else None
    torch.ops.jumar.apply_adam_w_(var, m, v, grad, largest, *map(float, numbers), bool(maximize))
    return var, m, v


# The stable ABI cannot bind Scalar arguments.
define_composite(f"{_NAME}({_SCALARS}) -> (Tensor, Tensor, Tensor)", _functional)
define_composite(f"{_NAME}.out({_SCALARS}, *, Tensor[] out) -> (Tensor, Tensor, Tensor)", _out)

#: What :mod:`jumar.optim` calls; see docs/optim.md.
adamw_ = torch.ops.jumar.adamw_
grad_power_sums = torch.ops.jumar.grad_power_sums
scale_grads_ = torch.ops.jumar.scale_grads_

register_in_place("adamw_", (0, 2, 3, 4, 6))
register_in_place("apply_adam_w_", (0, 1, 2), shown=_NAME)
register_in_place("scale_grads_", (0,))


def _power_sums_fake(
    grads: list[Tensor], groups: list[int], group_count: int, norm_type: float
) -> Tensor:
    return grads[0].new_empty((group_count,), dtype=torch.float64)


register_fake("grad_power_sums", _power_sums_fake)
forbid_autograd("grad_power_sums")
