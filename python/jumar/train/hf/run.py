"""A job on a Hugging Face folder: everything checked and loaded, then trained, exported and summed up."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import jumar
from jumar.convert.report import Report
from jumar.dsa import Meter
from jumar.train import indexers, mapping, rng, runner, summary
from jumar.train.errors import JobError
from jumar.train.files import replace_folder
from jumar.train.hf import chat, dataset, model, records
from jumar.train.job import Job
from jumar.train.records import Records
from jumar.train.signals import stop_on_signals

log = logging.getLogger("jumar.train")

ADAPTER = "adapter"


@dataclass
class Prepared:
    """A job whose every input was checked, with its model loaded and converted: nothing is trained yet."""

    job: Job
    report: Report
    folder: Path
    tokenizer: Any
    model: nn.Module
    data: dataset.Encoded
    rows: list[list[dataset.Sample]]
    held_out: list[list[dataset.Sample]] | None
    stamp: dict[str, Any]
    random: dict[str, Any]
    meters: list[Meter]

    @property
    def name(self) -> str:
        return f"hf {type(model.unwrapped(self.model)).__name__}"

    def summary(self) -> str:
        """What is about to be trained, for people."""
        training = self.job["training"]
        every = sum(p.numel() for p in self.model.parameters())
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        part = f", {trained:,} of them trained" if trained < every else ""
        batch = training["local_batch_size"]
        times = training["global_batch_size"] // batch if training["global_batch_size"] > 0 else 1
        form = "packed" if training["packing"] else "padded"
        held_out = f"; {len(self.held_out):,} sequences held out" if self.held_out else ""
        return (
            f"{self.name} from {self.folder}, {every:,} parameters{part}\n"
            f"{self.data}; {len(self.rows):,} {form} sequences of up to {training['seq_len']} tokens{held_out}\n"
            f"{training['steps']} steps of {f'{times} x ' if times > 1 else ''}{batch} sequences, "
            f"{_precision(self.job)}, SIMD {jumar.simd_target()}"
        )


def _precision(job: Job) -> str:
    training = job["training"]
    dtype, compute = training["dtype"], training["mixed_precision_param"]
    return dtype if dtype == compute or dtype == "bfloat16" else f"{dtype} weights, {compute} computation"


def prepare(job: Job) -> Prepared:
    """Reads and checks everything that a user can get wrong, then loads and converts the model.

    Raises:
        JobError: what is wrong with the job, its data, tokenizer or model.
    """
    _check(job)
    runner.talk()
    folder = job.path("model.hf_assets_path")
    if folder is None:
        raise JobError("model.hf_assets_path is missing: a folder with config.json, weights and tokenizer")
    training, held = job["training"], job["validation"]
    with _quiet():
        config = model.load_config(folder)
        tokenizer = model.load_tokenizer(folder)
        model.check_sizes(job, config, tokenizer, folder)
        found = _read(job, "training")
        held_found = _read(job, "validation") if held["enable"] and held["part"] is None else None
        if any(record.messages for record in [*found, *(held_found or [])]):
            chat.check_template(tokenizer, folder)
        if held["enable"] and held["part"] is not None:
            found, held_found = _split(job, found)
        length, too_long = training["seq_len"], training["too_long"]
        data = dataset.encode(found, tokenizer, length, too_long)
        lost = {name: data.counts[name] for name in ("truncated", "dropped", "empty") if data.counts[name]}
        if lost:
            log.warning("training data: %s", data)
        rows = dataset.rows(data.samples, length, training["packing"], training["seed"])
        held_out = None
        if held_found is not None:
            # One sample a row: what is held out weighs the same whatever it would be packed with.
            samples = dataset.encode(held_found, tokenizer, length, too_long).samples
            held_out = dataset.rows(samples, length, False, training["seed"])
        _steps(job, len(rows))
        with rng.untouched():
            rng.seed(training["seed"])
            loaded = model.load(job, folder)
            report = model.convert(job, loaded)
            if training["packing"]:
                model.check_packing(loaded, dataset.position_planes(loaded.config))
            meters = model.train_indexers(job, loaded, report)
            random = rng.capture()
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    stamp = {
        **mapping.stamp(job, SimpleNamespace(digest=records.digest(found))),
        "model": f"hf {type(loaded).__name__} {digest}{indexers.stamp(job)}",
        **{f"training.{name}": training[name] for name in ("packing", "too_long")},
    }
    return Prepared(job, report, folder, tokenizer, loaded, data, rows, held_out, stamp, random, meters)


def _check(job: Job) -> None:
    training, held = job["training"], job["validation"]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise JobError("model.name = 'hf' trains on one process; torchtitan's models train on many")
    if training["dataset"] != "jsonl":
        raise JobError(
            f"training.dataset = {training['dataset']!r}: a Hugging Face folder trains on training.dataset_path"
        )
    if training["dtype"] == "bfloat16" and training["mixed_precision_param"] == "float32":
        raise JobError("training.dtype = 'bfloat16' cannot be computed in training.mixed_precision_param = 'float32'")
    mode = job["activation_checkpoint"]["mode"]
    if mode not in ("none", "full"):
        raise JobError(f"activation_checkpoint.mode = {mode!r}: a Hugging Face folder has none and full")
    if job["checkpoint"]["initial_load_path"]:
        raise JobError("checkpoint.initial_load_path is nothing for model.name = 'hf': name the folder in model.hf_assets_path")
    if len(job["chat"]["name"]) > 2 or len(job["chat"]["author"]) > 2:
        raise JobError("chat.name and chat.author have one value, or two: for records of tag zh, and all others")
    if held["part"] is not None:
        if held["dataset_path"]:
            raise JobError("validation.part and validation.dataset_path exclude each other")
        if not 0 < held["part"] < 1:
            raise JobError(f"validation.part = {held['part']:g} is not between 0 and 1")
    from jumar.train.hf import trainer

    trainer.accumulation(job)


def _read(job: Job, section: str) -> list[records.Record]:
    path = job.path(f"{section}.dataset_path")
    if path is None:
        raise JobError(f"{section}.dataset_path is missing: a file or folder of chat or text")
    return records.read(path, job["chat"], name=f"{section}.dataset_path")


def _split(job: Job, found: list[records.Record]) -> tuple[list[records.Record], list[records.Record]]:
    """(to train on, held out), by the seed."""
    count = max(1, round(len(found) * job["validation"]["part"]))
    if count >= len(found):
        raise JobError(f"validation.part = {job['validation']['part']:g} of {len(found)} records leaves none to train on")
    generator = torch.Generator().manual_seed(job["training"]["seed"])
    chosen = set(torch.randperm(len(found), generator=generator)[:count].tolist())
    return [r for i, r in enumerate(found) if i not in chosen], [found[i] for i in sorted(chosen)]


def _steps(job: Job, rows: int) -> None:
    """Puts the number of steps in place of ``training.epochs``."""
    from jumar.train.hf import trainer

    training = job["training"]
    if training["epochs"] is not None:
        batch = training["local_batch_size"] * trainer.accumulation(job)
        training["steps"] = max(1, math.ceil(training["epochs"] * rows / batch))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from talking, and leaves its verbosity as it was."""
    import transformers

    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def train(prepared: Prepared, label: str = "") -> dict[str, Any]:
    """Trains a prepared job and returns its document, with the keys of :func:`jumar.train.run`.

    Raises:
        JobError: no checkpoint that could be resumed from; the disk is full.
        RuntimeError: an operator of a converted module never ran.
    """
    from jumar.train.hf.trainer import JobTrainer, accumulation

    job = prepared.job
    training, metrics = job["training"], job["metrics"]
    file = job.dump_folder / metrics["jsonl_file"] if metrics["jsonl_file"] else None
    log_file = Records(file, training["steps"], label=label)
    deterministic = torch.are_deterministic_algorithms_enabled()
    cached = prepared.model.config.use_cache if hasattr(prepared.model.config, "use_cache") else None
    planes = dataset.position_planes(prepared.model.config)
    items = training["steps"] * accumulation(job) * training["local_batch_size"]
    with _quiet(), rng.untouched(), stop_on_signals() as stop:
        torch.use_deterministic_algorithms(training["deterministic"] or deterministic)
        try:
            trainer = JobTrainer(
                job,
                training["steps"],
                log_file,
                prepared.stamp,
                prepared.held_out,
                prepared.meters,
                model=prepared.model,
                processing_class=prepared.tokenizer,
                train_dataset=dataset.Stream(prepared.rows, items, training["seed"]),
                data_collator=dataset.Collator(prepared.tokenizer.pad_token_id, training["packing"], planes),
            )
            trainer.stop = stop
            trainer.begin()
            rng.restore(prepared.random)
            jumar.reset_call_counts()
            trainer.run()
        finally:
            torch.use_deterministic_algorithms(deterministic)
            log_file.close()
        if cached is not None:
            prepared.model.config.use_cache = cached
        calls = jumar.call_counts()
        result = runner.document(
            job,
            prepared.report,
            stop,
            summary.rows(prepared.report, calls),
            calls,
            earlier=log_file.earlier,
            records=log_file.written,
            model=prepared.name,
            parameters=sum(p.numel() for p in prepared.model.parameters()),
            trained_parameters=sum(p.numel() for p in prepared.model.parameters() if p.requires_grad),
            processes=1,
            steps=trainer.state.global_step,
            resumed_from=trainer.resumed_from,
            data=dict(prepared.data.counts),
            vocabulary=len(prepared.tokenizer),
            tokenizer=str(prepared.folder),
            adapter_folder=None,
        )
        if not result["interrupted"] and job["checkpoint"]["export_hf"]:
            result |= _export(prepared)
    return result


def _export(prepared: Prepared) -> dict[str, str]:
    """Writes the final model for transformers, with adapters merged into it, and the adapters in peft's layout."""
    from jumar.train.hf.trainer import copy_extra_files

    job, whole = prepared.job, prepared.model
    result = {}
    if job["lora"]["enable"]:
        folder = job.dump_folder / ADAPTER
        with replace_folder(folder) as place:
            whole.save_pretrained(place)
            prepared.tokenizer.save_pretrained(place)
        result["adapter_folder"] = str(folder)
        whole = whole.merge_and_unload()
    folder = job.dump_folder / job["checkpoint"]["export_folder"]
    with replace_folder(folder) as place:
        whole.to(getattr(torch, job["checkpoint"]["export_dtype"])).save_pretrained(place)
        prepared.tokenizer.save_pretrained(place)
        copy_extra_files(prepared.folder, place)
    result["hf_folder"] = str(folder)
    return result
