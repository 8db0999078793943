"""A table with at most one row of each key, which are found and replaced together.

Where most rows of a run are replaced between two checkpoints, they are overwritten in place. Where few are, they move to
another run, so that a checkpoint does not store all others of their run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from midstream.engine.state.key_order import KeyOrder
from midstream.engine.state.table_runs import TableRun, numbers_of
from midstream.engine.state.table_state import TableMark, TableState
from midstream.engine.state.tombstones import Int64s


class FoundRows(NamedTuple):
    """The rows of those keys of a `KeyOrder` that have one."""

    numbers: Int64s
    """The number of the key of each row."""
    rows: pl.DataFrame
    """The rows, without their keys."""
    places: Sequence[tuple[TableRun, Int64s, Int64s]]
    """The runs that have the rows, where, and the numbers of their keys."""


class RowPerKey(TableState):
    """Rows are added by `replace` alone."""

    def find(self, order: KeyOrder) -> FoundRows:
        """Return the rows of the keys, which are replaced next."""
        places = self.located(order, once=True)
        if not places:
            return FoundRows(np.empty(0, np.int64), self._empty.select(self._values), places)
        rows = pl.concat([run.rows_at(positions, self._values) for run, positions, _ in places], rechunk=False)
        return FoundRows(np.concatenate([numbers for _, _, numbers in places]), rows, places)

    @property
    def _values(self) -> list[str]:
        """The columns that are not keys."""
        return [name for name in self._empty.columns if name not in self._layout.keys]

    def replace(self, order: KeyOrder, found: FoundRows, rows: pl.DataFrame) -> None:
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
        self._hold(runs)
        moved = np.flatnonzero(is_moved)
        self.append_of(order, moved, rows[moved].get_columns())

    # ---- for the operator ----

    def mark(self) -> TableMark:
        for run in self._table_runs():
            run.living  # noqa: B018  # it is not overwritten any more
        return super().mark()
