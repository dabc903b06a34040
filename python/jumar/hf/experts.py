"""Recognise the experts of a mixture: stacked weights, one module each in a list, and blocks that route themselves.

What is asked is how the class uses its weights, never which shape they happen to have: the class's own code is run on
weights whose sizes are all different.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jumar.convert import swap
from jumar.convert.verdict import Match, Miss, Verdict
from jumar.hf import heads, mlp, probe

UNKNOWN = "unknown experts layout"
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: the fused one among the implementations of transformers' ``ExpertsInterface``: :mod:`jumar.hf.interface`
FUSED = "npu_gmm"
#: implementations that compute what the class's own forward does
_IMPLEMENTATIONS = (None, "eager", "grouped_mm", "batched_mm", FUSED)

EXPERTS, HIDDEN, INNER, TOKENS, TOP_K = 4, 8, 12, 5, 2
#: what the trial's sizes are called in model libraries
SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    **dict.fromkeys(("hidden_size", "hidden_dim"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "intermediate_dim", "moe_intermediate_size", "expert_dim"), INNER
    ),
}


class Stacked(NamedTuple):
    """``gate_up_proj`` and ``down_proj`` of all experts in one tensor each.

    ``transposed``: [E, H, 2I] and [E, I, H], used as x · W; otherwise [E, 2I, H] and [E, H, I], used as x · Wᵀ.
    ``dense``: forward(x, weights [T, E], indices) of transformers 4.57, not (x, indices, weights [T, K]).
    """

    transposed: bool
    dense: bool


class Listed(NamedTuple):
    """A module an expert, of projections ``names``, called by the block's method ``moe(x, indices, weights)``."""

    names: tuple[str, ...]


class Block(NamedTuple):
    """A block of transformers 4.57 that routes in its own forward and returns (output, logits).

    ``names``: the projections of listed experts; None: ``experts`` is a module called as (x, weights [T, E], indices).
    ``renorm``: whether the chosen weights are made to sum to 1; or the attribute that says so.
    ``shared``: sigmoid(shared_expert_gate(x)) * shared_expert(x) is added.
    """

    names: tuple[str, ...] | None
    renorm: bool | str
    shared: bool


def set_sizes(copy: nn.Module, sizes: dict[str, int]) -> None:
    """Let the stand-in believe that it has the trial's sizes."""
    for name, value in sizes.items():
        if isinstance(copy.__dict__.get(name), int):
            copy.__dict__[name] = value


def routing(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states, indices, weights) of a trial; one expert gets nothing."""
    x = probe.randn(TOKENS, HIDDEN, seed=seed)
    indices = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [0, 1]], device="cpu")
    return x, indices, probe.randn(TOKENS, TOP_K, seed=seed + 1)


def densely(indices: Tensor, weights: Tensor, experts: int) -> Tensor:
    """[T, E]: every token's weight for every expert."""
    return weights.new_zeros(len(indices), experts).scatter(1, indices, weights)


def stacked_weights(key: Stacked, seed: int) -> dict[str, Tensor]:
    """Parameters of a trial."""
    gate_up = probe.randn(EXPERTS, 2 * INNER, HIDDEN, seed=seed)
    down = probe.randn(EXPERTS, HIDDEN, INNER, seed=seed + 1)
    if key.transposed:
        gate_up, down = (w.transpose(1, 2).contiguous() for w in (gate_up, down))
    return {"gate_up_proj": gate_up, "down_proj": down}


def arguments(key: Stacked, x: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """The arguments of the class's forward."""
    if key.dense:
        return x[None], densely(indices, weights, EXPERTS), indices
    return x, indices, weights


def _reference(key: Stacked, parameters: dict, routed: tuple, act: Callable) -> Tensor:
    x, indices, weights = (t.double() if t.is_floating_point() else t for t in routed)
    gate_up, down = (w.double() for w in parameters.values())
    if key.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate, up = torch.einsum("th,eoh->teo", x, gate_up).chunk(2, -1)
    every = torch.einsum("tei,ehi->teh", act(gate) * up, down)
    return torch.einsum("te,teh->th", densely(indices, weights, EXPERTS), every)


def _difference(module: nn.Module, key: Stacked, training: bool, scale: float) -> str | None:
    parameters = stacked_weights(key, seed=41)
    routed = routing(seed=43)
    routed = (routed[0] * scale, *routed[1:])
    copy = probe.stand_in(module, parameters=parameters, training=training)
    set_sizes(copy, SIZES)
    own = inspect.unwrap(swap.original_class(module).forward)
    try:
        with probe.quiet():
            out = own(copy, *arguments(key, *routed))
    except Exception as error:
        return probe.describe(error)
    if isinstance(out, Tensor):
        out = out.reshape(-1, HIDDEN)
    for name, act in mlp.ACTIVATIONS.items():
        if probe.same(out, _reference(key, parameters, routed, act)):
            return None if name == "SiLU" else f"its activation is {name}, not SiLU"
    return "its experts do not compute down(silu(gate) * up)"


def _gate_differs(module: nn.Module) -> bool:
    """Whether the method that transformers' implementations gate with is another one than silu(gate) * up."""
    if not hasattr(module, "_apply_gate"):
        return False
    x = probe.randn(3, 2 * INNER, seed=45)
    with probe.quiet():
        for scale in mlp.SCALES:
            gate, up = (x.double() * scale).chunk(2, -1)
            if not probe.same(module._apply_gate(x * scale), F.silu(gate) * up):
                return True
    return False


def _declared(module: nn.Module) -> str | None:
    """What the class says of itself that the operators do not do, or None."""
    if not module.has_gate:
        return "its experts have no gate"
    if module.has_bias:
        return "its experts have biases"
    if module.has_post_expert_norm:
        return "normalises the output of each expert"
    if not module.is_concatenated:
        return "gate and up lie interleaved in its weights"
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation not in _IMPLEMENTATIONS:
        return f"runs the experts implementation {implementation!r}"
    return None


def recognise_stacked(module: nn.Module) -> Verdict:
    """Match with a :class:`Stacked`, a Miss for stacked experts of another kind, None for anything else."""
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    declares = all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS)
    if not declares and any(w is None or w.dim() != 3 for w in weights):
        return None
    if declares:
        reason = _declared(module)
        if reason is not None:
            return Miss(reason)
        if any(w is None or w.dim() != 3 for w in weights):
            return Miss(UNKNOWN)
    for weight in weights:
        if type(weight) not in (nn.Parameter, Tensor, DTensor) or weight.dtype not in _DTYPES:
            return Miss(f"its weights are {type(weight).__name__} of {weight.dtype}")
    hooked = [name for name, child in module._modules.items() if child and mlp.has_hooks(child)]
    if hooked:
        return Miss(f"{hooked[0]} has hooks, which the operator would not run")
    forms = [Stacked(module.is_transposed, False)] if declares else []
    forms = forms or [Stacked(*form) for form in itertools.product((False, True), repeat=2)]
    reasons = {}
    for key in forms:
        reasons[key] = _difference(module, key, False, 1.0)
        if reasons[key] is None:
            return _confirm(module, key)
    named = [r for r in reasons.values() if r.startswith("its activation")]
    return Miss(named[0] if named else f"{UNKNOWN}: {reasons[forms[0]]}")


def _confirm(module: nn.Module, key: Stacked) -> Verdict:
    for training, scale in itertools.product((False, True), mlp.SCALES):
        reason = _difference(module, key, training, scale)
        if reason is not None:
            return Miss(
                "computes something else in training mode"
                if training
                else "computes something else for large values"
            )
    if _gate_differs(module):
        return Miss("its gate is another one than silu(gate) * up")
    return Match("", key)


# ---- a module an expert ----


def projections(expert: nn.Module, names: tuple[str, ...]) -> Iterator[nn.Module]:
    """Gate, up and down of one expert."""
    return (expert._modules[name] for name in names)


def plain_now(experts: nn.ModuleList, names: tuple[str, ...]) -> bool:
    """Whether every expert is, at this moment, its three weights and no more: no hooks, adapters, biases, shards."""
    return all(
        not mlp.has_hooks(expert)
        and "forward" not in expert.__dict__
        and all(p.bias is None and heads.plain_now(p) for p in projections(expert, names))
        for expert in experts
    )


def _listed_names(module: nn.Module) -> tuple[str, ...] | Miss | None:
    experts = module._modules.get("experts")
    if not isinstance(experts, nn.ModuleList) or not len(experts) or "gate" not in module._modules:
        return None
    first = swap.original_class(experts[0])
    if any(swap.original_class(expert) is not first for expert in experts):
        return Miss("its experts are of different classes")
    verdict = mlp.recognise(experts[0])
    if verdict is None:
        return None
    if isinstance(verdict, Miss):
        return Miss(f"its experts: {verdict.reason}")
    if len(verdict.key) != 3 or not plain_now(experts, verdict.key):
        return Miss("its experts are not three plain torch.nn.Linear without bias each")
    return verdict.key


class _Map(nn.Module):
    """An expert of the trial."""

    def __init__(self, seed: int, outputs: int = HIDDEN):
        super().__init__()
        self.matrix = probe.randn(HIDDEN, outputs, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.to(x.dtype)


class _DenseExperts(nn.Module):
    """Experts of the trial that are called as (x, weights [T, E], indices)."""

    def __init__(self, experts: list[_Map]):
        super().__init__()
        self.maps = nn.ModuleList(experts)

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        every = torch.stack([m(x.reshape(-1, HIDDEN)) for m in self.maps], 1)
        return (weights[..., None] * every).sum(1).view(x.shape)


def _tiny(expert: nn.Module, names: tuple[str, ...], seed: int) -> nn.Module:
    """An expert of the same class with small weights."""
    children = {}
    for name, shape in zip(names, ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)), strict=True):
        linear = nn.Linear(shape[1], shape[0], bias=False, device="cpu")
        linear.weight = nn.Parameter(probe.randn(*shape, seed=seed), requires_grad=False)
        children[name] = linear
        seed += EXPERTS
    return probe.stand_in(expert, children=children)


def tiny_experts(module: nn.Module, names: tuple[str, ...]) -> nn.ModuleList:
    """Listed experts for ``verify``: of the module's own class, so that what runs is what will run."""
    first = module._modules["experts"][0]
    return nn.ModuleList([_tiny(first, names, seed) for seed in range(50, 50 + EXPERTS)])


def block_children(key: Block) -> dict[str, nn.Module]:
    """Children of a trial of a block."""
    experts = [_Map(seed) for seed in range(50, 50 + EXPERTS)]
    children = {
        "gate": _Map(60, EXPERTS),
        "experts": nn.ModuleList(experts) if key.names else _DenseExperts(experts),
    }
    if key.shared:
        children |= {"shared_expert": _Map(61), "shared_expert_gate": _Map(62, 1)}
    return children


def _block_reference(key: Block, renorm: bool, children: dict, x: Tensor) -> Tensor:
    rows = x.double().reshape(-1, HIDDEN)
    probs = children["gate"](rows).softmax(-1)
    weights, indices = probs.topk(TOP_K, -1)
    if renorm:
        weights = weights / weights.sum(-1, keepdim=True)
    experts = children["experts"] if key.names else children["experts"].maps
    every = torch.stack([expert(rows) for expert in experts], 1)
    out = (densely(indices, weights, EXPERTS)[..., None] * every).sum(1)
    if key.shared:
        gate = torch.sigmoid(children["shared_expert_gate"](rows))
        out = out + gate * children["shared_expert"](rows)
    return out.view(x.shape)


def _block_agrees(module: nn.Module, key: Block, training: bool) -> bool:
    named = isinstance(key.renorm, str)
    for renorm in (False, True) if named else (key.renorm,):
        children = block_children(key)
        copy = probe.stand_in(module, children=children, training=training)
        copy.__class__ = swap.original_class(module)
        set_sizes(copy, {**SIZES, "top_k": TOP_K})
        if named:
            copy.__dict__[key.renorm] = renorm
        x = probe.randn(2, 3, HIDDEN, seed=63)
        try:
            out = probe.run(copy, x.clone())
        except probe.ProbeFailed:
            return False
        if not isinstance(out, tuple) or len(out) != 2:
            return False
        logits = children["gate"](x.double().view(-1, HIDDEN))
        if not probe.same(out[0], _block_reference(key, renorm, children, x)):
            return False
        if not probe.same(out[1], logits):
            return False
    return True


def _recognise_block(module: nn.Module, names: tuple[str, ...] | None) -> Verdict:
    arguments = probe.tensor_arguments(type(module))
    if arguments is None or len(arguments[0]) != 1 or arguments[1]:
        return Miss(f"{UNKNOWN}: its forward takes other arguments than (hidden_states)")
    shared = {"shared_expert", "shared_expert_gate"} <= module._modules.keys()
    flag = "norm_topk_prob"
    named = [flag] if isinstance(module.__dict__.get(flag), bool) else []
    for renorm in (*named, True, False):
        key = Block(names, renorm, shared)
        if _block_agrees(module, key, False):
            if not _block_agrees(module, key, True):
                return Miss("computes something else in training mode")
            return Match("", key)
    return Miss(f"{UNKNOWN}: its block is not softmax, top-k and a weighted sum of experts")


def recognise_listed(module: nn.Module) -> Verdict:
    """Match with a :class:`Listed` or a :class:`Block` of listed experts, Miss, or None."""
    names = _listed_names(module)
    if names is None or isinstance(names, Miss):
        return names
    method = inspect.getattr_static(swap.original_class(module), "moe", None)
    if method is None:
        return _recognise_block(module, names)
    key = Listed(names)
    return Match("", key) if _moe_agrees(module, method) else Miss(f"{UNKNOWN}: its method moe")


def listed_trial(module: nn.Module, experts: nn.ModuleList) -> nn.Module:
    """A stand-in of a block with listed experts, for its method ``moe``."""
    copy = probe.stand_in(module, children={"experts": experts})
    set_sizes(copy, SIZES)
    return copy


def _moe_agrees(module: nn.Module, method: Callable) -> bool:
    copy = listed_trial(module, nn.ModuleList([_Map(seed) for seed in range(50, 50 + EXPERTS)]))
    x, indices, weights = routing(seed=43)
    try:
        with probe.quiet():
            out = method(copy, x, indices, weights)
    except Exception:
        return False
    every = torch.stack([expert(x.double()) for expert in copy.experts], 1)
    wide = densely(indices, weights.double(), EXPERTS)
    return probe.same(out, (wide[..., None] * every).sum(1))


def recognise(module: nn.Module) -> Verdict:
    """Experts of any kind: Match with their key, Miss, or None."""
    verdict = recognise_stacked(module)
    return recognise_listed(module) if verdict is None else verdict


def recognise_routing_block(module: nn.Module) -> Verdict:
    """A block that routes in its own forward: Match with a :class:`Block`, Miss, or None."""
    gate = module._modules.get("gate")
    if not isinstance(gate, nn.Linear) or "experts" not in module._modules:
        return None
    names = _listed_names(module)
    if isinstance(names, Miss):
        return names
    return _recognise_block(module, names)
