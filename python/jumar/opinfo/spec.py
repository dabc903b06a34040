"""What is known of an operator outside of its kernel: the types of the operator table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """``fp32``, ``float32``, ``bf16`` ... as a torch dtype. ValueError for other names."""
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
    by_name = {dtype_name(dtype): dtype for dtype in DTYPES}
    found = by_name.get(short.get(name, name))
    if found is None:
        raise ValueError(f"unknown dtype {name!r} (known: {', '.join([*by_name, *short])})")
    return found


def compute_epsilon(dtype: torch.dtype) -> float:
    """Half an ulp of 1 in the dtype that kernels compute in."""
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24


@dataclass(frozen=True)
class Bound:
    """The stated error of one result, in ulps of its dtype.

    Where the terms of the result may cancel, ``terms`` > 0 adds ``terms`` * (half an ulp of 1 in the compute dtype) *
    (the sum of the terms' magnitudes) to the unit.
    """

    half: float  # bf16, fp16
    single: float  # fp32
    double: float  # fp64, against an fp64 oracle that has an error of its own
    terms: float = 0.0

    def ulps(self, dtype: torch.dtype) -> float:
        if dtype == torch.float64:
            return self.double
        return self.single if dtype == torch.float32 else self.half

    def text(self, dtype: torch.dtype) -> str:
        """For the command line: ``1 ulp + 4 eps of the terms``."""
        tail = f" + {self.terms:g} eps of the terms" if self.terms else ""
        return f"{self.ulps(dtype):g} ulp{tail}"


@dataclass
class Case:
    """Inputs for one comparison: tensors in argument order, options, and a gradient per differentiable output."""

    label: str
    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    grads: list[Tensor] = field(default_factory=list)


Terms = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class OpInfo:
    """One operator.

    Attributes:
        name: as in ``torch.ops.jumar``.
        formula: one line.
        shapes: one line.
        doc: path of its page.
        backward: the C++ operators that compute its gradient.
        outputs: names of the results, in order.
        differentiable: those of them that carry gradients.
        bounds: result or gradient (``"d NAME"``) -> stated error.
        plain: the formula in plain PyTorch, any dtype; a tuple like the operator's results.
        terms: magnitudes of the terms that cancel, on fp64 values.
        cases: makes the cases of ``jumar verify`` for a dtype.
        bench: makes the tensors of ``jumar bench`` from a named shape.
        shapes_file: the named shapes, ``jumar/bench/shapes/NAME.txt``.
        traffic: (forward, forward + backward) bytes that must move, from a shape and an item size.
        flops: the same in floating-point operations, for what is bound by arithmetic.
        oracle: where it is not ``plain`` on fp64 inputs: takes the dtype as well.
        constants: inputs that need no gradient in a model; ``jumar bench`` asks for none.
    """

    name: str
    formula: str
    shapes: str
    doc: str
    backward: tuple[str, ...]
    outputs: tuple[str, ...]
    differentiable: tuple[str, ...]
    bounds: dict[str, Bound]
    plain: Callable[..., tuple[Tensor, ...]]
    terms: Terms
    cases: Callable[[torch.dtype, int], Iterator[Case]]
    bench: Callable[[dict[str, int], torch.dtype], dict[str, Tensor]]
    shapes_file: str
    traffic: Callable[[dict[str, int], int], tuple[float, float]] | None = None
    flops: Callable[[dict[str, int]], tuple[float, float]] | None = None
    oracle: Callable[..., tuple[Tensor, ...]] | None = None
    constants: tuple[str, ...] = ()

    def fused(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """The fused operator itself; always a tuple."""
        result = getattr(torch.ops.jumar, self.name)(*tensors, **options)
        return result if isinstance(result, tuple) else (result,)

    def run_oracle(
        self, dtype: torch.dtype, *tensors: Tensor, **options: Any
    ) -> tuple[Tensor, ...]:
        """The formula on fp64 tensors, for results of ``dtype``."""
        if self.oracle is None:
            return self.plain(*tensors, **options)
        return self.oracle(*tensors, **options, dtype=dtype)

    def magnitudes(
        self, dtype: torch.dtype, tensors: dict[str, Tensor], grads: list[Tensor], **options: Any
    ) -> dict[str, Tensor]:
        """:attr:`terms` on fp64 tensors, for results of ``dtype``."""
        extra = {} if self.oracle is None else {"dtype": dtype}
        return self.terms(tensors, grads, **options, **extra)

    @property
    def registered(self) -> bool:
        """Whether the library that is loaded has it."""
        return hasattr(torch.ops.jumar, self.name)
