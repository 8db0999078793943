"""Elements that wait for their consumer, and the capture of them for an unaligned checkpoint.

A queue holds whole elements in order. What is captured is held, not copied: its lease (`exchange.lease`) is over
once the consumer has processed it *and* it has been written.

Capture of checkpoint n: every batch that lies before barrier n, whether it is here or still to
come. Who captures what: the queue in which a batch lies when the barrier overtakes it, and only
that one; a batch of which any byte is still with the producer lies there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from midstream.core.elements import MAX_WATERMARK_US, CheckpointBarrier, EndOfPartition, Event, Watermark
from midstream.core.errors import InvariantError
from midstream.exchange.lease import LeasedBatch, buffers_of, joined

FIRST_BUFFERS: Final = 2
"""May wait in a queue of which it is not known yet how fast it is read."""


@dataclass(frozen=True, slots=True)
class QueueTime:
    """How long a batch should wait in a queue at most; `now_s` is of a clock that never goes back."""

    wanted_s: float
    now_s: Callable[[], float]


class ElementQueue:
    """`on_event` hears of barriers and of the end as they arrive, before anybody has read what lies before them.

    Whoever fills the queue is to stop at `limit` buffers: `buffers_max`, or as many of them as are read in
    `queue_time`, judged by how long the batch read last has waited. One batch, however large, is always in order.
    """

    __slots__ = (
        "_buffers_max",
        "_capture",
        "_capture_id",
        "_items",
        "_queue_time",
        "limit",
        "on_event",
        "waiting",
        "was_short",
    )

    def __init__(self, buffers_max: int, queue_time: QueueTime | None = None) -> None:
        self._buffers_max = buffers_max
        self._queue_time = queue_time
        self.limit = buffers_max if queue_time is None else min(FIRST_BUFFERS, buffers_max)
        self.waiting = 0
        """Buffers charged for the batches here."""
        self.was_short = False
        """Somewhere rows waited because of the limit, which nobody can tell from what is here."""
        self._items: deque[LeasedBatch | Event] = deque()
        self._capture: list[LeasedBatch] | None = None
        """Where to put what arrives before barrier `_capture_id`."""
        self._capture_id = -1
        self.on_event: Callable[[CheckpointBarrier | EndOfPartition], None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[LeasedBatch | Event]:
        return iter(self._items)

    def append(self, item: LeasedBatch | Event) -> None:
        """A watermark behind a watermark replaces it: a slow consumer would collect them without bound.

        The last one, which says that the channel has ended, does not: how far the channel came matters to who has heard it.
        """
        if isinstance(item, LeasedBatch):
            self.waiting += item.buffers
            if self._queue_time is not None:
                item.queued_s, item.buffers_waiting = self._queue_time.now_s(), self.waiting
            if self._capture is not None:
                self._capture.append(item.hold())
        elif isinstance(item, CheckpointBarrier):
            if self._capture is not None and item.checkpoint_id >= self._capture_id:
                self._capture = None
                if item.checkpoint_id == self._capture_id:
                    self._tell(item)
                    return  # what lies before it is captured: nobody waits for it any more
            self._items.append(item)
            self._tell(item)
            return
        elif isinstance(item, EndOfPartition):
            self._capture = None
            self._items.append(item)
            self._tell(item)
            return
        elif isinstance(item, Watermark) and item.timestamp_us != MAX_WATERMARK_US:
            if self._items and isinstance(self._items[-1], Watermark):
                self._items.pop()
        self._items.append(item)

    def _tell(self, event: CheckpointBarrier | EndOfPartition) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def take(self, rows_max: int) -> LeasedBatch | Event | None:
        """The next element; small batches that wait behind one another come joined, up to `rows_max` rows.

        A batch is the taker's to release.
        """
        if not self._items:
            return None
        item = self._items.popleft()
        if not isinstance(item, LeasedBatch):
            return item
        run = self._run(item, rows_max)
        taken = joined(run)
        self.waiting -= taken.buffers
        if self._queue_time is not None:
            self._set_limit(item, run[-1], self._queue_time)
        return taken

    def _set_limit(self, first: LeasedBatch, last: LeasedBatch, queue_time: QueueTime) -> None:
        """Of what was read together, and as if that were one batch.

        Down at once: `buffers_waiting` were read while `first` waited. Up by one batch, if the limit held back more.
        """
        waited_s, wanted_s = queue_time.now_s() - first.queued_s, queue_time.wanted_s
        if waited_s > wanted_s:
            self.limit = min(self.limit, int(first.buffers_waiting * wanted_s / waited_s))
        elif waited_s < wanted_s / 2 and (self.was_short or last.buffers_waiting + last.buffers > self.limit):
            self.limit = min(self.limit + first.buffers, self._buffers_max)
        self.limit = max(self.limit, first.buffers)
        self.was_short = False

    def _run(self, first: LeasedBatch, rows_max: int) -> list[LeasedBatch]:
        """The batches to join. One is only joined if the copy pays: not to a batch that is already of full size."""
        run = [first]
        rows = first.batch.num_rows
        if rows * 2 > rows_max:
            return run
        while self._items:
            item = self._items[0]
            if not isinstance(item, LeasedBatch) or rows + item.batch.num_rows > rows_max:
                break
            self._items.popleft()
            run.append(item)
            rows += item.batch.num_rows
        return run

    def head_is_event(self) -> bool:
        return bool(self._items) and not isinstance(self._items[0], LeasedBatch)

    def head_rows(self) -> int:
        """Of the batch that is next; 0 if that is none."""
        head = self._items[0] if self._items else None
        return head.batch.num_rows if isinstance(head, LeasedBatch) else 0

    # ---- capture ----

    def capture(self, checkpoint_id: int) -> list[LeasedBatch]:
        """Every batch before barrier `checkpoint_id`, which is removed; the list grows until that has come.

        Each is held, for whoever gets the list.
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
        """The checkpoint is given up."""
        self._capture = None

    def is_clear(self, event: Event) -> bool:
        """Whether no batch lies before `event`."""
        for item in self._items:
            if item == event:
                return True
            if isinstance(item, LeasedBatch):
                return False
        return True

    def has_barrier(self, checkpoint_id: int) -> bool:
        return any(isinstance(i, CheckpointBarrier) and i.checkpoint_id == checkpoint_id for i in self._items)

    def check(self) -> None:
        """What waits is what is here, its leases last, and there is always room for something where nothing is."""
        if self.waiting != buffers_of(self._items) or self.limit < 1:
            raise InvariantError(
                f"a queue counts {self.waiting} of {buffers_of(self._items)} buffers, limit {self.limit}"
            )
        for item in self._items:
            if isinstance(item, LeasedBatch):
                item.check()

    def clear(self) -> None:
        self._items.clear()
        self.waiting = 0
        self._capture = None
        self.on_event = None
