"""Sequences for a causal language model: samples as tokens and labels, packed or padded, in an order that can be resumed.

Labels are what transformers expects: the model shifts them itself, so the label of a token is the token, and
:data:`~jumar.train.hf.chat.IGNORED` where the token is not to be learned. The first label of a document is always ignored:
under the shift it would be predicted from the document before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jumar.train.errors import JobError
from jumar.train.hf import chat
from jumar.train.hf.chat import IGNORED
from jumar.train.hf.records import Record

# Rows that packing keeps open at a time.
_OPEN = 64


@dataclass(frozen=True)
class Sample:
    """A document: ``ids`` and ``labels`` of the same length; at least one label counts."""

    ids: list[int]
    labels: list[int]


@dataclass
class Encoded:
    """All samples of a data set, and what became of its records.

    ``counts`` has ``records``, ``samples``, ``truncated``, ``dropped`` (too long), ``empty`` (nothing left to learn),
    ``tokens`` and ``trained`` tokens.
    """

    samples: list[Sample]
    counts: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        c = self.counts
        text = f"{c['samples']:,} samples, {c['tokens']:,} tokens, {c['trained']:,} of them trained"
        for name, what in (
            ("truncated", "truncated"),
            ("dropped", "dropped as too long"),
            ("empty", "dropped with no trained token left"),
        ):
            if c[name]:
                text += f", {c[name]:,} {what}"
        return text


def encode(records: Iterable[Record], tokenizer: Any, length: int, too_long: str) -> Encoded:
    """Tokens and labels of every record.

    Args:
        records: chat or plain text; of plain text every token is learned, and an end-of-text token is put behind it.
        tokenizer: transformers' fast tokenizer.
        length: tokens of the longest sample, ``training.seq_len``.
        too_long: "truncate" (from the right) or "drop".

    Raises:
        JobError: a conversation that the chat template cannot render, see :func:`jumar.train.hf.chat.encode`; no sample is
            left.
    """
    result = Encoded([])
    counts = result.counts
    for record in records:
        counts["records"] += 1
        if record.messages:
            ids, labels = chat.encode(record, tokenizer)
        else:
            ids = list(tokenizer(record.text)["input_ids"])
            if tokenizer.eos_token_id is not None and (not ids or ids[-1] != tokenizer.eos_token_id):
                ids.append(tokenizer.eos_token_id)
            labels = list(ids)
        if len(ids) > length:
            if too_long == "drop":
                counts["dropped"] += 1
                continue
            counts["truncated"] += 1
            ids, labels = ids[:length], labels[:length]
        if labels:
            labels[0] = IGNORED
        trained = sum(label != IGNORED for label in labels)
        if not trained:
            counts["empty"] += 1
            continue
        counts["samples"] += 1
        counts["tokens"] += len(ids)
        counts["trained"] += trained
        result.samples.append(Sample(ids, labels))
    if not result.samples:
        raise JobError(f"no sample is left to train on: {result} (training.seq_len = {length})")
    return result


def rows(samples: list[Sample], length: int, packing: bool, seed: int) -> list[list[Sample]]:
    """What one sequence holds: one sample each, or, with packing, as many as fit in ``length`` tokens.

    Packing goes through the samples in a random order and puts each into the fullest open row that has room for it.
    """
    if not packing:
        return [[sample] for sample in samples]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    done: list[list[Sample]] = []
    open_rows: list[tuple[int, list[Sample]]] = []
    for sample in (samples[i] for i in order):
        size = len(sample.ids)
        fitting = [i for i, (room, _) in enumerate(open_rows) if room >= size]
        if fitting:
            room, row = open_rows.pop(min(fitting, key=lambda i: open_rows[i][0]))
        else:
            room, row = length, []
        row.append(sample)
        open_rows.append((room - size, row))
        if len(open_rows) > _OPEN:
            done.append(open_rows.pop(min(range(len(open_rows)), key=lambda i: open_rows[i][0]))[1])
    return done + [row for _, row in open_rows]


class Stream(torch.utils.data.Dataset):
    """Every sequence of a whole run in the order of training: pass after pass over the rows, each in an order of its own.

    The i-th item depends on the seed and i alone, so that the position in the data is a number.
    """

    def __init__(self, rows: list[list[Sample]], items: int, seed: int):
        self.rows, self.items, self.seed = rows, items, seed
        self._pass, self._order = -1, []

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> list[Sample]:
        if not 0 <= index < self.items:
            raise IndexError(index)
        number, place = divmod(index, len(self.rows))
        if number != self._pass:
            # The seeds of two runs, one apart, must not share orders.
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            self._order = torch.randperm(len(self.rows), generator=generator).tolist()
            self._pass = number
        return self.rows[self._order[place]]


class Collator:
    """Rows as one batch of tensors, [rows, length of the longest].

    Packed: ``position_ids`` begin at 0 for each document and for each token of the padding, without an attention mask;
    transformers makes the mask of documents from them. Else: padded on the right, with an attention mask. ``tokens`` is the
    number of tokens that are no padding.
    """

    def __init__(self, pad: int, packing: bool, planes: int = 0):
        """Args: ``planes``: 4 for models with rotary positions of several axes (:func:`position_planes`), else 0."""
        self.pad, self.packing, self.planes = pad, packing, planes

    def __call__(self, batch: list[list[Sample]]) -> dict[str, Tensor]:
        length = max(sum(len(sample.ids) for sample in row) for row in batch)
        ids = torch.full((len(batch), length), self.pad)
        labels = torch.full((len(batch), length), IGNORED)
        positions = torch.zeros((len(batch), length), dtype=torch.long)
        mask = torch.zeros((len(batch), length), dtype=torch.long)
        for number, row in enumerate(batch):
            begin = 0
            for sample in row:
                end = begin + len(sample.ids)
                ids[number, begin:end] = torch.tensor(sample.ids)
                labels[number, begin:end] = torch.tensor(sample.labels)
                labels[number, begin] = IGNORED
                positions[number, begin:end] = torch.arange(end - begin)
                mask[number, begin:end] = 1
                begin = end
        result = {"input_ids": ids, "labels": labels, "tokens": mask.sum()}
        if not self.packing:
            return result | {"attention_mask": mask}
        if self.planes:
            positions = positions.expand(self.planes, -1, -1)
        return result | {"position_ids": positions}


def position_planes(config: Any) -> int:
    """4 (text, time, height, width) for a model whose text has rotary positions of several axes, else 0.

    With fewer, Qwen2.5-VL does not look for documents in ``position_ids``.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return 4 if "mrope_section" in rope else 0
