"""What a barrier has overtaken in a task: written once, in order, and its buffers given back whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from in_memory import MemoryStorage
from midstream.engine.checkpoint.barrier_handler import BarrierReceived, CancelReceived, TriggerReceived
from midstream.engine.checkpoint.channel_state import Captured, read_segment
from midstream.engine.core.config import JobConfig
from midstream.engine.core.elements import CheckpointBarrier, EndOfData, EndOfPartition, Watermark
from midstream.engine.core.ids import TaskId
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.buffer_pool import BufferPool
from midstream.engine.exchange.input_channel import LocalChannel
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.listeners import BarrierOrEnd
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.graph.job_graph import Edge, Partitioning
from midstream.engine.worker.gate_recovery import GateRecovery
from midstream.engine.worker.task import Task
from midstream.engine.worker.task_checkpoints import TaskCheckpoints
from midstream.engine.worker.task_snapshots import StoredInFlight, TaskSnapshots
from notified import NotedTask
from recovering import SCHEMA, Steps, batch, rows_in, store, task_seams


class FakeClock:
    wall_ms = 1_000_000

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_s(self) -> float:
        return 0.0

    own_core_s = stopwatch_s = processor_s = monotonic_s
    core_share = 1.0


class FakeSnapshots:
    def __init__(self) -> None:
        self.stored: dict[int, StoredInFlight] = {}
        self.declined: list[int] = []

    def in_flight_stored(self, checkpoint_id: int, stored: StoredInFlight) -> None:
        assert checkpoint_id not in self.stored, "told twice"
        self.stored[checkpoint_id] = stored

    def decline(self, checkpoint_id: int, reason: str, counts: bool, files: tuple[str, ...] = ()) -> None:
        self.declined.append(checkpoint_id)


IO_MAX = 1_000
"""More writes than any checkpoint here takes."""


class World:
    """A task with one gate of `producers` local channels, and an output to one remote consumer."""

    def __init__(
        self, producers: int = 2, *, pool_buffers: int = 100, recovered: bool = False, kind: str = "rebalance"
    ) -> None:
        self.steps = Steps()
        self.storage = MemoryStorage()
        self.clock = FakeClock()
        self.snapshots = FakeSnapshots()
        self.failures: list[BaseException] = []
        self.taken: list[int] = []
        self.mails: list[Callable[[], None]] = []
        self.pool = BufferPool(pool_buffers * 4096, 4096)
        edge = Edge(0, 0, 1, Partitioning(kind), SCHEMA)
        self.inputs = [ResultPartition(edge, i, range(1), 16, self.pool, 1000) for i in range(producers)]
        self.output = ResultPartition(Edge(1, 1, 2, Partitioning.REBALANCE, SCHEMA), 0, range(1), 16, self.pool, 1000)
        self.gate = InputGate(edge, 0, [LocalChannel(partition.subpartitions[0]) for partition in self.inputs])
        services = task_seams(
            self.steps,
            self.storage,
            config=JobConfig(name="job", buffer_bytes=4096, max_parallelism=16),
            clock=self.clock,
            unaligned_edges={e.id for e in (edge, self.output.edge) if e.partitioning.redistributable},
        )
        if recovered:
            old = store(self.storage, [Captured(0, 0, 0, True, (batch([(0, 1)]), batch([(0, 2)])))], "old", 10**6)
            self.gate.recovered = GateRecovery(
                edge,
                old,
                quota=self.pool.quota("recovered", 1),
                services=services,
                read_ahead={},
                wake=lambda: None,
                fail=self.failures.append,
            )
            self.gate.recovered.start()
            self.steps.run_io()
        self.gate.request_rows()
        self.output.subpartitions[0].request_rows()
        self.ref, self.gates, self.partitions, self.input = TaskId(1, 0), [self.gate], [self.output], self
        self.checkpoints = TaskCheckpoints(cast(Task, self), services, cast(TaskSnapshots, self.snapshots))
        self.gate.listen(self)
        self.output.listen(self)

    def wake(self) -> None:
        """Do nothing: the tests poll the gate."""

    def on_arrival(self, channel: int, event: BarrierOrEnd) -> None:
        self.checkpoints.on_arrival(channel, event)

    def on_barrier_sent(self, checkpoint_id: int) -> None:
        self.checkpoints.on_barrier_sent(checkpoint_id)

    def take_snapshot(self, barrier: CheckpointBarrier, alignment_ms: float) -> None:
        self.taken.append(barrier.checkpoint_id)

    def rests(self) -> dict[int, tuple[LeasedBatch, int]]:
        return {} if self.gate.current_batch is None else {0: (self.gate.current_batch, 0)}

    def mail(self, work: Callable[[], None]) -> None:
        self.mails.append(work)

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def barrier(self, checkpoint_id: int = 1, timeout_ms: int | None = 0) -> CheckpointBarrier:
        return CheckpointBarrier(checkpoint_id, self.clock.wall_ms, timeout_ms)

    def put(self, channel: int, *items: int | CheckpointBarrier) -> None:
        for item in items:
            if isinstance(item, int):
                self.inputs[channel].emit(batch([(0, item)]))
            else:
                self.inputs[channel].broadcast(item)
        self.run_mails()

    def run_mails(self) -> None:
        while self.mails:
            self.mails.pop(0)()
            self.check()

    def run_io(self) -> None:
        for _ in range(IO_MAX):
            if not self.steps.run_io():
                return
            self.run_mails()
            self.check()
        raise AssertionError(f"writes beget writes: {IO_MAX} have not been the last")

    def ring(self) -> None:
        """Every timer that is set."""
        timers, self.steps.timers = self.steps.timers, []
        for _, timer in timers:
            if timer.mail is not None:
                timer.ring()
        self.run_mails()

    def read(self) -> list[int]:
        """Everything that can be read, processed."""
        found = []
        while (polled := self.gate.poll(1)) is not None:
            if isinstance(polled, LeasedBatch):
                found += [n for _, n in rows_in(polled.batch)]
                self.gate.processed()
            elif isinstance(polled[1], CheckpointBarrier):
                self.checkpoints.handle(BarrierReceived(polled[0], polled[1]))
        return found

    def check(self) -> None:
        self.pool.check()
        self.gate.check()
        self.checkpoints.check()

    def numbers(self, checkpoint_id: int = 1) -> list[tuple[int, bool, list[int]]]:
        """Producer, whether output, rows: of each state in order."""
        return [
            (
                state.producer,
                state.is_output,
                [n for s in state.segments for b in read_segment(self.storage, s, [SCHEMA], "") for _, n in rows_in(b)],
            )
            for state in self.snapshots.stored[checkpoint_id].channels
        ]

    def close(self) -> None:
        self.checkpoints.close()
        self.gate.discard()
        for partition in (*self.inputs, self.output):
            partition.discard()
        self.pool.check()
        assert self.pool.in_use == 0


def test_the_rest_at_work_then_the_channels_then_the_output_are_written_and_released() -> None:
    world = World()
    world.put(0, 1, 2)
    world.put(1, 3)
    assert isinstance(world.gate.poll(1), LeasedBatch)
    world.output.emit(batch([(0, 9)]))
    world.put(1, world.barrier())
    world.put(0, 4, world.barrier(), 5)
    assert world.taken == [1] and not world.snapshots.stored
    world.run_io()
    assert world.numbers() == [(0, False, [1]), (0, False, [2, 4]), (1, False, [3]), (0, True, [9])]
    assert world.snapshots.stored[1].files == ("shared/e1-a0-c1-v1-s0.channels",)
    world.gate.processed()
    assert sorted(world.read()) == [2, 3, 4, 5]
    world.close()


def test_what_is_captured_is_charged_until_it_is_written() -> None:
    world = World()
    world.put(0, 1, 2, world.barrier())
    world.put(1, world.barrier())
    assert world.read() == [1, 2]
    assert world.pool.in_use == 2 and len(world.steps.io) == 1
    world.run_io()
    assert world.pool.in_use == 0
    world.close()


def test_with_nothing_in_flight_no_file_is_written() -> None:
    world = World()
    world.put(0, world.barrier())
    world.put(1, world.barrier())
    assert world.snapshots.stored == {1: StoredInFlight()}
    assert not world.steps.io
    world.close()


def test_buffers_are_not_kept_for_ever_while_a_barrier_is_slow_to_come() -> None:
    """The producer that is to send it may need them to get there: else both would wait until the checkpoint expires."""
    world = World(pool_buffers=12)
    world.put(0, world.barrier())
    sent = 0
    read: list[int] = []
    for _ in range(4):
        while world.inputs[1].is_available():
            sent += 1
            world.put(1, sent)
            read += world.read()
        assert not world.steps.io
        world.ring()
        world.run_io()
        assert world.inputs[1].is_available(), "what was captured is written"
    world.put(1, world.barrier())
    world.run_io()
    assert read + world.read() == list(range(1, sent + 1))
    assert [n for producer, _, rows in world.numbers() if producer == 1 for n in rows] == list(range(1, sent + 1))
    files = world.snapshots.stored[1].files
    assert files[:2] == ("shared/e1-a0-c1-v1-s0.channels", "shared/e1-a0-c1-v1-s0.channels-1")
    assert set(files) == set(world.storage.files)
    assert world.snapshots.stored[1].state_bytes == sum(map(len, world.storage.files.values()))
    world.ring()
    assert not world.steps.io and len(world.snapshots.stored) == 1
    world.close()


def test_what_a_gate_still_has_to_recover_is_referred_to() -> None:
    world = World(recovered=True)
    assert isinstance(world.gate.poll(1), LeasedBatch) and not world.gate.read_from
    world.gate.processed()
    world.put(0, world.barrier())
    world.put(1, world.barrier())
    world.run_io()
    (only,) = world.snapshots.stored[1].channels
    assert (only.segments[0].file, only.skip) == ("old", 1)
    assert world.snapshots.stored[1].files == (), "it costs no bytes"
    world.close()


def test_over_an_edge_that_cannot_be_overtaken_a_barrier_with_no_row_before_it_does_not_wait_to_be_read() -> None:
    world = World(kind="forward")
    world.put(0, world.barrier())
    assert not world.taken
    world.inputs[1].broadcast(Watermark(5))
    world.put(1, world.barrier())
    assert world.taken == [1] and world.gate.poll(1) == (1, Watermark(5)), "what it overtakes is said again by others"
    world.run_io()
    assert world.snapshots.stored[1].channels == ()
    world.put(0, 7, world.barrier(2))
    world.put(1, world.barrier(2))
    assert world.taken == [1], "a row is before it"
    world.close()


def test_producers_are_not_asked_for_rows_before_the_last_recovered_one_is_taken() -> None:
    world = World(recovered=True)
    producer = NotedTask()
    world.inputs[0].listen(producer)
    world.inputs[0].wake_when_available()
    for left in (1, 0):
        assert not world.inputs[0].is_available() and not producer.woken
        assert isinstance(world.gate.poll(1), LeasedBatch) and not world.gate.read_from
        assert world.inputs[0].is_available() == (left == 0)
        world.gate.processed()
    assert producer.woken == [True] and world.inputs[1].is_available()
    world.put(0, 5)
    assert world.gate.poll(1) is not None
    world.gate.processed()
    world.close()


@pytest.mark.parametrize("moment", ["capturing", "writing", "written"])
def test_an_end_at_any_moment_leaves_the_pool_whole(moment: str) -> None:
    """Even when the recovered batch that is held was the last one, and the gate has forgotten its recovery."""
    world = World(recovered=True)
    world.gate.poll(1)
    world.gate.processed()
    assert isinstance(world.gate.poll(1), LeasedBatch)
    world.output.emit(batch([(0, 9)]))
    world.put(0, 1, world.barrier())
    if moment != "capturing":
        world.put(1, world.barrier())
    world.gate.processed()
    world.read()
    assert world.gate.recovered is None
    if moment == "written":
        world.run_io()
    world.close()
    while world.steps.run_io():
        world.pool.check()
    assert world.pool.in_use == 0


def test_a_checkpoint_that_is_dropped_during_a_write_reports_its_file_when_that_is_there() -> None:
    """Somebody has to delete it."""
    world = World()
    world.put(0, 1, world.barrier())
    world.put(1, world.barrier())
    assert len(world.steps.io) == 1
    world.checkpoints.drop(1)
    assert not world.snapshots.stored
    world.run_io()
    assert world.snapshots.stored[1].files == ("shared/e1-a0-c1-v1-s0.channels",)
    world.close()


def test_a_checkpoint_that_is_dropped_during_capture_captures_no_more_and_lets_go() -> None:
    world = World()
    world.put(0, 1, world.barrier())
    world.read()
    assert world.pool.in_use == 1
    world.checkpoints.handle(CancelReceived(1))
    assert world.pool.in_use == 0
    assert world.snapshots.stored == {1: StoredInFlight()} and world.snapshots.declined == [1]
    world.put(1, 2, world.barrier(), 3)
    assert world.read() == [2, 3] and world.pool.in_use == 0
    world.ring()
    world.put(0, world.barrier(2))
    world.put(1, world.barrier(2))
    assert world.taken == [1, 2] and world.snapshots.stored[2] == StoredInFlight()
    world.close()


def test_a_write_that_fails_is_reported_and_the_rest_of_the_capture_is_given_up() -> None:
    world = World()
    world.storage.refuse = lambda path: True
    world.put(0, 1, world.barrier())
    world.ring()
    world.run_io()
    assert "the disk is full" in str(world.snapshots.stored[1].error)
    world.read()
    world.put(1, 2)
    assert world.read() == [2] and world.pool.in_use == 0, "nothing is captured any more"
    world.put(1, world.barrier())
    world.run_io()
    assert not world.failures and len(world.snapshots.stored) == 1
    world.close()


def test_barriers_of_a_capture_that_could_not_be_written_are_read_and_change_nothing() -> None:
    """Until the coordinator has given the checkpoint up: its word may take a while."""
    world = World(producers=3)
    world.storage.refuse = lambda path: True
    world.put(0, 1, world.barrier())
    world.ring()
    world.run_io()
    assert "the disk is full" in str(world.snapshots.stored[1].error)
    world.put(1, 2, world.barrier(), 3)
    assert world.read() == [1, 2, 3]
    world.checkpoints.handle(CancelReceived(1))
    world.storage.refuse = lambda path: False
    world.put(2, 4, world.barrier(), 5)
    assert world.read() == [4, 5] and not world.failures and world.pool.in_use == 0
    for channel in range(3):
        world.put(channel, world.barrier(2))
    assert world.taken == [1, 2] and world.snapshots.stored[2] == StoredInFlight()
    world.close()


def test_a_barrier_that_waits_in_the_output_overtakes_when_its_time_has_come() -> None:
    world = World(producers=1)
    world.output.emit(batch([(0, 7)]))
    world.put(0, world.barrier(timeout_ms=50))
    assert world.read() == []
    assert world.taken == [1], "aligned"
    assert not world.steps.io and not world.snapshots.stored, "its barrier has not left"
    world.output.emit(batch([(0, 8)]))
    world.ring()
    world.run_io()
    assert world.numbers() == [(0, True, [7])]
    assert isinstance(world.output.subpartitions[0].take(1), CheckpointBarrier)
    world.close()


def test_a_barrier_that_has_left_in_time_is_not_waited_for() -> None:
    world = World(producers=1)
    world.put(0, world.barrier(timeout_ms=50))
    world.read()
    assert not world.snapshots.stored
    world.output.subpartitions[0].take(1)
    world.run_mails()
    assert world.snapshots.stored == {1: StoredInFlight()}
    assert all(timer.mail is None for _, timer in world.steps.timers), "the timer is cancelled"
    world.close()


@pytest.mark.parametrize(("ahead_ms", "delay_s"), [(0, 0.05), (-20, 0.03), (-1000, 0.0), (3_600_000, 0.05)])
def test_the_timeout_runs_from_the_creation_of_the_barrier_but_is_never_longer_than_it_is(
    ahead_ms: int, delay_s: float
) -> None:
    """The coordinator's wall clock may be ahead of this one, or have been set back."""
    world = World()
    barrier = CheckpointBarrier(1, world.clock.wall_ms + ahead_ms, 50)
    world.put(0, barrier)
    assert [delay for delay, _ in world.steps.timers] == [delay_s]
    world.close()


def test_over_an_edge_that_cannot_be_overtaken_the_barrier_waits_behind_the_rows() -> None:
    world = World(kind="broadcast")
    world.put(0, 1, world.barrier(), 2)
    assert world.taken == []
    assert world.read() == [1], "blocked behind its barrier"
    world.put(1, 3, world.barrier())
    assert world.read() == [3, 2]
    assert world.taken == [1] and world.snapshots.stored == {1: StoredInFlight()}
    world.close()


def test_a_trigger_after_the_producers_have_finished_captures_their_last_rows() -> None:
    world = World(producers=1)
    world.put(0, 1)
    world.inputs[0].broadcast(EndOfData())
    world.checkpoints.handle(TriggerReceived(world.barrier()))
    assert world.taken == [1] and not world.steps.io, "more may come before the end"
    world.put(0)
    world.inputs[0].broadcast(EndOfPartition())
    world.run_mails()
    world.run_io()
    assert world.numbers() == [(0, False, [1])]
    world.close()
