"""Which entries of a process function's states are objects, and which are spilled to columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from sys import getsizeof
from typing import Any, Final

from midstream.engine.core.interfaces import Ids
from midstream.engine.operators.base import OperatorContext
from midstream.engine.state.columnar import FrameRun
from midstream.engine.state.heap_snapshot import KeyEncoding
from midstream.engine.state.keyed_states import State
from midstream.engine.state.safe_pickle import OwnCode
from midstream.engine.state.spilled_state import SpilledEntries, SpilledTimers, can_spill, can_spill_keys
from midstream.engine.state.state_parts import Chunk
from midstream.engine.state.timers import TimerQueue

SPILL_KEYS: Final = 8_192
"""The largest number of entries that are spilled in one piece: a long enough run, within some 10 ms."""
SAMPLE: Final = 32
"""The number of entries, and of items of one entry, that are measured to estimate the size of all."""
DEPTH_MAX: Final = 4
MEASURED_EVERY: Final = 128
"""Entries are measured again after they have been requested this many times: some 1 ms for 128 batches."""
ENTRY_BYTES: Final = 120
"""What an entry takes besides its key and its value: its places in the dict and in the changes since a checkpoint."""
TIMER_BYTES: Final = 300
"""What a timer takes: its tuples, its number and its places in dicts."""


class StateSpill:
    """Spills entries and timers of an operator while they take more than `OperatorContext.entry_bytes` as objects."""

    def __init__(
        self,
        states: Iterable[State],
        queues: Mapping[str, TimerQueue],
        encoding: KeyEncoding,
        own: OwnCode,
        where: str,
        context: OperatorContext,
    ) -> None:
        self._limit_bytes = context.entry_bytes
        self._spilled: dict[str, SpilledEntries | SpilledTimers] = {}
        """By the name of the part in a checkpoint."""
        self._entries: list[SpilledEntries] = []
        self._timers: list[SpilledTimers] = []
        self._sizes: dict[str, EntrySize | TimerSize] = {}
        if self._limit_bytes() is None or not encoding.is_keyed:
            return
        groups = context.key_groups, context.max_parallelism
        for state in states:
            if can_spill(state, encoding):
                entries = SpilledEntries(state, encoding, own, where).opened(state.name, *groups)
                self._spilled[state.part_name] = entries
                self._entries.append(entries)
                self._sizes[state.part_name] = EntrySize(state.entries())
        if can_spill_keys(encoding):
            for name, queue in queues.items():
                timers = SpilledTimers(queue, encoding, where).opened(name, *groups)
                self._spilled[name] = timers
                self._timers.append(timers)
                self._sizes[name] = TimerSize(queue)

    def __bool__(self) -> bool:
        """Whether any entries are spilled."""
        return any(entries.has_rows for entries in self._entries)

    def of(self, part: str) -> SpilledEntries | SpilledTimers | None:
        """Return what is spilled of a part; None if it stays in memory."""
        return self._spilled.get(part)

    def fetch(self, keys: Sequence[Any]) -> None:
        """Make objects of the entries of these keys, before the function is called for them. Their timers stay rows: a key
        may have any number of them.
        """
        for entries in self._entries:
            if entries.has_rows:
                entries.fetch(keys)

    def runs(self) -> Iterator[FrameRun]:
        """Yield the runs that spilled rows lie in."""
        for spilled in self._spilled.values():
            yield from spilled.held_runs()

    def fetch_all(self) -> None:
        for spilled in self._spilled.values():
            spilled.fetch_all()

    def chunks(self, ids: Ids, stored_bytes: Callable[[str], int | None]) -> dict[str, Callable[[], tuple[Chunk, ...]]]:
        """Return functions that make chunks of what is spilled, by part."""
        found = {name: spilled.chunks(ids, stored_bytes) for name, spilled in self._spilled.items()}
        return {name: chunks for name, chunks in found.items() if chunks is not None}

    def settle(self, rows: int | None = None) -> None:
        """Once the limit is exceeded, spill until an eighth of it is free. Called between batches.

        `rows`: the number of rows since the last call, which limits how much is spilled now; None: all at once.
        """
        for timers in self._timers:
            timers.settle()
        sizes = dict(self._sizes)
        limit = self._limit_bytes() if sizes else None
        if limit is None or sum(size.total for size in sizes.values()) <= limit:
            return
        pieces = len(sizes) + (rows or 0) // (SPILL_KEYS // 2)
        while sizes and (excess := sum(size.total for size in sizes.values()) - limit + limit // 8) > 0:
            name, size = max(sizes.items(), key=lambda item: item[1].total)
            if not self._spilled[name].spill(min(SPILL_KEYS, 1 + excess // size.each)):
                del sizes[name]
            pieces -= 1
            if rows is not None and not pieces:
                return


class EntrySize:
    """Estimates the bytes that the entries of a dict take, from a few of them."""

    def __init__(self, entries: Mapping[Any, Any]) -> None:
        self.entries = entries
        self.each = 1
        """The bytes per entry; at least 1."""
        self._measured_at = 0
        self._requests = 0

    @property
    def total(self) -> int:
        """The bytes of all entries, which are measured again when their number has changed by a quarter, and from time to
        time, since entries may grow.
        """
        number = len(self.entries)
        self._requests += 1
        if 4 * abs(number - self._measured_at) > self._measured_at or self._requests % MEASURED_EVERY == 0:
            self._measured_at = number
            newest = list(islice(reversed(self.entries.items()), SAMPLE))  # type: ignore[call-overload]  # of a dict
            self.each = max(1, sum(ENTRY_BYTES + sum(map(size_of, entry)) for entry in newest) // max(1, len(newest)))
        return number * self.each


class TimerSize:
    """Estimates the bytes that those timers of a queue take that can be spilled."""

    def __init__(self, queue: TimerQueue) -> None:
        self._queue = queue
        self.each = TIMER_BYTES

    @property
    def total(self) -> int:
        return self._queue.closed_timers * TIMER_BYTES


def size_of(value: Any, depth: int = DEPTH_MAX) -> int:
    """Return about the bytes that a value takes, with what it contains."""
    size = getsizeof(value)
    if not isinstance(value, (dict, list, tuple)) or not value or not depth:
        return size
    items: Iterator[Any] = iter(value.items() if isinstance(value, dict) else value)
    some = list(islice(items, SAMPLE))
    return size + sum(size_of(item, depth - 1) for item in some) * len(value) // len(some)
