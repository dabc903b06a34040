"""The entries of products of groups of rows: formulas, data, bounds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from jumar import ops
from jumar.opinfo.cases import Source, layouts
from jumar.opinfo.spec import Bound, Case, OpInfo, Shape, Target


def rows_of_groups(rows: int, groups: int, zipf: bool) -> list[int]:
    """Sizes that add up to ``rows``: equal ones, or falling as 1 / rank, in no order."""
    shares = [1.0 / (e * 37 % groups + 1) if zipf else 1.0 for e in range(groups)]
    ends, total = [0], 0.0
    for share in shares:
        total += share
        ends.append(round(rows * total / sum(shares)))
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def _sizes(group_list: Tensor, rows: int) -> list[int]:
    """Rows of each group, from their ends, and those of none."""
    ends = [0, *group_list.tolist(), rows]
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def _plain(
    x: Tensor, weight: Tensor, group_list: Tensor, bias: Tensor | None = None
) -> tuple[Tensor]:
    """The loop over experts that models run."""
    *parts, rest = x.split(_sizes(group_list, x.shape[0]))
    results = [part @ w for part, w in zip(parts, weight, strict=True)]
    if bias is not None:
        results = [y + b for y, b in zip(results, bias, strict=True)]
    return (torch.cat([*results, rest.new_zeros(rest.shape[0], weight.shape[2])]),)


def _terms(t: dict[str, Tensor], grads: list[Tensor], **_: object) -> dict[str, Tensor]:
    """Products of magnitudes; a sum of K rounded terms strays with the root of K, so each gets that factor."""
    x, w, g = t["x"].abs(), t["weight"].abs(), grads[0].abs()
    bias = t.get("bias")
    sizes = _sizes(t["group_list"], x.shape[0])
    *xs, _ = x.split(sizes)
    *gs, rest = g.split(sizes)
    (y,) = _plain(x, w, t["group_list"], None if bias is None else bias.abs())
    dx = [part @ m.mT for part, m in zip(gs, w, strict=True)]
    terms = {
        "y": y * max(1, w.shape[1]) ** 0.5,
        "d x": torch.cat([*dx, rest.new_zeros(rest.shape[0], w.shape[1])])
        * max(1, w.shape[2]) ** 0.5,
        "d weight": torch.stack(
            [a.mT @ b * max(1, a.shape[0]) ** 0.5 for a, b in zip(xs, gs, strict=True)]
        ),
    }
    if bias is not None:
        terms["d bias"] = torch.stack([b.sum(0) * max(1, b.shape[0]) ** 0.5 for b in gs])
    return terms


def _cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """(rows of groups, rows of none, in, out, bias)"""
    for sizes, rest, k, n, bias in (
        ((0, 0), 0, 8, 5, True),
        ((1,), 0, 1, 1, False),
        ((3, 0, 2), 1, 7, 5, True),
        ((4, 17, 0, 1), 0, 33, 17, False),
        ((37, 5, 0, 64), 3, 65, 129, True),
        ((2, 9), 0, 517, 31, False),
    ):
        source = Source(dtype, seed + k + n)
        rows = sum(sizes) + rest
        tensors = {
            "x": source.rows(rows, k),
            "weight": source.normal(len(sizes), k, n),
            "group_list": torch.tensor(sizes).cumsum(0),
        }
        if bias:
            tensors["bias"] = source.normal(len(sizes), n)
        label = f"{'+'.join(map(str, sizes))} rows, {rest} of none, {k} -> {n}{', bias' if bias else ''}"
        case = Case(label, tensors, {}, [source.normal(rows, n)])
        yield case
        if n == 129:
            yield from layouts(case)


def _bench(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    m, k, n, groups = shape["m"], shape["k"], shape["n"], shape["experts"]
    source = Source(dtype, 1)
    return {
        "x": source.normal(m, k),
        "weight": source.normal(groups, n, k, scale=k**-0.5).mT,  # as models store it
        "group_list": torch.tensor(rows_of_groups(m, groups, bool(shape["zipf"]))).cumsum(0),
    }


def _call(x: Tensor, weight: Tensor, group_list: Tensor, bias: Tensor | None = None) -> Tensor:
    biases = None if bias is None else [bias]
    return ops.npu_grouped_matmul(
        [x], [weight], bias=biases, group_list=group_list, split_item=2, group_type=0
    )[0]


#: The speed that is asked of products of groups.
GROUPS = Target(percent=70.0, eager=1.1, bf16=(10.0, 1.0), flops=6e9)

ENTRIES = (
    OpInfo(
        name="npu_grouped_matmul",
        formula="y[t] = x[t] · W[g] + b[g],  g the group of row t",
        shapes="x [M, K], weight [E, K, N], group_list [E], bias [E, N] or none -> [M, N]",
        backward=(
            "grouped_matmul_dgrad",
            "grouped_matmul_wgrad",
            "grouped_matmul_bias_grad",
            "grouped_matmul_list_dgrad",
            "grouped_matmul_list_wgrad",
        ),
        bounds=dict.fromkeys(
            ("y", "d x", "d weight", "d bias"), Bound(half=1.0, single=1.0, double=1.0, terms=2.0)
        ),
        plain=_plain,
        terms=_terms,
        cases=_cases,
        bench=_bench,
        call=_call,
        target=GROUPS,
    ),
)
