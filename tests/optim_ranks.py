"""Two processes for test_optim_distributed.py: `python optim_ranks.py RANK STORE_FILE`; prints what rank 0 found."""

from __future__ import annotations

import copy
import json
import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from jumar.optim import AdamW, clip_grad_norm_

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))  # sizes that do not divide


def sharded():
    model = build()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward(model, step):
    torch.manual_seed(step)
    x = torch.randn(8, 6)
    if isinstance(next(model.parameters()), DTensor):
        x = x.chunk(2)[rank]
    model.zero_grad()
    model(x).square().mean().backward()


def difference(a, b):
    return max((whole(p) - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


found: dict = {}
for norm_type in (1.0, 2.0, 3.0, math.inf):
    model, plain = sharded(), build()
    optimizers = [AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)]
    norms = []
    for step in range(4):
        backward(model, step)
        backward(plain, step)
        ours = clip_grad_norm_(model.parameters(), 0.1, norm_type)
        right = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        assert not isinstance(ours, DTensor)
        norms.append(abs(ours.item() / right.item() - 1))
        for optimizer in optimizers:
            optimizer.step()
    found[f"norm {norm_type}"] = max(norms)
    found[f"weights {norm_type}"] = difference(model, plain)

# NaN on one process reaches all, also where the largest is taken.
backward(model, 0)
if rank == 1:
    next(model.parameters()).grad.to_local()[0, 0] = math.nan
found["nan"] = [clip_grad_norm_(model.parameters(), 1.0, p).isnan().item() for p in (2.0, math.inf)]

# State to torch's optimizer and back, whole and sharded.
options = StateDictOptions(full_state_dict=True)
backward(model, 1)
optimizers[0].step()
for full in (None, options):
    # Copies: states that are loaded share memory with what they came from.
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizers[0], options=full))
    other = sharded()
    other.load_state_dict(model.state_dict())
    theirs = torch.optim.AdamW(other.parameters(), lr=3.0)
    set_optimizer_state_dict(other, theirs, state, options=full)
    third = sharded()
    third.load_state_dict(model.state_dict())
    again = AdamW(third.parameters(), lr=3.0)
    state = copy.deepcopy(get_optimizer_state_dict(other, theirs, options=full))
    set_optimizer_state_dict(third, again, state, options=full)
    results = []
    for m, o in ((other, theirs), (third, again)):
        backward(m, 2)
        o.step()
        results.append([whole(p).clone() for p in m.parameters()])
    found[f"state {full is not None}"] = max(
        (a - b).abs().max().item() for a, b in zip(*results, strict=True)
    )

# Replicated, sharded and partial gradients of one model; a parameter whose gradient is placed otherwise.
values = torch.arange(12.0).view(4, 3) / 7
places = {"shard": Shard(0), "replicate": Replicate(), "partial": Partial()}
params = []
for name, place in places.items():
    spread = Replicate() if name == "partial" else place
    p = nn.Parameter(distribute_tensor(values.clone(), mesh, [spread]))
    if name == "partial":
        p.grad = DTensor.from_local(values / 2, mesh, [Partial()])
    else:
        p.grad = distribute_tensor(values.clone(), mesh, [place])
    params.append(p)
norm = clip_grad_norm_(params, 1.0)
found["placements"] = abs(norm.item() / (3 * values.square().sum()).sqrt().item() - 1)
found["scaled"] = max((whole(p.grad) - values / norm).abs().max().item() for p in params)
AdamW(params).step()
expected = nn.Parameter(values.clone())
expected.grad = values / norm
torch.optim.AdamW([expected]).step()
found["stepped"] = max((whole(p) - expected).abs().max().item() for p in params)

# Half precision with copies, sharded.
half = build().bfloat16()
for layer in (half[0], half[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(half, mesh=mesh)
optimizer = AdamW(half.parameters(), master_weights=True)
for p in half.parameters():
    p.grad = torch.ones_like(p)
optimizer.step()
found["master"] = all(
    isinstance(s["master_param"], DTensor) and torch.equal(whole(s["master_param"]).bfloat16(), whole(p))
    for p, s in optimizer.state.items()
)
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
