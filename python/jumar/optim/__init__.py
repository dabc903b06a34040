"""Training's last two passes over all parameters, each one multithreaded C++ call: AdamW and gradient clipping."""

from __future__ import annotations

from jumar.optim.adamw import AdamW
from jumar.optim.clip import clip_grad_norm_

__all__ = ["AdamW", "clip_grad_norm_"]
