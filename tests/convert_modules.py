"""Modules that several converter tests share."""

from __future__ import annotations

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
