"""Elements that wait for their consumer, and the capture of them for an unaligned checkpoint.

A queue holds whole elements in order. What is captured is held, not copied: the buffers that an
element is charged as are given back once the consumer is done with it *and* it has been written.

Capture of checkpoint n: every batch that lies before barrier n, whether it is here or still to
come. Who captures what: the queue in which a batch lies when the barrier overtakes it, and only
that one; a batch of which any byte is still with the producer lies there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from midstream.core.batches import concat
from midstream.core.elements import (
    MAX_WATERMARK_US,
    Batch,
    CheckpointBarrier,
    Element,
    EndOfPartition,
    Event,
    Watermark,
)
from midstream.core.errors import InvariantError

FIRST_BUFFERS: Final = 2
"""May wait in a queue of which it is not known yet how fast it is read."""


@dataclass(frozen=True, slots=True)
class QueueTime:
    """How long a batch should wait in a queue at most; `now_s` is of a clock that never goes back."""

    wanted_s: float
    now_s: Callable[[], float]


class Charger(Protocol):
    """Whoever accounts for the buffers of an element."""

    def freed(self, buffers: int) -> None:
        """Nobody holds them any more."""
        ...


class InFlight:
    """A batch on its way, charged as `buffers` until everyone who holds it has let go."""

    __slots__ = ("_charger", "_holders", "batch", "buffers", "buffers_waiting", "queued_s")

    def __init__(self, batch: Batch, buffers: int, charger: Charger) -> None:
        self.batch = batch
        self.buffers = buffers
        self._charger = charger
        self._holders = 1
        self.queued_s = 0.0
        self.buffers_waiting = buffers
        """In its queue when it came, with its own."""

    def hold(self) -> InFlight:
        self._holders += 1
        return self

    def let_go(self) -> None:
        self._holders -= 1
        assert self._holders >= 0, "let go more often than held"
        if self._holders == 0:
            self._charger.freed(self.buffers)


Taken = tuple[InFlight, ...]
"""What a batch that was taken is made of: to be let go of when its rows are worked off."""


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
        """Buffers that the batches here are charged as."""
        self.was_short = False
        """Somewhere rows waited because of the limit, which nobody can tell from what is here."""
        self._items: deque[InFlight | Event] = deque()
        self._capture: list[InFlight] | None = None
        """Where to put what arrives before barrier `_capture_id`."""
        self._capture_id = -1
        self.on_event: Callable[[CheckpointBarrier | EndOfPartition], None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[InFlight | Event]:
        return iter(self._items)

    def append(self, item: InFlight | Event) -> None:
        """A watermark behind a watermark replaces it: a slow consumer would collect them without bound.

        The last one, which says that the channel has ended, does not: how far the channel came matters to who has heard it.
        """
        if isinstance(item, InFlight):
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

    def take(self, rows_max: int) -> tuple[Element, Taken] | None:
        """The next element; small batches that wait behind one another come joined, up to `rows_max` rows."""
        if not self._items:
            return None
        item = self._items.popleft()
        if not isinstance(item, InFlight):
            return item, ()
        joined = self._join(item, rows_max)
        self.waiting -= buffers_of(joined[1])
        if self._queue_time is not None:
            self._set_limit(item, joined[1][-1], self._queue_time)
        return joined

    def _set_limit(self, first: InFlight, last: InFlight, queue_time: QueueTime) -> None:
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

    def _join(self, first: InFlight, rows_max: int) -> tuple[Batch, Taken]:
        """A batch is only joined if the copy pays: not to one that is already of full size."""
        rows = first.batch.num_rows
        if not self._items or rows * 2 > rows_max:
            return first.batch, (first,)
        run = [first]
        while self._items:
            item = self._items[0]
            if not isinstance(item, InFlight) or rows + item.batch.num_rows > rows_max:
                break
            self._items.popleft()
            run.append(item)
            rows += item.batch.num_rows
        return concat([item.batch for item in run]), tuple(run)

    def head_is_event(self) -> bool:
        return bool(self._items) and not isinstance(self._items[0], InFlight)

    def head_rows(self) -> int:
        """Of the batch that is next; 0 if that is none."""
        head = self._items[0] if self._items else None
        return head.batch.num_rows if isinstance(head, InFlight) else 0

    # ---- capture ----

    def capture(self, checkpoint_id: int) -> list[InFlight]:
        """Every batch before barrier `checkpoint_id`, which is removed; the list grows until that has come.

        Each is held, for whoever gets the list.
        """
        captured: list[InFlight] = []
        for index, item in enumerate(self._items):
            if isinstance(item, InFlight):
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
            if isinstance(item, InFlight):
                return False
        return True

    def has_barrier(self, checkpoint_id: int) -> bool:
        return any(isinstance(i, CheckpointBarrier) and i.checkpoint_id == checkpoint_id for i in self._items)

    def check(self) -> None:
        """What waits is what is here, and there is always room for something where nothing is."""
        if self.waiting != buffers_of(self._items) or self.limit < 1:
            raise InvariantError(
                f"a queue counts {self.waiting} of {buffers_of(self._items)} buffers, limit {self.limit}"
            )

    def clear(self) -> None:
        self._items.clear()
        self.waiting = 0
        self._capture = None
        self.on_event = None


def let_go(items: Iterable[InFlight]) -> None:
    for item in items:
        item.let_go()


def buffers_of(items: Iterable[InFlight | Event]) -> int:
    buffers = 0  # a loop: most often there is nothing, or next to nothing, and a generator takes longer to make
    for item in items:
        if isinstance(item, InFlight):
            buffers += item.buffers
    return buffers
