#!/usr/bin/env bash
# Sets up what the Flink benchmarks need in .peers/flink: a venv with apache-flink, which ships Flink's jars, its
# connectors for Kafka and Iceberg, which Maven brings, and the compiled programs of benchmarks/peers/flink in benchmarks.jar. Does nothing, quickly, when it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

version=2.3.0
home=.peers/flink
sources=benchmarks/peers/flink

fail() { printf '\n\033[1;31merror:\033[0m %s\n' "$1" >&2; shift; printf '       %s\n' "$@" >&2; exit 1; }

find_python() {  # apache-flink's own dependencies have wheels for these; $PEERS_PYTHON goes first
    local candidate
    for candidate in ${PEERS_PYTHON:-} python3.11 python3.12 python3.10 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "apache-flink $version needs Python 3.10 to 3.12; none was found" \
        "name one:  PEERS_PYTHON=/path/to/python3.11 tools/peers_flink.sh"
}

install_flink() {
    local python
    python=$(find_python)
    echo "making $home with $("$python" --version); installing apache-flink $version (250 MB the first time)"
    rm -rf "$home"
    mkdir -p "$home"
    "$python" -m venv "$home" ||
        fail "$python cannot make virtual environments" "Debian, Ubuntu:  sudo apt install python3-venv"
    "$home/bin/python" -m pip install --quiet --disable-pip-version-check "apache-flink==$version" ||
        fail "the installation failed; what pip said is above" "try again with:  tools/peers_flink.sh"
    echo "$version" > "$home/.installed"
}

bring_connector() {
    command -v mvn > /dev/null || fail "Maven brings Flink's connectors; mvn was not found" \
        "Debian, Ubuntu:  sudo apt install maven"
    echo "bringing what $sources/pom.xml names (130 MB the first time)"
    rm -rf "$home/connector"
    mvn --quiet --batch-mode --file "$sources/pom.xml" dependency:copy-dependencies -DincludeScope=runtime \
        -DoutputDirectory="$PWD/$home/connector" || fail "Maven failed; what it said is above"
    cksum < "$sources/pom.xml" > "$home/.connector"
}

compile() {
    local javac=javac jar=jar found lib
    if [[ -n ${JAVA_HOME:-} ]]; then javac=$JAVA_HOME/bin/javac jar=$JAVA_HOME/bin/jar; fi
    command -v "$javac" > /dev/null || fail "the programs are compiled with a JDK 17 or newer; $javac was not found" \
        "Debian, Ubuntu:  sudo apt install openjdk-17-jdk-headless"
    found=$("$javac" -version 2>&1 | sed -n 's/^javac \([0-9]*\).*/\1/p')
    [[ ${found:-0} -ge 17 ]] || fail "the programs are compiled with a JDK 17 or newer; $javac is ${found:-unknown}"
    lib=$("$home/bin/python" -c 'import os, pyflink; print(os.path.dirname(pyflink.__file__))')/lib
    echo "compiling $sources with javac $found"
    rm -rf "$home/classes"
    "$javac" --release 17 -Xlint:-options -cp "$lib/*:$home/connector/*" -d "$home/classes" "$sources"/*.java ||
        fail "the programs do not compile; what javac said is above"
    "$jar" --create --file "$home/benchmarks.jar.new" -C "$home/classes" .
    mv "$home/benchmarks.jar.new" "$home/benchmarks.jar"  # a JVM that runs keeps the old one
    echo "$1" > "$home/.compiled"
}

if [[ ! -f $home/.installed || $(< "$home/.installed") != "$version" ]] || ! "$home/bin/python" -c '' 2>/dev/null; then
    install_flink
fi
if [[ ! -f $home/.connector || $(< "$home/.connector") != "$(cksum < "$sources/pom.xml")" ]]; then
    bring_connector
fi
wanted=$(cat "$sources"/*.java "$home/.connector" | cksum)
if [[ ! -f $home/.compiled || $(< "$home/.compiled") != "$wanted" || ! -f $home/benchmarks.jar ]]; then
    compile "$wanted"
fi
