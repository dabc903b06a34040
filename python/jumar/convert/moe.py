"""``npu_gmm``, ``npu_permute`` and ``npu_router``: the experts of a mixture and what chooses among them.

The first two convert the same modules and stack: each alone takes over its part and leaves the rest to torch, and a
class that has both runs one operator from hidden states to hidden states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from jumar import ops
from jumar.convert import swap
from jumar.convert.experts import ListedExperts, StackedExperts, combine
from jumar.convert.registry import ModuleConverter, register
from jumar.convert.report import Site
from jumar.convert.verdict import Match, Verdict
from jumar.convert.verify import Trial
from jumar.hf import experts as layouts
from jumar.hf import probe, routers


def _names(name: str, base: type) -> set[str]:
    """The converters on ``base``, and ``name`` on top."""
    conversion = getattr(base, "__jumar__", None)
    return {name, *(patch.converter for patch in (conversion.patches if conversion else ()))}


def _parts(names: set[str]) -> dict[str, bool]:
    """Which parts of a mixture these converters take over."""
    return {"gmm": "npu_gmm" in names, "permute": "npu_permute" in names}


def _stacked_forward(key: layouts.Stacked, parts: dict[str, bool]) -> Callable:
    def forward(self, hidden_states, top_k_index, top_k_weights):
        experts = StackedExperts(self, key)
        return combine(hidden_states, top_k_index, top_k_weights, experts, **parts)

    def dense_forward(self, hidden_states, routing_weights, router_indices):
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights = routing_weights.gather(1, router_indices)
        out = combine(rows, router_indices, weights, StackedExperts(self, key), **parts)
        return out.view(hidden_states.shape[0], -1, hidden_states.shape[-1])

    return dense_forward if key.dense else forward


def _moe_method(key: layouts.Listed, parts: dict[str, bool]) -> Callable:
    def moe(self, hidden_states, topk_indices, topk_weights):
        experts = ListedExperts(self.experts, key.names)
        return combine(hidden_states, topk_indices, topk_weights, experts, **parts)

    return moe


def _choose(logits: Tensor, top_k: int, renorm: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weights, indices = torch.topk(logits.softmax(1, dtype=torch.float), top_k, dim=-1)
    if renorm:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype), indices


def _choose_fused(logits: Tensor, top_k: int, renorm: bool, dtype: torch.dtype):
    weights, indices, _ = ops.router_top_k(logits, top_k, renorm=renorm, wide_weights=True)
    return weights.to(dtype), indices


def _block_forward(key: layouts.Block, parts: dict[str, bool], router: bool) -> Callable:
    choose = _choose_fused if router else _choose

    def forward(self, hidden_states):
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(rows)
        renorm = getattr(self, key.renorm) if isinstance(key.renorm, str) else key.renorm
        weights, indices = choose(logits, self.top_k, renorm, rows.dtype)
        if key.names is None:
            dense = layouts.densely(indices, weights, logits.shape[1])
            batch = rows.view(hidden_states.shape[0], -1, rows.shape[1])
            return self.experts(batch, dense, indices), logits
        out = combine(rows, indices, weights, ListedExperts(self.experts, key.names), **parts)
        if key.shared:
            out = out + torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return out.view(hidden_states.shape), logits

    return forward


def _block_namespace(name: str, key: layouts.Block, base: type) -> dict:
    names = _names(name, base)
    forward = _block_forward(key, _parts(names), "npu_router" in names)
    return {"forward": probe.adopt_signature(forward, base)}


def _block_trial(module: nn.Module, key: layouts.Block, cls: type) -> Callable:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        children = layouts.block_children(key)
        if key.names:
            children["experts"] = layouts.tiny_experts(module, key.names)
        copy = probe.stand_in(module, children=children)
        layouts.set_sizes(copy, {**layouts.SIZES, "top_k": layouts.TOP_K})
        copy.__class__ = cls
        return cls.forward(copy, x)

    return run


class _ExpertsConverter(ModuleConverter):
    """What the two converters of experts share."""

    #: Operators one of which runs.
    alternatives: tuple[str, ...]

    def recognise(self, module: nn.Module) -> Verdict:
        verdict = layouts.recognise(module)
        # Which one runs is settled when both converters have had their turn.
        either = " or ".join(self.alternatives)
        return dataclasses.replace(verdict, operator=either) if verdict else None

    def namespace(self, key: tuple, base: type) -> dict:
        if isinstance(key, layouts.Block):
            return _block_namespace(self.name, key, base)
        parts = _parts(_names(self.name, base))
        if isinstance(key, layouts.Listed):
            return {"moe": _moe_method(key, parts)}
        return {"forward": probe.adopt_signature(_stacked_forward(key, parts), base)}

    def trials(self, site: Site) -> Iterable[Trial]:
        """The converter alone, and with its sister."""
        module, patch = site.action.module, site.action.patch
        sister = swap.Patch("npu_permute" if self.name == "npu_gmm" else "npu_gmm", "", patch.key)
        alone = swap.patched_class(module, patch)
        conversion = swap.conversion_of(module)
        patches = conversion.patches if conversion else ()
        both = swap.converted_class(swap.original_class(module), (*patches, patch, sister))
        for cls in (alone, both):
            yield self._trial(module, patch.key, cls)

    def _trial(self, module: nn.Module, key: tuple, cls: type) -> Trial:
        if isinstance(key, layouts.Block):
            run = (_block_trial(module, key, c) for c in (type(module), cls))
            return Trial(*run, (probe.randn(2, 3, layouts.HIDDEN, seed=63),))
        x, indices, weights = layouts.routing(seed=43)
        if isinstance(key, layouts.Listed):

            def moe(c: type) -> Callable:
                copy = layouts.listed_trial(module, layouts.tiny_experts(module, key.names))
                return lambda x, weights: c.moe(copy, x, indices, weights)

            return Trial(moe(type(module)), moe(cls), (x, weights))

        def stacked(c: type) -> Callable:
            def run(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
                copy = probe.stand_in(module)
                layouts.set_sizes(copy, layouts.SIZES)
                copy._parameters.update(gate_up_proj=gate_up, down_proj=down)
                copy.__class__ = c
                return c.forward(copy, *layouts.arguments(key, x, indices, weights))

            return run

        parameters = layouts.stacked_weights(key, seed=41).values()
        return Trial(stacked(type(module)), stacked(cls), (x, weights, *parameters))


class GroupedMatmulConverter(_ExpertsConverter):
    name = "npu_gmm"
    aliases = ("gmm", "moe_experts")
    operators = ("grouped_matmul", "moe_ffn")
    alternatives = ("grouped_matmul", "grouped_matmul_list", "moe_ffn")
    summary = "the products of experts, stacked or a module each"


class PermuteConverter(_ExpertsConverter):
    name = "npu_permute"
    aliases = ("permute",)
    operators = ("npu_moe_token_permute", "npu_moe_token_unpermute", "moe_ffn")
    alternatives = ("npu_moe_token_permute", "moe_ffn")
    summary = "the sorting of tokens by expert, and the weighted sum of what the experts give"


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _router_forward(rule: routers.Rule) -> Callable:
    def forward(self, hidden_states):
        weight = self.weight
        rows = hidden_states.reshape(-1, weight.shape[-1])
        if rule.wide_logits:
            rows, weight = _wide(rows), _wide(weight)
        logits = ops.npu_linear(rows, weight)
        weights, indices, _ = ops.router_top_k(logits, self.top_k, **rule.options(self))
        return (logits, weights, indices) if rule.logits_first else (indices, weights)

    return forward


class RouterConverter(ModuleConverter):
    name = "npu_router"
    aliases = ("router",)
    operators = ("router_top_k",)
    summary = "routers: the scores of all experts, the choice of the best, their weights"

    def recognise(self, module: nn.Module) -> Verdict:
        verdict = layouts.recognise_routing_block(module)
        if isinstance(verdict, Match):
            verdict = dataclasses.replace(verdict, operator=self.operators[0])
        return routers.recognise(module) if verdict is None else verdict

    def namespace(self, key: tuple, base: type) -> dict:
        if isinstance(key, layouts.Block):
            return _block_namespace(self.name, key, base)
        return {"forward": probe.adopt_signature(_router_forward(key), base)}

    def trials(self, site: Site) -> Iterable[Trial]:
        module, patch = site.action.module, site.action.patch
        classes = (type(module), swap.patched_class(module, patch))
        if isinstance(patch.key, layouts.Block):
            run = (_block_trial(module, patch.key, cls) for cls in classes)
            yield Trial(*run, (probe.randn(2, 3, layouts.HIDDEN, seed=63),))
            return

        def scores(cls: type) -> Callable:
            def run(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
                copy = routers.stand_in(module, renorm=True, sign=0.0)
                copy._parameters["weight"] = weight
                copy.__class__ = cls
                logits, weights, indices = routers.split(cls.forward(copy, x))
                dense = layouts.densely(indices, weights, routers.EXPERTS)
                return (dense,) if logits is None else (logits, dense)

            return run

        weight = routers.stand_in(module, renorm=True, sign=0.0).weight.detach()
        yield Trial(*(scores(cls) for cls in classes), (routers.tokens(), weight))


for _converter in (GroupedMatmulConverter(), PermuteConverter(), RouterConverter()):
    register(_converter)
