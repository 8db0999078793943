"""A table with at most one row of each key, which are found and replaced together.

Where most rows of a run are replaced between two checkpoints, they are overwritten in place. Where few are, they move to
another run, so that a checkpoint does not store all others of their run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from midstream.engine.state.key_order import KeyOrder, are_same
from midstream.engine.state.table_runs import Index, TableRun, compacted, numbers_of
from midstream.engine.state.table_state import TableMark, TableState
from midstream.engine.state.tombstones import Int64s


class Found(NamedTuple):
    """The rows of those keys of a `KeyOrder` that have one."""

    numbers: Int64s
    """The number of the key of each row."""
    rows: pl.DataFrame
    """The rows, without their keys."""
    places: Sequence[tuple[TableRun, Int64s, Int64s]]
    """The runs that have the rows, where, and the numbers of their keys; without any, the rows have been removed."""


class RowPerKey(TableState):
    """Rows are added by `replace` alone."""

    def find(self, order: KeyOrder) -> Found:
        """Return the rows of the keys, which are replaced next."""
        if order.meet:
            return self._taken(order)
        codes, missing = order.codes, np.arange(len(order.codes))
        places: list[tuple[TableRun, Int64s, Int64s]] = []
        for run in self._searchable():
            positions, at = run.located(codes, self._layout.keys)
            if not len(at):
                continue
            numbers = missing[at]
            if not (order.is_exact or self._have_keys(run, positions, order, numbers)):
                return self._taken(order)
            places.append((run, positions, numbers))
            is_missing = np.ones(len(codes), np.bool_)
            is_missing[at] = False
            codes, missing = codes[is_missing], missing[is_missing]
        if not places:
            return Found(missing[:0], self._empty.select(self._values), places)
        rows = pl.concat([run.rows_at(positions, self._values) for run, positions, _ in places], rechunk=False)
        return Found(np.concatenate([numbers for _, _, numbers in places]), rows, places)

    @property
    def _values(self) -> list[str]:
        """The columns that are not keys."""
        return [name for name in self._empty.columns if name not in self._layout.keys]

    def _have_keys(self, run: TableRun, positions: Int64s, order: KeyOrder, numbers: Int64s) -> bool:
        """Whether the rows have the keys with these numbers, and not just their hashes."""
        if (numbers[1:] == numbers[:-1]).any():
            return False
        return are_same(run.rows_at(positions, self._layout.keys), order.keys_of(numbers).select(self._layout.keys))

    def _taken(self, order: KeyOrder) -> Found:
        """Remove the rows of the keys; for keys that share a hash."""
        requested = order.keys_of(np.arange(len(order.codes)))
        rows, number = self.pop(requested), "".join(requested.columns) + "_"  # the name of no key column
        numbered = requested.with_row_index(number)
        numbers = rows.join(numbered, on=requested.columns, how="left", maintain_order="left").get_column(number)
        return Found(numbers.to_numpy().astype(np.int64), rows.select(self._values), ())

    def replace(self, order: KeyOrder, found: Found, rows: pl.DataFrame) -> None:
        """Replace the rows that were found. `rows`: one for each key, in the order of their numbers, without their keys."""
        assert rows.schema == self._empty.select(self._values).schema, rows.schema
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
        moved = np.flatnonzero(is_moved)
        if len(moved):
            added = self._conforming(order.keys_of(moved).hstack(rows[moved]).select(self._empty.columns))
            index = None if order.meet else Index(order.codes[moved], np.arange(len(moved)), is_distinct=True)
            runs = [*compacted(runs), TableRun(added, index)]
        self._hold(runs)

    # ---- for the operator ----

    def mark(self) -> TableMark:
        for run in self._table_runs():
            run.living  # noqa: B018  # it is not overwritten any more
        return super().mark()
