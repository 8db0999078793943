#!/usr/bin/env bash
# Sets the project up in .venv from nothing but a system Python, and looks for Java before that.
# Does nothing, quickly, when nothing has changed.   usage: tools/setup.sh [--without-java]
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    local label="error:"
    if [[ -t 2 ]]; then label=$'\033[1;31merror:\033[0m'; fi
    printf '\n%s %s\n' "$label" "$1" >&2
    shift
    printf '       %s\n' "$@" >&2
    exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {  # $PYTHON if it is set, else the first interpreter that is new enough
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.11 or newer" \
            "name another:    make setup PYTHON=/path/to/python3" "or have one found: make setup PYTHON="
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found" \
        "Debian 12, Ubuntu 24.04 and newer:  sudo apt install python3 python3-venv" \
        "older ones, whose python3 is older: https://docs.astral.sh/uv, then: uv python install 3.12" \
        "macOS:                              brew install python@3.12" \
        "then, if it is not found:           make setup PYTHON=/path/to/python3"
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
    # The versions that are tested together, where they are known for this Python (tools/lock.sh); else what pip finds.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 --constraint tools/locked.txt --editable '.[dev]' ||
        fail "the installation failed; what pip said is above" "try again with:  make setup"
    echo "$wanted" > "$stamp"
}

say_if_another_python_is_wanted() {  # there is a .venv, and $PYTHON may not be what it was made with
    local of='import sys; print(sys.base_prefix, *sys.version_info[:2])' made
    made=$(.venv/bin/python -c "$of" 2>/dev/null) || return 0
    [[ $("$PYTHON" -c "$of" 2>/dev/null) == "$made" ]] ||
        echo "PYTHON=$PYTHON is not used: .venv is there, with $(.venv/bin/python --version); rm -rf .venv to make another" >&2
}

check_java() {
    local java=java version
    if [[ -n ${JAVA_HOME:-} ]]; then java=$JAVA_HOME/bin/java; fi
    local how=("Debian, Ubuntu:  sudo apt install openjdk-17-jre-headless"
        "macOS:           brew install openjdk@17"
        "elsewhere:       https://adoptium.net; then set JAVA_HOME if java is not on the PATH"
        "without Spark:   make setup-python, then .venv/bin/midstream run JOB.py --slots process")
    command -v "$java" > /dev/null || fail "Spark needs Java 17 or newer; $java was not found" "${how[@]}"
    version=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1) || true
    [[ ${version:-0} -ge 17 ]] || fail "Spark needs Java 17 or newer; $java is ${version:-of an unknown version}" "${how[@]}"
}

stamp=.venv/.installed
wanted="$PWD $(cat pyproject.toml tools/locked.txt | cksum)"
up_to_date() { [[ -f $stamp && $(< "$stamp") == "$wanted" && -x .venv/bin/midstream ]] && .venv/bin/python -c '' 2>/dev/null; }
if [[ ${1:-} != --without-java ]]; then check_java; fi  # before minutes of installing
if [[ -n ${PYTHON:-} ]]; then say_if_another_python_is_wanted; fi
if ! up_to_date; then install_project; fi
