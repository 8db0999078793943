"""Conversion between Avro values and columns.

Avro has no checksum, so its bytes are parsed strictly: what the specification does not allow (a number that is too
long, a branch that a union does not have, a boolean of 2) is refused, where other parsers would accept it. How
each part is converted is determined once for each pair of writer's and reader's schema, then done column by column; no
intermediate Python object, such as a datetime, is narrower than the value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from decimal import Context, Decimal
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from midstream.connectors.formats.avro_types import AvroType, Field, arrow_fields, arrow_type
from midstream.engine.core.arrow_types import is_list_array, is_struct_array, list_lengths, nulls, to_list
from midstream.engine.core.errors import SchemaError

Read: TypeAlias = Callable[[bytes, int], tuple[Any, int]]
"""Reads the value at a place in the bytes, and returns it with the place after it. Raises IndexError or ValueError.

A record is a list of its fields' values, an enum the number of its symbol; a value with a logical type is that of the
underlying type.
"""
Build: TypeAlias = "Callable[[list[Any]], pa.Array[Any]]"
"""Builds a column of such values. Raises ArrowException for one that does not fit."""
_WIDER: Final = {"int": ("long", "float", "double"), "long": ("float", "double"), "float": ("double",)}
_DAY: Final = {"time-millis": 86_400_000, "time-micros": 86_400_000_000}
_EXACT: Final = Context(prec=80)
_FLOAT: Final = struct.Struct("<f")
_DOUBLE: Final = struct.Struct("<d")


class AvroDecoder:
    """Decodes values written with the schema `writer` to columns of `reader`, by Avro's rules of schema resolution.

    Records, enums and fixed match by name without the namespace, or by an alias of the reader, fields by name or alias; a
    field that the writer lacks has the default of the reader; numbers may be widened, but not rounded.
    Raises SchemaError if the schemas are incompatible: no value of this writer can be read.
    """

    def __init__(self, writer: AvroType, reader: AvroType, where: str) -> None:
        self._read = _reader(writer)
        self._schema = pa.schema(list(arrow_fields(reader, where)))
        _check_type_name(writer, reader, where)
        self._columns = _record_columns(writer, reader, where)

    def decode(self, values: Sequence[bytes], skip: int) -> pa.RecordBatch:
        """Decode one row per value, skipping the first `skip` bytes of each. Raises ArrowInvalid."""
        read = self._read
        rows = []
        for value in values:
            try:
                row, end = read(value, skip)
            except IndexError:
                raise pa.ArrowInvalid("the bytes end within the record") from None
            except ValueError as error:
                raise pa.ArrowInvalid(f"the bytes are not of the schema: {error}") from error
            if end != len(value):
                raise pa.ArrowInvalid(f"{len(value) - end} bytes are left after the record")
            rows.append(row)
        return pa.RecordBatch.from_arrays([column(rows) for column in self._columns], schema=self._schema)


def _number(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at
    found, shift = byte & 0x7F, 7
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than ten bytes")
    if found >= 1 << 64:
        raise ValueError("a number of more than 64 bits")
    return (found >> 1) ^ -(found & 1), at


def _int(data: bytes, at: int) -> tuple[int, int]:
    found, at = _number(data, at)
    if not -(1 << 31) <= found < 1 << 31:
        raise ValueError(f"an int of {found}, which has more than 32 bits")
    return found, at


def _boolean(data: bytes, at: int) -> tuple[bool, int]:
    byte = data[at]
    if byte > 1:
        raise ValueError(f"a boolean of {byte}")
    return byte == 1, at + 1


def _bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _number(data, at)
    if size < 0:
        raise ValueError(f"a length of {size}")
    return _taken(data, at, size)


def _text(data: bytes, at: int) -> tuple[str, int]:
    found, at = _bytes(data, at)
    return found.decode(), at


def _taken(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    end = at + size
    if end > len(data):
        raise IndexError(end)
    return data[at:end], end


def _unpacked(form: struct.Struct) -> Read:
    def read(data: bytes, at: int) -> tuple[float, int]:
        found, at = _taken(data, at, form.size)
        return form.unpack(found)[0], at

    return read


_READ: Final[dict[str, Read]] = {
    "null": lambda data, at: (None, at),
    "boolean": _boolean,
    "int": _int,
    "long": _number,
    "enum": _number,
    "float": _unpacked(_FLOAT),
    "double": _unpacked(_DOUBLE),
    "bytes": _bytes,
    "string": _text,
}


def _reader(kind: AvroType) -> Read:
    match kind.kind:
        case "record":
            return _record_reader([_reader(field.type) for field in kind.fields])
        case "union":
            return _union_reader([_reader(branch) for branch in kind.branches])
        case "array":
            return _items_reader(_reader(kind.of()))
        case "map":
            entries = _items_reader(_record_reader([_text, _reader(kind.of())]))

            def read_map(data: bytes, at: int) -> tuple[dict[str, Any], int]:
                found, at = entries(data, at)
                return dict(found), at

            return read_map
        case "fixed":
            return lambda data, at: _taken(data, at, kind.size)
        case _:  # primitive types
            return _READ[kind.kind]


def _record_reader(fields: list[Read]) -> Read:
    def read(data: bytes, at: int) -> tuple[list[Any], int]:
        row = []
        for field in fields:
            value, at = field(data, at)
            row.append(value)
        return row, at

    return read


def _union_reader(branches: list[Read]) -> Read:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        branch, at = _number(data, at)
        if not 0 <= branch < len(branches):
            raise ValueError(f"branch {branch} of a union that has {len(branches)}")
        return branches[branch](data, at)

    return read


def _items_reader(item: Read) -> Read:
    """Return a reader of items, each of at least one byte: what a block claims to hold is bounded by its bytes."""

    def read(data: bytes, at: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while True:
            count, at = _number(data, at)
            if not count:
                return found, at
            block_end = None
            if count < 0:  # then the size of the block comes first
                size, at = _number(data, at)
                count, block_end = -count, at + size
            for _ in range(count):
                value, at = item(data, at)
                found.append(value)
            if block_end is not None and at != block_end:
                raise ValueError("a block whose items do not have the size that it states")

    return read


def _record_columns(writer: AvroType, reader: AvroType, where: str) -> list[Build]:
    """Return how to build each of the reader's columns from records of the writer."""
    written = {field.name: number for number, field in enumerate(writer.fields)}
    columns = []
    for field in reader.fields:
        place = f"{where}.{field.name}"
        number = next((written[name] for name in (field.name, *field.aliases) if name in written), None)
        if number is None:
            columns.append(_constant(field, place))
        else:
            columns.append(_part(number, _resolved(writer.fields[number].type, field.type, place)))
    return columns


def _part(number: int, build: Build) -> Build:
    return lambda records: build([record[number] for record in records])


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


def _default(kind: AvroType, given: Any, where: str) -> Any:  # noqa: PLR0912 - one arm for each type
    """Return the value of a default, which is JSON. That of a union belongs to its first branch."""
    if kind.kind == "union":
        return _default(kind.branches[0], given, where)
    fits: dict[str, Any] = {"null": type(None), "boolean": bool, "string": str, "bytes": str, "fixed": str, "enum": str}
    fits |= {"array": list, "map": dict, "record": dict}
    wanted = fits.get(kind.kind, (int, float) if kind.kind in ("float", "double") else int)
    if not isinstance(given, wanted) or (isinstance(given, bool) and kind.kind != "boolean"):
        raise SchemaError(f"{where}: its default {given!r:.100} is not a valid {kind.kind}")
    match kind.kind:
        case "bytes" | "fixed":
            try:
                data = given.encode("latin-1")
            except UnicodeEncodeError as error:
                raise SchemaError(
                    f"{where}: its default {given!r:.100} does not stand for bytes: {error.reason}"
                ) from error
            if kind.kind == "fixed" and len(data) != kind.size:
                raise SchemaError(f"{where}: its default has {len(data)} bytes, not {kind.size}")
            return data
        case "enum":
            if given not in kind.symbols:
                raise SchemaError(f"{where}: its default {given!r:.100} is not one of its symbols")
            return kind.symbols.index(given)
        case "array":
            return [_default(kind.of(), each, where) for each in given]
        case "map":
            return {key: _default(kind.of(), each, where) for key, each in given.items()}
        case "record":
            found = []
            for field in kind.fields:
                if field.name not in given and not field.has_default:
                    raise SchemaError(f"{where}: its default has no field {field.name!r}")
                found.append(_default(field.type, given.get(field.name, field.default), f"{where}.{field.name}"))
            return found
        case _:  # JSON values of other types need no conversion
            return given


def _resolved(writer: AvroType, reader: AvroType, where: str) -> Build:
    kind = arrow_type(reader, where)
    may_be_null = reader.is_nullable
    reader, writer = reader.without_null(where), writer.without_null(f"{where}, as it was written,")
    if writer.kind == "null":
        if not may_be_null:
            raise SchemaError(f"{where} was written as null, which the reader's schema does not allow")
        return lambda values: nulls(len(values), kind)
    build = _build(writer, reader, kind, where)

    def column(values: list[Any]) -> pa.Array[Any]:
        there = [value for value in values if value is not None]
        if len(there) == len(values):
            return build(values)
        if not may_be_null:
            raise pa.ArrowInvalid(f"{where} is null, which the reader's schema does not allow")
        is_there = np.array([value is not None for value in values])
        return build(there).take(pa.array(np.cumsum(is_there) - 1, pa.int64(), mask=~is_there))

    return column


def _build(writer: AvroType, reader: AvroType, kind: pa.DataType, where: str) -> Build:  # noqa: PLR0912 - one arm for each type
    """Return how to build a column of values that are not null."""
    before, after = writer.kind, reader.kind
    is_text = {before, after} == {"bytes", "string"}
    is_refused = before != after and after not in _WIDER.get(before, ()) and not is_text
    is_number = is_text and "decimal" in (writer.logical, reader.logical)
    if is_refused or is_number or (writer.meaning and reader.meaning and writer.meaning != reader.meaning):
        raise SchemaError(
            f"{where} was written as {writer.meaning or before}, which is not read as {reader.meaning or after}"
        )
    _check_type_name(writer, reader, where)
    match after:
        case "record":
            columns = _record_columns(writer, reader, where)
            assert pa.types.is_struct(kind), kind
            fields = list(kind)
            return lambda values: pa.StructArray.from_arrays([column(values) for column in columns], fields=fields)
        case "array":
            items = _resolved(writer.of(), reader.of(), f"{where}[]")
            return lambda values: _lists(values, items([each for value in values for each in value]))
        case "map":
            items = _resolved(writer.of(), reader.of(), f"{where}{{}}")
            assert pa.types.is_large_list(kind), kind
            entry = kind.value_type
            assert pa.types.is_struct(entry), entry
            key_and_value = list(entry)

            def entries(values: list[Any]) -> pa.Array[Any]:
                keys = pa.array([key for value in values for key in value], pa.large_string())
                content = items([each for value in values for each in value.values()])
                return _lists(values, pa.StructArray.from_arrays([keys, content], fields=key_and_value))

            return entries
        case "enum":
            return _enum(writer, reader, where)
        case "fixed" if writer.size != reader.size:
            raise SchemaError(f"{where} was written with {writer.size} bytes, and read as {reader.size}")
        case _:  # other types have no nested columns, and are converted below
            pass
    if reader.logical == "decimal":
        return lambda values: _decimals(values, reader, kind, where)
    if is_text:
        return lambda values: _as_text_or_bytes(values, kind)
    if after in ("float", "double") and before in ("int", "long"):
        return lambda values: _floats(values, kind, where)
    if reader.logical in _DAY:
        return lambda values: _times_of_day(values, reader.logical, kind, where)
    if kind == pa.date32():
        return lambda values: pa.array(values, pa.int32()).cast(kind)
    if pa.types.is_timestamp(kind):
        return lambda values: pa.array(values, pa.int64()).cast(kind)
    return lambda values: pa.array(values, kind)


def _check_type_name(writer: AvroType, reader: AvroType, where: str) -> None:
    """Raise SchemaError if two records, enums or fixed are different types. Other types have no name."""
    name = writer.name.rpartition(".")[2]
    if name != reader.name.rpartition(".")[2] and not {name, writer.name} & {*reader.aliases}:
        raise SchemaError(
            f"{where} was written as the {writer.kind} {writer.name} and is read as {reader.name}; if both are the same "
            f'type, give that of the reader "aliases": ["{writer.name}"]'
        )


def _lists(values: list[Any], items: pa.Array[Any]) -> pa.Array[Any]:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.array([len(value) for value in values], np.int64), out=offsets[1:])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), items)


def _enum(writer: AvroType, reader: AvroType, where: str) -> Build:
    symbols = [symbol if symbol in reader.symbols else reader.default_symbol for symbol in writer.symbols]

    def column(values: list[Any]) -> pa.Array[Any]:
        for number in values:
            if not 0 <= number < len(symbols):
                raise pa.ArrowInvalid(f"{where}: symbol {number} of an enum that has {len(symbols)}")
            if symbols[number] is None:
                raise pa.ArrowInvalid(
                    f"{where}: {writer.symbols[number]!r} is not a symbol of the reader's schema, which has no default"
                )
        return pa.array([symbols[number] for number in values], pa.large_string())

    return column


def _decimals(values: list[Any], kind: AvroType, arrow: pa.DataType, where: str) -> pa.Array[Any]:
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


def _as_text_or_bytes(values: list[Any], kind: pa.DataType) -> pa.Array[Any]:
    if kind == pa.large_binary():
        return pa.array(values, pa.large_string()).cast(kind)
    array = pa.array(values, pa.large_binary()).cast(kind)
    array.validate(full=True)
    return array


def _floats(values: list[int], kind: pa.DataType, where: str) -> pa.Array[Any]:
    floats = pa.array([float(value) for value in values], kind)
    kept: list[Any] = to_list(floats)
    for value, made in zip(values, kept, strict=True):
        if value != made:
            raise pa.ArrowInvalid(f"{where}: {value} would be rounded to the {kind} {made}; read it as a long")
    return floats


def _times_of_day(values: list[Any], logical: str, kind: pa.DataType, where: str) -> pa.Array[Any]:
    if not all(0 <= value < _DAY[logical] for value in values):
        raise pa.ArrowInvalid(f"{where}: a time of day that is beyond the day")
    return pa.array(values, pa.int32() if logical == "time-millis" else pa.int64()).cast(kind)


# ---- writing ----

Write: TypeAlias = Callable[[bytearray, Any], None]
"""Appends a value to the bytes."""
Values: TypeAlias = "Callable[[pa.Array[Any]], list[Any]]"
"""Returns the values of a column, as they are written; None where it is null."""


class AvroEncoder:
    """Encodes rows as Avro, by a schema derived from their columns. Raises SchemaError naming a column without an Avro
    form.
    """

    def __init__(self, schema: pa.Schema, name: str, where: str) -> None:
        places = [f"{where}: column {column!r}" for column in schema.names]
        self.avro_schema, self._values, self._write = self._record(schema, _as_name(name), places)

    def encode(self, batch: pa.RecordBatch, before: bytes) -> list[bytes]:
        """Encode one value per row, each after the bytes `before`."""
        columns = [values(batch.column(index)) for index, values in enumerate(self._values)]
        found = []
        for row in zip(*columns, strict=True):
            out = bytearray(before)
            self._write(out, row)
            found.append(bytes(out))
        return found

    def _record(
        self, columns: Iterable[pa.Field[Any]], name: str, places: Sequence[str]
    ) -> tuple[dict[str, Any], list[Values], Write]:
        """Return the Avro type of a record, how to get the values of each of its columns, and how to write one row.

        `name`: its full name. A record within it is named by its column, with that name as the namespace: so a new
        column does not rename the other records, which would make them other types. `places`: what messages call each
        column.
        """
        parts = [
            (column.name, *self._column(column.type, f"{name}.{column.name}", place))
            for column, place in zip(columns, places, strict=True)
        ]
        for (column, *_), place in zip(parts, places, strict=True):
            _check_name(column, place)
        fields = [{"name": column, "type": ["null", avro], "default": None} for column, avro, _, _ in parts]
        write = _write_fields([write for *_, write in parts])
        return {"type": "record", "name": name, "fields": fields}, [values for _, _, values, _ in parts], write

    def _column(self, kind: pa.DataType, name: str, where: str) -> tuple[Any, Values, Write]:
        """Return the Avro type of a column, which may be null, how to get its values, and how to write one.

        `name`: that of the record, if it has one.
        """
        types = pa.types
        avro: Any
        if kind in _PLAIN:
            avro, write = _PLAIN[kind]
            return avro, lambda column: column.to_pylist(), write
        for storage in (pa.int32(), pa.int64()):
            logical = _logical(kind, storage)
            if logical:
                avro = {"type": "int" if storage == pa.int32() else "long", "logicalType": logical}
                return avro, lambda column, storage=storage: column.cast(storage).to_pylist(), _write_number
        if types.is_decimal128(kind) and kind.scale >= 0:
            avro = {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
            return avro, lambda column: [_unscaled(each, kind.scale) for each in column.to_pylist()], _write_bytes
        if types.is_large_list(kind) or types.is_list(kind):
            item, values, write = self._column(kind.value_type, name, f"{where}[]")
            return (
                {"type": "array", "items": ["null", item]},
                lambda column: _pieces(column, values),
                _write_items(write),
            )
        if types.is_struct(kind) and kind.num_fields:
            places = [f"{where}.{field.name}" for field in kind]
            avro, parts, write = self._record(kind, name, places)
            return avro, lambda column: _structs(column, parts), write
        raise SchemaError(f"{where} is {kind}, for which Avro has no form here; cast it, or leave it out with select()")


def _as_name(text: str) -> str:
    name = "".join(char if char.isascii() and (char.isalnum() or char == "_") else "_" for char in text)
    return name if name and not name[0].isdigit() else f"_{name}"


def _check_name(name: str, where: str) -> None:
    if _as_name(name) != name:
        raise SchemaError(f"{where}: names in Avro consist of letters, digits and underscores; rename it with select()")


def _logical(kind: pa.DataType, storage: pa.DataType) -> str:
    """Return the logical type of a column if its underlying type is `storage`."""
    if storage == pa.int32():
        return {pa.date32(): "date", pa.time32("ms"): "time-millis"}.get(kind, "")
    if kind == pa.time64("us"):
        return "time-micros"
    if not pa.types.is_timestamp(kind) or kind.unit not in ("ms", "us"):
        return ""
    return f"{'' if kind.tz else 'local-'}timestamp-{'millis' if kind.unit == 'ms' else 'micros'}"


def _write_number(out: bytearray, value: int) -> None:
    left = (value << 1) ^ (value >> 63)
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)


def _write_bytes(out: bytearray, value: bytes) -> None:
    _write_number(out, len(value))
    out += value


def _write_text(out: bytearray, value: str) -> None:
    _write_bytes(out, value.encode())


def _write_boolean(out: bytearray, value: bool) -> None:
    out.append(value)


def _packed(form: struct.Struct) -> Write:
    return lambda out, value: out.extend(form.pack(value))


_PLAIN: Final[dict[pa.DataType, tuple[str, Write]]] = {
    pa.bool_(): ("boolean", _write_boolean),
    pa.float32(): ("float", _packed(_FLOAT)),
    pa.float64(): ("double", _packed(_DOUBLE)),
    pa.large_string(): ("string", _write_text),
    pa.large_binary(): ("bytes", _write_bytes),
    pa.string(): ("string", _write_text),
    pa.binary(): ("bytes", _write_bytes),
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16()), ("int", _write_number)),
    **dict.fromkeys((pa.int64(), pa.uint32()), ("long", _write_number)),
}


def _write_fields(fields: list[Write]) -> Write:
    """Return how to write a record. Each field is a union of null, which is branch 0, and its type, which is branch 1."""

    def write(out: bytearray, row: Sequence[Any]) -> None:
        for field, value in zip(fields, row, strict=True):
            if value is None:
                out.append(0)
            else:
                out.append(2)
                field(out, value)

    return write


def _write_items(item: Write) -> Write:
    """Return how to write a list as one block; each item may be null, as fields may."""

    def write(out: bytearray, values: list[Any]) -> None:
        if values:
            _write_number(out, len(values))
        for value in values:
            if value is None:
                out.append(0)
            else:
                out.append(2)
                item(out, value)
        out.append(0)

    return write


def _unscaled(value: Decimal | None, scale: int) -> bytes | None:
    if value is None:
        return None
    number = int(value.scaleb(scale, _EXACT))
    return number.to_bytes((number if number >= 0 else ~number).bit_length() // 8 + 1, "big", signed=True)


def _pieces(column: pa.Array[Any], values: Values) -> list[Any]:
    assert is_list_array(column), column.type
    lengths = list_lengths(column).to_pylist()
    flat = iter(values(column.flatten()))
    return [None if length is None else [next(flat) for _ in range(length)] for length in lengths]


def _structs(column: pa.Array[Any], fields: Sequence[Values]) -> list[Any]:
    assert is_struct_array(column), column.type
    parts = [values(part) for values, part in zip(fields, column.flatten(), strict=True)]
    rows = zip(*parts, strict=True)
    return [row if there else None for there, row in zip(column.is_valid().to_pylist(), rows, strict=True)]
