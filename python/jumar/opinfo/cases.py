"""Data that finds mistakes: signed values, random weights, a constant and a zero row, odd sizes, strided memory.

Every function yields :class:`~jumar.opinfo.spec.Case` for one dtype and seed; the same seed gives the same data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jumar.opinfo.spec import Case, Shape, each


class Source:
    """A seeded stream of tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, seed: int):
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Signed values around zero."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return (values * scale).to(dtype or self.dtype)

    def rows(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Signed values whose first row is constant, whose second is zero and whose third is small."""
        x = self.normal(*shape, scale=scale)
        rows = x.view(-1, shape[-1]) if x.numel() else x
        if rows.dim() == 2 and rows.shape[0] >= 4:
            rows[0] = -0.8125
            rows[1] = 0.0
            rows[2] *= 0.015625
        return x

    def angles(self, *shape: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Two independent tables in [-1, 1]: no cos^2 + sin^2 = 1 that would hide a mix-up."""
        tables = torch.rand((2, *shape), generator=self.generator, dtype=torch.float64) * 2 - 1
        return tables[0].to(dtype or self.dtype), tables[1].to(dtype or self.dtype)


def sliced(x: Tensor) -> Tensor:
    """The same values at every second element of each row."""
    if x.dim() == 0:
        return x
    poison = float("nan") if x.is_floating_point() else -1
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), poison)
    view = wide[..., ::2]
    view.copy_(x)
    return view


def transposed(x: Tensor) -> Tensor:
    """The same values with the first dimension adjacent in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x


def expanded(x: Tensor) -> Tensor:
    """One value for the whole tensor, with strides of 0, as a mean or sum sends back."""
    return x.new_tensor(0.375).expand(x.shape)


_LAYOUTS = {"sliced": sliced, "transposed": transposed}


def layouts(case: Case, gradients: tuple[str, ...] = ()) -> Iterator[Case]:
    """The case in other layouts: inputs and gradients strided, and gradients, also those among the inputs, expanded."""
    for name, change in _LAYOUTS.items():
        tensors = {k: each(change, v) for k, v in case.tensors.items()}
        yield Case(f"{case.label}, {name}", tensors, case.options, [change(g) for g in case.grads])
    tensors = case.tensors | {k: each(expanded, case.tensors[k]) for k in gradients}
    grads = [expanded(g) for g in case.grads]
    yield Case(f"{case.label}, expanded gradient", tensors, case.options, grads)


def shape_text(shape: Any) -> str:
    return "x".join(str(n) for n in shape)


_NORM_SHAPES = ((0, 8), (1, 1), (3, 1), (5, 7), (4, 8), (6, 17), (2, 3, 33), (37, 257), (9, 4099))


def norm_cases(dtype: torch.dtype, seed: int, inputs: tuple[str, ...], outputs: int = 1):
    """``inputs`` are the names before gamma, all of one shape; ``outputs`` counts those that carry gradients."""

    def make(shape: tuple[int, ...], gamma: tuple[int, ...], gamma_dtype=None) -> Case:
        source = Source(dtype, seed + sum(shape))
        tensors = {name: source.rows(*shape, scale=2.0) for name in inputs}
        tensors["gamma"] = source.normal(*gamma, dtype=gamma_dtype)
        grads = [source.normal(*shape) for _ in range(outputs)]
        return Case(shape_text(shape), tensors, {}, grads)

    for shape in _NORM_SHAPES:
        case = make(shape, shape[-1:])
        yield case
        if shape == (37, 257):
            yield from layouts(case)
    two = make((5, 6, 19), (6, 19))
    two.label += ", gamma 6x19"
    yield two
    large = make((6, 129), (129,))
    large.label += ", epsilon 1e-2"
    large.options = {"epsilon": 1e-2}
    yield large
    if dtype in (torch.bfloat16, torch.float16):
        mixed = make((6, 64), (64,), torch.float32)
        mixed.label += ", fp32 gamma"
        yield mixed


def swiglu_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for shape, dim in (
        ((0, 8), -1),
        ((3, 2), -1),
        ((5, 14), -1),
        ((4, 6, 34), 1),
        ((8, 33), 0),
        ((37, 514), -1),
    ):
        source = Source(dtype, seed + sum(shape))
        x = source.rows(*shape, scale=3.0)
        grad = source.normal(*x.chunk(2, dim)[0].shape)
        case = Case(f"{shape_text(shape)}, dim {dim}", {"input": x}, {"dim": dim}, [grad])
        yield case
        if shape == (37, 514):
            yield from layouts(case)


def swiglu_gate_up_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for shape in ((0, 8), (1, 1), (5, 7), (2, 3, 33), (37, 257)):
        source = Source(dtype, seed + sum(shape))
        tensors = {"gate": source.rows(*shape, scale=3.0), "up": source.rows(*shape)}
        case = Case(shape_text(shape), tensors, {}, [source.normal(*shape)])
        yield case
        if shape == (37, 257):
            yield from layouts(case)


def rotary_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    def make(shape, table, mode="half", table_dtype=None) -> Case:
        source = Source(dtype, seed + sum(shape))
        cos, sin = source.angles(*table, dtype=table_dtype)
        tensors = {"input": source.rows(*shape), "r1": cos, "r2": sin}
        label = f"{shape_text(shape)}, table {shape_text(table)}, {mode}"
        return Case(label, tensors, {"rotary_mode": mode}, [source.normal(*shape)])

    for mode in ("half", "interleave"):
        yield make((2, 0, 5, 8), (1, 1, 5, 8), mode)
        yield make((1, 1, 1, 2), (1, 1, 1, 2), mode)
        yield make((2, 3, 5, 6), (1, 1, 5, 6), mode)  # BNSD, 11SD
        yield make((2, 5, 3, 34), (1, 5, 1, 34), mode)  # BSND, 1S1D
        yield make((2, 3, 5, 18), (2, 1, 5, 18), mode)  # BNSD, B1SD
        yield make((2, 3, 5, 10), (2, 3, 5, 10), mode)
        yield make((11, 3, 16), (11, 1, 16), mode)  # TND
        yield make((2, 7, 3, 24), (2, 7, 1, 16), mode)  # partial: the last 8 pass through
        case = make((2, 4, 9, 64), (1, 1, 9, 64), mode)
        yield case
        yield from layouts(case)
    if dtype in (torch.bfloat16, torch.float16):
        case = make((2, 4, 9, 64), (1, 1, 9, 64), "half", torch.float32)
        case.label += ", fp32 tables"
        yield case


def linear_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """(rows.., in, out, bias)"""
    for rows, k, n, bias in (
        ((0,), 8, 5, True),
        ((1,), 1, 1, False),
        ((3,), 7, 5, True),
        ((2, 9), 33, 17, False),
        ((37,), 257, 65, True),
        ((130,), 64, 129, False),
        ((5,), 1031, 31, False),
    ):
        source = Source(dtype, seed + k + n)
        tensors = {"input": source.rows(*rows, k), "weight": source.normal(n, k)}
        if bias:
            tensors["bias"] = source.normal(n)
        label = f"{shape_text(rows)} rows, {k} -> {n}{', bias' if bias else ''}"
        case = Case(label, tensors, {}, [source.normal(*rows, n)])
        yield case
        if k == 257:
            yield from layouts(case)


def rows_bench(
    shape: Shape, dtype: torch.dtype, inputs: tuple[str, ...], last: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """``inputs`` of rows and columns, ``last`` of columns."""
    source = Source(dtype, 1)
    tensors = {name: source.normal(shape["rows"], shape["cols"]) for name in inputs}
    return tensors | {name: source.normal(shape["cols"]) for name in last}


def swiglu_bench(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"input": Source(dtype, 1).normal(shape["rows"], 2 * shape["cols"])}


def rotary_bench(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    source = Source(dtype, 1)
    cos, sin = source.angles(1, shape["seq"], 1, shape["dim"])
    x = source.normal(shape["batch"], shape["seq"], shape["heads"], shape["dim"])
    return {"input": x, "r1": cos, "r2": sin}


def linear_bench(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    m, k, n = shape["m"], shape["k"], shape["n"]
    source = Source(dtype, 1)
    return {"input": source.normal(m, k), "weight": source.normal(n, k, scale=k**-0.5)}
