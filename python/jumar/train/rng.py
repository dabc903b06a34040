"""The state of every random number generator of a rank, as a part of a checkpoint."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.stateful import Stateful


def seed(value: int) -> None:
    """Seeds Python's and numpy's generators; torchtitan seeds torch's."""
    random.seed(value)
    numpy.random.seed(value % 2**32)


def capture() -> dict[str, Any]:
    """``torch`` (and ``device``, where there is an accelerator) as byte tensors, ``host``: Python's and numpy's as JSON."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "host": json.dumps(
            {"python": random.getstate(), "numpy": [kind, keys.tolist(), position, has_gauss, gauss]}
        ),
    }
    if torch.accelerator.is_available():
        state["device"] = torch.get_device_module().get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Puts back what :func:`capture` gave."""
    torch.set_rng_state(state["torch"])
    host = json.loads(state["host"])
    version, words, gauss = host["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = host["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "device" in state:
        torch.get_device_module().set_rng_state(state["device"])


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """What the body draws leaves no trace in the generators."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


class RngState(Stateful):
    """Each rank's generators, under ``rank<N>``. What is loaded waits in ``pending`` until :meth:`apply`.

    Setting up a data loader draws a number, so a state that were put back while the checkpoint is loaded would be one
    draw late.
    """

    def __init__(self, rank: int):
        self.key = f"rank{rank}"
        self.pending: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {self.key: capture()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pending = state_dict[self.key]

    def apply(self) -> None:
        """Puts back what was loaded, once."""
        if self.pending is not None:
            restore(self.pending)
            self.pending = None
