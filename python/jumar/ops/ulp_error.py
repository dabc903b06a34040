"""``ulp_error``: how far a result is from an fp64 oracle. The measure behind ``jumar verify``."""

from __future__ import annotations

import torch
from torch import Tensor

from jumar.ops._wiring import forbid_autograd, register_fake


def ulp_error(
    actual: Tensor, expected: Tensor, slack: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The largest ``|actual - expected| / (ulp(expected) + slack)``, in ulps of actual's dtype.

    NaN against NaN is 0, NaN against anything else is infinity.

    Args:
        actual: fp32, bf16, fp16 or fp64, any strides.
        expected: the oracle's values, fp64, of the same shape.
        slack: fp64 of the same shape: what the summation of terms that cancel may cost, absolute.

    Returns:
        The largest error (fp64, 0-dim) and the row-major index of the first element that has it
        (int64, 0-dim; -1 when there are no elements).

    Raises:
        RuntimeError: shapes or dtypes do not go together.
    """
    return torch.ops.jumar.ulp_error(actual, expected, slack)


register_fake(
    "ulp_error",
    lambda actual, expected, slack=None: (
        actual.new_empty((), dtype=torch.float64),
        actual.new_empty((), dtype=torch.int64),
    ),
)
forbid_autograd("ulp_error")
