"""Columns of a Parquet file by the ids of their fields, which tables keep when columns are renamed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet

from midstream.connectors.files.file_formats import explained
from midstream.engine.core.arrow_types import is_list_of_any_length
from midstream.engine.core.batches import canonical_type

FIELD_ID: Final = b"PARQUET:field_id"


def parquet_schema_of(filesystem: pyarrow.fs.FileSystem, path: str) -> pa.Schema:
    with explained(path, "parquet"):
        return pyarrow.parquet.read_schema(path, filesystem=filesystem)


def id_of(field: pa.Field[Any]) -> int | None:
    """Return the id of a field of a file, or of a schema with ids; None if it has none."""
    found = (field.metadata or {}).get(FIELD_ID)
    return None if found is None else int(found)


def columns_by_id(file: Iterable[pa.Field[Any]], columns: pa.Schema) -> dict[str, pa.Field[Any]]:
    """Return those of `columns`, which have ids, that a file has: the field under the name that it has there."""
    there = {found: field for field in file if (found := id_of(field)) is not None}
    return {
        field.name: pa.field(there[found].name, _stored_type(there[found].type, field.type))
        for field in columns
        if (found := id_of(field)) in there
    }


def _stored_type(file: pa.DataType, table: pa.DataType) -> pa.DataType:
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
                fields.append(pa.field(found.name, _stored_type(found.type, field.type)))
        return pa.struct(fields)
    if is_list_of_any_length(table) and is_list_of_any_length(file):
        return pa.large_list(_stored_type(file.value_type, table.value_type))
    if pa.types.is_map(table) and pa.types.is_map(file):
        return pa.map_(_stored_type(file.key_type, table.key_type), _stored_type(file.item_type, table.item_type))
    return canonical_type(table)
