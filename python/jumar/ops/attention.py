"""``npu_fusion_attention``, ``_v2`` and ``_v3``: softmax attention in tiles, without a matrix of scores.

See docs/ops/npu_fusion_attention.md. ``_v2`` is a composite over ``jumar::fusion_attention_v2``, the same by position:
torch registers no gradient for tensors that are passed by name only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import (
    calls_operator,
    compute_dtype,
    define_by_position,
    gradient,
    register_autocast,
    register_autograd,
    register_fake,
)

#: No bound of a band: the vendor's default of pre_tockens and next_tockens.
UNBOUNDED = 2147483647

_LAYOUTS = ("BSH", "SBH", "BNSD", "BSND", "TND")


@calls_operator
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED,
    next_tockens: int = UNBOUNDED,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """``dropout(softmax(mask(scale * (query @ key.T + pse)))) @ value`` per head.

    Args:
        query, key, value: fp32, bf16, fp16 or fp64, any strides, in the layout ``input_layout``: ``"BSH"``, ``"SBH"``,
            ``"BNSD"``, ``"BSND"``, or ``"TND"`` for packed sequences, in upper or lower case. ``head_num``: heads of query, a multiple of those
            of key and value. value may have another head size.
        pse: added to the scores before the scale: [B, N, Sq, Skv] in query's dtype, with 1 for any of the first three
            where it repeats (the card takes [B, N, 1, Skv] and [1, N, Sq, Skv] alone of these); or compressed to the last 1024 rows of a bias of i - j alone (see the page), the only form for TND.
        padding_mask: must be None, as on the card.
        atten_mask: bool or uint8, **1 hides** (the opposite of ``scaled_dot_product_attention``): [B, N, Sq, Skv],
            [B, 1, Sq, Skv], [1, 1, Sq, Skv], [Sq, Skv], or the compressed mask of ``sparse_mode``. **Without a mask,
            ``sparse_mode``, ``pre_tockens`` and ``next_tockens`` have no effect: attention is full.**
        scale: of the scores. The default is 1, not 1 / sqrt(D).
        keep_prob: 1 - dropout. The pattern is a function of ``seed`` and ``offset``, drawn from torch's generator where
            both are 0; ``dropout_mask`` (one bit per score, 1 = keep) replaces it.
        prefix: for sparse_mode 6, visible keys at the start of each sequence.
        actual_seq_qlen, actual_seq_kvlen: for TND, where each sequence ends (cumulative, without a leading 0).
        sparse_mode: 0 mask and band, 1 mask, 2 causal from the upper left, 3 causal from the lower right, 4 band from
            the lower right, 5 mask with prefix, 6 causal with prefix, 7 and 8 packed sequences one of which was cut.
        softmax_layout: for TND, ``"TND"`` orders the statistics as the shape says, ``""`` by heads first.
        sink: [N] fp32 (fp64 for fp64), one more score per head without a value.
        inner_precise, gen_mask_parallel, sync: hints of the card, without effect.

    Returns:
        (out, softmax_max, softmax_sum, softmax_out, seed, offset, numels). out has query's layout and value's head
        size. Statistics: fp32 (fp64 for fp64), [B, N, Sq, 8] or [T, N, 8], each value eight times; the logarithm of the
        sum of exponentials is max + log(sum). softmax_out is empty. out is differentiable in query, key, value, pse
        and sink. A row that sees no key is 0, with sum 0; NaN in hidden keys or values has no effect.

    Raises:
        RuntimeError: shapes, dtypes, lengths or a compressed mask do not fit, or an argument is not supported.
    """


@calls_operator
def npu_fusion_attention_v2(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """:func:`npu_fusion_attention` with everything after the layout by name, and ropes.

    Args:
        query, key, value, head_num, input_layout: as there.
        options: as there, except for the spelling ``pre_tokens`` and ``next_tokens``; and ``query_rope``, ``key_rope``:
            more columns of query and key in the same layout, whose products add to the scores. ``pse_type`` must be 1,
            ``q_start_idx`` and ``kv_start_idx`` None.

    Returns:
        As there; differentiable in query_rope and key_rope, too.

    Raises:
        NotImplementedError: another pse_type, or start indices.
    """


@calls_operator
def npu_fusion_attention_v3(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *options: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`npu_fusion_attention` with numbers in tensors, for captured graphs.

    Args:
        query, key, value, head_num, input_layout: as there.
        options, named: as there up to ``sink``; ``actual_seq_qlen`` and ``actual_seq_kvlen`` are integer tensors.

    Returns:
        (out, softmax_max, softmax_sum, softmax_out, seed, offset), the last two int64 tensors of one element.
    """


_V2 = (
    "npu_fusion_attention_v2"
    "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, *, Tensor? pse=None,"
    " Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? query_rope=None, Tensor? key_rope=None,"
    " float scale=1., float keep_prob=1., int pre_tokens=2147483647, int next_tokens=2147483647, int inner_precise=0,"
    " int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0,"
    " bool gen_mask_parallel=True, bool sync=False, int pse_type=1, int[]? q_start_idx=None, int[]? kv_start_idx=None,"
    ' str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0)'
    " -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)


def _v2(*args: Any) -> Any:
    for at, name, only in (
        (21, "pse_type", 1),
        (22, "q_start_idx", None),
        (23, "kv_start_idx", None),
    ):
        if args[at] not in (only, []):
            raise NotImplementedError(
                f"npu_fusion_attention_v2: {name} must be {only}, got {args[at]}; leave it out"
            )
    # Without hints.
    return torch.ops.jumar.fusion_attention_v2(*args[:14], *args[15:19], *args[24:])


def _out_shape(
    op: str, query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str
) -> tuple[list[int], list[int]]:
    """Shapes of the output and of the statistics."""
    name = layout.upper()
    if name not in _LAYOUTS:
        raise RuntimeError(f"{op}: input_layout must be one of {_LAYOUTS}, got {layout!r}")
    if head_num <= 0:
        raise RuntimeError(f"{op}: head_num must be positive, got {head_num}")
    shape = list(query.shape)
    if name == "TND":
        return [*shape[:2], value.shape[2]], [shape[0], head_num, 8]
    if name in ("BNSD", "BSND"):
        rows = shape[2] if name == "BNSD" else shape[1]
        return [*shape[:3], value.shape[3]], [shape[0], head_num, rows, 8]
    heads_kv = key.shape[2] // (shape[2] // head_num)
    batch, rows = shape[:2] if name == "BSH" else (shape[1], shape[0])
    return [*shape[:2], value.shape[2] // heads_kv * head_num], [batch, head_num, rows, 8]


def _elements(
    query: Tensor, key: Tensor, head_num: int, layout: str, ends: Any, ends_kv: Any
) -> int:
    """Scores of the call: the last result."""
    if layout.upper() == "TND":
        total, q0, k0 = 0, 0, 0
        for q1, k1 in zip(ends or (), ends_kv or (), strict=True):
            total += max(0, q1 - q0) * max(0, k1 - k0)
            q0, k0 = q1, k1
        return head_num * total
    batch, row = {"BSH": (0, 1), "SBH": (1, 0), "BNSD": (0, 2), "BSND": (0, 1)}[layout.upper()]
    return query.shape[batch] * head_num * query.shape[row] * key.shape[row]


def _names(op: str) -> list[str]:
    """Arguments of an operator; ``pre_tockens`` is ``pre_tokens``."""
    arguments = getattr(torch.ops.jumar, op).default._schema.arguments
    return [a.name.replace("tockens", "tokens") for a in arguments]


def _named(op: str, values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(_names(op), values, strict=True))


def _fake(op: str, *args: Any) -> tuple[Any, ...]:
    given = _named(op, args)
    query, key, heads, layout = (given[n] for n in ("query", "key", "head_num", "input_layout"))
    out, statistics = _out_shape(
        f"npu_{op.removeprefix('npu_')}", query, key, given["value"], heads, layout
    )
    dtype = compute_dtype(query.dtype)
    results = (
        query.new_empty(out),
        query.new_empty(statistics, dtype=dtype),
        query.new_empty(statistics, dtype=dtype),
        query.new_empty((0,)),
    )
    if op.endswith("v3"):
        return *results, *(query.new_empty((1,), dtype=torch.int64) for _ in range(2))
    seed, offset = given["seed"], given["offset"]
    if given["keep_prob"] < 1 and given["dropout_mask"] is None and seed == 0 and offset == 0:
        raise RuntimeError(
            f"npu_{op.removeprefix('npu_')}: dropout in a compiled graph needs a seed, which would otherwise be drawn "
            "while tracing"
        )
    ends, ends_kv = given["actual_seq_qlen"], given["actual_seq_kvlen"]
    return *results, seed, offset, _elements(query, key, heads, layout, ends, ends_kv)


def _like(x: Tensor | None, query: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return query.new_empty(x.shape if x is not None else (0,), dtype=dtype or query.dtype)


def _grad_fake(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, **given: Any
) -> tuple[Tensor, ...]:
    pse, sink = (
        _like(given.get("pse"), query),
        _like(given.get("sink"), query, compute_dtype(query.dtype)),
    )
    gradients = (*(query.new_empty(x.shape) for x in (query, key, value)), pse)
    if "ropes" not in given:
        return *gradients, sink
    return *gradients, *(_like(x, query) for x in given["ropes"]), sink


def _grad_v2_fake(*args: Any, query_rope: Any = None, key_rope: Any = None, **rest: Any) -> Any:
    return _grad_fake(*args, ropes=(query_rope, key_rope), **rest)


def _backward_fake(op: str, *args: Any) -> tuple[Tensor, ...]:
    given = _named(op, args)
    if not given["need_pse"]:
        given["pse"] = None
    if "query_rope" in given:
        given["ropes"] = (given["query_rope"], given["key_rope"])
    return _grad_fake(**given)


#: What the backward takes after the tensors and numbers of the forward's results.
_OPTIONS = (
    "scale", "keep_prob", "pre_tokens", "next_tokens", "seed", "offset", "prefix", "actual_seq_qlen",
    "actual_seq_kvlen", "sparse_mode", "softmax_layout",
)  # fmt: skip
_TENSORS = ("pse", "atten_mask", "sink", "dropout_mask", "query_rope", "key_rope")
_GRADIENTS = ("query", "key", "value", "pse", "query_rope", "key_rope", "sink")


def _wire(op: str, backward_op: str) -> None:
    """The gradient of a forward operator: `backward_op` with its arguments, by name."""
    tensors = [n for n in _TENSORS if n in _names(backward_op)]
    names = _names(op)
    wanted = [n for n in _GRADIENTS if n in names]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        given = _named(op, inputs)
        given["seed"], given["offset"] = output[4:6]
        options = [given[n] for n in _OPTIONS]
        ctx.options = [None if isinstance(x, Tensor) else x for x in options]
        kept = [x if isinstance(x, Tensor) else None for x in options]
        inputs_kept = [given.get(n) for n in ("query", "key", "value", *tensors)]
        ctx.save_for_backward(*output[:3], *inputs_kept, *kept)
        ctx.heads = (given["head_num"], given["input_layout"])
        ctx.mark_non_differentiable(*(x for x in output[1:] if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        needs = dict(zip(names, ctx.needs_input_grad, strict=False))
        out, maximum, total, query, key, value, *rest = ctx.saved_tensors
        kept = zip(ctx.options, rest[len(tensors) :], strict=True)
        results = getattr(torch.ops.jumar, backward_op)(
            query, key, value, grad, out, maximum, total, *ctx.heads, *rest[: len(tensors)],
            *(x if tensor is None else tensor for x, tensor in kept), needs.get("pse", False),
        )  # fmt: skip
        if len(results) == 7 and "query_rope" not in names:
            results = (*results[:4], results[6])
        found = dict(zip(wanted, results, strict=True))
        return tuple(found.get(name) if need else None for name, need in needs.items())

    register_autograd(op, backward, setup)


for _name, _backward_name in (
    ("npu_fusion_attention", "fusion_attention_backward"),
    ("fusion_attention_v2", "fusion_attention_backward"),
    ("npu_fusion_attention_v3", "fusion_attention_backward_v3"),
):
    register_fake(_name, partial(_fake, _name), shown=f"npu_{_name.removeprefix('npu_')}")
    _wire(_name, _backward_name)
for _name in ("fusion_attention_backward", "fusion_attention_backward_v3"):
    gradient(_name, partial(_backward_fake, _name))
npu_fusion_attention_grad = gradient(
    "npu_fusion_attention_grad",
    _grad_fake,
    """Gradients of :func:`npu_fusion_attention`: (dq, dk, dv, dpse, dsink), the last two empty without pse or sink.

    softmax_max, softmax_sum and attention_in (the output) are those of the forward, whose other arguments go by their
    names (scale is ``scale_value``).
    """,
)
npu_fusion_attention_grad_v2 = gradient(
    "npu_fusion_attention_grad_v2",
    _grad_v2_fake,
    "The same for :func:`npu_fusion_attention_v2`: (dq, dk, dv, dpse, dq_rope, dk_rope, dsink).",
)
npu_fusion_attention_grad_v3 = gradient(
    "npu_fusion_attention_grad_v3",
    _grad_fake,
    "The same for :func:`npu_fusion_attention_v3`; lengths, seed and offset are tensors.",
)
define_by_position(_V2, _v2)
# sink stays in fp32.
register_autocast("npu_fusion_attention", keep=range(8, 64))
register_autocast("npu_fusion_attention_v3", keep=range(8, 64))
register_autocast("fusion_attention_v2", keep=range(10, 64))
