"""Text files of data; files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jumar.train import durable
from jumar.train.errors import JobError


def read_utf8(file: Path) -> str:
    """The text of a file of data, without the mark that some editors begin a file with.

    Raises:
        JobError: it cannot be read; bytes that are not UTF-8 (with their line).
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise JobError(f"{file}: {error}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise JobError(f"{file}:{line}: not UTF-8: byte 0x{error.object[error.start]:02x}") from error


def replace_file(file: Path, text: str) -> None:
    """Writes a text file that is the old one or the new one, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    place = durable.temporary(file)
    try:
        with place.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(place, file)
    except BaseException:
        place.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder beside ``folder`` to write to, and puts it in its place when the body ends well.

    Files are synced to the disk before the rename, so after a crash ``folder`` is the old one or the new one, never a
    part of it. When the body fails, ``folder`` stays as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = durable.temporary(folder)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        yield place
        for path in sorted(place.rglob("*")):
            durable.sync(path)
        durable.sync(place)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    durable.swap(place, folder)
