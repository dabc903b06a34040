"""The model of a job before it is trained: what its converters replace, and its results against the fp64 oracle."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import jumar
from jumar import models
from jumar.convert.errors import ConverterError
from jumar.convert.report import Report
from jumar.train import mapping, memory
from jumar.train.errors import JobError
from jumar.train.job import Job
from jumar.train.schema import HF, SECTIONS
from jumar.verify.models import ModelRow, StayWide, compare_runs, judge, verify_model

#: Rows and tokens a row of what a model of torchtitan is run on; fewer where the job's sequences are shorter.
ROWS, LENGTH = 2, 96
# Bytes a parameter while fp64 is compared: weights and gradients of three models.
_BYTES = 2 * (8 + 4 + 4)


def inspect(job: Job, converters: Sequence[str] | None, *, strict: bool = False) -> Report:
    """The sites in the job's model; nothing is built of torchtitan's models.

    Args:
        job: a checked job.
        converters: names in place of the job's; all that apply where neither has any.
        strict: a converter that matches nothing and is not optional is an error.

    Raises:
        JobError: the job's model is unknown or cannot be loaded.
        ConverterError: an unknown converter; see ``strict``.
    """
    names = _names(job, converters)
    if job["model"]["name"] == HF:
        model = _hf_model(job, getattr(torch, job["training"]["dtype"]))
        return jumar.convert(model, names, strict=strict) if names else jumar.kernelize(model, strict=strict)
    from jumar import titan

    return titan.plan(mapping.model_spec(job), names or [f"{name}?" for name in titan.CONVERTERS], strict=strict)


def verify(job: Job, converters: Sequence[str] | None, dtype: torch.dtype | None, *, seed: int = 0) -> list[ModelRow]:
    """A row per tensor, and one for all, as :func:`jumar.verify.verify_model`.

    torchtitan's models get random weights and run in training mode, so that the loss of indexers is among the results.

    Args:
        job: a checked job.
        converters: names in place of the job's.
        dtype: None for the one in which the job computes.
        seed: of weights, where there are none, and tokens.

    Raises:
        JobError: the job's model is unknown, cannot be loaded, or is too large for fp64.
        ConverterError: an unknown converter, one that matches nothing, or nothing was replaced.
    """
    names = _names(job, converters)
    dtype = dtype or getattr(torch, job["training"]["mixed_precision_param"])
    if job["model"]["name"] == HF:
        return verify_model(_hf_model(job, dtype), names or None, seed=seed)
    return judge(lambda drawn: _verify_titan(job, names, dtype, drawn), seed)


def _names(job: Job, converters: Sequence[str] | None) -> list[str]:
    return list(job["model"]["converters"] if converters is None else converters)


def _hf_model(job: Job, dtype: torch.dtype) -> nn.Module:
    from jumar.train.hf import model

    folder = job.path("model.hf_assets_path")
    if folder is None:
        raise JobError("model.hf_assets_path is missing: a folder with config.json")
    training = {**job["training"], "dtype": str(dtype).removeprefix("torch.")}
    loaded = model.load(dataclasses.replace(job, values={**job.values, "training": training}), folder)
    if job["lora"]["enable"]:
        _fill_zeros(loaded, job["training"]["seed"])
    return loaded.eval()


def _fill_zeros(model: nn.Module, seed: int) -> None:
    """Adapters begin at 0, and hide what is before them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and not parameter.any():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


# torchtitan.


class _WideExperts(TorchFunctionMode):
    """torchtitan rounds what goes into experts to bf16, for a product that knows nothing else: here it is multiplied as it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], Tensor) and args[0].dtype in (torch.float32, torch.float64):
            if func is Tensor.bfloat16:
                return args[0]
            if func is torch._grouped_mm:
                return _grouped(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _grouped(rows: Tensor, weights: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """Rows up to the end ``offs[e]`` times ``weights[e]``."""
    counts = offs.diff(prepend=offs.new_zeros(1)).tolist()
    parts = rows.split([*counts, len(rows) - sum(counts)])
    return torch.cat([part @ weight for part, weight in zip(parts, [*weights, weights[0] * 0], strict=True)])


def _verify_titan(job: Job, names: list[str], dtype: torch.dtype, seed: int) -> list[ModelRow]:
    from jumar import titan

    job = dataclasses.replace(job, values={**job.values, **{s: _defaults(s) for s in ("parallelism", "compile")}})
    spec = mapping.model_spec(job)
    report = titan.plan(spec, names or [f"{name}?" for name in titan.CONVERTERS])
    if not report.replaced:
        raise ConverterError("nothing in the model was replaced: there is nothing to verify")
    found = [name for name in report.requested if name not in report.unmatched]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, plain_loss = _build(job, mapping.model_spec(job), [])
        torch.manual_seed(seed)
        plain.init_states()
        _randomise(plain)
        fused, fused_loss = _build(job, spec, found)
        fused.init_states()
        fused.load_state_dict(plain.state_dict())
        length = min(job["training"]["seq_len"], LENGTH)
        tokens = torch.randint(spec.model.vocab_size, (ROWS, length + 1), generator=torch.Generator().manual_seed(seed))
        # Experts that stay torchtitan's are no result of the converters; replaced ones have to be wide by themselves.
        experts = any(site.converter == "npu_gmm" for site in report.replaced)
        with contextlib.nullcontext() if experts else _WideExperts():
            after = _run(_cast(fused, dtype), fused_loss, tokens)
        with _WideExperts():
            before = _run(_cast(copy.deepcopy(plain), dtype), plain_loss, tokens)
            with StayWide():
                exact = _run(_cast(plain, torch.float64).double(), plain_loss, tokens)
    return compare_runs(dtype, before, after, exact)


def _defaults(section: str) -> dict[str, Any]:
    return {key.name: key.default for key in SECTIONS[section]}


def _build(job: Job, spec: Any, converters: Iterable[str]) -> tuple[nn.Module, Any]:
    """(model, loss) as torchtitan's trainer builds them."""
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config.override import apply_overrides

    config = mapping.trainer_config(job, spec, job["training"]["dataset"], Path(), list(converters))
    try:
        spec.model.update_from_config(config=config)
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise JobError(f"{job.file.name}: {error}") from error
    if config.override.imports:
        apply_overrides(config.override, config)
    with torch.device("meta"):
        count = sum(p.numel() for p in spec.model.build().parameters())
    total = memory.total()
    if total is not None and count * _BYTES > total:
        raise JobError(
            f"{job['model']['name']} {spec.flavor} has {count:,} parameters, too many to compare with fp64 in the "
            f"{total / 2**30:.0f} GiB of this machine; give a smaller model.flavor"
        )
    model, loss = spec.model.build(), config.loss.build(compile_config=config.compile)
    if isinstance(loss, ChunkedLossWrapper):
        loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    return model, loss


def _randomise(model: nn.Module) -> None:
    """Weights at which attention and experts choose, norms and adapters count, and routers decide clearly."""
    routers = [m for m in model.modules() if hasattr(m, "router") and hasattr(m.router, "gate")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            elif "embed" not in name:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    if routers:
        biases = [getattr(m, "expert_bias_E", None) for m in routers]
        models.separate_experts(
            model.tok_embeddings.weight, [(m.router.gate.weight, b) for m, b in zip(routers, biases, strict=True)]
        )


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Parameters alone: that is what FSDP's mixed precision casts."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _run(model: nn.Module, loss_fn: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Logits, losses and gradients, by name."""
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention

    from jumar.dsa import Meter

    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(inputs.shape[1]).expand(len(inputs), -1)
    masks = {}
    if any(isinstance(m, FlexAttention | VarlenAttention) for m in model.modules()):
        masks["attention_masks"] = model.get_attention_masks(positions=positions)
    out = model.train()(inputs, positions=positions, **masks)
    loss, _ = loss_fn(out, labels, torch.tensor(labels.numel()))
    loss.backward()
    results = {"loss": loss.detach()}
    if out.shape[-1] == model.config.vocab_size:
        results["logits"] = out.detach()
    meters = [m.meter.take() for m in model.modules() if isinstance(getattr(m, "meter", None), Meter)]
    if any(meters):
        results["indexer loss"] = sum(meters)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"d {name}"] = parameter.grad
    return results
