"""``verify=True``: run the original and its replacement side by side before anything is replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from jumar.convert.errors import ConverterError
from jumar.hf import probe

#: fp32 against fp32: the two may add in another order and round in other places.
RELATIVE = 1e-4


@dataclass
class Trial:
    """Two callables on the same inputs.  Inputs past those that the callables use are leaves that they read."""

    original: Callable
    replacement: Callable
    inputs: tuple[torch.Tensor, ...]


def _run(function: Callable, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
    """The outputs of ``function``, then the gradients of a random combination of them for every input."""
    with torch.enable_grad():
        out = function(*inputs)
        outs = list(out) if isinstance(out, tuple) else [out]
        total = sum((o * probe.randn(*o.shape, seed=31).to(o.dtype)).sum() for o in outs)
        grads = torch.autograd.grad(total, inputs, allow_unused=True)
    return [*(o.detach() for o in outs), *grads]


def compare(trial: Trial) -> str | None:
    """What differs between original and replacement, or None."""
    for tensor in trial.inputs:
        tensor.requires_grad_(True)
    with probe.quiet():
        expected = _run(trial.original, trial.inputs)
        actual = _run(trial.replacement, trial.inputs)
    if len(expected) != len(actual):
        return f"{len(actual)} results instead of {len(expected)}"
    outputs = len(expected) - len(trial.inputs)
    for index, (want, have) in enumerate(zip(expected, actual, strict=True)):
        what = f"output {index}" if index < outputs else f"the gradient of input {index - outputs}"
        if (want is None) != (have is None):
            return f"{what} is there in one of them only"
        if want is None:
            continue
        if want.dtype != have.dtype:
            return f"{what} has the type {have.dtype} instead of {want.dtype}"
        if not probe.same(have, want, RELATIVE):
            return f"{what} differs"
    return None


def verify_sites(converters: Mapping, sites: list) -> None:
    """Run the trials of every distinct replacement among ``sites``; ConverterError names the first that differs."""
    seen = set()
    for site in sites:
        module, patch = getattr(site.action, "module", None), getattr(site.action, "patch", None)
        if patch is not None and (type(module), patch) in seen:
            continue
        seen.add((type(module), patch))
        for trial in converters[site.converter].trials(site):
            difference = compare(trial)
            if difference:
                raise ConverterError(
                    f"verify: {site.converter} at {site.path or 'the model'} ({site.module_class}): "
                    f"{difference}; nothing was converted"
                )
