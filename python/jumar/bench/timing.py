"""Interleaved timing: contenders take turns, so that whatever else the machine does hits all of them alike."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


def keep_memory() -> None:
    """Tells glibc to keep freed memory for the rest of the process; without glibc nothing happens.

    Otherwise every large result is mapped anew, and the page faults of the first writes (which cost as much as the
    operator itself, and the same for every contender) would be what is measured.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


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
