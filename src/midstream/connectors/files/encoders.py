"""The file formats that a sink writes: rows in, bytes out."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import date
from typing import Any, Final, Literal, Protocol, TypeAlias

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from midstream.engine.core.arrow_types import TICKS_PER_S, leaves, outside_of_years
from midstream.engine.core.batches import check_held_by_polars, to_polars
from midstream.engine.core.errors import SchemaError

OutputFormat: TypeAlias = Literal["parquet", "jsonl"]
_WHOLE_MINUTES_DAYS: Final = (737, (date.max - date(1970, 1, 1)).days - 1)
"""From 1972-01-08 all zones differ from UTC by whole minutes: Liberia was the last to. To the end of the years everywhere."""
_CURE: Final = "turn such values into null or strings first"


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
        self._writer = pyarrow.parquet.ParquetWriter(
            stream, schema, compression="zstd", compression_level=1, write_page_checksum=True
        )

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()


class _JsonLinesEncoder:
    def __init__(self, stream: Any, schema: pa.Schema) -> None:
        self._stream = stream
        self._checked = [field.name for field in schema if any(map(_may_lack_a_form, _leaf_types(field.type)))]

    def write(self, batch: pa.RecordBatch) -> None:
        for name in self._checked:
            for values in leaves(batch.column(name)):
                _check_forms(name, values)
        text = io.BytesIO()
        to_polars(batch).write_ndjson(text)
        self._stream.write(text.getbuffer())

    def close(self) -> None: ...


def _leaf_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    if kind.num_fields == 0:
        yield kind
    for i in range(kind.num_fields):
        yield from _leaf_types(kind.field(i).type)


def _may_lack_a_form(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def _check_forms(name: str, values: pa.Array[Any]) -> None:
    """Raise SchemaError for a number that is not finite, and for a time whose text would be that of no or another time."""
    if pa.types.is_floating(values.type):
        odd = values.filter(pc.invert(pc.is_finite(values)))
        if len(odd):
            raise _no_form(name, odd[0].as_py(), _CURE)
    elif _may_lack_a_form(values.type):
        _check_years(name, values, values)
        times = pl.Series(values)  # with polars, which writes them: other libraries know other offsets of the past
        kind, ticks = times.dtype, times.to_physical()
        if not isinstance(kind, pl.Datetime) or kind.time_zone in (None, "UTC"):
            return
        per_minute = 60 * TICKS_PER_S[kind.time_unit]
        first, end = (day * 1440 * per_minute for day in _WHOLE_MINUTES_DAYS)
        if ticks.is_between(first, min(end, 2**63 - 1)).all():
            return
        local = times.dt.replace_time_zone(None)
        _check_years(name, values, local.to_arrow())
        between = ((local.to_physical() - ticks) % per_minute != 0).arg_true()
        if len(between):
            value = f"{times[int(between[0])]}, whose offset from UTC is not whole minutes"
            raise _no_form(name, value, f"convert it to UTC first: pl.col({name!r}).dt.convert_time_zone('UTC')")


def _check_years(name: str, values: pa.Array[Any], as_written: pa.Array[Any]) -> None:
    outside = values.filter(outside_of_years(as_written))
    if len(outside):
        value = f"{outside[0].value} as {values.type}, which is outside of the years 1 to 9999"
        raise _no_form(name, value, _CURE)


def _no_form(name: str, value: object, cure: str) -> SchemaError:
    return SchemaError(f"column {name!r} has the value {value}, for which JSON has no form; write Parquet, or {cure}")


def check_encodable(schema: pa.Schema, format: OutputFormat, where: str) -> None:
    """Raise SchemaError naming the first column that has no form in the format."""
    if len(schema) == 0:
        raise SchemaError(f"{where}: the stream has no columns to write")
    types = pa.types
    if format == "jsonl":
        check_held_by_polars(schema, where)
    for field in schema:
        if format == "jsonl":
            culprit = _without_json_form(field.type)
            if culprit is not None:
                example = f", for example with_columns(pl.col({field.name!r}).bin.encode('base64'))"
                raise SchemaError(
                    f"{where}: column {field.name!r} is {field.type}, and JSON has no form for {culprit}; write "
                    f"Parquet, or convert it to a string first{example if types.is_large_binary(field.type) else ''}"
                )
            continue
        try:
            with pyarrow.parquet.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])):
                pass
        except (pa.ArrowException, OSError) as error:  # OSError: a type that Arrow has, and Parquet has not
            raise SchemaError(
                f"{where}: column {field.name!r} is {field.type}, which Parquet cannot hold: {error}; cast it first"
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
