"""The entry of the experts in one operator: formula, data, bounds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from jumar import ops
from jumar.opinfo.cases import Source, layouts
from jumar.opinfo.grouped import GROUPS, rows_of_groups
from jumar.opinfo.spec import Bound, Case, OpInfo, Shape


def _plain(
    hidden: Tensor, ids: Tensor, probs: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor]:
    """The loop over experts that models run."""
    y = torch.zeros_like(hidden)
    for e in range(gate_up.shape[0]):
        token, k = torch.where(ids == e)
        gate, up = (hidden[token] @ gate_up[e]).chunk(2, -1)
        rows = (F.silu(gate) * up) @ down[e]
        y = y.index_add(0, token, (rows * probs[token, k, None]).to(y.dtype))
    return (y,)


def _terms(t: dict[str, Tensor], grads: list[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """How far roundings are carried, in units of one of the compute type.

    Of sums (with the root of their terms), of h, g and u as they are stored, and of their gradients.
    """
    narrow = {torch.bfloat16: 2.0**15, torch.float16: 2.0**12}.get(dtype, 1.0)
    x, ids, probs, w, down = t["hidden"], t["ids"], t["probs"].abs(), t["gate_up"], t["down"]
    dy, inner = grads[0].abs(), down.shape[1]
    outer, width = x.shape[1] ** 0.5, inner**0.5
    out = {
        "y": torch.zeros_like(x),
        "d hidden": torch.zeros_like(x),
        "d probs": torch.zeros_like(probs),
        "d gate_up": torch.zeros_like(w),
        "d down": torch.zeros_like(down),
    }
    for e in range(w.shape[0]):
        token, k = torch.where(ids == e)
        rows, p, m = x[token], probs[token, k, None], down[e].abs()
        tall = max(1, len(token)) ** 0.5
        gate, up = (rows @ w[e]).chunk(2, -1)
        off_gate, off_up = (rows.abs() @ w[e].abs() * (outer + 2)).chunk(2, -1)
        s = gate.sigmoid()
        silu, up_size = gate.abs() * s, up.abs()
        h = silu * up_size
        off_h = 1.1 * off_gate * up_size + silu * off_up + (narrow + 4) * h
        out["y"].index_add_(0, token, p * ((off_h + h * (width + 4)) @ m))
        off_gate, off_up = off_gate + narrow * gate.abs(), off_up + narrow * up_size
        off_h = 1.1 * off_gate * up_size + silu * off_up + (narrow + 4) * h
        g = dy[token]
        d = g @ m.mT
        off_d = d * (outer + 2)
        out["d probs"][token, k] = (d * off_h + h * (off_d + d * width)).sum(-1)
        slope = s * (1 + gate.abs() * (1 - s))
        size = p * torch.cat([d * slope * up_size, d * silu], -1)
        off = p * torch.cat(
            [d * (slope * off_up + 0.5 * up_size * off_gate), d * 1.1 * off_gate], -1
        )
        off = off + (outer + 2 + narrow + 8) * size
        out["d gate_up"][e] = rows.abs().mT @ (off + size * tall)
        out["d down"][e] = (p * (off_h + h * (narrow + tall))).mT @ g
        out["d hidden"].index_add_(0, token, (off + size * (2 * width + 4)) @ w[e].abs().mT)
    return out


def _routed(source: Source, sizes: list[int], top_k: int) -> Tensor:
    """Ids [T, K] in no order, each expert as often as ``sizes`` says; what follows the last is no expert."""
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return ids[torch.randperm(len(ids), generator=source.generator)].reshape(-1, top_k)


def _cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """(slots of each expert and of none, top_k, hidden, inner)"""
    for sizes, k, h, n in (
        ((0, 0, 0), 1, 4, 4),
        ((1, 0), 1, 1, 1),
        ((6, 0, 3, 3), 3, 7, 5),
        ((20, 5, 0, 1, 4), 2, 33, 17),
        ((40, 9, 0, 30, 1), 4, 65, 140),
    ):
        source = Source(dtype, seed + h + n)
        ids = _routed(source, list(sizes), k)
        experts = len(sizes) - 1
        tensors = {
            "hidden": source.rows(ids.shape[0], h),
            "ids": ids,
            "probs": source.normal(
                *ids.shape, dtype=None if dtype == torch.float64 else torch.float32
            ).abs(),
            "gate_up": source.normal(experts, h, 2 * n, scale=h**-0.5),
            "down": source.normal(experts, n, h, scale=n**-0.5),
        }
        case = Case(
            f"{ids.shape[0]} tokens to {k} of {experts}, {h} -> {n}",
            tensors,
            {},
            [source.normal(ids.shape[0], h)],
        )
        yield case
        if n == 140:
            yield from layouts(case)


def _bench(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    source = Source(dtype, 1)
    t, k, h, n, experts = (shape[key] for key in ("tokens", "top_k", "hidden", "inner", "experts"))
    ids = _routed(source, rows_of_groups(t * k, experts, bool(shape["zipf"])), k)
    return {
        "hidden": source.normal(t, h),
        "ids": ids,
        "probs": torch.rand(t, k, generator=source.generator).to(
            torch.promote_types(dtype, torch.float32)
        ),
        "gate_up": source.normal(experts, 2 * n, h, scale=h**-0.5).mT,  # as models store it
        "down": source.normal(experts, h, n, scale=n**-0.5).mT,
    }


ENTRIES = (
    OpInfo(
        name="moe_ffn",
        formula="y[t] = Σₖ p[t, k] · (silu(x[t] · gate[e]) · (x[t] · up[e])) · down[e],  e = ids[t, k]",
        shapes="hidden [T, H], ids and probs [T, K], gate_up [E, H, 2I], down [E, I, H] -> [T, H]",
        backward=("moe_ffn_backward",),
        bounds=dict.fromkeys(
            ("y", "d hidden", "d probs", "d gate_up", "d down"),
            Bound(half=1.0, single=1.0, double=1.0, terms=2.0),
        ),
        plain=_plain,
        terms=_terms,
        cases=_cases,
        bench=_bench,
        call=ops.moe_ffn,
        target=GROUPS,
    ),
)
