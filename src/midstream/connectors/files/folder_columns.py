"""Columns whose values are in the names of folders, as Spark writes partitioned files: `day=2026-11-30/part-0.parquet`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa

from midstream.connectors.files.file_formats import WantedColumns
from midstream.connectors.files.text_parsers import CsvOptions, csv_parser
from midstream.engine.core.errors import DataError, SchemaError
from midstream.engine.operators.bad_records import BadRecords
from midstream.engine.operators.source_api import SplitReader

NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"
"""The name of the folder of rows that have no value."""


def folder_values(path: str, roots: Sequence[str]) -> dict[str, str | None]:
    """Return the columns and values in the names of the folders between the outermost of `roots` that is above a file, and
    the file.
    """
    below = path.lstrip("/")  # some filesystems leave out the first slash
    prefixes = (f"{root.strip('/')}/".lstrip("/") for root in roots)
    rests = (below[len(prefix) :] for prefix in prefixes if below.startswith(prefix))
    folders = max(rests, key=len, default="").split("/")[:-1]
    found: dict[str, str | None] = {}
    for folder in folders:
        name, equals, value = folder.partition("=")
        if equals and name:
            name = _decoded(name, path)
            if name in found:
                raise DataError(f"{path}: two of its folders have a value of the column {name!r}")
            found[name] = None if value == NULL_FOLDER else _decoded(value, path)
    return found


def _decoded(text: str, path: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {text!r} in the name of its folder is no percent-encoded UTF-8: {error}") from error


def without(wanted: WantedColumns, names: Collection[str], path: str) -> WantedColumns:
    """Return the columns that are read from a file if its folders have `names`. Raises SchemaError if none remains."""
    if not names:
        return wanted
    if set(wanted.schema.names) <= set(names):
        raise SchemaError(
            f"{path}: all columns that are read are in the names of its folders; declare one that the file has as well"
        )

    def kept(schema: pa.Schema) -> pa.Schema:
        return pa.schema([field for field in schema if field.name not in names])

    in_seconds = None if wanted.in_seconds is None else kept(wanted.in_seconds)
    required = tuple(name for name in wanted.required if name not in names)
    return WantedColumns(kept(wanted.schema), wanted.declared, required, in_seconds)


def parsed_values(values: Mapping[str, str | None], wanted: WantedColumns, path: str) -> dict[str, pa.Scalar[Any]]:
    """Return values in the types of their columns; text means what it does in CSV. Raises SchemaError."""
    found: dict[str, pa.Scalar[Any]] = {}
    for name, text in values.items():
        kind = wanted.schema.field(name).type
        if text is None:
            if name in wanted.required:
                raise SchemaError(
                    f"{path}: column {name!r} must have a value, and its folder is that of rows without one"
                )
            found[name] = pa.scalar(None, kind)
            continue
        column = WantedColumns(pa.schema([wanted.in_text.field(name)]), declared=True)
        quoted = '"' + text.replace('"', '""') + '"\n'
        try:
            options = CsvOptions(header=False, newlines_in_values=True)
            parsed = csv_parser(options, column, [name])(quoted.encode())
            found[name] = parsed.column(0)[0].cast(kind)
        except (SchemaError, pa.ArrowException) as error:
            raise SchemaError(
                f"{path}: its folder has {text!r} as the value of the column {name!r}, which is declared as {kind}: {error}"
            ) from error
    return found


class FolderColumnsReader(SplitReader):
    """Adds columns to the rows of a file, each with one value. `schema`: the columns of both."""

    def __init__(self, reader: SplitReader, schema: pa.Schema, values: Mapping[str, pa.Scalar[Any]]) -> None:
        self._reader = reader
        self._schema = schema
        self._values = values

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        found = self._reader.read(rows_max)
        if found is None:
            return None
        batch, offset = found
        columns: list[pa.Array[Any]] = []
        for name in self._schema.names:
            value: Any = self._values.get(name)
            columns.append(batch.column(name) if value is None else pa.repeat(value, batch.num_rows))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema), offset

    def bad_records(self) -> BadRecords | None:
        return self._reader.bad_records()

    def close(self) -> None:
        self._reader.close()
