"""The queue of elements that wait for their consumer, and their capture for an unaligned checkpoint.

A queue has whole elements in order. A captured batch is held, not copied: its lease (`engine.exchange.batch_lease`) is
over once the consumer has processed it *and* it has been written.

The capture for checkpoint n has every batch before barrier n, queued or still to arrive. A batch is captured by the
queue in which it is when the barrier overtakes it, and by no other. Until a batch has been sent completely, it is in the
producer's queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from midstream.engine.core.elements import MAX_WATERMARK_US, CheckpointBarrier, EndOfPartition, Event, Watermark
from midstream.engine.core.errors import InvariantError
from midstream.engine.exchange.batch_lease import LeasedBatch, concat_leased
from midstream.engine.exchange.listeners import QueueListener

FIRST_BUFFERS: Final = 2
"""The limit of a queue before its consumer's speed has been measured."""


@dataclass(frozen=True, slots=True)
class QueueTime:
    """The target for the time that a batch waits in a queue. `now_s` is a monotonic clock."""

    target_s: float
    now_s: Callable[[], float]


class ElementQueue:
    """The queue of one channel, or of one subpartition.

    The producer must stop at `limit` buffers: at `buffers_max`, or with `queue_time` at a limit that adapts to how long
    the last batch waited. One batch always fits.
    """

    def __init__(self, buffers_max: int, queue_time: QueueTime | None = None) -> None:
        self._buffers_max = buffers_max
        self._queue_time = queue_time
        self.limit = buffers_max if queue_time is None else min(FIRST_BUFFERS, buffers_max)
        self.queued_buffers = 0
        """The buffers that are charged for the batches in the queue."""
        self.credit_starved = False
        """Set when the producer was short of credit; the queue length alone cannot tell."""
        self._items: deque[LeasedBatch | Event] = deque()
        self._capture: list[LeasedBatch] | None = None
        """The list for batches that arrive before barrier `_capture_id`. None if none are captured."""
        self._capture_id = -1
        self._listener: QueueListener | None = None
        self._channel = 0
        """The listener's index for this queue."""

    def connect(self, listener: QueueListener, channel: int) -> None:
        """From now on, notify `listener`, which reads the queue as its channel `channel`."""
        self._listener, self._channel = listener, channel
        if self._items:
            self.notify()

    def notify(self) -> None:
        """Notify the reader that it may take an element."""
        if self._listener is not None:
            self._listener.on_data(self._channel)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[LeasedBatch | Event]:
        return iter(self._items)

    def append(self, item: LeasedBatch | Event) -> None:
        """Add an element at the end. A watermark right after another one replaces it: otherwise a slow consumer would
        collect them without bound.

        The final watermark, which marks the end of the channel, replaces none: the consumer's valve still needs the
        last watermark before the end.
        """
        if isinstance(item, LeasedBatch):
            self.queued_buffers += item.buffers
            if self._queue_time is not None:
                item.queued_s, item.queued_buffers = self._queue_time.now_s(), self.queued_buffers
            if self._capture is not None:
                self._capture.append(item.hold())
        elif isinstance(item, (CheckpointBarrier, EndOfPartition)):
            if not self._ends_capture(item):
                self._items.append(item)
            if self._listener is not None:
                self._listener.on_arrival(self._channel, item)
            if self._items:
                self.notify()
            return
        elif isinstance(item, Watermark) and item.timestamp_us != MAX_WATERMARK_US:
            if self._items and isinstance(self._items[-1], Watermark):
                self._items.pop()
        self._items.append(item)
        if self._listener is not None:  # as in `notify`, without a call for each element
            self._listener.on_data(self._channel)

    def _ends_capture(self, event: CheckpointBarrier | EndOfPartition) -> bool:
        """End the capture if no batch after `event` belongs to it.

        Returns whether all batches before `event` are captured, so that it need not wait for its turn.
        """
        if self._capture is None or (isinstance(event, CheckpointBarrier) and event.checkpoint_id < self._capture_id):
            return False
        self._capture = None
        return isinstance(event, CheckpointBarrier) and event.checkpoint_id == self._capture_id

    def take(self, rows_max: int) -> LeasedBatch | Event | None:
        """Remove the next element and return it. Small batches of one layout in a row are joined, up to `rows_max` rows.

        The caller must release a batch.
        """
        if not self._items:
            return None
        item = self._items.popleft()
        if not isinstance(item, LeasedBatch):
            return item
        run = self._run(item, rows_max)
        taken = concat_leased(run)
        self.queued_buffers -= taken.buffers
        if self._queue_time is not None:
            self._set_limit(item, run[-1], self._queue_time)
        return taken

    def _set_limit(self, first: LeasedBatch, last: LeasedBatch, queue_time: QueueTime) -> None:
        """Set the limit by how long the batches from `first` to `last` have waited. They were read as one batch.

        The limit is lowered immediately: `queued_buffers` were read while `first` waited. It is raised by one batch at
        a time, and only if the producer had to wait for it.
        """
        waited_s, target_s = queue_time.now_s() - first.queued_s, queue_time.target_s
        if waited_s > target_s:
            self.limit = min(self.limit, int(first.queued_buffers * target_s / waited_s))
        elif waited_s < target_s / 2 and (self.credit_starved or last.queued_buffers + last.buffers > self.limit):
            self.limit = min(self.limit + first.buffers, self._buffers_max)
        self.limit = max(self.limit, first.buffers)
        self.credit_starved = False

    def _run(self, first: LeasedBatch, rows_max: int) -> list[LeasedBatch]:
        """The batches to concatenate, beginning with `first`. That copies them, and does not pay off for a large
        batch."""
        run = [first]
        rows = first.batch.num_rows
        if rows * 2 > rows_max:
            return run
        while self._items:
            item = self._items[0]
            if (
                not isinstance(item, LeasedBatch)
                or item.layout != first.layout
                or rows + item.batch.num_rows > rows_max
            ):
                break
            self._items.popleft()
            run.append(item)
            rows += item.batch.num_rows
        return run

    def head_is_event(self) -> bool:
        return bool(self._items) and not isinstance(self._items[0], LeasedBatch)

    def head_rows(self, layout: int) -> int:
        """The number of rows of the next element. It is 0 if there is none, if it is an event, or of another layout."""
        head = self._items[0] if self._items else None
        return head.batch.num_rows if isinstance(head, LeasedBatch) and head.layout == layout else 0

    # ---- capture ----

    def capture(self, checkpoint_id: int) -> list[LeasedBatch]:
        """Every batch before barrier `checkpoint_id`, which is removed. The list grows until that barrier has arrived.

        Each batch is held, and the caller must release it.
        """
        captured: list[LeasedBatch] = []
        for index, item in enumerate(self._items):
            if isinstance(item, LeasedBatch):
                captured.append(item.hold())
            elif isinstance(item, EndOfPartition):
                return captured
            elif isinstance(item, CheckpointBarrier) and item.checkpoint_id == checkpoint_id:
                del self._items[index]
                return captured
        self._capture, self._capture_id = captured, checkpoint_id
        return captured

    def stop_capture(self) -> None:
        """Capture no more batches: the checkpoint is abandoned."""
        self._capture = None

    def is_clear(self, event: Event) -> bool:
        """Whether there is no batch before `event`."""
        for item in self._items:
            if item == event:
                return True
            if isinstance(item, LeasedBatch):
                return False
        return True

    def has_barrier(self, checkpoint_id: int) -> bool:
        return any(isinstance(i, CheckpointBarrier) and i.checkpoint_id == checkpoint_id for i in self._items)

    def check(self) -> None:
        """Check that `queued_buffers` counts the queued batches, that their leases last, and that a batch is
        allowed."""
        buffers = 0
        for item in self._items:
            if isinstance(item, LeasedBatch):
                item.check()
                buffers += item.buffers
        if self.queued_buffers != buffers or self.limit < 1:
            raise InvariantError(f"a queue counts {self.queued_buffers} of {buffers} buffers, limit {self.limit}")

    def clear(self) -> None:
        self._items.clear()
        self.queued_buffers = 0
        self._capture = None
