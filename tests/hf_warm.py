"""Imported by the process that forks for every Hugging Face run: what each would otherwise do again."""

import tempfile
from pathlib import Path

import peft  # noqa: F401

import jumar.train.hf.run
import jumar.train.hf.trainer  # noqa: F401
from hf_util import make_folder
from jumar import models

with tempfile.TemporaryDirectory() as folder:
    # transformers compiles a thousand expressions for the first model that it loads.
    models.load(make_folder(Path(folder)))
