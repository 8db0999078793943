"""The Spark types that have an Arrow form here, and what it is.

A type is supported only if each of its values is read back unchanged; every other type is refused by name.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    UserDefinedType,
)

from midstream.engine.core.schemas import first_repeated

_SIMPLE: Final[dict[type[DataType], pa.DataType]] = {
    BooleanType: pa.bool_(),
    ByteType: pa.int8(),
    ShortType: pa.int16(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    FloatType: pa.float32(),
    DoubleType: pa.float64(),
    StringType: pa.string(),
    BinaryType: pa.binary(),
    DateType: pa.date32(),
    TimestampType: pa.timestamp("us", "UTC"),
    TimestampNTZType: pa.timestamp("us"),
    DayTimeIntervalType: pa.duration("us"),
    NullType: pa.null(),
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


def arrow_type(kind: DataType, path: str) -> pa.DataType:
    """Return the Arrow type for `kind`, with everything nullable. Raises NoArrowForm naming the part of `path` without
    one.
    """
    if type(kind) in _SIMPLE:
        return _SIMPLE[type(kind)]
    if type(kind) is DecimalType:
        return pa.decimal128(kind.precision, kind.scale)
    if type(kind) is ArrayType:
        return pa.list_(arrow_type(kind.elementType, f"{path}.element"))
    if type(kind) is MapType:
        if isinstance(kind.keyType, NullType):
            raise NoArrowForm(f"{path}.key is void, but a key must have a value; cast it")
        return pa.map_(arrow_type(kind.keyType, f"{path}.key"), arrow_type(kind.valueType, f"{path}.value"))
    if type(kind) is StructType:
        twice = first_repeated(kind.names)
        if twice is not None:
            raise NoArrowForm(f"{path} has more than one field {twice!r}; rename one")
        return pa.struct([(field.name, arrow_type(field.dataType, f"{path}.{field.name}")) for field in kind.fields])
    if type(kind).__name__ == "TimeType" and getattr(kind, "precision", _TIME_DIGITS_MAX) <= _TIME_DIGITS_MAX:
        return pa.time64("us")
    raise NoArrowForm(f"{path} is {kind.simpleString()}; {_way_out(kind)}")


def _way_out(kind: DataType) -> str:
    if isinstance(kind, UserDefinedType):
        return f"make what it stores ({kind.sqlType().simpleString()}) columns of plain types"
    if type(kind).__name__ == "TimeType":
        return f"cast it to time({_TIME_DIGITS_MAX})"
    return _WAYS_OUT.get(type(kind).__name__, "cast it, or leave it out")
