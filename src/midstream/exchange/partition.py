"""The producer side of an edge: one result partition per subtask, one subpartition per consumer.

A subpartition is a queue of whole elements. They are serialised, and cut into buffers, only when
a remote consumer's credit lets them go; a local consumer takes them by reference. That is why
small batches can still be joined while they wait, and why nothing is ever half emitted.

Order within a subpartition: as emitted. Consecutive watermarks are one (the last): a consumer
that cannot keep up would otherwise collect them without bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.core.batches import batch_bytes, concat
from midstream.core.elements import Batch, Element, EndOfPartition, Event, Watermark
from midstream.core.errors import InvariantError
from midstream.core.ids import ChannelId
from midstream.core.keys import key_groups, subtask_of
from midstream.exchange.pool import BufferPool, Quota
from midstream.graph.job_graph import Edge, Partitioning

REBALANCE_SPLIT_ROWS = 4096
"""Batches with at least so many rows per consumer are dealt out in parts."""


class Subpartition:
    """FIFO queue of elements for one consumer. Charged to the partition's quota until taken."""

    __slots__ = ("_elements", "_on_data", "_pool", "_quota", "channel", "closed", "queued_buffers")

    def __init__(self, channel: ChannelId, pool: BufferPool, quota: Quota) -> None:
        self.channel = channel
        self._pool = pool
        self._quota = quota
        self._elements: deque[tuple[Element, int]] = deque()
        self._on_data: Callable[[], None] | None = None
        self.queued_buffers = 0
        self.closed = False

    def connect(self, on_data: Callable[[], None]) -> None:
        """`on_data` is called whenever an element is added, and once now if some already were."""
        self._on_data = on_data
        if self._elements:
            on_data()

    def add(self, element: Element) -> None:
        if self.closed:
            raise InvariantError(f"{self.channel}: {type(element).__name__} added after the end of the partition")
        if isinstance(element, pa.RecordBatch):
            buffers = self._pool.buffers_for(batch_bytes(element))
            self._quota.take(buffers)
            self.queued_buffers += buffers
        else:
            buffers = 0
            if isinstance(element, Watermark) and self._elements and isinstance(self._elements[-1][0], Watermark):
                self._elements.pop()
            self.closed = isinstance(element, EndOfPartition)
        self._elements.append((element, buffers))
        if self._on_data is not None:
            self._on_data()

    def take(self, rows_max: int) -> tuple[Element, int] | None:
        """The next element and the buffers it is charged as; waiting small batches come as one.

        The buffers stay charged until `done` is called for them.
        """
        if not self._elements:
            return None
        element, buffers = self._elements.popleft()
        if not isinstance(element, pa.RecordBatch):
            return element, 0
        return join_waiting(element, buffers, self._elements, rows_max)

    def done(self, buffers: int) -> None:
        self.queued_buffers -= buffers
        self._quota.give(buffers)

    @property
    def is_empty(self) -> bool:
        return not self._elements

    def head_is_event(self) -> bool:
        return bool(self._elements) and not isinstance(self._elements[0][0], pa.RecordBatch)

    def discard(self) -> None:
        """Drop everything that is queued (the attempt is over)."""
        self._quota.give(self.queued_buffers)
        self._elements.clear()
        self.queued_buffers = 0
        self._on_data = None
        self.closed = True


def join_waiting(first: Batch, buffers: int, waiting: deque[tuple[Element, int]], rows_max: int) -> tuple[Batch, int]:
    """`first` and the batches that wait right behind it, as one batch of at most `rows_max` rows.

    A batch is only joined if the copy pays: not to one that is already of full size.
    """
    rows = first.num_rows
    if not waiting or rows * 2 > rows_max:
        return first, buffers
    run = [first]
    while waiting:
        element, more = waiting[0]
        if not isinstance(element, pa.RecordBatch) or rows + element.num_rows > rows_max:
            break
        waiting.popleft()
        run.append(element)
        rows += element.num_rows
        buffers += more
    return concat(run), buffers


class ResultPartition:
    """What one subtask emits on one edge."""

    def __init__(
        self,
        edge: Edge,
        producer: int,
        consumers: range,
        max_parallelism: int,
        pool: BufferPool,
        subpartition_buffers_max: int,
    ) -> None:
        self.edge = edge
        self.producer = producer
        self._consumers = len(consumers)
        self._max_parallelism = max_parallelism
        self._subpartition_buffers_max = subpartition_buffers_max
        self._pool = pool
        self._quota = pool.quota(f"output e{edge.id}/{producer}", reserved=len(consumers) + 1)
        self.subpartitions = [
            Subpartition(ChannelId(edge.id, producer, consumer), pool, self._quota) for consumer in consumers
        ]
        self._next = producer % max(1, self._consumers)
        self.bytes_out = 0

    def is_available(self) -> bool:
        """Whether a step may start that emits here: the pool is whole and no consumer is too far behind."""
        if self._quota.available() <= 0:
            return False
        limit = self._subpartition_buffers_max
        return all(sub.queued_buffers < limit for sub in self.subpartitions)

    def wake_when_available(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, when `is_available` may have become true."""
        self._pool.wake_when_available(self._quota, wake)

    def emit(self, batch: Batch) -> None:
        """Route the rows of `batch`; order is kept towards each consumer (and so for each key)."""
        if batch.num_rows == 0:
            return
        self.bytes_out += batch_bytes(batch)
        match self.edge.partitioning:
            case Partitioning.FORWARD | Partitioning.GLOBAL:
                self.subpartitions[0].add(batch)
            case Partitioning.BROADCAST:
                for sub in self.subpartitions:
                    sub.add(batch)
            case Partitioning.REBALANCE:
                self._emit_in_turn(batch)
            case Partitioning.KEYED:
                self._emit_by_key(batch)

    def broadcast(self, event: Event) -> None:
        for sub in self.subpartitions:
            sub.add(event)

    def _emit_in_turn(self, batch: Batch) -> None:
        parts = min(self._consumers, max(1, batch.num_rows // REBALANCE_SPLIT_ROWS))
        size = -(-batch.num_rows // parts)
        for start in range(0, batch.num_rows, size):
            self.subpartitions[self._next].add(batch.slice(start, size))
            self._next = (self._next + 1) % self._consumers

    def _emit_by_key(self, batch: Batch) -> None:
        if self._consumers == 1:
            self.subpartitions[0].add(batch)
            return
        groups = key_groups(batch, self.edge.keys, self._max_parallelism)
        owners = subtask_of(groups, self._consumers, self._max_parallelism)
        for sub, part in zip(self.subpartitions, split_rows(batch, owners, self._consumers), strict=True):
            if part.num_rows:
                sub.add(part)

    def discard(self) -> None:
        for sub in self.subpartitions:
            sub.discard()


def split_rows(batch: Batch, owners: npt.NDArray[np.int32], consumers: int) -> list[Batch]:
    """The rows of each consumer, in their order: one pass over the owners and one gather per consumer.

    Measured on 128k rows of three columns, two consumers: 270 M rows/s, against 110 M with boolean
    masks and 70 M with one stable sort (benchmarks/split_rows.py).
    """
    parts = []
    for consumer in range(consumers):
        rows = np.flatnonzero(owners == consumer)
        parts.append(batch if len(rows) == batch.num_rows else batch.take(pa.array(rows)))
    return parts
