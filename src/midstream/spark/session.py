"""The Spark session a job runs on: the user's own if there is one, else an embedded, quiet one.

A session that was found is never changed and never stopped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from importlib import resources
from pathlib import Path
from typing import Final

from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from midstream.core.errors import ClusterError, ConfigError
from midstream.runtime.threads import ENVIRONMENT

DEFAULT_MASTER: Final = "local[*]"
JAVA_MIN: Final = 17
LOOPBACK: Final = "127.0.0.1"

_LOCAL = re.compile(r"local(\[.*\])?|local-cluster\[.*\]")
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_INSTALL_JAVA = "install one (Debian: apt install openjdk-17-jre-headless) or set JAVA_HOME"


def is_local(master: str) -> bool:
    """Whether all executors run on this machine."""
    return _LOCAL.fullmatch(master.strip()) is not None


def get_session(master: str | None = None, name: str = "midstream") -> SparkSession:
    """The active session, or a new one on `master` (default: `local[*]`).

    Raises ConfigError when a session is active on another master than the one asked for,
    ClusterError when Spark cannot start, above all for want of Java.
    """
    session = active_session()
    if session is not None:
        present = session.sparkContext.master
        if master is not None and master != present:
            raise ConfigError(
                f"master {master!r}: this program already has a Spark session on {present!r}; "
                "stop that one first, or leave the master out"
            )
        return session
    return _create(master or os.environ.get("MASTER") or DEFAULT_MASTER, name)


def active_session() -> SparkSession | None:
    """The session of this program, if it has one that is not stopped."""
    if SparkContext._active_spark_context is None:
        return None
    session = SparkSession.getActiveSession()
    return session if session is not None else SparkSession.builder.getOrCreate()


def _create(master: str, name: str) -> SparkSession:
    check_java()
    # else Spark takes whatever python3 is on the PATH, which has none of our packages
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName(name)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.scheduler.mode": "FAIR",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.speculation": "false",
        **{f"spark.executorEnv.{variable}": value for variable, value in ENVIRONMENT.items()},
    }
    if is_local(master):
        # executors of local-cluster bind the machine's outside address otherwise, and may not reach it
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
        settings["spark.driver.host"] = settings["spark.driver.bindAddress"] = os.environ["SPARK_LOCAL_IP"]
        settings["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile=file:{_log_settings()}"
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        with warnings.catch_warnings():  # what pyspark's own test module says of pandas
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"pyspark\.testing.*")
            return builder.getOrCreate()
    except PySparkException as error:
        raise ClusterError(f"Spark does not start on {master!r}: {error}") from error
    except Exception as error:
        raise ClusterError(f"Spark does not start on {master!r}: {first_line(error)}") from error


def check_java() -> None:
    """Raises ClusterError when there is no Java that Spark can use."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f"JAVA_HOME is {home}, which has no bin/java" if home else "no java on the PATH"
        raise ClusterError(f"Spark needs Java {JAVA_MIN} or later, and there is {where}; {_INSTALL_JAVA}")
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"Spark needs Java {JAVA_MIN} or later, and {java} does not run: {error}") from error
    match = _JAVA_VERSION.search(answer.stderr + answer.stdout)
    if match is not None and int(match.group(1)) < JAVA_MIN:
        raise ClusterError(f"Spark needs Java {JAVA_MIN} or later, {java} is Java {match.group(1)}; {_INSTALL_JAVA}")


def first_line(error: BaseException) -> str:
    """What an error of Spark says, without the JVM's stack."""
    java = getattr(error, "java_exception", None)
    text = str(java.toString()) if java is not None else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _log_settings() -> Path:
    with resources.as_file(resources.files("midstream.spark") / "log4j2.properties") as path:
        return path
