"""Training from a job file, on torchtitan 0.3.0. See docs/training.md.

>>> from jumar import train
>>> result = train.run("configs/qwen3_debug.toml", ["training.steps=10"])
>>> result["losses"], result["hf_folder"]
"""

from __future__ import annotations

from typing import Any

from jumar.train.errors import JobError

__all__ = ["JobError", "run"]


def run(config_file: str, overrides: list[str] | None = None, *, json: bool = False) -> dict[str, Any]:
    """Trains as a job file says, on one process or, under ``torchrun``, on many.

    Args:
        config_file: the job file (TOML).
        overrides: ``section.key=value`` strings; they win over the file.
        json: print one JSON document on standard output instead of tables; progress goes to standard error either way.

    Returns:
        The same document: ``losses``, ``records``, ``operators``, ``report``, ``tokens_per_second`` and paths.

    Raises:
        JobError: a mistake in the job, its data or its tokenizer; the text says what and where.
    """
    from jumar.train.runner import run as run_job

    return run_job(config_file, overrides or [], json=json)
