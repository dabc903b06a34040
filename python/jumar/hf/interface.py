"""Fused experts by name, through transformers' ``ExpertsInterface``: ``experts_implementation="npu_gmm"``.

For models whose modules cannot be converted because something has wrapped their forward, as transformers' own tensor and
expert parallelism does: the name is looked up inside of what was wrapped.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from jumar.convert.experts import StackedExperts, combine
from jumar.convert.verdict import Match
from jumar.hf import experts as layouts

NAME = layouts.FUSED
_keys: weakref.WeakKeyDictionary[nn.Module, layouts.Stacked] = weakref.WeakKeyDictionary()


@torch.compiler.assume_constant_result
def _key(module: nn.Module) -> layouts.Stacked:
    if module not in _keys:
        verdict = layouts.recognise_stacked(module)
        if not isinstance(verdict, Match):
            reason = verdict.reason if verdict else layouts.UNKNOWN
            raise ValueError(f"{NAME}: {type(module).__name__}: {reason}")
        _keys[module] = verdict.key
    return _keys[module]


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function of ``ExpertsInterface``.

    Raises:
        ValueError: the experts compute something else than the operator.
    """
    experts = StackedExperts(module, _key(module))
    return combine(hidden_states, top_k_index, top_k_weights, experts, gmm=True, permute=True)


def register() -> None:
    """See :func:`jumar.hf.register`."""
    from transformers.integrations import moe

    from jumar.hf import attention

    attention.register()
    if hasattr(moe, "ExpertsInterface"):  # not in transformers 4.57
        moe.ExpertsInterface.register(NAME, experts_forward)
