"""Finds YARN, and checks that it answers: Spark's client tries to reach a resource manager for a quarter of an hour.

Hadoop finds it by the files of a directory that HADOOP_CONF_DIR or YARN_CONF_DIR names, and by `spark.hadoop.…`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark import SparkConf, SparkContext

from midstream.engine.core.errors import ConfigError, UnavailableError

DIRECTORIES: Final = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
TIMEOUT_S: Final = 10.0
REPORT_AFTER_S: Final = 60.0
_MANAGER: Final = "yarn.resourcemanager"
_PORT: Final = 8032
_log = logging.getLogger("midstream")
_WAY_OUT: Final = "the directory that has the cluster's core-site.xml and yarn-site.xml"


def check_named(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if no variable names the directory with Hadoop's settings, without which Spark does not start."""
    if not any(environment.get(name) for name in DIRECTORIES):
        raise ConfigError(
            f"master 'yarn': neither {' nor '.join(DIRECTORIES)} is set, so the location of YARN is unknown; set one "
            f"to {_WAY_OUT}"
        )


def check_managers(users: SparkConf, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UnavailableError if no resource manager listens at the configured address. Spark's JVM must be running."""
    refusals = []
    for host, port in resource_managers(users):
        try:
            socket.create_connection((host, port), TIMEOUT_S).close()
        except OSError as error:
            refusals.append(f"{host}:{port}: {error}")
        else:
            return
    named = [f"{name}={environment[name]}" for name in DIRECTORIES if environment.get(name)]
    has_file = any(Path(each.partition("=")[2], "yarn-site.xml").is_file() for each in named)
    without = "" if has_file else ", where there is no yarn-site.xml"
    raise UnavailableError(
        f"no resource manager of YARN listens where Hadoop's settings say ({'; '.join(refusals)}), which are those of "
        f"{' and '.join(named)}{without}; start it, or let {DIRECTORIES[0]} name {_WAY_OUT}"
    )


@contextmanager
def waiting_is_reported() -> Iterator[None]:
    """Warn if Spark waits long for a container while it starts on YARN: it waits silently and without a limit."""
    text = (
        f"Spark has not started on YARN for {REPORT_AFTER_S:g} s, and there is no limit on this wait. YARN may have no "
        "room in the queue for the container that Spark itself needs: `yarn application -list` then shows it as "
        "ACCEPTED; end other applications, or name another queue (spark.yarn.queue)"
    )
    timer = threading.Timer(REPORT_AFTER_S, _log.warning, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def resource_managers(users: SparkConf) -> list[tuple[str, int]]:
    """Return the hosts and ports of the managers as Hadoop reads its settings; several if one stands by for the other."""
    jvm = SparkContext._jvm
    assert jvm is not None
    merged = jvm.org.apache.spark.deploy.SparkHadoopUtil.get().newConfiguration(users._jconf)
    settings = jvm.org.apache.hadoop.yarn.conf.YarnConfiguration(merged)
    numbers = (settings.get(f"{_MANAGER}.ha.rm-ids") or "").split(",")
    found = []
    for number in [f".{each.strip()}" for each in numbers if each.strip()] or [""]:
        host = settings.get(f"{_MANAGER}.hostname{number}")
        address = settings.get(f"{_MANAGER}.address{number}") or f"{host}:{_PORT}"
        name, colon, port = address.rpartition(":")
        found.append((name.strip("[]"), int(port)) if colon else (address, _PORT))
    return found
