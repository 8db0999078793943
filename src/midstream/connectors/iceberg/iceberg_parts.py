"""Files that are written for an Iceberg table: its data files, and those of rows that wait to be merged by key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pyarrow.fs
from pyiceberg.table import Table

from midstream.connectors.common.table_columns import nullable
from midstream.connectors.files.keyed_files import FOLDER, KeyedPart
from midstream.connectors.files.partitioned_files import Partition, PartitionedPart
from midstream.connectors.files.rolling_files import OpenFile
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable, IcebergFile, data_location
from midstream.connectors.iceberg.iceberg_sorting import Sorter
from midstream.connectors.iceberg.iceberg_tables import ColumnMetrics, Partitioner, column_metrics, parquet_columns
from midstream.engine.core.batches import from_polars, to_polars
from midstream.engine.core.errors import SchemaError


@dataclass(frozen=True, slots=True)
class TableTarget:
    """What a slot needs of the table to write files for it."""

    identifier: tuple[str, ...]
    uuid: str
    location: str
    """The location of the table's data, as a URL."""
    filesystem: pyarrow.fs.FileSystem
    directory: str
    """The location of the table's data, as a path in `filesystem`."""
    columns: pa.Schema
    """The stream's columns in the table's types; required ones are not nullable."""
    file_columns: pa.Schema
    """The columns of the files, with the ids of fields."""
    schema: str
    """The table's schema, as JSON."""
    spec: str
    """The table's partitioning, as JSON."""
    sort_order: str
    """The order of rows in the table's files, as JSON."""
    properties: Mapping[str, str]


def target_of(there: CatalogTable, table: Table, columns: pa.Schema) -> TableTarget:
    """Return what is needed to write files with these of the table's columns."""
    found, (filesystem, directory) = table.metadata.schema(), there.data_directory(table)
    return TableTarget(
        there.identifier,
        str(table.metadata.table_uuid),
        data_location(table),
        filesystem,
        directory,
        columns,
        parquet_columns(found, columns.names),
        found.model_dump_json(),
        table.metadata.spec().model_dump_json(),
        table.sort_order().model_dump_json(),
        dict(table.metadata.properties),
    )


class IcebergPart(PartitionedPart):
    """Data files as the table has them, by partition."""

    def __init__(
        self, target: TableTarget, job_id: str, uid: str, roll_bytes: int, next_name: Callable[[], str], where: str
    ) -> None:
        super().__init__(target.columns, roll_bytes, where)
        self._target = target
        self._job_id = job_id
        self._uid = uid
        self._next_name = next_name
        self._partitioner: Partitioner | None = None
        self._sorter: Sorter | None = None
        self._with_nulls: set[str] = set()
        """Columns with a null."""

    def _partition(self) -> Partitioner:
        if self._partitioner is None:  # made on the I/O pool: the import of pyiceberg is slow
            self._partitioner = Partitioner.of(self._target.spec, self._target.schema, self._where)
        return self._partitioner

    def _parts(self, batch: pa.RecordBatch) -> list[tuple[Partition, pa.RecordBatch]]:
        self._with_nulls |= {name for name in batch.schema.names if batch.column(name).null_count}
        values = self._partition().values(batch)
        if not values:
            return [((), batch)]
        names = [f"partition {n}" for n in range(len(values))]
        frame = to_polars(batch)
        by = to_polars(pa.RecordBatch.from_arrays(values, names)).rename(lambda name: f"{name} of {id(self)}")
        frames = frame.hstack(by).partition_by(by.columns, maintain_order=True, include_key=False, as_dict=True)
        columns = nullable(self._schema)
        return [(key, from_polars(rows, columns, self._where)) for key, rows in frames.items()]

    def _arranged(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Sort the rows of a row group, as the table asks for. A file of one row group is sorted as a whole."""
        if self._sorter is None:
            self._sorter = Sorter.of(self._target.sort_order, self._target.schema)
        return self._sorter.sorted(rows)

    def _new_file(self, values: Partition) -> OpenFile:
        target = self._target
        return OpenFile(target.filesystem, target.directory, self._next_name(), "parquet", target.file_columns)

    def _committables(self, ended: Sequence[tuple[Partition, OpenFile]], checkpoint_id: int) -> list[bytes]:
        target, partitioner = self._target, self._partition()
        schema = partitioner.schema.select(*target.columns.names)
        filled = [field.field_id for field in schema.fields if field.name not in self._with_nulls]
        return [
            msgspec.msgpack.encode(
                IcebergFile(
                    self._job_id,
                    self._uid,
                    target.identifier,
                    target.uuid,
                    target.location,
                    file.name,
                    file.size,
                    file.rows,
                    partitioner.spec.spec_id,
                    partitioner.encoded(values),
                    column_metrics(
                        target.filesystem,
                        f"{target.directory}/{file.name}",
                        schema,
                        target.properties,
                        self._unbounded,
                    ),
                    filled,
                    sort_order_id=self._sorter.order_id if self._sorter is not None and file.writes == 1 else 0,
                )
            )
            for values, file in ended
        ]


class IcebergKeyedPart(KeyedPart):
    """Rows of one subtask that wait to be merged."""

    def __init__(
        self,
        target: TableTarget,
        key: tuple[str, ...],
        op: str | None,
        job_id: str,
        uid: str,
        roll_bytes: int,
        next_name: Callable[[], str],
        where: str,
    ) -> None:
        super().__init__(target.columns, target.file_columns, key, op, self._new_file, roll_bytes, where)
        self._target = target
        self._job_id = job_id
        self._uid = uid
        self._next_name = next_name
        self._partitioner: Partitioner | None = None

    def _checked(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Raises SchemaError for a value that no partition can have, which would be too late at the commit."""
        if self._partitioner is None:
            self._partitioner = Partitioner.of(self._target.spec, self._target.schema, self._where)
        values = self._partitioner.values(rows)
        if values:
            names = [f"partition {n}" for n in range(len(values))]
            for each in to_polars(pa.RecordBatch.from_arrays(values, names)).unique().rows():
                try:
                    self._partitioner.encoded(each)
                except Exception as error:  # whatever pyiceberg raises for its types
                    raise SchemaError(
                        f"{self._where}: a row after row {self._rows} since the last checkpoint would be in partition {each}, "
                        f"which Iceberg cannot record: {error}; filter such rows out, or partition by something else"
                    ) from error
        return rows

    def _new_file(self, columns: pa.Schema) -> OpenFile:
        target = self._target
        return OpenFile(target.filesystem, target.directory, f"{FOLDER}{self._next_name()}", "parquet", columns)

    def _directory(self) -> tuple[pyarrow.fs.FileSystem, str]:
        return self._target.filesystem, self._target.directory

    def _committable(self, file: OpenFile) -> bytes:
        target, metrics = self._target, ColumnMetrics({}, {}, {}, {}, {}, [])
        return msgspec.msgpack.encode(
            IcebergFile(
                self._job_id,
                self._uid,
                target.identifier,
                target.uuid,
                target.location,
                file.name,
                file.size,
                file.rows,
                -1,
                [],
                metrics,
                [],
                tuple(self._key),
            )
        )
