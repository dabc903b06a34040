"""One converter for torchtitan: which configuration nodes it takes, and how a node becomes a fused one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jumar.titan import lora

#: The name under which torchtitan sees all of this package's overrides when it looks for conflicts.
FAMILY = "jumar.titan"


@dataclass(frozen=True)
class Converter:
    """A converter of configuration nodes.

    Attributes:
        name: as in a job file.
        operator: the fused operator that the built module calls; ``a or b`` where it depends on what else is fused.
        target: the class of nodes to look at, or several, subclasses included.
        replacements: for an exact node class, the node class of the fused module.
    """

    name: str
    operator: str
    target: type | tuple[type, ...]
    replacements: dict[type, type]

    def nodes(self, root: Any) -> Iterator[tuple[str, Any]]:
        """(path, node) of everything to look at."""
        for path, node, _, _ in root.traverse(self.target, recurse=True):
            yield path, node

    def built(self, module: Any) -> bool:
        """True for a module that this converter made."""
        return isinstance(module, tuple(new._owner for new in self.replacements.values()))

    def fused(self, config: Any) -> bool:
        """True for a node that this converter has converted."""
        return issubclass(type(config)._owner or object, tuple(new._owner for new in self.replacements.values()))

    def obstacle(self, config: Any) -> str | None:
        """Why a node of the target's kind stays as it is; None when it can be converted.

        Only exact classes are known to compute what the operator computes: a subclass may add terms. Low-rank adapters
        and frozen parameters, as torchtitan's LoRA converter adds them, are known too.
        """
        if self.fused(config):
            return "already converted"
        if lora.base(type(config)) not in self.replacements:
            owner = type(config)._owner
            return f"{owner.__qualname__ if owner else type(config).__qualname__} computes more than {self.operator}"
        if getattr(config, "elementwise_affine", True) is False:
            return "the norm has no weight"
        return None

    def convert(self, config: Any) -> Any:
        """The node as a fused one, or unchanged where it cannot be.

        The node keeps its identity: torchtitan collects all matches first and applies them one by one, so a node that
        were exchanged for a copy would take nodes inside it, claimed by another converter, out of the tree.
        """
        if self.obstacle(config) is None:
            self.turn(config)
        return config

    def turn(self, config: Any) -> None:
        """Makes a node without obstacle a fused one."""
        plain = lora.base(type(config))
        fused = self.replacements[plain]
        config.__class__ = fused if plain is type(config) else lora.on_fused(type(config), fused)


def install(
    registry: dict,
    base: type,
    converter: Converter,
    *,
    target: type | None = None,
    fqns: list[str] | None = None,
) -> Callable[[Any], Any]:
    """The override factory of a converter, registered with torchtitan as ``jumar.titan.NAME``.

    All share one name in the check for conflicts, because they may nest (a linear layer in a feed-forward): nodes keep
    their identity, so their order does not matter. Conflicts with anybody else's overrides are still found.
    """

    def factory(config: Any) -> Any:
        return converter.convert(config)

    description = f"{converter.operator} in place of torch's own operations"
    factory.__name__ = factory.__qualname__ = converter.name
    factory.__module__, factory.__doc__ = FAMILY, f"Override factory: {description}."
    family = type("FamilyOverride", (base,), {"name": property(lambda self: FAMILY)})
    registry[f"{FAMILY}.{converter.name}"] = family(
        target_cls=target or converter.target,
        factory=factory,
        fqns=fqns,
        description=description,
        origin_module=FAMILY,
    )
    return factory
