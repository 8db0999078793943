"""Slots on Spark: one single-task Spark job per slot, for as long as the slot lives.

One job with a task per slot would fail as a whole if one of its tasks fails; so each slot is a job of its own,
submitted and awaited by a daemon thread, in a job group of its own. When a slot is released its task returns; when it
is lost its job fails. If Spark runs a failed task again (`spark.task.maxFailures`), the second run answers a request
that was answered before, and the driver refuses it.

The launch, with the job's secret, travels inside the task's serialised function: through Spark's own authenticated
channel, never through a file, a property, or a command line.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext, TaskContext
from pyspark.sql import SparkSession

from midstream.engine.core.errors import ClusterError, ConfigError
from midstream.engine.core.interfaces import SlotAvailability
from midstream.runtime.network.ports import ANY_PORT, PORT_MAX, Ports
from midstream.runtime.process.slot_main import run_slot
from midstream.runtime.process.slot_output import SlotOutput
from midstream.runtime.process.slot_provider import OnFailed, OnLeaving, SlotLaunch
from midstream.runtime.process.watched_slots import MEMORY_ADVICE, SlotEnd, WatchedSlot, end_all
from midstream.spark.decommission import INSTANCES_DEFAULT, LeavingSlots, SparkClient
from midstream.spark.session import (
    CORES_MAX,
    DYNAMIC,
    INSTANCES,
    LOCAL,
    LOCAL_CLUSTER,
    LOOPBACK,
    YARN,
    first_line,
    how_spark_ended,
    is_local_master,
    text_of,
)
from midstream.spark.standalone import at_master, is_standalone, registered
from midstream.spark.yarn import resource_managers

CRASHED: Final = "its Python worker process was killed or crashed"
LAST_LINES: Final = 20
WITHOUT_EXECUTORS_MAX: Final = 2
"""How often slots may not come while there is no executor, if the master does not answer why."""
_FORGOTTEN: Final = (
    "a master that is restarted (without spark.deploy.recoveryMode) forgets applications; only a new start of the program "
    "is given executors"
)
CANCEL_WAIT_S: Final = 8.0
"""How long Spark may take to end cancelled slots: it kills a worker that does not end within 2 s."""

_IDLE_TIMEOUT: Final = "spark.python.worker.idleTimeoutSeconds"
_IDLE_KILLS: Final = "spark.python.worker.killOnIdleTimeout"
_SPECULATION: Final = "spark.speculation"
_SPECULATION_THRESHOLD: Final = "spark.speculation.task.duration.threshold"
"""Without this setting, Spark makes no copies of the only task of a stage."""

BLOCK_MANAGER_PORT: Final = "spark.blockManager.port"
DRIVER_BLOCK_MANAGER_PORT: Final = "spark.driver.blockManager.port"
PORT_RETRIES: Final = "spark.port.maxRetries"
PORT_RETRIES_DEFAULT: Final = 16

_PYTHON_ERROR = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE)


def check_settings(conf: SparkConf) -> None:
    """Raise ConfigError for settings with which Spark would repeatedly end slots because of their nature.

    A slot is a single task that runs for as long as the job does and returns no row to Spark.
    """
    idle = conf.get(_IDLE_TIMEOUT, "0") or "0"
    if _is_on(conf, _IDLE_KILLS) and not re.fullmatch(r"\s*-?0+\s*[a-z]*\s*", idle):
        raise ConfigError(
            f"{_IDLE_TIMEOUT}={idle} together with {_IDLE_KILLS}=true makes Spark kill every slot after that time, "
            f"since a slot returns no rows to Spark; leave out {_IDLE_KILLS}, or set it to false"
        )
    threshold = conf.get(_SPECULATION_THRESHOLD, "")
    if _is_on(conf, _SPECULATION) and threshold:
        raise ConfigError(
            f"{_SPECULATION}=true together with {_SPECULATION_THRESHOLD}={threshold} makes Spark start a copy of "
            f"every slot after that time and kill one of the two; leave out {_SPECULATION_THRESHOLD}, or set "
            f"{_SPECULATION} to false"
        )


def _is_on(conf: SparkConf, name: str) -> bool:
    return (conf.get(name, "false") or "").strip().lower() == "true"


def check_driver_host(master: str, driver_host: str, conf: SparkConf) -> None:
    """Raise ClusterError if executors on other machines would look for the driver on their own machine."""
    if not _is_loopback(driver_host):
        return
    masters: list[str] = []
    if master.startswith("spark://"):
        masters = [address.rpartition(":")[0].strip("[]") for address in master.removeprefix("spark://").split(",")]
    elif master == YARN:
        masters = [host for host, _ in resource_managers(conf)]
    if not all(map(_is_loopback, masters)):
        raise ClusterError(
            f"executors of {master!r} would look for this program at {driver_host!r}, which is their own machine; unset "
            "SPARK_LOCAL_IP, or set spark.driver.host to an address of this machine that they can reach"
        )


def _is_loopback(host: str) -> bool:
    """Whether each address of the host is local to this machine, as 0.0.0.0 is for a connection."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    return all(address.is_loopback or address.is_unspecified for address in addresses)


def ports_of(conf: SparkConf, *settings: str) -> Ports:
    """Return the ports that Spark's own block managers use: a firewall already allows them for Spark.

    `settings`: the first one that is set counts. Raises ConfigError for a value that is not a port.
    """
    name = next((name for name in settings if conf.get(name)), "")
    first = _whole(conf, name, 0) if name else 0
    if first == 0:
        return ANY_PORT
    retries = _whole(conf, PORT_RETRIES, PORT_RETRIES_DEFAULT)
    set_by = (
        f"they follow from {name}={first} and {PORT_RETRIES}={retries}; raise {PORT_RETRIES} (each executor and each slot on a "
        f"machine takes one of them), or set another {name}"
    )
    return Ports(first, min(first + retries, PORT_MAX), set_by)


def _whole(conf: SparkConf, name: str, default: int) -> int:
    text = (conf.get(name) or str(default)).strip()
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}={text!r} is not a whole number")
    return int(text)


class SparkSlots:
    """A SlotProvider on the cores of a Spark session, which it neither changes nor stops.

    If Spark ends, all slots end with it, and their threads notice immediately, so it needs no watching: a job has slots, or
    requests some.
    """

    def __init__(self, session: SparkSession) -> None:
        self._context: SparkContext = session.sparkContext
        self._master: str = self._context.master or ""
        self._jobs: dict[str, _SlotJob] = {}
        self._leaving = LeavingSlots(SparkClient(self._context), lambda: self.gone)
        self.gone = ""
        self._times_without = 0
        """How often in a row slots did not come and there was no executor."""
        conf = self._context.getConf()
        check_settings(conf)
        self._is_local = LOCAL.fullmatch(self._master) is not None
        """Whether slots write to the terminal of this program."""
        if is_local_master(self._master):
            self.bind_host = self.driver_host = LOOPBACK
            self.driver_ports = self.slot_ports = ANY_PORT
        else:
            # Spark puts brackets around an address of IPv6
            self.driver_host = (conf.get("spark.driver.host") or LOOPBACK).strip("[]")
            self.bind_host = (conf.get("spark.driver.bindAddress") or self.driver_host).strip("[]")
            check_driver_host(self._master, self.driver_host, conf)
            self.driver_ports = ports_of(conf, DRIVER_BLOCK_MANAGER_PORT, BLOCK_MANAGER_PORT)
            self.slot_ports = ports_of(conf, BLOCK_MANAGER_PORT)

    @property
    def slots_max(self) -> int | None:
        """The number of slots that can run concurrently; None if the cluster grows, or does not report it."""
        cores = _cores(self._context)
        if cores is None:
            return None
        return cores // self._cores_per_slot

    @property
    def _cores_per_slot(self) -> int:
        return int(self._context.getConf().get("spark.task.cpus") or "1")

    def check(self, slots: int) -> None:
        slots_max = self.slots_max
        if slots_max is not None and slots > slots_max:
            raise ClusterError(
                f"the job needs {slots} slots ({_each(self._cores_per_slot)} each), but Spark on {self._master} has "
                f"{slots_max}; "
                f"lower the parallelism to {slots_max}{_more_cores(self._master, slots, slots * self._cores_per_slot)}"
            )

    def request(self, launch: SlotLaunch, on_failed: OnFailed, on_leaving: OnLeaving) -> None:
        assert launch.request not in self._jobs, launch.request
        if self.gone:
            raise ClusterError(self.gone)
        group = f"midstream-{launch.job_id}-{launch.request}"
        if not self._is_local:
            self._leaving.add(group, on_leaving)

        def failed(reason: str, crash: str = "", last_lines: str = "") -> None:
            self._leaving.remove(group)
            on_failed(reason, crash, last_lines)

        self._jobs[launch.request] = _SlotJob(self._context, group, launch, failed, self._find_ended, self._is_local)

    def availability(self) -> SlotAvailability:
        """Find out why no slot has come in time.

        A standalone master that was restarted without recovery has lost the applications of before: it has ended
        their executors, and starts no others. Spark does not report this to the application.
        """
        ended = self._find_ended()
        if ended or not is_standalone(self._context):
            return SlotAvailability(gone=ended)
        try:
            executors = registered(self._context)
        except (Py4JError, OSError, AttributeError):  # a JVM that does not answer
            return SlotAvailability()
        known = at_master(self._context)
        self._times_without = 0 if executors else self._times_without + 1
        if executors:
            return SlotAvailability()
        if known is not None and known.cores:
            return SlotAvailability(
                starting=f"executors are starting ({_each(known.cores)} launched, 0 executors registered with this program)"
            )
        if known is not None and not known.is_known:
            return SlotAvailability(
                gone=f"the Spark master {self._master} does not know this application: {_FORGOTTEN}"
            )
        if known is None and self._times_without >= WITHOUT_EXECUTORS_MAX:
            why = f"this application has no executor on {self._master}, and has not had one for {self._times_without} waits"
            page = "(if the page of the master is not at port 8080, set spark.master.ui.port to its port)"
            return SlotAvailability(gone=f"{why}: all cores are taken, or {_FORGOTTEN} {page}")
        return SlotAvailability()

    def abandon(self, request: str) -> None:
        job = self._jobs[request]
        self._leaving.remove(job.group)
        job.let_go()
        job.kill()

    def _find_ended(self) -> str:
        """Find out whether Spark has ended, and how, after a slot's failure. Called on the threads of slots, before
        they report it.
        """
        ended = how_spark_ended(self._context)
        if ended and not self.gone:  # several threads may check at the same time, and only some find it ended
            self.gone = ended
        return self.gone

    def close(self) -> None:
        self._leaving.close()
        hanging = [job.group for job in end_all(self._jobs.values(), CANCEL_WAIT_S)]
        if hanging:
            raise ClusterError(f"Spark has not ended {len(hanging)} slots: {', '.join(hanging)}")


class _SlotJob(WatchedSlot):
    def __init__(
        self,
        context: SparkContext,
        group: str,
        launch: SlotLaunch,
        on_failed: OnFailed,
        find_ended: Callable[[], str],
        is_local: bool,
    ) -> None:
        self._is_local = is_local
        self.group = group
        self._context = context
        self._launch = launch
        self._find_ended = find_ended
        super().__init__(self.group, on_failed)
        self.watch()

    def kill(self) -> None:
        """Have Spark end the job, and kill its Python worker if it does not end by itself. Returns immediately."""
        if self._context._jsc is not None and self.lives:
            # a call into the JVM, which may hang or have ended
            threading.Thread(target=self._cancel, name=f"cancel-{self.group}", daemon=True).start()

    def _cancel(self) -> None:
        with contextlib.suppress(Py4JError, OSError, AttributeError):  # Spark has ended, and the slot with it
            self._context.cancelJobGroup(self.group)

    def wait(self) -> SlotEnd:
        try:
            return SlotEnd(self._run_in_spark())
        except Exception as error:  # noqa: BLE001 - the errors of Spark have no common base; all end the slot
            reason = self._find_ended() or explain(error)
            if reason == CRASHED:
                return SlotEnd(f"{CRASHED} ({MEMORY_ADVICE})", CRASHED, fatal_lines(error))
            return SlotEnd(reason)

    def _run_in_spark(self) -> str:
        context = self._context
        context.setJobGroup(self.group, f"midstream slot of job {self._launch.job_id}", interruptOnCancel=True)
        context.setLocalProperty("spark.scheduler.pool", "midstream")
        last_output = context.parallelize(range(1), 1).mapPartitions(partial(_be_a_slot, self._launch, self._is_local))
        return "; ".join(last_output.collect()) or "its task ended"


def _be_a_slot(launch: SlotLaunch, is_local: bool, _nothing: Iterable[int]) -> Iterator[str]:
    """Run a slot; the task in a Python worker of Spark. A lost driver is not raised, since Spark would print it as a
    failure.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # it is a pipe, yet people watch what is printed
    try:
        with SlotOutput(launch.log_levels, keeps_records=not is_local) as capture:
            run_slot(launch, capture=capture, resources=_assigned())
    except ClusterError as error:
        return iter([f"ClusterError: {error}"])
    return iter(())


def _assigned() -> dict[str, list[str]]:
    """Return the addresses of each resource that Spark has assigned to this task, such as GPUs, by its name."""
    context = TaskContext.get()
    return {} if context is None else {name: list(found.addresses) for name, found in context.resources().items()}


def fatal_lines(error: BaseException) -> str:
    """Return where a Python worker was when it crashed, if it runs with a fault handler."""
    _, fatal, rest = text_of(error).split("Driver stacktrace", 1)[0].partition("Fatal Python error: ")
    return "\n".join((fatal + rest).splitlines()[:LAST_LINES])


def explain(error: BaseException) -> str:
    """Return why a slot's Spark job failed, in one line: Python's error, if there was one."""
    text = text_of(error)
    if "Python worker exited unexpectedly" in text:
        return CRASHED
    if "ExecutorLostFailure" in text or "Remote RPC client disassociated" in text:
        return f"its executor was lost: {first_line(error)}"
    found = _PYTHON_ERROR.findall(text.split("Driver stacktrace", 1)[0])
    messages = [line for line in found if not line.startswith(("org.", "java."))]
    if not messages:
        return first_line(error)
    reason = re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", messages[-1])
    if reason.startswith("ModuleNotFoundError"):
        reason += f"; the executors' Python needs the packages of {sys.executable}: set PYSPARK_PYTHON before the session is created"
    return reason


def _cores(context: SparkContext) -> int | None:
    conf = context.getConf()
    master = context.master or ""
    local = LOCAL.fullmatch(master)
    if local is not None:
        # Spark's own count of the machine's cores is the JVM's, which may differ from Python's
        threads = local.group(1) or "1"
        return context.defaultParallelism if threads == "*" else int(threads)
    cluster = LOCAL_CLUSTER.fullmatch(master)
    if cluster is not None:
        return int(cluster.group(1)) * int(cluster.group(2))
    if conf.get(DYNAMIC, "false") == "true":
        return None
    if master.startswith("spark://"):
        cores_max = conf.get(CORES_MAX)
        return int(cores_max) if cores_max else None
    instances, cores = conf.get(INSTANCES), conf.get("spark.executor.cores")
    if master.startswith(("yarn", "k8s://")):  # what Spark takes where nothing is set
        return int(instances or INSTANCES_DEFAULT) * int(cores or 1)
    return int(instances) * int(cores) if instances and cores else None


def _each(cores: int) -> str:
    return "one core" if cores == 1 else f"{cores} cores"


def _more_cores(master: str, slots: int, cores: int) -> str:
    """Say how to get enough cores: `slots` slots take `cores` cores."""
    if LOCAL.fullmatch(master):
        return f", or run it with --master 'local[{slots}]'"
    if LOCAL_CLUSTER.fullmatch(master):
        return ", or give local-cluster[workers, cores, MiB] more workers or cores"
    if master.startswith("spark://"):
        return f", or start the job with {CORES_MAX}={cores} (in spark-defaults.conf, or in a session of its own)"
    return ", or raise spark.executor.instances or spark.executor.cores"
