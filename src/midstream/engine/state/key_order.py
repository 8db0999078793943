"""The rows of a frame brought together key by key, by a sort of the codes of their keys instead of a hash table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from midstream.engine.core.batches import rows_at
from midstream.engine.state.table_runs import codes_of, stable_order
from midstream.engine.state.tombstones import Bools, Int64s, UInt64s


class KeyOrder:
    """The rows of `keys`, key by key: those of a key in their order in `of`, or in that of the frame."""

    __slots__ = ("codes", "is_exact", "is_first", "keys", "meet", "rows", "starts")

    def __init__(self, keys: pl.DataFrame, of: Int64s | None = None) -> None:
        self.keys = keys
        codes, self.is_exact = codes_of(keys)
        """Whether the codes are numbers of the keys, and not hashes."""
        self._sort(codes, of)
        self.meet = not self.is_exact and not self._are_equal()
        """Whether two keys have one hash; then the codes are those of `table_runs.codes_of` no more."""
        if self.meet:
            number = "".join(keys.columns) + "_"  # the name of no key column
            firsts = keys.with_row_index(number).select(pl.col(number).first().over(keys.columns)).to_series()
            self._sort(firsts.to_numpy().astype(np.uint64), of)

    def _sort(self, codes: UInt64s, of: Int64s | None) -> None:
        order = stable_order(codes if of is None else codes[of])
        self.rows: Int64s = order if of is None else of[order]
        """The rows, key by key."""
        ordered = codes[self.rows]
        self.is_first: Bools = np.ones(len(ordered), np.bool_)
        """For each of `rows`, whether it is the first of its key."""
        self.is_first[1:] = ordered[1:] != ordered[:-1]
        self.starts: Int64s = np.flatnonzero(self.is_first)
        self.codes: UInt64s = ordered[self.starts]
        """The code of each key, in ascending order. The number of a key is its position here."""

    def _are_equal(self) -> bool:
        """Whether all rows that have one code have one key."""
        if len(self.starts) == len(self.rows):
            return True
        later = np.flatnonzero(~self.is_first)
        return self.are(np.cumsum(self.is_first)[later] - 1, rows_at(self.keys, self.rows[later]))

    def are(self, numbers: Int64s, keys: pl.DataFrame) -> bool:
        """Whether the keys with these numbers are `keys`."""
        own = self.keys_of(numbers)
        return all(bool((own.get_column(each.name) == each).all()) for each in keys)

    def of_rows(self) -> Int64s:
        """Return the number of each row's key."""
        numbers = np.empty(len(self.rows), np.int64)
        numbers[self.rows] = np.cumsum(self.is_first) - 1
        return numbers

    def by_row(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return values of the rows, which are key by key, in the order of the rows."""
        found = np.empty_like(values)
        found[self.rows] = values
        return found

    def numbers_of(self, keys: pl.DataFrame) -> Int64s:
        """Return the numbers of keys, which are all among these."""
        number = "".join(keys.columns) + "_"  # the name of no key column
        own = self.keys_of(np.arange(len(self.codes))).with_row_index(number)
        found = keys.join(own, on=keys.columns, how="left", maintain_order="left").get_column(number)
        return found.to_numpy().astype(np.int64)

    def keys_of(self, numbers: Int64s) -> pl.DataFrame:
        """Return the keys with these numbers."""
        column = self.keys.to_series()
        if self.is_exact and column.dtype.is_integer():  # in a tenth of the time
            codes = self.codes[numbers]
            whole = codes if column.dtype == pl.UInt64 else codes.view(np.int64)
            return pl.DataFrame([pl.Series(column.name, whole).cast(column.dtype)])
        return rows_at(self.keys, self.rows[self.starts[numbers]])
