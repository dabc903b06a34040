"""DeepSeek-V3.2's weights by the names that transformers gives them."""

from __future__ import annotations

from typing import Any

from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter

_INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")


class DeepSeekV32StateDictAdapter(DeepSeekV3StateDictAdapter):
    """DeepSeek-V3's, and the indexers' weights, which have the same names on both sides."""

    def __init__(self, model_config: Any, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        for name in _INDEXER:
            theirs = f"model.layers.{{}}.self_attn.indexer.{name}"
            self.from_hf_map[theirs] = f"layers.{{}}.attention.indexer.{name}"
