"""The runs of a table: rows in the order in which they were added, found by their keys or by a time.

The index of a run is built at its first search, and kept when runs are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import polars as pl

from midstream.engine.state.tombstones import Bools, Int64s, TombstonedRun, UInt64s, found_in

RUN_ROWS: Final = 262_144
"""A run of this many rows is not merged any more: merging it would block everything else for more than some 50 ms."""
RUNS_MAX: Final = 4
"""The number of shorter runs above which they are merged.

Each run costs a lookup some 50 µs; more frequent merging would cost more per row.
"""
TIDY_ROWS: Final = 8_192
"""A run of at least this many rows is written again once half of them are removed. Shorter ones are merged soon."""
LAST_TICK: Final = np.iinfo(np.int64).max - 1
"""The end of time, in any unit: only what has been removed, or has no time, is later."""
_NEVER: Final = LAST_TICK + 1

_INSTANTS: Final = (pl.Date, pl.Datetime, pl.Duration, pl.Time)


class Index(NamedTuple):
    """The codes of the keys of a run, sorted, and the position of the row of each."""

    codes: UInt64s
    rows: Int64s
    is_distinct: bool
    """Whether no two rows have one code."""

    @classmethod
    def of(cls, codes: UInt64s, rows: Int64s) -> Index:
        return cls(codes, rows, not (codes[1:] == codes[:-1]).any())


class TableRun(TombstonedRun):
    """Rows that never change, of which some have been removed."""

    __slots__ = ("_index", "_times")

    def __init__(self, frame: pl.DataFrame, index: Index | None = None) -> None:
        super().__init__(frame)
        self._index = index
        """Built at the first search."""
        self._times: dict[str, tuple[Int64s, int]] = {}
        """By column of `pop_until`: when each row is due, and when the first one is."""

    def positions(self, codes: UInt64s, keys: Sequence[str]) -> Int64s:
        """Return the positions, in order, of all live rows whose keys have one of these codes, sorted and distinct."""
        if self._index is None:
            own, _ = codes_of(self.frame.select(keys))
            order = own.argsort(kind="stable")
            self._index = Index.of(own[order], order)
        index = self._index
        return self.living_of(np.sort(index.rows[found_in(index.codes, codes, is_distinct=index.is_distinct)]))

    def until(self, column: str, tick: int) -> Int64s:
        """Return the positions, in order, of all live rows that are due by `tick`."""
        if column not in self._times:
            times = self.frame.get_column(column).to_physical().fill_null(_NEVER).to_numpy().copy()
            if self.there is not None:
                times[~self.there] = _NEVER
            self._times[column] = times, int(times.min())
        times, first = self._times[column]
        return np.flatnonzero(times <= tick) if first <= tick else np.empty(0, np.int64)

    def remove(self, positions: Int64s) -> None:
        super().remove(positions)
        for column, (times, _) in self._times.items():
            times[positions] = _NEVER
            self._times[column] = times, int(times.min())

    def put_back(self, there: Bools | None, rows: int) -> None:
        super().put_back(there, rows)
        self._times.clear()

    @property
    def is_long(self) -> bool:
        """Whether the run is longer than those that merging makes."""
        return self.frame.height > 2 * RUN_ROWS

    def pieces(self) -> list[TableRun]:
        """Return this run, or shorter ones with its rows if it is long."""
        if not self.is_long:
            return [self]
        frame = self.living.frame
        return [TableRun(frame.slice(start, RUN_ROWS)) for start in range(0, frame.height, RUN_ROWS)]

    def tidied(self) -> TableRun:
        """Return a run without removed rows if there are many of them; otherwise this one."""
        return self if self.is_mostly_there or self.frame.height < TIDY_ROWS else merged([self])

    def living_index(self) -> Index | None:
        """Return the index of the live rows alone, with their positions among these."""
        if self._index is None or self.there is None:
            return self._index
        live = self.there[self._index.rows]
        rows = (np.cumsum(self.there) - 1)[self._index.rows[live]]
        return Index(self._index.codes[live], rows, self._index.is_distinct)


def merged(runs: Sequence[TableRun]) -> TableRun:
    """Return one run with the live rows of several, which follow each other."""
    frame = pl.concat([run.living.frame for run in runs], rechunk=True)
    indexes = [run.living_index() for run in runs]
    known = [index for index in indexes if index is not None]
    if len(known) < len(runs):
        return TableRun(frame)
    if len(runs) == 1:
        return TableRun(frame, known[0])
    starts = np.cumsum([0, *(run.rows for run in runs)])
    codes = np.concatenate([index.codes for index in known])
    rows = np.concatenate([index.rows + start for index, start in zip(known, starts, strict=False)])
    order = codes.argsort(kind="stable")  # takes little longer than a copy, since there are few places out of order
    return TableRun(frame, Index.of(codes[order], rows[order]))


def compacted(runs: Sequence[TableRun]) -> list[TableRun]:
    """Merge short runs if there are many, until each is more than twice as long as the next; long ones are then rarely
    merged.
    """
    if sum(run.rows < RUN_ROWS for run in runs) <= RUNS_MAX:
        return list(runs)
    together: list[list[TableRun]] = []
    rows = 0
    for run in reversed(runs):
        if together and rows < RUN_ROWS and run.rows <= min(2 * rows, RUN_ROWS - 1):
            together[-1].append(run)
            rows += run.rows
        else:
            together.append([run])
            rows = run.rows
    return [group[0] if len(group) == 1 else merged(group[::-1]) for group in reversed(together)]


def codes_of(keys: pl.DataFrame) -> tuple[UInt64s, bool]:
    """Return a number for each key, and whether different keys have different ones; equal keys have the same."""
    if keys.width == 1:
        column = keys.to_series()
        if column.dtype.is_integer() or column.dtype in _INSTANTS:
            whole = column.to_physical()
            signed = whole.reinterpret(signed=True) if whole.dtype == pl.UInt64 else whole.cast(pl.Int64)
            return signed.to_numpy().view(np.uint64), True
    return keys.hash_rows(0).to_numpy(), False
