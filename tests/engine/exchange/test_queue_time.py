"""How much may wait: as much as is read in the time that rows should wait at most, and always one batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_exchange import SCHEMA, TwoSlots, batch

from midstream.engine.core.elements import CheckpointBarrier
from midstream.engine.exchange.batch_lease import LeasedBatch, release
from midstream.engine.exchange.buffer_pool import BufferPool
from midstream.engine.exchange.element_queue import FIRST_BUFFERS, ElementQueue, QueueTime
from midstream.engine.exchange.input_channel import LocalChannel
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.graph.job_graph import Edge, Partitioning
from notified import NotedTask
from scarce_cores import Machine

WANTED_S = 0.025
BUFFER_BYTES = 4096


class Now:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class Nobody:
    def freed(self, buffers: int) -> None: ...


def put(queue: ElementQueue, buffers: int = 1) -> None:
    queue.append(LeasedBatch(batch(0, 1), buffers, Nobody()))


def read(queue: ElementQueue) -> None:
    taken = queue.take(1)
    assert isinstance(taken, LeasedBatch)
    taken.release()


def read_at(queue: ElementQueue, now: Now, batch_s: float, batches: int) -> list[int]:
    """The limits of a queue that is kept as full as they allow, `batch_s` to read one of one buffer."""
    limits = []
    for _ in range(batches):
        while queue.queued_buffers < queue.limit:
            put(queue)
        now.s += batch_s
        read(queue)
        limits.append(queue.limit)
    return limits


def test_a_slow_reader_has_as_many_buffers_waiting_as_it_reads_in_the_time() -> None:
    now = Now()
    queue = ElementQueue(64, QueueTime(WANTED_S, now))
    assert read_at(queue, now, 0.0004, 1000)[-1] == 32, "12.5 ms, half of the time, to read what waits"
    assert set(read_at(queue, now, 0.004, 200)[100:]) == {6}, "6 x 4 ms < 25 ms"
    assert set(read_at(queue, now, 0.05, 20)[10:]) == {1}, "one is always in order"
    assert max(read_at(queue, now, 0.00001, 3000)) == 64


def test_a_reader_that_was_held_up_once_is_not_kept_short_for_it() -> None:
    now = Now()
    queue = ElementQueue(64, QueueTime(WANTED_S, now))
    limits = read_at(queue, now, 0.0004, 1000)
    now.s += 3.0
    read(queue)
    assert queue.limit == 1
    assert max(read_at(queue, now, 0.0004, 1000)) == limits[-1]


def test_a_reader_that_gets_no_core_for_most_of_the_time_is_not_kept_short_for_it() -> None:
    """By a clock that leaves that out its limits are those of a quiet machine; by the wall clock next to nothing waits."""
    off_core = 9

    def limits(judged: Callable[[Machine], Callable[[], float]]) -> list[int]:
        machine = Machine(1 / (1 + off_core))
        queue = ElementQueue(64, QueueTime(WANTED_S, judged(machine)))
        found = []
        for _ in range(4000):
            while queue.queued_buffers < queue.limit:
                put(queue)
            machine.work(0.001)
            read(queue)
            found.append(queue.limit)
        return found[1000:]

    assert min(limits(lambda machine: machine.clock().own_core_s)) >= 10
    assert max(limits(lambda machine: lambda: machine.now_s)) <= 3


def test_a_limit_that_is_not_in_the_way_does_not_grow() -> None:
    now = Now()
    queue = ElementQueue(64, QueueTime(WANTED_S, now))
    for _ in range(100):
        put(queue)
        now.s += 0.0001
        read(queue)
    assert queue.limit == FIRST_BUFFERS


def test_one_batch_is_always_in_order_however_large_it_is_and_however_slow_its_reader() -> None:
    now = Now()
    queue = ElementQueue(64, QueueTime(WANTED_S, now))
    put(queue, 30)
    now.s += 100
    read(queue)
    assert queue.limit == 30


def test_without_a_time_it_is_the_buffers_alone() -> None:
    queue = ElementQueue(64)
    put(queue)
    read(queue)
    assert queue.limit == 64


@pytest.mark.parametrize("rows", [1, 3000])
def test_a_remote_channel_asks_for_no_more_than_its_reader_manages_and_for_the_rest_of_any_batch(rows: int) -> None:
    """Batches of 3000 rows are larger than the whole window."""
    now = Now()
    slots = TwoSlots(BUFFER_BYTES, window=8, queue_time=QueueTime(WANTED_S, now))
    size = slots.sending_pool.buffers_for(batch(0, rows).get_total_buffer_size())
    emitted = arrived = 0
    in_work = False
    for _ in range(80):
        while slots.partition.is_available() and emitted < 30:
            slots.partition.emit(batch(emitted * rows, rows))
            emitted += 1
        while slots.carry(slots.left, slots.right, 1 << 16) | slots.carry(slots.right, slots.left, 1 << 16):
            slots.check()
        now.s += 0.02
        if in_work:
            slots.gate.processed()
        polled = slots.gate.poll(1)
        in_work = polled is not None
        if isinstance(polled, LeasedBatch):
            arrived += polled.batch.num_rows
            if arrived > 3 * rows:
                assert slots.channel.queue.queued_buffers <= 2 * size, (
                    "one buffer or one batch in 25 ms, and what was granted"
                )
    assert arrived == 30 * rows and not slots.channel.queue.queued_buffers


def test_a_producer_gets_on_when_its_rows_are_read_even_if_a_checkpoint_still_holds_them() -> None:
    now = Now()
    pool = BufferPool(64 * BUFFER_BYTES, BUFFER_BYTES)
    edge = Edge(0, 0, 1, Partitioning.FORWARD, SCHEMA)
    partition = ResultPartition(edge, 0, range(1), 128, pool, 64, QueueTime(WANTED_S, now))
    channel = LocalChannel(partition.subpartitions[0])
    gate = InputGate(edge, 0, [channel])
    gate.request_rows()
    for n in range(FIRST_BUFFERS):
        partition.emit(batch(n, 1))
    task = NotedTask(partition.is_available)
    partition.listen(task)
    assert not partition.is_available()
    partition.wake_when_available()
    partition.overtake(CheckpointBarrier(1, 0, 0))
    captured = gate.capture(0, 1)
    now.s += 10
    assert gate.poll(1) is not None
    gate.processed()
    assert task.woken == [False], "one still waits, and one is all that such a reader gets"
    partition.wake_when_available()
    assert gate.poll(1) is not None
    assert task.woken == [False, True], "nothing else would wake it before the checkpoint is written"
    gate.processed()
    release(captured)
    assert pool.in_use == 0


def test_a_reader_that_is_called_with_what_waits_together_gets_more_than_it_reads_one_by_one() -> None:
    """Of a fixed time a call: what is joined costs nothing more."""
    now = Now()
    queue = ElementQueue(64, QueueTime(0.01, now))
    for _ in range(300):
        while queue.queued_buffers < queue.limit:
            put(queue)
        now.s += 0.0005
        taken = queue.take(1000)
        assert taken is not None
    assert queue.limit == 64


def test_rows_that_wait_for_credit_on_the_other_side_raise_the_limit() -> None:
    """The reader never has anything waiting: it cannot see that it is kept short."""
    now = Now()
    slots = TwoSlots(BUFFER_BYTES, window=64, pool_buffers=1000, queue_time=QueueTime(0.01, now), rows_max=1)
    emitted = 0
    for _ in range(300):
        while slots.partition.is_available():
            slots.partition.emit(batch(emitted, 1))
            emitted += 1
        now.s += 0.001
        while slots.carry(slots.left, slots.right, 1):  # one buffer at a time, each read at once
            polled = slots.gate.poll(1)
            assert polled is not None
            slots.gate.processed()
        now.s += 0.001
        slots.carry(slots.right, slots.left, 1 << 20)
    assert slots.channel.queue.limit > 16


def test_the_rest_of_a_large_batch_takes_one_grant() -> None:
    now = Now()
    slots = TwoSlots(BUFFER_BYTES, window=64, pool_buffers=1000, queue_time=QueueTime(0.01, now))
    slots.carry(slots.right, slots.left, 1 << 30)
    slots.partition.emit(batch(0, 6000, 10))
    trips = 0
    while not slots.gate.may_have_data or slots.gate.poll(1) is None:
        slots.carry(slots.left, slots.right, 1 << 30)
        slots.carry(slots.right, slots.left, 1 << 30)
        trips += 1
    assert trips == 2 and slots.channel.queue.queued_buffers == 0
