"""A checked job as torchtitan 0.3.0's ``Trainer.Config``."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from jumar.spelling import nearest
from jumar.train import indexers
from jumar.train.errors import JobError
from jumar.train.job import Job

log = logging.getLogger("jumar.train")

#: Stands for every linear layer but the output head, as peft's word does.
ALL = "all-linear"


def model_spec(job: Job) -> Any:
    """The model that the job names. JobError, with the nearest name, for one that torchtitan does not have."""
    from jumar.titan import models

    name, flavor = job["model"]["name"], job["model"]["flavor"]
    if name not in models.model_names():
        known = models.model_names()
        raise JobError(f"model.name = {name!r} is unknown{nearest(name, known)} (known: {', '.join(known)})")
    try:
        known = models.flavors(name)
    except ImportError as error:
        raise JobError(f"model.name = {name!r}: torchtitan's model needs a package that is missing: {error}") from error
    if flavor not in known:
        raise JobError(
            f"model.flavor = {flavor!r} is unknown for {name}{nearest(flavor, known)} (known: {', '.join(known)})"
        )
    spec = models.model_spec(name, flavor)
    _balance(job, spec)
    _indexers(job, spec)
    if job["lora"]["enable"]:
        _lora(job, spec)
    return spec


def _balance(job: Job, spec: Any) -> None:
    """The rate at which the bias of routers moves, where the job gives one."""
    from torchtitan.models.common.moe import MoE

    rate = job["model"]["load_balance_coeff"]
    if rate is None:
        return
    mixtures = [moe for _, moe, _, _ in spec.model.traverse(MoE.Config, recurse=True)]
    if not mixtures:
        raise JobError(f"model.load_balance_coeff = {rate}: {job['model']['name']} {spec.flavor} has no experts")
    for moe in mixtures:
        moe.load_balance_coeff = rate or None


def _indexers(job: Job, spec: Any) -> None:
    """The stage of sparse attention's indexers and the weight of their loss; 0 where adapters leave them out."""
    given = indexers.given(job)
    if not given and not job["lora"]["enable"]:
        return
    from torchtitan.models.common.linear import Linear

    from jumar.titan.deepseek_v32 import SparseAttention

    nodes = [node for _, node, _, _ in spec.model.traverse(SparseAttention.Config, recurse=True)]
    if given and not nodes:
        raise indexers.absent(job, f"{job['model']['name']} {spec.flavor}")
    wanted = job["lora"]["target_modules"] if job["lora"]["enable"] else [ALL]
    paths = [path for path, _, _, _ in spec.model.traverse(Linear.Config, recurse=True) if ".indexer." in path]
    if nodes and wanted != [ALL] and not {path.rsplit(".", 1)[-1] for path in paths} & set(wanted):
        if given and given.get("loss_coeff") != 0:
            raise indexers.untrained(job)
        given = {"loss_coeff": 0.0}
    for name, value in given.items():
        for node in nodes:
            setattr(node, name, value)


def stamp(job: Job, texts: Any) -> dict[str, Any]:
    """What a checkpoint says about its job: what a resumed run must share, and what it should."""
    training = job["training"]
    return {
        "model": f"{job['model']['name']} {job['model']['flavor']}{indexers.stamp(job)}",
        "lora": {k: job["lora"][k] for k in ("rank", "alpha", "target_modules")} if job["lora"]["enable"] else None,
        "training.dataset": texts.digest if texts is not None else training["dataset"],
        **{
            f"training.{k}": training[k]
            for k in ("seed", "seq_len", "local_batch_size", "global_batch_size", "dtype", "mixed_precision_param")
        },
        "optimizer": job["optimizer"],
    }


def check_targets(section: dict[str, Any], known: list[str]) -> None:
    """JobError where ``[lora] target_modules`` is empty, or names a layer that is not in ``known``."""
    if not section["target_modules"]:
        raise JobError("lora.target_modules is empty: nothing would be trained")
    for name in section["target_modules"]:
        if name not in known and section["target_modules"] != [ALL]:
            hint = nearest(name, [*known, ALL])
            raise JobError(f"lora.target_modules: no layer is called {name!r}{hint} (known: {', '.join(known)}, {ALL})")


def _lora(job: Job, spec: Any) -> None:
    """Puts torchtitan's adapters into a model's configuration."""
    from jumar.titan import lora

    section = job["lora"]
    known, experts = lora.targets(spec.model), lora.experts(spec.model)
    for name in section["target_modules"]:
        if name in experts and name not in known:
            raise JobError(
                f"lora.target_modules: {name!r} is a part of experts or their router, which adapters do not cover "
                f"(known: {', '.join(known)}, {ALL})"
            )
    if experts:
        log.warning("experts have no adapters and stay as they are: torchtitan stacks them in one weight")
        # Their bias too: it is moved after every step.
        spec.post_optimizer_build_fn = None
    wanted = known if section["target_modules"] == [ALL] else section["target_modules"]
    check_targets(section, known)
    spec.model = lora.convert(spec.model, section["rank"], section["alpha"], wanted)


def _shared(section: dict[str, Any], target: type, **changed: Any) -> Any:
    """An instance of a torchtitan dataclass from the keys that it shares with a section, and changed ones."""
    known = {field.name for field in fields(target) if field.init}
    return target(**{**{k: v for k, v in section.items() if k in known}, **changed})


def _activation_checkpoint(section: dict[str, Any]) -> Any:
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC

    from jumar.titan.checkpointing import FusedSelectiveAC

    target = {
        "none": None,
        "selective": FusedSelectiveAC.Config,
        "full": FullAC.Config,
        "memory_budget": MemoryBudgetAC.Config,
    }[section["mode"]]
    return None if target is None else _shared(section, target)


def _jumar_adamw(stock: Any, section: dict[str, Any]) -> Any:
    """torchtitan's configuration of optimizers as the one that knows ``jumar_adamw``."""
    from jumar.titan.optimizer import NAME, Optimizers

    masters = {NAME: {"master_weights": True}} if section["master_weights"] else {}
    return _shared(
        {field.name: getattr(stock, field.name) for field in fields(stock)},
        Optimizers.Config,
        optimizer_factory_kwargs_by_name=masters,
    )


def trainer_config(
    job: Job,
    spec: Any,
    dataset: str,
    tokenizer: Path,
    converters: list[str],
    *,
    validation: str = "",
    stamp: dict[str, Any] | None = None,
) -> Any:
    """The configuration of torchtitan's Trainer.

    Args:
        job: the checked job.
        spec: its model, see :func:`model_spec`.
        dataset: name under which the data is registered with torchtitan.
        tokenizer: folder of the tokenizer.
        converters: plain names, each an override of :mod:`jumar.titan`.
        validation: name of the data of evaluation, where there is one.
        stamp: see :func:`stamp`.

    Raises:
        JobError: torchtitan refuses a combination of values; the text is torchtitan's.
    """
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config.configs import (
        CommConfig,
        CompileConfig,
        DebugConfig,
        ParallelismConfig,
        TrainingConfig,
    )
    from torchtitan.config.override import OverrideConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    from jumar.train.checkpoints import DurableCheckpoints
    from jumar.train.evaluation import JobValidator
    from jumar.train.metrics import JobMetrics
    from jumar.train.profiler import JobProfiler
    from jumar.train.trainer import JobTrainer

    training, optimizer, parallelism = job["training"], job["optimizer"], job["parallelism"]
    adam = default_adamw(
        lr=optimizer["lr"],
        betas=(optimizer["beta1"], optimizer["beta2"]),
        eps=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
    )
    adam.param_groups[0].optimizer_name = optimizer["name"]
    adam.implementation = optimizer["implementation"]
    if optimizer["name"] == "jumar_adamw":
        adam = _jumar_adamw(adam, optimizer)
    loss: Any = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    if training["loss_chunks"] > 1:
        loss = ChunkedLossWrapper.Config(loss_fn=loss, num_chunks=training["loss_chunks"])
    if "npu_loss" in converters and parallelism["tensor_parallel_degree"] > 1:
        raise JobError(
            "model.converters: npu_loss needs the whole output head on a process, and "
            f"parallelism.tensor_parallel_degree = {parallelism['tensor_parallel_degree']} shards it"
        )
    balancer = parallelism["context_parallel_load_balancer"]
    dump = job.dump_folder
    metrics, checkpoint, held_out = job["metrics"], job["checkpoint"], job["validation"]
    initial = job.path("checkpoint.initial_load_path")
    try:
        return JobTrainer.Config(
            model_spec=spec,
            hf_assets_path=str(tokenizer),
            dump_folder=str(dump),
            metrics=_shared(
                metrics,
                JobMetrics.Config,
                jsonl=str(dump / metrics["jsonl_file"]) if metrics["jsonl_file"] else None,
                steps=training["steps"],
                validation_freq=held_out["freq"] if validation else 0,
            ),
            validator=JobValidator.Config(
                enable=bool(validation),
                freq=held_out["freq"],
                steps=held_out["steps"] or -1,
                last_step=training["steps"],
                dataloader=HuggingFaceTextDataLoader.Config(
                    dataset=validation,
                    dataset_path=None if validation.startswith("jsonl:") else held_out["dataset_path"],
                ),
            ),
            dataloader=HuggingFaceTextDataLoader.Config(
                dataset=dataset,
                dataset_path=None if dataset.startswith("jsonl:") else training["dataset_path"],
            ),
            optimizer=adam,
            lr_scheduler=_shared(job["lr_scheduler"], LRSchedulersContainer.Config),
            training=_shared(training, TrainingConfig, disable_cuda_graphs=True),
            parallelism=_shared(
                parallelism,
                ParallelismConfig,
                context_parallel_load_balancer=None if balancer == "none" else balancer,
            ),
            checkpoint=_shared(
                checkpoint,
                DurableCheckpoints.Config,
                stamp=stamp or {},
                initial_load_path=str(initial) if initial else None,
                # torchtitan warns when it is set without a path.
                initial_load_model_only=bool(initial) and checkpoint["initial_load_model_only"],
            ),
            activation_checkpoint=_activation_checkpoint(job["activation_checkpoint"]),
            compile=_shared(job["compile"], CompileConfig),
            profiler=_shared(job["profiling"], JobProfiler.Config),
            comm=CommConfig(trace_buf_size=0, init_timeout_seconds=600, train_timeout_seconds=600),
            debug=DebugConfig(
                seed=training["seed"],
                deterministic=training["deterministic"],
                print_config=job["job"]["print_config"],
                enable_structured_logging=False,
            ),
            override=OverrideConfig(imports=[f"jumar.titan.{name}" for name in converters]),
            loss=loss,
        )
    except (ValueError, AssertionError) as error:
        raise JobError(f"{job.file.name}: {error}") from error
