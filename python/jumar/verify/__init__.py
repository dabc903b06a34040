"""Fused against eager against an fp64 oracle: single operators and whole models, in ulps."""

from __future__ import annotations

from jumar.verify.models import ModelRow, verify_model
from jumar.verify.operators import Row, compare, verify_operator, verify_operators

__all__ = ["ModelRow", "Row", "compare", "verify_model", "verify_operator", "verify_operators"]
