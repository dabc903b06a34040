"""The vendor's ``npu_grouped_matmul`` and ``npu_grouped_matmul_add``. See docs/ops/npu_grouped_matmul.md.

Both are composites: what runs, differentiates and is traced are the operators of :mod:`jumar.ops.grouped_matmul`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jumar.ops._wiring import calls_operator, define_by_position, define_composite

_NAME = "npu_grouped_matmul"
_ADD = "npu_grouped_matmul_add"

#: Arguments that serve quantised products, all of them None here.
_QUANTISED = (
    "scale",
    "offset",
    "antiquant_scale",
    "antiquant_offset",
    "per_token_scale",
    "activation_input",
    "activation_quant_scale",
    "activation_quant_offset",
)
_DTYPES = ("x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype")
#: ScalarType numbers, as ``int?`` arguments give a dtype.
_CODES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}

_LISTS = ", ".join(f"Tensor[]? {name}=None" for name in _QUANTISED[:5])
_ACTIVATION = ", ".join(f"Tensor[]? {name}=None" for name in _QUANTISED[5:])
_COMMON = "int? split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0"


@calls_operator
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Tensor | Sequence[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **options: Any,
) -> list[Tensor]:
    """Products of groups of rows (``group_type`` 0), of the reduced dimension (2), or of separate pairs (-1).

    Args:
        x, weight, bias: lists; see the page for the combinations that go together.
        group_list: a tensor of group ends (``group_list_type`` 0), sizes (1) or [E, 2] pairs (2); or a list of ends.
        split_item: 0 or 1 for a list of results, 2 or 3 for one.
        options: the vendor's other arguments. Those of quantised products raise by name unless they are None.

    Returns:
        A list of results in x's dtype, differentiable in x, weight and bias.
    """


@calls_operator
def npu_grouped_matmul_add(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> Tensor:
    """``input[e] + x[rows of e].T @ weight[rows of e]``: gradients of weights added to what is there.

    Args:
        input: [E, M, N] or [E * M, N].
        x: [T, M], or [M, T] with ``transpose_x=False``.
        weight: [T, N], or [N, T] with ``transpose_weight``.

    Returns:
        A new tensor; ``torch.ops.npu.npu_grouped_matmul_add_`` writes ``input``. Neither is differentiable.
    """


def _fail(text: str) -> None:
    raise RuntimeError(f"{_NAME}: {text}")


def _check(
    x: list[Tensor], weight: list[Tensor], split_item: int | None, options: dict[str, Any]
) -> int:
    """split_item as 0 .. 3. Raises for what no product here can honour."""
    if not x or not weight:
        _fail(f"neither x nor weight could be empty, got {len(x)} and {len(weight)} tensors")
    for name in (*_QUANTISED, *_DTYPES):
        value = options.get(name)
        if value is not None:
            shown = [list(t.shape) for t in value] if name in _QUANTISED else value
            _fail(f"{name} belongs to quantised products, which are not supported; got {shown}")
    if options.get("act_type"):
        _fail(
            f"act_type belongs to quantised products, which are not supported; got {options['act_type']}"
        )
    output = options.get("output_dtype")
    if output is not None and output not in (x[0].dtype, _CODES.get(x[0].dtype)):
        _fail(f"output_dtype must be that of x, {x[0].dtype}, got {output}")
    split = 0 if split_item is None else split_item
    if split not in (0, 1, 2, 3):
        _fail(f"split_item is {split}, which should only be one of 0/1/2/3")
    for a in weight:
        # Under autocast the operators below cast both, and say what still differs.
        if a.dtype != x[0].dtype and not torch.is_autocast_enabled("cpu"):
            _fail(f"x and weight should have one dtype, got {x[0].dtype} and {a.dtype}")
    return split


def _separate(x: list[Tensor], weight: list[Tensor], bias: list[Tensor]) -> list[Tensor]:
    """x[i] [.., K], each with a weight of its own."""
    if len(x) != len(weight):
        _fail(
            f"the num of x tensors must equal the num of weight tensors, got {len(x)} and {len(weight)}"
        )
    for i, (a, w) in enumerate(zip(x, weight, strict=True)):
        if a.dim() < 1 or w.dim() != 2 or a.shape[-1] != w.shape[0]:
            _fail(f"x[{i}] {list(a.shape)} does not go with weight[{i}] {list(w.shape)}")
    rows = [a.reshape(-1, a.shape[-1]) if a.dim() != 2 else a for a in x]
    products = torch.ops.jumar.separate_matmul(rows, weight, bias)
    return [
        y.reshape(*a.shape[:-1], y.shape[-1]) if a.dim() != 2 else y
        for a, y in zip(x, products, strict=True)
    ]


def _by_rows(
    x: list[Tensor], weight: list[Tensor], bias: list[Tensor], group_list: Tensor | None, kind: int
) -> list[Tensor]:
    """Groups of rows, one result."""
    if len(x) > 1:
        if group_list is not None:
            _expect_sizes(x, group_list, kind)
        parts = _separate(x, weight, bias)
        if any(p.dim() != 2 or p.shape[1] != parts[0].shape[1] for p in parts):
            _fail(f"one result needs matrices of one width, got {[list(p.shape) for p in parts]}")
        return [torch.cat(parts)]
    if group_list is None:
        _fail("group_list is required for one x, got None")
    if len(weight) == 1 and weight[0].dim() == 3:
        if len(bias) > 1 or any(b.dim() != 2 for b in bias):
            _fail(
                f"bias must be one tensor [{weight[0].shape[0]}, {weight[0].shape[2]}] beside one weight, got "
                f"{[list(b.shape) for b in bias]}"
            )
        stacked = bias[0] if bias else None
        return [torch.ops.jumar.grouped_matmul(x[0], weight[0], group_list, stacked, kind)]
    return [torch.ops.jumar.grouped_matmul_list(x[0], weight, group_list, bias, kind)]


def _expect_sizes(x: list[Tensor], group_list: Tensor, kind: int) -> None:
    """With an x of its own for each group there is nothing left to say; a list that says something else is an error."""
    shape = [len(x), 2] if kind == 2 else [len(x)]
    if group_list.dtype not in (torch.int64, torch.int32) or list(group_list.shape) != shape:
        _fail(
            f"group_list must be int64 or int32 of shape {shape} beside {len(x)} x tensors, got {group_list.dtype} "
            f"{list(group_list.shape)}"
        )
    values = group_list.tolist()
    if kind == 2:
        sizes = dict(values)
        if sorted(sizes) != list(range(len(x))):
            _fail(f"group_list must name each of the {len(x)} groups once, got {values}")
        given = [sizes[i] for i in range(len(x))]
    else:
        ends = [0, *values]
        given = values if kind == 1 else [b - a for a, b in zip(ends, ends[1:], strict=False)]
    rows = [a.shape[0] for a in x]
    if given != rows:
        _fail(f"group_list gives the groups {given} rows, the x tensors have {rows}")


def _grouped(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **options: Any,
) -> list[Tensor]:
    if group_type is None:
        _fail("Requires manual passing group_type, current is None.")
    if group_type not in (-1, 0, 2):
        _fail(f"The group type must be -1, 0 or 2, but now is {group_type}")
    split = _check(x, weight, split_item, options)
    kind = 0 if group_list_type is None else group_list_type
    if kind not in (0, 1, 2):
        _fail(f"group_list_type must be 0, 1 or 2, but now is {kind}")
    if group_type == -1:
        if group_list is not None:
            _fail(f"group_type -1 has no group_list, got {list(group_list.shape)}")
        if split > 1:
            _fail(f"group_type -1 gives a list of results: split_item must be 0 or 1, got {split}")
        return _separate(x, weight, bias or [])
    if split < 2:
        _fail(
            f"a group_list tensor or group_type {group_type} gives one result: split_item must be 2 or 3, got {split}"
        )
    if group_type == 0:
        return _by_rows(x, weight, bias or [], group_list, kind)
    if len(x) != 1 or len(weight) != 1 or weight[0].dim() != 2 or x[0].dim() != 2:
        _fail(
            "the length of weight must equal x for group_type 2: one matrix each, got "
            f"{[list(a.shape) for a in x]} and {[list(a.shape) for a in weight]}"
        )
    if bias:
        _fail(f"group_type 2 has no bias, got {[list(b.shape) for b in bias]}")
    if group_list is None:
        _fail("group_list is required for group_type 2, got None")
    return [torch.ops.jumar.grouped_matmul_wgrad(x[0].T, weight[0], group_list, kind)]


def _grouped_by_ints(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: list[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **options: Any,
) -> list[Tensor]:
    split = _check(x, weight, split_item, options)
    ends = group_list or []
    if group_type not in ((None, 0) if ends else (None, 0, -1)):
        _fail(
            f"a list of ints groups rows: The group type must be 0 or None, but now is {group_type}"
        )
    if group_list_type not in (None, 0):
        _fail(
            f"a list of ints holds the ends of groups: group_list_type must be 0, got {group_list_type}"
        )
    bias = bias or []
    if not ends:
        return _separate(x, weight, bias) if split < 2 else _by_rows(x, weight, bias, None, 0)
    if split > 1:
        return _by_rows(x, weight, bias, torch.tensor(ends, dtype=torch.int64), 0)
    if len(x) != 1 or len(weight) != len(ends):
        _fail(
            "a group_list with split_item 0 or 1 needs that the length of x equals 1 and one weight a group, got "
            f"{len(x)} x, {len(weight)} weight and {len(ends)} groups"
        )
    if ends[0] < 0:
        _fail(f"group_list[0] should be larger than or equal to 0, got {ends[0]}")
    sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    if min(sizes) < 0:
        _fail(f"group_list: differences should be larger than or equal to 0, got {ends}")
    rest = x[0].shape[0] - ends[-1]
    if rest < 0:
        _fail(f"group_list goes beyond the {x[0].shape[0]} rows of x, got {ends}")
    return _separate(list(x[0].split([*sizes, rest]))[:-1], weight, bias)


def _add_into(
    sums: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    transpose_x: bool,
    transpose_weight: bool,
    group_type: int,
    group_list_type: int | None,
) -> Tensor:
    if group_type != 2:
        raise RuntimeError(f"{_ADD}: group_type must be 2, but now is {group_type}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (sums, x, weight)):
        raise RuntimeError(f"{_ADD}: not differentiable; call it under torch.no_grad()")
    torch.ops.jumar.grouped_matmul_add_(
        sums,
        x if transpose_x else x.mT,
        weight.mT if transpose_weight else weight,
        group_list,
        0 if group_list_type is None else group_list_type,
    )
    return sums


define_composite(
    f"{_NAME}(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, {_LISTS}, Tensor? group_list=None, {_ACTIVATION}, "
    f"{_COMMON}, int[]? tuning_config=None, int? output_dtype=None, "
    + ", ".join(f"int? {name}=None" for name in _DTYPES)
    + ") -> Tensor[]",
    _grouped,
)
define_composite(
    f"{_NAME}.List(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, {_LISTS}, int[]? group_list=None, "
    f"{_ACTIVATION}, {_COMMON}, ScalarType? output_dtype=None) -> Tensor[]",
    _grouped_by_ints,
)
_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor group_list, *, bool transpose_x=True, bool transpose_weight=False, "
    "int group_type=2, int? group_list_type=0"
)
define_by_position(
    f"{_ADD}(Tensor input, {_ARGUMENTS}) -> Tensor",
    lambda input, *rest: _add_into(input.clone(), *rest),
)
define_by_position(f"{_ADD}_(Tensor(a!) input, {_ARGUMENTS}) -> Tensor(a!)", _add_into)
