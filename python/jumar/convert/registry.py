"""The table of converters: what exists, under which names, and the nearest name for a wrong one.

A converter turns a model into a list of sites (:meth:`Converter.plan`), each carrying an action that can be
applied and undone.  Most converters replace a method of single modules: they derive from
:class:`ModuleConverter`, say what they recognise and give the replacement's methods.  A converter that works
through an extension point of the model library (``AttentionInterface``, ``ExpertsInterface``) derives from
:class:`Converter` and returns actions of its own.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Iterable

from torch import nn

from jumar.convert import swap
from jumar.convert.errors import ConverterError
from jumar.convert.report import Site
from jumar.convert.verdict import Match, Verdict
from jumar.convert.verify import Trial
from jumar.hf import probe
from jumar.spelling import unknown

ALREADY = "already converted"


class Converter(abc.ABC):
    """One named way to bring fused operators into a model."""

    name: str
    aliases: tuple[str, ...] = ()
    operators: tuple[str, ...]
    summary: str

    @abc.abstractmethod
    def plan(self, model: nn.Module) -> Iterable[Site]:
        """Every site and near miss in ``model``; changes nothing."""

    def trials(self, site: Site) -> Iterable[Trial]:
        """What ``verify`` runs for a planned site; none by default."""
        return ()


class ModuleConverter(Converter):
    """A converter that gives single modules new methods (see :mod:`jumar.convert.swap`).

    ``trial_parts`` gives what :func:`jumar.hf.probe.stand_in` exchanges for a trial, and the trial's inputs.
    """

    @abc.abstractmethod
    def recognise(self, module: nn.Module) -> Verdict:
        """Match, Miss or None for one module, from what it is and does; must not change it."""

    @abc.abstractmethod
    def namespace(self, key: tuple, base: type) -> dict:
        """The attributes of the replacement class that derives from ``base``, for a Match's ``key``."""

    def trial_parts(self, module: nn.Module, key: tuple) -> tuple[dict, tuple] | None:
        """(arguments for ``stand_in``, inputs) of a small trial of the whole module, or None for no trial."""
        return None

    def trials(self, site: Site) -> Iterable[Trial]:
        module, patch = site.action.module, site.action.patch
        parts = self.trial_parts(module, patch.key)
        if parts is not None:
            exchanged, inputs = parts
            before, after = (probe.stand_in(module, **exchanged) for _ in range(2))
            after.__dict__["_parameters"] = before._parameters
            after.__class__ = swap.patched_class(module, patch)
            leaves = (before._parameters[name] for name in exchanged.get("parameters", ()))
            yield Trial(
                lambda *x: type(before).forward(before, *x[: len(inputs)]),
                lambda *x: type(after).forward(after, *x[: len(inputs)]),
                (*inputs, *(leaf for leaf in leaves if leaf is not None)),
            )

    def plan(self, model: nn.Module) -> Iterable[Site]:
        for path, module in model.named_modules():
            cls = swap.original_class(module)
            site = Site(path, self.name, self.operators[0], "skipped", "", cls.__qualname__)
            done = swap.patch_by(module, self.name)
            if done is not None:
                site.operator, site.reason = done.operator, ALREADY
                yield site
                continue
            verdict = self.recognise(module)
            if verdict is None:
                continue
            site.operator = verdict.operator or site.operator
            obstacle = swap.obstacle(module) if isinstance(verdict, Match) else verdict.reason
            if obstacle is not None:
                site.reason = obstacle
            else:
                site.status = "replaced"
                patch = swap.Patch(self.name, verdict.operator, verdict.key)
                site.action = swap.SwapAction(path, module, patch)
            yield site


_BUILT_IN = ("rms_norm", "rope", "sdpa", "dsa", "swiglu", "linear", "loss", "moe")
_converters: dict[str, Converter] = {}
_aliases: dict[str, str] = {}


def register(converter: Converter) -> Converter:
    """Add a converter under its name and aliases; a name that is taken raises ConverterError."""
    for name in (converter.name, *converter.aliases):
        if name in _converters or name in _aliases:
            raise ConverterError(f"converter name {name!r} is taken")
    _converters[converter.name] = converter
    _aliases.update(dict.fromkeys(converter.aliases, converter.name))
    return converter


def _load() -> None:
    if _BUILT_IN[0] in _aliases:
        return
    for module in _BUILT_IN:
        importlib.import_module(f"jumar.convert.{module}")


def known_converters() -> dict[str, Converter]:
    """Every converter by its name, in the order in which :func:`jumar.kernelize` applies them."""
    _load()
    order = [f"jumar.convert.{module}" for module in _BUILT_IN]

    def place(item: tuple[str, Converter]) -> int:
        """Built-in ones stand in their order, whichever was imported first."""
        module = type(item[1]).__module__
        return order.index(module) if module in order else len(order)

    return dict(sorted(_converters.items(), key=place))


def resolve(name: str) -> tuple[Converter, bool]:
    """The converter that ``name`` or an alias stands for, and whether a trailing ``?`` marks it as optional.

    Raises ConverterError with the nearest known name when there is none.
    """
    _load()
    if not isinstance(name, str):
        raise ConverterError(f"a converter is named by a string, not by {name!r}")
    optional = name.endswith("?")
    plain = name.removesuffix("?").strip()
    converter = _converters.get(_aliases.get(plain, plain))
    if converter is None:
        raise ConverterError(unknown("converter", plain, _converters, _aliases))
    return converter, optional
