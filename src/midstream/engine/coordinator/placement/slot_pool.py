"""The slots of the job: requested, connected, lost; and what their tasks report."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from midstream.engine.coordinator.effects import Effects, IoKind, TimerKind
from midstream.engine.coordinator.failures import Failure
from midstream.engine.coordinator.placement.dropped_rows import (
    DroppedRows,
    bad_records,
    failed_rows,
    late_rows,
    late_timers,
)
from midstream.engine.core.errors import ClusterError, UnavailableError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed, SlotAvailability
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.protocol.messages import InCall, Peer, Register, SlotStatus
from midstream.engine.protocol.task_metrics import TaskMetrics

PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
RETRY_S: Final = 1.0
EXTENSIONS_MAX: Final = 4
"""How often the wait for slots is extended while executors are starting: some never register."""
RECENT_MS: Final = 5_000
"""The time constant with which reports of a task are averaged: they come once a second and with each checkpoint, and a
single one would make the shares jump.
"""
FIRST_REQUESTS_FAILED_MAX: Final = 3
"""If this many slots fail to start before the job has run for the first time, the job fails."""


@dataclass(slots=True)
class Rate:
    """The last report of one task, and averages over its recent reports."""

    at_ms: int
    metrics: TaskMetrics
    recent_ms: float = 0.0
    """The time of the recent reports, exponentially decayed: a report that is `RECENT_MS` old counts a third (1/e) of a
    new one. The next three are the busy time, the backpressured time and the time of each operator, decayed alike.
    """
    busy_ms: float = 0.0
    backpressured_ms: float = 0.0
    worked_us: tuple[float, ...] = ()

    @property
    def busy(self) -> float:
        """The share of the recent time for which the task was busy, 0 to 1."""
        return _share(self.busy_ms, self.recent_ms)

    @property
    def backpressured(self) -> float:
        return _share(self.backpressured_ms, self.recent_ms)


@dataclass(slots=True)
class Slot:
    id: int
    register: Register
    status: SlotStatus | None = None
    in_call: InCall | None = None
    """The call in which its loop was at its last heartbeat, if it was in one."""
    graph: bytes = b""
    """The pickled JobGraph that was last sent to it."""

    def __str__(self) -> str:
        return f"slot {self.id} (process {self.register.pid} on {self.register.host})"


def _middle(part: int, few: int, many: int) -> int:
    """Return which of `many` equal parts has the middle of one of `few`, the lower of two. No two have the same."""
    return ((2 * part + 1) * many - 1) // (2 * few)


def placed(before: Sequence[int], there: Sequence[int], needed: int) -> tuple[int, ...]:
    """Return which of the slots that are `there` run the subtasks 0 to `needed` - 1.

    Subtasks have key groups in their order, in equal parts. So with another parallelism a slot runs the subtask that has
    the key groups in the middle of those that it had `before`, and other slots run what is left.
    """
    if len(before) <= needed:
        pairs = [(_middle(old, len(before), needed), slot) for old, slot in enumerate(before)]
    else:
        pairs = [(new, before[_middle(new, needed, len(before))]) for new in range(needed)]
    places = {subtask: slot for subtask, slot in pairs if slot in there}
    rest = iter(sorted({*there} - {*places.values()}))
    return tuple(places[subtask] if subtask in places else next(rest) for subtask in range(needed))


class SlotPool:
    """Requests and keeps slots. Slots that are leaving apart, it never has more slots and open requests than the job needs."""

    def __init__(
        self,
        effects: Effects,
        graph: JobGraph,
        timeout_s: float,
        availability: Callable[[], SlotAvailability],
    ) -> None:
        self.needed = graph.slots
        self.live: dict[int, Slot] = {}
        self.leaving: set[int] = set()
        """The live slots on which no later attempt runs."""
        self._placed: tuple[int, ...] = ()
        """The slots of the last attempt, in the order of the subtasks that they ran."""
        self.changes = 0
        """The number of changes of `live`, `leaving` and `needed`."""
        self.rates: dict[TaskId, Rate] = {}
        """The rates of the tasks of the current attempt."""
        self._rows_before: dict[str, tuple[int, int]] = {}
        self._passed_before: dict[int, tuple[int, int, int]] = {}
        """The values of `rows` and `passed` when the current attempt began."""
        self.late = DroppedRows(graph, late_rows)
        self.failed = DroppedRows(graph, failed_rows)
        self.timers = DroppedRows(graph, late_timers)
        self.bad = DroppedRows(graph, bad_records)
        self._warned: set[str] = set()
        """What slots have warned of. Each text is shown once, although most slots report the same."""
        self.job_has_run = False
        """Whether the job has had all its slots once, so that the cluster has room for it."""
        self._effects = effects
        self._timeout_s = timeout_s
        self._availability = availability
        self._extended = 0
        """How often the wait was extended since it began, because executors are starting."""
        self._requested: set[str] = set()
        self._requests = 0
        self._requests_failed = 0
        self._timer: str | None = None
        self.gathers_since_s = 0.0
        """Since when slots are awaited, on the clock of `Effects.elapsed_s`; it is set again after each timeout."""
        self._is_gathering = False

    @property
    def staying(self) -> int:
        return len(self.live) - len(self.leaving)

    @property
    def complete(self) -> bool:
        return self.staying == self.needed

    # ---- requesting them ----

    def gather(self, *_: object) -> None:
        """Request all slots that are missing, and set a timer for their arrival, which is cancelled once all are there."""
        self._is_gathering = True
        while self.staying + len(self._requested) < self.needed:
            request = f"slot-{self._requests}"
            self._requests += 1
            self._requested.add(request)
            self._effects.request_slot(request)
        self._stop_if_complete()
        if not self.complete and self._timer is None:
            self._wait()

    def _stop_if_complete(self) -> None:
        """Stop waiting for slots if all are present. The other waits before a deployment may take longer than
        `timeout_s`: commits of what the restored checkpoint holds, or the pause before a restart.
        """
        if self.complete:
            self._is_gathering = False
            self._extended = 0
            self._effects.cancel_timer(self._timer)
            self._timer = None

    def resize(self, needed: int) -> None:
        """Change the number of slots. Of those that are too many, requests are withdrawn first, then slots are released
        on which the next attempt would not run.
        """
        self.needed = needed
        self.changes += 1
        surplus = self.staying + len(self._requested) - needed
        for request in sorted(self._requested)[: max(0, surplus)]:
            self._requested.discard(request)
        staying = self.ids()
        if len(staying) > needed:
            for slot in sorted({*staying} - {*placed(self._placed, staying, needed)}):
                self._effects.close_slot(slot, "this slot is not needed any more")
                del self.live[slot]
        self._stop_if_complete()

    def mark_leaving(self, slot: int, reason: str) -> bool:
        """A slot must be replaced. False: it is not present, or is already leaving."""
        if slot not in self.live or slot in self.leaving:
            return False
        self.leaving.add(slot)
        self.changes += 1
        self._effects.notifications.warned(f"{self.live[slot]} is being vacated: {reason}")
        return True

    def keep_leaving(self) -> None:
        """Slots that are leaving cannot be replaced: they count again for as long as they are present."""
        self.leaving.clear()
        self.changes += 1
        self._stop_if_complete()

    def release_leaving(self, *slots: int) -> None:
        """Release slots that are leaving, and on which no task runs any more."""
        for slot in slots:
            self._effects.close_slot(slot, "the executor of this slot is shutting down")
            self.lost(slot)

    def release(self, why: str, _: bool) -> None:
        """Release all slots, because the job ends."""
        self._is_gathering = False
        self._requested.clear()
        for slot in sorted(self.live):
            self._effects.close_slot(slot, why)
        self.live.clear()
        self.leaving.clear()
        self.changes += 1

    def _timed_out(self) -> None:
        self._timer = None
        what = "the reason why no slots come"
        self._effects.run_io(IoKind.AVAILABILITY, self._availability, self._availability_reported, waits_for=what)

    def _availability_reported(self, outcome: Done[SlotAvailability] | Failed) -> None:
        """The cluster has reported why no slots came in time: wait for slots that are starting, or report a failure."""
        if not self._is_gathering or self._timer is not None:
            return  # they have come meanwhile, or another wait has begun
        availability = outcome.value if isinstance(outcome, Done) else SlotAvailability()
        if availability.gone:
            self._requested.clear()
            text = f"{availability.gone}. Start the job again"
            self._effects.notifications.slots_failed(Failure(text, "", UnavailableError(text), fatal=True))
        elif availability.starting and self._extended < EXTENSIONS_MAX:
            self._extended += 1
            self._effects.notifications.warned(
                f"{availability.starting}; the wait for slots goes on for {self._timeout_s:g} s more"
            )
            self._wait()
        else:
            self._report_missing(availability)

    def _wait(self) -> None:
        self.gathers_since_s = self._effects.elapsed_s
        self._timer = self._effects.set_timer(TimerKind.SLOTS, self._timeout_s, self._timed_out)

    def _report_missing(self, availability: SlotAvailability) -> None:
        self._requested.clear()
        waited_s, self._extended = self._timeout_s * (1 + self._extended), 0
        there = self.staying
        came = f"{there} came within {waited_s:g} s"
        cure = "give Spark more cores, or raise Tuning(slot_timeout=…)"
        if availability.starting:
            why = (
                f"{availability.starting}: they start too slowly (raise Tuning(slot_timeout=…)), or cannot reach this program at "
                "spark.driver.host, and exit repeatedly (see their stderr)"
            )
        elif there:
            why = f"too few cores are free. Lower the parallelism to {there}, {cure}"
        else:
            why = (
                f"no core is free ({cure}), or executors cannot reach this program: they connect to spark.driver.host; "
                "if refused, they start and exit repeatedly (see their stderr); if a firewall drops packets, they just wait"
            )
        text = f"the job needs {self.needed} slots, and {came}: {why}"
        error = ClusterError(text) if self.job_has_run else UnavailableError(text)
        self._effects.notifications.slots_failed(Failure(text, "", error, fatal=not self.job_has_run))

    def request_failed(self, request: str, reason: str) -> None:
        """A request will not lead to a slot. Once the job has run, only the timeout can make it fail for that."""
        if request not in self._requested:
            return
        self._requested.discard(request)
        self._requests_failed += 1
        text = f"a slot could not be started ({self.staying} of {self.needed} are connected): {reason}"
        if not self.job_has_run and self._requests_failed >= FIRST_REQUESTS_FAILED_MAX:
            self._effects.notifications.slots_failed(Failure(text, "", UnavailableError(text), fatal=True))
            return
        self._effects.notifications.warned(text)
        self._effects.set_timer(TimerKind.SLOT_RETRY, RETRY_S, self._request_again)

    def _request_again(self) -> None:
        if self._is_gathering:
            self.gather()

    # ---- using them ----

    def running(self) -> None:
        self.job_has_run = True

    def begin_attempt(self) -> tuple[int, ...]:
        """A new attempt begins: add what the tasks of the last one have reported to the totals.

        Return its slots: the i-th runs subtask i of every vertex.
        """
        self._placed = placed(self._placed, self.ids(), self.needed)
        self.late.attempt_over()
        self.failed.attempt_over()
        self.timers.attempt_over()
        self.bad.attempt_over()
        self._rows_before = self.rows()
        self._passed_before = self.passed()
        self.rates.clear()
        return self._placed

    def rows(self) -> dict[str, tuple[int, int]]:
        """Return the rows in and out of each operator by uid, over all attempts, as of the last report of each task."""
        rows = dict(self._rows_before)
        for rate in self.rates.values():
            for uid, rows_in, rows_out in rate.metrics.operators:
                before = rows.get(uid, (0, 0))
                rows[uid] = before[0] + rows_in, before[1] + rows_out
        return rows

    def passed(self) -> dict[int, tuple[int, int, int]]:
        """Return the rows, bytes and batches that have passed each edge, over all attempts."""
        passed = dict(self._passed_before)
        for rate in self.rates.values():
            for edge in rate.metrics.edges:
                rows, size, batches = passed.get(edge.edge, (0, 0, 0))
                passed[edge.edge] = rows + edge.rows, size + edge.bytes, batches + edge.batches
        return passed

    def connected(self, slot: int, register: Register) -> bool:
        """A slot has connected. False: it was not requested, or the request was withdrawn."""
        if register.request not in self._requested or slot in self.live:
            return False
        self._requested.discard(register.request)
        self.live[slot] = Slot(slot, register)
        self.changes += 1
        self._stop_if_complete()
        return True

    def lost(self, slot: int) -> Slot | None:
        self.leaving.discard(slot)
        self.changes += 1
        return self.live.pop(slot, None)

    def graph_for(self, slot: int, graph: bytes) -> bytes:
        """Return this pickled JobGraph if the slot has to be sent it, or b"" if it was the last one sent to it."""
        known = self.live[slot]
        if known.graph == graph:
            return b""
        known.graph = graph
        return graph

    def ids(self) -> tuple[int, ...]:
        """The ids of slots that are not leaving."""
        return tuple(sorted(self.live.keys() - self.leaving))

    def peers(self, slots: Iterable[int]) -> tuple[Peer, ...]:
        return tuple(Peer(s, self.live[s].register.host, self.live[s].register.port) for s in slots)

    def handle_status(self, slot: int, status: SlotStatus, attempt: int, now_ms: int) -> None:
        """A slot has sent a heartbeat. Totals of an older attempt are not mixed with those of this one."""
        if slot not in self.live:
            return
        self.live[slot].status = status
        self.live[slot].in_call = None
        for text in status.warnings:
            if text not in self._warned:
                self._warned.add(text)
                self._effects.notifications.warned(f"{self.live[slot]}: {text}")
        if status.attempt != attempt:
            return
        for metrics in status.tasks:
            self._record(metrics, now_ms)

    def handle_metrics(self, metrics: TaskMetrics | None, now_ms: int) -> None:
        """A task has acknowledged a checkpoint, or finished. Metrics that it sent with that count like a heartbeat's."""
        if metrics is not None:
            self._record(metrics, now_ms)

    def _record(self, metrics: TaskMetrics, now_ms: int) -> None:
        self.late.record(metrics.task, metrics.late)
        self.failed.record(metrics.task, metrics.failed)
        self.timers.record(metrics.task, metrics.timers_dropped)
        if metrics.bad_records:
            self.bad.record(metrics.task, ((metrics.operators[0][0], metrics.bad_records),))
        before = self.rates.get(metrics.task)
        rate = Rate(now_ms, metrics)
        if before is not None:
            _accumulate(rate, before)
        self.rates[metrics.task] = rate

    def check(self) -> None:
        assert self.staying + len(self._requested) <= self.needed, (
            self.live,
            self.leaving,
            self._requested,
            self.needed,
        )
        assert self.leaving <= self.live.keys(), (self.live, self.leaving)
        assert self._timer is None or not self.complete, (self.live, self.leaving, self.needed)


def other_python(slot: int, register: Register) -> Failure:
    """Return the failure of a slot whose Python has another minor version than the driver's."""
    error = ClusterError(
        f"slot {slot} on {register.host} runs Python {register.python}, the driver Python {PYTHON}: functions "
        "sent from one cannot be read by the other. Point PYSPARK_PYTHON to the same version everywhere"
    )
    return Failure(str(error), "", error, fatal=True)


def _accumulate(rate: Rate, before: Rate) -> None:
    """Add what a task did between two reports to the decayed sums of the earlier one."""
    now, then, span_ms = rate.metrics, before.metrics, max(0, rate.at_ms - before.at_ms)
    kept = math.exp(-span_ms / RECENT_MS)
    rate.recent_ms = span_ms + before.recent_ms * kept
    rate.busy_ms = now.busy_ms - then.busy_ms + before.busy_ms * kept
    rate.backpressured_ms = now.backpressured_ms - then.backpressured_ms + before.backpressured_ms * kept
    if now.worked_us:  # a task that has finished reports none
        sums = before.worked_us or (0.0,) * len(now.worked_us)
        steps = zip(now.worked_us, then.worked_us, sums, strict=True)
        rate.worked_us = tuple(new - old + recent * kept for new, old, recent in steps)


def _share(part_ms: float, whole_ms: float) -> float:
    return min(1.0, max(0.0, part_ms / whole_ms)) if whole_ms else 0.0
