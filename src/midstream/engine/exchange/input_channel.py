"""The consumer side of one channel. A local one reads the producer's queue, a remote one receives buffers.

A channel returns elements in the order in which they were emitted. A batch that has been taken stays charged to the
pool until its lease is over: it is processed in slices, and its remaining rows are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from midstream.engine.core.batch_framing import PREFIX_BYTES, read_prefix
from midstream.engine.core.elements import CheckpointBarrier, Event
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.ids import ChannelId
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.buffer_pool import Quota
from midstream.engine.exchange.element_queue import ElementQueue, QueueTime
from midstream.engine.exchange.frame_layout import ELEMENT_BYTES_MAX
from midstream.engine.exchange.subpartition import Subpartition


class LocalChannel:
    """The channel to a producer in the same slot: it takes elements by reference from the producer's subpartition."""

    def __init__(self, subpartition: Subpartition) -> None:
        self.id = subpartition.channel
        self.queue = subpartition.queue
        """The elements that have not been taken. They are captured here when a barrier overtakes them."""
        self._subpartition = subpartition
        subpartition.is_local = True

    def request_rows(self) -> None:
        """Request rows from the producer. Events arrive without a request."""
        self._subpartition.request_rows()

    def take(self, rows_max: int) -> LeasedBatch | Event | None:
        """Take the next element from the queue, as `ElementQueue.take` does."""
        return self._subpartition.take(rows_max)

    def discard(self) -> None:
        """Do nothing: the subpartition releases every buffer that is charged to it."""

    def check(self, current_batch: LeasedBatch | None = None) -> None:
        """Check that at least the queued batches, and the task's `current_batch`, are charged."""
        self._subpartition.check(current_batch)


class RemoteChannel:
    """The channel to a producer in another slot: it receives buffers, assembles batches, and grants credit.

    `window` buffers of the quota are reserved for this channel. Every announced credit is charged from its announcement
    until the lease of the batch that used it is over, and `credit + batch buffers <= window`. The window is static and
    each channel has its own, so that no channel can starve another, and no batch waits for a round trip of credit while
    there is room. Within the window, credit is granted only up to the queue's limit. The batch being processed does not
    count towards it, so that the next one arrives meanwhile. Exception: a partial batch larger than the limit is
    granted credit for its remainder. If the channel holds nothing else, that may even overdraw the quota, because these
    buffers become free only after the remainder has arrived.

    `layouts` are the schemas that batches may have (`Edge.layouts`). `grant` is that of the link to the producer's slot.
    """

    def __init__(
        self,
        channel: ChannelId,
        layouts: Sequence[pa.Schema],
        quota: Quota,
        window: int,
        grant: Callable[[ChannelId, int], None],
        queue_time: QueueTime | None = None,
    ) -> None:
        self.id = channel
        self._layouts = layouts
        self._buffer_bytes = quota.pool.buffer_bytes
        self._quota = quota
        self._window = window
        self._grant = grant
        self.queue = ElementQueue(window, queue_time)
        """The elements that have arrived and not been taken. They are captured here when a barrier overtakes them."""
        self._sequence = 0
        self._credit = 0
        """Buffers that have been announced to the producer and have not arrived."""
        self._batch_buffers = 0
        """Buffers that are charged for batches: queued, partial and captured ones, and the one being processed."""
        self._partial: memoryview | None = None
        self._partial_filled = 0
        self._partial_layout = 0
        self._partial_buffers = 0
        self._closed = False

    def request_rows(self) -> None:
        """Request rows from the producer, by granting the first credit. Events arrive without a request."""
        self._top_up()

    # ---- from the link ----

    def receive_data(self, sequence: int, payload: memoryview, *, credit_starved: bool = False) -> None:
        """Handle a buffer. `credit_starved`: it had to wait for credit."""
        self._next_sequence(sequence)
        if self._credit <= 0:
            raise InvariantError(f"{self.id}: a buffer arrived without credit")
        if len(payload) > self._buffer_bytes:
            raise InvariantError(f"{self.id}: a buffer of {len(payload)} bytes, agreed on {self._buffer_bytes}")
        self._credit -= 1
        self._batch_buffers += 1
        self._partial_buffers += 1
        if credit_starved:
            self.queue.credit_starved = True
        self._assemble(payload)
        self._top_up()

    def receive_event(self, sequence: int, event: Event, *, inside: bool = False) -> None:
        self._next_sequence(sequence)
        if (self._partial is not None) != inside or (inside and not isinstance(event, CheckpointBarrier)):
            raise InvariantError(f"{self.id}: {type(event).__name__} inside a batch")
        self.queue.append(event)

    def _next_sequence(self, sequence: int) -> None:
        if sequence != self._sequence:
            raise InvariantError(f"{self.id}: frame {sequence} arrived where {self._sequence} was expected")
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF

    def _assemble(self, payload: memoryview) -> None:
        """Add a buffer to the batch that is being assembled. A batch begins in a buffer of its own."""
        if self._partial is None:
            length, layout = read_prefix(payload)
            if not 0 < length <= ELEMENT_BYTES_MAX:
                raise InvariantError(f"{self.id}: a batch of {length} bytes is announced")
            if layout >= len(self._layouts):
                raise InvariantError(
                    f"{self.id}: a batch of layout {layout} is announced, and there are {len(self._layouts)}"
                )
            payload = payload[PREFIX_BYTES:]
            self._partial = np.empty(length, np.uint8).data  # a bytearray would first be filled with zeros
            self._partial_filled = 0
            self._partial_layout = layout
        end = self._partial_filled + len(payload)
        if end > len(self._partial):
            raise InvariantError(f"{self.id}: a batch of {len(self._partial)} bytes got {end}")
        self._partial[self._partial_filled : end] = payload
        self._partial_filled = end
        if end == len(self._partial):
            batch = pa.ipc.read_record_batch(pa.py_buffer(self._partial), self._layouts[self._partial_layout])
            self.queue.append(LeasedBatch(batch, self._partial_buffers, self, self._partial_layout))
            self._partial = None
            self._partial_buffers = 0

    # ---- to the task ----

    def take(self, rows_max: int) -> LeasedBatch | Event | None:
        """Take the next element from the queue, as `ElementQueue.take` does."""
        taken = self.queue.take(rows_max)
        if taken is not None:
            self._top_up()
        return taken

    def freed(self, buffers: int) -> None:
        if self._closed:
            return  # `discard` has released every buffer
        self._batch_buffers -= buffers
        self._quota.free(buffers)
        self._top_up()

    def _top_up(self) -> None:
        if self._closed:
            return
        room, limit = self._window - self._batch_buffers, self.queue.limit
        credits = min(room, limit - self.queue.queued_buffers - self._partial_buffers) - self._credit
        if credits <= 0 and not self._credit and not self.queue.queued_buffers and self._partial_buffers:
            assert self._partial is not None
            credits = -(-(len(self._partial) - self._partial_filled) // self._buffer_bytes)
            if self._batch_buffers > self._partial_buffers:
                credits = min(credits, room)
        elif credits * 2 < min(self._window, limit) and self._credit:
            return  # the credit would be too little for a message of its own
        if credits > 0:
            self._quota.charge(credits)
            self._credit += credits
            self._grant(self.id, credits)

    def discard(self) -> None:
        """Drop everything and release every buffer: the attempt is over."""
        self._quota.free(self._credit + self._batch_buffers)
        self._credit = self._batch_buffers = self._partial_buffers = 0
        self.queue.clear()
        self._partial = None
        self._closed = True

    def check(self, current_batch: LeasedBatch | None = None) -> None:
        """Check that at least the queued batches, and the task's `current_batch`, are charged."""
        self.queue.check()
        used = self.queue.queued_buffers + (current_batch.charged_to(self) if current_batch is not None else 0)
        if self._batch_buffers < used + self._partial_buffers:
            raise InvariantError(
                f"{self.id}: {self._batch_buffers} buffers charged, {used} in use, {self._partial_buffers} partial"
            )


InputChannel: TypeAlias = LocalChannel | RemoteChannel
"""The consumer side of one channel."""
