"""The file formats that a sink writes: rows in, bytes out."""

from __future__ import annotations

import io
from typing import Any, Literal, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.parquet

from midstream.core.batches import check_held_by_polars, to_polars
from midstream.core.errors import SchemaError

OutputFormat: TypeAlias = Literal["parquet", "jsonl"]


class Encoder(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> None:
        """Write what belongs at the end; the stream stays open."""
        ...


def new_encoder(format: OutputFormat, stream: Any, schema: pa.Schema) -> Encoder:
    if format == "parquet":
        return _ParquetEncoder(stream, schema)
    return _JsonLinesEncoder(stream)


class _ParquetEncoder:
    def __init__(self, stream: Any, schema: pa.Schema) -> None:
        self._writer = pyarrow.parquet.ParquetWriter(stream, schema, compression="zstd", compression_level=1)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()


class _JsonLinesEncoder:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, batch: pa.RecordBatch) -> None:
        text = io.BytesIO()
        to_polars(batch).write_ndjson(text)
        self._stream.write(text.getbuffer())

    def close(self) -> None: ...


def check_encodable(schema: pa.Schema, format: OutputFormat, where: str) -> None:
    """Raises SchemaError naming the first column that the format has no form for."""
    if len(schema) == 0:
        raise SchemaError(f"{where}: the stream has no columns to write")
    if format == "jsonl":
        check_held_by_polars(schema, where)
    for field in schema:
        if format == "jsonl":
            culprit = _without_json_form(field.type)
            if culprit is not None:
                raise SchemaError(
                    f"{where}: column {field.name!r} is {field.type}, and JSON has no form for {culprit}; "
                    "write Parquet, or make it text first"
                )
            continue
        try:
            with pyarrow.parquet.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])):
                pass
        except pa.ArrowException as error:
            raise SchemaError(
                f"{where}: column {field.name!r} is {field.type}, which Parquet cannot hold: {error}"
            ) from error


def _without_json_form(kind: pa.DataType) -> pa.DataType | None:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind):
        return _without_json_form(kind.value_type)
    if types.is_struct(kind):
        return next((culprit for f in kind if (culprit := _without_json_form(f.type)) is not None), None)
    is_known = (
        types.is_primitive(kind)  # numbers, booleans, times
        or types.is_large_string(kind)
        or types.is_string(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
    )
    return None if is_known else kind
