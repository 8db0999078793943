#!/usr/bin/env bash
# Writes tools/locked.txt: the versions of everything that `make setup` installs, as pip finds them today, for this Python
# and system. On others pip chooses. PYTHON=python3 says with which interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check '.[dev]'
here=$("$dir/bin/python" -c 'import sys; print("python_version == \"%d.%d\" and sys_platform == \"%s\"" % (*sys.version_info[:2], sys.platform))')
{
    echo "# Versions that are tested together: tools/lock.sh writes them, tools/setup.sh installs them."
    "$dir/bin/python" -m pip freeze --disable-pip-version-check --exclude midstream | sed "s/\$/ ; $here/"
} > tools/locked.txt
wc -l < tools/locked.txt
