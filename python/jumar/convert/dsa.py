"""``npu_dsa``: attention whose keys an indexer chooses, DeepSeek-V3.2's, and the loss that the indexer learns from."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from jumar import dsa
from jumar.convert import swap
from jumar.convert.errors import ConverterError
from jumar.convert.registry import ModuleConverter, register
from jumar.convert.report import Site
from jumar.convert.sdpa import Switch, SwitchAction
from jumar.convert.verdict import Verdict
from jumar.convert.verify import Trial
from jumar.hf import dsa as recogniser


class DsaConverter(ModuleConverter):
    name = "npu_dsa"
    aliases = ("dsa", "sparse_attention")
    operators = ("npu_sparse_flash_attention", "npu_lightning_indexer", "npu_sparse_lightning_indexer_grad_kl_loss")
    summary = "DeepSeek-V3.2's sparse attention: the indexer, and attention on latent keys"

    def __init__(self):
        self._verdicts: dict[tuple, Verdict] = {}

    def plan(self, model):
        self._verdicts = {}
        switch = Switch(model, recogniser.FUSED)
        for site in super().plan(model):
            if site.status == "replaced" and site.action.patch.key == ("attention",):
                switch.chosen.append(site.action.module)
                site.action = SwitchAction(switch, site.action.module, site.action)
            yield site
        self._verdicts = {}

    def recognise(self, module):
        """Modules of one class and configuration are looked at once."""
        config = module.__dict__.get("config")
        key = type(module), id(config), getattr(module, "attention_dropout", None)
        if key not in self._verdicts:
            self._verdicts[key] = recogniser.recognise(module)
        return self._verdicts[key]

    def namespace(self, key, base):
        return recogniser.namespace(key[0], base)

    def trials(self, site: Site) -> Iterable[Trial]:
        if not isinstance(site.action, SwitchAction):
            return
        module, patch = site.action.module, site.action.swap.patch
        before = recogniser.tiny(module)
        after = recogniser.tiny(module)
        after.__class__ = swap.patched_class(module, patch)
        hidden, tables, mask = recogniser.trial_inputs(module)
        yield Trial(
            lambda x: type(before).forward(before, x, tables, mask)[0],
            lambda x: type(after).forward(after, x, tables, mask)[0],
            (hidden,),
        )


register(DsaConverter())


def train_indexers(
    model: nn.Module, *, coeff: float = 1.0, stage: str = "sparse", step_queries: int | None = None
) -> list[dsa.Meter]:
    """Lets the indexers of a converted transformers model learn, which the library's own never do.

    Every backward pass of the model in training mode then adds the gradients of the indexers' loss, whatever the model's own
    loss is; the parameters of the indexers must require gradients.

    Args:
        model: one in which ``npu_dsa`` replaced the attention.
        coeff: weight of the loss.
        stage: ``sparse``, or ``warmup``: attention is over all keys, and the indexers learn from all of them.
        step_queries: queries of a whole optimizer step, the divisor of the loss's gradients; None: those of a forward pass,
            which is right without gradient accumulation. :func:`set_step_queries` changes it.

    Returns:
        A meter a layer; :meth:`jumar.dsa.Meter.take` gives the loss, summed over queries, since it was last taken.

    Raises:
        ConverterError: no attention of the model was converted, or an unknown stage.
    """
    if stage not in ("sparse", "warmup"):
        raise ConverterError(f"train_indexers: stage must be 'sparse' or 'warmup', got {stage!r}")
    found = [m for m in model.modules() if (p := swap.patch_by(m, "npu_dsa")) and p.key == ("attention",)]
    if not found:
        raise ConverterError("train_indexers: npu_dsa has replaced nothing in this model")
    meters = [dsa.Meter() for _ in found]
    for module, meter in zip(found, meters, strict=True):
        module.__dict__[recogniser.LEARNING] = recogniser.Learning(meter, coeff, stage, step_queries)
    return meters


def set_step_queries(model: nn.Module, step_queries: int | None) -> None:
    """Gives the steps to come another divisor than :func:`train_indexers` got: for batches whose rows differ in length."""
    for module in model.modules():
        learning = module.__dict__.get(recogniser.LEARNING)
        if learning is not None:
            learning.step_queries = step_queries
