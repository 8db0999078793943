#!/usr/bin/env bash
# Puts Spark's Kafka connector, which PySpark does not have, into .peers/spark/jars, for the workload kafka of
# benchmarks/peers/spark. Does nothing, quickly, when it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

home=.peers/spark
pom=benchmarks/peers/spark/pom.xml

fail() { printf '\n\033[1;31merror:\033[0m %s\n' "$1" >&2; shift; printf '       %s\n' "$@" >&2; exit 1; }

wanted=$(cksum < "$pom")
if [[ ! -f $home/.installed || $(< "$home/.installed") != "$wanted" || ! -d $home/jars ]]; then
    command -v mvn > /dev/null || fail "Maven brings Spark's Kafka connector; mvn was not found" \
        "Debian, Ubuntu:  sudo apt install maven"
    echo "bringing what $pom names (11 MB the first time)"
    rm -rf "$home"
    mkdir -p "$home"
    mvn --quiet --batch-mode --file "$pom" dependency:copy-dependencies -DincludeScope=runtime \
        -DoutputDirectory="$PWD/$home/new" || fail "Maven failed; what it said is above"
    mv "$home/new" "$home/jars"  # there as a whole, or not at all
    echo "$wanted" > "$home/.installed"
fi
