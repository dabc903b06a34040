"""The same cases on transformers 4.57, whose models differ (`make test-compat`)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.register_assert_rewrite("convert_hf_suite", "moe_hf_suite")
transformers = pytest.importorskip("transformers")

from convert_hf_suite import *


def test_this_is_the_version_meant():
    assert transformers.__version__.startswith("4.57.")
