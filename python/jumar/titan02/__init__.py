"""torchtitan 0.2.x on fused operators: model converters for its own TOML job files.

::

    [model]
    converters = ["npu_rms_norm", "npu_rope", "npu_swiglu", "npu_linear"]
    [experimental]
    custom_import = "jumar.titan02"

Importing this module registers the converters with torchtitan. On a machine without an accelerator start it as
``torchrun -m jumar.compat.launch --job.config_file FILE``, which applies the compat shims before torchtitan is imported.
"""

from __future__ import annotations

from jumar import compat

compat.apply()

from jumar.titan02.converters import CONVERTERS, register

register()

__all__ = ["CONVERTERS"]
