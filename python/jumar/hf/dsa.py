"""Attention with an indexer: DeepSeek-V3.2's in transformers, and the inner attention of torchtitan-npu's own model."""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jumar import dsa
from jumar.convert.verdict import Match, Miss, Verdict
from jumar.hf import forwards, probe, traced_masks
from jumar.hf import masks as hf_masks
from jumar.hf.masks import LazyMask
from jumar.hf.traced_masks import TracedMask
from jumar.masks import ranges

_OPERATOR = "npu_sparse_flash_attention"
_ROTATE_PAIRS, _ROTATE_HALVES = "apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb"
#: What a conversion calls the attention, by what the configuration has named: for its masks, which are made compressed.
FUSED = {"sdpa": "npu_dsa_for_sdpa"}
#: The library's forward, under the name that the replacement keeps it by.
PLAIN = "_jumar_plain_forward"
#: Where a module keeps what makes its indexer learn.
LEARNING = "_jumar_learning"

_PROJECTIONS = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
_INDEXER = ("wq_b", "wk", "k_norm", "weights_proj")
_NUMBERS = ("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "kv_lora_rank", "scaling", "layer_idx")
_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask", "cache", "position_ids", "kwargs")
_INNER = ("q", "k", "v", "attn_mask", "scale", "q_indexer", "k_indexer", "weights", "end_pos", "index_topk")


@dataclass
class Learning:
    """How the indexer of a module learns: see :func:`jumar.convert.dsa.train_indexers`."""

    meter: dsa.Meter
    coeff: float
    stage: str
    step_queries: int | None


def _arguments(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


def recognise(module: nn.Module) -> Verdict:
    """Whether a module is DeepSeek-V3.2's attention, by its parts and by what its forward takes and calls."""
    if hasattr(module, "compute_dsa_indexer_loss"):
        takes = _arguments(type(module).forward)
        latent = hasattr(getattr(module, "config", None), "kv_lora_rank")
        return Match(_OPERATOR, ("inner",)) if takes == _INNER and latent else Miss(f"its forward takes {takes}")
    children = module._modules
    indexer = children.get("indexer")
    if indexer is None or not {"kv_a_proj_with_mqa", "kv_b_proj"} <= children.keys():
        return None
    missing = [n for n in _PROJECTIONS if n not in children]
    missing += [f"indexer.{n}" for n in _INDEXER if n not in indexer._modules]
    missing += [n for n in _NUMBERS if not isinstance(getattr(module, n, None), int | float)]
    if missing:
        return Miss(f"it has no {', '.join(missing)}")
    forward = getattr(type(module), PLAIN, type(module).forward)
    takes = _arguments(inspect.unwrap(forward))
    if takes != _ARGUMENTS:
        return Miss(f"its forward takes ({', '.join(takes)})")
    rotations = [(forward, _ROTATE_PAIRS, "its"), (type(indexer).forward, _ROTATE_HALVES, "its indexer's")]
    for method, name, whose in rotations:
        if name not in forwards.globals_used(method):
            return Miss(f"{whose} forward does not call {name}")
    if getattr(module, "attention_dropout", 0):
        return Miss("it has dropout")
    if module.config._attn_implementation not in ("eager", "sdpa", *FUSED.values()):
        return Miss(f"its attention is {module.config._attn_implementation!r}")
    return _compared(module, forward)


_TINY = {"hidden_size": 10, "num_heads": 2, "q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4}
_TINY |= {"qk_rope_head_dim": 4, "qk_head_dim": 8, "v_head_dim": 3, "num_key_value_groups": 1}
_TINY_INDEXER = {"n_heads": 9, "head_dim": 8, "index_topk": 4, "hidden_size": 10, "q_lora_rank": 6, "qk_rope_head_dim": 4}


def tiny(module: nn.Module) -> nn.Module:
    """A copy of an attention with few small heads and random weights, which chooses four keys a query."""
    seeds = itertools.count()

    def linear(like: nn.Module, inputs: int, outputs: int) -> nn.Module:
        layer = nn.Linear(inputs, outputs, bias=getattr(like, "bias", None) is not None)
        for parameter in layer.parameters():
            parameter.data = probe.randn(*parameter.shape, seed=next(seeds)) - 0.3
        return layer

    def norm(like: nn.Module, width: int) -> nn.Module:
        names = [n for n, p in like._parameters.items() if p is not None]
        copy = probe.stand_in(like, {n: probe.randn(width, seed=next(seeds)) for n in names})
        if isinstance(like, nn.LayerNorm):
            copy.normalized_shape = (width,)
        return copy

    children, indexer = module._modules, module.indexer._modules
    parts = {
        "wq_b": linear(indexer["wq_b"], 6, 72),
        "wk": linear(indexer["wk"], 10, 8),
        "k_norm": norm(indexer["k_norm"], 8),
        "weights_proj": linear(indexer["weights_proj"], 10, 9),
    }
    small = probe.stand_in(module.indexer, children=parts)
    small.__dict__.update(_TINY_INDEXER, softmax_scale=module.indexer.softmax_scale)
    parts = {
        "q_a_proj": linear(children["q_a_proj"], 10, 6),
        "q_a_layernorm": norm(children["q_a_layernorm"], 6),
        "q_b_proj": linear(children["q_b_proj"], 6, 16),
        "kv_a_proj_with_mqa": linear(children["kv_a_proj_with_mqa"], 10, 9),
        "kv_a_layernorm": norm(children["kv_a_layernorm"], 5),
        "kv_b_proj": linear(children["kv_b_proj"], 5, 14),
        "o_proj": linear(children["o_proj"], 6, 10),
        "indexer": small,
    }
    copy = probe.stand_in(module, children=parts)
    copy.__dict__.update(_TINY)
    return copy


def trial_inputs(module: nn.Module) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Hidden states, rotary tables and the causal mask for a :func:`tiny` attention."""
    length = 9
    angles = torch.arange(length)[:, None] / torch.tensor([1.0, 10.0])
    tables = tuple(t.repeat(2, 1, 2) for t in (angles.cos(), angles.sin()))
    mask = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    if module.config._attn_implementation == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return probe.randn(2, length, 10, seed=100), tables, mask


def _compared(module: nn.Module, forward: Any) -> Verdict:
    """The verdict on a module that looks right: its own forward on a few small heads, beside the operators."""
    with probe.quiet():
        try:
            copy, inputs = tiny(module), trial_inputs(module)
            expected = forward(copy, *inputs)[0]
            copy.__class__ = type("Tiny", (type(module),), {PLAIN: forward})
            same = probe.same(attention_forward(copy, *inputs)[0], expected, 1e-5)
        except Exception as error:  # whatever a look-alike makes of it
            return Miss(probe.describe(error))
    return Match(_OPERATOR, ("attention",)) if same else Miss("its forward computes something else")


def _global(method: Any, name: str) -> Any:
    """What a method calls by a name; in words that Dynamo knows."""
    while hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method.__globals__[name]


def rows_of(mask: Tensor | TracedMask, learns: bool) -> dsa.Layout | None:
    """How rows lie whose visible keys a mask says, None where they are no causal sequences; ``learns``: in numbers.

    In a compiled graph what is known of the mask is enough; where numbers are needed, the graph ends here.
    """
    if not isinstance(mask, TracedMask):
        return _rows_once(mask)
    if learns or mask.before is not None or mask.after != 0:
        return _rows_once(mask.value())
    if mask.padding is not None:
        return _rows_before_padding(mask.padding[:, 0, 0])
    return dsa.Layout(mask.ends, mask.ends)


def _rows_before_padding(hidden: Tensor) -> dsa.Layout:
    """Rows whose tokens, but for those that are hidden, bool [B, S], are a sequence each: the hidden ones come last.

    Behind each sequence there is one of queries that see nothing, and one of keys that nobody sees.
    """
    batch, length = hidden.shape
    end = torch.arange(1, batch + 1, device=hidden.device) * length
    seen = end - hidden.sum(1)
    ends, key_ends = (torch.stack(t, 1).flatten() for t in ((seen, end, end), (seen, seen, end)))
    return dsa.Layout(ends, key_ends, hidden.to(torch.uint8).argsort(stable=True, dim=1))


@torch.compiler.disable
def _rows_once(mask: Tensor) -> dsa.Layout | None:
    """How rows lie whose visible keys a mask [B, 1, S, T] says; None where they are no causal sequences.

    Tokens whose key nobody sees are padding: they see nothing. A mask is looked at once for all layers, and again when it
    was written to.
    """
    if isinstance(mask, LazyMask):
        if mask.changed:
            return _rows_of(mask.value()[:, 0])
        known = mask.plan.__dict__
        if "_jumar_rows" not in known:
            known["_jumar_rows"] = _layout(mask.plan.ranges.first, mask.plan.ranges.last, mask.plan.ranges.keys)
        return known["_jumar_rows"]
    if mask.is_inference():  # counts no writes
        return _rows_of(mask[:, 0])
    version, rows = getattr(mask, "_jumar_rows", (None, None))
    if version != mask._version:
        rows = _rows_of(mask[:, 0])
        mask._jumar_rows = (mask._version, rows)
    return rows


def _rows_of(mask: Tensor) -> dsa.Layout | None:
    visible = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        return None  # a bias
    found = ranges.from_visible(visible)
    if found is None:
        return None
    return _layout(*found, visible.shape[2])


def _layout(first: Tensor, last: Tensor, keys: int) -> dsa.Layout | None:
    """How rows lie that see the keys [first, last), int64 [B, S] on the CPU."""
    batch, queries = first.shape
    if queries == keys:
        # Keys that nobody sees: as many ranges have ended there as have begun.
        changes = torch.zeros(batch, keys + 1, dtype=torch.int64)
        changes.scatter_add_(1, first, torch.ones_like(first)).scatter_add_(1, last, -torch.ones_like(last))
        last = torch.where(changes.cumsum(1)[:, :-1] > 0, last, first)
    calls = ranges.calls(ranges.Ranges(first, last, keys))
    if calls is None or len(calls) != 1 or calls[0].window is not None or not (calls[0].causal or queries == 1):
        return None
    return dsa.layout(batch, calls[0].query_ends, calls[0].key_ends)


def _index(
    attention: nn.Module, hidden: Tensor, q_resid: Tensor, tables: tuple[Tensor, Tensor], cache: Any
) -> dsa.Index:
    """The indexer's queries [B, S, H, D], keys [B, T, 1, D] and weights [B, S, H], with the scale of its scores."""
    indexer = attention.indexer
    sizes = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    (q_pe, q_rest), (k_pe, k_rest) = q.split(sizes, -1), k.split(sizes, -1)
    rotate = _global(type(indexer).forward, _ROTATE_HALVES)
    q_pe, k_pe = rotate(q_pe, k_pe, *tables, unsqueeze_dim=2)
    q, k = torch.cat([q_pe, q_rest], -1), torch.cat([k_pe, k_rest], -1)
    if cache is not None:
        k = cache.update_indexer(k.squeeze(2), attention.layer_idx).unsqueeze(2)
    w = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    return q, k, w.to(torch.promote_types(w.dtype, torch.float32)) * (indexer.n_heads**-0.5 * indexer.softmax_scale)


def attention_forward(
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: Any = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention on latent keys; where its mask is not of sequences, what the library does."""
    cache = kwargs.pop("past_key_values", None) if cache is None else cache
    learning = self.__dict__.get(LEARNING)
    learns = learning is not None and self.training and torch.is_grad_enabled()
    dense = learning is not None and learning.stage == "warmup"
    rows = None if attention_mask is None else rows_of(attention_mask, learns or dense)
    if rows is None or kwargs.get("output_attentions"):
        if learns or dense:
            what = "output_attentions" if rows is not None else "an attention mask that is not of causal sequences"
            raise NotImplementedError(
                f"npu_dsa: indexers that learn have no form for {what}; leave it out, or train_indexers"
            )
        return getattr(self, PLAIN)(
            hidden_states, position_embeddings, attention_mask, cache=cache, position_ids=position_ids, **kwargs
        )
    q_resid = self.q_a_layernorm(self.q_a_proj(hidden_states))
    q = self.q_b_proj(q_resid).unflatten(-1, (-1, self.qk_head_dim))
    q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    latent, k_pe = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    latent = self.kv_a_layernorm(latent)
    rotate = _global(getattr(type(self), PLAIN), _ROTATE_PAIRS)
    q_pe, k_pe = rotate(q_pe, k_pe.unsqueeze(2), *position_embeddings, unsqueeze_dim=2)
    with torch.set_grad_enabled(learns):
        index = _index(self, hidden_states.detach(), q_resid.detach(), position_embeddings, cache)
        index = tuple(rows.rows(t) for t in dsa.autocast(index))
    if cache is not None:
        latent, k_pe = (t.squeeze(1) for t in cache.update(latent.unsqueeze(1), k_pe.transpose(1, 2), self.layer_idx))
        k_pe = k_pe.unsqueeze(2)
    if dense:
        key, value = self.expand_kv(latent.unsqueeze(1), k_pe.transpose(1, 2))
        result = dsa.dense_attention(
            torch.cat([q_nope, q_pe], -1), key.transpose(1, 2), value.transpose(1, 2), self.scaling, rows
        )
    else:
        weight = dsa.weight_of(self.kv_b_proj, self.kv_lora_rank, latent)
        topk = self.indexer.index_topk
        result = dsa.sparse_attention((q_nope, q_pe), latent, k_pe, weight, index, topk, self.scaling, rows)
    out, constants, kl = result
    if learns:
        out = _learn(out, constants, kl, index, learning, hidden_states[..., 0].numel())
    return self.o_proj(out.flatten(2)), None


# Between graphs: the divisor may be another one in every step, and the meter adds up in the backward pass.
@torch.compiler.disable
def _learn(
    out: Tensor, constants: tuple[Tensor, ...], kl: dsa.Kl, index: dsa.Index, learning: Learning, queries: int
) -> Tensor:
    factor = learning.coeff / (learning.step_queries or queries)
    return dsa.learn(out, constants, kl, index, factor, learning.meter)


def inner_forward(
    self: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    q_indexer: Tensor | None = None,
    k_indexer: Tensor | None = None,
    weights: Tensor | None = None,
    end_pos: Any = None,
    index_topk: Any = None,
) -> tuple[Tensor, Tensor]:
    """(mean loss of the indexer, output [B, N, S, R]) of queries and one key [B, N or 1, S, R + Dr] in latent space.

    The loss is the real one, and its gradients those of the operator. Keys that are not latent, a mask, or no indexer:
    what the library does.
    """
    if q_indexer is None or attn_mask is not None or k.shape[1] != 1 or v.shape[1] != 1:
        return getattr(self, PLAIN)(q, k, v, attn_mask, scale, q_indexer, k_indexer, weights, end_pos, index_topk)
    sizes = [self.config.kv_lora_rank, self.config.qk_rope_head_dim]
    (query, q_pe), (key, k_pe) = (t.transpose(1, 2).split(sizes, -1) for t in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    index = dsa.autocast((q_indexer, k_indexer, weights))
    out, constants, kl = dsa.latent_attention(
        query, key, v.transpose(1, 2), q_pe, k_pe, index, int(index_topk), scale, dsa.Layout()
    )
    loss = dsa.loss(constants, kl, index) / weights[..., 0].numel()
    return loss, out.transpose(1, 2)


FORWARDS = {"attention": attention_forward, "inner": inner_forward}


def namespace(kind: str, base: type) -> dict[str, Any]:
    """The attributes of the replacement of a class: its forward, and the library's under another name."""
    forward = FORWARDS[kind]
    if kind == "attention":
        _register()

    @functools.wraps(forward)
    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return {"forward": fused, PLAIN: base.forward}


def _plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, indices: Tensor, **rest: Any
) -> tuple[Tensor, None]:
    """What the library's forward calls by a name of :data:`FUSED`: its ``sdpa`` over the chosen keys."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    shape = (query.shape[0], 1, query.shape[2], key.shape[2])
    chosen = torch.zeros(shape, dtype=torch.bool, device=query.device).scatter(-1, indices[:, None].long(), True)
    if mask.dtype == torch.bool:
        mask = mask & chosen
    else:
        mask = mask.masked_fill(~chosen, torch.finfo(query.dtype).min)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **rest)


@functools.cache
def _register() -> None:
    """Makes the names of :data:`FUSED` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in FUSED.values():
        AttentionInterface.register(name, _plain_attention)
        AttentionMaskInterface.register(name, hf_masks.attention_mask)
    traced_masks.register()
