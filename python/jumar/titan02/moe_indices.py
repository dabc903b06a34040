"""The token order of torchtitan 0.2.x's experts without its Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_permute_indices(
    tokens_per_expert_group: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
    use_cpu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each row of the expert-ordered input comes from.

    Args:
        tokens_per_expert_group: [ranks * experts] token counts, ordered by rank, then expert.
        experts_per_rank: experts on this rank.
        num_ranks: ranks that send tokens.
        max_len: length of the result.
        alignment: each expert's share is rounded up to a multiple of this, and is at least this.
        use_cpu: accepted; there is one form only.

    Returns:
        int32 [max_len] source rows, -1 for padding; int32 [experts] padded sizes; their int32 running sums.
    """
    del use_cpu
    counts = tokens_per_expert_group.to(torch.int64).cpu()
    starts = counts.cumsum(0) - counts
    by_expert = counts.view(num_ranks, experts_per_rank).T
    sizes = by_expert.sum(1).clamp_min(alignment)
    sizes = (sizes + alignment - 1) // alignment * alignment
    ends = sizes.cumsum(0)
    # Every (expert, rank) block: where it is written, where it is read, how long it is.
    lengths = by_expert.reshape(-1)
    writes = ((ends - sizes).unsqueeze(1) + by_expert.cumsum(1) - by_expert).reshape(-1)
    reads = starts.view(num_ranks, experts_per_rank).T.reshape(-1)
    within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    target = writes.repeat_interleave(lengths) + within
    source = reads.repeat_interleave(lengths) + within
    indices = torch.full((max_len,), -1, dtype=torch.int32)
    kept = target < max_len
    indices[target[kept]] = source[kept].to(torch.int32)
    device = tokens_per_expert_group.device
    return indices.to(device), sizes.to(device, torch.int32), ends.to(device, torch.int32)
