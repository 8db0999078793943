#!/usr/bin/env bash
# Tests with the oldest versions of all dependencies that pyproject.toml allows, in a virtual environment of their own:
# DIR=.minimums. PYTHON=python3 says with which interpreter; arguments go to pytest (without any: the rooms' own tests).
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${DIR:-.minimums}
python=${PYTHON:-python3}
[ $# -gt 0 ] || set -- tests/core tests/state tests/operators tests/connectors tests/graph tests/protocol \
    tests/checkpoint tests/exchange tests/worker tests/coordinator tests/runtime tests/api -m 'not systems'

[ -x "$dir/bin/python" ] || "$python" -m venv "$dir"
"$dir/bin/python" tools/release_checks.py oldest > "$dir/constraints.txt"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$dir/constraints.txt" --editable '.[dev]'
"$dir/bin/python" --version
paste -sd ' ' "$dir/constraints.txt"
exec "$dir/bin/python" -m pytest -q "$@"
