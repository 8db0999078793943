"""Tables that are searched for all keys of a batch together; one of them has at most one row of each key.

Where most rows of a run are replaced between two checkpoints, they are overwritten in place. Where few are, they move to
another run, so that a checkpoint does not store all others of their run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np
import polars as pl

from midstream.engine.core.batches import frame_of, rows_at, selected, stacked
from midstream.engine.state.code_index import Index
from midstream.engine.state.key_order import KeyOrder
from midstream.engine.state.table_runs import (
    RUN_ROWS,
    TableRun,
    Values,
    codes_of,
    compacted,
    merged,
    numbers_of,
    stable_order,
)
from midstream.engine.state.table_state import TableMark, TableState
from midstream.engine.state.tombstones import Int64s

SETTLED: Final = 4
"""Short runs are merged once they have been searched for this many times as many codes as they have rows. Merging then
costs a fraction of the searches that it saves, and checkpoints seldom store the rows again.
"""


class OrderedTable(TableState):
    """A table that is searched for the keys of a `KeyOrder`, whose codes are sorted already."""

    _by_code: ClassVar[bool] = False
    """Whether merged runs are in the order of the codes of their keys; otherwise rows stay in the order of their addition."""

    def located(self, order: KeyOrder, *, once: bool = False) -> list[tuple[TableRun, Int64s, Int64s]]:
        """Return the runs that have rows of the keys, where, and the numbers of their keys.

        `once`: no key has several rows.
        """
        places: list[tuple[TableRun, Int64s, Int64s]] = []
        codes, missing = order.codes, np.arange(len(order.codes))
        for run in [] if order.meet else self._searchable():
            positions, at = run.located(codes, self._layout.keys)
            if not len(at):
                continue
            numbers = missing[at]
            if not (order.is_exact or order.are(numbers, run.rows_at(positions, self._layout.keys))):
                break
            places.append((run, positions, numbers))
            if once:
                is_missing = np.ones(len(codes), np.bool_)
                is_missing[at] = False
                codes, missing = codes[is_missing], missing[is_missing]
        else:
            if not order.meet:
                return places
        found = self._found(order.keys_of(np.arange(len(order.codes))))
        return [(run, at, order.numbers_of(run.rows_at(at, self._layout.keys))) for run, at in found]

    def append_of(self, order: KeyOrder, numbers: Int64s, columns: list[pl.Series]) -> None:
        """Add rows at the end. `numbers`: those of their keys, in ascending order; `columns`: the other ones."""
        if not len(numbers):
            return
        added = self._conforming(selected(frame_of([*order.keys_of(numbers), *columns]), self._empty.columns))
        index = None if order.meet else Index.of(order.codes[numbers], np.arange(len(numbers)))
        self._hold([*compacted(self._table_runs(), by_code=self._by_code), TableRun(added, index)])


class FoundRows(NamedTuple):
    """The rows of those keys of a `KeyOrder` that have one."""

    places: Sequence[tuple[TableRun, Int64s, Int64s]]
    """The runs that have the rows, where, and the numbers of their keys."""
    empty: pl.DataFrame
    """The columns of the rows, without their keys."""

    @property
    def numbers(self) -> Int64s:
        """The number of the key of each row."""
        return np.concatenate([np.empty(0, np.int64), *(numbers for _, _, numbers in self.places)])

    @property
    def rows(self) -> pl.DataFrame:
        """The rows, without their keys."""
        frames = [run.rows_at(positions, self.empty.columns) for run, positions, _ in self.places]
        return stacked(frames) if frames else self.empty

    def columns(self) -> Mapping[str, Values] | None:
        """Return the columns of the rows as arrays; None if one of them has others than numbers or times, or nulls."""
        names = self.empty.columns
        parts = [[each] for each in map(numbers_of, self.empty) if each is not None]
        if len(parts) < len(names):
            return None
        for run, positions, _ in self.places:
            found = run.numbers_at(positions, names)
            if found is None:
                return None
            for part, values in zip(parts, found, strict=True):
                part.append(values)
        return {name: np.concatenate(part) for name, part in zip(names, parts, strict=True)}


class RowPerKey(OrderedTable):
    """Rows are added by `replace` alone. Runs that have been merged or restored are in the order of the codes of their keys."""

    _by_code = True
    _searched = 0
    """How many codes the runs have been searched for since short ones were merged."""

    def find(self, order: KeyOrder) -> FoundRows:
        """Return the rows of the keys, which are replaced next."""
        return FoundRows(self.located(order, once=True), selected(self._empty, self._values))

    @property
    def _values(self) -> list[str]:
        """The columns that are not keys."""
        return [name for name in self._empty.columns if name not in self._layout.keys]

    def replace(self, order: KeyOrder, found: FoundRows, rows: pl.DataFrame) -> None:
        """Replace the rows that were found. `rows`: one for each key, in the order of their numbers, without their keys."""
        assert (rows.columns, rows.dtypes) == (found.empty.columns, found.empty.dtypes), rows.schema
        values = {column.name: numbers_of(column) for column in rows}
        numeric = {name: of for name, of in values.items() if of is not None}
        touched = {id(run): (positions, numbers) for run, positions, numbers in found.places}
        runs, is_moved = [], np.ones(rows.height, np.bool_)
        for run in self._table_runs():
            held = run
            if id(run) in touched:
                positions, numbers = touched[id(run)]
                written = run.overwritten(positions, numeric, numbers) if len(numeric) == len(values) else None
                if written is None:
                    run.remove(positions)
                else:
                    held, is_moved[numbers] = written, False
            if held.rows:
                runs.append(held.tidied())
        self._hold(self._settled(runs, len(order.codes)))
        if is_moved.all():
            self.append_of(order, np.arange(len(is_moved)), rows.get_columns())
        elif is_moved.any():
            moved = np.flatnonzero(is_moved)
            self.append_of(order, moved, rows_at(rows, moved).get_columns())

    def _settled(self, runs: list[TableRun], searched: int) -> list[TableRun]:
        """Merge short runs if they have been searched often. `compacted` does so only when rows of new keys are added."""
        self._searched += searched
        short = [run for run in runs if run.rows < RUN_ROWS]
        rows = sum(run.rows for run in short)
        if len(short) < 2 or rows > 2 * RUN_ROWS or self._searched < SETTLED * rows:
            return runs
        self._searched = 0
        return [*(run for run in runs if run.rows >= RUN_ROWS), merged(short, by_code=True)]

    def _hold_restored(self, whole: pl.DataFrame) -> None:
        codes, _ = codes_of(whole.select(self._layout.keys))
        super()._hold_restored(whole[stable_order(codes)])

    # ---- for the operator ----

    def mark(self) -> TableMark:
        for run in self._table_runs():
            run.living  # noqa: B018  # it is not overwritten any more
        return super().mark()
