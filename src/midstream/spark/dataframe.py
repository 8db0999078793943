"""A bounded Spark DataFrame as a source: staged once as Parquet, so that replay is deterministic.

    <checkpoint_dir>/staged/<uid>/<time>-<token>/part-….parquet

The staged rows belong to the checkpoints that refer to them, and remain as long as these do.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.fs
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from midstream.connectors.common.filesystem import find_files, names_in, resolve
from midstream.connectors.files.file_formats import WantedColumns, explained
from midstream.connectors.files.file_source import (
    FileSplit,
    check_unchanged,
    open_row_groups,
    row_group_place,
    row_group_runs,
)
from midstream.connectors.files.parquet import RowGroup, open_parquet
from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.errors import ClusterError, ConfigError, InvariantError, JobError, SchemaError, StorageError
from midstream.engine.operators.source_api import (
    Discovery,
    DiscoveryContext,
    Source,
    Split,
    SplitReader,
    check_rate,
    decoded,
)
from midstream.spark.datasource_rows import arrow_schema
from midstream.spark.session import NEEDS_CLASSIC, is_local_master, is_of_connect

_WHERE: Final = "DataFrameSource"
_TRACEBACK: Final = "Traceback (most recent call last):\n"
_SPOILING: Final = {
    "spark.sql.parquet.outputTimestampType": ("TIMESTAMP_MILLIS", "cuts timestamps to milliseconds"),
    "spark.sql.parquet.datetimeRebaseModeInWrite": ("LEGACY", "moves days before 1582-10-15 by days"),
    "spark.sql.parquet.int96RebaseModeInWrite": ("LEGACY", "moves timestamps before 1582-10-15 by days"),
}
"""Settings under which Spark writes other values than it has, and the values for which it does."""


class StagedSplit(msgspec.Struct, frozen=True, array_like=True):
    directory: str
    """A path or URL, which also determines the filesystem of the file."""
    part: FileSplit


class DataFrameSource(Source):
    """The rows of a DataFrame as they are when the job starts for the first time.

    `prepare`, called before any slot takes a core, has Spark write them as Parquet below the checkpoint directory
    (which must be reachable from all nodes), or into a temporary directory if there is none, which only works on a
    local master. A restored job continues with the staged rows. Raises ConfigError for a streaming DataFrame,
    SchemaError for a type without an Arrow form, JobError for what a Python function in the DataFrame raises,
    ClusterError if Spark fails to write.
    """

    def __init__(self, frame: DataFrame, *, rows_per_s: float | None = None) -> None:
        if not hasattr(frame, "isStreaming"):
            raise ConfigError(f"{_WHERE}: {type(frame).__name__} is not a Spark DataFrame")
        if is_of_connect(frame):
            raise ConfigError(f"{_WHERE}: {NEEDS_CLASSIC}")
        if frame.isStreaming:
            raise ConfigError(
                f"{_WHERE}: a streaming DataFrame can only be read by Spark itself; for files use read_files(…, "
                "watch=True), for a Python Data Source from_datasource(…, streaming=True), and for any other source "
                "(Kafka, Delta, rate, …) a Python Data Source of your own, or spark.read for its current rows"
            )
        check_rate(rows_per_s, _WHERE)
        self.rows_per_s = rows_per_s
        self.schema = canonical_schema(arrow_schema(_schema_of(frame), _WHERE))
        self._frame: DataFrame | None = frame
        self._directory: str | None = None
        self._temporary: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frame": None, "_temporary": None}

    def prepare(self, uid: str, checkpoint_dir: str | None, restoring: bool) -> None:
        if checkpoint_dir is None:
            assert self._frame is not None
            master = str(self._frame.sparkSession.conf.get("spark.master", "local"))
            if not is_local_master(master):
                raise ConfigError(
                    f"{_WHERE} {uid!r}: on {master} its rows must be staged where all nodes can read them; "
                    "give Environment(checkpoint_dir=…)"
                )
            self._temporary = tempfile.mkdtemp(prefix="midstream-staged-")
            self._stage(os.path.join(self._temporary, "rows"))
            return
        above = f"{checkpoint_dir.rstrip('/')}/staged/{re.sub(r'[^A-Za-z0-9_.-]', '_', uid)}"
        name = _newest_whole(above) if restoring else None
        if name is None:
            name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
            self._stage(f"{above}/{name}")
        else:
            self._directory = f"{above}/{name}"

    def _stage(self, directory: str) -> None:
        assert self._frame is not None
        _check_settings(self._frame)
        try:
            self._frame.write.parquet(_for_spark(directory))
        except BaseException as error:
            _delete(directory)
            if not isinstance(error, (PySparkException, Py4JError)):
                raise
            raised, traceback = _raised_by_user(error)
            if raised:
                raise JobError(f"{_WHERE}: a function of the DataFrame failed: {raised}\n\n{traceback}") from error
            raise ClusterError(
                f"{_WHERE}: Spark could not write its rows to {directory}: {_first_line(error)}"
            ) from error
        self._directory = directory

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        if position is not None:
            return Discovery((), position, exhausted=True)
        if self._directory is None:
            raise InvariantError(f"{_WHERE} {context.uid!r}: splits were requested before it was prepared")
        filesystem, path = resolve(self._directory, None, _WHERE)
        splits: list[Split] = []
        for info in find_files(filesystem, path):
            with explained(info.path, "parquet"), ExitStack() as stack:
                metadata = open_parquet(filesystem, info.path, stack).metadata
                sizes = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            for index, run in enumerate(
                row_group_runs([RowGroup(group.num_rows, group.total_byte_size) for group in sizes])
            ):
                part = FileSplit(info.path, info.size, int(info.mtime_ns or 0), run.start, run.stop)
                payload = msgspec.msgpack.encode(StagedSplit(self._directory, part))
                split_id = f"{len(splits):06d}:{os.path.basename(info.path)}"
                splits.append(Split(split_id, payload, follows=index > 0))
        return Discovery(tuple(splits), b"all", exhausted=True)

    def open_split(self, split: Split) -> SplitReader:
        staged = decoded(split.payload, StagedSplit, _WHERE)
        filesystem, _ = resolve(staged.directory, None, _WHERE)
        check_unchanged(filesystem, staged.part)
        with explained(staged.part.path, "parquet"), ExitStack() as stack:
            found = canonical_schema(open_parquet(filesystem, staged.part.path, stack).schema_arrow)
        stored = pa.schema([(field.name, _stored(field.type, _field(found, field.name))) for field in self.schema])
        reader = open_row_groups(filesystem, staged.part, WantedColumns(stored, declared=False), split.offset)
        return reader if stored == self.schema else _StagedReader(reader, self.schema)

    def place(self, split: Split, first: int, last: int) -> str:
        return row_group_place(decoded(split.payload, StagedSplit, _WHERE).part, split.offset, first, last)

    def close(self) -> None:
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


class _StagedReader(SplitReader):
    """Reads a staged file in the types of the DataFrame."""

    def __init__(self, reader: SplitReader, schema: pa.Schema) -> None:
        self._reader = reader
        self._schema = schema

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        got = self._reader.read(rows_max)
        return None if got is None else (got[0].cast(self._schema), got[1])

    def close(self) -> None:
        self._reader.close()


def _stored(kind: pa.DataType, found: pa.DataType) -> pa.DataType:
    """Return the type that a staged file has for `kind`, if the type `found` is another form of the same values.

    Spark writes intervals as numbers of microseconds.
    """
    types = pa.types
    if types.is_duration(kind) and found == pa.int64():
        return found
    if types.is_large_list(kind) and types.is_large_list(found):
        return pa.large_list(_stored(kind.value_type, found.value_type))
    if types.is_map(kind) and types.is_map(found):
        return pa.map_(_stored(kind.key_type, found.key_type), _stored(kind.item_type, found.item_type))
    if types.is_struct(kind) and types.is_struct(found):
        return pa.struct([(field.name, _stored(field.type, _field(found, field.name))) for field in kind])
    return kind


def _field(found: pa.Schema | pa.StructType, name: str) -> pa.DataType:
    index = found.get_field_index(name)
    return found.field(index).type if index >= 0 else pa.null()


def _schema_of(frame: DataFrame) -> StructType:
    try:
        return frame.schema
    except (PySparkException, Py4JError, ValueError) as error:
        raise SchemaError(
            f"{_WHERE}: PySpark cannot read the types of its columns: {_first_line(error)}; cast the column, or leave it out"
        ) from error


def _check_settings(frame: DataFrame) -> None:
    for name, (spoiling, what) in _SPOILING.items():
        value = frame.sparkSession.conf.get(name, None)
        if value is not None and value.upper() == spoiling:
            raise ConfigError(f"{_WHERE}: the Spark session has {name}={value}, which {what} in staged rows; unset it")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _raised_by_user(error: Exception) -> tuple[str, str]:
    """Return what a Python function in the DataFrame raised, and its traceback, which Spark puts into its own text; or
    nothing.
    """
    _, _, rest = str(error).partition(_TRACEBACK)
    if not rest:
        return "", ""
    frames, _, _ = rest.partition("\n\tat ")  # here those of Java begin
    traceback = f"{_TRACEBACK}{frames}".strip()
    _, _, last = traceback.rpartition(_TRACEBACK)  # after the exceptions that it replaced
    lines = last.splitlines()
    begins = next((i for i, line in enumerate(lines) if line and not line[0].isspace()), len(lines))
    return "\n".join(lines[begins:]) or "an exception without a text", traceback


def _delete(directory: str) -> None:
    """Delete what was staged in part. If that fails now, it is still never mistaken for complete."""
    filesystem, path = resolve(directory, None, _WHERE)
    with suppress(OSError, pa.ArrowException):
        filesystem.delete_dir(path)


def _newest_whole(directory: str) -> str | None:
    """Return the newest complete staging."""
    filesystem, path = resolve(directory, None, _WHERE)
    try:
        for name in reversed(names_in(filesystem, path)):
            if filesystem.get_file_info(f"{path}/{name}/_SUCCESS").type == pyarrow.fs.FileType.File:
                return name
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{directory}: cannot be listed: {error}") from error
    return None


def _for_spark(directory: str) -> str:
    """Return a URL that means the same to Hadoop as `directory` to pyarrow."""
    if "://" not in directory:
        return f"file://{os.path.abspath(os.path.expanduser(directory))}"
    return re.sub(r"^s3://", "s3a://", directory)
