"""Tracks which chunks of a checkpoint hold the entries of a dict, so that the next checkpoint stores only changes.

A chunk holds the entries of some keys as they were at its snapshot, including those that had been removed; it
supersedes what older chunks hold for the same keys. Chunks hold at most twice the number of current entries, and
are merged when there are many, so a changed entry is written only a few times. Entries may differ in size, so the
bytes of chunks are bounded as well.

Only the keys of chunks are kept in memory. A chunk that is not in a file of a completed checkpoint (because that
checkpoint failed, or because the chunk was so small that it is in the metadata) is stored again with the next one, with
its entries as they are then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

CHUNKS_MAX = 32
"""The number of chunks that are referred to before the newest of them are merged."""
BYTES_FACTOR = 4
"""Chunks take at most this many times the bytes that as many entries take in the largest chunk.

Large chunks are compressed and small ones are not: with a lower factor, entries of one size would be stored again
because of their bytes.
"""
LEAST_BYTES = 2**20
"""Chunks may exceed `BYTES_FACTOR` by this many bytes, which are too few to matter."""
LEAST_ROWS = 1_024
"""Chunks may exceed their limit by this many rows, which are too few to be worth removing."""

GONE: Final = object()
"""Marks the entry of a key that has been removed."""


@dataclass(frozen=True, slots=True)
class ChangelogSnapshot:
    """The entries of a snapshot."""

    stored: tuple[str, ...]
    """The ids of chunks that hold the entries missing in `entries`, oldest first."""
    chunk_id: str
    entries: Mapping[Any, Any]
    """The entries at the snapshot by key, or GONE: the content of the new chunk."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A chunk, and the keys that it covers."""

    chunk_id: str
    keys: list[Any]
    rows: int


class Changelog:
    """Tracks changes of the dict `entries`; `is_many_rows` means that an entry is a collection, stored as one row per
    item.

    Each entry that is set, or handed out to be changed in place, must also be put into `changed` by its key, and GONE
    for an entry that is removed: at any time `changed` agrees with `entries` on the keys that `changed` contains.
    """

    def __init__(self, entries: Mapping[Any, Any], *, is_many_rows: bool = False) -> None:
        self.changed: dict[Any, Any] = {}
        self._entries = entries
        self._is_many_rows = is_many_rows
        self._chunks: list[_Kept] = []
        self._rows_of_each: float | None = 1.0
        """The approximate number of rows per entry at rest; None if they have to be counted."""
        self._is_whole = True
        """The next chunk holds everything, so changes need not be tracked."""

    def settle(self) -> None:
        """Stop tracking changes if everything will be stored, or if more has changed than is held. Called between
        batches.
        """
        if self._is_whole or len(self.changed) > max(len(self._entries), LEAST_ROWS):
            self._is_whole = True
            self.changed.clear()

    def restored(self, chunk_id: str, keys: Iterable[Any], rows: int) -> None:
        """Record a chunk from which the entries were restored, after its rows were added; the oldest chunk comes first."""
        self._chunks.append(_Kept(chunk_id, list(keys), rows))
        self._is_whole = False
        self._rows_of_each = None
        self.changed.clear()

    def snapshot(
        self, new_id: Callable[[], str], stored_bytes: Callable[[str], int | None]
    ) -> ChangelogSnapshot | None:
        """Return what a snapshot has to hold, or None if that is nothing.

        `stored_bytes`: returns the size of a chunk in a file of a completed checkpoint, None if it is in none.
        """
        entries = self._entries
        older = self._older(stored_bytes) if entries and not self._is_whole else []
        taken = self.changed if older else dict(entries)
        self._chunks, self._is_whole, self.changed = older, not entries, {}
        if not entries:
            return None
        found = ChangelogSnapshot(tuple(chunk.chunk_id for chunk in older), new_id(), taken)
        if taken:
            rows = len(taken)
            if self._is_many_rows:
                rows = max(rows, self._rows([value for value in taken.values() if value is not GONE]))
            if not older:
                self._rows_of_each = self._rows(entries.values()) / len(entries)
            self._chunks.append(_Kept(found.chunk_id, list(taken), rows))
        return found

    def _older(self, stored_bytes: Callable[[str], int | None]) -> list[_Kept]:
        """Return the chunks to refer to; the keys of all others go into `changed`. Empty: everything is stored again."""
        kept: list[_Kept] = []
        sizes: dict[str, int] = {}
        for chunk in self._chunks:
            size = stored_bytes(chunk.chunk_id)
            if size is None:
                self._take(chunk)
            else:
                kept.append(chunk)
                sizes[chunk.chunk_id] = size
        # The other chunks hold only outdated entries. Without them, one large value that always changes is kept once.
        kept = [chunk for chunk in kept if not all(map(self.changed.__contains__, chunk.keys))]
        if self._is_large(kept, sizes):
            return []
        if len(kept) >= CHUNKS_MAX:
            first = _first_outgrown(kept, len(self.changed))
            if 4 * sum(len(chunk.keys) for chunk in kept[first:]) > len(self._entries):
                return []  # copying the whole dict is faster than selecting this many keys
            for chunk in kept[first:]:
                self._take(chunk)
            del kept[first:]
        if self._rows_of_each is None:
            self._rows_of_each = self._rows(self._entries.values()) / len(self._entries)
        rows = sum(chunk.rows for chunk in kept) + len(self.changed)
        return kept if rows <= 2 * self._rows_of_each * len(self._entries) + LEAST_ROWS else []

    def _take(self, chunk: _Kept) -> None:
        """Mark the keys of this chunk to be stored again."""
        entries = self._entries
        self.changed.update((key, entries.get(key, GONE)) for key in chunk.keys)

    def _is_large(self, chunks: Sequence[_Kept], sizes: Mapping[str, int]) -> bool:
        """Whether the chunks are so large that most of their bytes must be outdated: a few large entries that change
        often.
        """
        if not chunks:
            return False
        largest = max(chunks, key=lambda chunk: len(chunk.keys))
        expected = sizes[largest.chunk_id] / len(largest.keys) * len(self._entries)
        return sum(sizes[chunk.chunk_id] for chunk in chunks) > BYTES_FACTOR * expected + LEAST_BYTES

    def _rows(self, values: Collection[Any]) -> int:
        return sum(map(len, values)) if self._is_many_rows else len(values)


def _first_outgrown(chunks: Sequence[_Kept], rows: int) -> int:
    """Return the index of the oldest chunk that has no more rows than all newer chunks and the `rows` new rows
    together; the index of the last chunk if none has.
    """
    first = len(chunks) - 1
    for index in reversed(range(len(chunks))):
        if chunks[index].rows <= rows:
            first = index
        rows += chunks[index].rows
    return first
