"""Logits that are computed when somebody looks at them.

A causal language model with a fused loss needs no logits, but hands them out. :class:`LazyLogits` stands in their
place: a tensor whose shape, dtype and device are known, and whose elements are the head's output, computed by the head
itself on first use. Whatever is done with it gives what it would give with the head's output, gradients included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from jumar.hf.lazy import Lazy


def _weights(head: nn.Module) -> list[Tensor]:
    return [w for w in (head.weight, head.bias) if w is not None]


def _refuse_gradient(grad: Tensor) -> Tensor:
    raise RuntimeError(
        "npu_loss: logits that were not computed yet went into an autograd.Function, which cannot pass their gradient on; "
        "hand it logits.value()"
    )


class LazyLogits(Lazy):
    """``head(hidden)``, [.., V], not computed yet. See :func:`lazy_head`."""

    head: nn.Module
    hidden: Tensor

    @staticmethod
    def __new__(cls, head: nn.Module, hidden: Tensor, dtype: torch.dtype) -> LazyLogits:
        shape = (*hidden.shape[:-1], head.weight.shape[0])
        grad_mode = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        wanted = grad_mode and any(t.requires_grad for t in (hidden, *_weights(head)))
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=hidden.device, requires_grad=wanted
        )
        self.head, self.hidden = head, hidden
        self._grad_mode = grad_mode
        self._weights = [(p, p._version) for p in _weights(head)]
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self._value = None
        self._source = None
        if wanted:
            # What reaches the stand-in has passed Python's dispatch, and is lost to the model.
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient)
        return self

    @property
    def pending(self) -> bool:
        """True until somebody has looked at the elements."""
        return self._value is None

    def cast(self, dtype: torch.dtype) -> LazyLogits:
        """These logits in another dtype, lazy as well."""
        other = LazyLogits(self.head, self.hidden, dtype)
        other._source = self
        return other

    def value(self) -> Tensor:
        """The logits as an ordinary tensor.

        Raises:
            RuntimeError: the head's weight has changed since the forward pass, so that they are gone.
        """
        if self._value is None:
            with torch.set_grad_enabled(self._grad_mode):
                self._value = self._compute()
        return self._value

    def _compute(self) -> Tensor:
        if self._source is not None:
            return self._source.value().to(Tensor.dtype.__get__(self))
        now = _weights(self.head)
        same = len(now) == len(self._weights) and all(
            p is was and p._version == version
            for p, (was, version) in zip(now, self._weights, strict=True)
        )
        if not same:
            raise RuntimeError(
                "npu_loss: the logits of this forward pass were not computed, and the output head has changed since; "
                "look at them before the optimizer's step"
            )
        enabled, dtype = self._autocast
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            return type(self.head).forward(self.head, self.hidden)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is Tensor.float and len(args) == 1 and not kwargs and args[0].pending:
            return args[0].cast(torch.float32)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # Below autograd: going on would lose the gradient.
        raise RuntimeError(
            f"npu_loss: {func} got logits that are not computed yet past Python's dispatch (an autograd.Function or C++ "
            "code); hand it logits.value()"
        )

    def __repr__(self, **_: Any) -> str:
        if self.pending:
            return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, not computed yet)"
        return repr(self._value)


def head_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of the head's output, under autocast as without."""
    if torch.is_autocast_enabled("cpu") and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype("cpu")
    return hidden.dtype


@contextlib.contextmanager
def lazy_head(head: nn.Module) -> Iterator[None]:
    """While it lasts, calls of the head, with all of its hooks, give :class:`LazyLogits`."""

    @torch._dynamo.disable
    def forward(hidden: Tensor) -> Tensor:
        if hidden.device.type != "cpu" or type(hidden) is not Tensor:
            return type(head).forward(head, hidden)
        return LazyLogits(head, hidden, head_dtype(hidden))

    head.__dict__["forward"] = forward
    try:
        yield
    finally:
        if head.__dict__.get("forward") is forward:
            del head.__dict__["forward"]
