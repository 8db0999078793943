"""Which chunks of a checkpoint hold the entries of a dict, so that the next one stores only what has changed.

A chunk holds the entries of some keys as they were at its snapshot, those that were gone by then included;
what an older chunk has of the same keys no longer counts. Chunks hold no more than twice the entries that
there are, and are merged when they become many: each entry that changes is written a few times in all.
Entries may differ in size, so their bytes are bounded as well.

Chunks are not kept in memory, only their keys. What has not come to be in a file of a completed checkpoint
(it failed, or was so small that it is in the metadata) goes into the next chunk, as it is then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

CHUNKS_MAX = 32
"""So many chunks are referred to before the newest of them are merged."""
BYTES_FACTOR = 4
"""Chunks take no more than so many times the bytes that as many entries take in the largest of them. Small chunks are
not compressed, large ones are: with less than this, entries of one size would be stored anew for their bytes."""
LEAST_BYTES = 2**20
"""And those much more: the bytes of so little do not matter."""
LEAST_ROWS = 1_024
"""With fewer rows than this there is nothing to save."""

GONE: Final = object()
"""In the place of the entry of a key that has none any more."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """Entries at a snapshot."""

    stored: tuple[str, ...]
    """The chunks that hold what is not in `entries`, oldest first."""
    chunk_id: str
    entries: Mapping[Any, Any]
    """By key, as they were, or GONE: what the chunk with that id is to hold."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A chunk, and of which keys it is."""

    chunk_id: str
    keys: list[Any]
    rows: int


class EntryLog:
    """Of the dict `entries`; `is_many_rows` where an entry is a collection, which is a row for each item at rest.

    Each entry that is set or handed out to be changed in place has to be put into `changed` too, by its key, and GONE for
    one that is removed: at any time `changed` has of its keys what `entries` has.
    """

    def __init__(self, entries: Mapping[Any, Any], *, is_many_rows: bool = False) -> None:
        self.changed: dict[Any, Any] = {}
        self._entries = entries
        self._is_many_rows = is_many_rows
        self._chunks: list[_Kept] = []
        self._rows_of_each: float | None = 1.0
        """At rest, about; None where that is to be counted."""
        self._is_whole = True
        """The next chunk holds everything: what has changed need not be known."""

    def settle(self) -> None:
        """Forget what has changed where everything will be stored, and once it is no less than that. Called between batches."""
        if self._is_whole or len(self.changed) > max(len(self._entries), LEAST_ROWS):
            self._is_whole = True
            self.changed.clear()

    def restored(self, chunk_id: str, keys: Iterable[Any], rows: int) -> None:
        """Of the chunks that the entries are restored from, the oldest first, after its rows were taken."""
        self._chunks.append(_Kept(chunk_id, list(keys), rows))
        self._is_whole = False
        self._rows_of_each = None
        self.changed.clear()

    def freeze(self, new_id: Callable[[], str], stored_bytes: Callable[[str], int | None]) -> Frozen | None:
        """What a snapshot has to hold; None where there is nothing.

        `stored_bytes`: how long a chunk is in a file of a completed checkpoint, None if it is in none.
        """
        entries = self._entries
        older = self._older(stored_bytes) if entries and not self._is_whole else []
        frozen = self.changed if older else dict(entries)
        self._chunks, self._is_whole, self.changed = older, not entries, {}
        if not entries:
            return None
        found = Frozen(tuple(chunk.chunk_id for chunk in older), new_id(), frozen)
        if frozen:
            rows = self._rows([value for value in frozen.values() if value is not GONE] if older else frozen.values())
            if not older:
                self._rows_of_each = rows / len(frozen)
            self._chunks.append(_Kept(found.chunk_id, list(frozen), max(rows, len(frozen))))
        return found

    def _older(self, stored_bytes: Callable[[str], int | None]) -> list[_Kept]:
        """The chunks that are still to be referred to; what all others are of is in `changed`. None: all is stored anew."""
        kept: list[_Kept] = []
        sizes: dict[str, int] = {}
        for chunk in self._chunks:
            size = stored_bytes(chunk.chunk_id)
            if size is None:
                self._take(chunk)
            else:
                kept.append(chunk)
                sizes[chunk.chunk_id] = size
        # of all that is in the others nothing counts any more: one large value that changes each time is there once
        kept = [chunk for chunk in kept if not all(key in self.changed for key in chunk.keys)]
        if self._is_large(kept, sizes):
            return []
        if len(kept) >= CHUNKS_MAX:
            first = _first_outgrown(kept, len(self.changed))
            if 4 * sum(len(chunk.keys) for chunk in kept[first:]) > len(self._entries):
                return []  # picking out so many keys would keep the loop for longer than a copy of the whole dict
            for chunk in kept[first:]:
                self._take(chunk)
            del kept[first:]
        if self._rows_of_each is None:
            self._rows_of_each = self._rows(self._entries.values()) / len(self._entries)
        rows = sum(chunk.rows for chunk in kept) + len(self.changed)
        return kept if rows <= 2 * self._rows_of_each * len(self._entries) + LEAST_ROWS else []

    def _take(self, chunk: _Kept) -> None:
        """What it is of is stored anew."""
        entries = self._entries
        self.changed.update((key, entries.get(key, GONE)) for key in chunk.keys)

    def _is_large(self, chunks: Sequence[_Kept], sizes: Mapping[str, int]) -> bool:
        """Whether they take so many bytes that much of that must be entries of before: a few large ones that change often."""
        if not chunks:
            return False
        largest = max(chunks, key=lambda chunk: len(chunk.keys))
        expected = sizes[largest.chunk_id] / len(largest.keys) * len(self._entries)
        return sum(sizes[chunk.chunk_id] for chunk in chunks) > BYTES_FACTOR * expected + LEAST_BYTES

    def _rows(self, values: Collection[Any]) -> int:
        return sum(map(len, values)) if self._is_many_rows else len(values)


def _first_outgrown(chunks: Sequence[_Kept], rows: int) -> int:
    """The oldest chunk that is no larger than all that is newer, `rows` that are in none yet included; or the last."""
    first = len(chunks) - 1
    for index in reversed(range(len(chunks))):
        if chunks[index].rows <= rows:
            first = index
        rows += chunks[index].rows
    return first
