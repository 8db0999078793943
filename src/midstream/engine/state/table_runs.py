"""The runs of a table: rows in the order in which they were added, found by their keys or by a time.

The index of a run is built at its first search, and kept when runs are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import polars as pl

from midstream.engine.core.batches import frame_of, index_of, rows_at, stacked
from midstream.engine.state.code_index import Index
from midstream.engine.state.columnar import Columns, FrameRun
from midstream.engine.state.tombstones import Bools, Int64s, TombstonedRun, UInt64s

Values: TypeAlias = npt.NDArray[Any]

RUN_ROWS: Final = 262_144
"""A run of this many rows is not merged any more: merging it would block everything else for more than some 50 ms."""
RUNS_MAX: Final = 4
"""The number of shorter runs above which they are merged.

Each run costs a lookup some 50 µs; more frequent merging would cost more per row.
"""
TIDY_ROWS: Final = 8_192
"""A run of at least this many rows is written again once half of them are removed. Shorter ones are merged soon."""
SPARSE: Final = 4
"""A run is overwritten in place if at least one in this many of its rows changes between two checkpoints."""
RADIX_ROWS_MIN: Final = 2_048
"""Fewer codes are sorted faster by comparing them."""
LAST_TICK: Final = np.iinfo(np.int64).max - 1
"""The end of time, in any unit: only what has been removed, or has no time, is later."""
_NEVER: Final = LAST_TICK + 1

_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
"""Multiplies the hash of one column before that of the next is added, so that values that change places have another hash."""

_NUMBERS: Final = frozenset(
    (
        *(pl.Int8(), pl.Int16(), pl.Int32(), pl.Int64(), pl.UInt8(), pl.UInt16(), pl.UInt32(), pl.UInt64()),
        *(pl.Float32(), pl.Float64()),
    )
)
_INSTANTS: Final = (pl.Date, pl.Datetime, pl.Duration, pl.Time)


class TableRun(TombstonedRun):
    """Rows of which some have been removed. They do not change; only columns of numbers may be overwritten until the
    frame is read.
    """

    __slots__ = ("_frame", "_index", "_is_of_one_key", "_is_sparse", "_times", "_values", "_written")

    _frame: pl.DataFrame
    """The rows, except for `_values`."""
    _values: dict[str, Values] | None
    """The columns that are overwritten in place, if the frame has not been read since."""
    _written: Bools
    """Which rows have been overwritten since."""

    def __init__(self, frame: pl.DataFrame, index: Index | None = None) -> None:
        super().__init__(frame)
        self._index = index
        """Built at the first search."""
        self._times: dict[str, tuple[Int64s, int]] = {}
        """By column of `pop_until`: when each row is due, and when the first one is."""
        self._is_of_one_key = False
        """Whether the run is long, and cannot be cut."""
        self._is_sparse = False
        """Whether few rows were overwritten before the frame was last read, which is at least once per checkpoint."""

    def held_again(self) -> TableRun:
        """Return a run of the same rows, none of them removed, for another attempt."""
        return TableRun(self.frame, self._index)

    @property
    def frame(self) -> pl.DataFrame:
        """The rows. Whatever reads them may keep them, so that only a copy of the run is overwritten afterwards."""
        if self._values is not None:
            made = [pl.Series(name, of).cast(self._frame.schema[name]) for name, of in self._values.items()]
            self._frame = self._frame.with_columns(made)
            self._is_sparse = SPARSE * int(self._written.sum()) < self.rows
            self._values = None
        return self._frame

    @frame.setter
    def frame(self, frame: pl.DataFrame) -> None:
        self._frame = frame
        self._values = None

    @property
    def height(self) -> int:
        return self._frame.height

    @property
    def living(self) -> FrameRun:
        self.frame  # noqa: B018  # a snapshot reads it later
        return super().living

    def columns(self) -> Columns:
        if self._values is not None:
            return ()
        if self._index is None:
            return self._frame, self.groups, None, None
        return self._frame, self.groups, self._index.codes, self._index.rows

    def move(self, columns: Columns) -> None:
        *columns_of_all, codes, rows = columns
        super().move(tuple(columns_of_all))
        if self._index is not None:
            moved = cast("tuple[UInt64s, Int64s]", (codes, rows))
            self._index = Index(*moved, self._index.is_distinct)

    def rows_at(self, positions: Int64s, names: Sequence[str] | None = None) -> pl.DataFrame:
        """Return some rows, or those of their columns `names`, without reading the frame."""
        values: dict[str, Values] = self._values or {}
        columns, index = [], index_of(positions)
        for name in names or self._frame.columns:
            column = self._frame.get_column(name)
            columns.append(typed(column, values[name][positions]) if name in values else column[index])
        return frame_of(columns)

    def numbers_at(self, positions: Int64s, names: Sequence[str]) -> list[Values] | None:
        """Return columns of some rows; None if one of them has others than numbers or times, or nulls."""
        values: dict[str, Values] = self._values or {}
        columns = [values[name] if name in values else numbers_of(self._frame.get_column(name)) for name in names]
        known = [column for column in columns if column is not None]
        return [column[positions] for column in known] if len(known) == len(columns) else None

    def positions(self, codes: UInt64s, keys: Sequence[str]) -> Int64s:
        """Return the positions, in order, of all live rows whose keys have one of these codes, sorted and distinct."""
        return np.sort(self.located(codes, keys)[0])

    def located(self, codes: UInt64s, keys: Sequence[str]) -> tuple[Int64s, Int64s]:
        """Return the positions of all live rows whose keys have one of these codes, sorted and distinct, and the number
        of each one's code, in ascending order.
        """
        if self._index is None:
            own, _ = codes_of(self._frame.select(keys))
            order = stable_order(own)
            self._index = Index.of(own[order], order)
        positions, numbers = self._index.find(codes)
        if self.there is None:
            return positions, numbers
        is_live = self.there[positions]
        return positions[is_live], numbers[is_live]

    def overwritten(self, positions: Int64s, values: Mapping[str, Values], numbers: Int64s) -> TableRun | None:
        """Overwrite the columns `values` at these positions with those at `numbers`.

        Return the run that has them: this one, unless its frame has been read. Return None if they cannot be overwritten,
        or should not: if few rows of a run change, they are better moved to another run, so that checkpoints do not store
        the others again.
        """
        run = self if self._values is not None else self._copy(values)
        if run is None or run._values is None:
            return None
        for name, of in run._values.items():
            of[positions] = values[name][numbers]
        run._written[positions] = True
        for column, (times, _) in run._times.items():
            if column in values:
                times[positions] = values[column][numbers]
                run._times[column] = times, int(times.min())
        return run

    def _copy(self, columns: Iterable[str]) -> TableRun | None:
        """Return a run of the same rows of which these columns can be overwritten, if they are numbers."""
        if self._is_sparse:
            return None
        values = {}
        for name in columns:
            of = numbers_of(self._frame.get_column(name))
            if of is None:
                return None
            values[name] = of.copy()
        run = TableRun(self._frame, self._index)
        run._values = values
        run._written = np.zeros(self.height, np.bool_)
        run._times = {column: (times.copy(), first) for column, (times, first) in self._times.items()}
        run.there, run.rows, run.groups = self.there, self.rows, self.groups
        return run

    def until(self, column: str, tick: int) -> Int64s:
        """Return the positions, in order, of all live rows that are due by `tick`."""
        return np.flatnonzero(self.times(column) <= tick) if self.first(column) <= tick else np.empty(0, np.int64)

    def first(self, column: str) -> int:
        """Return when the first live row is due; the largest int64 if none is."""
        self.times(column)
        return self._times[column][1]

    def times(self, column: str) -> Int64s:
        """Return when each row is due; the largest int64 for those that are removed, or never due."""
        if column not in self._times:
            due = physical(self.frame.get_column(column))
            times = (due.fill_null(_NEVER) if due.null_count() else due).to_numpy().copy()
            if self.there is not None:
                times[~self.there] = _NEVER
            self._times[column] = times, int(times.min())
        return self._times[column][0]

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
        """Whether the run is longer than those that merging makes, and can be cut."""
        return self.height > 2 * RUN_ROWS and not self._is_of_one_key

    def pieces(self, keys: Sequence[str] | None = None) -> list[TableRun]:
        """Return this run, or shorter ones with its rows if it is long.

        `keys`: the columns of keys whose rows follow each other, and stay in one run; None if they need not.
        """
        if not self.is_long:
            return [self]
        frame = self.living.frame
        starts = np.arange(0, frame.height, RUN_ROWS)
        if not frame.height:
            return []
        if keys is not None:
            codes, _ = codes_of(frame.select(keys))
            firsts = np.append(0, np.flatnonzero(codes[1:] != codes[:-1]) + 1)
            starts = np.unique(firsts[np.searchsorted(firsts, starts, "right") - 1])
            if len(starts) == 1:
                self._is_of_one_key = True
                return [self]
        ends = [*starts[1:].tolist(), frame.height]
        return [TableRun(frame.slice(start, end - start)) for start, end in zip(starts.tolist(), ends, strict=True)]

    def tidied(self) -> TableRun:
        """Return a run without removed rows if there are many of them; otherwise this one."""
        return self if self.is_mostly_there or self.height < TIDY_ROWS else merged([self])

    def living_index(self) -> Index | None:
        """Return the index of the live rows alone, with their positions among these."""
        if self._index is None or self.there is None:
            return self._index
        live = self.there[self._index.rows]
        rows = (np.cumsum(self.there) - 1)[self._index.rows[live]]
        return Index(self._index.codes[live], rows, self._index.is_distinct)


def merged(runs: Sequence[TableRun], *, by_code: bool = False) -> TableRun:
    """Return one run with the live rows of several, which follow each other.

    `by_code`: with the rows in the order of their codes, if these are known. Then the rows of a sorted batch of keys are
    read and written in the order in which they lie in memory.
    """
    frame = stacked([run.living.frame for run in runs])
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
    if by_code:
        return TableRun(rows_at(frame, rows[order]), Index.of(codes[order], np.arange(len(rows))))
    return TableRun(frame, Index.of(codes[order], rows[order]))


def compacted(runs: Sequence[TableRun], *, by_code: bool = False) -> list[TableRun]:
    """Merge short runs if there are many, until each is more than twice as long as the next; long ones are then rarely
    merged. `by_code`: as for `merged`.
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
    return [group[0] if len(group) == 1 else merged(group[::-1], by_code=by_code) for group in reversed(together)]


def run_frames(frames: Iterable[pl.DataFrame]) -> list[pl.DataFrame]:
    """Join consecutive frames that are short, and copy no others: they may lie on disk."""
    together: list[list[pl.DataFrame]] = []
    rows = 0
    for frame in frames:
        if together and rows + frame.height <= RUN_ROWS:
            together[-1].append(frame)
            rows += frame.height
        elif frame.height:
            together.append([frame])
            rows = frame.height
    return [group[0] if len(group) == 1 else pl.concat(group, rechunk=True) for group in together]


def codes_of(keys: pl.DataFrame) -> tuple[UInt64s, bool]:
    """Return a number for each key, and whether different keys have different ones; equal keys have the same."""
    if keys.width == 1:
        column = keys.to_series()
        if column.dtype.is_integer() or column.dtype in _INSTANTS:
            whole = physical(column).to_numpy()
            return whole.astype(np.int64, copy=False).view(np.uint64), True
    return hashes_of(keys), False


def hashes_of(keys: pl.DataFrame) -> UInt64s:
    """Return a hash of each row, the same in any frame. That of whole frames would be computed by a thread of polars."""
    first, *others = (hashes.to_numpy() for hashes in keys.select_seq(pl.all().hash(0)).iter_columns())
    for other in others:
        first = first * _ODD + other
    return first


def among(rows: pl.DataFrame, keys: pl.DataFrame) -> Int64s:
    """Return the positions, in order, of the rows whose keys are among `keys`. Both have the key columns alone."""
    wanted = hashes_of(keys)
    order = wanted.argsort(kind="stable")
    at = wanted[order].searchsorted(hashes_of(rows))
    found = rows_at(keys, order[np.minimum(at, len(order) - 1)])
    if all(bool((own == other).all()) for own, other in zip(rows, found, strict=True)):
        return np.arange(rows.height)
    number = "".join(keys.columns) + "_"  # the name of no key column
    some = rows.with_row_index(number).join(keys, on=keys.columns, how="semi", maintain_order="left")
    return some.get_column(number).to_numpy().astype(np.int64)


def stable_order(codes: UInt64s) -> Int64s:
    """Return the positions of the codes in ascending order, those of equal codes in their order.

    Codes of 16 bits are counted, not compared, so that a few rounds of 16 bits take a fraction of the time of one sort.
    """
    if len(codes) < RADIX_ROWS_MIN:
        return codes.argsort(kind="stable")
    rest = codes - codes.min()
    bits = int(rest.max()).bit_length()
    order: Int64s = rest.astype(np.uint16).argsort(kind="stable")
    for shift in range(16, bits, 16):
        order = order[(rest >> np.uint64(shift)).astype(np.uint16)[order].argsort(kind="stable")]
    return order


def numbers_of(column: pl.Series) -> Values | None:
    """Return the values of a column of numbers or times; None if it has others, or nulls."""
    if column.null_count():
        return None
    if column.dtype not in _NUMBERS and not column.dtype.is_temporal():
        return None
    return physical(column).to_numpy()


def typed(column: pl.Series, values: Values) -> pl.Series:
    """Return a column with the name and the type of `column`, which has the physical type of `values`."""
    made = pl.Series(column.name, values)
    return made if made.dtype == column.dtype else made.cast(column.dtype)


def physical(column: pl.Series) -> pl.Series:
    """Return a column of numbers as it is, and one of times as integers: `to_physical` takes 50 µs however few there are."""
    if column.dtype in _NUMBERS:
        return column
    if column.dtype.is_temporal():
        return column.cast(pl.Int32 if column.dtype == pl.Date else pl.Int64)
    return column.to_physical()
