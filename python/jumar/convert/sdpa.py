"""``npu_sdpa``: attention that a transformers model asks its ``AttentionInterface`` for, or a module torch's functions.

In transformers the configuration names it, and modules share configurations, also across models.  The converted model
therefore gets copies of its configurations, in which only the name differs.  A module that calls
``scaled_dot_product_attention`` or ``flex_attention`` gets the same methods with other functions of these names.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from jumar.convert.registry import ALREADY, Converter, register
from jumar.convert.report import Site
from jumar.convert.swap import Patch, SwapAction, obstacle, original_class, patch_by
from jumar.convert.verdict import Miss
from jumar.convert.verify import Trial
from jumar.hf import functional, probe

_NAME = "_attn_implementation_internal"


class Switch:
    """Exchanges the configurations of one model for copies, some of which name the fused attention.

    ``names``: what the fused attention is called, by what a configuration has named; ``chosen``: modules whose
    configurations get these names.
    """

    def __init__(self, model: nn.Module, names: dict[str, str]):
        self.model, self.names = model, names
        self.chosen: list[nn.Module] = []
        self.places: list[tuple[nn.Module, str, Any, Any]] = []

    def apply(self) -> None:
        if self.places:
            return
        chosen = {id(module.config) for module in self.chosen}
        found = [
            (module, name, value)
            for module in self.model.modules()
            for name, value in module.__dict__.items()
            if hasattr(value, _NAME)
        ]
        memo: dict[int, Any] = {}
        for module, name, old in found:
            self.places.append((module, name, old, copy.deepcopy(old, memo)))
        for _, _, old, new in self.places:
            if id(old) in chosen:
                setattr(new, _NAME, self.names.get(getattr(old, _NAME), getattr(new, _NAME)))
        for module, name, _, new in self.places:
            module.__dict__[name] = new

    def undo(self) -> None:
        for module, name, old, new in reversed(self.places):
            if module.__dict__.get(name) is new:
                module.__dict__[name] = old
            # What was set since belongs to the model.
            for key, value in new.__dict__.items():
                if key != _NAME and not hasattr(value, _NAME) and old.__dict__.get(key) != value:
                    old.__dict__[key] = value
        self.places = []


class SwitchAction:
    """One site's share in a :class:`Switch`: the first one does it, the first undo takes it back.

    ``swap``: what else changes at the site, the class of a module that would take packed sequences apart.
    """

    def __init__(self, switch: Switch, module: nn.Module, swap: SwapAction | None):
        self.switch, self.module, self.swap = switch, module, swap

    def apply(self) -> None:
        self.switch.apply()
        if self.swap is not None:
            self.swap.apply()

    def undo(self) -> None:
        if self.swap is not None:
            self.swap.undo()
        self.switch.undo()


class SdpaConverter(Converter):
    name = "npu_sdpa"
    aliases = ("sdpa", "attention", "flash_attention")
    operators = ("npu_fusion_attention",)
    summary = (
        "attention of transformers models, and of modules that call torch's attention functions"
    )

    def plan(self, model: nn.Module) -> Iterable[Site]:
        names: dict[str, str] = {}
        if "transformers" in sys.modules:
            from jumar.hf import attention

            names = attention.FUSED
        switch = Switch(model, names)
        sites = [
            site
            for path, module in model.named_modules()
            if (site := self._site(path, module, switch)) is not None
        ]
        refused: dict[int, str] = {}
        for site, config in sites:
            if config is not None and site.status == "skipped" and site.reason != ALREADY:
                reason = f"{site.path} shares its configuration, and {site.reason}"
                refused.setdefault(id(config), reason)
        for site, config in sites:
            if site.status == "replaced" and id(config) in refused:
                site.status, site.reason, site.action = "skipped", refused[id(config)], None
            elif site.status == "replaced" and config is not None:
                switch.chosen.append(site.action.module)
            yield site

    def _site(self, path: str, module: nn.Module, switch: Switch) -> tuple[Site, Any] | None:
        """A site and the configuration that names its attention, None for a module that calls torch's functions."""
        operator, cls = self.operators[0], original_class(module)
        site = Site(path, self.name, operator, "skipped", "", cls.__qualname__)
        config, verdict = None, None
        if "transformers" in sys.modules:
            from jumar.hf import attention

            config, verdict = attention.config_of(module), attention.recognise(module)
            named = verdict is not None and attention.is_fused(config._attn_implementation)
        if verdict is None:
            config, verdict = None, functional.recognise(cls)
            named = patch_by(module, self.name) is not None
        if verdict is None:
            return None
        if named:
            site.reason = ALREADY
        elif isinstance(verdict, Miss):
            site.reason = verdict.reason
        else:
            patch = Patch(self.name, operator, verdict.key) if verdict.key else None
            stays = obstacle(module) if patch is not None else None
            swap = SwapAction(path, module, patch) if patch is not None and stays is None else None
            if config is None and swap is None:
                site.reason = stays or ""
            else:
                site.status = "replaced"
                site.action = swap if config is None else SwitchAction(switch, module, swap)
        return site, config

    def namespace(self, key: tuple, base: type) -> dict[str, Any]:
        """The attributes of the class that a patch of this converter makes."""
        if key == (functional.CALLS,):
            return functional.namespace(base)
        from jumar.hf import attention

        return attention.packed_namespace(base)

    def trials(self, site: Site) -> Iterable[Trial]:
        if not isinstance(site.action, SwitchAction):
            return
        from jumar.hf import attention

        module = site.action.module
        group = getattr(module, "num_key_value_groups", 1)
        size = getattr(module, "head_dim", 16)
        shapes = ((2, 2 * group, 7, size), (2, 2, 7, size), (2, 2, 7, size))
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            shapes = tuple((2, len(sinks) // (1 if i == 0 else group), 7, size) for i in range(3))
        inputs = tuple(probe.randn(*shape, seed=i) for i, shape in enumerate(shapes))

        def run(function: Any, **more: Any) -> Any:
            scaling = getattr(module, "scaling", None) or size**-0.5
            if sinks is not None:
                more["s_aux"] = sinks.detach().float()
            return lambda q, k, v: function(module, q, k, v, None, scaling=scaling, **more)[0]

        original = attention.function_of(module)
        causal = {"is_causal": False} if sinks is not None else {}
        yield Trial(run(original), run(attention.attention_forward, **causal), inputs)


def revert(model: nn.Module) -> int:
    """Names the attention that the model had before; the number of configurations that changed."""
    if "transformers" not in sys.modules:
        return 0
    from jumar.hf import attention, dsa

    originals = {fused: name for names in (attention.FUSED, dsa.FUSED) for name, fused in names.items()}
    count = 0
    for module in model.modules():
        config = attention.config_of(module)
        original = originals.get(getattr(config, _NAME, None))
        if original is not None:
            setattr(config, _NAME, original)
            count += 1
    return count


register(SdpaConverter())
