"""Attention over all keys from attention over parts of them. See docs/ops/npu_ring_attention_update.md."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from jumar.ops._wiring import calls_operator, compute_dtype, forbid_autograd, register_fake


@calls_operator
def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Merges two parts of attention, given by their outputs and statistics, as a ring of processes does step by step.

    Args:
        prev_attn_out, cur_attn_out: [S, B, N * D], or [T, N, D] for ``input_layout="TND"``.
        prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum: those of :func:`npu_fusion_attention`:
            [B, N, S, 8], for TND [T, N, 8]; fp32 (fp64 for fp64).
        actual_seq_qlen: int64, needed for TND; the lengths themselves do not matter.
        input_softmax_layout: ``softmax_layout`` of the calls that made the statistics.

    Returns:
        (attn_out, softmax_max, softmax_sum) of both together. Not differentiable: the gradient of each part comes from
        ``npu_fusion_attention_grad`` with the merged results.
    """


@calls_operator
def npu_attention_update(
    lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int
) -> tuple[Tensor, Tensor]:
    """Merges any number of parts, given by their outputs and log-sum-exps.

    Args:
        lse: fp32 (fp64 for fp64) [M] each; minus infinity for a row that saw no key.
        local_out: [M, D] each.
        update_type: 1 to return the log-sum-exp of all parts, 0 not to.

    Returns:
        (out [M, D], lse [M] or an empty tensor). Not differentiable.
    """


def _ring_fake(out: Tensor, maximum: Tensor, total: Tensor, *_: Tensor, **__: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (out, maximum, total))


def _update_fake(lse: list[Tensor], parts: list[Tensor], update_type: int) -> tuple[Tensor, Tensor]:
    rows = parts[0].shape[:1] if update_type == 1 else (0,)
    return parts[0].new_empty(parts[0].shape), parts[0].new_empty(
        rows, dtype=compute_dtype(parts[0].dtype)
    )


for _name, _fake in (("npu_ring_attention_update", _ring_fake), ("npu_attention_update", _update_fake)):
    register_fake(_name, _fake)
    forbid_autograd(_name)
