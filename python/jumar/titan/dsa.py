"""torchtitan's form of DeepSeek sparse attention on fused operators."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torchtitan.models.common.attention import VarlenMetadata

from jumar import dsa
from jumar.titan.deepseek_v32.model import SparseAttention
from jumar.titan.nodes import Converter


class FusedSparseAttention(SparseAttention):
    """The indexer by ``npu_lightning_indexer``, attention by ``npu_sparse_flash_attention`` on latent keys.

    In the stage ``warmup``, dense attention by ``npu_fusion_attention``. Packed documents are sequences of a packed layout.
    The indexer's loss is that of the operators, computed in the backward pass.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SparseAttention.Config):
        pass

    def forward(
        self,
        query: tuple[Tensor, Tensor],
        latent: Tensor,
        k_pe: Tensor,
        wkv_b: nn.Module,
        index: dsa.Index,
        documents: VarlenMetadata | None,
        scale: float,
    ) -> Tensor:
        ends = None if documents is None else documents.cu_seq_q_host[1:]
        rows = dsa.layout(len(latent), ends)
        index = tuple(rows.rows(t) for t in dsa.autocast(index))
        if self.stage == "sparse":
            weight = dsa.weight_of(wkv_b, latent.shape[-1], latent)
            result = dsa.sparse_attention(query, latent, k_pe, weight, index, self.topk, scale, rows)
        else:
            result = dsa.dense_attention(*self.expand(query, latent, k_pe, wkv_b), scale, rows)
        return self.learn(*result, index, latent[..., 0].numel())


CONVERTER = Converter(
    "npu_dsa",
    "npu_sparse_flash_attention or npu_fusion_attention",
    SparseAttention.Config,
    {SparseAttention.Config: FusedSparseAttention.Config},
)
