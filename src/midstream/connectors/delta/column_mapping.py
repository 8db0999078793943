"""The names and ids that a Delta table's columns have in its data files (`delta.columnMapping.mode`).

Such names never change, so that columns can be renamed and dropped without writing files again. Partition values and
statistics in the log have them too. Splits and committables have them, since columns may be renamed before these are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs

from midstream.connectors.common.table_columns import has_not_null
from midstream.connectors.files.field_ids import FIELD_ID, columns_by_id, id_of, parquet_schema_of
from midstream.connectors.files.table_files import TableFile, open_table_file, renamed
from midstream.engine.core.arrow_types import is_list_of_any_length
from midstream.engine.core.batches import canonical_type
from midstream.engine.core.errors import ConfigError, DataError
from midstream.engine.operators.source_api import SplitReader

if TYPE_CHECKING:
    from deltalake import DeltaTable

_READER_WITH_FEATURES: Final = 3
"""The version of the protocol from which on it lists features, of which column mapping is one; version 2 is that alone."""
_MODE: Final = "delta.columnMapping.mode"
_ID: Final = b"delta.columnMapping.id"
_NAME: Final = b"delta.columnMapping.physicalName"


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """How the columns of a table are called in its files.

    `mode`: "none", "name" or "id"; with "id", the ids in files count, and not the names. `fields`: by the names in the
    table, the columns in the files.
    """

    mode: str
    fields: dict[str, pa.Field[Any]]

    @classmethod
    def of(cls, schema: str, configuration: Mapping[str, str | None], where: str) -> ColumnMapping:
        """Return the mapping of a table with this schema (as JSON). Raises ConfigError for one that is not known."""
        mode = configuration.get(_MODE) or "none"
        if mode not in ("none", "name", "id"):
            raise ConfigError(f"{where}: {_MODE} is {mode!r}; only 'name' and 'id' are supported")
        return cls(mode, {field.name: _stored(field, mode != "none", where) for field in arrow_schema(schema)})

    @property
    def is_mapped(self) -> bool:
        return self.mode != "none"

    @property
    def names(self) -> dict[str, str]:
        """The names of the table's columns by those in its files."""
        return {field.name: name for name, field in self.fields.items()}

    def stored_names(self, names: Iterable[str]) -> list[str]:
        return [self.fields[name].name for name in names]

    def stored(self, schema: pa.Schema) -> pa.Schema:
        """Return columns of the table as its files have them; types with a NOT NULL field stay as they are, see `schema_of`."""
        fields = [self.fields[field.name].with_nullable(field.nullable) for field in schema]
        pairs = zip(schema, fields, strict=True)
        return pa.schema([found.with_type(field.type) if has_not_null(field.type) else found for field, found in pairs])

    def open_file(
        self,
        filesystem: pyarrow.fs.FileSystem,
        path: str,
        file: TableFile,
        schema: pa.Schema,
        offset_rows: int,
        deleted: Callable[[], np.ndarray[Any, Any] | None] | None = None,
    ) -> SplitReader:
        """Open a file as `open_table_file` does. `file.constants` have the names of files; `schema` those of the table, or
        columns that only files of changes have.
        """
        if not self.is_mapped:
            return open_table_file(filesystem, path, file, schema, offset_rows, deleted=deleted)
        names = self.names
        wanted = [field for field in schema if self.fields.get(field.name, field).name not in file.constants]

        def stored() -> dict[str, pa.Field[Any]]:
            found = {field.name: self.fields.get(field.name, field) for field in wanted}
            if self.mode == "name":
                return found
            by_id = pa.schema([self.fields[name].with_name(name) for name in found if name in self.fields])
            file_fields = parquet_schema_of(filesystem, path)
            if all(id_of(field) is None for field in file_fields):
                raise DataError(
                    f"{path}: its columns have no field ids, by which the table says which columns they are"
                )
            there = columns_by_id(file_fields, by_id)
            return there | {name: field for name, field in found.items() if name not in self.fields}

        constants = {names.get(name, name): value for name, value in file.constants.items()}
        at_table = msgspec.structs.replace(file, constants=constants)
        return open_table_file(filesystem, path, at_table, schema, offset_rows, stored=stored, deleted=deleted)


def arrow_schema(described: str) -> pa.Schema:
    """Return the schema that a table's metadata has as JSON, with the metadata of its fields."""
    from deltalake import Schema

    return pa.schema(Schema.from_json(described).to_arrow())  # type: ignore[arg-type]  # its stub lacks Arrow's C interface


def mapping_of(table: DeltaTable, where: str) -> ColumnMapping:
    """Return the mapping of a table. Raises ConfigError for one that is not known, or that is not required of readers."""
    found = ColumnMapping.of(table.schema().to_json(), table.metadata().configuration, where)
    protocol = table.protocol()
    has_features = protocol.min_reader_version >= _READER_WITH_FEATURES
    is_required = (
        "columnMapping" in (protocol.reader_features or ()) if has_features else protocol.min_reader_version > 1
    )
    if found.is_mapped and not is_required:
        raise ConfigError(
            f"{where}: the table has {_MODE}, and its protocol does not require readers to know it, so they may read other "
            "values; add the table feature columnMapping"
        )
    return found


def as_in_files(batch: pa.RecordBatch, stored: pa.Schema) -> pa.RecordBatch:
    """Return rows of a table as its files have them; `stored` has the same columns in the same order."""
    columns = [renamed(column, field.type) for column, field in zip(batch.columns, stored, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=stored)


def _stored(field: pa.Field[Any], is_mapped: bool, where: str) -> pa.Field[Any]:
    if not is_mapped:
        return pa.field(field.name, canonical_type(field.type))
    found = field.metadata or {}
    if not (found.get(_NAME) and found.get(_ID)):
        raise ConfigError(
            f"{where}: the table has column mapping, and its column {field.name!r} no physical name or id"
        )
    return pa.field(found[_NAME].decode(), _stored_type(field.type, where), metadata={FIELD_ID: found[_ID]})


def _stored_type(kind: pa.DataType, where: str) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_stored(field, True, where) for field in kind])
    if is_list_of_any_length(kind):
        return pa.large_list(_stored_type(kind.value_type, where))
    if pa.types.is_map(kind):
        return pa.map_(_stored_type(kind.key_type, where), _stored_type(kind.item_type, where))
    return canonical_type(kind)
