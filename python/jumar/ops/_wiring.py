"""Wires the C++ operators into torch: fake kernels, gradients, dispatch to a real card.

Gradients are operators of their own, so what is registered here only passes tensors along.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Container, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from jumar._load import NAMESPACES

# A library unregisters its kernels when it is collected.
_libraries: list[torch.library.Library] = []

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: The operator that the user called, while others run for it.
_called: ContextVar[str | None] = ContextVar("_called", default=None)
#: What errors call an operator that runs for another one only.
_shown: dict[str, str] = {}


def _caller(name: str) -> str:
    """What errors of the operator ``name`` call it."""
    return _called.get() or _shown.get(name, name)


@contextlib.contextmanager
def _runs_for(name: str) -> Iterator[None]:
    """Errors of the operators that are called within begin with ``name``."""
    token = _called.set(name)
    try:
        yield
    except RuntimeError as error:
        other, colon, text = str(error).partition(":")
        ours = colon and other != name and other.isidentifier() and hasattr(torch.ops.jumar, other)
        if not ours or type(error) is not RuntimeError:
            raise
        raise RuntimeError(f"{name}:{text}") from error
    finally:
        _called.reset(token)


def _overloads(name: str) -> list[tuple[str, Any]]:
    """The operator in every namespace that has it, with the namespace."""
    spaces = [(ns, getattr(torch.ops, ns)) for ns in NAMESPACES]
    return [(ns, getattr(space, name).default) for ns, space in spaces if hasattr(space, name)]


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among arguments, also those in lists."""
    lists = [v if isinstance(v, list | tuple) else [v] for v in values]
    return [t for values in lists for t in values if isinstance(t, torch.Tensor)]


def register_fake(name: str, fake: Callable[..., Any], shown: str | None = None) -> None:
    """Registers `fake`, which gives the results' shapes, dtypes and strides, in every namespace.

    It is called with every positional argument of the schema.  ``shown``: what errors call the operator, where another
    one runs it.
    """
    if shown is not None:
        _shown[name] = shown
    for namespace, op in _overloads(name):
        torch.library.register_fake(f"{namespace}::{name}", _checked(name, op, fake))


def _checked(name: str, op: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake`, after a check that all tensors are on one device.

    A meta tensor among others calls the fake kernel, which alone would hand out memory that nothing has written.
    """
    # torch leaves out trailing arguments that have their defaults.
    defaults = [a.default_value for a in op._schema.arguments if not a.kwarg_only]

    def checked(*args: Any, **kwargs: Any) -> Any:
        args = (*args, *defaults[len(args) :])
        values = (*args, *kwargs.values())
        devices = sorted({str(t.device) for t in _tensors(values)})
        if len(devices) > 1:
            raise RuntimeError(
                f"{_caller(name)}: all tensors must be on one device, got {' and '.join(devices)}"
            )
        try:
            return fake(*args, **kwargs)
        except (IndexError, ValueError, ZeroDivisionError) as error:  # a dimension or a head that is not there
            shapes = ", ".join(str(list(t.shape)) for t in _tensors(values))
            raise RuntimeError(
                f"{_caller(name)}: the shapes of the tensors do not go together, got {shapes}"
            ) from error

    return checked


def register_autograd(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Registers the gradient in every namespace.

    ``backward`` may leave out trailing arguments that have no gradient; it is not called where no gradient comes.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.called = _caller(name)
        setup_context(ctx, inputs, output)

    for namespace, _ in _overloads(name):
        _register_autograd(namespace, name, _complete(backward), setup)


def _register_autograd(
    namespace: str, name: str, backward: Callable[..., Any], setup: Callable[..., None]
) -> None:
    library = _ReverseMode(namespace, "IMPL")
    _libraries.append(library)
    torch.library.register_autograd(
        f"{namespace}::{name}", backward, setup_context=setup, lib=library
    )


class _ReverseMode(torch.library.Library):
    """The autograd kernels that it registers refuse tangents, which torch's own drop in silence."""

    def impl(self, op_name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        def kernel(keyset: Any, *inputs: Any, **named: Any) -> Any:
            _refuse_tangents(op_name, inputs)
            return fn(keyset, *inputs, **named)

        super().impl(op_name, kernel, *args, **kwargs)


def _refuse_tangents(name: str, args: Sequence[Any]) -> None:
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(t).tangent is not None for t in _tensors(args)):
        raise RuntimeError(f"{_caller(name)}: forward-mode differentiation is not implemented")


def _complete(backward: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """`backward` with as many gradients as torch wants: one for each argument that it has not left out as a default."""

    def complete(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        none = tuple(
            [None] * len(need) if isinstance(need, list) else None for need in ctx.needs_input_grad
        )
        if all(grad is None for grad in grads):
            return none
        with _runs_for(ctx.called):
            found = backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        return (*found, *none[len(found) :])[: len(none)]

    return complete


def forbid_autograd(name: str) -> None:
    """Makes differentiation of the operator raise an error that names it, or what it is the gradient of.

    Used for the backward operators (double backward): without this, torch would hand out undefined gradients after a
    mere warning.
    """

    def setup(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
        ctx.called = _called.get()

    def backward(ctx: Any, *grads: Any) -> Any:
        what = f"{ctx.called}: not differentiable twice" if ctx.called else f"{name}: not differentiable"
        raise RuntimeError(f"{what} (double backward is not implemented)")

    for namespace, op in _overloads(name):
        # register_autograd refuses tensors that are passed by name only.
        if any(a.kwarg_only and "Tensor" in str(a.type) for a in op._schema.arguments):
            _forbid_by_kernel(namespace, op, backward, setup)
        else:
            _register_autograd(namespace, name, backward, setup)


def _forbid_by_kernel(
    namespace: str, op: Any, backward: Callable[..., Any], setup: Callable[..., None]
) -> None:
    class Forbidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Callable[[], Any], *tensors: torch.Tensor) -> Any:
            result = call()
            setup(ctx, tensors, result)
            return result

    Forbidden.backward = staticmethod(backward)

    name = op._schema.name.split("::")[1]

    def autograd(*args: Any, **kwargs: Any) -> Any:
        _refuse_tangents(name, (*args, *kwargs.values()))

        def call() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)

        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return Forbidden.apply(call, *tensors) if wanted else call()

    _libraries.append(torch.library.Library(namespace, "IMPL"))
    _libraries[-1].impl(name, autograd, "Autograd")


def register_autocast(name: str, keep: Container[int] = ()) -> None:
    """Under autocast the operator's floating tensors other than fp64 are cast, as those of ``F.linear`` are.

    Arguments at the places ``keep`` stay as they are.
    """
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def cast(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [cast(v) for v in value]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value if value.dtype == torch.float64 else value.to(torch.get_autocast_dtype("cpu"))

    def register(namespace: str, op: Any) -> None:
        def autocast(*args: Any) -> Any:
            args = [arg if at in keep else cast(arg) for at, arg in enumerate(args)]
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                return op(*args)

        _libraries.append(torch.library.Library(namespace, "IMPL"))
        _libraries[-1].impl(name, autocast, "AutocastCPU")

    for namespace, op in _overloads(name):
        register(namespace, op)


def register_in_place(name: str, written: tuple[int, ...], shown: str | None = None) -> None:
    """The autograd and the fake kernel of an operator that writes the arguments at these places, and returns nothing.

    Each is a tensor or a list. Their version counters go up, and they may not require a gradient.  ``shown``: see
    :func:`register_fake`.
    """
    op = getattr(torch.ops.jumar, name).default

    def kernel(keyset: Any, *args: Any) -> None:
        _refuse_tangents(name, args)
        tensors = [
            t for at in written for t in (args[at] if isinstance(args[at], list) else [args[at]])
        ]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError(
                f"{_caller(name)}: writes a tensor that requires grad, and is not differentiable; call it under torch.no_grad()"
            )
        torch.autograd.graph.increment_version(tensors)
        with torch._C._AutoDispatchBelowAutograd():
            op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    _libraries.append(torch.library.Library("jumar", "IMPL"))
    _libraries[-1].impl(name, kernel, "Autograd", with_keyset=True)
    register_fake(name, lambda *args: None, shown)


#: Names of operators in Python that call others.
COMPOSITES: set[str] = set()


def define_composite(signature: str, kernel: Callable[..., Any]) -> None:
    """Defines an operator in Python that calls others, in every namespace.

    For what the stable ABI cannot bind. ``torch.compile`` and autograd see the operators that are called.
    """
    name = signature.split("(")[0]
    COMPOSITES.add(name)

    def named(*args: Any, **kwargs: Any) -> Any:
        with _runs_for(name.split(".")[0]):
            return kernel(*args, **kwargs)

    for namespace in NAMESPACES:
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(signature)
        library.impl(name, named, "CompositeImplicitAutograd")
        _libraries.append(library)


def define_by_position(signature: str, call: Callable[..., Any]) -> None:
    """:func:`define_composite` for a ``call`` that takes all arguments in the order of the signature.

    For schemas with tensors behind the star, whose gradients torch cannot register: those are of the operator that is
    called.
    """
    arguments = [(a.name, a.default_value) for a in torch._C.parse_schema(signature).arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return call(*args, *(kwargs.get(name, value) for name, value in arguments[len(args) :]))

    define_composite(signature, kernel)


def on_card(first: torch.Tensor | Sequence[torch.Tensor]) -> bool:
    """Whether a tensor, or a list of them, lies on a real ``npu``."""
    if "npu" in NAMESPACES:
        return False
    tensors = [first] if isinstance(first, torch.Tensor) else first
    return any(t.device.type == "npu" for t in tensors[:1])


def resolve(name: str, first: torch.Tensor | Sequence[torch.Tensor]) -> Any:
    """The operator to call for `first`: the card's own on a card, else the one of this library."""
    return getattr(torch.ops.npu if on_card(first) else torch.ops.jumar, name)


def calls_operator(declared: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that calls the operator of its name (:func:`resolve`); ``declared`` has the signature and no body."""
    name = declared.__name__
    order = [
        (p.name, p.default)
        for p in inspect.signature(declared).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]

    @functools.wraps(declared)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        declared(*args, **kwargs)  # a TypeError where the arguments do not fit the signature
        # By position, since the card has other names for some.
        args = (*args, *(kwargs.pop(key, default) for key, default in order[len(args) :]))
        lists = [a for a in args if isinstance(a, list | tuple)]
        if isinstance(args[0], list | tuple) and not any(lists):
            # Without a tensor torch finds no kernel, and says only that.
            given = ", ".join(f"{key}={a}" for (key, _), a in zip(order, args, strict=True))
            raise RuntimeError(f"{name}: needs at least one tensor, got {given}")
        return resolve(name, args[0])(*args, **kwargs)

    return call


def gradient(
    name: str, fake: Callable[..., Any], doc: str = "", shown: str | None = None
) -> Callable[..., Any]:
    """Wires an operator that is the gradient of another, and is not differentiable itself.

    Args:
        name: of the operator.
        fake, shown: see :func:`register_fake`.
        doc: docstring of the result.

    Returns:
        A function that calls the operator (:func:`resolve`); its signature is the schema's.
    """
    register_fake(name, fake, shown)
    forbid_autograd(name)
    schema = getattr(torch.ops.jumar, name).default._schema
    parameters = [
        inspect.Parameter(
            a.name,
            inspect.Parameter.KEYWORD_ONLY if a.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
        )
        for a in schema.arguments
    ]
    signature = inspect.Signature(parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        return resolve(name, given.args[0])(*given.args, **given.kwargs)

    call.__name__ = call.__qualname__ = name
    call.__module__, call.__doc__, call.__signature__ = fake.__module__, doc, signature
    return call


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else: what kernels compute in and what statistics are stored in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
