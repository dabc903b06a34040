"""The job's tokenizer: one that is given, or a byte-level BPE trained on the data."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from jumar.train.data import Texts
from jumar.train.errors import JobError
from jumar.train.files import replace_folder

END_OF_TEXT = "<|endoftext|>"
_STAMP = "trained_on.json"
# 256 bytes and one special token.
SMALLEST = 257


def train(texts: Texts, vocab_size: int, folder: Path) -> Path:
    """Trains a byte-level BPE on the documents into ``folder``; one that was trained on the same is kept.

    The folder then holds ``tokenizer.json`` and ``tokenizer_config.json`` as transformers' AutoTokenizer reads them. The
    vocabulary has at most ``vocab_size`` entries; small data gives fewer.

    Raises:
        JobError: ``vocab_size`` is less than the 256 bytes and the end-of-text token.
    """
    if vocab_size < SMALLEST:
        raise JobError(f"a byte-level tokenizer needs a vocabulary of {SMALLEST}, the model has {vocab_size}")
    stamp = {"data": texts.digest, "vocab_size": vocab_size}
    if _stamp(folder) == stamp:
        return folder
    if int(os.environ.get("RANK", "0")) != 0:
        return _wait(folder, stamp)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts.documents, trainer, length=len(texts.documents))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    with replace_folder(folder) as place:
        tokenizer.save(str(place / "tokenizer.json"))
        (place / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (place / _STAMP).write_text(json.dumps(stamp) + "\n")
    return folder


def _stamp(folder: Path) -> dict | None:
    try:
        return json.loads((folder / _STAMP).read_text())
    except (OSError, json.JSONDecodeError):
        return None


def _wait(folder: Path, stamp: dict, seconds: float = 600) -> Path:
    """Other ranks wait for the first one's tokenizer."""
    end = time.monotonic() + seconds
    while _stamp(folder) != stamp:
        if time.monotonic() > end:
            raise JobError(f"no tokenizer appeared in {folder} within {seconds:.0f} s")
        time.sleep(0.2)
    return folder


def check(folder: Path, vocab_size: int) -> int:
    """Reads a tokenizer folder and compares it with the model; returns the size of its vocabulary.

    Raises:
        JobError: no ``tokenizer.json``; a token id that the model's embedding has no row for; no end-of-text token.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise JobError(f"model.hf_assets_path {folder}: no tokenizer.json in it")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise JobError(f"{file}: not a tokenizer: {error}") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if size > vocab_size:
        raise JobError(
            f"tokenizer and model disagree: {file} has token ids up to {size - 1}, "
            f"the model's vocabulary is {vocab_size}"
        )
    if end_of_text(folder) is None:
        raise JobError(f"{folder}: tokenizer_config.json names no eos_token that the tokenizer has")
    return size


def end_of_text(folder: Path) -> int | None:
    """The id of the tokenizer's eos_token, or None."""
    from tokenizers import Tokenizer

    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    token = config.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        return None
    return Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
