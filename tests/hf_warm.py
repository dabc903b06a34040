"""Imported by the process that forks for every Hugging Face run: what each would otherwise do again."""

import importlib
import tempfile
from pathlib import Path

from hf_util import make_folder
from jumar import models

for name in ("peft", "jumar.train.hf.run", "jumar.train.hf.trainer"):
    importlib.import_module(name)
with tempfile.TemporaryDirectory() as folder:
    # transformers compiles a thousand expressions for the first model that it loads.
    models.load(make_folder(Path(folder)))
