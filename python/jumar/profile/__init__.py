"""Chrome traces of training steps and a table of their operators. See docs/profiling.md.

>>> from jumar import profile
>>> with profile.profiling(profile.Settings(profile_freq=5), folder) as session:
...     for batch in batches:
...         train_step(batch)
...         session.step()
>>> print(profile.table(profile.read(session.traces[-1])).rows[0].operator)
"""

from __future__ import annotations

from jumar.profile.session import Settings, StepProfiler, profiling
from jumar.profile.table import SORTS, OperatorRow, OperatorTable, table
from jumar.profile.trace import Call, Trace, TraceError, find, read

__all__ = [
    "SORTS",
    "Call",
    "OperatorRow",
    "OperatorTable",
    "Settings",
    "StepProfiler",
    "Trace",
    "TraceError",
    "find",
    "profiling",
    "read",
    "table",
]
