"""The learning rate over the steps: torchtitan's warm-up, stable part and decay, for the engine that is not torchtitan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def factor(section: dict[str, Any], steps: int) -> Callable[[int], float]:
    """What the learning rate is multiplied with at a step (counted from 0), by a job's ``[lr_scheduler]``.

    The rate rises linearly to 1 over ``warmup_steps``, stays, and falls to ``min_lr_factor`` over the last ``decay_ratio``
    of the schedule; without a ratio it falls from the end of the warm-up on.
    """
    total = section["total_steps"] or steps
    warmup = min(section["warmup_steps"], total)
    decay = total - warmup
    if section["decay_ratio"] is not None:
        decay = min(decay, round(total * section["decay_ratio"]))
    # One virtual step more, so that the last one does not learn at rate 0.
    falling = total + 1 - decay
    least, form = section["min_lr_factor"], section["decay_type"]

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if step < falling:
            return 1.0
        progress = min(1.0, (step + 1 - falling) / decay) if decay else 1.0
        if form == "linear":
            left = 1 - progress
        elif form == "sqrt":
            left = 1 - math.sqrt(progress)
        else:
            left = 0.5 * (1 + math.cos(math.pi * progress))
        return least + (1 - least) * left

    return at
