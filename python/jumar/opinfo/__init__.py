"""What is known of each operator outside of its kernel: formula, error bounds, test data, traffic.

``jumar ops``, ``jumar verify``, ``jumar bench`` and the README's operator table all read this one table.
"""

from __future__ import annotations

import torch

from jumar.opinfo.spec import (
    DTYPES,
    MULTIPLIES,
    STREAMS,
    Bound,
    Case,
    OpInfo,
    Target,
    Value,
    dtype_name,
    each,
    flat,
    parse_dtype,
)
from jumar.opinfo.table import OPERATORS
from jumar.spelling import unknown

#: Operators that serve the package itself and have no entry of their own.
TOOLS = {"ulp_error": ("max |actual - expected| / (ulp(expected) + slack)", "docs/verification.md")}
#: Operators that another one or jumar.optim calls.
PARTS = {
    "grouped_matmul": ("y[t] = x[t] · W[g] + b[g],  g the group of row t", "docs/ops/grouped_matmul.md"),
    "grouped_matmul_list": ("grouped_matmul of a list of weights", "docs/ops/grouped_matmul.md"),
    "grouped_matmul_add_": ("dW[g] += xᵀ · dy, over the rows of group g", "docs/ops/npu_grouped_matmul.md"),
    "head_matmul": ("grouped_matmul of the heads of an attention", "docs/ops/grouped_matmul.md"),
    "head_matmul_dgrad": ("gradient of head_matmul", "docs/ops/grouped_matmul.md"),
    "head_matmul_wgrad": ("gradient of head_matmul", "docs/ops/grouped_matmul.md"),
    "separate_matmul": ("y[i] = x[i] · W[i] + b[i]", "docs/ops/grouped_matmul.md"),
    "npu_grouped_matmul_add": ("input[g] + xᵀ · weight, over the rows of group g", "docs/ops/npu_grouped_matmul.md"),
    "npu_grouped_matmul_add_": ("npu_grouped_matmul_add in place", "docs/ops/npu_grouped_matmul.md"),
    "expert_bias_update": ("bias + d - mean d,  d = rate · sign(mean of tokens - tokens)", "docs/ops/balance.md"),
    "moe_gating_top_k": ("npu_moe_gating_top_k", "docs/ops/npu_moe_gating_top_k.md"),
    "moe_gating_top_k_softmax_v2": (
        "npu_moe_gating_top_k_softmax_v2",
        "docs/ops/npu_moe_gating_top_k_softmax.md",
    ),
    "expert_counts": ("how many ids name each expert", "docs/ops/npu_moe_token_permute.md"),
    "_npu_moe_token_unpermute": (
        "npu_moe_token_unpermute with a second, empty result",
        "docs/ops/npu_moe_token_permute.md",
    ),
    "moe_permute_map": (
        "the body of npu_moe_token_permute_with_routing_map",
        "docs/ops/npu_moe_token_permute_with_routing_map.md",
    ),
    "moe_unpermute_map": (
        "the body of npu_moe_token_unpermute_with_routing_map",
        "docs/ops/npu_moe_token_permute_with_routing_map.md",
    ),
    "_npu_moe_token_unpermute_with_routing_map": (
        "npu_moe_token_unpermute_with_routing_map with what its gradient takes",
        "docs/ops/npu_moe_token_permute_with_routing_map.md",
    ),
    "moe_init_routing_v2": ("the body of npu_moe_init_routing_v2", "docs/ops/npu_moe_init_routing.md"),
    "moe_re_routing": ("the body of npu_moe_re_routing", "docs/ops/npu_moe_init_routing.md"),
    "npu_interleave_rope": ("npu_rotary_mul, neighbours in and halves out", "docs/ops/npu_rotary_mul.md"),
    "fusion_attention_v2": ("the body of npu_fusion_attention_v2", "docs/ops/npu_fusion_attention.md"),
    "scaled_masked_softmax": ("the body of npu_scaled_masked_softmax", "docs/ops/npu_scaled_masked_softmax.md"),
    "sparse_attention": ("the body of npu_sparse_flash_attention", "docs/ops/npu_sparse_flash_attention.md"),
    "lightning_indexer": ("the body of npu_lightning_indexer", "docs/ops/npu_lightning_indexer.md"),
    "apply_adam_w_": ("the body of npu_apply_adam_w", "docs/ops/npu_apply_adam_w.md"),
    "grad_power_sums": ("Σ |x|^p over lists of tensors, for clip_grad_norm_", "docs/optim.md"),
    "scale_grads_": ("x = x · factor for lists of tensors, for clip_grad_norm_", "docs/optim.md"),
}


def schemas() -> dict[str, str]:
    """Every operator that is registered in ``torch.ops.jumar`` and its schema, by name."""
    names = {
        name.removeprefix("jumar::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("jumar::")
    }
    return {
        name: str(getattr(torch.ops.jumar, name).default._schema).removeprefix("jumar::")
        for name in sorted(names)
    }


def forward_of(backward: str) -> OpInfo | None:
    """The operator whose gradient ``backward`` computes."""
    owners = [info for info in OPERATORS.values() if backward in info.backward]
    return owners[0] if owners else None


def describe(name: str) -> tuple[str, str]:
    """(formula, docs page) of any registered operator; empty strings for one without an entry."""
    if name in OPERATORS:
        return OPERATORS[name].formula, OPERATORS[name].doc
    if name in TOOLS or name in PARTS:
        return {**TOOLS, **PARTS}[name]
    owner = forward_of(name)
    return (f"gradient of {owner.name}", owner.doc) if owner else ("", "")


def find(name: str) -> OpInfo:
    """The entry of an operator. ValueError, with the nearest name, when there is none."""
    if name not in OPERATORS:
        raise ValueError(unknown("operator", name, OPERATORS))
    return OPERATORS[name]


def markdown_table() -> str:
    """The operator table of the README."""
    lines = ["| operator | computes | gradient | page |", "|---|---|---|---|"]
    for info in OPERATORS.values():
        gradient = ", ".join(f"`{name}`" for name in info.backward)
        formula = info.formula.replace("|", "\\|")
        lines.append(f"| `{info.name}` | {formula} | {gradient} | [{info.doc}]({info.doc}) |")
    return "\n".join(lines) + "\n"


__all__ = [
    "DTYPES",
    "MULTIPLIES",
    "OPERATORS",
    "PARTS",
    "STREAMS",
    "TOOLS",
    "Bound",
    "Case",
    "OpInfo",
    "Target",
    "Value",
    "describe",
    "dtype_name",
    "each",
    "find",
    "flat",
    "forward_of",
    "markdown_table",
    "parse_dtype",
    "schemas",
]
