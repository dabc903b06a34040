"""transformers' Trainer with what a job adds: exact loss weights, records, evaluation, checkpoints that survive kills."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from jumar import models
from jumar.convert.dsa import set_step_queries
from jumar.dsa import Meter
from jumar.profile import Settings, StepProfiler, profiling
from jumar.train import durable, indexers, pace, resume, rng, schedule
from jumar.train.errors import JobError
from jumar.train.hf.chat import IGNORED
from jumar.train.job import Job
from jumar.train.records import Records, of_step
from jumar.train.signals import Stop


def arguments(job: Job, steps: int) -> transformers.TrainingArguments:
    """The Trainer's own settings. What it would log, save or evaluate by itself is switched off: see :class:`JobTrainer`.

    Raises:
        JobError: transformers refuses a combination of values.
    """
    training, compile_ = job["training"], job["compile"]
    recompute = job["activation_checkpoint"]
    mixed = training["dtype"] == "float32" and training["mixed_precision_param"] == "bfloat16"
    try:
        return transformers.TrainingArguments(
            output_dir=str(job.dump_folder),
            max_steps=steps,
            per_device_train_batch_size=training["local_batch_size"],
            per_device_eval_batch_size=training["local_batch_size"],
            gradient_accumulation_steps=accumulation(job),
            max_grad_norm=training["max_norm"],
            seed=training["seed"],
            bf16=mixed,
            use_cpu=not torch.accelerator.is_available(),
            full_determinism=False,
            gradient_checkpointing=recompute["mode"] == "full",
            gradient_checkpointing_kwargs={
                "use_reentrant": False,
                "preserve_rng_state": recompute["preserve_rng_state"],
                "determinism_check": recompute["determinism_check"],
            },
            torch_compile=compile_["enable"],
            torch_compile_backend=compile_["backend"] if compile_["enable"] else None,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            report_to=[],
            log_level="error",
            logging_nan_inf_filter=False,
        )
    except (ValueError, ImportError) as error:
        raise JobError(f"{job.file.name}: {error}") from error


def accumulation(job: Job) -> int:
    """Forward passes a step. JobError when ``global_batch_size`` is not a multiple of ``local_batch_size``."""
    local, whole = job["training"]["local_batch_size"], job["training"]["global_batch_size"]
    if whole == -1:
        return 1
    if whole < local or whole % local:
        raise JobError(
            f"training.global_batch_size = {whole} is not a multiple of training.local_batch_size = {local}"
        )
    return whole // local


class JobTrainer(transformers.Trainer):
    """A step is: train, evaluate when due, write its record, save when due.

    A record is therefore always written before the checkpoint of its step, and a resumed run drops the records of later
    steps: together they give one record a step, whenever a run is killed.

    Attributes:
        stop: set by a signal; read after every step.
        resumed_from: the checkpoint that the run goes on from, or None.
    """

    def __init__(
        self,
        job: Job,
        steps: int,
        records: Records,
        stamp: dict[str, Any],
        held_out: Any,
        meters: list[Meter],
        **kwargs: Any,
    ):
        self.job, self.records, self.stamp, self.held_out = job, records, stamp, held_out
        self.indexer_loss = indexers.IndexerLoss(meters, accumulation(job))
        self.stop = Stop()
        self.session = StepProfiler(Settings(enable_profiling=False), job.dump_folder)
        self.resumed_from: Path | None = None
        self._norm: float | None = None
        self._handled = -1
        self._clear()
        super().__init__(args=arguments(job, steps), **kwargs)
        self.remove_callback(transformers.PrinterCallback)

    # Steps.

    # compute_loss gives each forward pass its share of the step.
    loss_is_scaled_for_ga = True

    def _clear(self) -> None:
        """Begins the sums that a record is made of."""
        self._loss = torch.zeros(())
        self._tokens = 0
        self._since, self._logged = time.perf_counter(), None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's: the data of a step."""
        pace.step_begins()
        batches, labels = super().get_batch_samples(*args, **kwargs)
        if self.indexer_loss.meters:
            # What is padded sees no key, or itself alone: its loss is 0.
            queries = sum(int(batch["tokens"]) for batch in batches)
            set_step_queries(self.model, queries)
            self.indexer_loss.queries = queries * len(self.indexer_loss.meters)
            self.indexer_loss.begin()
        return batches, labels

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The Trainer's; notes loss and tokens."""
        if self._handled != self.state.global_step:
            self._handled = self.state.global_step
            self._loss = torch.zeros(())
        tokens = int(inputs.pop("tokens"))
        self.state.num_input_tokens_seen += tokens
        self._tokens += tokens
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._loss = self._loss + loss.float().cpu()
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's. A model that cannot be told how many labels the step has gets its mean loss weighted here."""
        # With a cache, which some configurations ask for in a part of theirs, transformers does not look for documents.
        inputs = {**inputs, "use_cache": False}
        # The first label is always ignored, so that this is the number that the model counts after its shift.
        here = (inputs["labels"] != IGNORED).sum()
        if self.model_accepts_loss_kwargs or num_items_in_batch is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, True, None)
        loss = loss * (here / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        return sum((batch["labels"] != IGNORED).sum() for batch in batch_samples).to(device)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.job["optimizer"]["name"] != "jumar_adamw":
            return super()._clip_grad_norm(model)
        from jumar.optim import clip_grad_norm_

        return clip_grad_norm_([p for p in model.parameters() if p.grad is not None], self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        self._norm = float(super()._get_grad_norm(model, grad_norm))
        self._rate = self.optimizer.param_groups[0]["lr"]
        return self._norm

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """``[optimizer]``; biases and norms without weight decay, as the Trainer does it."""
        section = self.job["optimizer"]
        model = model or self.model
        decayed = set(self.get_decay_parameter_names(model))
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if (n in decayed) == flag], "weight_decay": decay}
            for flag, decay in ((True, section["weight_decay"]), (False, 0.0))
        ]
        groups = [group for group in groups if group["params"]]
        shared = {"lr": section["lr"], "betas": (section["beta1"], section["beta2"]), "eps": section["eps"]}
        if section["name"] == "jumar_adamw":
            from jumar.optim import AdamW

            self.optimizer = AdamW(groups, **shared, master_weights=section["master_weights"])
        else:
            form = section["implementation"]
            kind = getattr(torch.optim, section["name"])
            self.optimizer = kind(groups, **shared, fused=form == "fused", foreach=form == "foreach")
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """``[lr_scheduler]``."""
        if self.lr_scheduler is None:
            at = schedule.factor(self.job["lr_scheduler"], num_training_steps)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, at)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler:
        # The data set is a whole run's sequences in order.
        return torch.utils.data.SequentialSampler(self.train_dataset)

    # After a step.

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """In place of the Trainer's: called after every step, and once more after the last."""
        step = self.state.global_step
        if step == self._done:
            return
        self._done = step
        checkpoint, held_out = self.job["checkpoint"], self.job["validation"]
        last = step >= self.state.max_steps
        due = self.held_out is not None and (step % held_out["freq"] == 0 or last)
        loss = self.evaluate()["eval_loss"] if due else None
        if due or last or step == 1 or step % self.job["metrics"]["log_freq"] == 0:
            self._record(step, loss)
        asked = self.stop.signal is not None
        saved = checkpoint["enable"] and not checkpoint["load_only"]
        first = step == 1 and checkpoint["enable_first_step_checkpoint"]
        if saved and (last or asked or first or step % checkpoint["interval"] == 0):
            self._save_checkpoint(self.model, None)
        if asked:
            self.control.should_training_stop = True
        self.session.step()

    def _record(self, step: int, validation_loss: float | None) -> None:
        now = time.perf_counter()
        record = of_step(
            now - self._since,
            step - (self._logged if self._logged is not None else self._initial_global_step),
            self._tokens,
            step=step,
            loss=self._loss.item(),
            max_loss=self._loss.item(),
            grad_norm=self._norm,
            lr=self._rate,
            tokens_seen=self.state.num_input_tokens_seen,
        )
        if self.indexer_loss:
            record["indexer_loss"] = self.indexer_loss.mean()
        if validation_loss is not None:
            record["validation_loss"] = validation_loss
        self.records.add(record)
        self._since, self._logged, self._tokens = now, step, 0

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """``eval_loss``: the mean over the held-out labels, each weighing the same. Draws no random number."""
        total, count = 0.0, 0
        size = self.args.per_device_eval_batch_size
        batches = range(0, len(self.held_out), size)
        limit = self.job["validation"]["steps"]
        model, training = self.model_wrapped, self.model.training
        model.eval()
        with torch.no_grad(), rng.untouched():
            for begin in batches[: limit if limit > 0 else None]:
                inputs = self.data_collator(self.held_out[begin : begin + size])
                inputs.pop("tokens")
                here = (inputs["labels"] != IGNORED).sum()
                loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=here)
                total += loss.item() * here.item()
                count += here.item()
        model.train(training)
        return {"eval_loss": total / count}

    # Checkpoints.

    def begin(self) -> None:
        """Chooses the checkpoint to go on from, and opens the records. JobError as :func:`jumar.train.resume.choose`."""
        checkpoint = self.job["checkpoint"]
        self._done = 0
        if checkpoint["enable"]:
            self.resumed_from = resume.choose(
                self._root,
                step=checkpoint["load_step"],
                how=checkpoint["resume"],
                stamp=self.stamp,
                load_only=checkpoint["load_only"],
            )
        if self.resumed_from:
            self._done = int(self.resumed_from.name.removeprefix("step-"))
        self.records.resume(self._done)
        self._clear()

    @property
    def _root(self) -> Path:
        return self.job.dump_folder / self.job["checkpoint"]["folder"]

    def run(self) -> None:
        """Trains from the beginning, or from the checkpoint that :meth:`begin` chose."""
        with profiling(self.job["profiling"], self.job.dump_folder, step=self._done) as self.session:
            self._run()

    def _run(self) -> None:
        if self.resumed_from is None:
            self.train()
            return
        try:
            state = transformers.TrainerState.load_from_json(str(self.resumed_from / "trainer_state.json"))
            if state.global_step >= self.args.max_steps:
                self._load_from_checkpoint(str(self.resumed_from))
                self.state = state
                return
            self.train(resume_from_checkpoint=str(self.resumed_from))
        except (OSError, KeyError, ValueError) as error:
            if isinstance(error, JobError) or durable.disk_full(error):
                raise
            raise JobError(f"checkpoint {self.resumed_from} cannot be loaded: {error}") from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The Trainer's takes weights by their names alone, and leaves out, silently, what is stacked in the model only."""
        if self.job["lora"]["enable"]:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        loaded = models.load(resume_from_checkpoint, dtype=getattr(torch, self.job["training"]["dtype"]))
        (model or self.model).load_state_dict(loaded.state_dict())

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The Trainer's files, in a folder that is whole or absent."""
        step, checkpoint = self.state.global_step, self.job["checkpoint"]
        self.records.sync()
        path = self._root / f"step-{step}"
        weights_only = checkpoint["last_save_model_only"] and step >= self.state.max_steps
        with durable.atomic_folder(path) as place:
            self.save_model(str(place), _internal_call=True)
            if not weights_only:
                self._save_optimizer_and_scheduler(str(place))
                self._save_rng_state(str(place))
            self.state.save_to_json(str(place / "trainer_state.json"))
            resume.write_stamp(place, {**self.stamp, "step": step, "model_only": weights_only})
        durable.keep_latest(path.parent, checkpoint["keep_latest_k"])


def copy_extra_files(source: Path, target: Path) -> None:
    """Copies what a model's folder holds beside model and tokenizer: the settings of its image processors."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)
