"""Modules that several converter tests share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self, act=F.silu):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12, bias=False)
        self.down_proj = nn.Linear(12, 8)
        self.act = act

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.eps = 1e-6

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = Norm(), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
