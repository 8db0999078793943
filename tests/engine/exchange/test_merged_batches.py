"""Small batches that wait in several channels of a gate are processed together, and each channel stays in its order."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exchange import SCHEMA, batch

from effort import examples
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.elements import CheckpointBarrier, Event, Watermark
from midstream.engine.exchange import adaptive_combiner
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.buffer_pool import BufferPool
from midstream.engine.exchange.input_channel import LocalChannel
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.graph.job_graph import Edge, Partitioning
from midstream.engine.operators.base import Combiner

BUFFER_BYTES = 4096
NUMBERS = 1_000_000
"""Of the rows of one producer; those of producer p begin at p times that."""


class World:
    """Some producers and one consumer in a slot."""

    def __init__(self, producers: int, combiner: Combiner | None = None) -> None:
        self.pool = BufferPool(1000 * BUFFER_BYTES, BUFFER_BYTES)
        edge = Edge(0, 0, 1, Partitioning.REBALANCE, SCHEMA, combiner=combiner)
        self.partitions = [
            ResultPartition(edge, producer, range(1), 128, self.pool, 64) for producer in range(producers)
        ]
        channels = [LocalChannel(partition.subpartitions[0]) for partition in self.partitions]
        self.gate = InputGate(edge, 0, channels)
        self.gate.request_rows()
        self._emitted = [0] * producers

    def emit(self, producer: int, rows: int) -> None:
        self.partitions[producer].emit(batch(producer * NUMBERS + self._emitted[producer], rows))
        self._emitted[producer] += rows

    def say(self, producer: int, event: Event) -> None:
        self.partitions[producer].broadcast(event)

    def poll(self, rows_max: int) -> tuple[int, list[int] | Event] | None:
        polled = self.gate.poll(rows_max)
        self.check()
        if polled is None:
            return None
        if isinstance(polled, LeasedBatch):
            return self.gate.read_from[0], to_list(polled.batch.column("k"))
        return polled

    def check(self) -> None:
        self.gate.check()
        self.pool.check()


def numbers(producer: int, rows: Sequence[int]) -> list[int]:
    return [producer * NUMBERS + row for row in rows]


class Negated:
    """A combiner of which it can be seen that it was applied."""

    schema = pa.schema([("k", pa.int64()), ("rows", pa.int64())])

    def combine(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        ids = [-number for number in to_list(rows.column("k"))]
        return pa.RecordBatch.from_pydict({"k": ids, "rows": [1] * len(ids)}, schema=self.schema)


def test_what_waits_in_several_channels_is_joined_with_what_has_its_form_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_combiner, "ROWS_MIN", 2)
    monkeypatch.setattr(adaptive_combiner, "REDUCTION_MIN", 1)
    monkeypatch.setattr(
        ResultPartition, "_is_handed_over", False
    )  # or nothing would be combined for one local consumer
    world = World(4, Negated())
    for producer, rows in enumerate((2, 1, 2, 1)):
        world.emit(producer, rows)
    combined = [[-number for number in numbers(producer, [0, 1])] for producer in (0, 2)]
    assert world.poll(100) == (0, [*combined[0], *combined[1]])
    world.gate.processed()
    assert world.poll(100) == (1, [*numbers(1, [0]), *numbers(3, [0])])
    world.gate.processed()
    assert world.poll(100) is None and world.pool.in_use == 0


def test_what_waits_in_all_channels_comes_in_one_batch() -> None:
    world = World(3)
    for producer in range(3):
        world.emit(producer, 2)
    assert world.poll(100) == (0, [*numbers(0, [0, 1]), *numbers(1, [0, 1]), *numbers(2, [0, 1])])
    assert world.pool.in_use == 3
    world.gate.processed()
    assert world.pool.in_use == 0 and world.poll(100) is None


def test_no_more_rows_are_joined_than_are_asked_for_and_large_batches_are_not_copied() -> None:
    world = World(3)
    for producer, rows in enumerate([40, 50, 20]):
        world.emit(producer, rows)
    assert world.poll(99) == (0, [*numbers(0, range(40)), *numbers(1, range(50))])
    world.gate.processed()
    world.emit(0, 80)
    assert world.poll(99) == (2, numbers(2, range(20))), "80 more would be one too many"
    world.gate.processed()
    assert world.poll(99) == (0, numbers(0, range(40, 120)))


def test_a_batch_that_fills_half_of_a_slice_comes_alone() -> None:
    world = World(2)
    world.emit(0, 50)
    world.emit(1, 1)
    assert world.poll(99) == (0, numbers(0, range(50)))
    world.gate.processed()
    assert world.poll(99) == (1, numbers(1, [0]))


def test_rows_behind_an_event_or_in_a_blocked_channel_are_not_joined() -> None:
    world = World(4)
    world.emit(0, 1)
    world.say(1, Watermark(7))
    world.emit(1, 1)
    world.emit(2, 1)
    world.gate.block(2)
    world.emit(3, 1)
    assert world.poll(100) == (0, [*numbers(0, [0]), *numbers(3, [0])])
    world.gate.processed()
    assert world.poll(100) == (1, Watermark(7))
    assert world.poll(100) == (1, numbers(1, [0]))
    world.gate.processed()
    assert world.poll(100) is None
    world.gate.resume(2)
    assert world.poll(100) == (2, numbers(2, [0]))


def test_what_a_checkpoint_holds_of_a_joined_batch_is_all_of_it() -> None:
    world = World(2)
    world.emit(0, 1)
    world.emit(1, 1)
    assert world.poll(100) == (0, [*numbers(0, [0]), *numbers(1, [0])])
    barrier = CheckpointBarrier(1, 0, 0)
    for producer in range(2):
        world.say(producer, barrier)
        assert not world.gate.is_clear(producer, barrier), "rows before it are at work"
    assert world.gate.current_batch is not None
    held = world.gate.current_batch.rest(0)
    assert held.batch.num_rows == 2
    world.gate.processed()
    world.check()
    assert world.pool.in_use == 2, "until they are written"
    held.release()
    assert world.pool.in_use == 0
    assert all(world.gate.is_clear(producer, barrier) for producer in range(2))


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=60),
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
)
def test_every_channel_stays_in_its_order(said: list[tuple[int, int]], rows_requested: list[int]) -> None:
    """0 rows stand for a watermark; now and then everything is read, with each limit in turn."""
    world = World(4)
    expected: list[list[int]] = [[] for _ in range(4)]
    found: list[list[int]] = [[] for _ in range(4)]
    marks = 0

    def read(limit: int) -> None:
        for _ in range(1000):
            polled = world.poll(limit)
            if polled is None:
                return
            channel, element = polled
            if isinstance(element, list):
                for row in element:
                    found[row // NUMBERS].append(row % NUMBERS)
                world.gate.processed()
            else:
                assert isinstance(element, Watermark)
                found[channel].append(-element.timestamp_us)
        raise AssertionError("the gate gives something for ever")

    for step, (producer, rows) in enumerate(said):
        if rows:
            start = world._emitted[producer]
            world.emit(producer, rows)
            expected[producer] += range(start, start + rows)
        else:
            marks += 1
            world.say(producer, Watermark(marks))
            if expected[producer] and expected[producer][-1] < 0 and found[producer] != expected[producer]:
                expected[producer].pop()  # a watermark behind a watermark replaces it
            expected[producer].append(-marks)
        if step % 7 == 6:
            read(rows_requested[step % len(rows_requested)])
    read(rows_requested[0])
    assert found == expected
    assert world.pool.in_use == 0
