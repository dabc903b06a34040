"""What converted experts run: rows sorted by expert, grouped products, and the way back, fused as far as asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jumar import ops
from jumar.hf import experts as layouts

_plain_now = torch.compiler.assume_constant_result(layouts.plain_now)


def _each(rows: Tensor, counts: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """``expert`` on the rows of each expert that has some; rows past the last expert's become zero."""
    sizes = counts.tolist()
    parts = rows.split([*sizes, len(rows) - sum(sizes)])
    done = [expert(e, part) if len(part) else part for e, part in enumerate(parts[:-1])]
    return torch.cat([*done, torch.zeros_like(parts[-1])])


class StackedExperts:
    """Experts in two tensors: ``gate_up`` [E, H, 2I] and ``down`` [E, I, H], views of the module's parameters."""

    def __init__(self, module: nn.Module, key: layouts.Stacked):
        gate_up, down = module.gate_up_proj, module.down_proj
        if not key.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self.gate_up, self.down = gate_up, down
        self.count = gate_up.shape[0]

    def plain(self) -> bool:
        """Weights are all that there is."""
        return True

    def to_weights(self, x: Tensor) -> Tensor:
        """Hidden states in the weights' type, as transformers' grouped implementation takes them."""
        return x.to(self.gate_up.dtype)

    def fused(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Everything in one operator."""
        return ops.moe_ffn(x, indices, weights, self.gate_up, self.down)

    def grouped(self, rows: Tensor, counts: Tensor) -> Tensor:
        """down(silu(gate) * up) of sorted rows by grouped products."""
        packed = ops.grouped_matmul(rows, self.gate_up, counts, group_list_type=1)
        return ops.grouped_matmul(ops.npu_swiglu(packed, -1), self.down, counts, group_list_type=1)

    def eager(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The same, expert by expert, by torch."""

        def expert(index: int, part: Tensor) -> Tensor:
            gate, up = (part @ self.gate_up[index]).chunk(2, -1)
            return (F.silu(gate) * up) @ self.down[index]

        return _each(rows, counts, expert)


class ListedExperts:
    """Experts that are modules; their weights are used where they lie."""

    def __init__(self, modules: Sequence[nn.Module], names: tuple[str, ...]):
        self.modules, self.names = modules, names
        self.count = len(modules)

    def to_weights(self, x: Tensor) -> Tensor:
        return x

    def plain(self) -> bool:
        """Whether the experts are their weights and no more, at this moment."""
        return _plain_now(self.modules, self.names)

    def _used(self, counts: Tensor) -> tuple[list[int], list[list[Tensor]]]:
        """Experts that have rows, and their matrices gate, up, down.

        The others take no part and get no gradient, as in the loop that this stands for.
        """
        hit = [index for index, size in enumerate(counts.tolist()) if size]
        used = [layouts.projections(self.modules[index], self.names) for index in hit]
        return hit, [[p.weight.t() for p in column] for column in zip(*used, strict=True)]

    def fused(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Everything in one operator."""
        hit, used = self._used(ops.expert_counts(indices, self.count))
        if not hit:
            return torch.zeros_like(x)
        gate, up, down = used
        places = torch.zeros(self.count, dtype=torch.int64, device=indices.device)
        places[hit] = torch.arange(len(hit), device=indices.device)
        return ops.moe_ffn(x, places[indices], weights, gate, down, up)

    def grouped(self, rows: Tensor, counts: Tensor) -> Tensor:
        """down(silu(gate) * up) of sorted rows by grouped products."""
        if not self.plain():
            return self.eager(rows, counts)
        hit, used = self._used(counts)
        if not hit:
            return torch.zeros_like(rows)
        gate, up, down = used
        sizes = counts[hit]
        gated = ops.swiglu_gate_up(
            ops.grouped_matmul(rows, gate, sizes, group_list_type=1),
            ops.grouped_matmul(rows, up, sizes, group_list_type=1),
        )
        return ops.grouped_matmul(gated, down, sizes, group_list_type=1)

    def eager(self, rows: Tensor, counts: Tensor) -> Tensor:
        return _each(rows, counts, lambda index, part: self.modules[index](part))


def combine(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: StackedExperts | ListedExperts,
    *,
    gmm: bool,
    permute: bool,
) -> Tensor:
    """[T, H]: the sum over k of weights[t, k] * expert indices[t, k] of x[t].

    An index equal to the number of experts adds nothing: expert-parallel ranks mark foreign experts so.
    """
    dtype, rows = x.dtype, experts.to_weights(x)
    if gmm and permute and experts.plain():
        return experts.fused(rows, indices, weights).to(dtype)
    counts = ops.expert_counts(indices, experts.count)
    compute = experts.grouped if gmm else experts.eager
    if permute:
        rows, places = ops.npu_moe_token_permute(rows, indices)
        return ops.npu_moe_token_unpermute(compute(rows, counts), places, weights).to(dtype)
    order = indices.flatten().argsort(stable=True)
    done = compute(rows[order // indices.shape[1]], counts) * weights.flatten()[order, None]
    return done[order.argsort()].view(*indices.shape, -1).sum(1).to(dtype)
