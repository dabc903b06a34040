"""The entries of what moves rows to experts and back: formulas, data, bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from jumar import ops
from jumar.opinfo.cases import Source, layouts
from jumar.opinfo.spec import STREAMS, Bound, Case, OpInfo, Shape

_MOVED = Bound(half=0.0, single=0.0, double=0.0)
#: Sums of at most 4 terms in these cases.
_SUM = Bound(half=0.51, single=1.0, double=1.0, terms=4.0)
#: Dot products over the width of a row, at most 257 here.
_DOT = Bound(half=0.51, single=1.0, double=1.0, terms=8.0)

_ROUTING_PAGE = "docs/ops/npu_moe_init_routing.md"


def _order(indices: Tensor) -> Tensor:
    """row -> slot"""
    return indices.flatten().argsort(stable=True)


def _routed(indices: Tensor, experts: int) -> Tensor:
    return indices.new_zeros(indices.shape[0], experts, dtype=torch.bool).scatter_(1, indices, True)


def _ids(source: Source, tokens: int, top_k: int, experts: int) -> Tensor:
    """Different experts for each of a token's slots."""
    return torch.rand(tokens, experts, generator=source.generator).argsort(-1)[:, :top_k]


def _by_gradients(
    plain: Callable[..., tuple[Tensor, ...]], outputs: tuple[str, ...]
) -> Callable[..., dict[str, Tensor]]:
    """Magnitudes of results that are linear in each argument: the formula and its gradients on magnitudes."""

    def terms(
        t: dict[str, Tensor], grads: list[Tensor], dtype: torch.dtype, **options: Any
    ) -> dict[str, Tensor]:
        leaves = {n: v.abs().requires_grad_() if v.is_floating_point() else v for n, v in t.items()}
        with torch.enable_grad():
            results = plain(*leaves.values(), **options)
            floats = {n: v for n, v in leaves.items() if v.is_floating_point()}
            found = torch.autograd.grad(
                list(results), list(floats.values()), [g.abs() for g in grads]
            )
        named = {n: r.detach() for n, r in zip(outputs, results, strict=True)}
        return named | {f"d {n}": g for n, g in zip(floats, found, strict=True)}

    return terms


# tokens, experts a token, experts, width
_SIZES = (
    (0, 2, 4, 8),
    (1, 1, 1, 1),
    (5, 1, 3, 7),
    (6, 3, 5, 17),
    (37, 4, 9, 257),
    (130, 2, 64, 33),
)


def _cases(
    make: Callable[[Source, int, int, int, int], dict[str, Tensor]],
    results: Callable[..., tuple[Tensor, ...]],
    options: Callable[[int, int, int], dict[str, Any]] = lambda *_: {},
) -> Callable[[torch.dtype, int], Iterator[Case]]:
    """Cases of tensors that ``make`` makes, with gradients like ``results``."""

    def cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
        for tokens, top_k, experts, width in _SIZES:
            source = Source(dtype, seed + tokens + width)
            tensors = make(source, tokens, top_k, experts, width)
            chosen = options(tokens, top_k, experts)
            shaped = results(*tensors.values(), **chosen)
            grads = [source.normal(*r.shape, dtype=r.dtype) for r in shaped]
            label = f"{tokens} tokens, {top_k} of {experts} experts, width {width}"
            case = Case(label, tensors, chosen, grads)
            yield case
            if width == 257:
                yield from layouts(case)

    return cases


def _bench(
    make: Callable[[Source, int, int, int, int], dict[str, Tensor]],
) -> Callable[[Shape, torch.dtype], dict[str, Tensor]]:
    return lambda shape, dtype: make(
        Source(dtype, 1), shape["tokens"], shape["top_k"], shape["experts"], shape["width"]
    )


# --- by expert ids ---


def _permute_tensors(
    source: Source, tokens: int, top_k: int, experts: int, width: int
) -> dict[str, Tensor]:
    return {
        "tokens": source.rows(tokens, width),
        "indices": _ids(source, tokens, top_k, experts),
    }


def _permute(tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None) -> tuple[Tensor]:
    rows = indices.numel() if num_out_tokens is None else num_out_tokens
    return (tokens[_order(indices)[:rows] // indices.shape[1]],)


def _unpermute_tensors(
    source: Source, tokens: int, top_k: int, experts: int, width: int
) -> dict[str, Tensor]:
    return {
        "permuted_tokens": source.rows(tokens * top_k, width),
        "sorted_indices": _order(_ids(source, tokens, top_k, experts)).argsort().int(),
        "probs": source.normal(tokens, top_k),
    }


def _unpermute(permuted: Tensor, sorted_indices: Tensor, probs: Tensor) -> tuple[Tensor]:
    rows = permuted[sorted_indices].view(*probs.shape, permuted.shape[1])
    return ((rows * probs.unsqueeze(-1)).sum(1),)


# --- by a map ---


def _map_tensors(
    source: Source, tokens: int, top_k: int, experts: int, width: int
) -> dict[str, Tensor]:
    """``slots`` says by its size how many rows there are."""
    routed = _routed(_ids(source, tokens, top_k, experts), experts)
    return {
        "tokens": source.rows(tokens, width),
        "routing_map": routed,
        "probs": source.normal(tokens, experts),
        "slots": torch.zeros(tokens * top_k, dtype=torch.int32),
    }


def _cells(routing_map: Tensor) -> tuple[Tensor, Tensor]:
    """(token, expert) of each row."""
    expert, token = routing_map.T.nonzero(as_tuple=True)
    return token, expert


def _permute_map(
    tokens: Tensor, routing_map: Tensor, probs: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    token, expert = _cells(routing_map)
    return tokens[token], probs[token, expert]


def _unpermute_map_tensors(
    source: Source, tokens: int, top_k: int, experts: int, width: int
) -> dict[str, Tensor]:
    routed = _routed(_ids(source, tokens, top_k, experts), experts)
    token, expert = _cells(routed)
    return {
        "permuted_tokens": source.rows(tokens * top_k, width),
        "sorted_indices": (token * experts + expert).argsort().int(),
        "probs": source.normal(tokens, experts),
        "routing_map": routed,
    }


def _unpermute_map(
    permuted: Tensor, sorted_indices: Tensor, probs: Tensor, routing_map: Tensor
) -> tuple[Tensor]:
    top_k = len(permuted) // max(1, len(routing_map))
    weights = probs[routing_map].view(len(routing_map), top_k, 1)
    rows = permuted[sorted_indices].view(len(routing_map), top_k, permuted.shape[1])
    return ((rows * weights).sum(1),)


def _call_permute_map(
    tokens: Tensor, routing_map: Tensor, probs: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    return ops.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=len(slots)
    )


def _call_unpermute_map(
    permuted: Tensor, sorted_indices: Tensor, probs: Tensor, routing_map: Tensor
) -> Tensor:
    shape = [len(routing_map), permuted.shape[1]]
    return ops.npu_moe_token_unpermute_with_routing_map(
        permuted, sorted_indices, shape, probs=probs, routing_map=routing_map
    )


# --- whole layers ---


def _init_tensors(
    source: Source, tokens: int, top_k: int, experts: int, width: int
) -> dict[str, Tensor]:
    return {
        "x": source.rows(tokens, width),
        "row_idx": torch.arange(tokens * top_k).view(top_k, tokens).T.contiguous().int(),
        "expert_idx": _ids(source, tokens, top_k, experts).int(),
    }


def _init(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int = 1 << 30
) -> tuple[Tensor]:
    source = row_idx.flatten()[_order(expert_idx)] % max(1, len(x))
    return (x[source[: min(active_num, len(x)) * row_idx.shape[1]]],)


def _init_v2_tensors(
    source: Source, tokens: int, top_k: int, experts: int, width: int
) -> dict[str, Tensor]:
    return {
        "x": source.rows(tokens, width),
        "expert_idx": _ids(source, tokens, top_k, experts).int(),
    }


def _init_v2(x: Tensor, expert_idx: Tensor, expert_num: int = 0) -> tuple[Tensor]:
    return _permute(x, expert_idx)


def _finalize_tensors(
    source: Source, tokens: int, top_k: int, experts: int, width: int
) -> dict[str, Tensor]:
    ids = _ids(source, tokens, top_k, experts)
    return {
        "expanded_permuted_rows": source.rows(tokens * top_k, width),
        "skip1": source.normal(tokens, width),
        "skip2": source.normal(tokens, width),
        "bias": source.normal(experts, width),
        "scales": source.normal(tokens, top_k),
        "expanded_src_to_dst_row": _order(ids.T).argsort().int(),
        "export_for_source_row": ids.int(),
    }


def _finalize(
    rows: Tensor,
    skip1: Tensor,
    skip2: Tensor,
    bias: Tensor,
    scales: Tensor,
    index: Tensor,
    ids: Tensor,
) -> tuple[Tensor]:
    picked = rows[index.view(scales.shape[1], scales.shape[0]).T]
    return (skip1 + skip2 + (scales.unsqueeze(-1) * (picked + bias[ids])).sum(1),)


def _re_tensors(
    source: Source, tokens: int, top_k: int, experts: int, width: int
) -> dict[str, Tensor]:
    """Rows of ``top_k`` ranks."""
    owner = torch.randint(0, experts * top_k, (tokens * top_k,), generator=source.generator)
    counts = owner.bincount(minlength=experts * top_k).view(top_k, experts)
    return {"tokens": source.rows(tokens * top_k, width), "expert_token_num_per_rank": counts}


def _re(tokens: Tensor, counts: Tensor) -> tuple[Tensor]:
    experts = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    return (tokens[_order(experts.repeat_interleave(counts.flatten()))],)


def _entry(
    make: Callable[[Source, int, int, int, int], dict[str, Tensor]],
    plain: Callable[..., tuple[Tensor, ...]],
    bounds: dict[str, Bound],
    outputs: tuple[str, ...],
    options: Callable[[int, int, int], dict[str, Any]] = lambda *_: {},
    **own: Any,
) -> OpInfo:
    return OpInfo(
        bounds=bounds,
        outputs=outputs,
        differentiable=outputs,
        plain=plain,
        terms=_by_gradients(plain, outputs),
        cases=_cases(make, plain, options),
        bench=_bench(make),
        shapes_file="moe_permute",
        target=STREAMS,
        **own,
    )


ENTRIES = (
    _entry(
        _permute_tensors,
        _permute,
        {"permuted": _MOVED, "d tokens": _SUM},
        ("permuted",),
        lambda tokens, top_k, experts: {"num_out_tokens": tokens * top_k - tokens // 5},
        name="npu_moe_token_permute",
        formula="permuted[r] = tokens[order[r] / K],  order = stable argsort of the expert ids",
        shapes="tokens [T, H], indices [T, K] or [T] -> [O, H], sorted_indices [T K]",
        backward=("npu_moe_token_permute_grad_v2", "npu_moe_token_permute_grad"),
    ),
    _entry(
        _unpermute_tensors,
        _unpermute,
        {"y": _SUM, "d permuted_tokens": _SUM, "d probs": _DOT},
        ("y",),
        name="npu_moe_token_unpermute",
        formula="y[t] = Σ over k of probs[t, k] · permuted[sorted_indices[t K + k]]",
        shapes="permuted_tokens [O, H], sorted_indices [T K], probs [T, K] or none -> [T, H]",
        backward=("npu_moe_token_unpermute_grad_v2", "npu_moe_token_unpermute_grad"),
        doc="docs/ops/npu_moe_token_permute.md",
    ),
    _entry(
        _map_tensors,
        _permute_map,
        {"permuted": _MOVED, "permuted_probs": _MOVED, "d tokens": _SUM, "d probs": _MOVED},
        ("permuted", "permuted_probs"),
        name="npu_moe_token_permute_with_routing_map",
        formula="permuted[r] = tokens[t of r],  rows the marked cells of the map, expert by expert",
        shapes="tokens [T, H], routing_map and probs [T, E] -> [O, H], [O], sorted_indices [O]",
        backward=("npu_moe_token_permute_with_routing_map_grad",),
        call=_call_permute_map,
    ),
    _entry(
        _unpermute_map_tensors,
        _unpermute_map,
        {"y": _SUM, "d permuted_tokens": _SUM, "d probs": _DOT},
        ("y",),
        name="npu_moe_token_unpermute_with_routing_map",
        formula="y[t] = Σ over the rows r of t of probs[t, e of r] · permuted[r]",
        shapes="permuted_tokens [O, H], sorted_indices [O], probs and routing_map [T, E] -> [T, H]",
        backward=("npu_moe_token_unpermute_with_routing_map_grad",),
        doc="docs/ops/npu_moe_token_permute_with_routing_map.md",
        call=_call_unpermute_map,
    ),
    _entry(
        _init_tensors,
        _init,
        {"expanded_x": _MOVED, "d x": _SUM},
        ("expanded_x",),
        lambda tokens, top_k, experts: {"active_num": tokens - tokens // 3},
        name="npu_moe_init_routing",
        formula="expanded_x[r] = x[src[r] mod n],  src = row_idx in the order of the expert ids",
        shapes="x [n, H], row_idx and expert_idx [n, K] -> [min(active_num, n) K, H], [n K], [n K]",
        backward=("moe_init_routing_grad",),
        call=lambda *t, active_num=1 << 30: ops.npu_moe_init_routing(*t, active_num),
    ),
    _entry(
        _init_v2_tensors,
        _init_v2,
        {"expanded_x": _MOVED, "d x": _SUM},
        ("expanded_x",),
        lambda tokens, top_k, experts: {"expert_num": experts},
        name="npu_moe_init_routing_v2",
        formula="expanded_x[r] = x[order[r] / K],  order = stable argsort of the active expert ids",
        shapes="x [n, H], expert_idx [n, K] -> [n K, H] or [E, C, H], [n K], counts, scales",
        backward=("moe_init_routing_grad",),
        doc=_ROUTING_PAGE,
        call=lambda *t, expert_num=256: ops.npu_moe_init_routing_v2(*t, expert_num=expert_num),
    ),
    _entry(
        _finalize_tensors,
        _finalize,
        dict.fromkeys(
            ("y", "d expanded_permuted_rows", "d skip1", "d skip2", "d bias"),
            Bound(half=0.51, single=1.0, double=1.0, terms=16.0),
        )
        | {"d scales": _DOT},
        ("y",),
        name="npu_moe_finalize_routing",
        formula="y[t] = skip1[t] + skip2[t] + Σ over k of scales[t, k] · (rows[m(t, k)] + bias[e(t, k)])",
        shapes="rows [.., H], skips [n, H], bias [E, H], scales [n, K] -> [n, H]",
        backward=("moe_finalize_routing_grad",),
        doc=_ROUTING_PAGE,
    ),
    _entry(
        _re_tensors,
        _re,
        {"permuted": _MOVED, "d tokens": _MOVED},
        ("permuted",),
        name="npu_moe_re_routing",
        formula="permuted[r] = tokens[idx[r]]: blocks by (rank, expert) to blocks by (expert, rank)",
        shapes="tokens [A, H], expert_token_num_per_rank [N, E] -> [A, H], [A], idx [A], [E]",
        backward=("moe_re_routing_grad",),
        doc=_ROUTING_PAGE,
    ),
)
