"""Capture: every batch before a barrier, wherever it lies, is held by exactly one owner until that releases it."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exchange import SCHEMA, TwoSlots, batch

from effort import examples
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.elements import (
    CancelCheckpointMarker,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    Event,
    Watermark,
)
from midstream.engine.core.errors import InvariantError
from midstream.engine.exchange.batch_lease import LeasedBatch, buffers_of, release
from midstream.engine.exchange.buffer_pool import BufferPool
from midstream.engine.exchange.element_queue import ElementQueue
from midstream.engine.exchange.input_channel import LocalChannel
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.graph.job_graph import Edge, Partitioning
from notified import NotedReader, NotedTask


def barrier(checkpoint_id: int) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0, 0)


class Freed:
    """A charger that counts."""

    def __init__(self) -> None:
        self.buffers = 0

    def freed(self, buffers: int) -> None:
        self.buffers += buffers


class Queue(ElementQueue):
    """With one row per batch, and what it has announced."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.freed = Freed()
        self.reader = NotedReader()
        self.connect(self.reader, 3)

    def put(self, *items: int | Event) -> None:
        for item in items:
            self.append(LeasedBatch(batch(item, 1), 1, self.freed) if isinstance(item, int) else item)

    def read(self) -> list[object]:
        """Everything, one element at a time, processed at once."""
        found: list[object] = []
        while (taken := self.take(1)) is not None:
            if isinstance(taken, LeasedBatch):
                found += taken.batch.column("k").to_pylist()
                taken.release()
            else:
                found.append(taken)
        return found


def numbers(items: list[LeasedBatch]) -> list[int]:
    return [n for item in items for n in to_list(item.batch.column("k"))]


def test_barriers_and_the_end_are_told_when_they_arrive() -> None:
    queue = Queue()
    queue.put(1, barrier(1), 2, Watermark(5), EndOfData(), EndOfPartition())
    assert queue.reader.arrived == [barrier(1), EndOfPartition()]
    assert queue.read() == [1, barrier(1), 2, Watermark(5), EndOfData(), EndOfPartition()]


def test_a_reader_is_notified_of_what_it_can_take_and_before_that_of_a_barrier_that_arrives() -> None:
    queue = Queue()
    queue.put(1)
    queue.capture(1)
    queue.read()
    queue.put(barrier(1))
    assert queue.reader.noted == [3, (3, barrier(1))], "the barrier completed the capture: there is nothing to take"
    queue.put(Watermark(1), Watermark(2), barrier(2))
    assert queue.reader.noted[2:] == [3, 3, (3, barrier(2)), 3]
    another = NotedReader()
    queue.connect(another, 0)
    assert another.noted == [0], "there were elements already"


def test_what_lies_before_a_barrier_that_is_there_is_captured_and_the_barrier_is_gone() -> None:
    queue = Queue()
    queue.put(1, Watermark(1), 2, barrier(1), 3)
    captured = queue.capture(1)
    assert numbers(captured) == [1, 2]
    queue.put(4)
    assert numbers(captured) == [1, 2], "what comes behind the barrier is none of it"
    assert queue.read() == [1, Watermark(1), 2, 3, 4], "it is read all the same"


def test_what_still_comes_before_the_barrier_is_captured_too() -> None:
    queue = Queue()
    queue.put(1)
    captured = queue.capture(1)
    assert queue.read() == [1]
    queue.put(2, EndOfData(), barrier(1), 3)
    assert numbers(captured) == [1, 2]
    assert queue.reader.arrived == [barrier(1)], "somebody counts the barriers"
    assert queue.read() == [2, EndOfData(), 3], "nobody waits for the barrier any more"


def test_the_end_of_the_channel_ends_a_capture() -> None:
    queue = Queue()
    captured = queue.capture(1)
    queue.put(1, EndOfData(), EndOfPartition())
    assert numbers(captured) == [1]
    assert numbers(queue.capture(2)) == [1]
    assert queue.read() == [1, EndOfData(), EndOfPartition()]


def test_barriers_of_other_checkpoints_are_left_where_they_are() -> None:
    queue = Queue()
    queue.put(1, barrier(1), 2)
    captured = queue.capture(3)
    queue.put(3, barrier(2), 4, CancelCheckpointMarker(2), barrier(3), 5)
    assert numbers(captured) == [1, 2, 3, 4]
    assert queue.read() == [1, barrier(1), 2, 3, barrier(2), 4, CancelCheckpointMarker(2), 5]


def test_a_later_barrier_ends_a_capture_that_nobody_will_complete() -> None:
    queue = Queue()
    captured = queue.capture(1)
    queue.put(1, barrier(2), 2)
    assert numbers(captured) == [1]
    assert queue.read() == [1, barrier(2), 2]


def test_a_capture_that_is_stopped_takes_no_more() -> None:
    queue = Queue()
    queue.put(1)
    captured = queue.capture(1)
    queue.stop_capture()
    queue.put(2, barrier(1), 3)
    assert numbers(captured) == [1]
    assert queue.read() == [1, 2, barrier(1), 3]


def test_a_capture_may_be_emptied_while_it_goes_on() -> None:
    queue = Queue()
    queue.put(1)
    captured = queue.capture(1)
    captured.clear()
    queue.put(2, barrier(1))
    assert numbers(captured) == [2]


def test_buffers_are_free_when_the_last_holder_releases_them_whichever_that_is() -> None:
    queue = Queue()
    queue.put(1, 2, barrier(1))
    captured = queue.capture(1)
    queue.read()
    assert queue.freed.buffers == 0
    release(captured)
    assert queue.freed.buffers == 2
    queue.put(3)
    captured = queue.capture(2)
    release(captured)
    assert queue.freed.buffers == 2, "it still waits to be read"
    queue.read()
    assert queue.freed.buffers == 3


def test_batches_that_are_captured_are_joined_and_released_one_by_one() -> None:
    queue = Queue()
    queue.put(1, 2, 3)
    captured = queue.capture(1)
    taken = queue.take(100)
    assert isinstance(taken, LeasedBatch) and numbers([taken]) == [1, 2, 3]
    assert taken.buffers == 3
    taken.release()
    release(captured)
    assert queue.freed.buffers == 3


# ---- subpartition, local channel -------------------------------------------


def forward(pool: BufferPool) -> ResultPartition:
    return ResultPartition(Edge(0, 0, 1, Partitioning.REBALANCE, SCHEMA), 0, range(1), 128, pool, 4)


def test_a_local_channel_captures_at_the_consumer_and_the_producer_captures_nothing() -> None:
    pool = BufferPool(1 << 20, 4096)
    partition = forward(pool)
    sub = partition.subpartitions[0]
    channel = LocalChannel(sub)
    gate = InputGate(partition.edge, 0, [channel])
    gate.request_rows()
    for n in range(4):
        partition.emit(batch(n, 1))
    assert not partition.is_available(), "four buffers are queued"
    assert gate.poll(1) is not None
    assert partition.is_available(), "what is being processed waits no more"
    assert partition.overtake(barrier(1)) == []
    assert gate.current_batch is not None
    rest = [gate.current_batch.rest(0)]
    captured = gate.capture(0, 1)
    assert numbers(rest) == [0] and numbers(captured) == [1, 2, 3]
    gate.check()
    for _ in range(3):
        gate.processed()
        assert gate.poll(1) is not None
    gate.processed()
    assert gate.poll(1) is None, "the barrier was taken out"
    gate.check()
    assert sub.queued_buffers == 0 and partition.is_available()
    assert pool.in_use == 4, "held until it is written"
    release(rest + captured)
    pool.check()
    assert pool.in_use == 0


def test_what_is_captured_may_outlive_its_channel() -> None:
    pool = BufferPool(1 << 20, 4096)
    partition = forward(pool)
    channel = LocalChannel(partition.subpartitions[0])
    partition.emit(batch(0, 1))
    partition.emit(batch(1, 1))
    captured = channel.queue.capture(1)
    assert channel.take(1) is not None
    channel.discard()
    partition.discard()
    assert pool.in_use == 0
    release(captured)
    pool.check()
    assert pool.in_use == 0


def test_a_gate_whose_only_element_was_the_barrier_has_nothing_to_give() -> None:
    pool = BufferPool(1 << 20, 4096)
    partition = forward(pool)
    channel = LocalChannel(partition.subpartitions[0])
    gate = InputGate(partition.edge, 0, [channel])
    partition.broadcast(barrier(1))
    assert gate.capture(0, 1) == []
    gate.check()
    assert gate.poll(1) is None


# ---- over a link -----------------------------------------------------------


class Overtaking(TwoSlots):
    """A producer whose barriers overtake, a consumer that captures; buffers of 64 bytes, so that batches span many."""

    def __init__(self, window: int) -> None:
        super().__init__(buffer_bytes=64, window=window, pool_buffers=512)
        self.task = NotedTask()
        self.gate.listen(self.task)
        self.partition.listen(self.task)

    def carry_all(self) -> None:
        while self.carry(self.left, self.right, 64) or self.carry(self.right, self.left, 64):
            self.check()

    def read(self) -> list[int]:
        found: list[int] = []
        while True:
            self.carry_all()
            polled = self.gate.poll(1)
            if polled is None:
                return found
            if isinstance(polled, LeasedBatch):
                found += to_list(polled.batch.column("k"))
                self.gate.processed()

    def whole(self) -> None:
        self.check()
        assert self.sending_pool.in_use == 0
        assert self.channel._batch_buffers == 0 and self.receiving_pool.in_use == self.channel._credit


def test_a_barrier_overtakes_the_rest_of_an_element_without_credit() -> None:
    world = Overtaking(window=2)
    world.partition.emit(batch(0, 30, 20))
    world.partition.emit(batch(100, 5))
    world.carry(world.right, world.left, 64)
    while world.carry(world.left, world.right, 1):
        pass
    (sender,) = world.left._senders
    assert sender._credit == 0 and not sender.can_send()
    assert world.channel._partial is not None, "the first parts are with the consumer, as many as it gave credit for"
    ((channel, captured),) = world.partition.overtake(barrier(1))
    assert channel == world.channel.id
    assert numbers(captured) == [*range(30), *range(100, 105)], "whole batches, the partly sent one too"
    for _ in range(4):
        world.carry(world.left, world.right, 64)
    assert world.task.arrived == [(0, barrier(1))], "it came without a single credit"
    assert numbers(world.gate.capture(0, 1)) == [], "the part that has come is the producer's to store"
    assert world.read() == [*range(30), *range(100, 105)]
    world.carry_all()
    assert world.sending_pool.in_use == buffers_of(captured)
    release(captured)
    world.whole()


def test_a_barrier_that_waits_its_turn_can_overtake_later_and_leaves_what_is_behind_it() -> None:
    world = Overtaking(window=2)
    world.partition.emit(batch(0, 30, 20))
    world.partition.broadcast(barrier(1))
    world.partition.emit(batch(100, 1))
    assert world.partition.has_queued_barrier(1)
    ((_, captured),) = world.partition.overtake_queued(barrier(1))
    assert numbers(captured) == list(range(30))
    assert not world.partition.has_queued_barrier(1) and world.partition.overtake_queued(barrier(1)) == []
    world.carry_all()
    assert world.task.arrived == [(0, barrier(1))]
    assert world.gate.poll(1) == (0, barrier(1))
    assert world.read() == [*range(30), 100]
    release(captured)
    world.whole()


def test_a_barrier_that_has_left_in_its_turn_is_told_and_overtakes_nothing() -> None:
    world = Overtaking(window=8)
    world.partition.broadcast(barrier(7))
    assert world.partition.has_queued_barrier(7)
    world.carry_all()
    assert world.task.sent == [7] and not world.partition.has_queued_barrier(7)
    assert world.partition.overtake_queued(barrier(7)) == []


def test_a_producer_hears_when_its_last_element_has_left_be_it_a_barrier_that_overtook() -> None:
    world = Overtaking(window=8)
    world.carry_all()
    task = NotedTask(lambda: world.partition.is_sent)
    world.partition.listen(task)
    world.partition.overtake(barrier(1))
    assert not world.partition.is_sent
    world.partition.wake_when_sent()
    world.carry_all()
    assert task.woken == [True] and not task.sent


def test_an_event_inside_an_element_must_be_a_barrier() -> None:
    world = Overtaking(window=2)
    with pytest.raises(InvariantError, match="CheckpointBarrier inside a batch"):
        world.channel.receive_event(0, barrier(1), inside=True)


@settings(max_examples=examples(150))
@given(data=st.data(), window=st.integers(2, 8), rows=st.lists(st.integers(1, 40), min_size=1, max_size=15))
def test_every_row_is_before_the_snapshot_or_captured_once_or_behind_the_barrier(
    data: st.DataObject, window: int, rows: list[int]
) -> None:
    """The consumer's snapshot comes at any moment, the producer's at any moment, in any state of the wire."""
    world = Overtaking(window)
    todo = deque(rows)
    start = 0
    read: list[int] = []
    before: list[int] | None = None
    received: list[LeasedBatch] = []
    unsent: list[LeasedBatch] | None = None
    cut = 0
    waits = False
    steps = 0
    while todo or unsent is None or before is None:
        steps += 1
        choices = ["left", "right", "read"] if steps < 300 else []
        choices += ["emit"] * bool(todo) + ["overtake"] * (unsent is None) + ["snapshot"] * (before is None)
        match data.draw(st.sampled_from(choices)):
            case "emit":
                size = todo.popleft()
                world.partition.emit(batch(start, size, data.draw(st.integers(1, 9))))
                start += size
            case "left":
                world.carry(world.left, world.right, 1)
            case "right":
                world.carry(world.right, world.left, 1)
            case "overtake":
                if not waits and data.draw(st.booleans()):  # first it waits its turn
                    world.partition.broadcast(barrier(1))
                    waits, cut = True, start
                elif waits:
                    found = world.partition.overtake_queued(barrier(1))
                    unsent = found[0][1] if found else []
                else:
                    unsent, cut = world.partition.overtake(barrier(1))[0][1], start
            case "read":
                if before is None and world.task.arrived and world.channel.queue.head_is_event():
                    before = list(read)  # received in its turn
                    world.gate.poll(1)
                    continue
                polled = world.gate.poll(1)
                if polled is not None:
                    assert isinstance(polled, LeasedBatch)
                    read += to_list(polled.batch.column("k"))
                    world.gate.processed()
            case "snapshot":
                before = list(read)
                received = world.gate.capture(0, 1)
        world.check()
    read += world.read()
    assert before is not None and unsent is not None
    assert before + numbers(received) + numbers(unsent) == list(range(cut))
    release(received)  # it may be all that the channel may hold: reading continues when it is written
    release(unsent)
    read += world.read()
    assert read == list(range(start)), "nothing is lost or comes out of turn for those who read on"
    world.whole()
    world.gate.discard()
    world.partition.discard()
    assert world.sending_pool.in_use == 0 and world.receiving_pool.in_use == 0
