"""torchtitan's own command, under the compat shims: ``torchrun -m jumar.compat.launch`` for ``-m torchtitan.train``.

Takes torchtitan's arguments: those of 0.3.0 (``--module --config --override.imports``) or of 0.2.x
(``--job.config_file``), whichever is installed.
"""

from __future__ import annotations

import runpy


def main() -> None:
    """Applies the shims, then runs ``torchtitan.train`` as a program."""
    from jumar import compat

    compat.apply()
    runpy.run_module("torchtitan.train", run_name="__main__")


if __name__ == "__main__":
    main()
