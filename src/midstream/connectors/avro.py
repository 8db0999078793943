"""Avro values as columns, and columns as Avro values.

fastavro takes the bytes apart, by a schema without logical types, so that nothing becomes a Python object that is
narrower than the value (dates beyond the year 9999, decimals with too many digits). What becomes of the parts, by
the writer's schema and the reader's, is settled once for each pair of these, and done column by column.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.connectors.avro_types import AvroType, Field, arrow_fields, arrow_type, raw_schema
from midstream.core.errors import SchemaError

Build: TypeAlias = Callable[[list[Any]], pa.Array]
"""A column of values as fastavro gives them. Raises ArrowException for one that does not fit."""
_WIDER: Final = {"int": ("long", "float", "double"), "long": ("float", "double"), "float": ("double",)}
_DAY: Final = {"time-millis": 86_400_000, "time-micros": 86_400_000_000}
_EXACT: Final = Context(prec=80)
_NOT_AVRO: Final = (EOFError, ValueError, IndexError, OverflowError, struct.error)
"""What fastavro raises for bytes that are not of the schema."""


class AvroDecoder:
    """Values that were written with `writer`, as columns of `reader`, by Avro's rules of schema resolution.

    Fields go by name or alias; a field that the writer has not has the reader's default; numbers may get wider.
    Raises SchemaError when the schemas do not go together: no value of this writer can be read.
    """

    def __init__(self, writer: AvroType, reader: AvroType, where: str) -> None:
        import fastavro

        self._read = fastavro.schemaless_reader
        self._raw = fastavro.parse_schema(raw_schema(writer))
        self._schema = pa.schema(list(arrow_fields(reader, where)))
        self._columns = _record_columns(writer, reader, where)

    def decode(self, values: Sequence[bytes], skip: int) -> pa.RecordBatch:
        """A row for each value, whose first `skip` bytes are of something else. Raises ArrowInvalid."""
        read, raw = self._read, self._raw
        rows = []
        for value in values:
            stream = io.BytesIO(value)
            stream.seek(skip)
            try:
                rows.append(read(stream, raw))
            except _NOT_AVRO as error:
                raise pa.ArrowInvalid(f"the bytes end too early or are not of the schema ({error})") from error
            if stream.tell() != len(value):
                raise pa.ArrowInvalid(f"{len(value) - stream.tell()} bytes are left behind the record")
        return pa.RecordBatch.from_arrays([column(rows) for column in self._columns], schema=self._schema)


def _record_columns(writer: AvroType, reader: AvroType, where: str) -> list[Build]:
    """From records of the writer, as fastavro gives them, to the reader's columns."""
    written = {field.name: number for number, field in enumerate(writer.fields)}
    columns = []
    for field in reader.fields:
        place = f"{where}.{field.name}"
        number = next((written[name] for name in (field.name, *field.aliases) if name in written), None)
        if number is None:
            columns.append(_constant(field, place))
        else:
            columns.append(_part(f"f{number}", _resolved(writer.fields[number].type, field.type, place)))
    return columns


def _part(name: str, build: Build) -> Build:
    return lambda records: build([record[name] for record in records])


def _constant(field: Field, where: str) -> Build:
    if not field.has_default:
        raise SchemaError(f"{where} is not in the schema that the value was written with, and has no default")
    value = _default(field.type, field.default, where)
    build = _resolved(field.type, field.type, where)
    try:
        build([value])
    except pa.ArrowException as error:
        raise SchemaError(f"{where}: its default {field.default!r:.100} does not fit: {error}") from error
    return lambda records: build([value] * len(records))


def _default(kind: AvroType, given: Any, where: str) -> Any:
    """A default, which is JSON, as fastavro would give that value. That of a union is of its first branch."""
    if kind.kind == "union":
        return _default(kind.branches[0], given, where)
    fits: dict[str, Any] = {"null": type(None), "boolean": bool, "string": str, "bytes": str, "fixed": str, "enum": str}
    fits |= {"array": list, "map": dict, "record": dict}
    wanted = fits.get(kind.kind, (int, float) if kind.kind in ("float", "double") else int)
    if not isinstance(given, wanted) or (isinstance(given, bool) and kind.kind != "boolean"):
        raise SchemaError(f"{where}: its default {given!r:.100} is no {kind.kind}")
    match kind.kind:
        case "bytes" | "fixed":
            try:
                data = given.encode("latin-1")
            except UnicodeEncodeError as error:
                raise SchemaError(f"{where}: its default {given!r:.100} is no bytes: {error.reason}") from error
            if kind.kind == "fixed" and len(data) != kind.size:
                raise SchemaError(f"{where}: its default has {len(data)} bytes, not {kind.size}")
            return data
        case "enum":
            if given not in kind.symbols:
                raise SchemaError(f"{where}: its default {given!r:.100} is none of its symbols")
            return kind.symbols.index(given)
        case "array":
            return [_default(kind.of(), each, where) for each in given]
        case "map":
            return {key: _default(kind.of(), each, where) for key, each in given.items()}
        case "record":
            found = {}
            for number, field in enumerate(kind.fields):
                if field.name not in given and not field.has_default:
                    raise SchemaError(f"{where}: its default has no field {field.name!r}")
                found[f"f{number}"] = _default(
                    field.type, given.get(field.name, field.default), f"{where}.{field.name}"
                )
            return found
        case _:
            return given


def _resolved(writer: AvroType, reader: AvroType, where: str) -> Build:
    kind = arrow_type(reader, where)
    may_be_null = reader.is_nullable
    reader, writer = reader.without_null(where), writer.without_null(f"{where}, as it was written,")
    if writer.kind == "null":
        if not may_be_null:
            raise SchemaError(f"{where} was written as null, which the reader's schema does not allow")
        return lambda values: pa.nulls(len(values), kind)
    build = _build(writer, reader, kind, where)

    def column(values: list[Any]) -> pa.Array:
        there = [value for value in values if value is not None]
        if len(there) == len(values):
            return build(values)
        if not may_be_null:
            raise pa.ArrowInvalid(f"{where} is null, which the reader's schema does not allow")
        is_there = np.array([value is not None for value in values])
        return build(there).take(pa.array(np.cumsum(is_there) - 1, pa.int64(), mask=~is_there))

    return column


def _build(writer: AvroType, reader: AvroType, kind: pa.DataType, where: str) -> Build:
    """Of values that are not null."""
    before, after = writer.kind, reader.kind
    is_text = {before, after} == {"bytes", "string"}
    if before != after and after not in _WIDER.get(before, ()) and not is_text:
        raise SchemaError(f"{where} was written as {before}, which is not read as {after}")
    if writer.logical and reader.logical and _meaning(writer) != _meaning(reader):
        raise SchemaError(f"{where} was written as {_meaning(writer)}, which is not read as {_meaning(reader)}")
    match after:
        case "record":
            columns = _record_columns(writer, reader, where)
            fields = list(kind)
            return lambda values: pa.StructArray.from_arrays([column(values) for column in columns], fields=fields)
        case "array":
            items = _resolved(writer.of(), reader.of(), f"{where}[]")
            return lambda values: _lists(values, items([each for value in values for each in value]))
        case "map":
            items = _resolved(writer.of(), reader.of(), f"{where}{{}}")

            def entries(values: list[Any]) -> pa.Array:
                keys = pa.array([key for value in values for key in value], pa.large_string())
                content = items([each for value in values for each in value.values()])
                return _lists(values, pa.StructArray.from_arrays([keys, content], fields=list(kind.value_type)))

            return entries
        case "enum":
            return _enum(writer, reader, where)
        case "fixed" if writer.size != reader.size:
            raise SchemaError(f"{where} was written with {writer.size} bytes, and read as {reader.size}")
    if reader.logical == "decimal":
        return lambda values: _decimals(values, reader, kind, where)
    if is_text:
        return lambda values: _as_text_or_bytes(values, kind)
    if after in ("float", "double") and before in ("int", "long"):
        return lambda values: pa.array([float(value) for value in values], kind)
    if reader.logical in _DAY:
        return lambda values: _times_of_day(values, reader.logical, kind, where)
    if kind == pa.date32():
        return lambda values: pa.array(values, pa.int32()).cast(kind)
    if pa.types.is_timestamp(kind):
        return lambda values: pa.array(values, pa.int64()).cast(kind)
    return lambda values: pa.array(values, kind)


def _meaning(kind: AvroType) -> str:
    return f"decimal({kind.precision}, {kind.scale})" if kind.logical == "decimal" else kind.logical


def _lists(values: list[Any], items: pa.Array) -> pa.Array:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.array([len(value) for value in values], np.int64), out=offsets[1:])
    return pa.LargeListArray.from_arrays(pa.array(offsets), items)


def _enum(writer: AvroType, reader: AvroType, where: str) -> Build:
    symbols = [symbol if symbol in reader.symbols else reader.default_symbol for symbol in writer.symbols]

    def column(values: list[Any]) -> pa.Array:
        for number in values:
            if not 0 <= number < len(symbols):
                raise pa.ArrowInvalid(f"{where}: symbol {number} of an enum that has {len(symbols)}")
            if symbols[number] is None:
                raise pa.ArrowInvalid(
                    f"{where}: {writer.symbols[number]!r} is no symbol of the reader's schema, which has no default"
                )
        return pa.array([symbols[number] for number in values], pa.large_string())

    return column


def _decimals(values: list[Any], kind: AvroType, arrow: pa.DataType, where: str) -> pa.Array:
    most = 10**kind.precision
    found = []
    for value in values:
        if not value:
            raise pa.ArrowInvalid(f"{where}: a decimal without bytes")
        number = int.from_bytes(value, "big", signed=True)
        if not -most < number < most:
            raise pa.ArrowInvalid(f"{where}: a decimal of more than {kind.precision} digits")
        found.append(Decimal(number).scaleb(-kind.scale, _EXACT))
    return pa.array(found, arrow)


def _as_text_or_bytes(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind == pa.large_binary():
        return pa.array(values, pa.large_string()).cast(kind)
    array = pa.array(values, pa.large_binary()).cast(kind)
    array.validate(full=True)
    return array


def _times_of_day(values: list[Any], logical: str, kind: pa.DataType, where: str) -> pa.Array:
    if not all(0 <= value < _DAY[logical] for value in values):
        raise pa.ArrowInvalid(f"{where}: a time of day that is beyond the day")
    return pa.array(values, pa.int32() if logical == "time-millis" else pa.int64()).cast(kind)


# ---- writing ----


class AvroEncoder:
    """Rows as Avro, by a schema that is made of their columns. Raises SchemaError naming a column that Avro has no form for."""

    def __init__(self, schema: pa.Schema, name: str, where: str) -> None:
        import fastavro

        self._write = fastavro.schemaless_writer
        names = _Names(name)
        fields = [(field.name, *_written(field.type, names, f"{where}: column {field.name!r}")) for field in schema]
        for field_name, _, _ in fields:
            _check_name(field_name, f"{where}: column {field_name!r}")
        self.avro_schema: dict[str, Any] = {
            "type": "record",
            "name": _as_name(name),
            "fields": [{"name": name, "type": ["null", kind], "default": None} for name, kind, _ in fields],
        }
        self._values = [values for _, _, values in fields]
        raw = [{"name": name, "type": ["null", _without_logical(kind)]} for name, kind, _ in fields]
        self._raw = fastavro.parse_schema({**self.avro_schema, "fields": raw})

    def encode(self, batch: pa.RecordBatch, before: bytes) -> list[bytes]:
        """A value for each row, each behind the bytes `before`."""
        names = batch.schema.names
        columns = [values(batch.column(index)) for index, values in enumerate(self._values)]
        found = []
        for row in zip(*columns, strict=True):
            stream = io.BytesIO()
            stream.write(before)
            self._write(stream, self._raw, dict(zip(names, row, strict=True)))
            found.append(stream.getvalue())
        return found


class _Names:
    """Names for the records and fixed types within a schema, each once."""

    def __init__(self, name: str) -> None:
        self._name = _as_name(name)
        self._made = 0

    def new(self) -> str:
        self._made += 1
        return f"{self._name}_{self._made}"


def _as_name(text: str) -> str:
    name = "".join(char if char.isascii() and (char.isalnum() or char == "_") else "_" for char in text)
    return name if name and not name[0].isdigit() else f"_{name}"


def _check_name(name: str, where: str) -> None:
    if _as_name(name) != name:
        raise SchemaError(f"{where}: Avro's names have letters, digits and underscores; give it another with select()")


def _written(kind: pa.DataType, names: _Names, where: str) -> tuple[Any, Callable[[pa.Array], list[Any]]]:
    """The Avro type of a column, which may be null, and what fastavro is to be given for its values."""
    types = pa.types
    plain = {
        pa.bool_(): "boolean",
        pa.float32(): "float",
        pa.float64(): "double",
        pa.large_string(): "string",
        pa.large_binary(): "bytes",
        pa.string(): "string",
        pa.binary(): "bytes",
    }
    if kind in plain:
        return plain[kind], lambda column: column.to_pylist()
    if types.is_integer(kind) and kind != pa.uint64():
        wide = kind in (pa.int64(), pa.uint32())
        return "long" if wide else "int", lambda column: column.to_pylist()
    if types.is_date32(kind):
        return {"type": "int", "logicalType": "date"}, lambda column: column.cast(pa.int32()).to_pylist()
    if kind == pa.time32("ms"):
        return {"type": "int", "logicalType": "time-millis"}, lambda column: column.cast(pa.int32()).to_pylist()
    if kind == pa.time64("us"):
        return {"type": "long", "logicalType": "time-micros"}, lambda column: column.cast(pa.int64()).to_pylist()
    if types.is_timestamp(kind) and kind.unit in ("ms", "us"):
        logical = f"{'' if kind.tz else 'local-'}timestamp-{'millis' if kind.unit == 'ms' else 'micros'}"
        return {"type": "long", "logicalType": logical}, lambda column: column.cast(pa.int64()).to_pylist()
    if types.is_decimal128(kind) and kind.scale >= 0:
        avro = {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
        return avro, lambda column: [_decimal_bytes(value, kind.scale) for value in column.to_pylist()]
    if types.is_large_list(kind) or types.is_list(kind):
        inner, values = _written(kind.value_type, names, f"{where}[]")
        return {"type": "array", "items": ["null", inner]}, lambda column: _pieces(column, values)
    if types.is_struct(kind) and kind.num_fields:
        fields = []
        name = names.new()
        for field in kind:
            _check_name(field.name, f"{where}.{field.name}")
            fields.append((field.name, *_written(field.type, names, f"{where}.{field.name}")))
        described = [{"name": name, "type": ["null", avro], "default": None} for name, avro, _ in fields]
        return {"type": "record", "name": name, "fields": described}, lambda column: _structs(column, fields)
    raise SchemaError(f"{where} is {kind}, which Avro has no form for here; cast it, or leave it out with select()")


def _decimal_bytes(value: Decimal | None, scale: int) -> bytes | None:
    if value is None:
        return None
    number = int(value.scaleb(scale, _EXACT))
    return number.to_bytes((number if number >= 0 else ~number).bit_length() // 8 + 1, "big", signed=True)


def _pieces(column: pa.Array, values: Callable[[pa.Array], list[Any]]) -> list[Any]:
    lengths = pc.list_value_length(column).to_pylist()
    flat = iter(values(column.flatten()))
    return [None if length is None else [next(flat) for _ in range(length)] for length in lengths]


def _structs(column: pa.Array, fields: Sequence[tuple[str, Any, Callable[[pa.Array], list[Any]]]]) -> list[Any]:
    names = [name for name, _, _ in fields]
    parts = [values(part) for (_, _, values), part in zip(fields, column.flatten(), strict=True)]
    rows = zip(*parts, strict=True)
    return [
        dict(zip(names, row, strict=True)) if there else None
        for there, row in zip(column.is_valid().to_pylist(), rows, strict=True)
    ]


def _without_logical(kind: Any) -> Any:
    if isinstance(kind, list):
        return [_without_logical(each) for each in kind]
    if not isinstance(kind, dict):
        return kind
    if "logicalType" in kind:
        return kind["type"]
    if kind["type"] == "array":
        return {"type": "array", "items": _without_logical(kind["items"])}
    fields = [{"name": field["name"], "type": _without_logical(field["type"])} for field in kind["fields"]]
    return {**kind, "fields": fields}
