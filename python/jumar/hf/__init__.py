"""Recognisers for Hugging Face models and plain torch modules.

A recogniser decides by what a module *does*: candidates are picked by structure, and confirmed by running the
module's own code on a tiny random input and comparing with the operator's formula.
"""

from __future__ import annotations


def model_table(names=None) -> str:
    """The Markdown table of built-in models and what is really replaced in each; see :mod:`jumar.hf.table`."""
    from jumar.hf.table import model_table as table

    return table(names)


def register() -> None:
    """Lets models of transformers name fused parts in their configuration, in place of a conversion.

    ``attn_implementation="npu_sdpa"`` is the attention of the converter ``npu_sdpa``; ``experts_implementation="npu_gmm"``
    (transformers 5) what ``npu_gmm`` and ``npu_permute`` make of experts. Twice is harmless.
    """
    from jumar.hf import interface

    interface.register()
