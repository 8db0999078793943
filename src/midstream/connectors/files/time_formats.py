"""Times in text: those that pyarrow reads by strptime formats, whose dates it does not check, and times of day in JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.arrow_types import (
    is_list_array,
    is_list_of_any_length,
    is_struct_array,
    join_texts,
    large_lists,
    leaves,
    outside_of_years,
    to_list,
)
from midstream.engine.core.errors import ConfigError

_ABBREVIATIONS: Final = {"T": "%H:%M:%S", "R": "%H:%M", "F": "%Y-%m-%d", "D": "%m/%d/%y", "e": "%d", "h": "%b"}
_DIRECTIVES: Final = "YymdbBaAHIMSpz%"
"""Those that C, whose strptime pyarrow calls, and Python read alike."""
_ISO_FORMAT: Final = "%Y-%m-%dT%H:%M:%S"
_ISO_LENGTHS: Final = (10, 13, 16, 19)
"""Those of a date, and of a date with hours, minutes and seconds."""
_ISO: Final = r"^\d{4}-\d\d-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d+)?)?)?)?$"
_TIME_OF_DAY: Final = r"^\d\d:\d\d(:\d\d(\.\d+)?)?$"
_DAY: Final = "1970-01-01"
_BLANKS_BEFORE: Final = re.compile(r"(?<=[^\w\s])\s+")


def expanded(format: str) -> str:
    """Return a strptime format without abbreviations. Raises ConfigError for one that does not determine a time."""

    def directive(found: re.Match[str]) -> str:
        name = found[1]
        if name in _ABBREVIATIONS:
            return _ABBREVIATIONS[name]
        if not name or name not in _DIRECTIVES:
            raise ConfigError(
                f"CsvOptions: timestamp_formats has {format!r}, and {found[0]!r} is not supported; use "
                f"{' '.join('%' + each for each in _DIRECTIVES + ''.join(_ABBREVIATIONS))}"
            )
        return found[0]

    if not isinstance(format, str) or "\0" in format:
        raise ConfigError(f"CsvOptions: timestamp_formats has {format!r}, which is not a format of strptime")
    return re.sub(r"%(.?)", directive, format, flags=re.DOTALL)


def check_years(table: pa.Table) -> None:
    """Raise ArrowInvalid for a date or a time that Python does not have: pyarrow reads the year 0."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        for leaf in (leaf for chunk in column.chunks for leaf in leaves(chunk)):
            if not (pa.types.is_timestamp(leaf.type) or pa.types.is_date(leaf.type)):
                continue
            outside = outside_of_years(leaf)
            if pc.any(outside).as_py():
                raise pa.ArrowInvalid(
                    f"conversion error to {leaf.type}: the value {leaf.filter(outside)[:1].cast(pa.string())[0]} in column "
                    f"{name!r} is outside of the years 1 to 9999"
                )


# ---- strptime formats ----


def doubtful_times(column: pa.ChunkedArray[Any], formats: Sequence[str]) -> Any:
    """Return which values may be wrong: C's strptime reads the 31st of every month, second 61, and years of two digits.

    A date that does not exist is read as one of the first three days of the next month.
    """
    in_utc: Any = column.cast(pa.timestamp(column.type.unit))
    day = pc.day(in_utc)
    in_days = [range(1, 4)] if column.type.tz is None else [range(1, 5), range(28, 32)]  # in UTC, a day before or after
    doubtful: Any = pc.is_in(day, pa.array([each for days in in_days for each in days], pa.int64()))
    doubtful = pc.or_(doubtful, pc.less(pc.year(in_utc), pa.scalar(1000, pa.int64())))
    if any("%S" in format for format in formats):
        doubtful = pc.or_(doubtful, pc.is_in(pc.second(in_utc), pa.array([0, 1], pa.int64())))
    return pc.and_(doubtful, column.is_valid()) if column.null_count else doubtful


def check_times(
    name: str, column: pa.ChunkedArray[Any], texts: pa.ChunkedArray[Any], formats: Sequence[str], kind: pa.DataType
) -> None:
    """Raise ArrowInvalid for a time that is not that of its text, for Python too. `kind`: the type to name."""
    doubtful = doubtful_times(column, formats)
    values, written = column.filter(doubtful), texts.filter(doubtful)
    in_s: Any = values.cast(pa.timestamp("s"), safe=False)
    for format in (*formats, None):
        left = pc.invert(_is_iso_time(written, in_s) if format is None else _is_in(format, written, in_s))
        values, written, in_s = values.filter(left), written.filter(left), in_s.filter(left)
    in_us = values.cast(pa.timestamp("us", values.type.tz), safe=False).cast(pa.timestamp("us"))
    for text, value in set(zip(to_list(written), to_list(in_us), strict=True)):
        if not _is_iso(text, column.type) and value not in _in_python(text, formats):
            raise pa.ArrowInvalid(
                f"conversion error to {kind}: the value {text!r} in column {name!r} is not a time in the format "
                f"{' or '.join(map(repr, formats))}"
            )


def days_of(name: str, column: pa.ChunkedArray[Any]) -> pa.ChunkedArray[Any]:
    """Convert times that were read for a column of dates. Raises ArrowInvalid for a time of day."""
    days = column.cast(pa.date32(), safe=False)
    other = column.filter(pc.not_equal(days.cast(column.type), column))
    if len(other):
        raise pa.ArrowInvalid(
            f"conversion error to date32[day]: the value {other[0].as_py()} in column {name!r} has a time of day"
        )
    return days


def _is_in(format: str, texts: pa.ChunkedArray[Any], in_s: Any) -> Any:
    """Whether a text is its value in that format, with all leading zeros."""
    return pc.equal(pc.strftime(in_s, format=format.replace("%z", "+0000")), texts)


def _is_iso_time(texts: pa.ChunkedArray[Any], in_s: Any) -> Any:
    """Whether a text is its value in ISO 8601, without a zone; it may have a fraction, which no strptime format reads."""
    is_iso = pc.match_substring_regex(texts, _ISO)
    until_s = pc.replace_substring(pc.utf8_slice_codeunits(texts, 0, _ISO_LENGTHS[-1]), " ", "T")
    expected: Any = pc.strftime(in_s, format=_ISO_FORMAT)
    is_value = [pc.equal(until_s, pc.utf8_slice_codeunits(expected, 0, length)) for length in _ISO_LENGTHS]
    return pc.and_(is_iso, reduce(pc.or_, is_value))


def _is_iso(text: str, kind: pa.DataType) -> bool:
    try:
        pa.array([text]).cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _in_python(text: str, formats: Sequence[str]) -> Iterator[datetime]:
    """Yield the time of a text in UTC by the first format that fits, for Python; blanks before a number are ignored."""
    for format in formats:
        for each in (text.strip(), _BLANKS_BEFORE.sub("", text.strip())):
            try:
                found = datetime.strptime(each, format)
            except ValueError:
                continue
            yield (found.replace(tzinfo=None) if found.tzinfo is None else found.astimezone(UTC).replace(tzinfo=None))
            return


# ---- times of day in JSON ----


def _has_time_of_day(kind: pa.DataType) -> bool:
    return pa.types.is_time(kind) or any(_has_time_of_day(kind.field(i).type) for i in range(kind.num_fields))


def from_texts(column: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Cast a column that has texts in place of dates and times to `kind`. pyarrow has no cast to a time of day."""
    if not _has_time_of_day(kind):
        return column.cast(kind)
    if is_struct_array(column) and pa.types.is_struct(kind):
        mask = column.is_null() if column.null_count else None
        parts = [from_texts(part, field.type) for part, field in zip(column.flatten(), kind, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=mask)
    if is_list_array(column) and is_list_of_any_length(kind):
        return large_lists(column, from_texts(column.flatten(), kind.value_type))
    assert pa.types.is_time(kind), kind
    odd = column.filter(pc.invert(pc.match_substring_regex(column, _TIME_OF_DAY)))
    if len(odd):
        raise pa.ArrowInvalid(f"Failed to parse string: {odd[0].as_py()!r} as a scalar of type {kind}")
    day, between = (pa.scalar(text, column.type) for text in (_DAY, "T"))
    try:
        return join_texts(day, column, between).cast(pa.timestamp(kind.unit)).cast(kind)
    except pa.ArrowInvalid as error:
        text = str(error).replace(f"{_DAY}T", "").replace(str(pa.timestamp(kind.unit)), str(kind))
        raise pa.ArrowInvalid(text) from error
