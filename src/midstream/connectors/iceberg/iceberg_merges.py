"""Rows that are merged into an Iceberg table by key: subtasks write them to files apart, and the committer merges them.

    <table>/data/_midstream/part-<attempt>-<subtask>-<n>-<token>.parquet    rows that wait, in no snapshot
    <table>/data/merged-<checkpoint>-<id>-<n>.parquet                       a data file that replaces others

The committer has the last row of each key in memory, and plans which data files may have these keys, by their partitions
and bounds. One after the other, such a file is read; if it has some of the keys, its rows are written again, without those
that are deleted and with the new values of those that are updated, as the table has its columns and partitions now. Rows
that were in no file are added. One snapshot removes the old files and adds the new ones.

Deletes of rows by position are applied to a file that is rewritten. Those by equality would no longer apply to it, so a
table that has them is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, Final
from uuid import uuid4

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
from pyiceberg import expressions
from pyiceberg.expressions import BooleanExpression
from pyiceberg.table import Table

from midstream.connectors.common.table_columns import as_stored, nullable
from midstream.connectors.files.keyed_files import DELETES, in_order, last_rows_of, several_rows
from midstream.connectors.files.rolling_files import explained
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable, IcebergFile
from midstream.connectors.iceberg.iceberg_commits import SnapshotCommit, entries_of
from midstream.connectors.iceberg.iceberg_files import (
    column_names,
)
from midstream.connectors.iceberg.iceberg_parts import IcebergPart, target_of
from midstream.connectors.iceberg.iceberg_rewrites import ReplacedFile, RewrittenFiles, deletes_of, write_rows
from midstream.connectors.iceberg.iceberg_tables import check_rewritable, columns_of
from midstream.engine.core.batches import concat, to_polars
from midstream.engine.core.errors import ConfigError, SchemaError

_BATCH_ROWS: Final = 65_536
_LISTED_MAX: Final = 1000
"""The number of values of a key column up to which files are planned by each value, not only by the least and greatest."""


class Merge(RewrittenFiles):
    """Merges the rows of a checkpoint.

    `by_name`: columns that are found in the table by their names; others by their ids.
    """

    def __init__(
        self,
        there: CatalogTable,
        job_id: str,
        uid: str,
        files: Sequence[IcebergFile],
        roll_bytes: int,
        by_name: Sequence[str],
        where: str,
    ) -> None:
        super().__init__(there, where)
        self.wrong = ""
        """What the merge has shown to be wrong with the table."""
        self._by_name = by_name
        self._job_id = job_id
        self._uid = uid
        self._files = files
        self._roll_bytes = roll_bytes
        self._waiting: tuple[pa.Schema, list[pa.RecordBatch]] | None = None
        """The rows, as the files have them."""

    def commit(
        self, table: Table, checkpoint_id: int, properties: Mapping[str, str], summary: Mapping[str, str]
    ) -> bool:
        """Commit one snapshot. Returns whether there was anything to change; without it there is no commit.

        Raises what `SnapshotCommit` raises, ConfigError or SchemaError if the table can no longer take the rows.
        """
        check_rewritable(table, "key", self._where)
        snapshot, rows = SnapshotCommit(table), self._rows(table)
        target = target_of(self._there, table, columns_of(table.metadata.schema()))
        names, id = count(), uuid4().hex[:16]

        def next_name() -> str:
            return f"merged-{checkpoint_id}-{id}-{next(names):06d}.parquet"

        part = IcebergPart(target, self._job_id, self._uid, self._roll_bytes, next_name, self._where)
        with ExitStack() as unfinished:
            unfinished.callback(part.discard)
            replaced = rows.write(_affected(self._there, table, rows, self._where), part)
            new = [msgspec.msgpack.decode(each, type=IcebergFile) for each in part.finish(checkpoint_id)]
            unfinished.pop_all()
        self.wrong = several_rows(rows.key, rows.again) if rows.again > 0 else ""
        if not replaced and not new:
            return False
        self._send(table, snapshot, new, replaced, properties, summary)
        return True

    def _rows(self, table: Table) -> _KeyedRows:
        """Return the checkpoint's rows with the table's columns as they are now."""
        key, paths = self._files[0].key, self._there.existing(table, self._files, self._where)
        if self._waiting is None:
            by_name = {file.name: path for file, path in zip(self._files, paths, strict=True)}
            filesystem, _ = self._there.data_directory(table)
            with explained(self._where):
                self._waiting = last_rows_of(filesystem, [by_name[name] for name in in_order(list(by_name))], key)
        stored, batches = self._waiting
        rows = concat(batches)
        columns = columns_of(table.metadata.schema())
        there = column_names(stored, table.metadata.schema(), self._by_name)
        fields: list[pa.Field[Any]] = []
        arrays: list[pa.Array[Any]] = []
        renamed = {}
        for field, name in zip(stored, there, strict=True):
            if name is not None:
                renamed[field.name] = name
                fields.append(columns.field(name))
                arrays.append(rows.column(field.name))
            elif field.name in key:
                raise ConfigError(
                    f"{self._where}: key column {field.name!r} was dropped from the table, and rows wait that are found by it; "
                    "start again without them, from a savepoint or with --fresh"
                )
        found = pa.schema(fields)
        together = pa.RecordBatch.from_arrays(arrays, names=found.names)
        conformed = as_stored(together, nullable(found), self._where)
        deletes = rows.column(DELETES).to_numpy(zero_copy_only=False)
        self._check_required(found, conformed, deletes)
        return _KeyedRows(conformed, tuple(renamed[name] for name in key), deletes, columns)

    def _check_required(self, schema: pa.Schema, rows: pa.RecordBatch, deletes: np.ndarray[Any, Any]) -> None:
        """Raise SchemaError if the table now requires values that a row does not have."""
        put = pa.array(~deletes)
        for field in schema:
            if not field.nullable and rows.column(field.name).filter(put).null_count:
                raise SchemaError(
                    f"{self._where}: column {field.name!r} of the table must have a value now, and files written for it have "
                    "none in a row; change it back until they are committed"
                )


class _KeyedRows:
    """The last row of each key in a checkpoint, in columns of the table.

    `deletes`: which of them delete. `columns`: all columns of the table.
    """

    def __init__(
        self, rows: pa.RecordBatch, key: tuple[str, ...], deletes: np.ndarray[Any, Any], columns: pa.Schema
    ) -> None:
        self.key = key
        self.again = 0
        """The number of rows that were updated more than there are keys to update."""
        self._rows = rows
        self._deletes = deletes
        self._columns = nullable(columns)
        self._key_columns = pa.schema([self._columns.field(name) for name in key])
        self._index = self._keys(rows).with_row_index("row")

    def _keys(self, batch: pa.RecordBatch) -> pl.DataFrame:
        names = [f"k{i}" for i in range(len(self.key))]
        return to_polars(pa.RecordBatch.from_arrays([batch.column(name) for name in self.key], names))

    def write(self, files: Iterator[ReplacedFile], part: IcebergPart) -> frozenset[str]:
        """Write what replaces files that have one of the keys, and rows that none has. Return the locations of these files."""
        is_found = np.zeros(self._rows.num_rows, bool)
        replaced = set()
        for file in files:
            at = self._positions(file)
            hits = at[at >= 0]
            if not len(hits):
                continue
            replaced.add(file.location)
            updated = hits[~self._deletes[hits]]
            self.again += len(updated) - int(np.count_nonzero(~is_found[np.unique(updated)]))
            is_found[hits] = True
            start = 0
            for batch in file.read(self._columns):
                write_rows(part, self._changed(batch, at[start : start + batch.num_rows]))
                start += batch.num_rows
        added = self._rows.filter(pa.array(~is_found & ~self._deletes))
        for start in range(0, added.num_rows, _BATCH_ROWS):
            write_rows(part, self._complete(added.slice(start, _BATCH_ROWS)))
        return frozenset(replaced)

    def _positions(self, file: ReplacedFile) -> np.ndarray[Any, Any]:
        """Return for each row of a file which of these rows has its key, or -1."""
        names = [name for name in self._index.columns if name != "row"]
        found = [np.array([], np.int64)]
        for batch in file.read(self._key_columns):
            joined = self._keys(batch).join(self._index, on=names, how="left", maintain_order="left")
            found.append(joined.get_column("row").cast(pl.Int64).fill_null(-1).to_numpy())
        return np.concatenate(found)

    def _changed(self, batch: pa.RecordBatch, at: np.ndarray[Any, Any]) -> pa.RecordBatch:
        """Return the rows of a file that remain; `at`: which of these rows has the key of each, or -1."""
        gone = at >= 0
        gone[gone] = self._deletes[at[gone]]
        updated = (at >= 0) & ~gone
        source: Any = pa.array(at[updated])
        order = np.arange(batch.num_rows)
        order[updated] = batch.num_rows + np.arange(len(source))
        kept: pa.Array[Any] = pa.array(order[~gone])
        columns: list[pa.Array[Any]] = []
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if field.name in self._rows.schema.names:
                new = self._rows.column(field.name).take(source)
                together: Any = pa.concat_arrays([column, new])
                columns.append(together.take(kept))
            else:
                columns.append(column.filter(pa.array(~gone)))
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)

    def _complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows with null in the columns that the stream lacks."""
        own = batch.schema.names
        columns: list[pa.Array[Any]] = [
            batch.column(field.name) if field.name in own else pa.nulls(batch.num_rows, field.type)
            for field in self._columns
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._columns)

    def filter(self) -> BooleanExpression:
        """Return what is true for each row of the table with one of the keys, and for others."""
        make: Any = expressions  # takes positional arguments, which pyiceberg's types do not show
        found: BooleanExpression = expressions.AlwaysTrue()
        for name in self.key:
            column, term = self._rows.column(name), expressions.Reference(name)
            values = column.unique()
            try:
                if len(values) <= _LISTED_MAX:
                    found = make.And(found, make.In(term, values.to_pylist()))
                else:
                    ends: Any = pc.min_max(values).as_py()
                    least = make.GreaterThanOrEqual(term, ends["min"])
                    found = make.And(found, make.And(least, make.LessThanOrEqual(term, ends["max"])))
            except (OverflowError, ValueError):  # times that Python does not have
                continue
        return found


def _affected(there: CatalogTable, table: Table, rows: _KeyedRows, where: str) -> Iterator[ReplacedFile]:
    """Yield the data files that may have rows with one of the keys."""
    deletes = deletes_of(table, where)
    try:
        planned = {task.file.file_path for task in table.scan(rows.filter()).plan_files()}
    except (
        ArithmeticError,
        TypeError,
        ValueError,
    ):  # pyiceberg cannot compare with the first and last times, for example
        planned = None
    for entry in () if planned == set() else list(entries_of(table)):
        file = entry.data_file
        if planned is None or file.file_path in planned:
            yield ReplacedFile(there, table, file, deletes.get(file.file_path, ()), where)
