"""The file formats that a sink writes: rows in, bytes out."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, Literal, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from midstream.core.arrow_types import is_struct_array
from midstream.core.batches import check_held_by_polars, to_polars
from midstream.core.errors import JobError, SchemaError

OutputFormat: TypeAlias = Literal["parquet", "jsonl"]


class Encoder(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> None:
        """Write the end of the file; the stream stays open."""
        ...


def new_encoder(format: OutputFormat, stream: Any, schema: pa.Schema) -> Encoder:
    if format == "parquet":
        return _ParquetEncoder(stream, schema)
    return _JsonLinesEncoder(stream, schema)


class _ParquetEncoder:
    def __init__(self, stream: Any, schema: pa.Schema) -> None:
        self._writer = pyarrow.parquet.ParquetWriter(stream, schema, compression="zstd", compression_level=1)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()


class _JsonLinesEncoder:
    def __init__(self, stream: Any, schema: pa.Schema) -> None:
        self._stream = stream
        self._with_floats = [field.name for field in schema if _has_floats(field.type)]

    def write(self, batch: pa.RecordBatch) -> None:
        for name in self._with_floats:
            for floats in _floats_in(batch.column(name)):
                if not pc.all(pc.is_finite(floats), min_count=0).as_py():
                    odd = floats.filter(pc.invert(pc.is_finite(floats)))[0].as_py()
                    raise JobError(
                        f"column {name!r} has the value {odd}, for which JSON has no form; write Parquet, or turn "
                        "such values into null or strings first"
                    )
        text = io.BytesIO()
        to_polars(batch).write_ndjson(text)
        self._stream.write(text.getbuffer())

    def close(self) -> None: ...


def _has_floats(kind: pa.DataType) -> bool:
    """Whether the type is a float or contains one."""
    return bool(pa.types.is_floating(kind)) or any(_has_floats(kind.field(i).type) for i in range(kind.num_fields))


def _floats_in(column: pa.Array[Any]) -> Iterator[pa.Array[Any]]:
    if pa.types.is_floating(column.type):
        yield column
    elif is_struct_array(column):
        for part in column.flatten():
            yield from _floats_in(part)
    elif isinstance(column, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):  # a map is a ListArray too
        yield from _floats_in(column.flatten())


def check_encodable(schema: pa.Schema, format: OutputFormat, where: str) -> None:
    """Raise SchemaError naming the first column that has no form in the format."""
    if len(schema) == 0:
        raise SchemaError(f"{where}: the stream has no columns to write")
    if format == "jsonl":
        check_held_by_polars(schema, where)
    for field in schema:
        if format == "jsonl":
            culprit = _without_json_form(field.type)
            if culprit is not None:
                raise SchemaError(
                    f"{where}: column {field.name!r} is {field.type}, and JSON has no form for {culprit}; write "
                    "Parquet, or convert it to a string first"
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
