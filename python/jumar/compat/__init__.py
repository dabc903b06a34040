"""Compat shims: what torchtitan needs from a newer torch, or from a card, and this machine does not have.

Every shim asks first whether it is needed (probe), changes one place (patch), says why (reason), and can be switched
off by name: ``JUMAR_SHIMS=-pp_step,-set_timeout``, or all with ``JUMAR_SHIMS=off``. :func:`apply` applies those that are
needed, once; :func:`status` lists them all.
"""

from __future__ import annotations

from jumar.compat.registry import ShimError, Status, apply, status

__all__ = ["ShimError", "Status", "apply", "status"]
