"""How a data file of an Iceberg table has the table's columns: by ids, not by names, which may have changed since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet

from midstream.connectors.files.file_formats import explained
from midstream.connectors.files.table_files import constant_text
from midstream.engine.core.arrow_types import is_list_of_any_length
from midstream.engine.core.batches import canonical_type
from midstream.engine.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.table.name_mapping import MappedField

_ID: Final = b"PARQUET:field_id"


def parquet_schema_of(filesystem: pyarrow.fs.FileSystem, path: str) -> pa.Schema:
    with explained(path, "parquet"):
        return pyarrow.parquet.read_schema(path, filesystem=filesystem)


def stored_columns(
    file: pa.Schema, columns: pa.Schema, mapping: Sequence[MappedField], path: str
) -> dict[str, pa.Field[Any]]:
    """Return those of `columns` that a file has: the table's name, and the field under the name that it has there.

    `columns`: with the ids of fields, as `schema_to_pyarrow` has them. `mapping`: the ids of columns of files without
    ids, by names.
    """
    ids = [id_of(field) for field in file]
    if all(found is None for found in ids):
        if not mapping:
            raise DataError(
                f"{path}: its columns have no field ids, and the table has no schema.name-mapping.default, which would say "
                "which columns they are"
            )
        by_name = {name: field.field_id for field in mapping for name in field.names}
        ids = [by_name.get(field.name) for field in file]
    there = {found: field for found, field in zip(ids, file, strict=True) if found is not None}
    return {
        field.name: pa.field(there[found].name, _stored_type(there[found].type, field.type, path))
        for field in columns
        if (found := id_of(field)) in there
    }


def id_of(field: pa.Field[Any]) -> int | None:
    """Return the id of a field of a file, or of a schema with ids; None if it has none."""
    found = (field.metadata or {}).get(_ID)
    return None if found is None else int(found)


def _stored_type(file: pa.DataType, table: pa.DataType, path: str) -> pa.DataType:
    """Return the canonical type of `table` with the names that the fields of structs have in the file.

    A field that the file lacks gets a name that the file does not have either: it is read as null.
    """
    if pa.types.is_struct(table) and pa.types.is_struct(file):
        there = {id_of(field): field for field in file}
        if set(there) == {None}:
            there = {id_of(field): file.field(field.name) for field in table if field.name in file.names}
        fields = []
        for field in table:
            found = there.get(id_of(field))
            if found is None:
                fields.append(pa.field(f"\x01{id_of(field)}", canonical_type(field.type)))
            else:
                fields.append(pa.field(found.name, _stored_type(found.type, field.type, path)))
        return pa.struct(fields)
    if is_list_of_any_length(table) and is_list_of_any_length(file):
        return pa.large_list(_stored_type(file.value_type, table.value_type, path))
    if pa.types.is_map(table) and pa.types.is_map(file):
        kind = pa.map_(
            _stored_type(file.key_type, table.key_type, path), _stored_type(file.item_type, table.item_type, path)
        )
        if canonical_type(kind) != canonical_type(table):
            raise ConfigError(
                f"{path}: fields of a struct within a map were renamed or added after the file was written, which cannot be "
                "read; leave the column out with columns="
            )
    return canonical_type(table)


def partition_constants(
    file: DataFile, spec: PartitionSpec, columns: Mapping[int, pa.Field[Any]]
) -> dict[str, str | None]:
    """Return the values of columns by which a file is partitioned as they are; a file may lack such a column.

    `columns`: the columns to read, by the ids of their fields.
    """
    from pyiceberg.transforms import IdentityTransform

    found: dict[str, str | None] = {}
    for index, field in enumerate(spec.fields):
        column = columns.get(field.source_id)
        if column is not None and isinstance(field.transform, IdentityTransform):
            value: Any = file.partition[index]
            found[column.name] = constant_text(pa.scalar(value, column.type))
    return found


def deleted_rows(
    filesystem: pyarrow.fs.FileSystem, paths: Sequence[str], data_file: str
) -> np.ndarray[Any, Any] | None:
    """Return whether each row of a data file was deleted, up to the last one that was; None if none was.

    `paths`: files with positions of deleted rows, of this file and of others. `data_file`: its location in the metadata.
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
    deleted = np.zeros(int(together.max()) + 1, np.bool_)
    deleted[together] = True
    return deleted
