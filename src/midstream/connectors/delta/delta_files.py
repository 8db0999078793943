"""Files of rows that a subtask writes, for the committer to add to a Delta table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from midstream.connectors.common.filesystem import make_durable
from midstream.connectors.common.table_columns import nullable
from midstream.connectors.delta.column_mapping import as_in_files
from midstream.connectors.delta.delta_tables import (
    FOLDER_BYTES_MAX,
    first_beyond_years,
    first_too_long,
    partition_folder,
    partition_text,
    statistics,
)
from midstream.connectors.files.folder_columns import NULL_FOLDER
from midstream.connectors.files.partitioned_files import Partition, PartitionedPart
from midstream.connectors.files.rolling_files import OpenFile
from midstream.engine.core.batches import from_polars, to_polars
from midstream.engine.core.errors import SchemaError
from midstream.engine.core.python_values import shown
from midstream.engine.operators.sink_api import WriterContext

if TYPE_CHECKING:
    from midstream.connectors.delta.delta_sink import DeltaSink


class WrittenFile(msgspec.Struct, frozen=True, array_like=True):
    """A committable. `name` is relative to the table, which is at `place`."""

    job_id: str
    uid: str
    name: str
    size: int
    rows: int
    partition: dict[str, str | None]
    statistics: str
    place: str
    """The table's location, see `location_of`."""
    key: tuple[str, ...] = ()
    """The columns by which its rows are merged into the table; without them the file is added as it is."""
    table_id: str = ""
    """The id of the table's metadata; "" in checkpoints of versions that did not note it."""


class AppendedPart(PartitionedPart):
    def __init__(
        self, sink: DeltaSink, context: WriterContext, schema: pa.Schema, next_name: Callable[[], str]
    ) -> None:
        super().__init__(schema, sink.roll_bytes, f"operator {context.name!r}: {sink._where}")
        self._sink = sink
        self._context = context
        self._next_name = next_name
        self._kept = nullable(pa.schema([field for field in schema if field.name not in sink.partition_by]))
        self._stored = sink.mapping.stored(self._kept)

    def _parts(self, batch: pa.RecordBatch) -> list[tuple[Partition, pa.RecordBatch]]:
        """Group rows by the values of the partition columns, and drop these columns."""
        names = self._sink.partition_by
        if not names:
            return [((), as_in_files(batch, self._stored))]
        check_dates(batch, names, "partition column", self._rows, self._where)
        frames = to_polars(batch).partition_by(list(names), maintain_order=True, include_key=False, as_dict=True)
        for values in frames:
            if values not in self._partitions:
                check_partition(batch, names, values, self._rows, self._where)
        parts = ((values, from_polars(frame, self._kept, self._where)) for values, frame in frames.items())
        return [(values, as_in_files(part, self._stored)) for values, part in parts]

    def _partition(self, values: Partition) -> dict[str, str | None]:
        return partition_of(self._sink.mapping.stored_names(self._sink.partition_by), values)

    def _new_file(self, values: Partition) -> OpenFile:
        sink, name = self._sink, f"{partition_folder(self._partition(values))}{self._next_name()}"
        return OpenFile(sink.filesystem, sink.directory, name, "parquet", self._stored)

    def _committables(self, ended: Sequence[tuple[Partition, OpenFile]], checkpoint_id: int) -> list[bytes]:
        make_folders_durable(self._sink, [file.name for _, file in ended])
        return [msgspec.msgpack.encode(self._committable(values, file)) for values, file in ended]

    def _committable(self, values: Partition, file: OpenFile) -> WrittenFile:
        context, sink = self._context, self._sink
        assert sink._described is not None, "set together with the schema, without which there is no writer"
        unbounded = sink.mapping.stored_names(self._unbounded)
        described = statistics(sink.filesystem, f"{sink.directory}/{file.name}", sink._described, unbounded)
        return WrittenFile(
            context.job_id,
            context.uid,
            file.name,
            file.size,
            file.rows,
            self._partition(values),
            described,
            sink.location,
            (),
            sink.table_id,
        )


def partition_of(names: Sequence[str], values: Partition) -> dict[str, str | None]:
    """Return the values of partition columns as the log has them."""
    return dict(zip(names, map(partition_text, values), strict=True))


def check_dates(batch: pa.RecordBatch, names: Sequence[str], what: str, before: int, where: str) -> None:
    """Raise SchemaError for a date beyond the years that the log, and names of partitions, can have.

    `before`: the number of earlier rows since the last checkpoint.
    """
    for name in names:
        column = batch.column(name)
        row = first_beyond_years(column) if pa.types.is_date(column.type) else None
        if row is not None:
            raise SchemaError(
                f"{where}: row {before + row} since the last checkpoint: {what} {name!r} has a date "
                f"{column.view(pa.int32())[row].as_py()} days after 1970-01-01, and the table's log has only years 1 to "
                "9999; filter such rows out"
            )


def check_partition(batch: pa.RecordBatch, names: Sequence[str], values: Partition, before: int, where: str) -> None:
    """Raise SchemaError for a row of these partition values if one has no folder of its own."""
    partition = partition_of(names, values)
    name = next((name for name, text in partition.items() if text == NULL_FOLDER), None)
    why = "which readers take for null"
    if name is None:
        name = first_too_long(partition)
        why = f"which would need a folder name of more than {FOLDER_BYTES_MAX} bytes; partition by something shorter"
    if name is not None:
        value = values[names.index(name)]
        row = before + pc.index(batch.column(name), pa.scalar(value, batch.schema.field(name).type)).as_py()
        raise SchemaError(
            f"{where}: row {row} since the last checkpoint: partition column {name!r} has {shown(value)}, {why}"
        )


def make_folders_durable(sink: DeltaSink, names: Iterable[str]) -> None:
    """Sync the folders above those of files, in which theirs may be new."""
    for folder in {above for name in names for above in _folders_above(name)}:
        make_durable(sink.filesystem, f"{sink.directory}/{folder}")


def _folders_above(name: str) -> Iterator[str]:
    """Yield the folders above a file: for `a/b/c.parquet`, `a` and the table's own, ""; `OpenFile` syncs `a/b`."""
    pieces = name.split("/")[:-1]
    return ("/".join(pieces[:n]) for n in range(len(pieces)))
