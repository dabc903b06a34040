"""SIGTERM and the first Ctrl-C end a run after the step that is under way; a second Ctrl-C ends it at once."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """Whether somebody asked a run to end. ``signal`` is ``"SIGTERM"``, ``"SIGINT"`` or None."""

    signal: str | None = None

    @property
    def exit_status(self) -> int:
        """128 and the signal's number, as a shell gives it: 143, 130; 0 when nobody asked."""
        return 128 + signal.Signals[self.signal] if self.signal else 0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Notes SIGTERM and SIGINT in the :class:`Stop` that it gives; earlier handlers come back at the end.

    Outside of the main thread, where Python has no signal handlers, it notes nothing.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if stop.signal is None:
            stop.signal = name
            more = "; once more ends it at once" if number == signal.SIGINT else ""
            print(f"\n{name}: the run ends after this step{more}", file=sys.stderr, flush=True)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    earlier = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
