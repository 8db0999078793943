#!/usr/bin/env bash
# Prints the directory with the jars of a Kafka broker for tests. Those of tools/kafka/pom.xml are brought there by Maven,
# once (43 MB); the directory is outside of the repository: below $XDG_CACHE_HOME, by default ~/.cache.
set -euo pipefail
cd "$(dirname "$0")/kafka"

home=${XDG_CACHE_HOME:-$HOME/.cache}/midstream/kafka-$(cksum < pom.xml | cut -d' ' -f1)

if [[ ! -d $home ]]; then
    command -v mvn > /dev/null || { echo "no mvn here to bring Kafka's jars.   Debian, Ubuntu:  sudo apt install maven" >&2; exit 1; }
    mkdir -p "${home%/*}"
    new=$(mktemp -d "$home.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    mvn --quiet --batch-mode dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$new/jars" >&2
    mv --no-target-directory "$new/jars" "$home" 2> /dev/null || [[ -d $home ]]  # somebody else may have been first
fi
echo "$home"
