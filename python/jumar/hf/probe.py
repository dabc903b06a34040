"""Run a module's own forward on other weights, other children and tiny inputs, without touching the module."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator

import torch
from torch import nn

#: Modules compute in fp32 inside whatever they are given, so formulas are compared at fp32 accuracy.
RELATIVE = 2e-5


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """On the CPU, without autocast or gradients or warnings, and the global random state as it was."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def generator(seed: int = 0) -> torch.Generator:
    """A generator of its own: probing draws nothing from the global one."""
    return torch.Generator(device="cpu").manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Signed random numbers with a mean that is not zero (a subtracted mean must show)."""
    return (torch.randn(*shape, generator=generator(seed), device="cpu") + 0.3).to(dtype)


def stand_in(
    module: nn.Module,
    parameters: dict[str, torch.Tensor | None] | None = None,
    children: dict[str, nn.Module] | None = None,
    training: bool = False,
) -> nn.Module:
    """A shallow copy with some parameters and children exchanged; what its forward stores stays in the copy."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__.pop("forward", None)
    copy.__dict__["_parameters"] = dict(module._parameters)
    for name, value in (parameters or {}).items():
        copy._parameters[name] = None if value is None else nn.Parameter(value, requires_grad=False)
    copy.__dict__["_buffers"] = dict(module._buffers)
    copy.__dict__["_modules"] = {**module._modules, **(children or {})}
    copy.__dict__["training"] = training
    return copy


class ProbeFailed(Exception):
    """The module's forward raised on the probe."""


def run(module: nn.Module, *inputs: torch.Tensor):
    """The class's own forward, without hooks; whatever it raises becomes ProbeFailed."""
    try:
        with quiet():
            return type(module).forward(module, *inputs)
    except Exception as error:
        raise ProbeFailed(describe(error)) from error


def describe(error: Exception) -> str:
    """An exception as one short line."""
    text = str(error).strip().splitlines()
    return f"its forward raised {type(error).__name__}" + (f": {text[0][:120]}" if text else "")


def same(actual, expected: torch.Tensor, relative: float = RELATIVE) -> bool:
    """Whether a result equals a formula's (fp64) at fp32 accuracy, element by element; NaN is never equal."""
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return False
    difference = (actual.double() - expected.double()).abs()
    bound = relative * expected.abs().double() + 1e-1 * relative * float(
        expected.abs().max() if expected.numel() else 0
    )
    return bool((difference <= bound).all())


def tensor_arguments(cls: type) -> tuple[list[str], list[str]] | None:
    """Names of the required and the optional arguments of ``cls.forward``; None where it takes ``*args`` or such."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    if any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    return required, [p.name for p in parameters if p.default is not inspect.Parameter.empty]


def rename_arguments(function, names: list[str]):
    """``function`` with its positional arguments renamed: callers may pass them by the original's names."""
    code = function.__code__
    count = code.co_argcount
    if len(names) != count:
        raise ValueError(f"{function.__name__} takes {count} arguments, not {names}")
    # Other variables that happen to have one of the new names step aside; bytecode knows them by index.
    renamed = {
        name: f"_{name}" for name in {*code.co_varnames[count:], *code.co_freevars} if name in names
    }
    renamed |= dict(zip(code.co_varnames[:count], names, strict=True))
    function.__code__ = code.replace(
        co_varnames=(*names, *(renamed.get(name, name) for name in code.co_varnames[count:])),
        co_cellvars=tuple(renamed.get(name, name) for name in code.co_cellvars),
        co_freevars=tuple(renamed.get(name, name) for name in code.co_freevars),
    )
    return function


def adopt_signature(function, base: type):
    """Give a replacement ``forward`` the argument names, defaults and qualified name of ``base.forward``."""
    required, optional = tensor_arguments(base)
    function = rename_arguments(function, ["self", *required, *optional])
    signature = inspect.signature(base.forward)
    function.__defaults__ = tuple(signature.parameters[name].default for name in optional) or None
    function.__qualname__ = f"{base.__qualname__}.forward"
    function.__doc__ = base.forward.__doc__
    return function
