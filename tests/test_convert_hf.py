"""Hugging Face models of transformers 5.x, converted; the cases are in ``convert_hf_suite.py``."""

import pytest

pytest.register_assert_rewrite("convert_hf_suite")
transformers = pytest.importorskip("transformers", minversion="5.0")

from convert_hf_suite import *
