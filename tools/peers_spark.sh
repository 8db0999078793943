#!/usr/bin/env bash
# Puts what PySpark does not have into .peers/spark, for benchmarks/peers/spark: Kafka's connector, and for the workload
# lakehouse the newest PySpark that Delta and Iceberg have connectors for, with these. Does nothing, quickly, when it is
# up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

home=.peers/spark
sources=benchmarks/peers/spark
lakehouse_version=4.1.1

fail() { printf '\n\033[1;31merror:\033[0m %s\n' "$1" >&2; shift; printf '       %s\n' "$@" >&2; exit 1; }

bring() {  # POM DIRECTORY: there as a whole, or not at all
    local wanted
    wanted=$(cksum < "$1")
    if [[ -d $2 && -f $2.installed && $(< "$2.installed") == "$wanted" ]]; then return; fi
    command -v mvn > /dev/null || fail "Maven brings Spark's connectors; mvn was not found" \
        "Debian, Ubuntu:  sudo apt install maven"
    echo "bringing what $1 names (11 to 75 MB the first time)"
    rm -rf "$2" "$2.new"
    mkdir -p "$home"
    mvn --quiet --batch-mode --file "$1" dependency:copy-dependencies -DincludeScope=runtime \
        -DoutputDirectory="$PWD/$2.new" || fail "Maven failed; what it said is above"
    mv "$2.new" "$2"
    echo "$wanted" > "$2.installed"
}

bring "$sources/pom.xml" "$home/jars"
bring "$sources/lakehouse.xml" "$home/lakehouse-jars"
if [[ ! -f $home/pyspark.installed || $(< "$home/pyspark.installed") != "$lakehouse_version" ]]; then
    echo "installing PySpark $lakehouse_version in $home/pyspark (450 MB the first time)"
    rm -rf "$home/pyspark"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --target "$home/pyspark" \
        "pyspark==$lakehouse_version" || fail "the installation failed; what pip said is above"
    echo "$lakehouse_version" > "$home/pyspark.installed"
fi
