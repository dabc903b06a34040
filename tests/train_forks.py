"""Runs of `jumar train` in processes of their own that can be killed, limited or signalled.

Importing torch and torchtitan takes seconds. One process imports them and forks for every run; it has no threads then.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# What ends a run from within, at the n-th call: in the middle of a save, between two renames, ...
CALLS = ("fsync", "rename", "open", "mkdir")


class Forks:
    """``with Forks() as forks: forks.run(job, ["training.steps=3"])``; ``modules`` are imported once, before any fork."""

    def __init__(self, *modules: str):
        self.modules = modules

    def __enter__(self) -> Forks:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.server = subprocess.Popen(
            [sys.executable, __file__, *self.modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stdin.close()
        self.server.wait(30)
        self.server.stdout.close()

    def start(self, job: Path, overrides: list[str], **options: Any) -> None:
        """Begins a run. Options:

        kill_after: seconds until SIGKILL; kill_at: (function of CALLS, n) for SIGKILL at its n-th call
        signal: (number, text) for that signal once the run's output has the text
        file_limit: RLIMIT_FSIZE in bytes, set when the output has the text "step 1/"
        before: Python code that the run executes first
        """
        request = {"job": str(job), "overrides": overrides, **options}
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()

    def wait(self) -> dict[str, Any]:
        """What the run started last came to: status (negative: the signal that ended it), output, seconds, calls."""
        return json.loads(self.server.stdout.readline())

    def run(self, job: Path, overrides: list[str], **options: Any) -> dict[str, Any]:
        """:meth:`start` and :meth:`wait`."""
        self.start(job, overrides, **options)
        return self.wait()


def _watch_calls(counts: Path, kill_at: list[Any] | None) -> None:
    """Counts calls of os functions, and dies at one of them."""
    import signal

    seen = dict.fromkeys(CALLS, 0)

    def watched(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            if kill_at and [name, seen[name]] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    import builtins

    for name in CALLS:
        module = builtins if name == "open" else os
        setattr(module, name, watched(name, getattr(module, name)))

    import atexit

    atexit.register(lambda: counts.write_text(json.dumps(seen)))


def _child(request: dict[str, Any], output: Path, counts: Path) -> None:
    import atexit

    from jumar import cli

    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    _watch_calls(counts, request.get("kill_at"))
    exec(request.get("before", ""), {})
    sys.argv = ["jumar", "train", f"--job.config_file={request['job']}", *(f"--{o}" for o in request["overrides"])]
    try:
        cli.main()
        status = 0
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve() -> None:
    import signal
    import tempfile

    from jumar import compat

    compat.apply()
    for name in ("cli", "titan", "train.checkpoints", "train.evaluation", "train.runner", "train.trainer"):
        importlib.import_module(f"jumar.{name}")
    from train_util import no_sleep

    class Patch:
        @staticmethod
        def setattr(name: str, value: Any) -> None:
            module, _, attribute = name.rpartition(".")
            setattr(sys.modules[module], attribute, value)

    no_sleep(Patch)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    # The garbage collector of a child leaves alone what was there before.
    gc.collect()
    gc.freeze()
    folder = Path(tempfile.mkdtemp())
    for line in sys.stdin:
        request = json.loads(line)
        output, counts = folder / "output", folder / "counts"
        output.write_text("")
        counts.write_text("{}")
        begin = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(request, output, counts)
        todo = request.get("signal")
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            passed = time.monotonic() - begin
            if ended:
                break
            if passed > request.get("kill_after", 120):
                os.kill(pid, signal.SIGKILL)
            if todo and todo[1] in output.read_text():
                os.kill(pid, todo[0])
                todo = None
            time.sleep(0.002)
        answer = {
            "status": os.waitstatus_to_exitcode(status),
            "output": output.read_text(errors="replace"),
            "seconds": passed,
            "calls": json.loads(counts.read_text() or "{}"),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
