"""What is known of an operator outside of its kernel: the types of the operator table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
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


#: An argument or a result of an operator: a tensor, or the tensors of a ``Tensor[]``.
Value = Tensor | list[Tensor]


def each(change: Callable[[Tensor], Tensor], value: Value) -> Value:
    """``change`` of the tensor, or of every tensor of the list."""
    return [change(t) for t in value] if isinstance(value, list | tuple) else change(value)


def flat(value: Value | None) -> list[Tensor]:
    """The tensors of a value; none of a result that an operator leaves out."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


@dataclass
class Case:
    """Inputs for one comparison: tensors in argument order, options, and a gradient per differentiable output."""

    label: str
    tensors: dict[str, Value]
    options: dict[str, Any] = field(default_factory=dict)
    grads: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """The speed that is asked of an operator, forward + backward, on large shapes; 0 where nothing is asked.

    Attributes:
        percent: of the limit.
        eager: how many times faster than eager.
        inductor: how many times faster than Inductor.
        bf16: in place of ``eager`` for bf16, on CPUs without and with bf16 dot products.
        bytes: shapes that move less (forward + backward) are not judged: they fit the cache.
        flops: shapes that compute less are not judged.
    """

    percent: float = 0.0
    eager: float = 0.0
    inductor: float = 0.0
    bf16: tuple[float, float] | None = None
    bytes: float = 0.0
    flops: float = 0.0

    @property
    def text(self) -> str:
        """For the command line: ``75 % of the limit, 2x eager, 1x Inductor``."""
        parts = [f"{self.percent:g} % of the limit"] if self.percent else []
        parts += [f"{self.eager:g}x eager"] if self.eager else []
        parts += [f"{self.inductor:g}x Inductor"] if self.inductor else []
        if self.bf16:
            parts.append("bf16 {:g}x eager, {:g}x with bf16 dot products".format(*self.bf16))
        return ", ".join(parts)


#: What moves memory and little else. What multiplies matrices.
STREAMS = Target(percent=75.0, eager=2.0, inductor=1.0, bytes=64e6)
MULTIPLIES = Target(percent=75.0, bf16=(10.0, 1.0), flops=6e9)

Shape = dict[str, int]
Terms = Callable[..., dict[str, Value]]


@dataclass(frozen=True)
class OpInfo:
    """One operator.

    Attributes:
        name: as in ``torch.ops.jumar``.
        formula: one line.
        shapes: one line.
        doc: path of its page; ``docs/ops/NAME.md`` by default.
        outputs: names of the results, in order.
        bounds: result or gradient (``"d NAME"``) -> stated error.
        plain: the formula in plain PyTorch, any dtype; a tuple like the operator's results.
        terms: magnitudes of the terms that cancel, on fp64 values, for results of ``dtype``; ``{}`` where none do.
        cases: makes the cases of ``jumar verify`` for a dtype.
        bench: makes the tensors of ``jumar bench`` from a named shape.
        backward: the C++ operators that compute its gradient.
        differentiable: the results that carry gradients; by default the first, and none where arguments are written.
        shapes_file: the named shapes, ``jumar/bench/shapes/NAME.txt``; by default the name without ``npu_``.
        oracle: where it is not ``plain`` on fp64 inputs: takes the dtype as well.
        constants: inputs that need no gradient in a model; ``jumar bench`` asks for none.
        fixed: floating-point inputs that have no gradient at all (integers and what is written never have one).
        mutates: arguments that are written. ``plain`` leaves them alone and returns their new values.
        call: how it is called, where that is not ``torch.ops.jumar.NAME(*tensors, **options)``; returns the results in
            the order of ``outputs``, then perhaps others, among them the arguments that an operator in place has written.
        eager: what ``jumar bench`` times as eager and compiles with Inductor, where that is not ``plain``: it takes the
            same arguments and may write those in ``mutates``.
        dtypes: those that it takes.
        target: the speed that is asked of it.
    """

    name: str
    formula: str
    shapes: str
    bounds: dict[str, Bound]
    plain: Callable[..., tuple[Value, ...]]
    terms: Terms
    cases: Callable[[torch.dtype, int], Iterator[Case]]
    bench: Callable[[Shape, torch.dtype], dict[str, Value]]
    outputs: tuple[str, ...] = ("y",)
    backward: tuple[str, ...] = ()
    differentiable: tuple[str, ...] | None = None
    doc: str | None = None
    shapes_file: str | None = None
    oracle: Callable[..., tuple[Value, ...]] | None = None
    constants: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    call: Callable[..., tuple[Value, ...]] | None = None
    eager: Callable[..., Any] | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES
    target: Target = Target()

    def __post_init__(self) -> None:
        own = {
            "differentiable": () if self.mutates else self.outputs[:1],
            "doc": f"docs/ops/{self.name}.md",
            "shapes_file": self.name.removeprefix("npu_").rstrip("_"),
        }
        for name, value in own.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def fused(self, *tensors: Value, **options: Any) -> tuple[Value, ...]:
        """The fused operator itself; always a tuple. What it returns beyond ``outputs`` is left out."""
        call = self.call or getattr(torch.ops.jumar, self.name)
        result = call(*tensors, **options)
        return result[: len(self.outputs)] if isinstance(result, tuple) else (result,)

    def run_oracle(self, dtype: torch.dtype, *tensors: Value, **options: Any) -> tuple[Value, ...]:
        """The formula on fp64 tensors, for results of ``dtype``."""
        if self.oracle is None:
            return self.plain(*tensors, **options)
        return self.oracle(*tensors, **options, dtype=dtype)

    def magnitudes(
        self, dtype: torch.dtype, tensors: dict[str, Value], grads: list[Tensor], **options: Any
    ) -> dict[str, Value]:
        """:attr:`terms` on fp64 tensors, for results of ``dtype``."""
        return self.terms(tensors, grads, **options, dtype=dtype)

    def carrying(self, results: tuple[Value | None, ...]) -> list[Tensor]:
        """The tensors that carry gradients, of results in the order of ``outputs``."""
        named = dict(zip(self.outputs, results, strict=True))
        return [t for name in self.differentiable for t in flat(named[name])]

    def wants_gradient(self, name: str, value: Value) -> bool:
        """Whether the argument has a gradient."""
        if not self.differentiable or name in self.fixed or name in self.mutates:
            return False
        return all(t.is_floating_point() for t in flat(value))

    def arguments(
        self, tensors: dict[str, Value], dtype: torch.dtype | None = None, *, grads: bool = False
    ) -> dict[str, Value]:
        """The tensors for one call: detached, what is written copied, floats widened to ``dtype`` when that is given.

        With ``grads``, leaves that require a gradient where the argument has one.
        """

        def argument(tensor: Tensor, written: bool, wanted: bool) -> Tensor:
            leaf = tensor.detach()
            if dtype is not None and leaf.is_floating_point():
                leaf = leaf.to(dtype)
            if written and leaf.data_ptr() == tensor.data_ptr():
                leaf = torch.empty_strided(
                    leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device
                ).copy_(leaf)
            return leaf.requires_grad_() if wanted else leaf

        result = {}
        for name, value in tensors.items():
            written = name in self.mutates
            wanted = grads and self.wants_gradient(name, value)
            result[name] = each(partial(argument, written=written, wanted=wanted), value)
        return result

    @property
    def multiplies(self) -> bool:
        """Whether its speed is that of matrix products, not of memory."""
        return self.target.flops > 0

    @property
    def registered(self) -> bool:
        """Whether the library that is loaded has it."""
        return hasattr(torch.ops.jumar, self.name)
