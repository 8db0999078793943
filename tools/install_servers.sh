#!/usr/bin/env bash
# For CI: installs the servers that connector tests run against the browser for tests of the page, and Prometheus, where that can be done without asking.
# Elsewhere it says what to install; the tests that need them are skipped, and say so too.
set -euo pipefail
cd "$(dirname "$0")"

has_postgres() { command -v initdb > /dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' > /dev/null; }

can_install() { [[ $EUID -eq 0 ]] && command -v apt-get > /dev/null; }

install() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    apt-get install -q -y --no-install-recommends "$@"
}

postgres() {
    if has_postgres; then return; fi
    if ! can_install; then
        echo "no PostgreSQL server here: its tests will be skipped.   Debian, Ubuntu:  sudo apt install postgresql"
        return
    fi
    local conf=/etc/postgresql-common/createcluster.conf  # tests make clusters of their own: the package need not start one
    if [[ ! -e $conf ]]; then
        mkdir -p "${conf%/*}"
        echo 'create_main_cluster = false' > "$conf"
    fi
    install postgresql
    has_postgres || { echo "error: apt-get has installed postgresql, and there is still no initdb" >&2; exit 1; }
}

kafka() {
    if ! command -v mvn > /dev/null && can_install; then install maven || echo "no Maven could be installed"; fi
    ./kafka_jars.sh > /dev/null || echo "no Kafka broker here: its tests will be skipped"
}

browser() {
    if command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null; then return; fi
    if ! can_install; then
        echo "no Chromium here: tests of the page in a browser will be skipped.   Debian, Ubuntu:  sudo apt install chromium"
        return
    fi
    install chromium || echo "no Chromium could be installed: tests of the page in a browser will be skipped"
}

prometheus_server() {
    if command -v prometheus > /dev/null && command -v promtool > /dev/null; then return; fi
    if ! can_install; then
        echo "no Prometheus here: tests of the metrics against it will be skipped.   Debian, Ubuntu:  sudo apt install prometheus"
        return
    fi
    # its two programs only: the package starts a daemon, and recommends more of them
    local into
    into=$(mktemp -d)
    if apt-get update -q && (cd "$into" && apt-get download -q prometheus) && dpkg-deb -x "$into"/prometheus_*.deb "$into/files"; then
        command install -m 755 "$into"/files/usr/bin/{prometheus,promtool} /usr/local/bin/
    else
        echo "no Prometheus could be fetched: tests of the metrics against it will be skipped"
    fi
    rm -rf "$into"
}

postgres
kafka
browser
prometheus_server
