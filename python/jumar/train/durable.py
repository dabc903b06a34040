"""Folders on a disk that outlive kills, full disks and bit rot: a lock, whole folders, manifests.

A checkpoint is a folder that holds ``manifest.json``: the size and SHA-256 of every file in it. The folder is written under
a temporary name beside its place, synced file by file, and renamed when all of it is on the disk. A folder under its own
name is therefore whole; one whose files no longer are what the manifest says is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from jumar.train.errors import JobError

log = logging.getLogger("jumar.train")

MANIFEST = "manifest.json"
LOCK = ".lock"
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old|gone)-(?P<pid>\d+)")
_RUST = re.compile(rf"\(os error ({errno.ENOSPC}|{errno.EFBIG}|{errno.EDQUOT})\)")
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class DamagedCheckpoint(JobError):
    """A checkpoint whose files are not what its manifest says. ``path`` is the folder, ``reason`` what is wrong."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"checkpoint {path} is damaged: {reason}")
        self.path, self.reason = path, reason


class DiskFull(JobError):
    """Something could not be written: no space, a quota, or a limit on the size of a file."""


class RunLock:
    """``with RunLock(folder)``: one run at a time writes to a folder; the folder is made when it is missing.

    The lock is the kernel's (flock on ``folder/.lock``), so that of a killed process is free at once. The file's text says
    who holds it.

    Raises:
        JobError: another run holds the folder; the text names folder, process and host.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._handle: int | None = None

    def __enter__(self) -> RunLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / LOCK
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(handle, 200).decode(errors="replace").strip()
            os.close(handle)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise JobError(f"{file}: cannot be locked: {error}") from error
            raise JobError(
                f"{self.folder} is in use by another run ({owner or 'owner unknown'}); "
                "wait for it, end it, or give this run another job.dump_folder"
            ) from error
        self._handle = handle
        with contextlib.suppress(OSError):  # on a full disk the lock holds without its text
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            # The file stays: removing it would let two later runs lock different files of one name.
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = None


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary(path: Path) -> Path:
    """The name under which a folder is written before it gets its own."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


@contextlib.contextmanager
def clear_errors(path: Path, what: str = "checkpoint", place: Path | None = None) -> Iterator[None]:
    """Turns a full disk, found anywhere in the chain of an exception, into :class:`DiskFull` naming ``path``.

    ``place`` is the folder that is being written, where that is not ``path``.
    """
    try:
        yield
    except BaseException as error:  # torch.distributed.checkpoint's own is no Exception
        if isinstance(error, DiskFull):
            raise
        cause = disk_full(error, place or path)
        if cause is None:
            raise
        raise DiskFull(f"{what} {path} could not be written: {_why(path, cause)}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and all that it came from."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        waiting += [error.__cause__, error.__context__]
        # torch.distributed.checkpoint collects the failures of its ranks.
        failures = getattr(error, "failures", None)
        if isinstance(failures, dict):
            waiting += [f[0] if isinstance(f, tuple) else f for f in failures.values()]


def disk_full(error: BaseException | None, place: Path | None = None) -> OSError | None:
    """The OSError in the chain of an exception that says that the disk is full or a file too large; None without one.

    torch.save's own errors ("unexpected pos 704 vs 598") hide theirs: for them the state of ``place`` decides.
    """
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in _FULL:
            return link
        # safetensors, written in Rust, has the number in its text only.
        if match := _RUST.search(str(link)):
            return OSError(int(match[1]), os.strerror(int(match[1])))
    if place is not None and any("inline_container" in str(link) for link in _chain(error)):
        return _filled(place)
    return None


def _filled(place: Path) -> OSError | None:
    """What half-written files tell: no space is left beside them, or one is as large as files may be."""
    sizes = [f.stat().st_size for f in place.rglob("*") if f.is_file()] if place.is_dir() else []
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and max(sizes, default=0) >= limit:
        return OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    while not place.exists():
        place = place.parent
    if shutil.disk_usage(place).free < 2**16:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def _why(path: Path, error: OSError) -> str:
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if error.errno == errno.EFBIG:
        return "a file is larger than the limit on file sizes of this process (ulimit -f)"
    if error.errno == errno.EDQUOT:
        return "the disk quota is used up"
    return f"no space left on the disk ({shutil.disk_usage(place).free / 2**20:,.1f} MiB free)"


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Writes ``manifest.json`` for what a folder holds, and syncs all of it."""
    entries = {}
    for file in _files(folder):
        sync(file)
        entries[file.relative_to(folder).as_posix()] = {"size": file.stat().st_size, "sha256": _sha256(file)}
    text = json.dumps({"files": entries}, indent=1) + "\n"
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    for inner in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        sync(inner)
    sync(folder)


def swap(written: Path, path: Path) -> None:
    """Renames a folder to ``path``; what was there goes. On an error ``written`` goes, and ``path`` stays as it was."""
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    try:
        if path.exists():
            os.rename(path, old)
        os.rename(written, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def seal(written: Path, path: Path) -> Path:
    """Makes a folder that somebody else wrote a checkpoint: manifest, sync, rename from ``written`` to ``path``.

    What is at ``path`` is replaced. On an error ``written`` is removed and ``path`` stays as it was.

    Raises:
        DiskFull: the manifest does not fit.
    """
    try:
        with clear_errors(path, place=written):
            write_manifest(written)
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise
    swap(written, path)
    return path


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder beside ``path`` to write to; it becomes ``path``, with a manifest, when the body ends well.

    When the body fails nothing of it is left, and ``path`` is as it was.

    Raises:
        DiskFull: there was no room; the text names ``path`` and why.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    place = temporary(path)
    shutil.rmtree(place, ignore_errors=True)
    try:
        with clear_errors(path, place=place):
            place.mkdir()
            yield place
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    seal(place, path)


def check_folder(path: Path) -> None:
    """Compares a checkpoint with its manifest.

    Raises:
        DamagedCheckpoint: it is no folder; the manifest is missing or unreadable; a file is missing, of another size, or
            has other bytes.
    """
    if not path.is_dir():
        raise DamagedCheckpoint(path, "there is no such folder")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        entries = {name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        raise DamagedCheckpoint(path, f"{MANIFEST} is missing: it was not written to its end") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(path, f"{MANIFEST} cannot be read: {error}") from error
    for name, (size, _) in entries.items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpoint(path, f"{name} is missing")
        if file.stat().st_size != size:
            raise DamagedCheckpoint(path, f"{name} has {file.stat().st_size} bytes, written were {size}")
    for name, (_, digest) in entries.items():
        try:
            found = _sha256(path / name)
        except OSError as error:
            raise DamagedCheckpoint(path, f"{name} cannot be read: {error}") from error
        if found != digest:
            raise DamagedCheckpoint(path, f"{name} has other bytes than were written")


def numbered(root: Path, pattern: str = r"step-(\d+)") -> dict[int, Path]:
    """Folders in ``root`` whose whole name matches ``pattern``, by the number of its first group, in rising order."""
    if not root.is_dir():
        return {}
    found = {int(m[1]): p for p in root.iterdir() if p.is_dir() and (m := re.fullmatch(pattern, p.name))}
    return dict(sorted(found.items()))


def newest_good(root: Path, pattern: str = r"step-(\d+)") -> Path | None:
    """The checkpoint with the highest number that is whole, or None. Says in the log which ones it refuses, and why.

    Raises:
        DamagedCheckpoint: there are checkpoints and none of them is whole: starting anew would hide that.
    """
    refused: DamagedCheckpoint | None = None
    for path in reversed(numbered(root, pattern).values()):
        try:
            check_folder(path)
        except DamagedCheckpoint as error:
            log.warning("%s", error)
            refused = refused or error
        else:
            if refused:
                log.warning("resuming from %s, the newest that is whole", path)
            return path
    if refused:
        raise DamagedCheckpoint(refused.path, f"{refused.reason}; no other checkpoint in {root} is whole")
    return None


def keep_latest(root: Path, count: int, pattern: str = r"step-(\d+)") -> list[Path]:
    """Removes all but the ``count`` checkpoints with the highest numbers; 0 keeps all. Returns what was removed.

    A folder is renamed first: a kill while its files go leaves a temporary, not a damaged checkpoint.
    """
    if count <= 0:
        return []
    removed = list(numbered(root, pattern).values())[:-count]
    for path in removed:
        remove(path)
    return removed


def remove(path: Path) -> None:
    """Removes a checkpoint, by way of a temporary name."""
    gone = path.with_name(f".{path.name}.gone-{os.getpid()}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def set_aside(path: Path, why: str) -> Path:
    """Renames ``step-8`` to ``step-8.<why>``, which is never resumed from nor counted; replaces an earlier one."""
    place = path.with_name(f"{path.name}.{why}")
    shutil.rmtree(place, ignore_errors=True)
    os.rename(path, place)
    return place


def sweep_temporaries(root: Path) -> list[Path]:
    """Removes what killed runs left in ``root``; call it with the lock held. Returns what was removed.

    A folder that was moved aside and whose successor never came gets its name back.
    """
    removed = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = _TEMPORARY.fullmatch(path.name)
        if not match:
            continue
        place = path.with_name(match["name"])
        if match["kind"] == "old" and not place.exists():
            os.rename(path, place)
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
        removed.append(path)
    return removed
