"""Files of rows that wait to be merged into a table by key.

    table/_midstream/part-<attempt>-<subtask>-<n>-<token>.parquet

The rows are in the order in which a subtask had them, with a last column that tells which of them delete. The committer
takes the last row of each key, merges these in one transaction, and deletes the files. Those that killed attempts have
left are deleted with the first commit of a newer one.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet
import xxhash

from midstream.connectors.common.async_writer import AsyncPart
from midstream.connectors.common.filesystem import delete_if_there, make_durable, names_in
from midstream.connectors.common.row_operations import check_key_types, check_put, key_and_operations
from midstream.connectors.common.table_columns import nullable
from midstream.connectors.files.rolling_files import OpenFile, RollingFiles, explained
from midstream.engine.core.batches import conform, to_polars
from midstream.engine.core.errors import SchemaError, StorageError

FOLDER: Final = "_midstream/"
DELETES: Final = "midstream_deletes"
"""The last column of the files."""
_NAME: Final = re.compile(r"part-(\d+)-(\d+)-(\d+)-([0-9a-f]{16})\.parquet")
_BATCH_ROWS: Final = 65_536


def file_token(job_id: str, uid: str) -> str:
    """Return the part of a file's name that identifies its job and sink."""
    return xxhash.xxh3_64_hexdigest(f"{job_id}/{uid}".encode())


def check_key_columns(schema: pa.Schema, key: Sequence[str], where: str) -> None:
    """Raise SchemaError if rows of `schema`, which has the table's types, cannot be merged by this key."""
    if DELETES in schema.names:
        raise SchemaError(f"{where}: a column may not be called {DELETES!r}; rename it")
    check_key_types(schema, key, where)


# ---- on the subtasks


class KeyedPart(AsyncPart):
    """The files of one subtask between two checkpoints.

    `columns`: the stream's columns in the table's types; where a column is not nullable, put rows have a value.
    `file_columns`: the same as the files have them.
    """

    def __init__(
        self,
        columns: pa.Schema,
        file_columns: pa.Schema,
        key: Sequence[str],
        op: str | None,
        new_file: Callable[[pa.Schema], OpenFile],
        roll_bytes: int,
        where: str,
    ) -> None:
        super().__init__()
        self._key = key
        self._op = op
        self._where = where
        self._required = [field.name for field in columns if not field.nullable]
        self._nullable = nullable(columns)
        self._written = self._nullable.append(pa.field(DELETES, pa.bool_()))
        self._file_columns = file_columns.append(pa.field(DELETES, pa.bool_()))
        self._files = RollingFiles(lambda: new_file(self._file_columns), roll_bytes)
        self._rows = 0
        """The number of rows before the batch that is being written."""

    def _write(self, batch: pa.RecordBatch) -> None:
        rows, deletes = key_and_operations(batch, self._key, self._op, self._rows, self._where)
        rows = self._checked(conform(rows, self._nullable, self._where))
        check_put(rows, self._required, deletes, self._rows, self._where)
        rows = pa.RecordBatch.from_arrays([*rows.columns, deletes], schema=self._written)
        with explained(f"{self._where}: cannot write"):
            last = pa.array(_last_rows(to_polars(rows.select(list(self._key)))))
            self._files.write(self._as_in_files(rows.take(last)))
        self._rows += batch.num_rows

    def _checked(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows as the table can have them. Raises SchemaError for one that it cannot have."""
        return rows

    def _as_in_files(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows under the names that files have."""
        return rows

    @abstractmethod
    def _directory(self) -> tuple[pyarrow.fs.FileSystem, str]:
        """Return the directory above `FOLDER`."""

    @abstractmethod
    def _committable(self, file: OpenFile) -> bytes: ...

    def _finish(self, checkpoint_id: int) -> Sequence[bytes]:
        with explained(f"{self._where}: cannot write"):
            files = self._files.end()
            make_durable(*self._directory())
        return [self._committable(file) for file in files]

    def _discard(self) -> None:
        self._files.discard()


def _last_rows(keys: pl.DataFrame) -> Any:
    """Return the positions of the last row of each key, ascending."""
    names = [f"k{i}" for i in range(keys.width)]
    last = keys.rename(dict(zip(keys.columns, names, strict=True))).with_row_index("row").unique(names, keep="last")
    return np.sort(last.get_column("row").to_numpy())


# ---- on the driver


def in_order(names: Sequence[str]) -> list[str]:
    """Return the names of files in the order in which rows of one key are in them."""
    return sorted(names, key=_order)


def _order(name: str) -> tuple[int, int, int]:
    found = _NAME.fullmatch(name.removeprefix(FOLDER))
    assert found is not None, "names were checked"
    return int(found[1]), int(found[2]), int(found[3])


def last_rows_of(
    filesystem: pyarrow.fs.FileSystem, paths: Sequence[str], key: Sequence[str]
) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Return the last row of each key in files, which are in order, and their schema."""
    schema = pyarrow.parquet.read_schema(paths[0], filesystem=filesystem)
    if not {*key, DELETES} <= set(schema.names):
        raise StorageError(f"{paths[0]}: has no columns {', '.join(key)}; the checkpoint is corrupt or forged")
    kept = _are_last(filesystem, paths, key)
    found, start = [], 0
    for path in paths:
        with filesystem.open_input_file(path) as stream:
            for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(_BATCH_ROWS):
                found.append(batch.filter(pa.array(kept[start : start + batch.num_rows])))
                start += batch.num_rows
    return schema, found


def _are_last(filesystem: pyarrow.fs.FileSystem, paths: Sequence[str], key: Sequence[str]) -> Any:
    """Return, for each row of these files, whether it is the last one of its key."""
    read = [pyarrow.parquet.read_table(path, columns=list(key), filesystem=filesystem) for path in paths]
    keys = pl.from_arrow(pa.concat_tables(read).select(list(key)))
    assert isinstance(keys, pl.DataFrame)
    are_last = np.zeros(len(keys), bool)
    are_last[_last_rows(keys)] = True
    return are_last


def merged_columns(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a file that go to the table."""
    return pa.schema([field for field in schema if field.name != DELETES])


def several_rows(key: Sequence[str], again: int) -> str:
    """Return what is wrong with a table of which more rows than keys were updated."""
    return (
        f"the table had several rows with the same ({', '.join(key)}): {again} more than there should be were updated as "
        "well, and remain; delete them, and start with --from latest"
    )


def delete_files(filesystem: pyarrow.fs.FileSystem, directory: str, names: Sequence[str]) -> None:
    """Delete merged files. One that cannot be deleted now is left to the next attempt."""
    for name in names:
        with suppress(OSError):
            delete_if_there(filesystem, f"{directory}/{name}")


class MergedFiles:
    """What a job's committer has merged, for the deletion of files that nothing needs from then on.

    Tasks are deployed only after everything in the restored checkpoint is committed: once something of the new attempt,
    or of the job that has resumed, is committed, nothing needs the earlier files.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._attempt = -1
        """The newest attempt of which rows were merged."""
        self._predecessors: dict[tuple[str, str, str], pyarrow.fs.FileSystem] = {}
        """Where the last checkpoints were that were merged for other jobs: directory, job, uid."""

    def add(
        self, filesystem: pyarrow.fs.FileSystem, directory: str, job_id: str, uid: str, names: Sequence[str]
    ) -> None:
        """Delete these files of a job, which are merged, and what attempts before theirs have left."""
        delete_files(filesystem, directory, names)
        if job_id != self._job_id:
            self._predecessors[directory, job_id, uid] = filesystem
            return
        newest = max(_order(name)[0] for name in names)
        if newest > self._attempt:
            self._attempt = newest
            _sweep(filesystem, directory, job_id, uid, newest)
            for (of_directory, of_job, of_uid), at in self._predecessors.items():
                _sweep(at, of_directory, of_job, of_uid, None)
            self._predecessors.clear()


def _sweep(filesystem: pyarrow.fs.FileSystem, directory: str, job_id: str, uid: str, before: int | None) -> None:
    """Delete what attempts of a job before this one have left; None for all of its attempts."""
    token = file_token(job_id, uid)
    with suppress(OSError):
        for name in names_in(filesystem, f"{directory}/{FOLDER.rstrip('/')}"):
            found = _NAME.fullmatch(name)
            if found and found[4] == token and (before is None or int(found[1]) < before):
                delete_if_there(filesystem, f"{directory}/{FOLDER}{name}")
