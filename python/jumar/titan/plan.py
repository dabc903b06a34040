"""What the converters will match in a configuration, before it is built, and what was built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from jumar.convert.errors import ConverterError
from jumar.convert.registry import resolve
from jumar.convert.report import Report, Site


def names(converters: Iterable[str]) -> list[tuple[str, bool]]:
    """Plain names of the converters and whether each is optional (``npu_x?``); aliases are resolved.

    Raises:
        ConverterError: an unknown name, with the nearest known one; a name given twice; a converter that torchtitan's
            models have no form of.
    """
    from jumar.titan import CONVERTERS

    found: list[tuple[str, bool]] = []
    for name in converters:
        converter, optional = resolve(name)
        if converter.name not in CONVERTERS:
            raise ConverterError(
                f"converter {converter.name!r} has no form for torchtitan's models (it has: {', '.join(CONVERTERS)})"
            )
        if converter.name in (known for known, _ in found):
            raise ConverterError(f"converter {converter.name!r} is listed twice")
        found.append((converter.name, optional))
    return found


def plan(config: Any, converters: Iterable[str], *, strict: bool = True) -> Report:
    """The sites that the converters replace or skip in a model's configuration; changes nothing.

    Args:
        config: a ``Trainer.Config``, ``ModelSpec`` or a model's ``Config``.
        converters: names; ``"npu_x?"`` may match nothing.
        strict: a converter that matches nothing and is not optional is an error.

    Raises:
        ConverterError: see ``strict`` and :func:`names`.
    """
    from jumar.titan import CONVERTERS

    requested = names(converters)
    root = getattr(config, "model_spec", config)
    sites = []
    for name, _ in requested:
        converter = CONVERTERS[name]
        for path, node in converter.nodes(root):
            reason = converter.obstacle(node)
            sites.append(
                Site(
                    path=path.removeprefix("model."),
                    converter=name,
                    operator=converter.operator,
                    status="replaced" if reason is None else "skipped",
                    reason=reason or "",
                    module_class=(type(node)._owner or type(node)).__qualname__,
                )
            )
    report = Report(sites, [name for name, _ in requested])
    if strict:
        missing = [name for name, optional in requested if name in report.unmatched and not optional]
        if missing:
            hint = ", ".join(f"{name}?" for name in missing)
            raise ConverterError(
                f"matched nothing in this model: {', '.join(missing)} (write {hint} if that is expected)"
            )
    return report


def count_modules(parts: Iterable[nn.Module]) -> Counter[str]:
    """Fused modules in built model parts, by converter. With pipeline parallelism a rank holds its own stages only."""
    from jumar.titan import CONVERTERS

    return Counter(
        name
        for part in parts
        for module in part.modules()
        for name, converter in CONVERTERS.items()
        if converter.built(module)
    )
