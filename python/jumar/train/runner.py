"""Runs a job: checks it whole, builds torchtitan's trainer, trains, exports, reports."""

from __future__ import annotations

import contextlib
import gc
import json as json_module
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import jumar
from jumar import compat
from jumar.convert.errors import ConverterError
from jumar.train import (
    data,
    durable,
    export,
    mapping,
    plot,
    report,
    resume,
    rng,
    summary,
    tokenizer,
)
from jumar.train.errors import JobError
from jumar.train.job import Job, load
from jumar.train.records import settled
from jumar.train.report_plots import curve
from jumar.train.schema import HF
from jumar.train.signals import Stop, stop_on_signals


@dataclass
class Prepared:
    """A job whose every input was checked: nothing is trained yet."""

    job: Job
    spec: Any
    report: Any
    texts: data.Texts | None
    tokenizer: Path
    vocab: int
    hf_config: dict[str, Any] | None
    held_out: data.Texts | None = None


def ranks() -> tuple[int, int]:
    """(rank, world size) as torchrun gives them; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _data_ranks(job: Job, world: int) -> int:
    """How many ranks read different data."""
    parallelism = job["parallelism"]
    shared = 1
    for name in ("tensor", "pipeline", "context"):
        shared *= parallelism[f"{name}_parallel_degree"]
    if world % shared:
        raise JobError(
            f"{world} processes cannot be split over tensor, pipeline and context parallelism of {shared} together"
        )
    replicas, shards = (parallelism[f"data_parallel_{n}_degree"] for n in ("replicate", "shard"))
    left = world // shared
    if (shards == -1 and left % replicas) or (shards != -1 and replicas * shards != left):
        raise JobError(
            f"parallelism asks for {shared * replicas * max(shards, 1)} processes, there are {world}"
        )
    experts, pipeline = (parallelism[f"{n}_parallel_degree"] for n in ("expert", "pipeline"))
    among = world // pipeline // replicas
    if among % experts:
        raise JobError(
            f"parallelism.expert_parallel_degree = {experts}: experts are shared out among the {among} processes of a "
            "replica's pipeline stage, which it does not divide"
        )
    return left


def prepare(config_file: str, overrides: list[str]) -> Any:
    """Reads and checks everything that a user can get wrong. JobError for what is wrong.

    Returns :class:`Prepared`, or that of :mod:`jumar.train.hf.run` for a Hugging Face folder.
    """
    job = load(config_file, overrides)
    if job["optimizer"]["master_weights"] and job["optimizer"]["name"] != "jumar_adamw":
        raise JobError("optimizer.master_weights is of optimizer.name = 'jumar_adamw'")
    if job["model"]["name"] == HF:
        from jumar.train.hf import run as hf

        return hf.prepare(job)
    try:
        compat.apply()
    except compat.ShimError as error:
        raise JobError(str(error)) from error
    from jumar import titan

    spec = mapping.model_spec(job)
    try:
        report = titan.plan(spec, job["model"]["converters"])
    except ConverterError as error:
        raise JobError(f"model.converters: {error}") from error
    _, world = ranks()
    texts = data.load(job, _data_ranks(job, world))
    held_out = data.load(job, _data_ranks(job, world), "validation") if job["validation"]["enable"] else None
    vocab_size = spec.model.vocab_size
    assets = job.path("model.hf_assets_path")
    if assets is None:
        if texts is None:
            raise JobError("model.hf_assets_path is missing: a tokenizer can only be trained on dataset jsonl")
        wanted = job["model"]["tokenizer_vocab_size"] or vocab_size
        if wanted > vocab_size:
            raise JobError(
                f"tokenizer and model disagree: model.tokenizer_vocab_size is {wanted}, "
                f"the model's vocabulary {vocab_size}"
            )
        folder = tokenizer.train(texts, wanted, job.dump_folder / "tokenizer")
    else:
        folder = assets
    size = tokenizer.check(folder, vocab_size)
    if job["training"]["seq_len"] > spec.model.max_seq_len:
        raise JobError(
            f"training.seq_len = {job['training']['seq_len']} is more than the model's {spec.model.max_seq_len}"
        )
    config = export.hf_config(job["model"]["name"], spec.model, assets)
    return Prepared(job, spec, report, texts, folder, size, config, held_out)


class _Voice(logging.Handler):
    """Writes to what is standard error at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"jumar train: {record.getMessage()}", file=sys.stderr, flush=True)


_VOICE = _Voice()


def talk() -> None:
    """Lets what training has to say be seen on standard error."""
    log = logging.getLogger("jumar.train")
    log.addHandler(_VOICE)  # once, however often it is called
    log.setLevel(logging.INFO)


@contextlib.contextmanager
def _process() -> Iterator[None]:
    """What torchrun would set for a single process; leaves torch's and Python's global state as it was."""
    added = {}
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        added = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        os.environ.update(added)
    talk()
    root = logging.getLogger()
    level, collecting = root.level, gc.isenabled()
    threaded = torch.autograd.is_multithreading_enabled()
    root.setLevel(logging.ERROR)
    for name in ("torch.distributed", "torchtitan"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), rng.untouched():
            warnings.simplefilter("ignore")
            yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        root.setLevel(level)
        torch.autograd.set_multithreading_enabled(threaded)
        if collecting:
            gc.enable()
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _alone(job: Job) -> Iterator[None]:
    """One run at a time in a dump folder, and a full disk is an error of the job."""
    with contextlib.ExitStack() as stack:
        if ranks()[0] == 0:
            stack.enter_context(durable.RunLock(job.dump_folder))
            durable.sweep_temporaries(job.dump_folder)
        stack.enter_context(durable.clear_errors(job.dump_folder, "output"))
        yield


def run(config_file: str, overrides: list[str], *, json: bool = False) -> dict[str, Any]:
    """See :func:`jumar.train.run`."""
    console = Console(stderr=json, highlight=False)
    if not console.is_terminal:
        console.width = 160
    rank, world = ranks()
    with _alone(load(config_file, overrides)):
        prepared = prepare(config_file, overrides)
        if rank == 0:
            introduce(prepared, world, console)
        result = _recorded(prepared)
    if rank == 0:
        if json:
            print(json_module.dumps(result, indent=2))
        else:
            conclude(result, console)
    return result


def train(prepared: Prepared, *, label: str = "") -> dict[str, Any]:
    """Trains a prepared job and returns its document; prints the progress line alone.

    Raises:
        JobError: torchtitan refuses the job when it builds it; another run works in its dump folder; the disk is full.
        RuntimeError: a planned converter is absent from what was built, or its operator never ran.
    """
    with _alone(prepared.job):
        return _recorded(prepared, label)


def _recorded(prepared: Prepared, label: str = "") -> dict[str, Any]:
    """Trains, and writes the record and the report of the run, however it ends."""
    engine = "transformers" if prepared.job["model"]["name"] == HF else "torchtitan"
    conversion = prepared.report.to_dict()
    with report.recording(prepared.job, rank=ranks()[0], engine=engine, conversion=conversion) as record:
        result = _run(prepared, label)
        if record is not None:
            record.finish(result)
    name = prepared.job["metrics"]["report_file"]
    result["report_file"] = str(prepared.job.dump_folder / name) if name else None
    return result


def _run(prepared: Prepared, label: str = "") -> dict[str, Any]:
    job = prepared.job
    _, world = ranks()

    def dataset(texts: data.Texts | None, section: str) -> str:
        return data.register(texts) if texts is not None else job[section]["dataset"]

    if not job["checkpoint"]["enable"]:
        resume.refuse_leftovers(job.dump_folder / job["checkpoint"]["folder"])
    if job["model"]["name"] == HF:
        from jumar.train.hf import run as hf

        return hf.train(prepared, label)
    converters = [name for name in prepared.report.requested if name not in prepared.report.unmatched]
    config = mapping.trainer_config(
        job,
        prepared.spec,
        dataset(prepared.texts, "training"),
        prepared.tokenizer,
        converters,
        validation=dataset(prepared.held_out, "validation") if job["validation"]["enable"] else "",
        stamp=mapping.stamp(job, prepared.texts),
    )
    config.metrics.label = label
    with _process(), stop_on_signals() as stop:
        try:
            trainer = config.build()
        except (ValueError, AssertionError, NotImplementedError) as error:
            raise JobError(f"{job.file.name}: {error}") from error
        try:
            trainer.stop = stop
            return _train(trainer, prepared, world)
        finally:
            trainer.close()


def _train(trainer: Any, prepared: Prepared, world: int) -> dict[str, Any]:
    from jumar import titan

    job, report = prepared.job, prepared.report
    if job["checkpoint"]["create_seed_checkpoint"]:
        trainer.checkpointer.save(curr_step=0, last_step=True)
        return {"seed_checkpoint": str(job.dump_folder / job["checkpoint"]["folder"])}
    if prepared.hf_config is None and job["checkpoint"]["export_hf"] and ranks()[0] == 0:
        reason = export.obstacle(job["model"]["name"], prepared.spec.model)
        logging.getLogger("jumar.train").warning("no model for transformers will be written: %s", reason)
    modules = titan.count_modules(trainer.model_parts)
    jumar.reset_call_counts()
    trainer.train()
    parts = trainer.parallel_dims.pp
    # Stages differ, other ranks hold the same modules.
    modules = _sum(modules, world, parts)
    calls = _sum(jumar.call_counts(), world, world)
    metrics = trainer.metrics_processor
    result = document(
        job,
        report,
        trainer.stop,
        summary.rows(report, calls, modules),
        calls,
        earlier=_records(metrics.earlier, world),
        records=_records(metrics.records, world),
        model=f"{job['model']['name']} {job['model']['flavor']}",
        parameters=sum(p.numel() for part in trainer.model_parts for p in part.parameters()),
        processes=world,
        steps=trainer.step,
        resumed_from=getattr(trainer.checkpointer, "resumed_from", None),
        vocabulary=prepared.vocab,
        tokenizer=str(prepared.tokenizer),
    )
    if not result["interrupted"]:
        result["hf_folder"] = _export(trainer, prepared)
    return result


def document(
    job: Job,
    report: Any,
    stop: Stop,
    operators: list[dict[str, Any]],
    calls: dict[str, int],
    *,
    earlier: list[dict[str, Any]],
    records: list[dict[str, Any]],
    **own: Any,
) -> dict[str, Any]:
    """What a run of either engine returns, but for exports, see :func:`jumar.train.run`. Draws the plot.

    ``operators`` are :func:`jumar.train.summary.rows`, ``earlier`` the records of the steps before this run; ``own`` is
    what the engine knows: model, steps, resumed_from and others. RuntimeError as :func:`jumar.train.summary.check`.
    """
    if records:
        summary.check(operators)
    metrics, checkpoint = job["metrics"]["jsonl_file"], job["checkpoint"]
    interrupted = stop.signal if own["steps"] < job["training"]["steps"] else None
    return {
        "job": str(job.file),
        **own,
        "resumed_from": str(own["resumed_from"]) if own["resumed_from"] else None,
        "interrupted": interrupted,
        "exit_status": stop.exit_status if interrupted else 0,
        "losses": [record["loss"] for record in records],
        "records": records,
        "tokens_per_second": settled(records),
        "operators": operators,
        "calls": calls,
        "report": report.to_dict(),
        "dump_folder": str(job.dump_folder),
        "metrics_file": str(job.dump_folder / metrics) if metrics else None,
        "checkpoint_folder": str(job.dump_folder / checkpoint["folder"]) if checkpoint["enable"] else None,
        "hf_folder": None,
        "plot": _draw_losses(job, own["model"], earlier + records) if ranks()[0] == 0 else None,
    }


def _draw_losses(job: Job, model: str, records: list[dict[str, Any]]) -> str | None:
    """Draws the plot of a run; returns its file, or None where there is nothing to draw or no plot is wanted."""
    if not records or not job["metrics"]["plot_file"]:
        return None
    file = job.dump_folder / job["metrics"]["plot_file"]
    curves = {key.replace("_", " "): curve(records, key) for key in ("loss", "validation_loss")}
    plot.draw(file, {name: points for name, points in curves.items() if points}, f"{model}: loss")
    return str(file)


def _sum(counts: dict[str, int], world: int, groups: int) -> dict[str, int]:
    """Counts added up over the ranks; where only ``groups`` of them differ, over one of each."""
    if world == 1:
        return dict(counts)
    every: list[Any] = [None] * world
    torch.distributed.all_gather_object(every, dict(counts))
    total: dict[str, int] = {}
    for share in every:
        for name, count in share.items():
            total[name] = total.get(name, 0) + count
    return {name: count * groups // world for name, count in total.items()}


def _records(records: list[dict[str, Any]], world: int) -> list[dict[str, Any]]:
    """The records, on every rank: one of them knows the loss."""
    if world == 1:
        return records
    every: list[Any] = [None] * world
    torch.distributed.all_gather_object(every, records)
    return max(every, key=len)


def _export(trainer: Any, prepared: Prepared) -> str | None:
    checkpoint = prepared.job["checkpoint"]
    adapter_class = prepared.spec.state_dict_adapter
    if not checkpoint["export_hf"] or prepared.hf_config is None or adapter_class is None:
        return None
    dtype = getattr(torch, checkpoint["export_dtype"])
    adapters = prepared.job["lora"]
    gathered = torch.float32 if adapters["enable"] else dtype
    weights = export.gather(trainer.model_parts, gathered, trainer.parallel_dims.pp_enabled)
    if weights is not None and adapters["enable"]:
        weights = export.merge_adapters(
            weights, adapters["alpha"] / adapters["rank"], trainer.model_config, dtype
        )
    folder = prepared.job.dump_folder / checkpoint["export_folder"]
    if weights is not None:
        adapter = adapter_class(trainer.model_config, None)
        export.write(folder, weights, adapter, prepared.hf_config, prepared.tokenizer, dtype)
    return str(folder)


def introduce(prepared: Prepared, world: int, console: Console) -> None:
    """Prints what is about to be trained, and the conversion report."""
    job = prepared.job
    if job["job"]["description"]:
        console.print(job["job"]["description"], style="bold")
    if job["model"]["name"] == HF:
        console.print(prepared.summary())
    else:
        console.print(_summary(prepared, world))
    if prepared.report.requested:
        console.print(prepared.report)


def _summary(prepared: Prepared, world: int) -> str:
    job = prepared.job
    training = job["training"]
    documents = f"{len(prepared.texts.documents):,} documents" if prepared.texts else training["dataset"]
    return (
        f"{job['model']['name']} {job['model']['flavor']}, vocabulary {prepared.spec.model.vocab_size:,} "
        f"(tokenizer {prepared.vocab:,}), {documents}, {training['steps']} steps of "
        f"{training['local_batch_size']} x {training['seq_len']} tokens a rank, "
        f"{training['mixed_precision_param']}, {world} process{'es' if world > 1 else ''}, "
        f"SIMD {jumar.simd_target()}"
    )


def conclude(result: dict[str, Any], console: Console) -> None:
    """Prints the operators' table, the losses and where everything went."""
    if "losses" not in result:
        console.print(f"seed checkpoint: {result['seed_checkpoint']}")
        return
    if result["operators"]:
        console.print(summary.table(result["operators"]))
    if result["interrupted"]:
        if result["checkpoint_folder"]:
            way = f"checkpoint: {result['checkpoint_folder']}/step-{result['steps']}; the same command goes on from it"
        else:
            way = "nothing is kept to go on from: checkpoint.enable is false"
        console.print(f"{result['interrupted']}: ended after step {result['steps']}. {way}", soft_wrap=True)
    if result["losses"]:
        console.print(
            f"loss {result['losses'][0]:.4f} -> {result['losses'][-1]:.4f} in {result['steps']} steps, "
            f"{result['tokens_per_second']:,.0f} tokens/s"
        )
    for key, name in (
        ("metrics_file", "metrics"),
        ("plot", "plot"),
        ("report_file", "report"),
        ("checkpoint_folder", "checkpoints"),
        ("adapter_folder", "adapters"),
        ("hf_folder", "Hugging Face model"),
    ):
        if result.get(key):
            console.print(f"{name}: {result[key]}", soft_wrap=True)
