#!/usr/bin/env bash
# Sets the project up in .venv from nothing but a system Python, and looks for Java.
# Does nothing, quickly, when nothing has changed.   usage: tools/setup.sh [--without-java]
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf '\n\033[1;31merror:\033[0m %s\n' "$1" >&2; shift; printf '       %s\n' "$@" >&2; exit 1; }

find_python() {  # the first interpreter that is new enough; $PYTHON goes first
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer found" "Debian, Ubuntu:  sudo apt install python3 python3-venv" \
        "or name one:     make setup PYTHON=/path/to/python3"
}

install_project() {
    local python
    if ! .venv/bin/python -c '' 2>/dev/null; then  # missing, or its interpreter is gone
        python=$(find_python)
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            fail "$python cannot make virtual environments" \
                "Debian, Ubuntu:  sudo apt install python3-venv" "then:            make setup"
        echo "making .venv with $("$python" --version)"
        rm -rf .venv
        "$python" -m venv .venv
    fi
    echo "installing midstream and what it needs into .venv (a few minutes the first time: Spark is large)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 --editable '.[dev]' ||
        fail "the installation failed; what pip said is above" "try again with:  make setup"
    echo "$wanted" > "$stamp"
}

check_java() {
    local java=java version
    if [[ -n ${JAVA_HOME:-} ]]; then java=$JAVA_HOME/bin/java; fi
    local how=("Debian, Ubuntu:  sudo apt install openjdk-17-jre-headless"
        "macOS:           brew install openjdk@17"
        "elsewhere:       https://adoptium.net; then set JAVA_HOME if java is not on the PATH")
    command -v "$java" > /dev/null || fail "Spark needs Java 17 or newer; $java was not found" "${how[@]}"
    version=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1) || true
    [[ ${version:-0} -ge 17 ]] || fail "Spark needs Java 17 or newer; $java is ${version:-of an unknown version}" "${how[@]}"
}

stamp=.venv/.installed
wanted="$PWD $(cksum < pyproject.toml)"
up_to_date() { [[ -f $stamp && $(< "$stamp") == "$wanted" && -x .venv/bin/midstream ]] && .venv/bin/python -c '' 2>/dev/null; }
if ! up_to_date; then install_project; fi
if [[ ${1:-} != --without-java ]]; then check_java; fi
