"""The exception for what a user can put right."""

from __future__ import annotations


class JobError(ValueError):
    """A mistake in a job file, an override, the data or the tokenizer; the text says what and where."""
