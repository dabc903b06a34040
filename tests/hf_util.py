"""Tiny model folders in Hugging Face layout, with tokenizer and chat template, and jobs on them; no hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONVERTERS = ["npu_rms_norm", "npu_rope", "npu_swiglu", "npu_linear"]
VOCABULARY = 320

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_JOB = """
[job]
dump_folder = "{out}"
[model]
name = "hf"
hf_assets_path = "model"
converters = {converters}
[training]
dataset_path = "chat.jsonl"
local_batch_size = 2
seq_len = 96
steps = 6
mixed_precision_param = "float32"
[optimizer]
lr = 3e-3
eps = 1e-6
[lr_scheduler]
warmup_steps = 2
[metrics]
report_file = ""
plot_file = ""
"""


def make_tokenizer(folder: Path, template: str | None = CHATML) -> Any:
    """A byte-level tokenizer with the tokens of ChatML; saved into ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["user assistant system the rope holds the climber who asks and the wall answers"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_folder(folder: Path, name: str = "qwen3", template: str | None = CHATML) -> Path:
    """A folder with config.json, safetensors of random weights, tokenizer."""
    import torch
    import transformers

    from jumar import models

    cls, make_config = models.BUILT_IN[name]
    config = make_config()
    text = config.get_text_config()
    text.vocab_size = VOCABULARY
    text.eos_token_id, text.pad_token_id, text.bos_token_id = 2, 3, None
    for number, key in enumerate(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")):
        if hasattr(config, key):
            setattr(config, key, 310 + number)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, cls)(config)
    model.save_pretrained(folder)
    make_tokenizer(folder, template)
    return folder


def conversations(count: int = 24) -> list[dict[str, Any]]:
    """Chats of different lengths, some of several turns."""
    words = "the rope holds a climber who reads one page of every book that the wall has kept".split()

    def say(seed: int, size: int) -> str:
        return " ".join(words[(seed * 7 + j * j + j) % len(words)] for j in range(size))

    result = []
    for i in range(count):
        messages = [{"role": "user", "content": say(i, 2 + i % 5)}, {"role": "assistant", "content": say(i + 3, 1 + i * 5 % 9)}]
        if i % 3 == 0:
            messages += [{"role": "user", "content": say(i + 1, 2)}, {"role": "assistant", "content": say(i, 3)}]
        result.append({"messages": messages})
    return result


def write_lines(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def write_hf_job(folder: Path, converters: list[str] = CONVERTERS, name: str = "qwen3") -> Path:
    """A job file, its model and its data in ``folder``; returns the job file."""
    make_folder(folder / "model", name)
    write_lines(folder / "chat.jsonl", conversations())
    file = folder / "job.toml"
    file.write_text(_JOB.format(out=folder / "out", converters=json.dumps(converters)))
    return file
