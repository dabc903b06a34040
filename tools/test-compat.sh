#!/usr/bin/env bash
# Runs tests/compat: every requirements/NAME.txt with a tests/compat/test_NAME.py gets an environment of its own,
# .venv-NAME, in which the wheel built for .venv is installed. Names as arguments select among them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
wheels=build/wheel
rm -rf "$wheels"
PATH="$PWD/.venv/bin:$PATH" .venv/bin/pip wheel -q --no-build-isolation --no-deps --wheel-dir "$wheels" . \
  -Cbuild-dir=build/release -Ccmake.define.JUMAR_TESTS=ON -Ccmake.define.JUMAR_BENCH=ON

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
  for test in tests/compat/test_*.py; do
    name=$(basename "$test" .py)
    names+=("${name#test_}")
  done
fi

for name in "${names[@]}"; do
  requirements=requirements/$name.txt venv=.venv-$name
  if [ ! -f "$requirements" ]; then
    echo "test-compat: $requirements is missing (tests/compat/test_$name.py needs an environment)" >&2
    exit 1
  fi
  if [ ! -f "$venv/.ready" ] || [ "$requirements" -nt "$venv/.ready" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/pip" install -q -r "$requirements"
    touch "$venv/.ready"
  fi
  "$venv/bin/pip" install -q --no-deps --force-reinstall "$wheels"/*.whl
  echo "== $name"
  # Without the project's options: they leave tests/compat out.
  "$venv/bin/python" -m pytest -q -o addopts= "tests/compat/test_$name.py"
done
