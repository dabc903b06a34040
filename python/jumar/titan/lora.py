"""Low-rank adapters by torchtitan's converter, on fused layers or before them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jumar import compat

compat.apply()

from torchtitan.components import lora as titan_lora
from torchtitan.models.common.linear import Linear

_HEAD = "lm_head"
_fused: dict[type, type] = {}


def _names(model: Any, mixture: bool) -> list[str]:
    paths = [path.split(".") for path, _, _, _ in model.traverse(Linear.Config, recurse=True)]
    return list(dict.fromkeys(path[-1] for path in paths if ("moe" in path) == mixture))


def experts(model: Any) -> list[str]:
    """Names (last parts) of the linear layers in a model configuration's mixtures of experts: routers, shared experts.

    torchtitan names layers by their last part: other layers of these names cannot have adapters either.
    """
    return _names(model, True)


def targets(model: Any) -> list[str]:
    """Names (last parts) of a model configuration's linear layers, those of experts and the output head left out."""
    return [name for name in _names(model, False) if name not in (_HEAD, *experts(model))]


def convert(model: Any, rank: int, alpha: float, names: list[str]) -> Any:
    """A model configuration with adapters on the layers of these names and all else frozen."""
    config = titan_lora.LoRAConverter.Config(rank=rank, alpha=alpha, target_modules=list(names))
    return titan_lora.LoRAConverter(config).convert(model)


def base(config_class: type) -> type:
    """The class of nodes that a class of adapted or frozen nodes was made from; any other class itself."""
    for plain, adapted in titan_lora._lora_class_cache.items():
        if adapted.Config is config_class:
            return plain.Config
    for plain, frozen in titan_lora._frozen_config_class_cache.items():
        if frozen is config_class:
            return plain
    return config_class


def on_fused(config_class: type, fused: type) -> type:
    """For a class of adapted or frozen nodes, the one that builds ``fused`` modules with the same adapters.

    It adds no fields, so that a node can become one and stay the same object.
    """
    if config_class not in _fused:
        adapted = config_class._owner
        if adapted in titan_lora._lora_class_cache.values():
            _fused[config_class] = _adapted(adapted, fused._owner).Config
        else:
            _fused[config_class] = type(
                f"Frozen{fused.__qualname__}", (config_class,), {"__slots__": (), "_owner": fused._owner}
            )
    return _fused[config_class]


def _adapted(adapted: type, fused: type) -> type:
    class FusedAdapted(adapted, fused):
        """The adapted layer, whose ``super().forward`` is the fused one here; its adapters are fused too."""

        Config = type("Config", (adapted.Config,), {"__slots__": ()})

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for adapter in (self.lora_a, self.lora_b):
                if type(adapter) is Linear:
                    adapter.__class__ = fused

    FusedAdapted.__name__ = FusedAdapted.__qualname__ = f"LoRA{fused.__name__}"
    FusedAdapted.Config._owner = FusedAdapted
    return FusedAdapted


def merged(weights: dict[str, Tensor], scaling: float, head_dim: int) -> dict[str, Tensor]:
    """Whole weights with every adapter added to its layer: ``W + scaling B A``. For export; the sum is in fp32.

    torchtitan computes query, key and value in one layer ``wqkv``, whose rows are, for each key-value head, those of its
    query heads, its key, its value; it saves them as three.
    """
    result = {n: t for n, t in weights.items() if ".lora_a." not in n and ".lora_b." not in n}
    for name, down in weights.items():
        if ".lora_a." not in name:
            continue
        up = weights[name.replace(".lora_a.", ".lora_b.")]
        delta = scaling * (up.float() @ down.float())
        stem = name.partition("lora_a.")[0]
        if f"{stem}weight" in result:
            parts = {f"{stem}weight": delta}
        else:
            stem = stem.removesuffix("wqkv.")
            groups = result[f"{stem}wk.weight"].shape[0] // head_dim
            rows = delta.view(groups, -1, head_dim, delta.shape[-1])
            split = {"wq": rows[:, :-2], "wk": rows[:, -2], "wv": rows[:, -1]}
            parts = {f"{stem}{n}.weight": part.reshape(-1, delta.shape[-1]) for n, part in split.items()}
        for target, part in parts.items():
            result[target] = result[target].float() + part
    return result
