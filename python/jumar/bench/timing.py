"""Interleaved timing: contenders take turns, so that whatever else the machine does hits all of them alike."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

#: glibc keeps freed memory and hands it out again. Otherwise every large result is mapped anew, and the page faults of its
#: first writes, the same for every contender, cost more than the operator. (The caches of small chunks are off because
#: they pin the remainders of aligned allocations, so that neighbours never merge.)
KEEP_MEMORY = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in (
        ("mmap_max", 0),
        ("trim_threshold", 1 << 40),
        ("tcache_count", 0),
        ("mxfast", 0),
    )
)


def keeps_memory() -> bool:
    """Whether this process was started with :data:`KEEP_MEMORY`."""
    return "glibc.malloc.mmap_max=0" in os.environ.get("GLIBC_TUNABLES", "")


#: Hold both sides to an instruction set; read by ATen, oneDNN, MKL and jumar when they start.
EMULATE = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "JUMAR_SIMD": "AVX2",
    }
}


def _option(arguments: list[str], name: str) -> str | None:
    """The value of ``--name value`` or ``--name=value``; None without it."""
    for index, argument in enumerate(arguments):
        if argument == name:
            return (arguments[index + 1 :] or [""])[0]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def restart_keeping_memory(arguments: list[str]) -> None:
    """Replaces this process by ``python -m jumar ARGUMENTS`` with what is read at start only.

    That is :data:`KEEP_MEMORY` (not without glibc, not where the user has set tunables, not with ``--step``, whose
    processes run as training does) and the variables of ``--emulate``.  Does nothing where nothing is missing.
    """
    wanted: dict[str, str] = dict(EMULATE.get(_option(arguments, "--emulate") or "", {}))
    glibc = platform.libc_ver()[0] == "glibc" and "GLIBC_TUNABLES" not in os.environ
    if glibc and _option(arguments, "--step") is None:
        wanted["GLIBC_TUNABLES"] = KEEP_MEMORY
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    environment = {**os.environ, **wanted}
    os.execve(sys.executable, [sys.executable, "-m", "jumar", *arguments], environment)


def emulating(name: str) -> bool:
    """Whether this process was started under the variables of an instruction set."""
    return all(os.environ.get(key) == value for key, value in EMULATE[name].items())


@dataclass
class Timing:
    """Seconds per call."""

    minimum: float
    median: float
    samples: int


def _sample(call: Callable[[], object], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def interleave(
    contenders: dict[str, Callable[[], object]],
    *,
    rounds: int = 25,
    budget: float = 2.0,
    sample: float = 2e-3,
) -> dict[str, Timing]:
    """Times every contender ``rounds`` times in turns, or fewer (at least 3) within ``budget`` seconds.

    A sample repeats a short call until it takes about ``sample`` seconds.  The first call of each is not counted.
    """
    repeats = {}
    round_time = 0.0
    for name, call in contenders.items():
        call()
        once = _sample(call, 1)
        repeats[name] = max(1, min(1000, round(sample / max(once, 1e-7))))
        round_time += once * repeats[name]
    rounds = max(3, min(rounds, int(budget / max(round_time, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for turn in range(rounds):
        shift = turn % len(order)
        for name in order[shift:] + order[:shift]:
            samples[name].append(_sample(contenders[name], repeats[name]))
    return {
        name: Timing(min(values), statistics.median(values), len(values))
        for name, values in samples.items()
    }
