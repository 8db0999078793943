"""Runs of rows of which some have been removed: these are only marked, since a snapshot may refer to the run.

Once a run is stored, a snapshot refers to its chunk, and stores which rows have been removed since: their positions, in
deletion vectors. A few vectors are merged into one, so that a run has few of them and each position is written a few times
at most; the run itself is written again once half of its rows have been removed.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import rows_where
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.interfaces import Ids
from midstream.engine.state.columnar import Columns, FrameRun
from midstream.engine.state.state_parts import REMOVED, Chunk, WholeChunk

VECTOR_ROWS_MIN: Final = 1_024
"""A deletion vector with fewer positions is merged with the next one: it takes little more than its place in a file."""

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]


Removal: TypeAlias = "tuple[Bools | None, Bools]"
"""Which rows of a run were live, before and after some were removed; None for all."""


class DeletionVector:
    """The positions of `rows` removed rows of a run, as a chunk. They are computed when the chunk is first made."""

    __slots__ = ("_found", "chunk_id", "rows")

    def __init__(self, chunk_id: str, rows: int, found: tuple[DeletionVector | Removal, ...]) -> None:
        self.chunk_id = chunk_id
        self.rows = rows
        self._found: tuple[DeletionVector | Removal, ...] | UInt32s = found
        """What the positions follow from, and then these, in ascending order."""

    @classmethod
    def restored(cls, chunk: Chunk) -> DeletionVector:
        vector = cls(chunk.id, chunk.stored.num_rows, ())
        vector._found = chunk.stored.column(0).to_numpy()
        return vector

    def positions(self) -> UInt32s:
        found = self._found
        if isinstance(found, tuple):
            each = [of.positions() if isinstance(of, DeletionVector) else _removed(*of) for of in found]
            found = np.sort(np.concatenate(each))
            if len(found) != self.rows:
                raise InvariantError(f"deletion vector {self.chunk_id} has {len(found)} positions, not {self.rows}")
            self._found = found
        return found

    def chunk(self) -> Chunk:
        return Chunk(self.chunk_id, pa.Table.from_arrays([pa.array(self.positions())], schema=REMOVED))


def _removed(before: Bools | None, after: Bools) -> UInt32s:
    return np.flatnonzero(~after if before is None else before & ~after).astype(np.uint32)


class TombstonedRun(FrameRun):
    """A frame of which `rows` rows are live; the others have been removed."""

    __slots__ = ("_living", "_stored", "_vectors", "there")

    def __init__(self, frame: pl.DataFrame) -> None:
        super().__init__(frame)
        self.there: Bools | None = None
        """Which rows are live, or None for all; never changed in place, since snapshots refer to it."""
        self._living: LivingRun | None = None
        self._stored: tuple[Bools | None, int] = None, self.rows
        """Which rows, and how many, were live at the last snapshot."""
        self._vectors: tuple[DeletionVector, ...] = ()
        """Those of the last snapshot: each has more positions than the next."""

    def living_of(self, positions: Int64s) -> Int64s:
        """Return those of the positions whose rows are live."""
        return positions if self.there is None else positions[self.there[positions]]

    def remove(self, positions: Int64s) -> None:
        """Remove rows, which are live and distinct."""
        there = np.ones(self.height, np.bool_) if self.there is None else self.there.copy()
        there[positions] = False
        self.there, self._living = there, None
        self.rows -= len(positions)

    def restore(self, whole: WholeChunk) -> None:
        """The run has the rows of this chunk. Those that do not belong to the subtask are removed, so that the next
        snapshot stores their positions.
        """
        self.chunk_id, self.groups = whole.id, whole.groups
        self._vectors = tuple(map(DeletionVector.restored, whole.removed))
        self._stored = whole.left, self.height - sum(vector.rows for vector in self._vectors)
        self.there = whole.kept
        self.rows = self.height if whole.kept is None else int(np.count_nonzero(whole.kept))

    def put_back(self, there: Bools | None, rows: int) -> None:
        """Undo the removals since the run had these rows."""
        self.there, self.rows, self._living = there, rows, None
        if rows > self._stored[1]:  # a snapshot has what is undone
            self._stored, self._vectors = (None, self.height), ()

    def deletion_vectors(self, ids: Ids) -> tuple[DeletionVector, ...]:
        """Return what has been removed, for a snapshot: what those before it had, and a vector of the rest."""
        there, (before, rows_before) = self.there, self._stored
        if there is not None and there is not before:
            kept, rows = list(self._vectors), rows_before - self.rows
            found: list[DeletionVector | Removal] = [(before, there)]
            while kept and kept[-1].rows <= max(rows, VECTOR_ROWS_MIN):
                rows += kept[-1].rows
                found.insert(0, kept.pop())
            self._vectors = *kept, DeletionVector(ids.new_id(), rows, tuple(found))
            self._stored = there, self.rows
        return self._vectors

    @property
    def height(self) -> int:
        """The number of rows, with those that have been removed."""
        return self.frame.height

    @property
    def is_mostly_there(self) -> bool:
        """Whether more than half of the rows are live."""
        return 2 * self.rows > self.height

    @property
    def living(self) -> FrameRun:
        """The live rows; the same object until they change."""
        if self.there is None:
            return self
        if self._living is None:
            self._living = LivingRun(self.frame, self.there, self.rows)
        return self._living

    def move(self, columns: Columns) -> None:
        super().move(columns)
        if self._living is not None:
            self._living.follow(self.frame)


class LivingRun(FrameRun):
    """Some rows of a frame, selected on first access; if the frame lies on disk, on each access."""

    __slots__ = ("_is_kept", "_of", "_picked", "_there")

    def __init__(self, of: pl.DataFrame, there: Bools, rows: int) -> None:
        self._of, self._there, self.rows = of, there, rows
        self._picked: pl.DataFrame | None = None
        self._is_kept = True
        self.chunk_id = self.groups = None

    @property
    def frame(self) -> pl.DataFrame:  # type: ignore[override]  # it is never assigned
        picked = self._picked  # read once: `follow` may drop it while the I/O pool is here
        if picked is None:
            picked = rows_where(self._of, self._there)
            self._picked = picked if self._is_kept else None
        return picked

    def follow(self, of: pl.DataFrame) -> None:
        """Select the rows from an equal frame, which lies on disk, from now on."""
        self._is_kept = False
        self._of, self._picked = of, None


def distinct(codes: UInt64s) -> UInt64s:
    """Return the distinct codes, sorted. Several times as fast as `np.unique`, which builds a hash table."""
    codes = np.sort(codes)
    is_new = np.concatenate(([True], codes[1:] != codes[:-1]))
    return codes[is_new] if len(codes) else codes


def found_in(held: UInt64s, requested: UInt64s, *, is_distinct: bool = False) -> tuple[Int64s, Int64s]:
    """Return the positions in `held` of all values that are among `requested`, and the position of each in `requested`.

    Both are sorted; `requested` are distinct, and so are those of `held` with `is_distinct`.
    """
    if not len(held) or not len(requested):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if len(requested) > len(held):
        at = np.minimum(requested.searchsorted(held), len(requested) - 1)
        positions = np.flatnonzero(requested[at] == held)
        return positions, at[positions]
    after = held.searchsorted(requested, "left")
    numbers = np.flatnonzero(held[np.minimum(after, len(held) - 1)] == requested)
    begins: Int64s = after[numbers]
    if is_distinct:
        return begins, numbers
    counts = held.searchsorted(requested[numbers], "right") - begins
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(begins - before, counts), np.repeat(numbers, counts)
