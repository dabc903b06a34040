"""Text data: a folder of JSON-lines files, each line an object with a ``text`` field."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from jumar.spelling import nearest
from jumar.train.errors import JobError
from jumar.train.files import read_utf8
from jumar.train.job import Job

SUFFIXES = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Texts:
    """Documents in the order of files by name, then lines; blank ones are left out."""

    source: Path
    documents: list[str]

    @property
    def digest(self) -> str:
        """A hash of the documents."""
        total = hashlib.sha256()
        for document in self.documents:
            total.update(document.encode("utf-8", "surrogatepass"))
            total.update(b"\0")
        return total.hexdigest()


def read(source: Path) -> Texts:
    """Reads a JSON-lines file, or all of a folder (not its subfolders).

    Raises:
        JobError: no such file; a line that is no JSON object, or has no string under ``text`` (with file and line); no
            document that is more than white space.
    """
    if source.is_dir():
        files = sorted(p for p in source.iterdir() if p.suffix in SUFFIXES and p.is_file())
        if not files:
            raise JobError(f"dataset {source}: the folder holds no {', '.join(SUFFIXES)} file")
    else:
        files = [source]
    documents = []
    for file in files:
        for number, line in enumerate(read_utf8(file).split("\n"), 1):
            if line.strip():
                documents.append(_text(line, f"{file}:{number}"))
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise JobError(f"dataset {source} is empty: no line with any text")
    return Texts(source, documents)


def _text(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise JobError(f"{where}: not JSON: {error}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise JobError(f'{where}: expected an object with a string under "text"')
    return text


def load(job: Job, ranks: int, section: str = "training") -> Texts | None:
    """The job's documents, of training or validation; None when it names one of torchtitan's own datasets.

    Raises:
        JobError: an unknown dataset; a path that is missing or empty; fewer documents than data-parallel ranks.
    """
    dataset = job[section]["dataset"]
    if dataset != "jsonl":
        from torchtitan.hf_datasets.text_datasets import DATASETS

        known = ["jsonl", *(name for name in DATASETS if not name.startswith("jsonl:"))]
        if dataset not in known:
            hint = nearest(dataset, known)
            raise JobError(f"{section}.dataset = {dataset!r} is unknown{hint} (known: {', '.join(known)})")
        return None
    path = job.path(f"{section}.dataset_path")
    if path is None:
        raise JobError(f"{section}.dataset_path is missing: a folder of JSON-lines files")
    texts = read(path)
    if len(texts.documents) < ranks:
        raise JobError(
            f"dataset {path}: {len(texts.documents)} documents are too few for {ranks} data-parallel ranks"
        )
    return texts


def register(texts: Texts) -> str:
    """Makes the documents a dataset that torchtitan's loader finds; returns its name."""
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    name = f"jsonl:{texts.digest[:16]}"
    DATASETS[name] = DatasetConfig(
        path=str(texts.source),
        loader=lambda path: Dataset.from_dict({"text": texts.documents}),
        sample_processor=lambda sample: sample["text"],
    )
    return name
