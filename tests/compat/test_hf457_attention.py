"""Attention of transformers 4.57 models and of modules of one's own (`make test-compat`)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.register_assert_rewrite("sdpa_util", "test_convert_sdpa", "test_convert_sdpa_masks", "test_convert_functional")
transformers = pytest.importorskip("transformers")

from test_convert_functional import *
from test_convert_sdpa import *
from test_convert_sdpa_masks import *


def test_this_is_the_version_meant():
    assert transformers.__version__.startswith("4.57.")
