"""Training data as it lies on the disk: chat or plain text, in JSON lines, JSON, parquet, text files, ``datasets`` folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jumar.train.errors import JobError
from jumar.train.files import read_utf8

_LINES = (".jsonl", ".ndjson")
SUFFIXES = (*_LINES, ".json", ".txt", ".parquet")
ROLES = ("system", "user", "assistant", "tool")
_TAGS = {"{{NAME}}": "name", "{{AUTHOR}}": "author"}


@dataclass(frozen=True)
class Record:
    """One sample: a conversation (``messages``) or plain ``text``; ``where`` names file and line in errors."""

    where: str
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""


def digest(records: list[Record]) -> str:
    """A hash of the content of all records."""
    total = hashlib.sha256()
    for record in records:
        total.update(json.dumps([record.messages, record.text]).encode() + b"\0")
    return total.hexdigest()


def read(source: Path, chat: dict[str, Any], *, name: str = "training.dataset_path") -> list[Record]:
    """Reads a file, or all of a folder (not its subfolders) in the order of names, or a folder that `datasets` saved.

    Args:
        source: the file or folder.
        chat: the job's section ``[chat]``.
        name: the key that names ``source``, for errors.

    Raises:
        JobError: no file that can be read; a record that is neither chat nor text (with file and line); a placeholder
            that the job file has no value for; nothing in it.
    """
    if source.is_dir() and ((source / "state.json").is_file() or (source / "dataset_dict.json").is_file()):
        rows = _saved(source, name)
    elif source.is_dir():
        files = sorted(p for p in source.iterdir() if p.suffix in SUFFIXES and p.is_file())
        if not files:
            raise JobError(f"{name} {source}: the folder holds no {', '.join(SUFFIXES)} file")
        rows = (row for file in files for row in _file(file, name))
    else:
        rows = _file(source, name)
    records = [record for where, row in rows if (record := _record(where, row, chat)) is not None]
    if not records:
        raise JobError(f"{name} {source} is empty: no record with any text")
    return records


def _file(file: Path, name: str) -> Iterator[tuple[str, Any]]:
    """(where, row) for every row; rows are what JSON gives, or a string for plain text."""
    if file.suffix not in SUFFIXES:
        raise JobError(f"{name} {file}: unknown kind of file (known: {', '.join(SUFFIXES)})")
    if file.suffix == ".parquet":
        yield from _parquet(file)
        return
    content = read_utf8(file)
    if file.suffix == ".json" and content.lstrip().startswith("["):
        try:
            rows = json.loads(content)
        except json.JSONDecodeError as error:
            raise JobError(f"{file}:{error.lineno}: not JSON: {error.msg}") from error
        yield from ((f"{file}: record {number}", row) for number, row in enumerate(rows, 1))
        return
    for number, line in enumerate(content.split("\n"), 1):
        where = f"{file}:{number}"
        if not line.strip():
            continue
        if file.suffix == ".txt":
            yield where, line.rstrip("\r")
            continue
        try:
            yield where, json.loads(line)
        except json.JSONDecodeError as error:
            raise JobError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise JobError(f"{file}: not a parquet file: {error}") from error
    yield from ((f"{file}: row {number}", row) for number, row in enumerate(rows, 1))


def _saved(folder: Path, name: str) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        data = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever a broken folder makes of it
        raise JobError(f"{name} {folder}: datasets cannot load it: {error}") from error
    if isinstance(data, datasets.DatasetDict):
        if "train" not in data and len(data) > 1:
            raise JobError(f"{name} {folder}: it has the splits {', '.join(data)}: name the folder of one")
        split = "train" if "train" in data else next(iter(data))
        folder, data = folder / split, data[split]
    yield from ((f"{folder}: row {number}", row) for number, row in enumerate(data, 1))


def _record(where: str, row: Any, chat: dict[str, Any]) -> Record | None:
    """A row as a record; None for blank text."""
    if isinstance(row, str):
        return Record(where, text=row) if row.strip() else None
    if not isinstance(row, dict):
        raise JobError(f"{where}: expected an object, found {type(row).__name__}")
    tag = row.get("tag")

    def fill(text: Any, what: str) -> str:
        if not isinstance(text, str):
            raise JobError(f"{where}: {what} must be a string, found {_shown(text)}")
        return _fill(text, tag, chat, where)

    if row.get("messages") is not None:
        messages = _messages(row["messages"], where)
    elif row.get("query") is not None or row.get("response") is not None:
        messages = []
        for pair in row.get("history") or []:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise JobError(f"{where}: history must be a list of [query, response]")
            messages += [("user", pair[0]), ("assistant", pair[1])]
        messages += [("user", row.get("query")), ("assistant", row.get("response"))]
        if row.get("system"):
            messages.insert(0, ("system", row["system"]))
    elif "text" in row:
        text = fill(row["text"], "text")
        return Record(where, text=text) if text.strip() else None
    else:
        keys = ", ".join(map(str, row)) or "none"
        raise JobError(f'{where}: expected "messages", "query" and "response", or "text"; its keys are {keys}')
    named = {"user": "query", "assistant": "response"} if row.get("messages") is None else {}
    messages = [(role, fill(text, named.get(role, f"content of {role}"))) for role, text in messages]
    if chat["system"] is not None and messages[0][0] != "system":
        messages.insert(0, ("system", fill(chat["system"], "chat.system")))
    if not any(role == "assistant" for role, _ in messages):
        raise JobError(f"{where}: no message of the assistant: there is nothing to learn")
    return Record(where, messages=tuple(messages))


def _messages(value: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(value, list) or not value:
        raise JobError(f'{where}: "messages" must be a list of {{role, content}} with something in it, found {_shown(value)}')
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise JobError(f"{where}: message {number} must be an object with role and content, found {_shown(message)}")
        if message["role"] not in ROLES:
            raise JobError(f"{where}: message {number}: role {message['role']!r} is not one of {', '.join(ROLES)}")
        content = message["content"]
        if isinstance(content, list):
            content = _parts(content, f"{where}: message {number}")
        messages.append((message["role"], content))
    return messages


def _parts(parts: list[Any], where: str) -> str:
    """Content in parts, as vision models have it: text alone can be trained."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise JobError(f"{where}: a part of type {kind!r}; only text can be trained")
        texts.append(part["text"])
    return "".join(texts)


def _fill(text: str, tag: Any, chat: dict[str, Any], where: str) -> str:
    for mark, key in _TAGS.items():
        if mark in text:
            values = chat[key]
            if not values:
                raise JobError(f"{where}: {mark} in the text, and the job file has no chat.{key}")
            text = text.replace(mark, values[0] if tag == "zh" else values[-1])
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
