"""Parts indexed by key and end time, so that the parts of a few keys, or those that are due, are looked up.

Parts lie in runs in the order in which they were made. A run is sorted by a hash of the key, so binary searches find
all parts of a key. Removing parts only marks them; a run is rewritten once half of its parts are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np
import polars as pl

from midstream.engine.core.batches import rows_at, selected, stacked
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.state.columnar import Columns, Merge
from midstream.engine.state.table_runs import among, hashes_of
from midstream.engine.state.tombstones import Int64s, TombstonedRun, UInt64s, distinct, found_in

RUNS_MAX: Final = 12
"""The number of runs above which they are merged.

Each run costs a lookup some 50 µs; more frequent merging would cost some µs per row each time.
"""

RUN_ROWS: Final = 131_072
"""A run of this many rows, with those that have been removed, is not merged any more: that would block everything else."""

_GONE: Final = np.iinfo(np.int64).max


class IndexedRun(TombstonedRun):
    """Parts sorted by `hashes`, and the end time of each."""

    __slots__ = ("ends", "first_end", "hashes")

    def __init__(self, frame: pl.DataFrame, hashes: UInt64s, ends: Int64s) -> None:
        """Sort parts by hash; rows of one key stay in their order. Sorting rows that are nearly sorted costs little
        more than a copy.
        """
        order = hashes.argsort(kind="stable")
        super().__init__(rows_at(frame, order))
        self.hashes, self.ends = hashes[order], ends[order]
        self.first_end = int(self.ends.min())
        """No live row ends before this."""

    def columns(self) -> Columns:
        return *super().columns(), self.hashes  # `ends` are overwritten

    def move(self, columns: Columns) -> None:
        *columns_of_all, hashes = columns
        super().move(tuple(columns_of_all))
        self.hashes = cast("UInt64s", hashes)

    def positions(self, hashes: UInt64s) -> Int64s:
        """Return the positions of all live rows with one of these hashes, which are sorted and distinct."""
        return self.living_of(found_in(self.hashes, hashes)[0])

    def ended(self, until: int) -> Int64s:
        """Return the positions of the live rows that end by `until`."""
        if self.first_end > until:
            return np.empty(0, np.int64)
        return self.living_of(np.flatnonzero(self.ends <= until))

    def remove(self, positions: Int64s) -> None:
        super().remove(positions)
        self.ends[positions] = _GONE
        self.first_end = int(self.ends.min())

    def tidied(self) -> IndexedRun:
        """Return a run without removed rows if at least half of them are; otherwise this one."""
        if self.there is None or self.is_mostly_there:
            return self
        return IndexedRun(self.living.frame, self.hashes[self.there], self.ends[self.there])


class SessionIndex:
    """Parts with the columns `keys` and `end`, int64. `merge` reduces frames of parts to as few parts as possible."""

    def __init__(self, keys: Sequence[str], end: str, merge: Merge) -> None:
        self._keys = tuple(keys)
        self._end = end
        self._merge = merge
        self.runs: list[IndexedRun] = []

    @property
    def first_end(self) -> int:
        """No part ends before this."""
        return min((run.first_end for run in self.runs), default=MAX_WATERMARK_US)

    def append(self, parts: pl.DataFrame) -> None:
        """Append parts after all others. Call `compact` later, once it is certain that some of them stay."""
        if parts.height:
            self.runs.append(self._indexed(parts))

    def keys_of_ended(self, after: int, until: int, again_until: int) -> pl.DataFrame | None:
        """Return the distinct keys of the parts that end after `after` and by `until`, or by `again_until`; None if
        none do.
        """
        found = []
        for run in self.runs:
            positions = run.ended(until)
            ends = run.ends[positions]
            positions = positions[(ends > after) | (ends <= again_until)]
            if len(positions):
                found.append(rows_at(selected(run.frame, self._keys), positions))
        return stacked(found).unique(maintain_order=True) if found else None

    def take(self, keys: pl.DataFrame) -> pl.DataFrame | None:
        """Remove and return all parts of these keys, in the order in which they were made."""
        hashes = distinct(self._hashes(keys))
        found = [(run, run.positions(hashes)) for run in self.runs]
        found = [(run, positions) for run, positions in found if len(positions)]
        if not found:
            return None
        parts = stacked([rows_at(run.frame, positions) for run, positions in found])
        rows = among(selected(parts, self._keys), selected(keys, self._keys))
        start = 0
        for run, positions in found:
            end = start + len(positions)
            if len(rows) < parts.height:  # other keys have the same hash
                positions = positions[rows[rows.searchsorted(start) : rows.searchsorted(end)] - start]
            if len(positions):
                run.remove(positions)
            start = end
        self._tidy()
        if not len(rows):
            return None
        return parts if len(rows) == parts.height else rows_at(parts, rows)

    def remove_ended(self, until: int) -> None:
        for run in self.runs:
            positions = run.ended(until)
            if len(positions):
                run.remove(positions)
        self._tidy()

    def compact(self) -> None:
        """If there are many short runs, merge until each is more than twice as long as the next; long ones are then rarely
        merged.
        """
        if sum(run.height < RUN_ROWS for run in self.runs) <= RUNS_MAX:
            return
        together: list[list[IndexedRun]] = []
        rows = 0
        for run in reversed(self.runs):
            if together and max(rows, run.height) < RUN_ROWS and run.rows <= 2 * rows:
                together[-1].append(run)
                rows += run.rows
            else:
                together.append([run])
                rows = run.rows
        self.runs = [
            runs[0] if len(runs) == 1 else self._indexed(self._merge([run.living.frame for run in reversed(runs)]))
            for runs in reversed(together)
        ]

    def _tidy(self) -> None:
        """Drop empty runs, and write one again of which most rows are removed: all together could take long."""
        self.runs = [run for run in self.runs if run.rows]
        for number, run in enumerate(self.runs):
            if not run.is_mostly_there:
                self.runs[number] = run.tidied()
                return

    def _indexed(self, parts: pl.DataFrame) -> IndexedRun:
        return IndexedRun(parts, self._hashes(parts), parts.get_column(self._end).to_numpy())

    def _hashes(self, frame: pl.DataFrame) -> UInt64s:
        return hashes_of(selected(frame, self._keys))
