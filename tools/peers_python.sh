#!/usr/bin/env bash
# Makes .peers/bytewax, an environment for the Bytewax benchmarks; the Spark and plain Python peers use .venv.
# Does nothing, quickly, when nothing has changed.   usage: tools/peers_python.sh
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf '\n\033[1;31merror:\033[0m %s\n' "$1" >&2; shift; printf '       %s\n' "$@" >&2; exit 1; }

find_python() {  # Bytewax has wheels for 3.8 to 3.12 only; $PYTHON goes first, then what made .venv
    local candidate
    for candidate in ${PYTHON:-} .venv/bin/python python3.12 python3.11 python3.10 python3; do
        if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10, 3.11 or 3.12 with the venv module found; Bytewax has packages for no newer one" \
        "Debian, Ubuntu:  sudo apt install python3-venv" "or name one:     PYTHON=/path/to/python3.12 tools/peers_python.sh"
}

environment=.peers/bytewax
stamp=$environment/.installed
wanted="bytewax==0.21.1 numpy>=1.26,<3 pyarrow>=18"
read -ra packages <<< "$wanted"
if [[ -f $stamp && $(< "$stamp") == "$PWD $wanted" ]] && "$environment/bin/python" -c 'import bytewax' 2>/dev/null; then exit; fi
python=$(find_python)
echo "making $environment with $("$python" --version)"
rm -rf "$environment"
mkdir -p .peers
"$python" -m venv "$environment"
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "${packages[@]}" ||
    fail "the installation failed; what pip said is above" "try again with:  tools/peers_python.sh"
echo "$PWD $wanted" > "$stamp"
