"""Instance-level replacement: give one module a subclass of its class, and take it back.

The subclass carries the name of the original (wrap policies, weight initialisers and reports look at it), it is
cached, so that equal modules stay of equal type, and it pickles as "the original plus these patches": a copy or a
file never depends on a class that exists in one process only.  Nothing is stored on the instance, so undoing is
assigning the original class back.
"""

from __future__ import annotations

import inspect
import types
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from jumar.convert.errors import ConverterError

_DEVICES = ("cpu", "meta", "npu")


@dataclass(frozen=True)
class Patch:
    """One converter's change to a class: enough to build the subclass again in another process."""

    converter: str
    operator: str
    key: tuple


@dataclass(frozen=True)
class Conversion:
    """What a generated class is made of; ``sources`` are the methods of the base that it replaced."""

    original: type
    patches: tuple[Patch, ...]
    sources: tuple[tuple[str, Any], ...] = field(compare=False)

    def is_current(self, base: type) -> bool:
        """False once somebody has assigned a replaced method on the original class anew."""
        return all(inspect.getattr_static(base, name, None) is was for name, was in self.sources)


_classes: weakref.WeakValueDictionary[tuple, type] = weakref.WeakValueDictionary()


def conversion_of(module: nn.Module) -> Conversion | None:
    """The conversion of a module, or None where its class is not one that this file made."""
    return type(module).__dict__.get("__jumar__")


def original_class(module: nn.Module) -> type:
    """The class that the module has without any conversion."""
    conversion = conversion_of(module)
    return conversion.original if conversion else type(module)


def patch_by(module: nn.Module, converter: str) -> Patch | None:
    """The patch that ``converter`` has applied to the module, if any."""
    conversion = getattr(type(module), "__jumar__", None)
    patches = conversion.patches if conversion else ()
    return next((patch for patch in patches if patch.converter == converter), None)


def converted_class(original: type, patches: tuple[Patch, ...]) -> type:
    """The subclass of ``original`` with every patch applied in order; ``original`` itself for none."""
    if not patches:
        return original
    base = converted_class(original, patches[:-1])
    cls = _classes.get((original, patches))
    if cls is not None and cls.__base__ is base and cls.__jumar__.is_current(base):
        return cls
    from jumar.convert.registry import resolve

    namespace = resolve(patches[-1].converter)[0].namespace(patches[-1].key, base)
    sources = tuple((name, inspect.getattr_static(base, name, None)) for name in namespace)
    namespace |= {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__jumar__": Conversion(original, patches, sources),
        "__reduce_ex__": _reduce_ex,
    }
    cls = type(original)(original.__name__, (base,), namespace)
    _classes[original, patches] = cls
    return cls


def patched_class(module: nn.Module, patch: Patch) -> type:
    """The class that ``patch`` would give the module."""
    conversion = conversion_of(module)
    patches = conversion.patches if conversion else ()
    return converted_class(original_class(module), (*patches, patch))


def _reduce_ex(self: nn.Module, protocol: int):
    cls = type(self)
    original, patches = cls.__jumar__.original, cls.__jumar__.patches
    reduced = original.__reduce_ex__(self, protocol)
    if isinstance(reduced, str):
        return reduced
    make, args, *rest = reduced
    args = tuple(original if arg is cls else arg for arg in args)
    return (_rebuild, (make, args, original, patches), *rest)


def _rebuild(make, args: tuple, original: type, patches: tuple[Patch, ...]) -> nn.Module:
    module = make(*args)
    module.__class__ = converted_class(original, patches)
    return module


def _forward_bound_to_self(module: nn.Module) -> bool:
    """Whether ``module.forward`` is an instance attribute that only repeats the class's own method.

    Libraries that wrap ``forward`` for a while leave this behind when they assign the old value back.
    """
    forward = module.__dict__.get("forward")
    return (
        isinstance(forward, types.MethodType)
        and forward.__self__ is module
        and forward.__func__ is inspect.getattr_static(type(module), "forward")
    )


def obstacle(module: nn.Module) -> str | None:
    """Why the class of a module that matches must not be swapped, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is a TorchScript module"
    if "forward" in module.__dict__ and not _forward_bound_to_self(module):
        forward = module.__dict__["forward"]
        name = getattr(forward, "__qualname__", None) or type(forward).__qualname__
        return f"forward is overridden on the instance, by {name}"
    if any(isinstance(p, DTensor) for p in module._parameters.values()):
        return "its weight is a DTensor: convert before sharding"
    tensors = [*module.parameters(recurse=True)]
    device = next((t.device.type for t in tensors if t.device.type not in _DEVICES), None)
    if device is not None:
        return f"there is no kernel for device {device!r}"
    return None


@dataclass
class SwapAction:
    """Adds one patch to one module; ``undo`` removes that patch and no other."""

    path: str
    module: nn.Module
    patch: Patch
    _forward: Any = None

    def apply(self) -> None:
        module = self.module
        cls = patched_class(module, self.patch)
        if _forward_bound_to_self(module):
            self._forward = module.__dict__.pop("forward")
        module.__class__ = cls

    def undo(self) -> None:
        module, conversion = self.module, conversion_of(self.module)
        if patch_by(module, self.patch.converter) != self.patch:
            return
        if conversion is None:
            raise ConverterError(
                f"{self.path}: its class is now {type(module).__name__}, no longer the one that conversion gave "
                "it; undo first what changed it since"
            )
        if _forward_bound_to_self(module):
            del module.__dict__["forward"]
        module.__class__ = converted_class(
            conversion.original, tuple(patch for patch in conversion.patches if patch != self.patch)
        )
        if self._forward is not None:
            module.__dict__["forward"] = self._forward
            self._forward = None


def revert(model: nn.Module) -> int:
    """Take every conversion off a model, however it came by it (a copy or an unpickled model has no report).

    Returns the number of modules that got their original class or configuration back.
    """
    from jumar.convert import sdpa

    count = sdpa.revert(model)
    for module in model.modules():
        conversion = conversion_of(module)
        if conversion is not None:
            if _forward_bound_to_self(module):
                del module.__dict__["forward"]
            module.__class__ = conversion.original
            count += 1
    return count
