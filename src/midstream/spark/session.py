"""The Spark session on which a job runs: the user's own if there is one, else an embedded, quiet one.

An existing session is never changed and never stopped.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext, suppress
from importlib import resources
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from midstream.engine.core.errors import ClusterError, ConfigError, MidstreamError, UnavailableError
from midstream.runtime.process.process_slots import how_it_ended
from midstream.runtime.process.thread_limits import ENVIRONMENT
from midstream.spark.decommission import leaving_settings
from midstream.spark.jvm import interruptible, launch_jvm, log_option
from midstream.spark.yarn import check_managers, check_named, waiting_is_reported

DEFAULT_MASTER: Final = "local[*]"
JAVA_MIN: Final = 17
LOOPBACK: Final = "127.0.0.1"
YARN: Final = "yarn"
CORES_MAX: Final = "spark.cores.max"
INSTANCES: Final = "spark.executor.instances"
DEPLOY_MODE: Final = "spark.submit.deployMode"
DYNAMIC: Final = "spark.dynamicAllocation.enabled"
MASTER_TIMEOUT_S: Final = 10.0
STOPPING_WAIT_S: Final = 10.0
"""How long a stopping Spark may take to show whether its JVM ends with it."""

LOCAL: Final = re.compile(r"local(?:\[\s*(\*|[1-9]\d*)\s*(?:,\s*\d+\s*)?\])?")
"""A local master, with the number of threads if it is given."""
LOCAL_CLUSTER: Final = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]")
"""A local-cluster master, with the number of workers and the cores of each."""
_REMOTE: Final = re.compile(r"yarn|spark://.+|k8s://.+")

NEEDS_CLASSIC: Final = (
    "this program uses Spark Connect, whose client cannot start slots: midstream needs a classic Spark session in this "
    "process, so unset SPARK_REMOTE and spark.remote, leave out builder.remote(…), and create the session with "
    "SparkSession.builder.master(…), or let midstream create it"
)

_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_STOPPED: Final = "the Spark session was stopped"
_INSTALL_JAVA = "install one (Debian: apt install openjdk-17-jre-headless) or set JAVA_HOME"


def is_local_master(master: str) -> bool:
    """Whether all executors run on this machine."""
    return LOCAL.fullmatch(master) is not None or LOCAL_CLUSTER.fullmatch(master) is not None


def get_session(master: str | None = None, name: str = "midstream", slots: int | None = None) -> SparkSession:
    """Return the active session, or a new one on `master` (default: that of spark-submit, else `local[*]`).

    `slots`: the number that the job needs for which the session is created. The session then takes that many cores,
    unless the user's settings determine the number: by default, Spark would take all cores of a standalone cluster,
    leaving none to other jobs, and two executors of YARN or Kubernetes, which may be too few.

    Raises ConfigError for an invalid master, or if a session is active on another one, ClusterError if Spark cannot
    start, above all because Java is missing.
    """
    if master is not None and not is_local_master(master) and not _REMOTE.fullmatch(master):
        raise ConfigError(
            f"master {master!r} is not a Spark master; use for example 'local[4]', 'local[*]', "
            "'spark://host:7077', 'yarn' or 'k8s://https://host:6443'"
        )
    session = active_session()
    if session is not None:
        present = session.sparkContext.master
        if master is not None and master != present:
            raise ConfigError(
                f"master {master!r}: this program already has a Spark session on {present!r}; "
                "stop that one first, or leave the master out"
            )
        return session
    return _create(master, name, slots)


def active_session() -> SparkSession | None:
    """Return this program's session, if it has one that is not stopped. Raises ClusterError if its JVM has ended."""
    context = SparkContext._active_spark_context
    if context is None:
        return None
    ended = how_spark_ended(context)
    if ended:
        raise ClusterError(f"this program's Spark can no longer be used: {ended}; start the program again")
    session = SparkSession.getActiveSession()
    return _classic(session if session is not None else SparkSession.builder.getOrCreate())


def _classic(session: SparkSession) -> SparkSession:
    """Return the session. Raises ConfigError for one of Spark Connect."""
    if is_of_connect(session):
        raise ConfigError(NEEDS_CLASSIC)
    return session


def is_of_connect(thing: object) -> bool:
    """Whether a session or a DataFrame is a Spark Connect client's."""
    return type(thing).__module__.startswith("pyspark.sql.connect.")


def _create(master: str | None, name: str, slots: int | None) -> SparkSession:
    if "SPARK_REMOTE" in os.environ or "SPARK_CONNECT_MODE_ENABLED" in os.environ:
        raise ConfigError(NEEDS_CLASSIC)
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, which has its own master and JVM
    settings = {
        "spark.app.name": name,
        "spark.ui.showConsoleProgress": "false",
        "spark.scheduler.mode": "FAIR",
        "spark.python.worker.faulthandler.enabled": "true",
        **{f"spark.executorEnv.{variable}": value for variable, value in ENVIRONMENT.items()},
    }
    if not is_submitted:
        check_java()
        master = master or DEFAULT_MASTER
        check_master(master)
        if master == YARN:
            check_named()
        # else Spark takes whatever python3 is on the PATH, which has none of our packages
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        settings["spark.ui.enabled"] = "false"
    if master is not None:
        settings["spark.master"] = master
    if master is not None and is_local_master(master):
        # executors of local-cluster bind the machine's outside address otherwise, and may not reach it
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
        settings["spark.driver.host"] = settings["spark.driver.bindAddress"] = os.environ["SPARK_LOCAL_IP"]
    if not is_submitted:
        settings[DEPLOY_MODE] = (
            "client"  # this program is the driver, whatever spark-defaults.conf has for spark-submit
        )
        # "default": options of the user come after it
        settings["spark.driver.defaultJavaOptions"] = log_option(_log_settings())
    builder = SparkSession.builder.config(map={**settings})
    on = f" on {master!r}" if master else ""
    try:
        with warnings.catch_warnings():  # pyspark's own test module warns of pandas
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"pyspark\.testing.*")
            with interruptible():
                if not is_submitted:
                    launch_jvm(settings)
                SparkContext._ensure_initialized()
                users = SparkConf()
                on_yarn = (master or users.get("spark.master")) == YARN
                is_client_of_yarn = on_yarn and users.get(DEPLOY_MODE) != "cluster"
                if is_client_of_yarn:
                    check_managers(users)
                if slots is not None:
                    builder = builder.config(map={**cores_to_take(slots, master, users), **leaving_settings(users)})
                with waiting_is_reported() if is_client_of_yarn else nullcontext():
                    session = _classic(builder.getOrCreate())
    except PySparkException as error:
        raise ClusterError(f"Spark does not start{on}: {error}") from error
    except MidstreamError:
        raise
    except Exception as error:
        raise ClusterError(f"Spark does not start{on}: {first_line(error)}") from error
    atexit.register(_stop_with_the_program, session.sparkContext)
    return session


def cores_to_take(slots: int, master: str | None, users: SparkConf) -> dict[str, str]:
    """Return the setting with which Spark takes the cores of `slots` slots and no others, unless the user's settings
    have one.

    `users`: the settings of spark-defaults.conf and spark-submit.
    """
    master = master or users.get("spark.master", "") or ""
    cores = slots * int(users.get("spark.task.cpus", "1") or "1")
    if master.startswith("spark://"):
        return {} if users.contains(CORES_MAX) else {CORES_MAX: str(cores)}
    if not master.startswith(("yarn", "k8s://")) or users.contains(INSTANCES) or users.get(DYNAMIC, "") == "true":
        return {}
    per_executor = int(users.get("spark.executor.cores", "1") or "1")
    per_executor -= per_executor % int(users.get("spark.task.cpus", "1") or "1")
    return {INSTANCES: str(-(-cores // max(1, per_executor)))}


def _stop_with_the_program(context: SparkContext) -> None:
    """Stop Spark before the program ends: a JVM that ends only because the program has cannot wind up its executors,
    and logs this at length.
    """
    from midstream.runtime.driver.driver import (
        end_jobs,  # slots import this module, and must not import polars so early
    )

    end_jobs()
    if context._jsc is not None:
        stopping = threading.Thread(target=_stop, args=(context,), daemon=True)
        stopping.start()
        stopping.join(STOPPING_WAIT_S)


def _stop(context: SparkContext) -> None:
    with suppress(Py4JError, OSError, AttributeError):  # its JVM has ended
        context.stop()


def check_master(master: str) -> None:
    """Raise UnavailableError if no standalone master listens there: Spark itself reports this only after a minute."""
    refusals = []
    for address in master.removeprefix("spark://").split(",") if master.startswith("spark://") else ():
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), MASTER_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            refusals.append(f"{address}: {error}")
        else:
            return
    if refusals:
        raise UnavailableError(
            f"no Spark master listens on {master!r} ({'; '.join(refusals)}); start it, or name another"
        )


def how_spark_ended(context: SparkContext) -> str:
    """Return why this Spark can run nothing any more; empty if it can, or lives and does not answer.

    May take `STOPPING_WAIT_S` if it has ended.
    """
    process: subprocess.Popen[bytes] | None = getattr(context._gateway, "proc", None)
    jvm = "Spark's JVM" if process is None else f"Spark's JVM (process {process.pid})"
    if process is not None and process.poll() is not None:
        return f"{jvm} {how_it_ended(process.returncode)}"
    if context._jsc is None:
        return _STOPPED
    otherwise = _STOPPED
    try:
        if not context._jsc.sc().isStopped():
            return ""
    except (Py4JError, OSError):
        if process is None:
            return f"{jvm} has ended"
        otherwise = ""  # a driver without a file descriptor left gets no answer either
    except AttributeError:  # another thread has just stopped it
        return _STOPPED
    deadline_s = time.monotonic() + STOPPING_WAIT_S
    while process is not None and context._jsc is not None and time.monotonic() < deadline_s:
        with suppress(subprocess.TimeoutExpired):
            return f"{jvm} {how_it_ended(process.wait(0.1))}"
    return _STOPPED if context._jsc is None else otherwise


def check_java() -> None:
    """Raise ClusterError if there is no Java that Spark can use."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f"JAVA_HOME is {home}, which has no bin/java" if home else "there is no java on the PATH"
        raise ClusterError(f"Spark needs Java {JAVA_MIN} or later, and {where}; {_INSTALL_JAVA}")
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"Spark needs Java {JAVA_MIN} or later, and {java} does not run: {error}") from error
    match = _JAVA_VERSION.search(answer.stderr + answer.stdout)
    if match is not None and int(match.group(1)) < JAVA_MIN:
        raise ClusterError(
            f"Spark needs Java {JAVA_MIN} or later, but {java} is Java {match.group(1)}; {_INSTALL_JAVA}"
        )


def first_line(error: BaseException) -> str:
    """Return the message of a Spark error, without the JVM's stack."""
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def text_of(error: BaseException) -> str:
    """Return the text of a Spark error, from the JVM if it still lives."""
    java = getattr(error, "java_exception", None)
    try:
        return str(error) if java is None else str(java.toString())
    except (Py4JError, OSError):
        return type(error).__name__


def _log_settings() -> Path:
    with resources.as_file(resources.files("midstream.spark") / "log4j2.properties") as path:
        return path
