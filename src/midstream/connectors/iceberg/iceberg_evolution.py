"""Columns that are added to an Iceberg table, or widened, each time in one commit that conflicts with any other change of the
schema; and files that were written before a column was dropped and added again.

A column that is added again has another id, by which readers find it. So files that wait with the old id would lose its
values: the committer writes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, Final
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import Table
from pyiceberg.table.update.schema import UpdateSchema
from pyiceberg.types import IcebergType

from midstream.connectors.common.table_columns import as_stored, nullable
from midstream.connectors.common.table_evolution import Change, TableSystem, evolution, missing
from midstream.connectors.files.field_ids import id_of, parquet_schema_of
from midstream.connectors.files.rolling_files import explained
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable, IcebergFile
from midstream.connectors.iceberg.iceberg_commits import SnapshotCommit, change_schema
from midstream.connectors.iceberg.iceberg_files import column_names
from midstream.connectors.iceberg.iceberg_parts import IcebergPart, target_of
from midstream.connectors.iceberg.iceberg_rewrites import RewrittenFiles
from midstream.connectors.iceberg.iceberg_tables import columns_of, new_schema
from midstream.engine.core.arrow_types import is_list_of_any_length
from midstream.engine.core.errors import SchemaError

_BATCH_ROWS: Final = 65_536


def _widens(there: pa.DataType, kind: pa.DataType) -> bool:
    if pa.types.is_decimal(there) and pa.types.is_decimal(kind):
        return bool(there.scale == kind.scale)
    return (there, kind) in ((pa.int32(), pa.int64()), (pa.float32(), pa.float64()))


_ICEBERG: Final = TableSystem(
    "Iceberg",
    _widens,
    "Iceberg widens only int to long, float to double, and decimals of the same scale",
    lambda name: None if name else "it has no name",
)


@dataclass(frozen=True, slots=True)
class Evolving:
    """What a sink that evolves its table has of the stream: its columns in the types of a table that would be made for it."""

    stream: pa.Schema
    key: tuple[str, ...]
    schema_id: int = -1
    """The table's schema for which the job writes files."""

    def evolved(self, there: CatalogTable, table: Table, check: Callable[[pa.Schema], object]) -> Table:
        """Return the table with all that it needs to hold the stream.

        `check`: raises for columns of the table that the sink cannot write to. Raises SchemaError for a column that the
        table cannot hold; LostRaceError, CommitUnknownError, or what the catalog raises.
        """
        columns = columns_of(table.metadata.schema())
        plan = evolution(self.stream, columns, _ICEBERG, self._fixed(table), there.where)
        check(plan.applied(columns))
        return _changed(there, table, plan.added, plan.widened)

    def completed(self, there: CatalogTable, table: Table, where: str) -> Table:
        """Return the table with the columns of the stream that it lacks; types are not compared. Raises as `evolved` does."""
        added = missing(self.stream, columns_of(table.metadata.schema()), _ICEBERG, self._fixed(table), where)
        return _changed(there, table, added, ())

    def _fixed(self, table: Table) -> set[str]:
        schema = table.metadata.schema()
        columns = {schema.find_column_name(field.source_id) for field in table.metadata.spec().fields}
        return {*self.key, *(name for name in columns if name is not None)}


def _changed(there: CatalogTable, table: Table, added: Sequence[Change], widened: Sequence[Change]) -> Table:
    def change(update: UpdateSchema) -> None:
        for path, kind in added:
            update.add_column(path, _type_of(kind))
        for path, kind in widened:
            update.update_column(path, _type_of(kind))

    if not added and not widened:
        return table
    try:
        change_schema(table, change)
    except ValueError as error:
        raise SchemaError(
            f"{there.where}: the table cannot have the columns of the stream: {error}; rename them, or change the table"
        ) from error
    return there.opened()


def _type_of(kind: pa.DataType) -> IcebergType:
    return new_schema(pa.schema([pa.field("column", kind)])).fields[0].field_type


class Append(RewrittenFiles):
    """Adds the files of a checkpoint. Those in which a column of the stream has an id that is no longer its own are written
    again first, with the ids that the table has now.
    """

    def __init__(
        self,
        there: CatalogTable,
        files: Sequence[IcebergFile],
        roll_bytes: int,
        evolving: Evolving | None,
        is_own: bool,
        where: str,
    ) -> None:
        """`is_own`: this job has written the files."""
        super().__init__(there, where)
        self._files = files
        self._roll_bytes = roll_bytes
        self._evolving = evolving
        self._is_own = is_own
        self._outdated: list[str] = []

    def commit(
        self, table: Table, checkpoint_id: int, properties: Mapping[str, str], summary: Mapping[str, str]
    ) -> None:
        """Commit one snapshot. Raises what `SnapshotCommit` raises, SchemaError if the table can no longer take the rows."""
        paths = self._there.existing(table, self._files, self._where)
        self._outdated = self._outdated_of(table, paths)
        current = [file for file, path in zip(self._files, paths, strict=True) if path not in self._outdated]
        snapshot, new = SnapshotCommit(table), self._rewritten(table, checkpoint_id)
        self._send(table, snapshot, new, frozenset(), properties, summary, current)

    def clean_up(self) -> None:
        """Delete what is in no snapshot, after the last try has succeeded."""
        if self._outdated or self._tries:
            table = self._there.opened()
            self.delete_lost(table)
            filesystem, _ = self._there.data_directory(table)
            self._delete(filesystem, self._outdated)

    def _outdated_of(self, table: Table, paths: Sequence[str]) -> list[str]:
        evolving = self._evolving
        if evolving is None or (self._is_own and table.metadata.current_schema_id == evolving.schema_id):
            return []
        filesystem, _ = self._there.data_directory(table)
        return [path for path in paths if _is_outdated(parquet_schema_of(filesystem, path), evolving.stream, table)]

    def _rewritten(self, table: Table, checkpoint_id: int) -> list[IcebergFile]:
        if not self._outdated:
            return []
        filesystem, _ = self._there.data_directory(table)
        columns = columns_of(table.metadata.schema())
        numbers, id = count(), uuid4().hex[:16]

        def next_name() -> str:
            return f"rewritten-{checkpoint_id}-{id}-{next(numbers):06d}.parquet"

        target = target_of(self._there, table, columns)
        job_id, uid = self._files[0].job_id, self._files[0].uid
        part = IcebergPart(target, job_id, uid, self._roll_bytes, next_name, self._where)
        with ExitStack() as unfinished:
            unfinished.callback(part.discard)
            for path in self._outdated:
                with explained(self._where), filesystem.open_input_file(path) as stored:
                    file = pyarrow.parquet.ParquetFile(stored)
                    names = self._names(file.schema_arrow, table)
                    for batch in file.iter_batches(_BATCH_ROWS):
                        part.add(_in_columns(batch, names, columns, self._where))
                        part.drain()
            new = [msgspec.msgpack.decode(each, type=IcebergFile) for each in part.finish(checkpoint_id)]
            unfinished.pop_all()
        return new

    def _names(self, file: pa.Schema, table: Table) -> list[str | None]:
        assert self._evolving is not None, "only then files are outdated"
        return column_names(file, table.metadata.schema(), self._evolving.stream.names)


def _in_columns(batch: pa.RecordBatch, names: Sequence[str | None], columns: pa.Schema, where: str) -> pa.RecordBatch:
    """Return rows of a file with all columns of the table; `names`: those that it has."""
    found = {name: column for name, column in zip(names, batch.columns, strict=True) if name is not None}
    arrays = [found[field.name] if field.name in found else pa.nulls(batch.num_rows, field.type) for field in columns]
    return as_stored(pa.RecordBatch.from_arrays(arrays, names=columns.names), nullable(columns), where)


def _is_outdated(file: pa.Schema, stream: pa.Schema, table: Table) -> bool:
    """Whether a column of the stream, or a field within, has another id in a file than in the table."""
    now = schema_to_pyarrow(table.metadata.schema())
    return any(
        field.name in stream.names and field.name in now.names and _has_other_ids(field, now.field(field.name))
        for field in file
    )


def _has_other_ids(field: pa.Field[Any], now: pa.Field[Any]) -> bool:
    kind, other = field.type, now.type
    if id_of(field) != id_of(now):
        return True
    if is_list_of_any_length(kind) and is_list_of_any_length(other):
        return _has_other_ids(kind.value_field, other.value_field)
    if pa.types.is_struct(kind) and pa.types.is_struct(other):
        there = {each.name: each for each in other}
        return any(each.name in there and _has_other_ids(each, there[each.name]) for each in kind)
    return False
