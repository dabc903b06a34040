"""jumar.optim on sharded parameters: two processes against one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("optim_ranks.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    file = tmp_path_factory.mktemp("store") / "store"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(file)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][1][-3000:] + outputs[1][1][-3000:]
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.mark.parametrize("norm_type", ["1.0", "2.0", "3.0", "inf"])
def test_norm_and_step_are_those_of_one_process(found, norm_type):
    assert found[f"norm {norm_type}"] < 1e-5
    assert found[f"weights {norm_type}"] < 1e-5


def test_nan_of_one_process_reaches_all(found):
    assert found["nan"] == [True, True]


def test_state_goes_to_torchs_and_back(found):
    assert found["state True"] < 1e-6 and found["state False"] < 1e-6


def test_placements(found):
    assert found["placements"] < 1e-6 and found["scaled"] < 1e-6 and found["stepped"] < 1e-6


def test_master_weights_are_sharded(found):
    assert found["master"]
