"""Elements through partitions, links, channels and gates: all of them, in order, within the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.batch_framing import prefix
from midstream.engine.core.batches import concat
from midstream.engine.core.elements import CheckpointBarrier, Element, EndOfData, EndOfPartition, Event, Watermark
from midstream.engine.core.errors import ConfigError, InvariantError
from midstream.engine.core.ids import ChannelId
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.exchange import adaptive_combiner
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.buffer_pool import BufferPool
from midstream.engine.exchange.element_queue import QueueTime
from midstream.engine.exchange.frame_layout import FrameKind, header
from midstream.engine.exchange.input_channel import LocalChannel, RemoteChannel
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.peer_link import PeerLink
from midstream.engine.exchange.result_partition import ResultPartition, split_rows
from midstream.engine.graph.job_graph import Edge, Partitioning
from notified import NotedTask

SCHEMA = schema_of([("k", pa.int64()), ("text", pa.large_string())])


def batch(start: int, rows: int, width: int = 3) -> pa.RecordBatch:
    ids = list(range(start, start + rows))
    return pa.RecordBatch.from_pydict({"k": ids, "text": [str(i) * width for i in ids]}, schema=SCHEMA)


class Pipe:
    """A data link in memory: frames leave in random portions, chosen by the test."""

    def __init__(self) -> None:
        self.requested = False

    def wake(self) -> None:
        self.requested = True

    def close(self) -> None:
        self.requested = False


class TwoSlots:
    """One subtask on slot 0 sends to one on slot 1."""

    def __init__(
        self,
        buffer_bytes: int,
        window: int,
        pool_buffers: int = 64,
        queue_time: QueueTime | None = None,
        rows_max: int = 10_000,
        combiner: Longest | None = None,
    ) -> None:
        edge = Edge(0, 0, 1, Partitioning.FORWARD, SCHEMA, combiner=combiner)
        self.sending_pool = BufferPool(pool_buffers * buffer_bytes, buffer_bytes)
        self.receiving_pool = BufferPool(pool_buffers * buffer_bytes, buffer_bytes)
        self.partition = ResultPartition(edge, 0, range(1), 128, self.sending_pool, 16, queue_time)
        self.left = PeerLink(1, buffer_bytes, rows_max, pytest.fail)
        self.right = PeerLink(0, buffer_bytes, rows_max, pytest.fail)
        quota = self.receiving_pool.quota("in", window)
        self.channel = RemoteChannel(
            ChannelId(0, 0, 0),
            edge.layouts,
            quota,
            window,
            self.right.grant,
            queue_time,
        )
        self.gate = InputGate(edge, 0, [self.channel])
        self.pipes = Pipe(), Pipe()
        self.left.attach(self.pipes[0])
        self.right.attach(self.pipes[1])
        self.right.add_receiver(self.channel)
        self.left.add_sender(self.partition.subpartitions[0])
        self.gate.request_rows()

    def carry(self, source: PeerLink, target: PeerLink, bytes_max: int) -> bool:
        stream = b"".join(source.pull(bytes_max))
        position = 0
        while position < len(stream):
            length = int.from_bytes(stream[position : position + 4], "little")
            target.receive(memoryview(stream)[position + 4 : position + 4 + length])
            position += 4 + length
        assert position == len(stream), "a frame was cut"
        return bool(stream)

    def check(self) -> None:
        self.sending_pool.check()
        self.receiving_pool.check()
        self.channel.check()
        self.gate.check()


def element_of(polled: LeasedBatch | tuple[int, Event]) -> Element:
    return polled.batch if isinstance(polled, LeasedBatch) else polled[1]


def flatten(elements: Sequence[object]) -> list[object]:
    """Rows and events, whatever batches they came in."""
    out: list[object] = []
    for element in elements:
        if isinstance(element, pa.RecordBatch):
            out.extend(element.column("k").to_pylist())
        else:
            out.append(element)
    return out


@settings(max_examples=examples(150))
@given(
    sizes=st.lists(st.one_of(st.integers(1, 400), st.just(0)), max_size=25),
    width=st.sampled_from([1, 5, 60]),
    window=st.integers(2, 9),
    choices=st.lists(st.integers(0, 3), min_size=10, max_size=60),
)
def test_elements_arrive_whole_and_in_order_however_small_the_window(
    sizes: list[int], width: int, window: int, choices: list[int]
) -> None:
    world = TwoSlots(buffer_bytes=512, window=window)
    todo: deque[object] = deque()
    start = 0
    for size in sizes:
        if size == 0:
            todo.append(CheckpointBarrier(start + 1, 0))
        else:
            todo.append(batch(start, size, width))
            start += size
    todo.append(EndOfData())
    todo.append(EndOfPartition())
    sent, got = list(todo), []
    steps = 0
    idle = 0
    while idle < 8:
        choice = choices[steps % len(choices)] if steps < 2_000 else steps % 4
        steps += 1
        assert steps < 200_000, "stuck"
        moved = False
        if choice == 0 and todo and world.partition.is_available():
            element = todo.popleft()
            if isinstance(element, pa.RecordBatch):
                world.partition.emit(element)
            else:
                world.partition.broadcast(element)  # type: ignore[arg-type]
            moved = True
        elif choice == 1:
            moved = world.carry(world.left, world.right, 600)
        elif choice == 2:
            moved = world.carry(world.right, world.left, 600)
        elif choice == 3:
            polled = world.gate.poll(1000)
            if polled is not None:
                got.append(element_of(polled))
                if isinstance(polled, LeasedBatch):
                    world.gate.processed()
                moved = True
        world.check()
        idle = 0 if moved else idle + (steps >= 2_000)
    assert flatten(got) == flatten(sent)
    world.gate.discard()
    world.partition.discard()
    assert world.sending_pool.in_use == 0
    assert world.receiving_pool.in_use == 0


class Longest:
    """A combiner that leaves one row of each batch: its number of rows, and a text of another type."""

    schema = schema_of([("rows", pa.int64()), ("k", pa.int64()), ("last", pa.large_binary())])

    def combine(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = [[rows.num_rows], [rows.column("k")[0].as_py()], [rows.column("text")[-1].as_py().encode()]]
        return pa.RecordBatch.from_pydict(dict(zip(self.schema.names, columns, strict=True)), schema=self.schema)


@pytest.mark.parametrize("is_local", [False, True])
def test_rows_and_combined_batches_arrive_as_what_they_are_and_only_equals_are_joined(
    is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive_combiner, "ROWS_MIN", 10)
    monkeypatch.setattr(adaptive_combiner, "REDUCTION_MIN", 20)
    monkeypatch.setattr(
        ResultPartition, "_is_handed_over", False
    )  # or nothing would be combined for one local consumer
    world = TwoSlots(buffer_bytes=4096, window=9, combiner=Longest())
    if is_local:
        channel = LocalChannel(world.partition.subpartitions[0])
        channel.request_rows()
    few, many = [batch(at, 5) for at in (0, 5, 10)], [batch(at, 20) for at in (100, 200, 300)]
    for rows in (*few[:2], *many[:2], few[2], many[2]):
        world.partition.emit(rows)
    got: list[pa.RecordBatch] = []
    while is_local or world.carry(world.left, world.right, 1 << 20) or world.carry(world.right, world.left, 1 << 20):
        taken = channel.take(1000) if is_local else None
        if is_local and taken is None:
            break
        if isinstance(taken, LeasedBatch):
            assert taken.layout == world.partition.edge.layout_of(taken.batch) == taken.rest(0).layout
            got.append(taken.batch)
    while not is_local and (polled := world.gate.poll(1000)) is not None:
        assert isinstance(polled, LeasedBatch) and polled.layout == world.partition.edge.layout_of(polled.batch)
        got.append(polled.batch)
        world.gate.processed()
    one = Longest().combine
    expected = [
        concat(few[:2]),
        concat([one(many[0]), one(many[1])]),
        few[2],
        one(many[2]),
    ]
    assert [pa.Table.from_batches([each]) for each in got] == [pa.Table.from_batches([each]) for each in expected]


def test_a_form_that_the_edge_does_not_have_is_refused() -> None:
    world = TwoSlots(buffer_bytes=4096, window=2)
    for layout in (1, 255):
        with pytest.raises(InvariantError, match=f"a batch of layout {layout} is announced, and there are 1"):
            world.channel._assemble(memoryview(prefix(100, layout)))


def test_an_element_of_many_times_the_window_gets_through_and_the_overdraft_ends() -> None:
    world = TwoSlots(buffer_bytes=4096, window=2)
    big = batch(0, 20_000, 4)
    assert big.nbytes > 8 * 2 * 4096
    world.partition.emit(big)
    while world.carry(world.left, world.right, 1 << 20) or world.carry(world.right, world.left, 1 << 20):
        world.check()
    assert world.receiving_pool.in_use > 2
    polled = world.gate.poll(1000)
    assert isinstance(polled, LeasedBatch) and polled.batch.equals(big)
    world.gate.processed()
    world.check()
    assert world.receiving_pool.in_use <= 2 + 1  # the window again, and at most the credit the rest did not use


def test_a_consumer_that_does_not_read_stops_the_producer_within_the_pool() -> None:
    world = TwoSlots(buffer_bytes=4096, window=4, pool_buffers=32)
    emitted = 0
    while world.partition.is_available():
        world.partition.emit(batch(emitted, 300))
        emitted += 300
        world.carry(world.left, world.right, 1 << 20)
        world.carry(world.right, world.left, 1 << 20)
        assert emitted < 1_000_000
    task = NotedTask()
    world.partition.listen(task)
    world.partition.wake_when_available()
    assert world.sending_pool.in_use <= 32 + 4
    assert world.receiving_pool.in_use <= 4 + 4
    while not task.woken:
        moved = world.carry(world.left, world.right, 1 << 20)
        if world.gate.poll(1000) is not None:
            world.gate.processed()
            moved = True
        assert world.carry(world.right, world.left, 1 << 20) or moved, "stuck"
        world.check()
    assert task.woken == [True]


def test_watermarks_that_wait_are_joined() -> None:
    world = TwoSlots(buffer_bytes=4096, window=2)
    world.partition.emit(batch(0, 3))
    for time in range(5):
        world.partition.broadcast(Watermark(time))
    world.carry(world.left, world.right, 1 << 20)
    while world.carry(world.right, world.left, 99) or world.carry(world.left, world.right, 1 << 20):
        pass
    got = []
    while (polled := world.gate.poll(10)) is not None:
        got.append(element_of(polled))
        if isinstance(polled, LeasedBatch):
            world.gate.processed()
    assert flatten(got) == [0, 1, 2, Watermark(4)]


def test_small_batches_that_wait_are_joined_up_to_the_limit() -> None:
    pool = BufferPool(1 << 20, 4096)
    edge = Edge(0, 0, 1, Partitioning.FORWARD, SCHEMA)
    partition = ResultPartition(edge, 0, range(1), 128, pool, 100)
    channel = LocalChannel(partition.subpartitions[0])
    for i in range(10):
        partition.emit(batch(i * 10, 10))
    first = channel.take(64)
    assert isinstance(first, LeasedBatch) and first.batch.num_rows == 60
    first.release()
    pool.check()
    assert pool.in_use == 4


def test_a_producer_waits_until_every_consumer_has_asked_for_rows() -> None:
    pool = BufferPool(1 << 20, 4096)
    partition = ResultPartition(Edge(0, 0, 1, Partitioning.REBALANCE, SCHEMA), 0, range(2), 128, pool, 100)
    task = NotedTask()
    partition.listen(task)
    partition.wake_when_available()
    first, second = partition.subpartitions
    first.request_rows()
    first.request_rows()
    assert not partition.is_available() and not task.woken
    partition.broadcast(Watermark(1))
    assert not first.is_empty, "events need not be asked for"
    second.request_rows()
    assert partition.is_available() and task.woken == [True]


def test_a_remote_consumer_asks_by_its_first_credit() -> None:
    world = TwoSlots(buffer_bytes=4096, window=4)
    assert not world.partition.is_available()
    world.carry(world.right, world.left, 1 << 20)
    assert world.partition.is_available()


def test_a_gap_in_the_sequence_is_an_error() -> None:
    world = TwoSlots(buffer_bytes=4096, window=2)
    frame = header(FrameKind.DATA, ChannelId(0, 0, 0), 5, 0, 0)[4:]
    with pytest.raises(InvariantError, match="frame 5 arrived where 0 was expected"):
        world.right.receive(memoryview(frame))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"\x11", "a data frame of 1 bytes"),
        (header(FrameKind.DATA, ChannelId(9, 0, 0), 0, 0, 0)[4:], "does not exist here"),
        (header(FrameKind.CREDIT, ChannelId(0, 0, 0), 0, 1, 0)[4:], "grants credit"),
        (header(FrameKind.EVENT, ChannelId(0, 0, 0), 0, 0, 3)[4:] + b"xyz", "malformed event"),
        (header(FrameKind.DATA, ChannelId(0, 0, 0), 0, 0, 8)[4:] + (2**60).to_bytes(8, "little"), "is announced"),
        (b"\x77" + header(FrameKind.DATA, ChannelId(0, 0, 0), 0, 0, 0)[5:], "unknown kind 119"),
    ],
)
def test_a_frame_that_no_honest_peer_sends_is_refused(frame: bytes, message: str) -> None:
    world = TwoSlots(buffer_bytes=4096, window=2)
    with pytest.raises(InvariantError, match=message):
        world.right.receive(memoryview(frame))


@given(
    rows=st.integers(1, 300) | st.integers(1000, 1050),
    parallelism=st.integers(1, 9),
    max_parallelism=st.sampled_from([9, 16, 128]),
    buffer_bytes=st.sampled_from([512, 4096, 32768]),
)
@settings(max_examples=examples(60))
def test_every_row_goes_to_the_owner_of_its_key_in_order(
    rows: int, parallelism: int, max_parallelism: int, buffer_bytes: int
) -> None:
    rng = np.random.default_rng(rows)
    data = pa.RecordBatch.from_pydict({"k": rng.integers(0, 50, rows), "n": np.arange(rows)})
    groups = key_groups(data, ("k",), max_parallelism)
    owners = subtask_of(groups, parallelism, max_parallelism)
    parts = split_rows(data, owners, parallelism, buffer_bytes)
    for part in parts:  # no part keeps more memory than it is charged
        assert part.get_total_buffer_size() <= max(buffer_bytes, part.nbytes)
    assert sum(part.num_rows for part in parts) == rows
    for subtask, part in enumerate(parts):
        assert part.column("n").to_pylist() == [i for i in range(rows) if owners[i] == subtask]


@pytest.mark.parametrize(
    ("partitioning", "times", "batches"),
    [
        (Partitioning.GLOBAL, 1, 3),
        (Partitioning.BROADCAST, 3, 9),
        (Partitioning.REBALANCE, 1, 4),  # the first one is dealt out in two parts
        (Partitioning.KEYED, 1, 9),
    ],
    ids=lambda value: value.value if isinstance(value, Partitioning) else None,
)
def test_a_partition_counts_what_it_gives_to_consumers_by_batch(
    partitioning: Partitioning, times: int, batches: int
) -> None:
    edge = Edge(0, 0, 1, partitioning, SCHEMA, keys=("k",) if partitioning is Partitioning.KEYED else ())
    pool = BufferPool(1 << 24, 1 << 12)
    partition = ResultPartition(edge, 0, range(3), 128, pool, 1 << 12)
    emitted = [batch(0, 9_000), batch(9_000, 900), batch(0, 0), batch(9_900, 100)]
    for each in emitted:
        partition.emit(each)
    partition.broadcast(Watermark(5))
    assert (partition.rows_out, partition.batches_out) == (10_000 * times, batches)
    size = sum(each.nbytes for each in emitted)
    assert partition.bytes_out == pytest.approx(times * size, rel=0.05), "parts of a batch have bitmaps of their own"
    partition.discard()
    assert (partition.rows_out, partition.batches_out) == (10_000 * times, batches), "totals outlive the rows"


@pytest.mark.parametrize("rows", [1, 5000, 50_000])
def test_rebalance_reaches_every_consumer(rows: int) -> None:
    pool = BufferPool(1 << 26, 4096)
    edge = Edge(0, 0, 1, Partitioning.REBALANCE, SCHEMA)
    partition = ResultPartition(edge, 1, range(3), 128, pool, 1 << 20)
    for _ in range(6):
        partition.emit(batch(0, rows, 1))
    counts = []
    for sub in partition.subpartitions:
        total = 0
        while (taken := sub.take(1 << 30)) is not None:
            assert isinstance(taken, LeasedBatch)
            total += taken.batch.num_rows
            sub.sent()
        counts.append(total)
    assert sum(counts) == 6 * rows
    assert max(counts) - min(counts) <= 6  # parts are of equal size but for rounding
    assert pool.in_use == 0


def test_a_pool_that_is_too_small_says_how_much_is_needed() -> None:
    pool = BufferPool(10 * 4096, 4096)
    pool.quota("a", 8)
    pool.quota("b", 4)
    with pytest.raises(ConfigError, match=r"at least 12 buffers of 4096 bytes \(49152 bytes\), the pool has 10"):
        pool.check_capacity()


def test_reserved_buffers_stay_free_for_their_owner_whatever_others_take() -> None:
    pool = BufferPool(100, 10)
    greedy, modest = pool.quota("greedy", 1), pool.quota("modest", 3)
    greedy.charge(20)  # an overdraft
    pool.check()
    assert greedy.available() <= 0
    assert modest.available() == 3
    modest.charge(3)
    modest.free(3)
    greedy.free(20)
    pool.check()
    assert pool.in_use == 0
    with pytest.raises(InvariantError, match="released"):
        greedy.free(1)
