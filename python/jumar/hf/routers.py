"""Recognise routers: modules of one weight that score every expert for every token and choose the best few."""

from __future__ import annotations

import copy as copies
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jumar.convert.verdict import Match, Miss, Verdict
from jumar.hf import experts, probe

EXPERTS, GROUPS, TOP_K, TOKENS = 8, 4, 3, 6
SIZES = {
    **{name: EXPERTS for name, size in experts.SIZES.items() if size == experts.EXPERTS},
    **{name: size for name, size in experts.SIZES.items() if size == experts.HIDDEN},
    "top_k": TOP_K,
    "n_group": GROUPS,
    "num_group": GROUPS,
    "topk_group": 2,
}


class Rule(NamedTuple):
    """How a router chooses.  Names are attributes of the module; None where it has no such thing.

    ``renorm``: the weights are made to sum to 1, or the attribute that says so.  ``fill``: what choices outside the kept
    groups become (None: -inf).  ``wide_logits``: logits and all after them in fp32.  ``wide_weights``: weights in fp32
    though logits are not.  ``logits_first``: returns (logits, weights, indices), otherwise (indices, weights).
    """

    scoring: str
    renorm: bool | str
    group: str | None
    bias: str | None
    scale: str | None
    fill: float | None
    wide_logits: bool
    wide_weights: bool
    logits_first: bool

    def options(self, module: nn.Module) -> dict[str, Any]:
        """Keyword arguments of ``router_top_k`` for this module."""
        grouped = self.group is not None
        return {
            "scoring": self.scoring,
            "renorm": getattr(module, self.renorm) if isinstance(self.renorm, str) else self.renorm,
            "bias": module._buffers[self.bias] if self.bias else None,
            "n_group": getattr(module, self.group) if grouped else 1,
            "topk_group": module.topk_group if grouped else 1,
            "scale": float(getattr(module, self.scale)) if self.scale else 1.0,
            "eps": 1e-20 if self.scoring == "sigmoid" else 0.0,
            "group_fill": self.fill,
            "wide_weights": self.wide_weights,
        }


def stand_in(
    module: nn.Module, renorm: bool, sign: float, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The router with a small random weight; ``sign`` shifts the bias so that choices lie above or below zero."""
    weight = probe.randn(EXPERTS, experts.HIDDEN, seed=71, dtype=dtype)
    copy = probe.stand_in(module, parameters={"weight": weight})
    experts.set_sizes(copy, SIZES)
    config = copy.__dict__.get("config")
    if hasattr(config, "hidden_size"):
        copy.__dict__["config"] = config = copies.copy(config)
        config.hidden_size = experts.HIDDEN
    for name, buffer in copy._buffers.items():
        if buffer is not None:
            copy._buffers[name] = 0.4 * probe.randn(EXPERTS, seed=72) + sign
    for name in ("norm_topk_prob",):
        if isinstance(copy.__dict__.get(name), bool):
            copy.__dict__[name] = renorm
    if isinstance(copy.__dict__.get("routed_scaling_factor"), int | float):
        copy.__dict__["routed_scaling_factor"] = 1.7
    return copy


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    """The trial's hidden states."""
    return probe.randn(2, TOKENS // 2, experts.HIDDEN, seed=73, dtype=dtype)


def split(out: Any) -> tuple[Tensor | None, Tensor, Tensor] | None:
    """(logits, weights, indices) of what a router returned, by what they are; None for anything else."""
    if not isinstance(out, tuple) or not all(isinstance(t, Tensor) for t in out):
        return None
    if len(out) == 3:
        logits, weights, indices = out
    elif len(out) == 2:
        (indices, weights), logits = out, None
    else:
        return None
    shape = (TOKENS, TOP_K)
    if weights.shape != shape or indices.shape != shape or indices.dtype != torch.int64:
        return None
    if logits is not None and logits.shape != (TOKENS, EXPERTS):
        return None
    return logits, weights, indices


def _reference(rule: Rule, copy: nn.Module) -> Tensor:
    """[T, E]: the weights by the rule, in fp64."""
    options = rule.options(copy)
    logits = tokens().double().view(-1, experts.HIDDEN) @ copy.weight.double().T
    scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    choice = scores if options["bias"] is None else scores + options["bias"].double()
    if options["n_group"] > 1:
        groups = choice.view(TOKENS, options["n_group"], -1)
        kept = groups.topk(2, -1)[0].sum(-1).topk(options["topk_group"], -1)[1]
        dropped = torch.ones(groups.shape[:2], device="cpu").scatter(1, kept, 0.0).bool()
        fill = float("-inf") if rule.fill is None else rule.fill
        choice = groups.masked_fill(dropped[..., None], fill).view(TOKENS, EXPERTS)
    indices = choice.topk(TOP_K, -1)[1]
    weights = scores.gather(1, indices)
    if options["renorm"]:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts.densely(indices, weights * options["scale"], EXPERTS)


def _rules(module: nn.Module, logits_first: bool) -> Iterator[Rule]:
    def attribute(name: str, kind: type) -> str | None:
        return name if isinstance(module.__dict__.get(name), kind) else None

    group = attribute("n_group", int) or attribute("num_group", int)
    scale = attribute("routed_scaling_factor", int | float)
    buffers = [name for name, buffer in module._buffers.items() if buffer is not None]
    bias = buffers[0] if len(buffers) == 1 else None
    flag = attribute("norm_topk_prob", bool)
    for scoring, renorm, fill in itertools.product(
        ("softmax", "sigmoid"),
        (*([flag] if flag else []), True, False),
        (None, 0.0) if group else (None,),
    ):
        yield Rule(scoring, renorm, group, bias, scale, fill, False, False, logits_first)


def _obeys(rule: Rule, runs: list) -> bool:
    for copy, out in runs:
        logits, weights, indices = out
        if not probe.same(experts.densely(indices, weights, EXPERTS), _reference(rule, copy)):
            return False
        exact = tokens().double().view(-1, experts.HIDDEN) @ copy.weight.double().T
        if logits is not None and not probe.same(logits, exact):
            return False
    return True


def recognise(module: nn.Module) -> Verdict:
    """Match with a :class:`Rule`, a Miss for routers of another kind, None for anything else."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not isinstance(module.__dict__.get("top_k"), int):
        return None
    if any(m is not None for m in module._modules.values()) or len(module._parameters) != 1:
        return Miss("has other parameters or children than one weight")
    arguments = probe.tensor_arguments(type(module))
    if arguments is None or len(arguments[0]) != 1 or arguments[1]:
        return Miss("its forward takes other arguments than (hidden_states)")
    runs = []
    try:
        for renorm, sign in itertools.product((True, False), (-2.0, 0.0, 2.0)):
            copy = stand_in(module, renorm, sign)
            copy.__dict__["training"] = renorm
            out = split(probe.run(copy, tokens()))
            if out is None:
                return Miss("returns neither (logits, weights, indices) nor (indices, weights)")
            runs.append((copy, out))
        rule = next(
            (r for r in _rules(module, out[0] is not None) if _obeys(r, runs)), None
        )
        if rule is None:
            return Miss("chooses experts by another rule")
        half = torch.bfloat16
        logits, weights, _ = split(probe.run(stand_in(module, True, 0.0, half), tokens(half)))
    except probe.ProbeFailed as error:
        return Miss(str(error))
    wide_logits = (weights if logits is None else logits).dtype == torch.float32
    wide_weights = weights.dtype == torch.float32 and not wide_logits
    return Match("router_top_k", rule._replace(wide_logits=wide_logits, wide_weights=wide_weights))
