"""Give a method globals of its own, in which some names stand for something else.

Model libraries call the rotary function as a global of their module.  Assigning that global would change every
model of the process; a method that is rebuilt with other globals changes the one class that gets it.

The new globals are the dictionary of a real module that is registered in ``sys.modules`` under a name of jumar's:
``torch.compile`` looks the globals of functions that it inlines up by their ``__name__`` there, and would otherwise
find, and compile, the original function.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import types
import weakref
from collections.abc import Iterator

_numbers = itertools.count()
_OWN = ("__name__", "__spec__", "__loader__", "__jumar_origin__")


class CannotRebuild(Exception):
    """A method is wrapped in a way that hides the function inside."""


def methods(cls: type, stop: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Every plain method that ``cls`` resolves, inherited ones too, short of what ``stop`` itself has."""
    names = dict.fromkeys(
        name for base in cls.__mro__ if not issubclass(stop, base) for name in vars(base)
    )
    for name in names:
        value = inspect.getattr_static(cls, name, None)
        if isinstance(value, types.FunctionType):
            yield name, value


def _chain(function: types.FunctionType) -> Iterator[types.FunctionType]:
    while True:
        if isinstance(function, types.FunctionType):
            yield function
        if not hasattr(function, "__wrapped__"):
            return
        function = function.__wrapped__


def _names_in(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*(_names_in(c) for c in inner))


def globals_used(function: types.FunctionType) -> dict[str, object]:
    """The globals that a method refers to, looked up through its decorators, functions inside it included."""
    used: dict[str, object] = {}
    for layer in _chain(function):
        for name in _names_in(layer.__code__):
            if name in layer.__globals__:
                used.setdefault(name, layer.__globals__[name])
    return used


def check(function: types.FunctionType, names) -> None:
    """Raise CannotRebuild where :func:`rebuild` would, without making anything."""
    for layer in _chain(function):
        inner = getattr(layer, "__wrapped__", None)
        if inner is None:
            return
        if not isinstance(inner, types.FunctionType):
            raise CannotRebuild(
                f"{function.__qualname__} is wrapped around a {type(inner).__name__}"
            )
        if any(name in globals_used(inner) for name in names):
            if not any(_holds(cell, inner) for cell in layer.__closure__ or ()):
                raise CannotRebuild(
                    f"{function.__qualname__} is wrapped by a decorator that hides the method"
                )


def rebuild(function: types.FunctionType, replacements: dict[str, object], spaces: dict[int, dict]):
    """``function`` again, with ``replacements`` for some of its globals, inside all its decorators.

    Code, closure, defaults, annotations and attributes stay.  ``spaces`` collects the globals that were made, by
    the identity of the ones they stand for, so that the methods of one class share them.  Raises CannotRebuild
    for a decorator that does not keep the function it wraps in its closure.
    """
    check(function, replacements)
    inner = getattr(function, "__wrapped__", None)
    cells = function.__closure__ or ()
    if inner is not None and any(name in globals_used(inner) for name in replacements):
        places = [i for i, cell in enumerate(cells) if _holds(cell, inner)]
        new_inner = rebuild(inner, replacements, spaces)
        cells = tuple(
            types.CellType(new_inner) if i in places else cell for i, cell in enumerate(cells)
        )
    else:
        new_inner = inner
    space = function.__globals__
    if any(name in _names_in(function.__code__) and name in space for name in replacements):
        space = _own_globals(space, replacements, spaces)
    new = types.FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, cells or None
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__annotations__ = function.__annotations__
    new.__qualname__, new.__doc__, new.__module__ = (
        function.__qualname__,
        function.__doc__,
        function.__module__,
    )
    new.__dict__.update(function.__dict__)
    if inner is not None:
        new.__wrapped__ = new_inner
    return new


def _holds(cell: types.CellType, value) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def _own_globals(origin: dict, replacements: dict[str, object], spaces: dict[int, dict]) -> dict:
    space = spaces.get(id(origin))
    if space is None:
        label = re.sub(r"\W", "_", str(origin.get("__name__", "")))
        name = f"_jumar_globals_{next(_numbers)}_{label}"
        module = types.ModuleType(name, "Globals of converted methods.")
        space = module.__dict__
        space.update({key: value for key, value in origin.items() if key not in _OWN})
        space.update({key: value for key, value in replacements.items() if key in origin})
        sys.modules[name] = module
        spaces[id(origin)] = space
    return space


class Keeper:
    """Lives as long as the class that uses these globals, and takes their modules out of ``sys.modules`` then."""

    def __init__(self, spaces: dict[int, dict]):
        names = [space["__name__"] for space in spaces.values()]
        weakref.finalize(self, _forget, names)


def _forget(names: list[str]) -> None:
    for name in names:
        sys.modules.pop(name, None)
