"""Tensors whose elements are computed when somebody looks at them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Never

import torch
from torch import Tensor

# What is known without elements.
_KNOWN = {
    Tensor.shape.__get__,
    Tensor.dtype.__get__,
    Tensor.device.__get__,
    Tensor.requires_grad.__get__,
    Tensor.ndim.__get__,
    Tensor.layout.__get__,
    Tensor.is_cpu.__get__,
    Tensor.is_cuda.__get__,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.element_size,
    Tensor.__len__,
    Tensor.__hash__,
}


class Lazy(Tensor):
    """A stand-in made by ``Tensor._make_wrapper_subclass``: shape, dtype and device are known, :meth:`value` is the rest.

    Whatever is done with it is done with its value.
    """

    # A tensor's metaclass is torch's own, and tensors are made past object.__new__: abc cannot watch over them.
    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if getattr(cls.value, "__isabstractmethod__", False):
            raise TypeError(f"{cls.__name__}: a subclass of Lazy must define value()")

    @staticmethod
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Never:
        raise TypeError(f"{cls.__name__} is abstract: make one of its subclasses")

    @abstractmethod
    def value(self) -> Tensor:
        """The elements as an ordinary tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = torch.utils._pytree.tree_map_only(
            Lazy, lambda lazy: lazy.value(), (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(
            Lazy, lambda lazy: lazy.value(), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.value().__deepcopy__(memo)
