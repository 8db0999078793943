"""Arrow types and PostgreSQL types: what becomes what, and rows as the text that COPY reads.

The text is CSV, made by Arrow a column at a time. Text is quoted, always, and NULL is not, so that
the two are told apart. The server reads it into the types of the table, and refuses what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from midstream.core.errors import SchemaError

_CSV = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")
_INTEGERS = ("int2", "int4", "int8", "numeric")
_FLOATS = ("float8", "numeric")
_TEXTS = ("text", "varchar", "bpchar", "name", "json", "jsonb", "uuid", "xml", "inet", "cidr", "citext")

Predicate = Callable[[pa.DataType], bool]


@dataclass(frozen=True, slots=True)
class _Form:
    """Arrow types for which `of` is true become `made` in a table of ours, and are read by columns of types `taken`."""

    of: Predicate
    made: str
    taken: tuple[str, ...]


def _is(*kinds: pa.DataType) -> Predicate:
    return lambda kind: kind in kinds


_FORMS = (
    _Form(pa.types.is_boolean, "boolean", ("bool",)),
    _Form(_is(pa.int8(), pa.int16(), pa.uint8()), "smallint", _INTEGERS),
    _Form(_is(pa.int32(), pa.uint16()), "integer", _INTEGERS),
    _Form(_is(pa.int64(), pa.uint32()), "bigint", _INTEGERS),
    _Form(_is(pa.uint64()), "numeric(20,0)", _INTEGERS),
    _Form(_is(pa.float16(), pa.float32()), "real", ("float4", *_FLOATS)),
    _Form(_is(pa.float64()), "double precision", _FLOATS),
    _Form(pa.types.is_decimal, "numeric", ("numeric",)),
    _Form(lambda kind: pa.types.is_large_string(kind) or pa.types.is_string(kind), "text", _TEXTS),
    _Form(lambda kind: pa.types.is_large_binary(kind) or pa.types.is_binary(kind), "bytea", ("bytea",)),
    _Form(pa.types.is_fixed_size_binary, "bytea", ("bytea",)),
    _Form(pa.types.is_date, "date", ("date",)),
    _Form(pa.types.is_time, "time", ("time",)),
    _Form(pa.types.is_duration, "interval", ("interval",)),
    _Form(lambda kind: pa.types.is_timestamp(kind) and kind.tz is None, "timestamp", ("timestamp",)),
    _Form(lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None, "timestamptz", ("timestamptz",)),
)
_ELEMENTS = ("bool", "int2", "int4", "int8", "numeric", "float4", "float8", "text", "varchar")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_list(kind) or pa.types.is_list(kind))


def _form_of(kind: pa.DataType) -> _Form | None:
    return next((form for form in _FORMS if form.of(kind)), None)


def created_type(kind: pa.DataType) -> str | None:
    """The type, in SQL, of a column made for `kind`; None if there is none."""
    if _is_list(kind):
        form = _form_of(kind.value_type)
        return f"{form.made}[]" if form is not None and is_readable(kind, form.taken[0], element=True) else None
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})" if kind.scale >= 0 else "numeric"
    form = _form_of(kind)
    return form.made if form is not None else None


def is_readable(kind: pa.DataType, base: str, *, element: bool = False, is_enum: bool = False) -> bool:
    """Whether a column of type `base` (pg_type.typname; with `element`, an array of that) can read `kind`."""
    if pa.types.is_null(kind):
        return True
    if _is_list(kind):
        form = _form_of(kind.value_type)
        return element and form is not None and base in form.taken and base in _ELEMENTS
    form = _form_of(kind)
    if element or form is None:
        return False
    return base in form.taken or (is_enum and form.made == "text")


def encode(batch: pa.RecordBatch, where: str) -> bytes:
    """The rows as CSV without a header. Raises SchemaError where a value has no form in PostgreSQL."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns.append(_plain(column))
        except pa.ArrowException as error:
            raise SchemaError(
                f"{where}: column {name!r} is {column.type}, and a value of it has no form in PostgreSQL: {error}"
            ) from error
    stream = pa.BufferOutputStream()
    plain = pa.RecordBatch.from_arrays(columns, names=[f"c{i}" for i in range(len(columns))])
    pyarrow.csv.write_csv(plain, stream, write_options=_CSV)
    encoded: bytes = stream.getvalue().to_pybytes()
    return encoded


def _plain(column: pa.Array) -> pa.Array:
    """The column in a type whose CSV is what PostgreSQL reads."""
    kind = column.type
    if pa.types.is_large_binary(kind) or pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        series = _series(column.cast(pa.large_binary()))
        return ("\\x" + series.bin.encode("hex")).to_arrow()
    if pa.types.is_duration(kind):
        microseconds = pc.cast(column, pa.duration("us")).cast(pa.int64()).cast(pa.large_string())
        words = (pa.scalar(text, pa.large_string()) for text in ("microseconds", " "))
        return pc.binary_join_element_wise(microseconds, *words)
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return column.cast(pa.timestamp("us", kind.tz))
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return column.cast(pa.time64("us"))
    if pa.types.is_date64(kind):
        return column.cast(pa.date32())
    if pa.types.is_float16(kind):
        return column.cast(pa.float32())
    if _is_list(kind):
        return _array_literals(column)
    return column


def _array_literals(column: pa.Array) -> pa.Array:
    """`{1,NULL,2}`; text in quotes, with what is special to arrays escaped."""
    element = pl.element().cast(pl.String)
    if pa.types.is_large_string(column.type.value_type) or pa.types.is_string(column.type.value_type):
        for special in ("\\", '"'):
            element = element.str.replace_all(special, "\\" + special, literal=True)
        element = '"' + element + '"'
    joined = _series(column).list.eval(element.fill_null("NULL")).list.join(",")
    return ("{" + joined + "}").to_arrow()


def _series(column: pa.Array) -> pl.Series:
    series = pl.from_arrow(column)
    assert isinstance(series, pl.Series)
    return series
