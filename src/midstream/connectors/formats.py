"""The three file formats: what columns a file has, and its rows as batches in canonical types.

Everything here blocks, and runs on an I/O pool (or on the driver, to infer a schema).
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.fs
import pyarrow.json
import pyarrow.parquet

from midstream.core.batches import canonical_schema, canonical_type, conform
from midstream.core.errors import ConfigError, SchemaError, StorageError

Format: TypeAlias = Literal["parquet", "csv", "jsonl"]

_SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
_COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".zip": "zip"}
_BLOCK_BYTES = 4 * 2**20
_SAMPLE_BYTES = 32 * 2**20
"""Types are inferred from so much of the first file."""
_PARQUET_ROWS = 65_536
_UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
_OF_VALUES = ("conversion error", "changed from", "unexpected field", "Failed to convert JSON", "JSON parsing of")
"""What pyarrow says when a file is well formed and its values are not of the declared types."""


class CsvOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a CSV file is written.

    `null_values`: texts that stand for null, in every column, unless quoted. `header`: the first line
    names the columns; without one, the schema must be declared and names them in order.
    `timestamp_formats`: strptime formats, tried after ISO 8601.
    """

    delimiter: str = ","
    quote: str = '"'
    header: bool = True
    null_values: tuple[str, ...] = ("", "NA", "null")
    newlines_in_values: bool = False
    timestamp_formats: tuple[str, ...] = ()


def format_of(path: str) -> Format | None:
    """By the suffix, behind which there may be one of a compression; None when it says nothing."""
    lower = path.lower()
    for suffix in _COMPRESSION:
        lower = lower.removesuffix(suffix)
    return next((found for suffix, found in _SUFFIXES.items() if lower.endswith(suffix)), None)


@contextmanager
def explained(path: str, format: Format) -> Iterator[None]:
    """What goes wrong with the bytes of a file becomes a StorageError, with its values a SchemaError."""
    try:
        yield
    except _UNREADABLE as error:
        text = str(error)
        if any(sign in text for sign in _OF_VALUES):
            raise SchemaError(
                f"{path}: {text}; declare other types for its columns in schema=, or mend the file"
            ) from error
        if isinstance(error, FileNotFoundError):
            raise StorageError(f"{path}: the file is gone") from error
        if isinstance(error, PermissionError):
            raise StorageError(f"{path}: may not be read: {text}") from error
        raise StorageError(
            f"{path}: cannot be read as {format}; half-written, damaged, or of another format: {text}"
        ) from error


# ---- what a file has ----


def infer_schema(filesystem: pyarrow.fs.FileSystem, path: str, format: Format, csv: CsvOptions) -> pa.Schema:
    """Canonical schema of the file at `path`. Raises SchemaError when it shows no columns."""
    with explained(path, format), ExitStack() as stack:
        if format == "parquet":
            found = open_parquet(filesystem, path, stack).schema_arrow
        else:
            stream = _open_text(filesystem, path, stack)
            head = stream.read(_SAMPLE_BYTES)
            if len(head) == _SAMPLE_BYTES:  # end with a whole line
                head = head[: head.rfind(b"\n") + 1]
            if not head.strip():
                raise SchemaError(f"{path}: empty; its columns cannot be inferred: declare schema=")
            options: dict[str, Any] = {"block_size": max(len(head), 1)}
            if format == "csv":
                reader = pyarrow.csv.open_csv(
                    pa.BufferReader(head),
                    read_options=pyarrow.csv.ReadOptions(**options),
                    parse_options=_csv_parse(csv),
                    convert_options=_csv_convert(csv, {}, None),
                )
            else:
                reader = pyarrow.json.open_json(pa.BufferReader(head), read_options=pyarrow.json.ReadOptions(**options))
            found = reader.schema
            if format == "jsonl":
                found = pa.unify_schemas([found, *(batch.schema for batch in reader)], promote_options="permissive")
    fields = [pa.field(f.name, pa.large_string()) if pa.types.is_null(f.type) else f for f in found]
    check_columns(pa.schema(fields), path)
    return canonical_schema(pa.schema(fields))


def check_columns(schema: pa.Schema, where: str) -> None:
    if len(schema) == 0:
        raise SchemaError(f"{where}: has no columns")
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise SchemaError(f"{where}: has more than one column {name!r}; rename one")


def parquet_row_groups(
    filesystem: pyarrow.fs.FileSystem, path: str, schema: pa.Schema, declared: bool
) -> list[tuple[int, int]]:
    """Rows and bytes of each row group, after checking the file's columns against `schema`."""
    with explained(path, "parquet"), ExitStack() as stack:
        file = open_parquet(filesystem, path, stack)
        check_parquet_schema(file.schema_arrow, schema, declared, path)
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def check_parquet_schema(found: pa.Schema, schema: pa.Schema, declared: bool, path: str) -> None:
    """Raises SchemaError naming file and column when a column is missing, unexpected, or of another kind."""
    for field in schema:
        index = found.get_field_index(field.name)
        if index < 0:
            raise SchemaError(
                f"{path}: column {field.name!r} is missing; it has {', '.join(found.names) or 'no columns'}"
            )
        kind = canonical_type(found.field(index).type)
        if not _fits(kind, field.type):
            raise SchemaError(
                f"{path}: column {field.name!r} is {kind}, {'declared' if declared else 'in other files'} as {field.type}"
            )
    extra = [name for name in found.names if schema.get_field_index(name) < 0]
    if extra and not declared:
        raise SchemaError(
            f"{path}: column {extra[0]!r} is not in other files; declare schema= with the columns to read"
        )


def _fits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a value of `kind` is one of `wanted` in another width: nothing is parsed or rounded."""
    types = pa.types
    return bool(
        kind == wanted
        or types.is_null(kind)
        or (types.is_integer(kind) and (types.is_integer(wanted) or types.is_floating(wanted)))
        or (types.is_floating(kind) and types.is_floating(wanted))
        or (types.is_decimal(kind) and types.is_decimal(wanted))
        or (types.is_timestamp(kind) and types.is_timestamp(wanted) and (kind.tz is None) == (wanted.tz is None))
        or (types.is_date(kind) and (types.is_date(wanted) or types.is_timestamp(wanted)))
        or (types.is_time(kind) and types.is_time(wanted))
        or (types.is_duration(kind) and types.is_duration(wanted))
        or (types.is_nested(kind) and kind.id == wanted.id)
    )


# ---- reading ----


def open_parquet(filesystem: pyarrow.fs.FileSystem, path: str, stack: ExitStack) -> pyarrow.parquet.ParquetFile:
    return pyarrow.parquet.ParquetFile(stack.enter_context(filesystem.open_input_file(path)))


def read_parquet(
    filesystem: pyarrow.fs.FileSystem, path: str, schema: pa.Schema, groups: range, skip_rows: int, stack: ExitStack
) -> tuple[Iterator[pa.RecordBatch], int]:
    """Batches of these row groups, and how many of their first rows are still to be left out.

    Row groups that lie wholly within `skip_rows` are not read.
    """
    with explained(path, "parquet"):
        file = open_parquet(filesystem, path, stack)
        if groups.stop > file.metadata.num_row_groups:
            raise StorageError(
                f"{path}: has {file.metadata.num_row_groups} row groups, not {groups.stop}; it has changed"
            )
        while groups and skip_rows >= file.metadata.row_group(groups[0]).num_rows:
            skip_rows -= file.metadata.row_group(groups[0]).num_rows
            groups = groups[1:]
    return _parquet_batches(file, path, schema, groups), skip_rows


def _parquet_batches(
    file: pyarrow.parquet.ParquetFile, path: str, schema: pa.Schema, groups: range
) -> Iterator[pa.RecordBatch]:
    if not groups:
        return
    with explained(path, "parquet"):
        for batch in file.iter_batches(_PARQUET_ROWS, row_groups=list(groups), columns=schema.names):
            yield conform(batch, schema, path)


def read_text(
    filesystem: pyarrow.fs.FileSystem,
    path: str,
    format: Format,
    schema: pa.Schema,
    declared: bool,
    csv: CsvOptions,
    stack: ExitStack,
) -> Iterator[pa.RecordBatch]:
    """All rows of a CSV or JSON lines file; columns beyond `schema` are left out if it was `declared`."""
    with explained(path, format):
        reader = _open_csv(filesystem, path, schema, declared, csv, stack) if format == "csv" else None
        if reader is None:
            reader = _open_jsonl(filesystem, path, schema, declared, stack)
        for batch in reader:
            yield conform(batch, schema, path)


def _open_csv(
    filesystem: pyarrow.fs.FileSystem, path: str, schema: pa.Schema, declared: bool, csv: CsvOptions, stack: ExitStack
) -> Any:
    types = {field.name: field.type for field in schema}
    columns = None
    if csv.header:
        with ExitStack() as briefly:
            first_line = _open_text(filesystem, path, briefly).read(2**20)
        names = pyarrow.csv.open_csv(
            pa.BufferReader(first_line), parse_options=_csv_parse(csv), convert_options=_csv_convert(csv, types, None)
        ).schema
        check_columns(names, path)
        check_names(names.names, schema, declared, path)
        columns = schema.names
    return pyarrow.csv.open_csv(
        _open_text(filesystem, path, stack),
        read_options=pyarrow.csv.ReadOptions(
            block_size=_BLOCK_BYTES, column_names=None if csv.header else schema.names, use_threads=False
        ),
        parse_options=_csv_parse(csv),
        convert_options=_csv_convert(csv, types, columns),
    )


def check_names(found: list[str], schema: pa.Schema, declared: bool, path: str) -> None:
    for name in schema.names:
        if name not in found:
            raise SchemaError(f"{path}: column {name!r} is missing; it has {', '.join(found)}")
    extra = [name for name in found if schema.get_field_index(name) < 0]
    if extra and not declared:
        raise SchemaError(
            f"{path}: column {extra[0]!r} is not in other files; declare schema= with the columns to read"
        )


def _csv_parse(csv: CsvOptions) -> pyarrow.csv.ParseOptions:
    return pyarrow.csv.ParseOptions(
        delimiter=csv.delimiter, quote_char=csv.quote or False, newlines_in_values=csv.newlines_in_values
    )


def _csv_convert(
    csv: CsvOptions, types: dict[str, pa.DataType], columns: list[str] | None
) -> pyarrow.csv.ConvertOptions:
    return pyarrow.csv.ConvertOptions(
        column_types=types,
        include_columns=columns,
        null_values=list(csv.null_values),
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        timestamp_parsers=[pyarrow.csv.ISO8601, *csv.timestamp_formats],
    )


def _open_jsonl(
    filesystem: pyarrow.fs.FileSystem, path: str, schema: pa.Schema, declared: bool, stack: ExitStack
) -> Any:
    as_read = pa.schema([pa.field(field.name, _json_type(field.type)) for field in schema])
    return pyarrow.json.open_json(
        _open_text(filesystem, path, stack),
        read_options=pyarrow.json.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=as_read, unexpected_field_behavior="ignore" if declared else "error"
        ),
    )


def _json_type(kind: pa.DataType) -> pa.DataType:
    """The type to read in place of one that pyarrow's JSON reader does not know; a cast does the rest."""
    if pa.types.is_large_list(kind):
        return pa.list_(_json_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _json_type(f.type)) for f in kind])
    if pa.types.is_date(kind):
        return pa.large_string()
    return kind


def _open_text(filesystem: pyarrow.fs.FileSystem, path: str, stack: ExitStack) -> Any:
    """The bytes of a file, decompressed as its suffix says."""
    compression = next((kind for suffix, kind in _COMPRESSION.items() if path.lower().endswith(suffix)), None)
    if compression != "zip":
        return stack.enter_context(filesystem.open_input_stream(path, compression=compression))
    archive = stack.enter_context(
        zipfile.ZipFile(io.BufferedReader(stack.enter_context(filesystem.open_input_file(path))))
    )
    members = [name for name in archive.namelist() if not name.endswith("/")]
    if len(members) != 1:
        raise ConfigError(f"{path}: a zip archive of {len(members)} files; only archives of one file can be read")
    return stack.enter_context(pa.PythonFile(stack.enter_context(archive.open(members[0])), mode="r"))
