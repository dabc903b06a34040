"""``npu_sdpa``: the attention that a transformers model asks its ``AttentionInterface`` for.

The configuration names it, and modules share configurations, also across models.  The converted model therefore gets
copies of its configurations, in which only the name differs.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from jumar.convert.registry import ALREADY, Converter, register
from jumar.convert.report import Site
from jumar.convert.swap import original_class
from jumar.convert.verdict import Match
from jumar.convert.verify import Trial
from jumar.hf import probe

_NAME = "_attn_implementation_internal"


class Switch:
    """Exchanges the configurations of one model for copies, some of which name the fused attention."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.chosen: set[int] = set()  # by their id
        self.places: list[tuple[nn.Module, str, Any, Any]] = []

    def apply(self) -> None:
        from jumar.hf import attention

        if self.places:
            return
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
            if id(old) in self.chosen:
                setattr(new, _NAME, attention.FUSED.get(getattr(old, _NAME), getattr(new, _NAME)))
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
    """One site's share in a :class:`Switch`: the first one does it, the first undo takes it back."""

    def __init__(self, switch: Switch, module: nn.Module):
        self.switch, self.module = switch, module
        self.apply, self.undo = switch.apply, switch.undo


class SdpaConverter(Converter):
    name = "npu_sdpa"
    aliases = ("sdpa", "attention", "flash_attention")
    operators = ("npu_fusion_attention",)
    summary = "attention that transformers models look up by the name in their configuration"

    def plan(self, model: nn.Module) -> Iterable[Site]:
        if "transformers" not in sys.modules:
            return
        from jumar.hf import attention

        sites: list[tuple[Site, nn.Module, Any]] = []
        refused: dict[int, str] = {}
        for path, module in model.named_modules():
            config = attention.config_of(module)
            verdict = attention.recognise(module)
            if verdict is None:
                continue
            cls = original_class(module).__qualname__
            site = Site(path, self.name, self.operators[0], "skipped", "", cls)
            if attention.original_of(config._attn_implementation) is not None:
                site.reason = ALREADY
            elif isinstance(verdict, Match):
                site.status = "replaced"
            else:
                site.reason = verdict.reason
                refused.setdefault(
                    id(config), f"{path} shares its configuration, and {verdict.reason}"
                )
            sites.append((site, module, config))
        switch = Switch(model)
        for site, module, config in sites:
            if site.status == "replaced" and id(config) in refused:
                site.status, site.reason = "skipped", refused[id(config)]
            elif site.status == "replaced":
                switch.chosen.add(id(config))
                site.action = SwitchAction(switch, module)
            yield site

    def trials(self, site: Site) -> Iterable[Trial]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from jumar.hf import attention

        module = site.action.module
        group = getattr(module, "num_key_value_groups", 1)
        size = getattr(module, "head_dim", 16)
        shapes = ((2, 2 * group, 7, size), (2, 2, 7, size), (2, 2, 7, size))
        inputs = tuple(probe.randn(*shape, seed=i) for i, shape in enumerate(shapes))

        def run(function: Any) -> Any:
            scaling = getattr(module, "scaling", None)
            return lambda q, k, v: function(module, q, k, v, None, scaling=scaling)[0]

        yield Trial(run(ALL_ATTENTION_FUNCTIONS["sdpa"]), run(attention.attention_forward), inputs)


def revert(model: nn.Module) -> int:
    """Names the attention that the model had before; the number of configurations that changed."""
    if "transformers" not in sys.modules:
        return 0
    from jumar.hf import attention

    count = 0
    for module in model.modules():
        config = attention.config_of(module)
        original = attention.original_of(getattr(config, _NAME, None))
        if original is not None:
            setattr(config, _NAME, original)
            count += 1
    return count


register(SdpaConverter())
