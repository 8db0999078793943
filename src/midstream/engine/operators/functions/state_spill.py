"""Which entries of a process function's states are objects, and which are spilled to columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from sys import getsizeof
from typing import Any, Final, cast

from midstream.engine.core.interfaces import Ids
from midstream.engine.operators.base import OperatorContext
from midstream.engine.state.heap_snapshot import KeyEncoding
from midstream.engine.state.keyed_states import State
from midstream.engine.state.safe_pickle import OwnCode
from midstream.engine.state.spilled_entries import SpilledEntries, is_spillable
from midstream.engine.state.state_parts import Chunk

SPILL_KEYS: Final = 8_192
"""The largest number of entries that are spilled in one piece: a long enough run, within some 10 ms."""
SAMPLE: Final = 32
"""The number of entries, and of items of one entry, that are measured to estimate the size of all."""
DEPTH_MAX: Final = 4
ENTRY_BYTES: Final = 120
"""What an entry takes besides its key and its value: its places in the dict and in the changes since a checkpoint."""


class StateSpill:
    """Spills the entries of an operator's states while they take more than `limit_bytes` as objects; None: never.

    States stay objects whose values are pickled, or expire, or are of types that polars does not hold.
    """

    def __init__(
        self,
        states: Iterable[State],
        encoding: KeyEncoding,
        own: OwnCode,
        where: str,
        context: OperatorContext,
    ) -> None:
        self._limit_bytes = context.entry_bytes
        self._spilled: dict[str, SpilledEntries] = {}
        self._sizes: dict[str, EntrySize] = {}
        if self._limit_bytes is None:
            return
        keys = [field.name for field in encoding.flat_fields]
        for state in states:
            if is_spillable(state, encoding):
                spilled = SpilledEntries(state, encoding, own, where)
                bound = spilled.bound(state.name, keys, context.key_groups, context.max_parallelism)
                self._spilled[state.name] = cast("SpilledEntries", bound)
                self._sizes[state.name] = EntrySize(state.entries())

    def __bool__(self) -> bool:
        """Whether any entry is spilled."""
        return any(spilled.has_rows for spilled in self._spilled.values())

    def of(self, state: State) -> SpilledEntries | None:
        """Return the spilled entries of a state; None if it stays in memory."""
        return self._spilled.get(state.name)

    def fetch(self, keys: Sequence[Any]) -> None:
        """Move the entries of these keys into the dicts of their states, before the function is called for them."""
        for spilled in self._spilled.values():
            if spilled.has_rows:
                spilled.fetch(keys)

    def fetch_all(self) -> None:
        for spilled in self._spilled.values():
            spilled.fetch_all()

    def chunks(self, ids: Ids) -> dict[str, Callable[[], tuple[Chunk, ...]]]:
        """Return functions that make chunks of what is spilled, by state."""
        found = {name: spilled.chunks(ids) for name, spilled in self._spilled.items()}
        return {name: chunks for name, chunks in found.items() if chunks is not None}

    def settle(self, rows: int | None = None) -> None:
        """Once the limit is exceeded, spill until an eighth of it is free. Called between batches.

        `rows`: the number of rows since the last call, which limits how much is spilled now; None: all at once.
        """
        limit, sizes = self._limit_bytes, self._sizes
        if limit is None or not sizes or sum(size.total for size in sizes.values()) <= limit:
            return
        pieces = len(sizes) + (rows or 0) // (SPILL_KEYS // 2)
        while (excess := sum(size.total for size in sizes.values()) - limit + limit // 8) > 0:
            name, size = max(sizes.items(), key=lambda item: item[1].total)
            self._spilled[name].spill(list(islice(size.entries, min(SPILL_KEYS, 1 + excess // size.each))))
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

    @property
    def total(self) -> int:
        """The bytes of all entries, which are measured again when their number has changed by a quarter."""
        number = len(self.entries)
        if 4 * abs(number - self._measured_at) > self._measured_at:
            self._measured_at = number
            newest = list(islice(reversed(self.entries.items()), SAMPLE))  # type: ignore[call-overload]  # of a dict
            self.each = max(1, sum(ENTRY_BYTES + sum(map(size_of, entry)) for entry in newest) // max(1, len(newest)))
        return number * self.each


def size_of(value: Any, depth: int = DEPTH_MAX) -> int:
    """Return about the bytes that a value takes, with what it contains."""
    size = getsizeof(value)
    if not isinstance(value, (dict, list, tuple)) or not value or not depth:
        return size
    items: Iterator[Any] = iter(value.items() if isinstance(value, dict) else value)
    some = list(islice(items, SAMPLE))
    return size + sum(size_of(item, depth - 1) for item in some) * len(value) // len(some)
