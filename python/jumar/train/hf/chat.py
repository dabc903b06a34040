"""Conversations as tokens, by the tokenizer's own chat template, with the answers marked.

A template is a program: it may drop parts of earlier answers (Qwen3 drops their thoughts), add empty ones, or put text of its
own around them. So answers are not rendered one by one and glued together. The whole conversation is rendered once, and each
answer is found in it: it begins where the conversation before it, with the opening of an answer, ends; it ends before what
follows another content in its place, with what the template closes it with. Its content must stand there: a conversation in
which an answer cannot be found is an error.
"""

from __future__ import annotations

import os
import re
from typing import Any

from jumar.train.errors import JobError
from jumar.train.hf.records import Record

IGNORED = -100
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THOUGHTS = "</think>"
_MARK = "\u2063the answer\u2063"


def check_template(tokenizer: Any, folder: Any) -> None:
    """JobError for a tokenizer that cannot render conversations."""
    if not getattr(tokenizer, "chat_template", None):
        raise JobError(
            f"{folder}: the tokenizer has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json), and the data is chat"
        )


def encode(record: Record, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens of a conversation, and labels: the answers' tokens, :data:`IGNORED` elsewhere.

    Raises:
        JobError: the template refuses the conversation, or an answer cannot be found in what it renders.
    """
    messages = [{"role": role, "content": text} for role, text in record.messages]
    if _MARKED.search(tokenizer.chat_template):
        return _by_marks(messages, tokenizer, record.where)
    text = _render(messages, tokenizer, record.where)
    spans = answers(text, messages, tokenizer, record.where)
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = [IGNORED] * len(coded["input_ids"])
    remaining = iter([*spans, (len(text) + 1, len(text) + 1)])
    begin, end = next(remaining)
    for position, (first, last) in enumerate(coded["offset_mapping"]):
        while first >= end:
            begin, end = next(remaining)
        if first >= begin and last <= end and last > first:
            labels[position] = coded["input_ids"][position]
    return list(coded["input_ids"]), labels


def _render(messages: list[dict[str, str]], tokenizer: Any, where: str, opening: bool = False) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening)
    except Exception as error:  # jinja's errors, and whatever a template raises
        raise JobError(f"{where}: the chat template refuses the conversation: {error}") from error


def _by_marks(messages: list[dict[str, str]], tokenizer: Any, where: str) -> tuple[list[int], list[int]]:
    """For a template whose author marked the answers himself ({% generation %})."""
    try:
        coded = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:
        raise JobError(f"{where}: the chat template refuses the conversation: {error}") from error
    ids, mask = list(coded["input_ids"]), coded["assistant_masks"]
    return ids, [token if marked else IGNORED for token, marked in zip(ids, mask, strict=True)]


def answers(text: str, messages: list[dict[str, str]], tokenizer: Any, where: str) -> list[tuple[int, int]]:
    """Where the answers stand in a rendered conversation: [begin, end) in characters, one for each, in order.

    An answer includes what closes it (the end-of-turn token), without white space after that.
    """
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        begin = _begin(text, messages[:number], tokenizer, where)
        if begin is None or (spans and begin < spans[-1][1]):
            raise JobError(
                f"{where}: the chat template renders what comes before message {number + 1} in another way when "
                "that message follows, so its answer cannot be found"
            )
        end = _end(text, begin, messages, number, tokenizer, where)
        if end is None:
            raise JobError(
                f"{where}: the content of message {number + 1} is not in what the chat template makes of it"
            )
        spans.append((begin, end))
    return spans


def _begin(text: str, before: list[dict[str, str]], tokenizer: Any, where: str) -> int | None:
    """The length of the conversation before an answer, with the answer's opening; None when ``text`` begins otherwise."""
    if not before:
        # Most templates refuse an empty conversation.
        try:
            opening = tokenizer.apply_chat_template([], tokenize=False, add_generation_prompt=True)
        except Exception:
            return 0
        return len(opening) if text.startswith(opening) else 0
    opened = _render(before, tokenizer, where, opening=True)
    if text.startswith(opened):
        return len(opened)
    # An opening that is more than a finished answer has (a thought that begins at once): as far as both go.
    plain = _render(before, tokenizer, where)
    if not text.startswith(plain):
        return None
    extra = opened[len(plain) :] if opened.startswith(plain) else ""
    shared = 0
    while shared < len(extra) and text[len(plain) :].startswith(extra[: shared + 1]):
        shared += 1
    return len(plain) + shared


def _end(
    text: str, begin: int, messages: list[dict[str, str]], number: int, tokenizer: Any, where: str
) -> int | None:
    """The end of the answer ``number``, which begins at ``begin``; None when its content does not stand before it.

    Another content in its place shows what follows it; and what follows when it is the last message, its closing.
    """
    marked = [*messages]
    marked[number] = {**messages[number], "content": _MARK}
    pieces = [_render(part, tokenizer, where).split(_MARK) for part in (marked, marked[: number + 1])]
    if any(len(piece) != 2 for piece in pieces):
        return None
    (_, after), (_, last) = pieces
    end = len(text) - len(after)
    # Templates strip answers, and leave out the thoughts of earlier ones.
    content = messages[number]["content"].strip()
    forms = (content, content.rsplit(_THOUGHTS, 1)[-1].strip())
    if end < begin or not text.endswith(after) or not text[begin:end].strip().endswith(forms):
        return None
    return end + len(os.path.commonprefix([after, last]).rstrip())
