"""Values as the server writes them, as columns in the types of `PostgresQuery`.

COPY and logical replication write each value as text, in the format that these session settings choose. Types without one
here (json, uuid, enums, arrays, numeric without a precision) stay text.
"""

from __future__ import annotations

import re
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from midstream.connectors.postgres.postgres_query import TYPES
from midstream.engine.core.arrow_types import join_texts
from midstream.engine.core.errors import DataError

SETTINGS: Final = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
}
_TEXT: Final = pa.large_string()
_PRECISION_MAX: Final = 38
_INTERVAL: Final = re.compile(
    r"(?:([+-]?\d+) years? ?)?(?:([+-]?\d+) mons? ?)?(?:([+-]?\d+) days? ?)?(?:([+-])?(\d+):(\d+):(\d+)(?:\.(\d{1,6}))?)?"
)


def arrow_type(name: str, modifier: int) -> pa.DataType:
    """Return the type of a column: `name` is that of its type in pg_catalog, "" for others."""
    if name == "numeric" and modifier >= 4:
        precision, scale = modifier - 4 >> 16 & 0xFFFF, ((modifier - 4 & 2047) ^ 1024) - 1024
        if precision <= _PRECISION_MAX and 0 <= scale <= precision:
            return pa.decimal128(precision, scale)
    return TYPES.get(name, _TEXT)


def from_bytes(values: list[bytes | None], kind: pa.DataType, where: str) -> pa.Array[Any]:
    """Convert texts in UTF-8. Raises DataError as `from_text` does."""
    try:
        text = pa.array(values, pa.large_binary()).cast(_TEXT)
    except pa.ArrowException as error:
        raise DataError(f"{where}: a value is not UTF-8: {error}") from error
    return from_text(text, kind, where)


def from_text(text: pa.Array[Any], kind: pa.DataType, where: str) -> pa.Array[Any]:
    """Convert texts to a column. Raises DataError for a value that has no form here, such as an infinite date."""
    try:
        if pa.types.is_boolean(kind):
            return pc.equal(text, pa.scalar("t", _TEXT))
        if pa.types.is_large_binary(kind):
            return _bytes(text)
        if pa.types.is_duration(kind):
            return _intervals(text, kind)
        if pa.types.is_time(kind):
            day, space = (pa.scalar(part, _TEXT) for part in ("1970-01-01", " "))
            return join_texts(day, text, space).cast(pa.timestamp("us")).cast(kind)
        return text.cast(kind)
    except (pa.ArrowException, pl.exceptions.PolarsError, OverflowError, ValueError) as error:
        raise DataError(
            f"{where}: a value has no form as {kind}: {error}; leave the column out with columns=, or change the value "
            "and start again with --fresh"
        ) from error


def _bytes(text: pa.Array[Any]) -> pa.Array[Any]:
    series = pl.from_arrow(text)
    assert isinstance(series, pl.Series)
    return series.str.strip_prefix("\\x").str.decode("hex").to_arrow().cast(pa.large_binary())


def _intervals(text: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    micros = [None if value is None else _microseconds(value) for value in text.to_pylist()]
    return pa.array(micros, pa.int64()).cast(kind)


def _microseconds(interval: str) -> int:
    """A year counts 365 days and a month 30, as psycopg has it."""
    found = _INTERVAL.fullmatch(interval)
    if found is None or not interval:
        raise ValueError(f"{interval!r} is not an interval")
    years, months, days, sign, hours, minutes, seconds, fraction = found.groups()
    whole_days = 365 * int(years or 0) + 30 * int(months or 0) + int(days or 0)
    time = (int(hours or 0) * 60 + int(minutes or 0)) * 60 + int(seconds or 0)
    part = time * 1_000_000 + int((fraction or "").ljust(6, "0"))
    return whole_days * 86_400_000_000 + (-part if sign == "-" else part)
