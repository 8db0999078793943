"""A table that rows of a stream are joined with: a frame and an index of its keys, which never change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import (
    batch_bytes,
    conform,
    invalid_value,
    rows_at,
    single_batch,
    to_arrow,
    to_polars,
)
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.core.python_values import kind_of
from midstream.engine.core.schemas import check_distinct
from midstream.engine.operators.pandas_frames import from_pandas, is_pandas
from midstream.engine.state.table_runs import codes_of

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


def as_table(made: Any, where: str) -> pa.Table:
    """Return a polars, Arrow or pandas frame as an Arrow table. Raises JobError for anything else."""
    if isinstance(made, pl.LazyFrame):
        made = made.collect()
    if isinstance(made, pl.DataFrame):
        return to_arrow(made)
    if isinstance(made, pa.RecordBatch):
        return pa.Table.from_batches([made])
    if is_pandas(made):
        return from_pandas(made, pa.schema([]), where)
    if not isinstance(made, pa.Table):
        raise JobError(f"{where} is {kind_of(made)}; give a polars or pandas DataFrame, or an Arrow table")
    return made


def with_columns_of(table: pa.Table, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return the columns of `schema`, in its types, which must keep every value; other columns are left out.

    Raises SchemaError for a column that is missing or does not fit.
    """
    check_distinct(table.column_names, where)
    for name in schema.names:
        if name not in table.column_names:
            raise SchemaError(
                f"{where}: column {name!r} is missing; there are {', '.join(table.column_names) or 'none'}"
            )
    batch = conform(single_batch(table.select(schema.names)), schema, where)
    wrong = invalid_value(batch)
    if wrong is not None:
        raise SchemaError(f"{where}: row {wrong[0]}: {wrong[1]}")
    return batch


@dataclass(frozen=True, slots=True)
class LookupTable:
    """Rows by key. `rows`: all columns, with a row for each key that has no null, or several if the table `repeats` keys."""

    rows: pa.RecordBatch
    _keys: pl.DataFrame
    _codes: UInt64s
    """The codes of the keys, sorted."""
    _order: Int64s
    """The position of the row of each code."""
    _has_one_code_per_key: bool

    @classmethod
    def of(cls, rows: pa.RecordBatch, keys: Sequence[str], where: str, *, may_repeat: bool) -> LookupTable:
        """Index a table. A row with a null in a key column is left out, since nothing equals it.

        `may_repeat`: of rows with one key, the first is kept; otherwise JobError names the key that is there twice.
        """
        frame = to_polars(rows.select(list(keys)))
        kept = np.flatnonzero(frame.select(pl.all_horizontal(pl.all().is_not_null())).to_series().to_numpy())
        if len(kept) < frame.height:
            rows, frame = rows.take(pa.array(kept, pa.int64())), frame[kept]
        codes, order, is_distinct = _sorted_codes(frame)
        if not is_distinct:  # a key is there twice, or two keys have one hash
            firsts = frame.with_row_index("".join(keys) + "_").unique(keys, keep="first", maintain_order=True)
            if firsts.height < frame.height:
                if not may_repeat:
                    raise _repeated(frame, where)
                kept = firsts.to_series().to_numpy().astype(np.int64)
                rows, frame = rows.take(pa.array(kept, pa.int64())), frame[kept]
                codes, order, is_distinct = _sorted_codes(frame)
        return cls(rows, frame, codes, order, is_distinct)

    @property
    def size_bytes(self) -> int:
        return batch_bytes(self.rows) + self._codes.nbytes + self._order.nbytes

    def positions(self, keys: pl.DataFrame) -> Int64s:
        """Return, for each row of `keys`, the position of the row with this key; -1 if there is none.

        The columns of `keys` have the types of the key columns, in their order. A key with a null finds nothing.
        """
        found = np.full(keys.height, -1, np.int64)
        if not len(self._codes):
            return found
        valid: Int64s | None = None
        if any(column.null_count() for column in keys):
            valid = np.flatnonzero(keys.select(pl.all_horizontal(pl.all().is_not_null())).to_series().to_numpy())
            keys = rows_at(keys, valid)
        at = self._of_present(keys)
        if valid is None:
            return at
        found[valid] = at
        return found

    def _of_present(self, keys: pl.DataFrame) -> Int64s:
        if not self._has_one_code_per_key:  # two keys with one hash, in 64 bits: it almost never happens
            row = "".join(keys.columns) + "_"
            own = self._keys.rename(dict(zip(self._keys.columns, keys.columns, strict=True)))
            both = keys.join(own.with_row_index(row), on=keys.columns, how="left", maintain_order="left")
            slow: Int64s = both.get_column(row).cast(pl.Int64).fill_null(-1).to_numpy()
            return slow
        codes, is_exact = codes_of(keys)
        at = np.minimum(self._codes.searchsorted(codes), len(self._codes) - 1)
        matches = self._codes[at] == codes
        found = np.where(matches, self._order[at], -1)
        if not is_exact and matches.any():
            some = np.flatnonzero(matches)
            left, right = rows_at(keys, some), rows_at(self._keys, found[some])
            for requested, known in zip(left, right, strict=True):
                found[some[(requested != known).to_numpy()]] = -1
        return found

    def columns(self, names: Sequence[str], positions: Int64s) -> list[pa.Array[Any]]:
        """Return these columns of the rows at `positions`; of -1, nulls."""
        at = pa.array(positions, pa.int64(), mask=positions < 0)
        return [self.rows.column(name).take(at) for name in names]


def _sorted_codes(keys: pl.DataFrame) -> tuple[UInt64s, Int64s, bool]:
    """Return the codes of the keys, sorted, the position of each, and whether no two are equal."""
    codes, _ = codes_of(keys)
    order = codes.argsort(kind="stable")
    codes = codes[order]
    return codes, order, not (codes[1:] == codes[:-1]).any()


def _repeated(frame: pl.DataFrame, where: str) -> JobError:
    several = frame.group_by(frame.columns, maintain_order=True).len("".join(frame.columns) + "_")
    several = several.filter(several.to_series(-1) > 1)
    *key, count = several.row(0)
    text = ", ".join(f"{name}={value!r}" for name, value in zip(frame.columns, key, strict=True))
    more = f", and {several.height - 1} other keys are repeated too" if several.height > 1 else ""
    return JobError(
        f"{where}: key {text} is in {count} rows{more}; each key must be in one row: remove the others, or join by more "
        "columns"
    )
