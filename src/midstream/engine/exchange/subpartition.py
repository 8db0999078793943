"""The output of one subtask to one consumer on one edge: a queue of whole elements.

Elements are serialised, and cut into buffers, only when a remote consumer's credit allows it. A local consumer takes
them by reference. So small batches can still be joined while they wait, and no batch is emitted in part.

Elements keep their order, except for barriers that overtake. The last of several watermarks in a row replaces the
others: a consumer that cannot keep up would otherwise collect them without bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pyarrow as pa

from midstream.engine.core.batches import batch_bytes
from midstream.engine.core.elements import CheckpointBarrier, Element, EndOfPartition, Event
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.ids import ChannelId
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.buffer_pool import Quota
from midstream.engine.exchange.element_queue import ElementQueue
from midstream.engine.exchange.listeners import TaskListener


class Subpartition:
    """The queue of elements for one consumer, and the account of its batches, which uses the partition's quota.

    A remote consumer has a queue of its own, and a `Sender` takes elements for it. For a local consumer `queue` is the
    channel's queue, so that its batches are captured by the consumer, never by the producer. `combined`: the schema of
    combined batches, if the edge has a combiner.
    """

    def __init__(
        self,
        channel: ChannelId,
        quota: Quota,
        queue: ElementQueue,
        on_rows_requested: Callable[[], None],
        combined: pa.Schema | None = None,
    ) -> None:
        self.channel = channel
        self.queue = queue
        self._pool = quota.pool
        self._quota = quota
        self._on_rows_requested = on_rows_requested
        self._combined = combined
        self.rows_requested = False
        """Whether the consumer has requested rows. Events are sent without a request."""
        self._overtaking: deque[CheckpointBarrier] = deque()
        """The barriers that have overtaken every element in the queue."""
        self.sending: LeasedBatch | None = None
        """The batch that is being sent to a remote consumer."""
        self._charged = 0
        self.rows_added = self.bytes_added = self.batches_added = 0
        """The rows, bytes and batches that have been added since the deployment."""
        self.is_local = False
        """Whether the consumer is in this slot. Its `LocalChannel` sets this."""
        self.closed = False
        self.listener: TaskListener | None = None
        """The producer."""
        self.wakes_when_empty = False
        """Whether the producer is woken when the last element has been taken."""

    def request_rows(self) -> None:
        """Handle the consumer's request for rows, which it takes from now on."""
        if not self.rows_requested:
            self.rows_requested = True
            self._on_rows_requested()

    def add(self, element: Element) -> None:
        if self.closed:
            raise InvariantError(f"{self.channel}: {type(element).__name__} added after the end of the partition")
        if isinstance(element, pa.RecordBatch):
            size = batch_bytes(element)
            self.rows_added += element.num_rows
            self.bytes_added += size
            self.batches_added += 1
            buffers = self._pool.buffers_for(size)
            self._quota.charge(buffers)
            self._charged += buffers
            layout = int(self._combined is not None and element.schema.equals(self._combined))
            self.queue.append(LeasedBatch(element, buffers, self, layout))
        else:
            self.closed = isinstance(element, EndOfPartition)
            self.queue.append(element)

    def take(self, rows_max: int) -> LeasedBatch | Event | None:
        """Remove the next element and return it.

        A local consumer must release a batch. For a remote consumer, `sent` must be called when it has been sent.
        """
        if self._overtaking:
            taken: LeasedBatch | Event | None = self._overtaking.popleft()
        else:
            taken = self.queue.take(rows_max)
            if taken is None:
                return None
            if self.is_local:
                self._pool.wake_waiting()  # the queue may be below its limit now
            elif isinstance(taken, LeasedBatch):
                self.sending = taken
            elif isinstance(taken, CheckpointBarrier) and self.listener is not None:
                self.listener.on_barrier_sent(taken.checkpoint_id)
        if self.wakes_when_empty and self.is_empty and self.listener is not None:
            self.listener.wake()
        return taken

    def sent(self) -> None:
        """Release the batch that was taken: it has been sent to the remote consumer completely."""
        sent, self.sending = self.sending, None
        if sent is None:
            raise InvariantError(f"{self.channel}: sent without having been taken")
        sent.release()
        self._pool.wake_waiting()  # even if a checkpoint still holds the batch, the queue has room

    def freed(self, buffers: int) -> None:
        if self._charged:  # it is 0 after `discard`, which releases every buffer
            self._charged -= buffers
            self._quota.free(buffers)

    @property
    def queued_buffers(self) -> int:
        """The buffers of batches that have not been sent completely, or that a local consumer has not taken."""
        return self.queue.queued_buffers + (0 if self.sending is None else self.sending.buffers)

    @property
    def is_empty(self) -> bool:
        return not len(self.queue) and not self._overtaking

    def head_is_event(self) -> bool:
        return bool(self._overtaking) or self.queue.head_is_event()

    @property
    def has_overtaking_barrier(self) -> bool:
        """Whether the next element is sent immediately, even inside a batch that is being sent."""
        return bool(self._overtaking)

    def overtake(self, barrier: CheckpointBarrier) -> list[LeasedBatch]:
        """Send the barrier ahead of every batch here. Returns these batches, which the producer must store.

        If the barrier is in the queue already, the batches after it are not returned.
        """
        if self.is_local:
            raise InvariantError(f"{self.channel}: a barrier overtakes rows that the local consumer owns")
        captured = [] if self.sending is None else [self.sending.hold()]
        captured += self.queue.capture(barrier.checkpoint_id)
        self.queue.stop_capture()
        self._overtaking.append(barrier)
        self.queue.notify()
        return captured

    def discard(self) -> None:
        """Drop everything that is queued: the attempt is over."""
        charged, self._charged = self._charged, 0
        self._quota.free(charged)
        self.queue.clear()
        self._overtaking.clear()
        self.sending = None
        self.closed = True

    def check(self, current_batch: LeasedBatch | None = None) -> None:
        """Check that at least the queued batches are charged, and the one being sent or (locally) the
        `current_batch`."""
        self.queue.check()
        taken = current_batch if self.is_local else self.sending
        used = self.queue.queued_buffers + (taken.charged_to(self) if taken is not None else 0)
        if not self.closed and self._charged < used:
            raise InvariantError(f"{self.channel}: {self._charged} buffers are charged, {used} are in use")
