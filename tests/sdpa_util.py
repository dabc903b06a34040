"""What the tests of ``npu_sdpa`` on transformers models share: a tiny model, its step, comparisons."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import masking_utils

from jumar.hf import masks
from op_util import assert_ulp

NAME = ["npu_sdpa"]
PACKED = torch.tensor([[*range(5), *range(1), *range(6)], [*range(3), *range(9)]])


def qwen3(**more):
    settings = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings | more))


def run(model, **inputs):
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(ours, theirs, floor=0.0, relative=1e-5):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert_ulp(a, b.double(), 8.0, floor=max(floor, relative * b.abs().max().item()))


def lazy_only(monkeypatch):
    """Fails where a mask is made as a matrix."""
    monkeypatch.setattr(masks.LazyMask, "value", lambda self: pytest.fail("a matrix was made"))
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda **_: pytest.fail("a matrix was made"))


def error(tensors, exact):
    """Distances of tensors from exact ones, relative to those, added up."""
    pairs = zip(tensors, exact, strict=True)
    return sum(float((t.double() - e).norm() / e.norm()) for t, e in pairs if e.norm() > 1e-6)


def _neighbours(model, seed):
    """A copy whose parameters are each the next number up or down."""
    gen, other = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            up = torch.rand(p.shape, generator=gen) < 0.5
            p.copy_(torch.where(up, p.nextafter(p + torch.inf), p.nextafter(p - torch.inf)))
    return other


def spreads(model, tensors, **inputs):
    """How far one ulp in its parameters moves each of a model's results: the largest difference in two draws."""
    moved = [run(_neighbours(model, seed), **inputs) for seed in range(2)]
    return [max((a - b).abs().max().item() for a in others) for b, *others in zip(tensors, *moved, strict=True)]
