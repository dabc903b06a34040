#!/usr/bin/env bash
# Tests against transformers 4.57 and torchtitan 0.2.2, each in an environment of its own, with one wheel that is built
# in the main environment. NAMES (default "hf457 titan02") picks some. Needs a `make build` before.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

rm -rf build/wheel
PATH="$PWD/.venv/bin:$PATH" .venv/bin/pip wheel -q --no-build-isolation --no-deps -w build/wheel . \
  -Cbuild-dir=build/release -Ccmake.define.JUMAR_TESTS=ON -Ccmake.define.JUMAR_BENCH=ON

for name in ${NAMES:-hf457 titan02}; do
  venv=.venv-$name
  requirements=requirements/compat-$name.txt
  if [[ ! -e $venv/.ready || $requirements -nt $venv/.ready ]]; then
    "$PYTHON" -m venv "$venv"
    "$venv/bin/pip" install -q -r "$requirements"
    touch "$venv/.ready"
  fi
  "$venv/bin/pip" install -q --no-deps --force-reinstall build/wheel/jumar-*.whl
  echo "$name: $("$venv/bin/pip" list 2>/dev/null | grep -E '^(torch|torchtitan|transformers) ' | tr -s ' ' | tr '\n' ' ')"
  "$venv/bin/python" -m pytest tests/compat/test_"$name"*.py
done
