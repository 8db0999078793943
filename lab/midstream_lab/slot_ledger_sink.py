"""The ledger as a sink that commits on slots, and the rules for its commits wherever they run.

A commit takes time, so that faults strike slots, drivers and connections in the middle of it. For each
call, the simulator knows its process, its lane, and whether the driver still considers that process alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.coordinator.placement.rescale import RescaleStage
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.errors import StorageError
from midstream.engine.operators.sink_api import Committer, CommitterContext, SinkWriter, WriterContext
from midstream.engine.worker.slot_machine import SlotState
from midstream.simulation.ledger_sink import LedgerCommitter, LedgerSink
from midstream.simulation.network import SIM
from midstream_lab.checkers.driver_checker import checker_of
from midstream_lab.checkers.liveness_checker import COMMIT_S_MAX
from midstream_lab.jobs.recorded_rows import Outside

if TYPE_CHECKING:
    from midstream.simulation.cluster import SimulatedCluster, SimulatedDriver
    from midstream.simulation.simulated_slot import SimulatedSlot
    from midstream.simulation.world import Process

LANES: Final = (1, 2, 3, 100)
"""The possible numbers of lanes of a sink, to which its subtasks are assigned."""
WAIT_US_MAX: Final = (5_000, 50_000, round(COMMIT_S_MAX * 1e6))
"""The longest waits of a commit for its server, chosen by seed; with the last one, a commit often outlives its attempt."""


@dataclass(eq=False, slots=True)
class CommitCall:
    """A commit, or an abort, that is under way."""

    job_id: str
    uid: str
    lane: int
    process: Process
    attempt: int
    """The attempt that the slot was running when the call began; -1 if there was none."""
    aborts: bool


class Calls:
    """All calls of one world."""

    def __init__(self, outside: Outside, has_storage: bool) -> None:
        self.has_storage = has_storage
        self._world = outside.world
        self._outside = outside
        self._clusters: list[SimulatedCluster] = []
        """The only cluster; empty until it exists."""
        self._under_way: dict[CommitCall, None] = {}
        self._committers: dict[tuple[str, str, int, int], SimulatedSlot] = {}
        """The slot that commits each lane, by job id, sink, lane and attempt."""
        self._committed: dict[tuple[str, str, int, int], tuple[bytes, ...]] = {}
        """The committables of each completed call, by job id, sink, lane and checkpoint."""

    def watch(self, cluster: SimulatedCluster) -> None:
        self._clusters.append(cluster)
        cluster.released = self._released

    @property
    def _cluster(self) -> SimulatedCluster:
        return self._clusters[0]

    @property
    def victims(self) -> list[SimulatedSlot]:
        """The slots that are in the middle of a call."""
        at_it = [call.process for call in self._under_way]
        return [slot for slot in self._cluster.live_slots if slot.process in at_it]

    def _slot_of(self, process: Process) -> SimulatedSlot | None:
        return next((slot for slot in self._cluster.slots if slot.process is process), None)

    def is_counted_on(self, process: Process) -> bool:
        """Whether the process is a living slot with an open connection to its driver, which lives as well."""
        slot = self._slot_of(process)
        if slot is None or not process.alive or not slot.driver.process.alive:
            return False
        return slot.connection is not None and slot.connection.is_open

    @contextmanager
    def call(self, context: CommitterContext, lane: int, aborts: bool) -> Iterator[CommitCall]:
        world, process = self._world, self._world.writer
        assert process is not None, "a commit on a loop thread"
        slot = self._slot_of(process)
        attempt = -1
        if slot is None:
            self._check_driver(context, process)
        elif slot.machine is not None and slot.machine.state is SlotState.RUNNING:
            attempt = slot.machine.attempt
            if context.stopped.is_set():
                world.bug(f"{context.uid}, lane {lane}: {process.name} commits with a committer that was stopped")
            before = self._committers.setdefault((context.job_id, context.uid, lane, attempt), slot)
            if before is not slot and self.is_counted_on(before.process) and self.is_counted_on(process):
                # A slot that was cut off may still commit, since it has not noticed it yet.
                world.bug(
                    f"{context.uid}, lane {lane}: {process.name} commits it, and {before.process.name}, "
                    "which is there, did before in the same attempt"
                )
        call = CommitCall(context.job_id, context.uid, lane, process, attempt, aborts)
        for other in self._under_way:
            if (other.job_id, other.uid, other.lane) == (call.job_id, call.uid, call.lane) and (
                other.process is process or (self.is_counted_on(other.process) and self.is_counted_on(process))
            ):
                world.bug(f"{context.uid}, lane {lane}: {process.name} commits while {other.process.name} commits too")
        self._under_way[call] = None
        try:
            yield call
        finally:
            del self._under_way[call]

    def _check_driver(self, context: CommitterContext, process: Process) -> None:
        driver = next(driver for driver in self._cluster.drivers if driver.process is process)
        if checker_of(driver).had_slots:
            self._world.bug(f"{context.uid}: {process.name} commits, and has slots to do that")

    def check_told(self, call: CommitCall) -> None:
        """Check, between two parts of a commit that was not stopped, that its attempt is not over."""
        slot = self._slot_of(call.process)
        if slot is None or slot.machine is None or call.attempt == -1:
            return
        if slot.machine.state is not SlotState.RUNNING or slot.machine.attempt != call.attempt:
            self._world.bug(
                f"{call.uid}, lane {call.lane}: {slot.process.name} did not get the request to stop committing"
            )

    def ended(self, call: CommitCall, checkpoint_id: int, items: Sequence[bytes]) -> None:
        """Note a completed commit, and check that a repeated one has exactly the same committables."""
        key = call.job_id, call.uid, call.lane, checkpoint_id
        before = self._committed.setdefault(key, tuple(items))
        if before != tuple(items):
            self._world.bug(
                f"{call.uid}, lane {call.lane}: for checkpoint {checkpoint_id} {before} was committed, now {items}"
            )

    # ---- events of the cluster

    def deployed(self, driver: SimulatedDriver, metadata: CheckpointMetadata | None) -> None:
        """Check that everything before has been committed when tasks are deployed."""
        world, outside, job_id = self._world, self._outside, driver.plan.job_id
        for call in self._under_way:
            if call.job_id == job_id and self.is_counted_on(call.process):
                world.bug(f"{call.uid}, lane {call.lane}: {call.process.name} commits while tasks are deployed")
        if metadata is None:
            return
        for name in (item.decode() for entry in metadata.committables for item in entry.items):
            if name not in outside.committed and name not in outside.rolled_back:
                world.bug(f"tasks are deployed, and {name} of checkpoint {metadata.checkpoint_id} is not committed")

    def _released(self, driver: SimulatedDriver, slot: SimulatedSlot) -> None:
        """Check that a slot is not released in the middle of a commit when the job has ended or continues with fewer
        slots.
        """
        job = driver.coordinator
        has_ended = job.outcome is not None and job.outcome[0] != "failed" and not driver.is_cancelled
        if not has_ended and (
            job.phase is not Phase.WAITING_TO_DEPLOY or job.rescaling.stage is not RescaleStage.SWITCHING
        ):
            return
        for call in self._under_way:
            if call.process is slot.process:
                self._world.bug(f"{slot.process.name} is released while it commits {call.uid}, lane {call.lane}")
        if slot.process.alive and slot.owed.requests:
            self._world.bug(
                f"{slot.process.name} is released while it owes answers for commits {[*slot.owed.requests]}"
            )


def subtask_of(committable: bytes) -> int:
    return int(committable.rpartition(b"-s")[2])


class RowLedgerSink(LedgerSink):
    """A ledger of the laboratory's rows, whose ids it knows."""

    def at(self, uid: str) -> RowLedgerSink:
        """Return the sink of the operator with this uid."""
        return self

    def ids_of(self, batch: pa.RecordBatch) -> Sequence[int]:
        return to_list(batch.column("id"))


class SlotLedgerSink(RowLedgerSink):
    """A ledger that commits on slots."""

    commits_on_slots = True

    def __init__(self, outside: Outside, calls: Calls, seed: int, capacity_rows: int, pause_s: float) -> None:
        super().__init__(outside, capacity_rows=capacity_rows, pause_s=pause_s)
        self.calls = calls
        self._seed = seed
        self.wait_us_max = Random(f"commit time {seed}").choice(WAIT_US_MAX)

    def writer(self, context: WriterContext) -> SinkWriter:
        if (context.storage is not None) != self.calls.has_storage:
            self.outside.world.bug(f"{context.uid}: its writer gets the storage {context.storage}")
        return super().writer(context)

    def lane(self, committable: bytes) -> int:
        uid = committable.decode().partition("/")[0]
        return subtask_of(committable) % Random(f"lanes {self._seed} {uid}").choice(LANES)

    def committer(self, context: CommitterContext) -> Committer:
        return LaneCommitter(self, context)


class LaneCommitter(LedgerCommitter):
    def __init__(self, sink: SlotLedgerSink, context: CommitterContext) -> None:
        super().__init__(sink.outside, context)
        self._sink = sink
        self._calls = sink.calls
        self._lane: int | None = None
        """The only lane of this committer; None until its first call."""
        self._is_closed = False
        if (context.storage is not None) != sink.calls.has_storage:
            sink.outside.world.bug(f"{context.uid}: its committer gets the storage {context.storage}")

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        call_under_way = self._calls.call(self._context, self._lane_of(committables), aborts=False)
        with self._under_way(committables), call_under_way as call:
            for item in committables:
                self._takes_time(call)
                self._commit(checkpoint_id, [item])
            self._takes_time(call)
            self._calls.ended(call, checkpoint_id, committables)

    def abort(self, committables: Sequence[bytes]) -> None:
        with self._calls.call(self._context, self._lane_of(committables), aborts=True):
            super().abort(committables)

    def close(self) -> None:
        self._outside.world.io_point()
        self._is_closed = True

    def _lane_of(self, committables: Sequence[bytes]) -> int:
        world, uid = self._outside.world, self._context.uid
        lanes = sorted({self._sink.lane(item) for item in committables})
        if len(lanes) != 1:
            world.bug(f"{uid}: {committables} are of lanes {lanes}, and come in one call")
        subtasks = [subtask_of(item) for item in committables]
        if subtasks != sorted(subtasks):  # each subtask has prepared one of them
            world.bug(f"{uid}: {committables} do not come in the order in which they were prepared")
        if self._lane not in (None, lanes[0]):
            world.bug(f"{uid}: the committer of lane {self._lane} is called for lane {lanes[0]}")
        if self._is_closed:
            world.bug(f"{uid}: the committer of lane {lanes[0]} is called, and was closed")
        self._lane = lanes[0]
        return lanes[0]

    def _takes_time(self, call: CommitCall) -> None:
        """Take some time, like a commit that waits for a server."""
        world = self._outside.world
        if world.chance() < 0.5:
            return
        if self._context.stopped.wait(world.delay(self._sink.wait_us_max) / 1e6):
            raise StorageError(f"stopped {SIM}")
        self._calls.check_told(call)


class SomeOnSlots(RowLedgerSink):
    """The sink of a job in which a `share` of the sinks commits on slots."""

    def __init__(self, outside: Outside, on_slots: SlotLedgerSink, seed: int, share: float) -> None:
        super().__init__(outside, capacity_rows=on_slots.capacity_rows, pause_s=on_slots.pause_s)
        self.on_slots = on_slots
        self._seed = seed
        self._share = share

    def at(self, uid: str) -> RowLedgerSink:
        return self.on_slots if Random(f"on slots {self._seed} {uid}").random() < self._share else self
