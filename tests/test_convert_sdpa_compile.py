"""``npu_sdpa`` under ``torch.compile``."""

from __future__ import annotations

import pytest
import torch

import jumar
from op_util import assert_ulp

pytest.importorskip("transformers")

from sdpa_util import NAME, qwen3


def test_compiles():
    model = qwen3().eval()
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    jumar.convert(model, NAME)
    want = model(input_ids=ids, use_cache=False).logits
    got = torch.compile(model, backend="aot_eager")(input_ids=ids, use_cache=False).logits
    assert_ulp(got, want.double(), 8.0, floor=1e-6)
