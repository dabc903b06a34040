"""Ten losses of a fixed job that are kept in the repository: they move only for a reason that a commit names.

``python tests/test_train_golden.py`` writes them anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

import torch

from jumar import compat
from train_util import no_sleep, train_job

DATA = Path(__file__).parent / "data"
LOSSES = DATA / "golden_losses.json"
FORMS = {"eager": ["model.converters="], "fused": []}


def losses(form: str, folder: Path, *more: str) -> list[float]:
    """The losses of the job in one of its forms."""
    overrides = [*FORMS[form], f"job.dump_folder={folder / form}", *more]
    return train_job(DATA / "golden" / "job.toml", *overrides)["losses"]


@pytest.mark.parametrize("form", FORMS)
def test_golden_losses(form, tmp_path, monkeypatch):
    compat.apply()
    no_sleep(monkeypatch)
    golden = json.loads(LOSSES.read_text())[form]
    found = losses(form, tmp_path)
    assert len(golden) == len(found) == 10
    distance = [abs(a - b) / b for a, b in zip(found, golden, strict=True)]
    assert max(distance[:3]) <= 1e-5, distance
    assert max(distance) <= 1e-4, distance


def test_forms_agree():
    golden = json.loads(LOSSES.read_text())
    distance = [abs(a - b) / b for a, b in zip(golden["fused"], golden["eager"], strict=True)]
    assert max(distance[:3]) <= 1e-5 and max(distance) <= 1e-4


def main() -> None:
    """Writes the file."""
    import tempfile

    compat.apply()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {form: losses(form, Path(folder)) for form in FORMS}
    LOSSES.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
