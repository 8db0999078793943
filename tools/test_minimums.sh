#!/usr/bin/env bash
# Tests with the oldest versions of all dependencies that pyproject.toml allows, in a virtual environment of their own:
# DIR=.minimums. PYTHON=python3 says with which interpreter; arguments go to pytest (without any: the rooms' own tests).
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${DIR:-.minimums}
python=${PYTHON:-python3}
[ $# -gt 0 ] || set -- tests/core tests/state tests/operators tests/connectors tests/graph tests/protocol \
    tests/checkpoint tests/exchange tests/worker tests/coordinator tests/runtime tests/api -m 'not spark'

[ -x "$dir/bin/python" ] || "$python" -m venv "$dir"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check 'tomli>=2; python_version < "3.11"'
"$dir/bin/python" - > "$dir/constraints.txt" <<'PYTHON'
import re, sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
# Of the tools that look at the code or drive the tests any version will do.
for line in [*project["dependencies"], *extras["postgres"], *extras["delta"], *extras["kafka"], *extras["kafka-avro"], *extras["otel"]]:
    match = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)", line)
    if match is None:
        sys.exit(f"pyproject.toml: {line!r} has no lowest version; write name>=version")
    print(f"{match[1]}=={match[2]}")
PYTHON
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$dir/constraints.txt" --editable '.[dev]'
"$dir/bin/python" --version
paste -sd ' ' "$dir/constraints.txt"
exec "$dir/bin/python" -m pytest -q "$@"
