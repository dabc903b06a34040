"""The operator table: one entry per operator that models call. The README's table is made from it.

Bounds.  16-bit results are rounded once, from an fp32 value that is a few fp32 ulps off: 0.51 ulp.  fp32 results add
up the roundings of their formula.  Where terms cancel, the unit carries the terms (see :class:`Bound`) and the bound
is 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jumar.opinfo import (
    attention,
    attention_parts,
    cases,
    formulas,
    grouped,
    lightning_indexer,
    losses,
    moe,
    moe_ffn,
    optimizers,
    routers,
    sparse_attention,
)
from jumar.opinfo.spec import (
    MULTIPLIES,
    STREAMS,
    Bound,
    OpInfo,
)

_CLOSE = Bound(half=0.51, single=4.0, double=6.0)
_SWIGLU = Bound(half=0.51, single=5.0, double=5.0)
_SUMS = Bound(half=1.0, single=1.0, double=1.0, terms=2.0)
# rstd is fp32 for 16-bit inputs too. The sum of squares is kept in vector lanes over blocks of 4096 elements: with four
# lanes and no fused multiply-add its error reaches 8 ulp, of which the root takes half.
_STATISTIC = Bound(half=6.0, single=6.0, double=6.0)
_CANCELS = Bound(half=1.0, single=1.0, double=1.0, terms=8.0)
_SLOPE = Bound(half=1.0, single=1.0, double=1.0, terms=16.0)  # with a sigmoid, itself 2.5 ulp off


_NORM_SHAPES = "input [a.., n..], gamma [n..] -> y like input, rstd [a.., 1..]"


def _norm(
    inputs: tuple[str, ...] = ("input",), *, bounds: dict[str, Bound] | None = None, **own: Any
) -> OpInfo:
    """The entry of a norm of ``inputs``; ``bounds`` are those that other norms do not have."""
    given = {
        "outputs": ("y", "rstd"),
        "cases": partial(cases.norm_cases, inputs=inputs),
        "bench": partial(cases.rows_bench, inputs=inputs, last=("gamma",)),
        "shapes_file": "rms_norm",
        "target": STREAMS,
        **own,
    }
    names = (*given["outputs"], *(f"d {name}" for name in (*inputs, "gamma")))
    stated = {"y": _CLOSE, "rstd": _STATISTIC, **(bounds or {})}
    return OpInfo(bounds=dict.fromkeys(names, _CANCELS) | stated, **given)


_TABLE = (
    _norm(
        name="npu_rms_norm",
        formula="y = x · rstd · γ,  rstd = (mean(x²) + ε)^-½",
        shapes=_NORM_SHAPES,
        backward=("npu_rms_norm_backward",),
        plain=formulas.rms_norm_plain,
        terms=formulas.rms_norm_terms,
    ),
    _norm(
        name="npu_gemma_rms_norm",
        formula="y = x · rstd · (1 + γ)",
        shapes=_NORM_SHAPES,
        backward=("gemma_rms_norm_backward",),
        plain=formulas.gemma_rms_norm_plain,
        terms=formulas.gemma_rms_norm_terms,
    ),
    _norm(
        ("x1", "x2"),
        name="npu_add_rms_norm",
        formula="x = round(x1 + x2),  y = x · rstd · γ",
        shapes="x1, x2 [a.., n..], gamma [n..] -> y like x1, rstd [a.., 1..], x like x1",
        backward=("add_rms_norm_backward", "npu_rms_norm_backward"),
        outputs=("y", "rstd", "x"),
        differentiable=("y", "x"),
        bounds={"x": Bound(half=0.0, single=0.0, double=0.0)},
        plain=formulas.add_rms_norm_plain,
        oracle=formulas.add_rms_norm_oracle,
        terms=formulas.add_rms_norm_terms,
        cases=partial(cases.norm_cases, inputs=("x1", "x2"), outputs=2),
    ),
    _norm(
        ("input", "gate"),
        name="rms_norm_gated",
        formula="y = x · rstd · γ · silu(gate)",
        shapes="input, gate [a.., n..], gamma [n..] -> y like input, rstd [a.., 1..]",
        backward=("rms_norm_gated_backward",),
        bounds={"y": Bound(half=0.51, single=8.0, double=8.0), "d gate": _SLOPE},
        plain=formulas.rms_norm_gated_plain,
        terms=formulas.rms_norm_gated_terms,
    ),
    OpInfo(
        name="npu_swiglu",
        formula="y = silu(A) · B,  A and B the halves of x along dim",
        shapes="input [.., 2n, ..] -> [.., n, ..]",
        backward=("npu_swiglu_backward",),
        bounds={
            "y": _SWIGLU,
            # half of it has no terms that cancel: its bound is that of y
            "d input": Bound(half=1.0, single=5.0, double=5.0, terms=16.0),
        },
        plain=formulas.swiglu_plain,
        terms=formulas.swiglu_terms,
        cases=cases.swiglu_cases,
        bench=cases.swiglu_bench,
        target=STREAMS,
    ),
    OpInfo(
        name="swiglu_gate_up",
        formula="y = silu(gate) · up",
        shapes="gate, up [..] -> [..]",
        backward=("swiglu_gate_up_backward",),
        bounds={"y": _SWIGLU, "d gate": _SLOPE, "d up": _SWIGLU},
        plain=formulas.swiglu_gate_up_plain,
        terms=formulas.swiglu_gate_up_terms,
        cases=cases.swiglu_gate_up_cases,
        bench=partial(cases.rows_bench, inputs=("gate", "up")),
        shapes_file="swiglu",
        target=STREAMS,
    ),
    OpInfo(
        name="npu_rotary_mul",
        formula="y = x · cos + R(x) · sin,  R: (a, b) -> (-b, a) in halves or neighbours",
        shapes="input [.., D], r1 and r2 broadcast to it, last dimension R <= D -> like input",
        backward=("npu_rotary_mul_backward", "rotary_mul_backward"),
        bounds=dict.fromkeys(("y", "d input", "d r1", "d r2"), _CANCELS),
        plain=formulas.rotary_mul_plain,
        terms=formulas.rotary_mul_terms,
        cases=cases.rotary_cases,
        bench=cases.rotary_bench,
        shapes_file="rotary",
        constants=("r1", "r2"),
        target=STREAMS,
    ),
    OpInfo(
        name="npu_linear",
        formula="y = x · Wᵀ + b",
        shapes="input [.., K], weight [N, K], bias [N] or none -> [.., N]",
        backward=("npu_linear_backward", "linear_dgrad", "linear_wgrad", "linear_bias_grad"),
        bounds=dict.fromkeys(("y", "d input", "d weight", "d bias"), _SUMS),
        plain=formulas.linear_plain,
        terms=formulas.linear_terms,
        cases=cases.linear_cases,
        bench=cases.linear_bench,
        target=MULTIPLIES,
    ),
)

#: name -> entry, in the order of the README.
OPERATORS: dict[str, OpInfo] = {
    info.name: info
    for info in (
        *_TABLE,
        *attention.ENTRIES,
        *sparse_attention.ENTRIES,
        *attention_parts.ENTRIES,
        *lightning_indexer.ENTRIES,
        *grouped.ENTRIES,
        *moe_ffn.ENTRIES,
        *moe.ENTRIES,
        *routers.ENTRIES,
        *losses.ENTRIES,
        *optimizers.ENTRIES,
    )
}
