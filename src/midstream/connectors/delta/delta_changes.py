"""The changes of a Delta table in their order: its rows as inserts, then what each later version did to rows.

Changes have an order, so one split has them all, and one subtask reads them: the files that the table had, one after the
other, and then the versions after it. An offset is the number of the file or version, and of the row in it.

A version has files of changes if the table records these (`delta.enableChangeDataFeed`). With a `key`, the row before an
update is deleted if no updated row of the version has its key. A version without such files is read as what it did to
files: each row of a file that it removed is deleted, each row of one that it added is inserted. Of a file that only has
another deletion vector, these are the rows in which the two differ: Spark records no changes for deletes by vectors. Within
a version deletes come first, since a row that is rewritten is in both.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs

from midstream.connectors.common.batch_cursor import BatchCursor
from midstream.connectors.common.row_operations import OP
from midstream.connectors.delta.column_mapping import ColumnMapping
from midstream.connectors.delta.deletion_vectors import VectorDescriptor, deleted_positions
from midstream.connectors.delta.delta_log import TableVersion, digest_of, has_version, read_version
from midstream.connectors.files.table_files import TableFile, deleted_rows_of, packed, row_count_of
from midstream.engine.core.batches import to_polars
from midstream.engine.core.errors import UNDECODABLE, ConfigError, DataError, StorageError
from midstream.engine.operators.source_api import SplitReader

CHANGE: Final = "_change_type"
_DELETED: Final = {"delete": "delete"}
_MOVED: Final = {"update_preimage": "delete"}
_UPDATED: Final = "update_postimage"
_PUT: Final = {"insert": "insert", _UPDATED: "update"}
_ROW_BITS: Final = 36
_BATCH_ROWS: Final = 131_072
_FILES_BYTES_MAX: Final = 2**30
"""The most bytes that the list of a table's files may have in a checkpoint."""


class DeltaChangesSplit(msgspec.Struct, frozen=True, array_like=True):
    """The payload of the split. `version`: that of the files; the changes of later ones follow, up to `stop`.

    `digest`: that of `version`, see `digest_of`. `files`: the table's files, see `packed_files`. `names`: those of the
    columns that are read in files, if the table has column mapping.
    """

    table_id: str
    version: int
    digest: int | None
    files: bytes
    stop: int | None
    key: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


def packed_files(files: Sequence[TableFile]) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(files))


def _unpacked_files(packed: bytes, where: str) -> list[TableFile]:
    try:
        return msgspec.msgpack.decode(zlib.decompressobj().decompress(packed, _FILES_BYTES_MAX), type=list[TableFile])
    except (zlib.error, *UNDECODABLE) as error:
        raise StorageError(f"{where}: the checkpoint is damaged where it has the files of the table") from error


class DeltaChangesReader(SplitReader):
    """`schema`: the columns of the table that are read. `check`: raises if the source cannot continue after a version.
    `located`: returns the path of a file. `partition_by`: those columns that files lack. `interval_s`: how often it checks
    for a new version.
    """

    def __init__(
        self,
        filesystem: pyarrow.fs.FileSystem,
        directory: str,
        schema: pa.Schema,
        part: DeltaChangesSplit,
        offset: int,
        *,
        where: str,
        check: Callable[[TableVersion], None],
        located: Callable[[TableFile], str],
        mapping: ColumnMapping,
        partition_by: Set[str],
        interval_s: float,
    ) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._schema = schema
        self._part = part
        self._files = _unpacked_files(part.files, where)
        self._unit, self._row = offset >> _ROW_BITS, offset & ((1 << _ROW_BITS) - 1)
        """The number of the file, or after all files of the version, that is read, and how many rows of it were."""
        self._where = where
        self._check = check
        self._located = located
        self._mapping = mapping
        self._partition_by = partition_by
        self._interval_s = interval_s
        self._next_check_s = 0.0
        self._known = part.version, part.digest
        """The newest version of which the digest is known."""
        self._cursor: BatchCursor | None = None
        self._no_rows = pa.RecordBatch.from_pylist([], pa.schema([*schema, pa.field(OP, pa.large_string())]))

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        while True:
            if self._cursor is None:
                if self._has_ended:
                    return None
                batches = self._batches_of_unit()
                if batches is None:
                    return self._no_rows, self._offset
                self._cursor = BatchCursor(batches, where=self._where, offset_rows=self._row, skip_rows=self._row)
            found = self._cursor.read(rows_max)
            if found is not None:
                batch, self._row = found
                return batch, self._offset
            self._cursor.close()
            self._cursor, self._row = None, 0
            self._unit += 1

    def close(self) -> None:
        if self._cursor is not None:
            self._cursor.close()

    @property
    def _offset(self) -> int:
        if self._row >> _ROW_BITS:
            raise DataError(
                f"{self._where}: a version changes {self._row} rows, and at most 2**{_ROW_BITS} can be read"
            )
        return self._unit << _ROW_BITS | self._row

    @property
    def version(self) -> int:
        """The newest version of which something was read."""
        return max(self._version - 1, self._part.version)

    @property
    def _version(self) -> int:
        """The version to read, once all files have been."""
        return self._part.version + 1 + self._unit - len(self._files)

    @property
    def _has_ended(self) -> bool:
        return self._part.stop is not None and self._version > self._part.stop

    def _batches_of_unit(self) -> Iterator[pa.RecordBatch] | None:
        if self._unit < len(self._files):
            return self._rows_of([self._files[self._unit]], "insert")
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return None
        if not has_version(self._filesystem, self._directory, self._version - 1, self._where):
            self._next_check_s = now_s + self._interval_s
            return None
        self._check_same()
        version = read_version(self._filesystem, self._directory, self._version)
        self._check(version)
        return self._changes_of(version)

    def _check_same(self) -> None:
        """Raise ConfigError if the table was replaced since the version before was read."""
        known_of, known = self._known
        before = self._version - 1
        if before == known_of and known is not None:
            digest = digest_of(self._filesystem, self._directory, before)
            if digest not in (None, known):
                raise ConfigError(
                    f"{self._where}: version {before} was read, and the table was replaced by another one; to read that "
                    "from the beginning, start with --fresh"
                )
        self._known = self._version, digest_of(self._filesystem, self._directory, self._version)

    def _changes_of(self, version: TableVersion) -> Iterator[pa.RecordBatch]:
        if version.changes:
            kept = self._keys_of_updated(version.changes) if self._part.key else None
            for file in version.changes:
                yield from self._recorded(file, _DELETED if kept is None else {**_DELETED, **_MOVED}, kept)
            for file in version.changes:
                yield from self._recorded(file, _PUT)
            return
        deleted, inserted = self._rewritten(version)
        for file in deleted:
            missing = {name for name in self._partition_by if self._mapping.fields[name].name not in file.constants}
            if missing:
                raise DataError(
                    f"{self._where}: version {version.number} ({version.operation}) removes {file.path} and does not say which "
                    f"{missing.pop()!r} its rows have; set the table's property delta.enableChangeDataFeed, and start with --fresh"
                )
        yield from self._rows_of(deleted, "delete")
        yield from self._rows_of(inserted, "insert")

    def _rewritten(self, version: TableVersion) -> tuple[list[TableFile], list[TableFile]]:
        """Return the files of which a version deleted and inserted rows, without their other rows.

        A file that it removed and added again has another deletion vector since.
        """
        before = {file.path: file for file in version.removed}
        after = {file.path: file for file in version.added}
        deleted: list[TableFile] = []
        inserted: list[TableFile] = []
        for path in dict.fromkeys((*before, *after)):
            vectors = version.vectors_before.get(path), version.vectors_after.get(path)
            if vectors == (None, None):
                deleted += [before[path]] if path in before else []
                inserted += [after[path]] if path in after else []
                continue
            file = after[path] if path in after else before[path]
            row_count = row_count_of(self._filesystem, self._located(file))
            was_gone = self._gone(file, path in before, vectors[0], row_count)
            is_gone = self._gone(file, path in after, vectors[1], row_count)
            for files, rows in ((deleted, ~was_gone & is_gone), (inserted, was_gone & ~is_gone)):
                if rows.any():
                    files.append(msgspec.structs.replace(file, deleted=packed(~rows)))
        return deleted, inserted

    def _gone(
        self, file: TableFile, is_there: bool, vector: VectorDescriptor | None, row_count: int
    ) -> np.ndarray[Any, Any]:
        """Return whether each row of a file is not in the table."""
        gone = np.full(row_count, not is_there)
        if is_there and vector is not None:
            where = f"{self._where}: {file.path}"
            positions = deleted_positions(self._filesystem, self._directory, vector, where)
            if len(positions) and positions[-1] >= row_count:
                raise StorageError(f"{where} has {row_count} rows, and its deletion vector names row {positions[-1]}")
            gone[positions] = True
        return gone

    def _keys_of_updated(self, files: Sequence[TableFile]) -> pl.DataFrame:
        """Return the keys that rows have after the updates in these files."""
        columns = pa.schema([*self._key_columns, pa.field(CHANGE, pa.large_string())])
        found = [self._keys(self._no_rows)]
        for file in files:
            for batch in self._batches(file, columns):
                updated = pc.equal(batch.column(CHANGE), pa.scalar(_UPDATED, pa.large_string()))
                found.append(self._keys(batch.filter(updated)))
        return pl.concat(found).unique()

    @property
    def _key_columns(self) -> list[pa.Field[Any]]:
        return [self._schema.field(name) for name in self._part.key]

    def _keys(self, batch: pa.RecordBatch) -> pl.DataFrame:
        names = [f"k{i}" for i in range(len(self._part.key))]
        return to_polars(pa.RecordBatch.from_arrays([batch.column(name) for name in self._part.key], names))

    def _recorded(
        self, file: TableFile, operations: dict[str, str], kept: pl.DataFrame | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file of changes that have one of these types of change; of rows before an update, those
        whose key is not `kept`.
        """
        columns = pa.schema([*self._schema, pa.field(CHANGE, pa.large_string())])
        types = pa.array(list(operations), pa.large_string())
        names = pa.array(list(operations.values()), pa.large_string())
        for batch in self._batches(file, columns):
            wanted = batch.filter(pc.is_in(batch.column(CHANGE), value_set=types))
            if kept is not None and wanted.num_rows:
                remain = self._keys(wanted).join(
                    kept.with_columns(is_kept=True),
                    on=kept.columns,
                    how="left",
                    nulls_equal=True,
                    maintain_order="left",
                )
                is_kept = remain.get_column("is_kept").fill_null(False).to_arrow()
                is_before = pc.not_equal(wanted.column(CHANGE), pa.scalar("delete", pa.large_string()))
                wanted = wanted.filter(pc.invert(pc.and_(is_before, is_kept)))
            if wanted.num_rows:
                at = pc.index_in(wanted.column(CHANGE), value_set=types)
                yield pa.RecordBatch.from_arrays([*wanted.columns[:-1], names.take(at)], schema=self._no_rows.schema)

    def _rows_of(self, files: Sequence[TableFile], operation: str) -> Iterator[pa.RecordBatch]:
        for file in files:
            for batch in self._batches(file, self._schema):
                names = pa.repeat(pa.scalar(operation, pa.large_string()), batch.num_rows)
                yield pa.RecordBatch.from_arrays([*batch.columns, names], schema=self._no_rows.schema)

    def _batches(self, file: TableFile, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        path = self._located(file)
        deleted = partial(deleted_rows_of, self._filesystem, path, file)
        reader = self._mapping.open_file(self._filesystem, path, file, columns, 0, deleted)
        try:
            while (found := reader.read(_BATCH_ROWS)) is not None:
                yield found[0]
        finally:
            reader.close()
