"""Finds the slots that have to leave because Spark is about to end their executors: a node is drained, reclaimed or
replaced.

Spark lets what runs on such an executor continue for as long as the platform allows, and starts nothing more there. It
does not report this to the program, so the driver queries its own JVM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext

from midstream.runtime.process.slot_provider import OnLeaving

DECOMMISSION: Final = "spark.decommission.enabled"
DECOMMISSION_ON_YARN: Final = "spark.yarn.executor.decommission.enabled"
"""Whether Spark decommissions executors on nodes that YARN decommissions."""
POLL_INTERVAL_S: Final = 0.5
UNLIMITED: Final = 2**31 - 1
"""The number of executors on a standalone master that is limited only by `spark.cores.max`; Spark's own initial value."""
INSTANCES_DEFAULT: Final = 2
"""The executors that Spark requests from YARN and Kubernetes unless `spark.executor.instances` is set."""
SHARE_MAX: Final = 0.02
"""The share of a core that queries may take: with many executors, they are queried less often."""

_log = logging.getLogger("midstream")


def leaving_settings(users: SparkConf) -> dict[str, str]:
    """The settings with which executors report that they have to end, unless the user's settings have them."""
    if (users.get(DECOMMISSION, "true") or "").strip().lower() != "true":
        return {}
    return {name: "true" for name in (DECOMMISSION, DECOMMISSION_ON_YARN) if not users.contains(name)}


class _Client(Protocol):
    """The queries to Spark. They raise Py4JError or OSError if it does not answer."""

    def executor_of(self, group: str) -> str:
        """Return the executor on which the only task of that job group runs; "" if it runs on none yet."""
        ...

    def has_to_end(self, executor: str) -> bool:
        """Return whether a running executor has to end."""
        ...

    def make_room(self, leaving: int) -> None:
        """Replace this number of executors before they end."""
        ...


class SparkClient:
    def __init__(self, context: SparkContext) -> None:
        self._context = context
        conf = context.getConf()
        self._is_dynamic = (conf.get("spark.dynamicAllocation.enabled") or "false").strip().lower() == "true"
        self._is_standalone = (context.master or "").startswith(("spark://", "local-cluster["))
        self._instances = int(conf.get("spark.executor.instances") or INSTANCES_DEFAULT)

    def executor_of(self, group: str) -> str:
        scala = self._context._jsc.sc()
        for job in self._context.statusTracker().getJobIdsForGroup(group):
            info = self._context.statusTracker().getJobInfo(job)
            for stage in info.stageIds if info is not None else ():
                tasks = scala.statusStore().taskList(stage, 0, 1)
                if tasks.size():
                    return str(tasks.apply(0).executorId())
        return ""

    def has_to_end(self, executor: str) -> bool:
        return bool(self._context._jsc.sc().taskScheduler().getExecutorDecommissionState(executor).isDefined())

    def make_room(self, leaving: int) -> None:
        """Request replacements.

        A standalone master only makes room on request. Other masters count executors that have to end among
        those requested. With dynamic allocation, a waiting slot is reason enough for Spark.
        """
        if self._is_dynamic:
            return
        total = UNLIMITED if self._is_standalone else self._instances + leaving
        jvm = self._context._jvm
        assert jvm is not None
        nowhere = jvm.PythonUtils.toScalaMap(jvm.java.util.HashMap())
        self._context._jsc.sc().requestTotalExecutors(total, 0, nowhere)


@dataclass(slots=True)
class _Slot:
    on_leaving: OnLeaving
    executor: str = ""


class LeavingSlots:
    """Calls each slot's `on_leaving` once, on a separate thread that starts with the first slot."""

    def __init__(self, client: _Client, ended: Callable[[], str]) -> None:
        """`ended`: returns why nothing is to be queried any more; empty while there is something."""
        self._client = client
        self._ended = ended
        self._slots: dict[str, _Slot] = {}
        """Slots by job group, until they have been notified."""
        self._lock = threading.Lock()
        self._leaving: set[str] = set()
        """Executors that have to end, and still run."""
        self._has_room_for: set[str] = set()
        """The leaving executors for which Spark was requested to make room."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._cannot_query = False

    def add(self, group: str, on_leaving: OnLeaving) -> None:
        with self._lock:
            self._slots[group] = _Slot(on_leaving)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="leaving-slots", daemon=True)
                self._thread.start()

    def remove(self, group: str) -> None:
        with self._lock:
            self._slots.pop(group, None)

    def close(self) -> None:
        """Stop. Returns immediately: the thread may be in a call into a JVM that does not answer."""
        self._closed.set()

    def _run(self) -> None:
        wait_s = POLL_INTERVAL_S
        while not self._closed.wait(wait_s) and not self._ended():
            began_s = time.monotonic()
            with self._lock:
                slots = dict(self._slots)
            try:
                self.poll(slots)
            except (Py4JError, OSError, AttributeError) as error:
                if not (self._cannot_query or self._closed.is_set() or self._ended()):
                    self._cannot_query = True
                    text = str(error).splitlines()[0] if str(error) else type(error).__name__
                    _log.warning(
                        "Spark does not report which executors have to end, so slots on them end too: %s", text
                    )
            wait_s = max(POLL_INTERVAL_S, (time.monotonic() - began_s) / SHARE_MAX)

    def poll(self, slots: Mapping[str, _Slot]) -> None:
        """Make one round. Each executor is queried once, however many slots it has."""
        has_to_end: dict[str, bool] = {}
        for executor in sorted(self._leaving):
            has_to_end[executor] = self._client.has_to_end(executor)
            if not has_to_end[executor]:
                self._leaving.discard(executor)
        for group, slot in slots.items():
            if not slot.executor:
                slot.executor = self._client.executor_of(group)
            if slot.executor and slot.executor not in has_to_end:
                has_to_end[slot.executor] = self._client.has_to_end(slot.executor)
            if has_to_end.get(slot.executor):
                self.remove(group)
                self._leaving.add(slot.executor)
                slot.on_leaving(f"Spark ends its executor {slot.executor} (decommissioning)")
        if self._leaving != self._has_room_for:
            self._client.make_room(len(self._leaving))
            self._has_room_for = set(self._leaving)
