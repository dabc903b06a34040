"""The modules of DeepSeek-V3.2: torchtitan's DeepSeek-V3 with an indexer in every attention."""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import VarlenMetadata, create_varlen_metadata_for_document
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.deepseek_v3.model import Attention, DeepSeekV3Model
from torchtitan.protocols.module import Module

from jumar import dsa
from jumar.titan.deepseek_v32 import eager


class Indexer(Module):
    """Scores every key for every query: ``I[s, t] = sum over h of w[s, h] relu(q[s, h] k[t])``.

    It gives the parts of the scores. Its queries come from the attention's low-rank ones, its one head of keys, normed,
    from the hidden states; the first ``rope_dim`` of both are rotated, in halves, where the attention rotates pairs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_heads: int
        head_dim: int
        wq_b: Linear.Config
        wk: Linear.Config
        k_norm: LayerNorm.Config
        weights_proj: Linear.Config
        rope: CosSinRoPE.Config

    def __init__(self, config: Config):
        super().__init__()
        self.n_heads, self.head_dim, self.rope_dim = config.n_heads, config.head_dim, config.rope.dim
        self.wq_b = config.wq_b.build()
        self.wk = config.wk.build()
        self.k_norm = config.k_norm.build()
        self.weights_proj = config.weights_proj.build()
        self.rope = config.rope.build()

    def forward(self, x: Tensor, q_resid: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(q [B, S, H, D], k [B, S, 1, D], w [B, S, H]); w carries the scale of the scores and is not of 16 bits."""
        q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.k_norm(self.wk(x)).unsqueeze(2)
        rest = self.head_dim - self.rope_dim
        (q_pe, q_rest), (k_pe, k_rest) = (t.split([self.rope_dim, rest], dim=-1) for t in (q, k))
        q_pe, k_pe = self.rope(q_pe, k_pe, positions)
        w = eager.wide(self.weights_proj(x)) * (self.n_heads * self.head_dim) ** -0.5
        return torch.cat([q_pe, q_rest], dim=-1), torch.cat([k_pe, k_rest], dim=-1), w


class SparseAttention(Module):
    """Attention over the ``topk`` keys that the indexer scores highest, and the indexer's loss.

    In the stage ``warmup`` the attention is over all keys, and the indexer learns from all of them.

    Attributes:
        meter: the indexer's loss, summed over queries.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        topk: int
        stage: Literal["sparse", "warmup"] = "sparse"
        loss_coeff: float = 1.0
        """Weight of the indexer's loss, which is a mean over queries; 0: the indexer does not learn."""
        step_queries: int = 0
        """Queries of a step over all ranks, the divisor of that mean; 0: those of a forward pass."""

    def __init__(self, config: Config):
        super().__init__()
        self.topk, self.stage, self.scale = config.topk, config.stage, 0.0
        self.loss_coeff, self.step_queries = config.loss_coeff, config.step_queries
        self.meter = dsa.Meter()

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
        """The heads' outputs [B, S, N, Dv].

        Args:
            query: without and with positions, [B, S, N, Dn] and [B, S, N, Dr].
            latent: the compressed keys and values, normed, [B, S, R].
            k_pe: the key part with positions, one for all heads, [B, S, 1, Dr].
            wkv_b: makes every head's key without positions, and its value, of the latent.
            index: the indexer's queries, keys and weights.
            documents: where packed documents begin; None: every row is one.
            scale: of the scores before the softmax.
        """
        q, key, value = self.expand(query, latent, k_pe, wkv_b)
        batch, length = q.shape[:2]
        ends = None if documents is None else documents.cu_seq_k[1:]
        seen = eager.visible(batch, length, ends, q.device)
        chosen = seen
        if self.stage == "sparse":
            with torch.no_grad():
                chosen = eager.choose(eager.scores(*index), seen, self.topk)
        out = eager.attention(q, key, value, chosen, scale)
        kl = functools.partial(eager.kl, scale=scale)
        return self.learn(out, (q, key, chosen), kl, index, batch * length)

    @staticmethod
    def expand(
        query: tuple[Tensor, Tensor], latent: Tensor, k_pe: Tensor, wkv_b: nn.Module
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Every head's queries, keys and values, [B, S, N, Dn + Dr] twice and [B, S, N, Dv]."""
        heads, nope = query[0].shape[-2:]
        kv = wkv_b(latent).unflatten(-1, (heads, -1))
        k_nope, value = kv.split([nope, kv.shape[-1] - nope], dim=-1)
        key = torch.cat([k_nope, k_pe.expand(-1, -1, heads, -1)], dim=-1)
        return torch.cat(query, dim=-1), key, value

    def learn(self, out: Tensor, constants: tuple, kl: Any, index: dsa.Index, queries: int) -> Tensor:
        """``out``, which carries the indexer's loss over so many queries; see :func:`jumar.dsa.learn`."""
        if not (self.training and self.loss_coeff):
            return out
        factor = self.loss_coeff / (self.step_queries or queries)
        return dsa.learn(out, constants, kl, index, factor, self.meter)


class DeepSeekV32Attention(Attention):
    """Multi-head latent attention whose keys are chosen by an indexer, which sees its inputs detached."""

    @dataclass(kw_only=True, slots=True)
    class Config(Attention.Config):
        indexer: Indexer.Config
        inner_attention: SparseAttention.Config

    def __init__(self, config: Config):
        if config.q_lora_rank == 0:
            raise ValueError("DeepSeek-V3.2: the indexer needs low-rank queries, q_lora_rank is 0")
        super().__init__(config)
        self.indexer = config.indexer.build()

    def forward(self, x: Tensor, attention_masks: VarlenMetadata | None, positions: Tensor | None = None) -> Tensor:
        q_resid = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_resid).unflatten(-1, (-1, self.qk_head_dim))
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, k_pe = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        q_pe, k_pe = self.rope(q_pe, k_pe.unsqueeze(2), positions)
        index = self.indexer(x.detach(), q_resid.detach(), positions)
        out = self.inner_attention(
            (q_nope, q_pe), self.kv_norm(latent), k_pe, self.wkv_b, index, attention_masks, self.softmax_scale
        )
        return self.wo(out.flatten(2))


def _step_queries(config: Any) -> int:
    """Queries of a step over all ranks, of a ``Trainer.Config``."""
    training, parallelism = config.training, config.parallelism
    sequences = training.global_batch_size
    if sequences < 0:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        sequences = training.local_batch_size * world // parallelism.pipeline_parallel_degree
    return sequences * training.seq_len


class DeepSeekV32Model(DeepSeekV3Model):
    """DeepSeek-V3.2. In the stage ``warmup`` all but its indexers is frozen."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3Model.Config):
        @property
        def stage(self) -> str:
            """``sparse`` or ``warmup``."""
            return self.layers[0].attention.inner_attention.stage

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """torchtitan's, with the indexers' positions and the divisor of their loss.

            Raises:
                NotImplementedError: tensor or context parallelism, or compilation of the model, is asked for.
            """
            for name in ("tensor", "context"):
                degree = getattr(config.parallelism, f"{name}_parallel_degree")
                if degree > 1:
                    raise NotImplementedError(
                        f"deepseek_v32 has no {name} parallelism, its degree is {degree}; "
                        f"set parallelism.{name}_parallel_degree to 1 and share the work out by data_parallel_shard_degree, "
                        "expert_parallel_degree or pipeline_parallel_degree"
                    )
            compilation = getattr(config, "compile", None)
            if compilation is not None and compilation.enable and "model" in compilation.components:
                raise NotImplementedError(
                    "deepseek_v32 is not compiled: the indexers' loss is added up in the backward pass; "
                    f"compile.components are {', '.join(compilation.components)}; leave out model"
                )
            DeepSeekV3Model.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                attention = layer.attention
                # The one of DeepSeek-V3 names other arguments, and serves tensor parallelism alone.
                attention.inner_attention.sharding_config = None
                attention.indexer.rope = dataclasses.replace(
                    attention.indexer.rope, max_seq_len=attention.rope.max_seq_len
                )
                if hasattr(config, "training"):
                    attention.inner_attention.step_queries = _step_queries(config)

    def __init__(self, config: Config):
        super().__init__(config)
        if config.stage == "warmup":
            dsa.freeze_others(self)

    def get_attention_masks(self, positions: Tensor) -> VarlenMetadata:
        """Where documents begin: at every position 0."""
        return create_varlen_metadata_for_document(positions, include_host_offsets=True)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, attention_masks: VarlenMetadata | None = None
    ) -> Tensor:
        if attention_masks is None and positions is not None:
            # The trainer makes masks for torchtitan's own kinds of attention alone.
            attention_masks = self.get_attention_masks(positions)
        return super().forward(tokens, positions, attention_masks)
