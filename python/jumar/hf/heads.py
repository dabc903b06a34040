"""Causal language models of transformers: the output head, and whether the loss sees exactly what the head gives."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from jumar.convert import swap
from jumar.hf import probe

_WIDTH = 4
_TOKENS = 3


def is_causal_loss(loss: Any) -> bool:
    """Whether a function is transformers' own causal loss, fused or not."""
    loss = getattr(loss, "original", loss)
    own = (getattr(loss, "__module__", "") or "").startswith("transformers.loss")
    return own and getattr(loss, "__name__", "") == "ForCausalLMLoss"


def takes_labels(cls: type) -> bool:
    """Whether the class has a forward with labels and a loss function of its own."""
    return hasattr(cls, "loss_function") and "labels" in inspect.signature(cls.forward).parameters


def head_of(module: nn.Module) -> tuple[str, nn.Module] | None:
    """(attribute, module) of the output head; None where it is not a child of the model."""
    head = module.get_output_embeddings()
    return next(((name, child) for name, child in module._modules.items() if child is head), None)


def head_obstacle(head: nn.Module) -> str | None:
    """Why the head cannot be fused, as far as the module tells; None when it can."""
    cls = swap.original_class(head)
    if cls is not nn.Linear:
        return f"its output head is a {cls.__qualname__}, not torch.nn.Linear"
    if type(head.weight) not in (nn.Parameter, Tensor) or not head.weight.is_floating_point():
        return f"the weight of its output head is a {type(head.weight).__name__} of {head.weight.dtype}"
    return None


def plain_now(head: nn.Module) -> bool:
    """Whether a call of the head is ``x Wᵀ + b`` and no more at this moment; checked at every forward pass."""
    return (
        head_obstacle(head) is None
        and not isinstance(head, FSDPModule)
        and not any(isinstance(p, DTensor) for p in head._parameters.values())
        and "forward" not in head.__dict__
        # They run as autograd functions on the output.
        and not head._backward_hooks
        and not head._backward_pre_hooks
        and not torch.nn.modules.module._global_backward_hooks
        and not torch.nn.modules.module._global_backward_pre_hooks
    )


class _Outputs:
    """What a decoder returns: hidden states, and None for everything else."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None


class _Decoder(nn.Module):
    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        return _Outputs(self.hidden)


def trial_model(
    module: nn.Module, cls: type, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> nn.Module:
    """A shallow copy of the model, of class ``cls``, whose decoder gives ``hidden`` and whose head has these weights."""
    name, _ = head_of(module)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    del head.weight
    head.weight = weight
    if bias is not None:
        del head.bias
        head.bias = bias
    copy = probe.stand_in(
        module, children={child: _Decoder(hidden) for child in module._modules} | {name: head}
    )
    copy.__class__ = cls
    return copy


def call(model: nn.Module, labels: Tensor) -> Any:
    """The model's forward with labels, without an auxiliary loss."""
    extra = {}
    parameters = inspect.signature(type(model).forward).parameters
    if "output_router_logits" in parameters:
        extra["output_router_logits"] = False
    ids = torch.zeros(labels.shape, dtype=torch.long, device="cpu")
    return type(model).forward(model, input_ids=ids, labels=labels, **extra)


def sees_plain_logits(module: nn.Module, cls: type) -> str | None:
    """Runs the model's own forward on a decoder of three tokens: None when its loss gets the head's very output.

    Otherwise why not. ``cls`` is the converted class; a model with ``_jumar_probe`` only notes there what its loss gets.
    """
    classes = head_of(module)[1].weight.shape[0]
    hidden = probe.randn(1, _TOKENS, _WIDTH, seed=31)
    # One element stands for all.
    weight = torch.zeros(1, 1, device="cpu").expand(classes, _WIDTH)
    labels = torch.zeros(1, _TOKENS, dtype=torch.long, device="cpu")
    model = trial_model(module, cls, hidden, weight, None)
    seen: list[bool] = []
    model.__dict__["_jumar_probe"] = seen
    try:
        with probe.quiet():
            call(model, labels)
    except Exception as error:
        return probe.describe(error)
    if not seen:
        return "its forward does not call its loss function"
    return None if seen == [True] else "its loss does not get the output of its head as it is"
