"""The operator table: one entry per operator that models call. The README's table is made from it.

Bounds.  16-bit results are rounded once, from an fp32 value that is a few fp32 ulps off: 0.51 ulp.  fp32 results add
up the roundings of their formula.  Where terms cancel, the unit carries the terms (see :class:`Bound`) and the bound
is 1.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from jumar.opinfo import cases, formulas, losses, optimizers
from jumar.opinfo.cases import Source
from jumar.opinfo.spec import MULTIPLIES, STREAMS, Bound, OpInfo

_CLOSE = Bound(half=0.51, single=4.0, double=6.0)
# rstd is fp32 for 16-bit inputs too. The sum of squares is kept in vector lanes over blocks of 4096 elements: with four
# lanes and no fused multiply-add its error reaches 8 ulp, of which the root takes half.
_STATISTIC = Bound(half=6.0, single=6.0, double=6.0)
_CANCELS = Bound(half=1.0, single=1.0, double=1.0, terms=8.0)
_SLOPE = Bound(half=1.0, single=1.0, double=1.0, terms=16.0)  # with a sigmoid, itself 2.5 ulp off

_Shape = dict[str, int]


def _norm_bench(shape: _Shape, dtype: torch.dtype, inputs: tuple[str, ...]) -> dict[str, Tensor]:
    source = Source(dtype, 1)
    tensors = {name: source.normal(shape["rows"], shape["cols"]) for name in inputs}
    return {**tensors, "gamma": source.normal(shape["cols"])}


def _elements(shape: _Shape) -> int:
    n = 1
    for size in shape.values():
        n *= size
    return n


def _passes(forward: int, backward: int):
    """Traffic of an operator that moves so many tensors of the shape's size, forward and backward."""

    def traffic(shape: _Shape, item: int) -> tuple[float, float]:
        bytes_ = float(_elements(shape) * item)
        return forward * bytes_, (forward + backward) * bytes_

    return traffic


def _swiglu_bench(shape: _Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"input": Source(dtype, 1).normal(shape["rows"], 2 * shape["cols"])}


def _gate_up_bench(shape: _Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    source = Source(dtype, 1)
    return {name: source.normal(shape["rows"], shape["cols"]) for name in ("gate", "up")}


def _rotary_bench(shape: _Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    source = Source(dtype, 1)
    cos, sin = source.angles(1, shape["seq"], 1, shape["dim"])
    x = source.normal(shape["batch"], shape["seq"], shape["heads"], shape["dim"])
    return {"input": x, "r1": cos, "r2": sin}


def _linear_bench(shape: _Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    source = Source(dtype, 1)
    scale = shape["k"] ** -0.5
    return {
        "input": source.normal(shape["m"], shape["k"]),
        "weight": source.normal(shape["n"], shape["k"], scale=scale),
    }


def _linear_traffic(shape: _Shape, item: int) -> tuple[float, float]:
    m, k, n = shape["m"], shape["k"], shape["n"]
    inputs, result = float(m * k + n * k) * item, float(m * n) * item
    return inputs + result, inputs + result + result + 2 * inputs


def _linear_flops(shape: _Shape) -> tuple[float, float]:
    forward = 2.0 * shape["m"] * shape["k"] * shape["n"]
    return forward, 3.0 * forward


_NORM_SHAPES = "input [a.., n..], gamma [n..] -> y like input, rstd [a.., 1..]"

_TABLE = (
    OpInfo(
        name="npu_rms_norm",
        formula="y = x · rstd · γ,  rstd = (mean(x²) + ε)^-½",
        shapes=_NORM_SHAPES,
        doc="docs/ops/npu_rms_norm.md",
        backward=("npu_rms_norm_backward",),
        outputs=("y", "rstd"),
        differentiable=("y",),
        bounds={"y": _CLOSE, "rstd": _STATISTIC, "d input": _CANCELS, "d gamma": _CANCELS},
        plain=formulas.rms_norm_plain,
        terms=formulas.rms_norm_terms,
        cases=partial(cases.norm_cases, inputs=("input",)),
        bench=partial(_norm_bench, inputs=("input",)),
        shapes_file="rms_norm",
        traffic=_passes(2, 3),
        target=STREAMS,
    ),
    OpInfo(
        name="npu_gemma_rms_norm",
        formula="y = x · rstd · (1 + γ)",
        shapes=_NORM_SHAPES,
        doc="docs/ops/npu_gemma_rms_norm.md",
        backward=("gemma_rms_norm_backward",),
        outputs=("y", "rstd"),
        differentiable=("y",),
        bounds={"y": _CLOSE, "rstd": _STATISTIC, "d input": _CANCELS, "d gamma": _CANCELS},
        plain=formulas.gemma_rms_norm_plain,
        terms=formulas.gemma_rms_norm_terms,
        cases=partial(cases.norm_cases, inputs=("input",)),
        bench=partial(_norm_bench, inputs=("input",)),
        shapes_file="rms_norm",
        traffic=_passes(2, 3),
        target=STREAMS,
    ),
    OpInfo(
        name="npu_add_rms_norm",
        formula="x = round(x1 + x2),  y = x · rstd · γ",
        shapes="x1, x2 [a.., n..], gamma [n..] -> y like x1, rstd [a.., 1..], x like x1",
        doc="docs/ops/npu_add_rms_norm.md",
        backward=("add_rms_norm_backward", "npu_rms_norm_backward"),
        outputs=("y", "rstd", "x"),
        differentiable=("y", "x"),
        bounds={
            "y": _CLOSE,
            "rstd": _STATISTIC,
            "x": Bound(half=0.0, single=0.0, double=0.0),
            "d x1": _CANCELS,
            "d x2": _CANCELS,
            "d gamma": _CANCELS,
        },
        plain=formulas.add_rms_norm_plain,
        oracle=formulas.add_rms_norm_oracle,
        terms=formulas.add_rms_norm_terms,
        cases=partial(cases.norm_cases, inputs=("x1", "x2"), outputs=2),
        bench=partial(_norm_bench, inputs=("x1", "x2")),
        shapes_file="rms_norm",
        traffic=_passes(4, 4),
        target=STREAMS,
    ),
    OpInfo(
        name="rms_norm_gated",
        formula="y = x · rstd · γ · silu(gate)",
        shapes="input, gate [a.., n..], gamma [n..] -> y like input, rstd [a.., 1..]",
        doc="docs/ops/rms_norm_gated.md",
        backward=("rms_norm_gated_backward",),
        outputs=("y", "rstd"),
        differentiable=("y",),
        bounds={
            "y": Bound(half=0.51, single=8.0, double=8.0),
            "rstd": _STATISTIC,
            "d input": _CANCELS,
            "d gate": _SLOPE,
            "d gamma": _CANCELS,
        },
        plain=formulas.rms_norm_gated_plain,
        terms=formulas.rms_norm_gated_terms,
        cases=partial(cases.norm_cases, inputs=("input", "gate")),
        bench=partial(_norm_bench, inputs=("input", "gate")),
        shapes_file="rms_norm",
        traffic=_passes(3, 5),
        target=STREAMS,
    ),
    OpInfo(
        name="npu_swiglu",
        formula="y = silu(A) · B,  A and B the halves of x along dim",
        shapes="input [.., 2n, ..] -> [.., n, ..]",
        doc="docs/ops/npu_swiglu.md",
        backward=("npu_swiglu_backward",),
        outputs=("y",),
        differentiable=("y",),
        bounds={
            "y": Bound(half=0.51, single=5.0, double=5.0),
            # half of it has no terms that cancel: its bound is that of y
            "d input": Bound(half=1.0, single=5.0, double=5.0, terms=16.0),
        },
        plain=formulas.swiglu_plain,
        terms=formulas.swiglu_terms,
        cases=cases.swiglu_cases,
        bench=_swiglu_bench,
        shapes_file="swiglu",
        traffic=_passes(3, 5),
        target=STREAMS,
    ),
    OpInfo(
        name="swiglu_gate_up",
        formula="y = silu(gate) · up",
        shapes="gate, up [..] -> [..]",
        doc="docs/ops/swiglu_gate_up.md",
        backward=("swiglu_gate_up_backward",),
        outputs=("y",),
        differentiable=("y",),
        bounds={
            "y": Bound(half=0.51, single=5.0, double=5.0),
            "d gate": _SLOPE,
            "d up": Bound(half=0.51, single=5.0, double=5.0),
        },
        plain=formulas.swiglu_gate_up_plain,
        terms=formulas.swiglu_gate_up_terms,
        cases=cases.swiglu_gate_up_cases,
        bench=_gate_up_bench,
        shapes_file="swiglu",
        traffic=_passes(3, 5),
        target=STREAMS,
    ),
    OpInfo(
        name="npu_rotary_mul",
        formula="y = x · cos + R(x) · sin,  R: (a, b) -> (-b, a) in halves or neighbours",
        shapes="input [.., D], r1 and r2 broadcast to it, last dimension R <= D -> like input",
        doc="docs/ops/npu_rotary_mul.md",
        backward=("npu_rotary_mul_backward", "rotary_mul_backward"),
        outputs=("y",),
        differentiable=("y",),
        bounds={name: _CANCELS for name in ("y", "d input", "d r1", "d r2")},
        plain=formulas.rotary_mul_plain,
        terms=formulas.rotary_mul_terms,
        cases=cases.rotary_cases,
        bench=_rotary_bench,
        shapes_file="rotary",
        constants=("r1", "r2"),
        traffic=_passes(2, 2),
        target=STREAMS,
    ),
    OpInfo(
        name="npu_linear",
        formula="y = x · Wᵀ + b",
        shapes="input [.., K], weight [N, K], bias [N] or none -> [.., N]",
        doc="docs/ops/npu_linear.md",
        backward=("npu_linear_backward", "linear_dgrad", "linear_wgrad", "linear_bias_grad"),
        outputs=("y",),
        differentiable=("y",),
        bounds={
            name: Bound(half=1.0, single=1.0, double=1.0, terms=2.0)
            for name in ("y", "d input", "d weight", "d bias")
        },
        plain=formulas.linear_plain,
        terms=formulas.linear_terms,
        cases=cases.linear_cases,
        bench=_linear_bench,
        shapes_file="linear",
        traffic=_linear_traffic,
        flops=_linear_flops,
        target=MULTIPLIES,
    ),
)

#: name -> entry, in the order of the README.
OPERATORS: dict[str, OpInfo] = {
    info.name: info for info in (*_TABLE, *losses.ENTRIES, *optimizers.ENTRIES)
}
