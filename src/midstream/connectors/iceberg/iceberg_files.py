"""How a data file of an Iceberg table has the table's columns: by ids, not by names, which may have changed since."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.name_mapping import MappedField
from pyiceberg.transforms import IdentityTransform

from midstream.connectors.files.field_ids import FIELD_ID, columns_by_id, id_of
from midstream.connectors.files.file_formats import explained
from midstream.connectors.files.parquet import checked_time_us
from midstream.connectors.files.table_files import constant_text, row_count_of
from midstream.engine.core.arrow_types import is_list_of_any_length
from midstream.engine.core.errors import ConfigError, DataError

_TIME_BYTES: Final = 8


def stored_columns(
    file: pa.Schema, columns: pa.Schema, mapping: Sequence[MappedField], path: str
) -> dict[str, pa.Field[Any]]:
    """Return those of `columns` that a file has: the table's name, and the field under the name that it has there.

    `columns`: with the ids of fields, as `schema_to_pyarrow` has them. `mapping`: the ids of columns of files without
    ids, by names.
    """
    fields = list(file)
    if all(id_of(field) is None for field in fields):
        if not mapping:
            raise DataError(
                f"{path}: its columns have no field ids, and the table has no schema.name-mapping.default, which would say "
                "which columns they are"
            )
        fields = _mapped(fields, mapping)
    return columns_by_id(fields, columns)


def column_names(file: pa.Schema, table: Schema, by_name: Collection[str]) -> list[str | None]:
    """Return which column of the table each column of a file is: found by its name, if that is one of `by_name`, or else by
    its id. None: it was dropped.
    """
    names = {field.field_id: field.name for field in table.fields}
    own = set(by_name) & set(names.values())
    return [field.name if field.name in own else names.get(id_of(field) or -1) for field in file]


def _mapped(fields: Iterable[pa.Field[Any]], mapping: Sequence[MappedField]) -> list[pa.Field[Any]]:
    """Return fields with the ids that a name mapping has for their names."""
    by_name = {name: each for each in mapping for name in each.names}
    found = []
    for field in fields:
        mapped = by_name.get(field.name)
        if mapped is not None and mapped.field_id is not None:
            kind = _mapped_type(field.type, mapped.fields)
            found.append(pa.field(field.name, kind, metadata={FIELD_ID: str(mapped.field_id).encode()}))
    return found


def _mapped_type(kind: pa.DataType, mapping: Sequence[MappedField]) -> pa.DataType:
    within = {name: each.fields for each in mapping for name in each.names}
    if not within:
        return kind
    if pa.types.is_struct(kind):
        return pa.struct(_mapped(kind, mapping))
    if is_list_of_any_length(kind):
        return pa.large_list(_mapped_type(kind.value_type, within.get("element", ())))
    if pa.types.is_map(kind):
        keys, items = within.get("key", ()), within.get("value", ())
        return pa.map_(_mapped_type(kind.key_type, keys), _mapped_type(kind.item_type, items))
    return kind


def partition_constants(
    file: DataFile, spec: PartitionSpec, columns: Mapping[int, pa.Field[Any]]
) -> dict[str, str | None]:
    """Return the values of columns by which a file is partitioned as they are; a file may lack such a column.

    `columns`: the columns to read, by the ids of their fields.
    """
    found: dict[str, str | None] = {}
    for index, field in enumerate(spec.fields):
        column = columns.get(field.source_id)
        if column is not None and isinstance(field.transform, IdentityTransform):
            value: Any = file.partition[index]
            found[column.name] = constant_text(pa.scalar(value, column.type))
    return found


def min_time_us(file: DataFile, field_id: int, column: pa.Field[Any]) -> int | None:
    """Return the earliest time in a column of microseconds, in microseconds since 1970; None if the file's metrics lack it."""
    bound = (file.lower_bounds or {}).get(field_id)
    is_time = pa.types.is_timestamp(column.type) and column.type.unit == "us"
    if not is_time or bound is None or len(bound) != _TIME_BYTES:  # that of a date has fewer, which became a time later
        return None
    return checked_time_us(int.from_bytes(bound, "little", signed=True))


def delete_files_of(table: Table, where: str, snapshot_id: int | None = None) -> dict[str, tuple[str, ...]]:
    """Return for data files of a snapshot, by default the newest one, the files of position deletes that apply to them.

    Raises ConfigError for deletes by equality.
    """
    try:  # by all keys: a filter would hide some deletes by equality
        tasks = list(table.scan(snapshot_id=snapshot_id).plan_files())
    except ValueError as error:
        raise ConfigError(
            f"{where}: the table has deletes that pyiceberg cannot read ({error}); compact the table with the engine that "
            "wrote them"
        ) from error
    return {task.file.file_path: tuple(sorted(each.file_path for each in task.delete_files)) for task in tasks}


def deleted_rows(
    filesystem: pyarrow.fs.FileSystem, paths: Sequence[str], data_file: str, data_path: str
) -> np.ndarray[Any, Any] | None:
    """Return whether each row of a data file was deleted; None if none was. Raises DataError for rows that it does not
    have.

    `paths`: files with positions of deleted rows, of this file and of others. `data_file`: its location in the metadata.
    `data_path`: its path in `filesystem`.
    """
    rows: list[np.ndarray[Any, Any]] = []
    for path in paths:
        with explained(path, "parquet"):
            found = pyarrow.parquet.read_table(path, columns=["file_path", "pos"], filesystem=filesystem)
        chosen = found.filter(
            pc.equal(found.column("file_path").cast(pa.large_string()), pa.scalar(data_file, pa.large_string()))
        )
        rows.append(chosen.column("pos").to_numpy())
    together = np.concatenate(rows) if rows else np.array([], np.int64)
    if not len(together):
        return None
    row_count = row_count_of(filesystem, data_path)
    wrong = together[(together < 0) | (together >= row_count)]
    if len(wrong):
        raise DataError(
            f"{', '.join(paths)}: row {wrong[0]} of {data_file} is deleted, which has {row_count} rows; the table is damaged"
        )
    deleted = np.zeros(row_count, np.bool_)
    deleted[together] = True
    return deleted
