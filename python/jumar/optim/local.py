"""From what a model holds to what a kernel takes: the local part of a DTensor, real parts of complex tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor; does not import torch.distributed.tensor."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def memory(tensor: Tensor) -> Tensor:
    """The plain tensor of this process whose memory is the tensor's. Call it under ``torch.no_grad()``."""
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether kernels can read its memory: strided, on the CPU, no wrapper around other tensors."""
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    if type(local) not in (Tensor, torch.nn.Parameter):
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        if is_traceable_wrapper_subclass(local) and type(local).__name__ != "AsyncCollectiveTensor":
            return False
    return local.layout == torch.strided and local.device.type == "cpu"
