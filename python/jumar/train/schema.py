"""The sections and keys of a job file: types, defaults, choices, one line each.

The names are torchtitan's, as torchtitan-npu documents them for TOML; where a value goes in torchtitan 0.3.0 is in
:mod:`jumar.train.mapping`. Keys that only jumar has are marked so in their text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """One key. ``kind`` is int, float, bool, str, strs (list of strings) or lists (list of lists of strings).

    ``default`` None means "not set"; such a key also accepts ``none`` on the command line. A key with ``required``
    has no default. ``path`` marks files and folders that are looked up beside the job file, then in the working folder.
    """

    name: str
    kind: str
    default: Any
    text: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    required: bool = False
    path: bool = False


_DTYPES = ("bfloat16", "float32")

#: The model name that stands for a folder which transformers trains.
HF = "hf"

SECTIONS: dict[str, tuple[Key, ...]] = {
    "job": (
        Key("config_file", "str", None, "the job file itself; only on the command line"),
        Key("dump_folder", "str", "./outputs", "where everything is written, relative to the working folder"),
        Key("description", "str", "", "a line of text, printed at the start"),
        Key("print_config", "bool", False, "print the whole torchtitan configuration"),
    ),
    "model": (
        Key("name", "str", None, "a model of torchtitan: qwen3, llama3, ...; hf: the one in hf_assets_path, by transformers", required=True),
        Key("flavor", "str", None, "a size of that model: debugmodel, 0.6B, ...; not for hf", required=True),
        Key(
            "hf_assets_path",
            "str",
            None,
            "folder with tokenizer.json; not set: a byte-level BPE is trained on the data. For hf: the model's folder",
            path=True,
        ),
        Key("converters", "strs", [], "fused operators to use; `name?` may match nothing"),
        Key(
            "tokenizer_vocab_size",
            "int",
            None,
            "jumar: size of a trained tokenizer; not set: the model's vocabulary",
            minimum=257,
        ),
        Key(
            "load_balance_coeff",
            "float",
            None,
            "jumar: how far a step moves the bias by which routers choose experts; 0: no bias; not set: the model's own",
            minimum=0,
        ),
        Key(
            "indexer_stage",
            "str",
            None,
            "jumar: of DeepSeek-V3.2: sparse, or warmup: attends to all keys and trains the indexers alone; not set: sparse, for hf their loss is not computed",
            ("sparse", "warmup"),
        ),
        Key("indexer_loss_coeff", "float", None, "jumar: weight of the indexers' loss; not set: 1; for hf see indexer_stage", minimum=0),
    ),
    "training": (
        Key("dataset", "str", "jsonl", "jsonl, or a dataset that torchtitan knows (c4, c4_test)"),
        Key("dataset_path", "str", None, "folder of, or one, JSON-lines file with a `text` field", path=True),
        Key("local_batch_size", "int", 8, "sequences a data-parallel rank and forward pass", minimum=1),
        Key("global_batch_size", "int", -1, "sequences a step over all ranks; -1: local times ranks"),
        Key("seq_len", "int", 2048, "tokens a sequence", minimum=1),
        Key("max_norm", "float", 1.0, "gradients are clipped to this norm", minimum=0),
        Key("steps", "int", 10000, "steps to train", minimum=1),
        Key("dtype", "str", "float32", "dtype of weights and optimizer states", _DTYPES),
        Key("mixed_precision_param", "str", "bfloat16", "dtype of the computation", _DTYPES),
        Key("mixed_precision_reduce", "str", "float32", "dtype of gradient reduction", ("float32",)),
        Key("enable_cpu_offload", "bool", False, "FSDP's offload of parameters to the host"),
        Key("gc_freq", "int", 50, "steps between Python garbage collections", minimum=1),
        Key("gc_debug", "bool", False, "collect garbage after every step"),
        Key("seed", "int", 0, "of weights and data order"),
        Key("deterministic", "bool", False, "torch.use_deterministic_algorithms"),
        Key("packing", "bool", False, "hf: fill sequences with several samples, which never see one another"),
        Key("too_long", "str", "truncate", "hf: what is done with a sample of more than seq_len tokens", ("truncate", "drop")),
        Key("epochs", "float", None, "hf: passes over the data, in place of `steps`; put aside by a `steps` on the command line", minimum=0),
        Key("loss_chunks", "int", 1, "jumar: chunks of the sequence for the loss; >1 saves memory", minimum=1),
    ),
    "chat": (
        Key("name", "strs", [], "hf: what stands for {{NAME}} in the data; two: for records of tag zh, and all others"),
        Key("author", "strs", [], "hf: what stands for {{AUTHOR}}, likewise"),
        Key("system", "str", None, "hf: system message of samples that have none"),
    ),
    "lora": (
        Key("enable", "bool", False, "train low-rank adapters of linear layers, and nothing else"),
        Key("rank", "int", 8, "rank of the adapters", minimum=1),
        Key("alpha", "float", 16.0, "adapters are scaled by alpha / rank", minimum=0),
        Key("dropout", "float", 0.0, "hf: of what goes into an adapter", minimum=0),
        Key(
            "target_modules",
            "strs",
            ["all-linear"],
            "layers by the last part of their name (wq, wo, w1, ...); all-linear: every one but the output head",
        ),
    ),
    "validation": (
        Key("enable", "bool", False, "evaluate on held-out text while training"),
        Key("dataset", "str", "jsonl", "jsonl, or a dataset that torchtitan knows"),
        Key("dataset_path", "str", None, "folder of, or one, JSON-lines file with a `text` field", path=True),
        Key("part", "float", None, "hf: in place of dataset_path: this part of the training data is held out", minimum=0),
        Key("freq", "int", 10, "steps between evaluations; the last step is evaluated too", minimum=1),
        Key("steps", "int", -1, "batches of local_batch_size an evaluation; -1: the whole set", minimum=-1),
    ),
    "optimizer": (
        Key("name", "str", "AdamW", "the optimizer", ("AdamW", "Adam", "jumar_adamw")),
        Key("lr", "float", 8e-4, "learning rate", minimum=0),
        Key("beta1", "float", 0.9, "decay of the first moment", minimum=0),
        Key("beta2", "float", 0.95, "decay of the second moment", minimum=0),
        Key("eps", "float", 1e-8, "added to the denominator", minimum=0),
        Key("weight_decay", "float", 0.1, "weight decay", minimum=0),
        Key("implementation", "str", "fused", "torch's form of the step", ("for-loop", "foreach", "fused")),
        Key("master_weights", "bool", False, "jumar_adamw: step fp32 copies of bf16 weights, with fp32 moments"),
    ),
    "lr_scheduler": (
        Key("warmup_steps", "int", 200, "steps of linear warm-up; more than `steps` is cut", minimum=0),
        Key("total_steps", "int", None, "length of the schedule; not set: training.steps", minimum=1),
        Key("decay_ratio", "float", None, "part of the schedule that decays; not set: all after warm-up"),
        Key("decay_type", "str", "linear", "form of the decay", ("linear", "sqrt", "cosine")),
        Key("min_lr_factor", "float", 0.0, "lowest learning rate as a part of lr", minimum=0),
    ),
    "checkpoint": (
        Key("enable", "bool", False, "save checkpoints, and resume from the newest whole one in `folder`"),
        Key(
            "resume",
            "str",
            "auto",
            "jumar: when `folder` holds checkpoints: auto goes on from the newest, never refuses; must refuses when it holds none",
            ("auto", "must", "never"),
        ),
        Key("folder", "str", "checkpoint", "folder of checkpoints in dump_folder"),
        Key("interval", "int", 500, "steps between checkpoints", minimum=1),
        Key("initial_load_path", "str", None, "checkpoint to start from when `folder` holds none", path=True),
        Key("initial_load_model_only", "bool", True, "take only the weights of initial_load_path"),
        Key("initial_load_in_hf", "bool", False, "initial_load_path is in Hugging Face layout"),
        Key("last_save_model_only", "bool", False, "leave the optimizer out of the last checkpoint"),
        Key("last_save_in_hf", "bool", False, "torchtitan's own Hugging Face form of the last checkpoint"),
        Key("export_dtype", "str", "float32", "dtype of exported weights", ("float16", *_DTYPES)),
        Key("async_mode", "str", "async", "async: written in the background, from a copy in memory", ("async", "disabled")),
        Key("keep_latest_k", "int", 10, "checkpoints to keep; 0: all", minimum=0),
        Key("load_step", "int", -1, "step to resume from; -1: the newest"),
        Key("exclude_from_loading", "strs", [], "states not to load: optimizer, lr_scheduler, dataloader, rng"),
        Key("enable_first_step_checkpoint", "bool", False, "also save after the first step"),
        Key("create_seed_checkpoint", "bool", False, "save the initial weights as step 0, train nothing"),
        Key("load_only", "bool", False, "load, never save"),
        Key("export_hf", "bool", True, "jumar: write the final model in Hugging Face layout"),
        Key("export_folder", "str", "hf", "jumar: folder of that model in dump_folder"),
    ),
    "metrics": (
        Key("log_freq", "int", 1, "steps between log lines and records", minimum=1),
        Key("enable_tensorboard", "bool", False, "also write TensorBoard files"),
        Key("save_tb_folder", "str", "tb", "folder of TensorBoard files in dump_folder"),
        Key("enable_wandb", "bool", False, "also log to Weights & Biases"),
        Key("save_for_all_ranks", "bool", False, "TensorBoard files for every rank"),
        Key("disable_color_printing", "bool", False, "no colours in torchtitan's lines"),
        Key("jsonl_file", "str", "metrics.jsonl", "jumar: one record a step; \"\" for none"),
        Key("plot_file", "str", "loss.png", "jumar: plot of the loss; \"\" for none"),
        Key("report_file", "str", "report.html", "jumar: the run on one page, in one file; \"\" for none"),
    ),
    "profiling": (
        Key("enable_profiling", "bool", False, "write a Chrome trace and a table of operators of some steps"),
        Key("save_traces_folder", "str", "profiling/traces", "folder of traces in dump_folder"),
        Key("profile_freq", "int", 10, "steps of a cycle, whose last ones are recorded", minimum=1),
        Key("profiler_active", "int", 1, "steps of a cycle that are recorded", minimum=1),
        Key("profiler_warmup", "int", 3, "steps before them in which the profiler warms up", minimum=0),
        Key("profiler_repeat", "int", None, "cycles to record; not set: all", minimum=1),
        Key("profiler_skip_first", "int", None, "steps before the first cycle", minimum=0),
        Key("profiler_skip_first_wait", "int", None, "1: no waiting in the first cycle", minimum=0),
    ),
    "activation_checkpoint": (
        Key("mode", "str", "none", "what is computed again in backward", ("none", "selective", "full", "memory_budget")),
        Key("memory_budget", "float", 0.5, "for memory_budget: 0 keeps least, 1 most", minimum=0),
        Key("preserve_rng_state", "bool", True, "save and restore the random state"),
        Key("determinism_check", "str", "default", "torch.utils.checkpoint's check", ("default", "none")),
    ),
    "compile": (
        Key("enable", "bool", False, "compile with torch.compile"),
        Key("components", "strs", ["model", "loss"], "what is compiled", ("model", "loss")),
        Key("backend", "str", "inductor", "torch.compile's back end"),
    ),
    "parallelism": (
        Key("data_parallel_replicate_degree", "int", 1, "replicas of the model (DDP, HSDP)", minimum=1),
        Key("data_parallel_shard_degree", "int", -1, "FSDP ranks; -1: all that are left"),
        Key(
            "fsdp_reshard_after_forward",
            "str",
            "default",
            "when FSDP frees gathered weights",
            ("default", "always", "never"),
        ),
        Key("tensor_parallel_degree", "int", 1, "tensor-parallel ranks", minimum=1),
        Key("enable_sequence_parallel", "bool", True, "shard activations along the sequence under TP"),
        Key("pipeline_parallel_degree", "int", 1, "pipeline stages (ranks)", minimum=1),
        Key("pipeline_parallel_schedule", "str", "1F1B", "torch's pipeline schedule"),
        Key("pipeline_parallel_microbatch_size", "int", 1, "sequences a microbatch", minimum=1),
        Key("pipeline_parallel_layers_per_stage", "int", None, "layers a stage", minimum=1),
        Key("pipeline_parallel_first_stage_less_layers", "int", 1, "layers fewer in the first stage", minimum=0),
        Key("pipeline_parallel_last_stage_less_layers", "int", 1, "layers fewer in the last stage", minimum=0),
        Key("module_fqns_per_model_part", "lists", None, "modules of every stage by name"),
        Key("context_parallel_degree", "int", 1, "ranks that share one sequence", minimum=1),
        Key("context_parallel_load_balancer", "str", "headtail", "order of the parts", ("headtail", "ptrr", "none")),
        Key("expert_parallel_degree", "int", 1, "ranks that share the experts", minimum=1),
        Key(
            "spmd_backend",
            "str",
            "partial_dtensor",
            "torchtitan's sharding back end; spmd_types needs a torch newer than 2.13",
            ("partial_dtensor", "full_dtensor", "spmd_types"),
        ),
    ),
}

# What an engine has nothing for: an error when it is set to anything but its default.
_TORCHTITAN_ONLY = {
    "model": ("flavor", "tokenizer_vocab_size", "load_balance_coeff"),
    "training": ("enable_cpu_offload", "gc_freq", "gc_debug", "loss_chunks"),
    "validation": ("dataset",),
    "checkpoint": ("initial_load_model_only", "initial_load_in_hf", "last_save_in_hf", "exclude_from_loading", "create_seed_checkpoint"),
    "metrics": ("enable_tensorboard", "save_tb_folder", "enable_wandb", "save_for_all_ranks", "disable_color_printing"),
    "activation_checkpoint": ("memory_budget",),
    "compile": ("components",),
    "parallelism": tuple(key.name for key in SECTIONS["parallelism"]),
}
_HF_ONLY = {
    "training": ("packing", "too_long", "epochs"),
    "chat": ("name", "author", "system"),
    "lora": ("dropout",),
    "validation": ("part",),
}


def elsewhere(model: str) -> dict[str, Key]:
    """The keys, as ``section.key``, that the engine which trains ``model`` does not have."""
    table = _TORCHTITAN_ONLY if model == HF else _HF_ONLY
    return {
        f"{section}.{key.name}": key for section, names in table.items() for key in SECTIONS[section] if key.name in names
    }
