"""Two processes for test_op_attention_update.py: `python ring_ranks.py RANK STORE_FILE`; prints what rank 0 found.

Each holds half of the queries and half of the keys. Keys go round; parts are merged by npu_ring_attention_update, and in
backward each step's npu_fusion_attention_grad gets the merged results.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from attention_ref import CAUSAL_MASK
from jumar import ops

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)

ROWS, HEADS, KV, SIZE, VALUE = 150, 4, 2, 16, 8
generator = torch.Generator().manual_seed(0)
shapes = (
    (2 * ROWS, HEADS, SIZE),
    (2 * ROWS, KV, SIZE),
    (2 * ROWS, KV, VALUE),
    (2 * ROWS, HEADS, VALUE),
)
whole = [torch.randn(s, generator=generator) for s in shapes]
q, k, v, dy = (x[rank * ROWS : (rank + 1) * ROWS] for x in whole)
lists = {"actual_seq_qlen": [ROWS], "actual_seq_kvlen": [ROWS], "softmax_layout": "TND"}


def rule(owner: int) -> dict | None:
    """How the queries of this rank see the keys of `owner`: all, causally, or not at all."""
    if owner > rank:
        return None
    return {"sparse_mode": 3, "atten_mask": CAUSAL_MASK} if owner == rank else {}


def exchange(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.contiguous())
    return parts[1 - rank]


keys, values = {rank: k, 1 - rank: exchange(k)}, {rank: v, 1 - rank: exchange(v)}
state = [
    torch.zeros(ROWS, HEADS, VALUE),
    torch.full((ROWS, HEADS, 8), -torch.inf),
    torch.zeros(ROWS, HEADS, 8),
]
for step in range(2):
    owner = (rank - step) % 2
    if rule(owner) is not None:
        part = ops.npu_fusion_attention(
            q, keys[owner], values[owner], HEADS, "TND", scale=0.3, **lists, **rule(owner)
        )[:3]
        state = ops.npu_ring_attention_update(
            *state,
            *part,
            actual_seq_qlen=torch.tensor([ROWS]),
            input_layout="TND",
            input_softmax_layout="TND",
        )
out, maximum, total = state
dq = torch.zeros_like(q)
dk, dv = ({owner: torch.zeros_like(x) for owner in range(2)} for x in (k, v))
for owner in range(2):
    if rule(owner) is not None:
        grads = ops.npu_fusion_attention_grad(
            q, keys[owner], values[owner], dy, HEADS, "TND", softmax_max=maximum, softmax_sum=total,
            attention_in=out, scale_value=0.3, **lists, **rule(owner),
        )  # fmt: skip
        dq += grads[0]
        dk[owner], dv[owner] = grads[1:3]
own = [dq, dk[rank] + exchange(dk[1 - rank]), dv[rank] + exchange(dv[1 - rank])]

leaves = [x.double().requires_grad_() for x in whole[:3]]
ends = {"actual_seq_qlen": [2 * ROWS], "actual_seq_kvlen": [2 * ROWS], "softmax_layout": "TND"}
results = ops.npu_fusion_attention(
    *leaves, HEADS, "TND", scale=0.3, sparse_mode=3, atten_mask=CAUSAL_MASK, **ends
)
exact = [*results[:3], *torch.autograd.grad(results[0], leaves, whole[3].double())]
mine = [out, maximum, total, *own]
errors = [
    ((x.double() - e[rank * ROWS : (rank + 1) * ROWS]).abs().max() / e.abs().max()).item()
    for x, e in zip(mine, exact, strict=True)
]
both = [None, None]
dist.all_gather_object(both, errors)
if rank == 0:
    print(json.dumps(both))
dist.destroy_process_group()
