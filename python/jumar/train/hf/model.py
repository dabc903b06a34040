"""The model of a Hugging Face folder: loaded, given adapters, converted to fused operators, checked."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

import jumar
from jumar.convert import dsa
from jumar.convert.errors import ConverterError
from jumar.convert.report import Report
from jumar.dsa import Meter, freeze_others, learns
from jumar.train import indexers
from jumar.train.errors import JobError
from jumar.train.job import Job
from jumar.train.mapping import ALL, check_targets

log = logging.getLogger("jumar.train")

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, with a padding token.

    Raises:
        JobError: there is none, or it is not a fast one (which says where in the text a token stands).
    """
    import transformers

    # Without files transformers may make up an empty one.
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise JobError(f"model.hf_assets_path {folder}: no tokenizer in it ({', '.join(_TOKENIZERS)})")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds
        text = " ".join(str(error).split())
        raise JobError(f"model.hf_assets_path {folder}: no tokenizer can be loaded from it: {text[:300]}") from error
    if not tokenizer.is_fast:
        raise JobError(f"model.hf_assets_path {folder}: the tokenizer is not a fast one (tokenizer.json)")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise JobError(f"model.hf_assets_path {folder}: the tokenizer has neither a pad_token nor an eos_token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(folder: Path) -> Any:
    """The folder's configuration. JobError where there is none, or one that transformers does not know."""
    import transformers

    if not (folder / "config.json").is_file():
        raise JobError(f"model.hf_assets_path {folder}: no config.json in it")
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise JobError(f"{folder / 'config.json'}: {error}") from error


def check_sizes(job: Job, config: Any, tokenizer: Any, folder: Path) -> None:
    """JobError when the tokenizer has tokens that the model has no row for, or sequences are longer than its positions."""
    text = config.get_text_config()
    last = max(tokenizer.get_vocab().values(), default=-1)
    if last >= text.vocab_size:
        raise JobError(
            f"tokenizer and model disagree: {folder} has token ids up to {last}, the model's vocabulary is {text.vocab_size}"
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest and job["training"]["seq_len"] > longest:
        raise JobError(f"training.seq_len = {job['training']['seq_len']} is more than the model's {longest}")


def load(job: Job, folder: Path) -> nn.Module:
    """The model in ``training.dtype``, with adapters when the job has them; without weights in the folder, random ones.

    Raises:
        JobError: transformers cannot load it; it is no language model; a name of ``lora.target_modules`` matches nothing.
    """
    from jumar import models

    training = job["training"]
    dtype = getattr(torch, training["dtype"])
    if not any(folder.glob("*.safetensors*")) and not any(folder.glob("pytorch_model*")):
        log.warning("%s holds no weights: the model starts from random ones (training.seed)", folder)
    try:
        model = models.load(folder, seed=training["seed"], dtype=dtype)
    except Exception as error:
        raise JobError(f"model.hf_assets_path {folder}: {error}") from error
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        raise JobError(f"model.hf_assets_path {folder}: {type(model).__name__} has no head that predicts tokens")
    torch.manual_seed(training["seed"])
    return _adapted(job, model) if job["lora"]["enable"] else model


def _adapted(job: Job, model: nn.Module) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise JobError(f"lora.enable: peft is missing: {error}") from error
    section = job["lora"]
    head = model.get_output_embeddings()
    linear = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    wanted = section["target_modules"]
    check_targets(section, sorted(linear))
    config = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=section["rank"],
        lora_alpha=section["alpha"],
        lora_dropout=section["dropout"],
        target_modules=ALL if wanted == [ALL] else wanted,
    )
    return peft.get_peft_model(model, config)


def convert(job: Job, model: nn.Module) -> Report:
    """Switches the model to the job's converters, layers inside of adapters and the adapters themselves included.

    Raises:
        JobError: an unknown converter, or one that is not optional and matches nothing.
    """
    names = job["model"]["converters"]
    plain = [name.rstrip("?") for name in names]
    twice = next((name for name in plain if plain.count(name) > 1), None)
    if twice:
        raise JobError(f"model.converters: {twice!r} is listed twice")
    try:
        return jumar.convert(model, names, strict=True)
    except ConverterError as error:
        raise JobError(f"model.converters: {error}") from error


def train_indexers(job: Job, model: nn.Module, report: Report) -> list[Meter]:
    """Lets the indexers of a converted model learn, where the job gives their keys; their meters.

    Raises:
        JobError: the model has no indexers; they are not converted; nothing of them is trained.
    """
    given, inner = indexers.given(job), type(unwrapped(model)).__name__
    sites = [site for site in report.sites if site.converter == "npu_dsa"]
    if not given:
        if any(site.status == "replaced" for site in sites):
            log.warning("the indexers of %s do not learn; model.indexer_stage makes them", inner)
        return []
    key = f"model.indexer_{next(iter(given))}"
    if not sites:
        if not jumar.convert.plan(model, ["npu_dsa?"]).report().sites:
            raise indexers.absent(job, inner)
        raise JobError(f"{key}: transformers has no loss for indexers; it is npu_dsa's, which model.converters lacks")
    for site in sites:
        if site.status != "replaced":
            raise JobError(f"{key}: npu_dsa leaves {site.path} alone: {site.reason}")
    if given.get("loss_coeff") == 0:
        return []
    if given.get("stage") == indexers.WARMUP:
        freeze_others(model)
        for site in sites:
            site.operator = "npu_fusion_attention"  # what runs, and is counted
    if not learns(model):
        raise indexers.untrained(job)
    names = {"stage": "stage", "loss_coeff": "coeff"}
    return dsa.train_indexers(model, **{names[name]: value for name, value in given.items()})


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of peft's."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def check_packing(model: nn.Module, planes: int) -> None:
    """Packs two short documents and compares the second one's logits with those that it has alone.

    Raises:
        JobError: they differ: the model does not keep packed documents apart.
    """
    vocabulary = model.config.get_text_config().vocab_size
    first, second = (torch.arange(size) * 7 % min(vocabulary, 97) for size in (5, 3))
    ids = torch.cat([first, second])[None]
    positions = torch.cat([torch.arange(5), torch.arange(3)])[None]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            packed = model(
                input_ids=ids, position_ids=positions.expand(planes, -1, -1) if planes else positions, use_cache=False
            ).logits[0, 5:]
            alone = model(input_ids=second[None], use_cache=False).logits[0]
    finally:
        model.train(training)
    close = 1e-3 if packed.dtype == torch.float32 else 5e-2
    if not torch.allclose(packed.float(), alone.float(), rtol=close, atol=close * float(alone.abs().max())):
        raise JobError(
            f"training.packing: {type(model).__name__} lets packed documents see one another; set packing to false"
        )
