"""plan -> apply -> report: the functions behind ``jumar.convert`` and ``jumar.kernelize``."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from jumar.convert.errors import ConverterError
from jumar.convert.registry import known_converters, resolve
from jumar.convert.report import Report, Site
from jumar.convert.verify import verify_sites


class Plan:
    """What a conversion would do.  Printing it changes nothing; :meth:`apply` does it."""

    def __init__(self, model: nn.Module, converters: Iterable[str]):
        if not isinstance(model, nn.Module):
            raise ConverterError(
                f"convert: the model must be a torch.nn.Module, not {type(model).__name__}"
            )
        requests = dict(resolve(name) for name in converters)
        self.optional = {converter.name for converter, optional in requests.items() if optional}
        self.converters = {converter.name: converter for converter in requests}
        self.sites: list[Site] = []
        for converter in requests:
            self.sites.extend(converter.plan(model))

    def report(self) -> Report:
        """The plan as a report: its ``replaced`` sites are the ones that :meth:`apply` would replace."""
        return Report(self.sites, self.converters)

    def apply(self, *, strict: bool = False, verify: bool = False) -> Report:
        """Carry the plan out, wholly or, when anything fails, not at all."""
        report = self.report()
        if strict:
            missing = [name for name in report.unmatched if name not in self.optional]
            if missing:
                raise ConverterError(_nothing(missing, report))
        if verify:
            verify_sites(self.converters, report.replaced)
        done: list[Site] = []
        try:
            for site in report.replaced:
                site.action.apply()
                done.append(site)
        except BaseException:
            for site in reversed(done):
                site.action.undo()
            raise
        return report


def _nothing(missing: list[str], report: Report) -> str:
    parts = []
    for name in missing:
        reasons = sorted(
            {f"{s.module_class}: {s.reason}" for s in report.skipped if s.converter == name}
        )
        parts.append(
            f"{name} matched nothing"
            + (f" (near misses: {'; '.join(reasons[:4])})" if reasons else "")
        )
    return "convert: " + "; ".join(parts) + ". Mark a converter as optional with a trailing '?'"


def plan(model: nn.Module, converters: str | Iterable[str]) -> Plan:
    """Find every site and near miss of the named converters without changing the model."""
    return Plan(model, [converters] if isinstance(converters, str) else list(converters))


def convert(
    model: nn.Module, converters: str | Iterable[str], *, strict: bool = False, verify: bool = False
) -> Report:
    """Switch a model to fused operators, in place, and say what was done.

    Args:
        model: any ``torch.nn.Module``; its ``state_dict`` keys do not change.
        converters: names such as ``"npu_rms_norm"``; ``"npu_rms_norm?"`` marks one as optional.
        strict: raise ConverterError, before anything is changed, when a converter that is not optional
            matched nothing.
        verify: compare each distinct replacement with the original on small random input first, outputs and
            gradients, and raise ConverterError, with nothing changed, when they differ.

    Returns:
        The :class:`Report`; ``report.undo()`` restores the model.

    Raises:
        ConverterError: unknown converter (with the nearest name), or as said under ``strict`` and ``verify``.
    """
    return plan(model, converters).apply(strict=strict, verify=verify)


def kernelize(model: nn.Module, *, strict: bool = False, verify: bool = False) -> Report:
    """:func:`convert` with every converter that applies to the model.

    With ``strict``, a model in which no converter matches anything raises ConverterError.
    """
    report = plan(model, [f"{name}?" for name in known_converters()]).apply(verify=verify)
    if strict and len(report.unmatched) == len(report.requested):
        raise ConverterError(_nothing(report.unmatched, report))
    return report
