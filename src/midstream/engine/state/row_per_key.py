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
    places: Sequence[tuple[TableRun, Int64s, Int64s]]
    """The runs that have the rows, where, and the numbers of their keys; without any, the rows have been removed."""


class RowPerKey(TableState):
    """Rows are added by `replace` alone."""

    def find(self, order: KeyOrder) -> Found:
        """Return the rows of the keys, which are replaced next."""
        keys, codes = self._layout.keys, order.codes
        missing = np.arange(len(codes))
        places: list[tuple[TableRun, Int64s, Int64s]] = []
        for run in [] if order.meet else self._searchable():
            positions, at = run.located(codes, keys)
            if not len(at):
                continue
            numbers = missing[at]
            are_distinct = order.is_exact or not (at[1:] == at[:-1]).any()
            if not are_distinct or not (
                order.is_exact or are_same(run.rows_at(positions).select(keys), order.keys_of(numbers))
            ):
                return self._taken(order)
            places.append((run, positions, numbers))
            is_missing = np.ones(len(codes), np.bool_)
            is_missing[at] = False
            codes, missing = codes[is_missing], missing[is_missing]
        if order.meet:
            return self._taken(order)
        if not places:
            return Found(np.empty(0, np.int64), self._empty, places)
        rows = pl.concat([run.rows_at(positions) for run, positions, _ in places])
        return Found(np.concatenate([numbers for _, _, numbers in places]), rows, places)

    def _taken(self, order: KeyOrder) -> Found:
        """Remove the rows of the keys; for keys of which two have one hash."""
        requested = order.keys_of(np.arange(len(order.codes)))
        rows, number = self.pop(requested), "".join(requested.columns) + "_"  # the name of no key column
        numbered = requested.with_row_index(number)
        found = rows.join(numbered, on=requested.columns, how="left", maintain_order="left").get_column(number)
        return Found(found.to_numpy().astype(np.int64), rows, ())

    def replace(self, order: KeyOrder, found: Found, rows: pl.DataFrame) -> None:
        """Replace the rows that were found. `rows`: one for each key, in the order of their numbers."""
        rows = self._conforming(rows)
        values = {name: numbers_of(rows.get_column(name)) for name in rows.columns if name not in self._layout.keys}
        numeric = {name: of for name, of in values.items() if of is not None}
        touched = {id(run): (positions, numbers) for run, positions, numbers in found.places}
        runs, moved = [], np.ones(rows.height, np.bool_)
        for run in self._table_runs():
            held = run
            if id(run) in touched:
                positions, numbers = touched[id(run)]
                written = run.overwritten(positions, numeric, numbers) if len(numeric) == len(values) else None
                if written is None:
                    run.remove(positions)
                else:
                    held, moved[numbers] = written, False
            if held.rows:
                runs.append(held.tidied())
        if moved.any():
            added = rows if moved.all() else rows.filter(pl.Series(moved))
            index = None if order.meet else Index(order.codes[moved], np.arange(added.height), is_distinct=True)
            runs = [*compacted(runs), TableRun(added, index)]
        self._hold(runs)

    # ---- for the operator ----

    def mark(self) -> TableMark:
        for run in self._table_runs():
            run.living  # noqa: B018  # it is not overwritten any more
        return super().mark()
