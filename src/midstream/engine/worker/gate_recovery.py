"""Recovers the rows in flight of one gate: they are read from the checkpoint's files, filtered, then processed.

    segments on storage --read, check, filter (I/O pool)--> queue (charged to the pool) --> task

They are not copied to other files: channel state is immutable and stays where it is until no checkpoint refers to it.
So a checkpoint can be taken at any moment of recovery. It has the batches that have not been taken yet by reference
(`remaining`), with the number of batches to skip.

Invariants: the live channels of the gate are not read before recovery is over, so that rows keep their order. Each
recovered batch is either in `remaining` or has been returned by `take`, never both. At most one segment is read ahead
of the queue, even if that overdraws the pool: recovery never waits for buffers, so that it cannot be part of a
deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from midstream.engine.checkpoint.channel_state import ReadAhead, channel_text, read_segment, rows_of
from midstream.engine.checkpoint.channel_state_references import left_bytes, without_first
from midstream.engine.core.batches import batch_bytes
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.exchange.batch_lease import LeasedBatch, buffers_of
from midstream.engine.exchange.buffer_pool import Quota
from midstream.engine.graph.job_graph import Edge
from midstream.engine.protocol.messages import ChannelState
from midstream.engine.worker.interfaces import TaskServices


@dataclass(frozen=True, slots=True)
class _Position:
    """The position of batch `batch` in segment `segment` of state `state`.

    `index` is the batch's number when the batches of all segments of the state are counted.
    """

    state: int
    segment: int = 0
    batch: int = 0
    index: int = 0


class GateRecovery:
    """The recovery of one gate, and the account of its recovered batches."""

    def __init__(
        self,
        edge: Edge,
        states: Sequence[ChannelState],
        *,
        quota: Quota,
        services: TaskServices,
        read_ahead: ReadAhead,
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.edge = edge
        self._states = tuple(states)
        self.total_bytes = left_bytes(self._states)
        """The size of all batches to read, including rows that belong to other subtasks."""
        self._quota = quota
        self._services = services
        self._executor = services.executor
        self._read_ahead = read_ahead
        """Segments that were kept in memory when they were verified. The gates of the slot share it, and each segment
        that is read is removed."""
        self._wake = wake
        self._fail = fail
        self._queue: deque[tuple[_Position, LeasedBatch]] = deque()
        self._next: _Position | None = self._first_to_read(_Position(0))
        """The first batch that has not been read."""
        self._reading = False
        self._charged = 0
        self._closed = False

    @property
    def is_over(self) -> bool:
        """Whether every batch has been taken. The last one may still be in process."""
        return not self._queue and self._next is None

    def start(self) -> None:
        self._read_next()

    def take(self) -> LeasedBatch | None:
        """The next batch, or None if none has been read. The caller must release it."""
        if not self._queue:
            return None
        _, batch = self._queue.popleft()
        if not self._queue:
            self._read_next()
        return batch

    def remaining(self) -> tuple[ChannelState, ...]:
        """The channel state of all batches that have not been taken."""
        first = self._queue[0][0] if self._queue else self._next
        if first is None:
            return ()
        state = self._states[first.state]
        return (without_first(state, first.segment, first.batch), *self._states[first.state + 1 :])

    def left_bytes(self) -> int:
        """The size of all batches that have not been taken, as a part of `total_bytes`."""
        return left_bytes(self.remaining())

    def freed(self, buffers: int) -> None:
        if not self._closed:
            self._charged -= buffers
            self._quota.free(buffers)

    def discard(self) -> None:
        self._closed = True
        self._quota.free(self._charged)
        self._charged = 0
        self._queue.clear()

    def check(self, current_batch: LeasedBatch | None = None) -> None:
        """Check that batches are charged from when they are read until they are processed."""
        used = buffers_of([batch for _, batch in self._queue])
        used += current_batch.charged_to(self) if current_batch is not None else 0
        if not self._closed and self._quota.in_use < used:
            raise InvariantError(f"edge {self.edge.id}: {used} recovered buffers, {self._quota.in_use} are charged")
        for _, batch in self._queue:
            batch.check()

    # ---- reading ----

    def _first_to_read(self, at: _Position) -> _Position | None:
        """The position of the first batch at or after `at` that exists and must not be skipped."""
        while at.state < len(self._states):
            state = self._states[at.state]
            if at.segment == len(state.segments):
                at = _Position(at.state + 1)
                continue
            left = state.segments[at.segment].batches - at.batch
            to_skip = state.skip - at.index
            if left and to_skip <= 0:
                return at
            if to_skip < left:
                at = replace(at, batch=at.batch + to_skip, index=at.index + to_skip)
            else:
                at = replace(at, segment=at.segment + 1, batch=0, index=at.index + left)
        return None

    def _read_next(self) -> None:
        """Read the rest of the segment at `_next`, unless a read is in progress."""
        at = self._next
        if self._reading or self._closed or at is None:
            return
        self._reading = True
        state = self._states[at.state]
        segment = state.segments[at.segment]
        storage, edge, max_parallelism = self._services.storage, self.edge, self._services.config.max_parallelism
        assert storage is not None, "in-flight data to restore, but no storage"
        data = self._read_ahead.pop((segment.file, segment.offset), None)

        def work() -> Sequence[pa.RecordBatch]:
            batches = read_segment(storage, segment, edge.layouts, channel_text(state), data)[at.batch :]
            return rows_of(batches, edge.keys, edge.layouts, state, at.index, max_parallelism)

        def done(outcome: Done[Sequence[pa.RecordBatch]] | Failed) -> None:
            self._reading = False
            if self._closed:
                return
            if isinstance(outcome, Failed):
                self._fail(outcome.error)
                return
            for offset, batch in enumerate(outcome.value):
                if batch.num_rows:
                    buffers = self._quota.pool.buffers_for(batch_bytes(batch))
                    self._quota.charge(buffers)
                    self._charged += buffers
                    position = replace(at, batch=at.batch + offset, index=at.index + offset)
                    self._queue.append((position, LeasedBatch(batch, buffers, self, self.edge.layout_of(batch))))
            read = len(outcome.value)
            self._next = self._first_to_read(replace(at, segment=at.segment + 1, batch=0, index=at.index + read))
            if not self._queue:
                self._read_next()  # every row of the segment belongs to another subtask
            self._wake()

        self._executor.submit(work, done)
