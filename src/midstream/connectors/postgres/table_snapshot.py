"""A table as it is where its changes begin: copied to Parquet files below the checkpoint directory, and read from there.

<checkpoint_dir>/plans/<uid>/<slot>/slot.json       the slot was made, or is about to be made, for this job
<checkpoint_dir>/plans/<uid>/<slot>/<token>/….parquet    the rows of one snapshot
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.csv
import pyarrow.fs
import pyarrow.parquet as pq
from psycopg import Connection, sql
from psycopg.sql import SQL, Literal

from midstream.connectors.common.filesystem import file_info, make_directory, make_durable, resolve
from midstream.connectors.common.row_operations import INSERT, OP
from midstream.connectors.postgres.change_values import SETTINGS, from_text
from midstream.connectors.postgres.postgres_tables import explained
from midstream.engine.core.errors import StorageError

BATCH_BYTES: Final = 8 * 2**20
"""How much text is converted at a time; each such batch is a row group."""
FILE_ROWS: Final = 1_000_000
_RECORD: Final = "slot.json"
_TEXT: Final = pa.large_string()


class SlotRecords:
    """What this job has made: durable before it is made, so that a start after a failure can drop it."""

    def __init__(self, directory: str, where: str) -> None:
        self._filesystem, self._directory = resolve(directory, None, where)
        self._where = where

    def has(self, system: str, database: str) -> bool:
        """Whether the slot in this database of this server was made for this job."""
        path = f"{self._directory}/{_RECORD}"
        if file_info(self._filesystem, path).type != pyarrow.fs.FileType.File:
            return False
        try:
            with self._filesystem.open_input_stream(path) as stream:
                found = json.loads(stream.read())
        except (OSError, ValueError) as error:
            raise StorageError(f"{self._where}: {path} cannot be read: {error}") from error
        return bool(found == {"system": system, "database": database})

    def add(self, system: str, database: str) -> None:
        make_directory(self._filesystem, self._directory)
        path = f"{self._directory}/{_RECORD}"
        with self._filesystem.open_output_stream(path) as stream:
            stream.write(json.dumps({"system": system, "database": database}).encode())
        make_durable(self._filesystem, path)
        make_durable(self._filesystem, self._directory)

    def delete_snapshots(self) -> None:
        """Delete the rows of all snapshots."""
        if file_info(self._filesystem, self._directory).type != pyarrow.fs.FileType.Directory:
            return
        for info in self._filesystem.get_file_info(pyarrow.fs.FileSelector(self._directory)):
            if info.type == pyarrow.fs.FileType.Directory:
                self._filesystem.delete_dir(info.path)


def copy_snapshot(
    connection: Connection[Any],
    query: sql.Composed,
    snapshot: str,
    schema: pa.Schema,
    directory: str,
    where: str,
) -> Iterator[int]:
    """Copy the rows of `query` in an exported snapshot to files in `directory`. Yields the rows of each file, which is durable."""
    filesystem, path = resolve(directory, None, where)
    connection.autocommit = True
    for name, value in {**SETTINGS, "row_security": "off"}.items():
        connection.execute("SELECT set_config(%s, %s, false)", [name, value])
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    connection.execute(SQL("SET TRANSACTION SNAPSHOT {}").format(Literal(snapshot)))
    batches = _batches(connection, query, schema, where)
    batch = next(batches, None)
    number = 0
    if batch is not None:
        make_directory(filesystem, path)
    while batch is not None:
        rows = 0
        name = f"{path}/{number:06d}.parquet"
        with pq.ParquetWriter(name, schema, filesystem=filesystem, compression="zstd") as writer:
            while batch is not None and rows < FILE_ROWS:
                writer.write_batch(batch)
                rows += batch.num_rows
                batch = next(batches, None)
        make_durable(filesystem, name)
        make_durable(filesystem, path)
        yield rows
        number += 1
    connection.execute("COMMIT")


def _batches(
    connection: Connection[Any], query: sql.Composed, schema: pa.Schema, where: str
) -> Iterator[pa.RecordBatch]:
    copied = SQL("COPY ({}) TO STDOUT (FORMAT csv, FORCE_QUOTE *)").format(query)
    with explained(where), connection.cursor() as cursor, cursor.copy(copied) as copy:
        parts: list[bytes] = []
        size = 0
        for data in copy:  # each is a row
            parts.append(bytes(data))
            size += len(data)
            if size >= BATCH_BYTES:
                yield _parsed(b"".join(parts), schema, where)
                parts, size = [], 0
        if parts:
            yield _parsed(b"".join(parts), schema, where)


def _parsed(text: bytes, schema: pa.Schema, where: str) -> pa.RecordBatch:
    names = [field.name for field in schema if field.name != OP]
    table = pyarrow.csv.read_csv(
        io.BytesIO(text),
        read_options=pyarrow.csv.ReadOptions(column_names=names, block_size=len(text) + 1, use_threads=False),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, _TEXT),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    ).combine_chunks()
    rows = table.to_batches(max_chunksize=None)[0]
    columns = [
        from_text(column, schema.field(name).type, f"{where}: column {name!r}")
        for name, column in zip(names, rows.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays([*columns, pa.repeat(pa.scalar(INSERT, _TEXT), rows.num_rows)], schema=schema)


def read_snapshot(
    directory: str, files: Sequence[int], skip_rows: int, schema: pa.Schema, where: str
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a snapshot after the first `skip_rows`; `files` has the number of rows of each file."""
    filesystem, path = resolve(directory, None, where)
    for number, rows in enumerate(files):
        if skip_rows >= rows:
            skip_rows -= rows
            continue
        name = f"{path}/{number:06d}.parquet"
        try:
            with pq.ParquetFile(filesystem.open_input_file(name), memory_map=False) as file:
                for group in range(file.num_row_groups):
                    group_rows = file.metadata.row_group(group).num_rows
                    if skip_rows >= group_rows:
                        skip_rows -= group_rows
                        continue
                    table = file.read_row_group(group)
                    for batch in table.slice(skip_rows).to_batches():
                        yield pa.RecordBatch.from_arrays(
                            [batch.column(field.name).cast(field.type) for field in schema], schema=schema
                        )
                    skip_rows = 0
        except (OSError, pa.ArrowException, KeyError) as error:
            raise StorageError(f"{where}: the snapshot in {name} cannot be read: {error}") from error
