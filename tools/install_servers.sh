#!/usr/bin/env bash
# For CI: installs the servers that connector tests run against, where that can be done without asking.
# Elsewhere it says what to install; the tests that need them are skipped, and say so too.
set -euo pipefail

has_postgres() { command -v initdb > /dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' > /dev/null; }

if has_postgres; then exit; fi
if [[ $EUID -ne 0 ]] || ! command -v apt-get > /dev/null; then
    echo "no PostgreSQL server here: its tests will be skipped.   Debian, Ubuntu:  sudo apt install postgresql"
    exit
fi
conf=/etc/postgresql-common/createcluster.conf  # tests make clusters of their own: the package need not start one
if [[ ! -e $conf ]]; then
    mkdir -p "${conf%/*}"
    echo 'create_main_cluster = false' > "$conf"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends postgresql
has_postgres || { echo "error: apt-get has installed postgresql, and there is still no initdb" >&2; exit 1; }
