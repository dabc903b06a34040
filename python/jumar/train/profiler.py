"""torchtitan's profiler with jumar's traces: the machine's limits in them, a table of operators beside them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torchtitan.tools.profiler import Profiler

from jumar.profile import Settings, StepProfiler


class JobProfiler(Profiler):
    """Called by the trainer after every step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Profiler.Config):
        pass

    def build_torch_profiler(self, *, global_step: int, base_folder: str, leaf_folder: str) -> Any:
        """A session that has begun, or None."""
        if not self._config.enable_profiling:
            return None
        settings = Settings(**{f.name: getattr(self._config, f.name) for f in fields(Settings)})
        session = StepProfiler(
            settings, base_folder, rank=torch.distributed.get_rank(), step=global_step
        )
        return session.__enter__()
