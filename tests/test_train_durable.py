"""Locks, whole folders and manifests of checkpoints."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jumar.train import durable
from jumar.train.errors import JobError


def _make(root: Path, step: int) -> Path:
    path = root / f"step-{step}"
    with durable.atomic_folder(path) as place:
        (place / "inner").mkdir()
        (place / "a.bin").write_bytes(bytes(range(256)) * step)
        (place / "inner" / "b.txt").write_text(f"step {step}")
    return path


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_folder_is_whole(tmp_path):
    path = _make(tmp_path / "new", 3)
    durable.check_folder(path)
    assert sorted(p.name for p in path.iterdir()) == ["a.bin", "inner", "manifest.json"]
    # A second one under the same name replaces it.
    with durable.atomic_folder(path) as place:
        (place / "c").write_text("c")
    durable.check_folder(path)
    assert sorted(p.name for p in path.iterdir()) == ["c", "manifest.json"]
    assert [p.name for p in path.parent.iterdir()] == ["step-3"]


def test_failed_body_leaves_the_old_folder(tmp_path):
    path = _make(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), durable.atomic_folder(path) as place:
        (place / "a.bin").write_text("half")
        raise ZeroDivisionError
    durable.check_folder(path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


DAMAGE = {
    "flipped": (lambda p: _flip(p / "a.bin"), "a.bin has other bytes"),
    "cut": (lambda p: os.truncate(p / "a.bin", 10), "a.bin has 10 bytes, written were 512"),
    "missing": (lambda p: (p / "inner" / "b.txt").unlink(), "inner/b.txt is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "bad manifest": (lambda p: (p / "manifest.json").write_text('{"fil'), "manifest.json cannot be read"),
    "empty manifest": (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage, caplog):
    good, bad = _make(tmp_path, 1), _make(tmp_path, 2)
    harm, words = DAMAGE[damage]
    harm(bad)
    with pytest.raises(durable.DamagedCheckpoint, match=words) as caught:
        durable.check_folder(bad)
    assert str(bad) in str(caught.value) and isinstance(caught.value, JobError)
    with caplog.at_level(logging.WARNING, "jumar.train"):
        assert durable.newest_good(tmp_path) == good
    assert str(bad) in caplog.text and words in caplog.text and str(good) in caplog.text
    harm(good) if damage != "cut" else os.truncate(good / "a.bin", 0)
    with pytest.raises(durable.DamagedCheckpoint, match="no other checkpoint"):
        durable.newest_good(tmp_path)


def test_numbers_are_compared_as_numbers(tmp_path):
    assert durable.newest_good(tmp_path) is None and durable.newest_good(tmp_path / "none") is None
    for step in (9, 10, 100):
        _make(tmp_path, step)
    (tmp_path / "step-200-old").mkdir()
    (tmp_path / "step-300").write_text("a file")
    assert durable.newest_good(tmp_path) == tmp_path / "step-100"
    assert durable.keep_latest(tmp_path, 0) == []
    assert [p.name for p in durable.keep_latest(tmp_path, 2)] == ["step-9"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-100", "step-200-old", "step-300"]
    assert durable.keep_latest(tmp_path, 5) == []


def test_leftovers_are_swept(tmp_path):
    path = _make(tmp_path, 4)
    half = tmp_path / ".step-5.tmp-123"
    half.mkdir()
    (half / "a.bin").write_text("half")
    (tmp_path / ".step-4.old-77").mkdir()
    (tmp_path / ".step-3.gone-9").mkdir()
    (tmp_path / ".metrics.jsonl.tmp-5").write_text("half")
    other = tmp_path / ".cache"
    other.mkdir()
    swept = {p.name for p in durable.sweep_temporaries(tmp_path)}
    assert swept == {".step-5.tmp-123", ".step-4.old-77", ".step-3.gone-9", ".metrics.jsonl.tmp-5"}
    assert sorted(tmp_path.iterdir()) == [other, path]
    # Killed between the two renames of a replacement: the old one comes back.
    path.rename(tmp_path / ".step-4.old-77")
    durable.sweep_temporaries(tmp_path)
    durable.check_folder(path)
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_size_limit_is_a_clear_error(tmp_path):
    _make(tmp_path, 1)
    code = f"""
        import resource, signal, sys
        from pathlib import Path
        from jumar.train import durable
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            with durable.atomic_folder(Path({str(tmp_path)!r}) / "step-2") as place:
                (place / "big").write_bytes(bytes(100000))
        except durable.DiskFull as error:
            print(error)
        """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert "step-2" in result.stdout and "larger than the limit" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    durable.check_folder(tmp_path / "step-1")
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_a_full_disk_is_found_in_any_chain(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")

    class Collected(Exception):
        failures = {0: (full, None)}

    with pytest.raises(durable.DiskFull, match="MiB free"), durable.clear_errors(tmp_path / "x"):
        try:
            raise Collected
        except Collected as error:
            raise RuntimeError("writer died") from error
    with pytest.raises(RuntimeError, match="other"), durable.clear_errors(tmp_path / "x"):
        raise RuntimeError("other")


def test_errors_of_torch_save_that_hide_a_full_disk(tmp_path, monkeypatch):
    hidden = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    with pytest.raises(RuntimeError, match="unexpected pos"), durable.clear_errors(tmp_path / "x"):
        raise hidden
    usage = durable.shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(durable.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(durable.DiskFull, match="no space left"), durable.atomic_folder(tmp_path / "x"):
        raise hidden
    with pytest.raises(RuntimeError, match="other"), durable.clear_errors(tmp_path / "x"):
        raise RuntimeError("other")


def test_lock(tmp_path):
    folder = tmp_path / "out"
    with durable.RunLock(folder):
        with pytest.raises(JobError, match=f"process {os.getpid()} on ") as caught, durable.RunLock(folder):
            pass
        assert str(folder) in str(caught.value)
    with durable.RunLock(folder):
        pass


def test_lock_of_a_killed_process_is_free(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from jumar.train.durable import RunLock\n"
        f"with RunLock(Path({str(tmp_path)!r})): print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(JobError, match=f"process {child.pid} on "), durable.RunLock(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    with durable.RunLock(tmp_path):
        pass
