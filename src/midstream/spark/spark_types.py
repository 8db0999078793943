"""The Spark types that have an Arrow form here, and what it is.

A type is supported only if each of its values is read back unchanged; every other type is refused by name.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql import types as t

from midstream.engine.core.schemas import first_repeated

_SIMPLE: Final[dict[type[t.DataType], pa.DataType]] = {
    t.BooleanType: pa.bool_(),
    t.ByteType: pa.int8(),
    t.ShortType: pa.int16(),
    t.IntegerType: pa.int32(),
    t.LongType: pa.int64(),
    t.FloatType: pa.float32(),
    t.DoubleType: pa.float64(),
    t.StringType: pa.string(),
    t.BinaryType: pa.binary(),
    t.DateType: pa.date32(),
    t.TimestampType: pa.timestamp("us", "UTC"),
    t.TimestampNTZType: pa.timestamp("us"),
    t.DayTimeIntervalType: pa.duration("us"),
    t.NullType: pa.null(),
}
_WAYS_OUT: Final = {
    "VariantType": "convert it to a string with to_json()",
    "GeometryType": "make it binary with st_asbinary()",
    "GeographyType": "make it binary with st_asbinary()",
    "YearMonthIntervalType": "cast it to int, which counts its months",
    "CharType": "declare it as string",
    "VarcharType": "declare it as string",
}
"""Remedies by the name of the class; some classes are new in PySpark."""
_TIME_DIGITS_MAX: Final = 6
"""The decimal places of a second; Python has no more."""


class NoArrowForm(ValueError):
    """Names the part of a type that has no Arrow form, and what to do instead."""


def arrow_type(kind: t.DataType, path: str) -> pa.DataType:
    """Return the Arrow type for `kind`, with everything nullable. Raises NoArrowForm naming the part of `path` without
    one.
    """
    if type(kind) in _SIMPLE:
        return _SIMPLE[type(kind)]
    if type(kind) is t.DecimalType:
        return pa.decimal128(kind.precision, kind.scale)
    if type(kind) is t.ArrayType:
        return pa.list_(arrow_type(kind.elementType, f"{path}.element"))
    if type(kind) is t.MapType:
        if isinstance(kind.keyType, t.NullType):
            raise NoArrowForm(f"{path}.key is void, but a key must have a value; cast it")
        return pa.map_(arrow_type(kind.keyType, f"{path}.key"), arrow_type(kind.valueType, f"{path}.value"))
    if type(kind) is t.StructType:
        twice = first_repeated(kind.names)
        if twice is not None:
            raise NoArrowForm(f"{path} has more than one field {twice!r}; rename one")
        return pa.struct([(field.name, arrow_type(field.dataType, f"{path}.{field.name}")) for field in kind.fields])
    if type(kind).__name__ == "TimeType" and getattr(kind, "precision", _TIME_DIGITS_MAX) <= _TIME_DIGITS_MAX:
        return pa.time64("us")
    raise NoArrowForm(f"{path} is {kind.simpleString()}; {_way_out(kind)}")


def _way_out(kind: t.DataType) -> str:
    if isinstance(kind, t.UserDefinedType):
        return f"make what it stores ({kind.sqlType().simpleString()}) columns of plain types"
    if type(kind).__name__ == "TimeType":
        return f"cast it to time({_TIME_DIGITS_MAX})"
    return _WAYS_OUT.get(type(kind).__name__, "cast it, or leave it out")
