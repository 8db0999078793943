"""What one subtask emits to one consumer on one edge: a queue of whole elements.

They are serialised, and cut into buffers, only when a remote consumer's credit lets them go; a local
consumer takes them by reference. That is why small batches can still be joined while they wait, and why
nothing is ever half emitted.

Order: as emitted. Consecutive watermarks are one (the last): a consumer that cannot keep up would
otherwise collect them without bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pyarrow as pa

from midstream.core.batches import batch_bytes
from midstream.core.elements import CheckpointBarrier, Element, EndOfPartition, Event
from midstream.core.errors import InvariantError
from midstream.core.ids import ChannelId
from midstream.exchange.lease import LeasedBatch
from midstream.exchange.pool import BufferPool, Quota
from midstream.exchange.queue import ElementQueue, QueueTime


class Subpartition:
    """FIFO queue of elements for one consumer: the account of its batches, with the partition's quota.

    A remote consumer has a `queue` of its own, and gets what `take` gives; a local one reads `queue`
    itself, so that what lies here is captured by the consumer, never by the producer.
    """

    __slots__ = (
        "_charged",
        "_on_asked",
        "_on_data",
        "_on_sent",
        "_pool",
        "_quota",
        "_urgent",
        "asked",
        "batches_added",
        "bytes_added",
        "channel",
        "closed",
        "is_local",
        "on_empty",
        "queue",
        "rows_added",
        "sending",
    )

    def __init__(
        self,
        channel: ChannelId,
        pool: BufferPool,
        quota: Quota,
        on_sent: Callable[[int], None],
        on_asked: Callable[[], None],
        buffers_max: int,
        queue_time: QueueTime | None,
    ) -> None:
        self.channel = channel
        self.queue = ElementQueue(buffers_max, queue_time)
        self._pool = pool
        self._quota = quota
        self._on_sent = on_sent
        self._on_asked = on_asked
        self.asked = False
        """Whether the consumer wants rows; events need not be asked for."""
        self._on_data: Callable[[], None] | None = None
        self._urgent: deque[CheckpointBarrier] = deque()
        """Barriers that have overtaken everything here."""
        self.sending: LeasedBatch | None = None
        """The batch that is on its way to a remote consumer."""
        self._charged = 0
        self.rows_added = self.bytes_added = self.batches_added = 0
        """All so far."""
        self.is_local = False
        self.closed = False
        self.on_empty: Callable[[], None] | None = None
        """Called when the last element has been taken."""

    def connect(self, on_data: Callable[[], None], *, local: bool = False) -> None:
        """`on_data` is called whenever an element is added, and once now if some already were."""
        self._on_data = on_data
        self.is_local = local
        if len(self.queue):
            on_data()

    def ask(self) -> None:
        """The consumer takes rows from now on."""
        if not self.asked:
            self.asked = True
            self._on_asked()

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
            self.queue.append(LeasedBatch(element, buffers, self))
        else:
            self.closed = isinstance(element, EndOfPartition)
            self.queue.append(element)
        if self._on_data is not None and len(self.queue):
            self._on_data()

    def take(self, rows_max: int) -> LeasedBatch | Event | None:
        """The next element. A batch is a local consumer's to release; of a remote one, `sent` must follow."""
        if self._urgent:
            taken: LeasedBatch | Event | None = self._urgent.popleft()
        else:
            taken = self.queue.take(rows_max)
            if taken is None:
                return None
            if self.is_local:
                self._pool.returned()  # what is being processed waits no more
            elif isinstance(taken, LeasedBatch):
                self.sending = taken
            elif isinstance(taken, CheckpointBarrier):
                self._on_sent(taken.checkpoint_id)
        if self.on_empty is not None and self.is_empty:
            self.on_empty()
        return taken

    def sent(self) -> None:
        """All of the batch that was taken is with the remote consumer."""
        assert self.sending is not None, f"{self.channel}: sent without having been taken"
        sent, self.sending = self.sending, None
        sent.release()
        self._pool.returned()  # even if a checkpoint still holds the batch, there is room here

    def freed(self, buffers: int) -> None:
        if self._charged:  # else everything has been given back
            self._charged -= buffers
            self._quota.free(buffers)

    @property
    def waiting(self) -> int:
        """Buffers that have not been sent, or that a local consumer has not begun with."""
        return self.queue.waiting + (0 if self.sending is None else self.sending.buffers)

    @property
    def is_empty(self) -> bool:
        return not len(self.queue) and not self._urgent

    def head_is_event(self) -> bool:
        return bool(self._urgent) or self.queue.head_is_event()

    @property
    def is_urgent(self) -> bool:
        """Whether the next element goes out at once, even inside a batch that is being sent."""
        return bool(self._urgent)

    def overtake(self, barrier: CheckpointBarrier) -> list[LeasedBatch]:
        """Send the barrier before everything that is here, which is returned: it is the producer's to store.

        The barrier may be here already, waiting its turn: then what lies behind it is not returned.
        """
        assert not self.is_local, self.channel
        captured = [] if self.sending is None else [self.sending.hold()]
        captured += self.queue.capture(barrier.checkpoint_id)
        self.queue.stop_capture()
        self._urgent.append(barrier)
        if self._on_data is not None:
            self._on_data()
        return captured

    def discard(self) -> None:
        """Drop everything that is queued (the attempt is over)."""
        charged, self._charged = self._charged, 0
        self._quota.free(charged)
        self.queue.clear()
        self._urgent.clear()
        self.sending = None
        self._on_data = self.on_empty = None
        self.closed = True

    def check(self, at_work: LeasedBatch | None = None) -> None:
        """At least what waits here, and what is being sent or, by a local consumer, `at_work`, is charged."""
        self.queue.check()
        taken = at_work if self.is_local else self.sending
        used = self.queue.waiting + (taken.charged_to(self) if taken is not None else 0)
        if not self.closed and self._charged < used:
            raise InvariantError(f"{self.channel}: {self._charged} buffers are charged, {used} are in use")
