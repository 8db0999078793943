#!/usr/bin/env bash
# Builds the sdist and the wheel in dist/ and checks them: their metadata and contents, and the wheel as users install it,
# in empty virtual environments outside of the clone: without extras, with all of them, and with the oldest versions that
# pyproject.toml allows.   usage: tools/release.sh [--tag]   (--tag: HEAD must have the tag of the version, too)
set -euo pipefail
cd "$(dirname "$0")/.."

clone=$PWD
python=${PYTHON:-.venv/bin/python}
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
unset PYTHONPATH  # it would find the clone
export PIP_DISABLE_PIP_VERSION_CHECK=1 SPARK_LOCAL_IP=${SPARK_LOCAL_IP:-127.0.0.1}

step() { printf '    %s\n' "$*"; }
venv() { "$python" -m venv "$room/$1"; }
install() { local into=$1; shift; "$room/$into/bin/python" -m pip install --quiet "$@"; }

step "version, tag and CHANGELOG.md agree"
"$python" tools/release_checks.py versions "$@"

step "sdist and wheel"
rm -rf dist
venv tools
install tools 'build>=1.2' 'twine>=6'
"$room/tools/bin/python" -m build --outdir dist . > "$room/build.log" 2>&1 || { cat "$room/build.log" >&2; exit 1; }
"$room/tools/bin/python" -m twine check --strict dist/* > "$room/twine.log" || { cat "$room/twine.log" >&2; exit 1; }
"$python" tools/release_checks.py contents dist
wheel=$(echo "$clone"/dist/*.whl)

use_as_a_newcomer() {  # in the environment of that name: a first job, its tests, hello.py, a simulation
    local bin=$room/$1/bin
    mkdir "$room/$1/work"
    cp examples/hello.py "$room/$1/work"
    (
        cd "$room/$1/work"
        "$bin/midstream" new shop > /dev/null
        "$bin/python" -m pytest -q shop > pytest.log || { cat pytest.log >&2; exit 1; }
        "$bin/midstream" run hello.py --slots process > rows.txt 2> progress.txt || { cat progress.txt >&2; exit 1; }
        [[ $(grep -c "'clicks': 20" rows.txt) -eq 9 ]] || { cat rows.txt >&2; exit 1; }
        "$bin/midstream" simulate hello.py --seeds 0:5 > simulated.txt || { cat simulated.txt >&2; exit 1; }
    )
}

step "the wheel alone: a first job, its tests, hello.py on processes and on Spark, a simulation"
venv plain
install plain "$wheel"
"$python" tools/release_checks.py without_extras "$room/plain/bin/python"
install plain pytest
use_as_a_newcomer plain
(cd "$room/plain/work" && "$room/plain/bin/midstream" run hello.py > spark.txt 2>&1)  # what Python workers of Spark print is in their log
[[ $(grep -c "'clicks': 20" "$room/plain/work/spark.txt") -eq 9 ]] || { cat "$room/plain/work/spark.txt" >&2; exit 1; }

step "each extra can be imported"
install plain "$wheel[$("$python" tools/release_checks.py extras)]"
"$python" tools/release_checks.py imports "$room/plain/bin/python"

step "the oldest versions that pyproject.toml allows"
venv oldest
"$python" tools/release_checks.py oldest > "$room/oldest.txt"
install oldest --constraint "$room/oldest.txt" "$wheel" pytest
use_as_a_newcomer oldest

ls -l dist
