"""Hostile texts in CSV and JSON lines, from files and from Kafka: the value that Python reads in them, or a refusal."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from connector_worlds import all_splits, read_all
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_kafka_records import Record

from effort import examples
from midstream.connectors.files.encoders import new_encoder
from midstream.connectors.files.file_source import CsvOptions, FileSource
from midstream.connectors.kafka.fetched_records import ObjectRecords
from midstream.connectors.kafka.record_parser import RecordParser
from midstream.engine.core.arrow_types import leaves, schema_of, to_list
from midstream.engine.core.errors import ConfigError, DataError, MidstreamError, SchemaError, StorageError
from midstream.engine.core.python_values import to_python
from midstream.engine.core.schemas import as_declared, as_schema

MANY = settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS: list[pa.DataType] = [
    *(pa.int8(), pa.int64(), pa.uint8(), pa.uint64(), pa.float32(), pa.float64(), pa.bool_(), pa.large_string()),
    *(pa.decimal128(5, 2), pa.decimal128(38, 0), pa.decimal128(38, 2), pa.decimal128(38, 18), pa.date32(), pa.date64(), pa.large_binary()),
    *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.timestamp("s", "UTC"), pa.timestamp("us", "UTC")),
    *(pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("ns")),
    *(pa.duration("s"), pa.duration("ms"), pa.duration("us"), pa.duration("ns")),
]  # fmt: skip
_NUMBERS = """
0xFF 0X1f -0x1 0xFFFFFFFFFFFFFFFF 0x8000000000000000 0o7 0b1 007 -007 +1 1_000 1e3 1E3 1e-3 1e400 1e-400 1e-39 6.6e-218 0e-500 1e-2147483647 1e-4294967296 1e2147483648 1. .5 . - -- --1 1-
1,000 -0 -0.0 1.0 1.5 0.001 1.005 123.45 1234.5 99999 127 128 -128 -129 255 256 9223372036854775807 9223372036854775808
18446744073709551615 18446744073709551616 1٫5 １ ١ 1\u00a0 \ufeff1 1\x00 0x1p3 1f 1d 1L ∞ Infinity -Infinity +inf inf INF -inf nan NaN -nan
nan(1) NaN(0x1) snan infinit true True TRUE tRue T t yes no on false False FALSE f 0 1 2 1/2 50% $1 null NULL None NA N/A \\N
"""
_TIMES = """
2024-02-29 2023-02-29 2024-02-30 2024-04-31 2024-1-1 24-01-01 0000-01-01 0001-01-01 9999-12-31 10000-01-01 -001-01-01 20240101 2024-W01-1
2024-060 2024-13-01 2024-00-01 2024-01-00 2024/01/01 01/02/2024 2024-01-01T24:00:00 2024-01-01T00:00:60 2024-01-01T23:59:59.999999
2024-01-01T00:00:59.1234567 2024-01-01T00:00:59.123456789 2024-01-01T00:00:59.1234567890 2024-01-01T00 2024-01-01T00:00
2024-01-01T00:00:00Z 2024-01-01T00:00:00z 2024-01-01T00:00:00+02 2024-01-01T00:00:00+0200 2024-01-01T00:00:00+02:00 2024-01-01T00:00:00-00:00
2024-01-01T00:00:00+02:00:30 2024-01-01T00:00:00+25:00 2024-01-01T00:00:00-23:59 2024-01-01T00:00:00+12:60 2024-01-01t00:00:00
2024-01-01T00:00:00.Z 2024-01-01T00:00:00,5 0001-01-01T00:00:00+02:00 9999-12-31T23:59:59-02:00 1600-01-01 2400-01-01 1677-09-21T00:12:43
23:59:59 23:59:60 23:59:61 24:00:00 24:00:01 -00:00:01 00:00:00.001 00:00:00.0000001 23:59:59.999999999 23:59:60.5
2024-01-01T23:59:60 2024-01-01T23:59:61 2024-01-01T24:00:01 2024-01-01T00:00:59.1 2024-01-01T00:00:59.000001 1969-12-31T23:59:59.9 2016-12-31T23:59:60Z
86399 86400 -86400 86399999 86400000 9223372036854775 9223372036854776 -9223372036854775 -9223372036854776 -9223372036854775808
12:00 24:00 12:00:60 12:34:56.5 12:34:56.1234567 1:2:3 12 12:60 12:00Z 12:00+02:00 P1D PT1S 1s now today
"""
NUMBERS = [
    *_NUMBERS.split(),
    *("9" * 20, "9" * 36, "9" * 37, "9" * 38, "9" * 39, "1e19", "1E+37", "1e38", "1" * 21 + ".5", "1" * 309, "1" * 400, "0." + "1" * 60, "1" * 400 + ".5", "0." + "0" * 36 + "1e-1", "0." + "0" * 37 + "1e-9", " 1 ", "\t1", "1 ", "1 2", " ", "''"),
]  # fmt: skip
TIMES = [
    *_TIMES.split(),
    *("2024-01-01 00:00:00", "2024-01-01  00:00", " 2024-01-01", "2024-01-01 ", "2024-01-01 00:00:00 UTC", " 12:00"),
]  # fmt: skip
TEXTS = [*NUMBERS, *TIMES]
TEXT = st.one_of(
    st.sampled_from(TEXTS),
    st.text("0123456789", min_size=1, max_size=25),
    st.text("0123456789+-._eExXoabfINnAyYtT:Z/ \t", max_size=12),
    st.floats().map(repr),
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str),
    st.datetimes().map(lambda at: at.isoformat(" ")),
    st.datetimes(timezones=st.just(timezone(timedelta(hours=-3, minutes=-30)))).map(datetime.isoformat),
    st.dates().map(str),
    st.times().map(str),
    st.builds("{:04d}-{:02d}-{:02d} {:02d}:{:02d}:{:02d}".format, *[st.integers(0, n) for n in (9999, 13, 32, 25, 61, 61)]),
    st.builds(
        "{}{:02d}:{:02d}:{:02d}{}".format,
        st.sampled_from(["", "-", "2024-02-29 ", "1969-12-31T"]),
        *(st.integers(22, 25), st.sampled_from([0, 59, 60]), st.integers(58, 62)),
        st.just("") | st.text("0123456789", max_size=10).map(".{}".format),
    ),
)  # fmt: skip


# ---- what Python makes of a text ----


def _int(text: str) -> int:
    return int(text, 10)


def _float(text: str) -> float | Fraction:
    """The exact number, which a float is near to; a float where there is none, or where it is too small to compute."""
    value = float(text)
    if math.isinf(value) and "inf" not in text.lower():
        raise ValueError(f"{text} is beyond the range of a float")
    return value if math.isinf(value) or math.isnan(value) or value == 0 else Fraction(text.strip())


def _times_in_ns(text: str) -> int:
    """Python's datetime knows no nanoseconds: its fraction is that of the text."""
    at, dot, fraction = text.partition(".")
    digits = re.match(r"\d*", fraction)
    assert digits is not None
    rest = fraction[digits.end() :]
    whole = datetime.fromisoformat(at + rest)
    if dot and not 1 <= digits.end() <= 9:
        raise ValueError(text)
    utc = whole if whole.tzinfo is None else whole.astimezone(UTC)
    seconds = (utc.replace(tzinfo=None) - datetime(1970, 1, 1)) // timedelta(seconds=1)
    return seconds * 10**9 + int(digits[0].ljust(9, "0"))


def _time_of_day_in_ns(text: str) -> int:
    at, dot, fraction = text.strip().partition(".")
    if dot and not re.fullmatch(r"\d{1,9}", fraction):
        raise ValueError(text)
    since = datetime.combine(date(1970, 1, 1), time.fromisoformat(at)) - datetime(1970, 1, 1)
    return since // timedelta(seconds=1) * 10**9 + int(fraction.ljust(9, "0"))


def _fitting(number: Decimal, kind: Any) -> Decimal:
    if number and number.is_finite() and number.adjusted() >= kind.precision - kind.scale:
        raise ValueError(f"{number} has more digits than {kind}")
    return number


def _bool(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def in_python(text: str, kind: pa.DataType) -> Any:
    """The value of a text for Python; times and durations in nanoseconds. Raises ValueError or KeyError if it is none."""
    types = pa.types
    readers: list[tuple[Callable[[Any], bool], Callable[[str], Any]]] = [
        (types.is_integer, _int),
        (types.is_floating, _float),
        (types.is_boolean, _bool),
        (types.is_decimal, lambda text: _fitting(Decimal(text), kind)),
        (types.is_date, lambda text: date.fromisoformat(text.strip())),
        (types.is_time, _time_of_day_in_ns),
        (types.is_timestamp, _times_in_ns),
        (types.is_duration, lambda text: _int(text) * IN_NS[getattr(kind, "unit", "")]),
        (types.is_large_string, str),
        (types.is_large_binary, str.encode),
    ]  # fmt: skip
    return next(read for is_kind, read in readers if is_kind(kind))(text)


def is_nearest(value: float, exact: Fraction, kind: pa.DataType) -> bool:
    """Whether no other float of the type is nearer."""
    if math.isinf(value) or math.isnan(value):
        return False
    held: Any = np.float32(value) if kind == pa.float32() else np.float64(value)
    others = [np.nextafter(held, held.dtype.type(end)) for end in (-math.inf, math.inf)]
    distance = abs(Fraction(value) - exact)
    return all(math.isinf(other) or abs(Fraction(float(other)) - exact) >= distance for other in others)


def check_value(value: Any, text: str, kind: pa.DataType) -> None:
    try:
        expected = in_python(text, kind)
    except (ValueError, KeyError, InvalidOperation):
        raise AssertionError(f"{text!r} as {kind} became {value!r}, but Python refuses it") from None
    if isinstance(expected, Fraction):
        assert is_nearest(value, expected, kind), (text, kind, value)
    elif isinstance(expected, float):
        assert value == expected or (math.isnan(value) and math.isnan(expected)), (text, kind, value)
    else:
        assert value == expected and type(value) is type(expected), (text, kind, value, expected)


IN_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


def values_of(column: pa.Array[Any]) -> list[Any]:
    """Values as `in_python` has them."""
    unit = getattr(column.type, "unit", None)
    if unit is not None and not pa.types.is_date(column.type):
        ticks = column.view(pa.int32() if pa.types.is_time32(column.type) else pa.int64()).to_pylist()
        return [None if each is None else each * IN_NS[unit] for each in ticks]
    return to_python(column)


# ---- CSV ----


def field(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in '",\r\n') else text


def read_batches(source: FileSource) -> list[pa.RecordBatch]:
    batches = []
    for split in all_splits(source):
        reader = source.open_split(split)
        while (read := reader.read(1000)) is not None:
            batches.append(read[0])
        reader.close()
    return batches


def read_into(batches: list[pa.RecordBatch], source: FileSource) -> None:
    batches += read_batches(source)


def refusal(read: Callable[[], object]) -> str | None:
    """The message with which `read` is refused; None if it is not."""
    try:
        read()
    except (SchemaError, StorageError) as error:
        return str(error)
    return None


def in_kafka(format: Any, schema: pa.Schema, lines: list[str]) -> tuple[pa.RecordBatch, set[int]]:
    """The rows of lines that come as records, and which of them are bad."""
    parser = RecordParser(format, schema, [], True, "test")
    records = ObjectRecords([Record(line.encode(), at) for at, line in enumerate(lines)])  # type: ignore[misc]
    rows, bad = parser.rows(records, "topic")
    return rows, {each.at for each in bad}


def same(one: pa.RecordBatch, other: pa.RecordBatch) -> bool:
    values = [list(map(values_of, batch.columns)) for batch in (one, other)]
    return one.schema == other.schema and str(values[0]) == str(values[1])  # as texts, in which NaN equals itself


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_hostile_text_in_csv_has_the_value_that_python_reads_or_is_refused(tmp_path, kind):
    lines = [f"{at},{field(text)}" for at, text in enumerate(TEXTS)]
    (tmp_path / "a.csv").write_bytes("\n".join(["n,v", *lines]).encode())
    schema = pa.schema([pa.field("n", pa.int64()), pa.field("v", kind)])
    [batch] = read_batches(FileSource(tmp_path / "a.csv", schema=schema, on_bad_record="drop"))
    accepted = [TEXTS[at] for at in to_list(batch.column("n"))]
    for text, value in zip(accepted, values_of(batch.column("v")), strict=True):
        check_value(value, text, kind)
    assert accepted, "some of them are values of each type"
    assert kind != pa.large_string() or accepted == TEXTS
    rows, bad = in_kafka("csv", schema, lines)
    assert [text for at, text in enumerate(TEXTS) if at not in bad] == accepted
    assert same(rows, batch)


@MANY
@given(text=TEXT, kind=st.sampled_from(KINDS))
def test_any_text_in_csv_has_the_value_that_python_reads_or_is_refused(tmp_path, text, kind):
    path = tmp_path / "a.csv"
    path.write_bytes(f"n,v\n1,\n2,{field(text)}\n3,\n".encode())
    batches: list[pa.RecordBatch] = []
    source = FileSource(path, schema=pa.schema([pa.field("n", pa.int64()), pa.field("v", kind)]))
    message = refusal(partial(read_into, batches, source))
    if message is None:
        [_, value, _] = values_of(batches[0].column("v"))
        assert value is None if text == "" else check_value(value, text, kind) is None
    else:
        assert f"{path}, line 3: " in message
        assert text.strip() in message or repr(text.strip())[1:-1] in message, "the value is named"


def test_any_text_is_itself_in_a_column_of_text(tmp_path):
    """The defaults do not turn Namibia into null."""
    texts = ["NA", "null", "N/A", "NaN", "None", "", "0xFF", " x "]
    (tmp_path / "a.csv").write_text("n,v\n" + "".join(f"1,{text}\n" for text in texts))
    schema = schema_of([("n", pa.int64()), ("v", pa.string())])
    for source in (FileSource(tmp_path / "a.csv", schema=schema), FileSource(tmp_path / "a.csv")):
        assert source.schema.field("v").type == pa.large_string()
        assert [row["v"] for row in read_all(source, 10)] == [text or None for text in texts]
    marked = FileSource(tmp_path / "a.csv", schema=schema, csv=CsvOptions(null_values=("", "NA")))
    assert [row["v"] for row in read_all(marked, 10)][:2] == [None, "null"]
    numbers = FileSource(tmp_path / "a.csv", schema=pa.schema([("v", pa.int64())]))
    with pytest.raises(SchemaError, match=r"line 2: column 'v': CSV conversion error to int64: invalid value 'NA'"):
        read_all(numbers, 10)


# ---- inferred types ----


@settings(MANY, max_examples=examples(100))
@given(texts=st.lists(TEXT, min_size=1, max_size=4), later=st.lists(TEXT, max_size=3))
@example(texts=["1", "0xFF"], later=[])
@example(texts=["1"], later=["0xFF"])
@example(texts=["1", "2"], later=["NA"])
@example(texts=["2024-01-01"], later=["0000-01-01"])
@example(texts=["0000-01-01"], later=[])
@example(texts=["1.5", "nan(1)"], later=["nan"])
def test_inferred_types_hold_for_the_first_file_and_for_later_ones(tmp_path, texts, later):
    for name, lines in (("1.csv", texts), ("2.csv", later)):
        (tmp_path / name).write_bytes(("n,v\n" + "".join(f"1,{field(text)}\n" for text in lines)).encode())
    sources: list[FileSource] = []
    message = refusal(lambda: sources.append(FileSource(tmp_path / "*.csv")))
    if message is not None:
        assert "would become" in message, "only an integer that the type would round is refused"
        return
    [source] = sources
    kind = source.schema.field("v").type
    for file, lines in (("1.csv", texts), ("2.csv", later)):
        own = FileSource(tmp_path / file, schema=source.schema)
        own._wanted = source._wanted  # as all files are read together
        batches: list[pa.RecordBatch] = []
        message = refusal(partial(read_into, batches, own))
        if message is not None:
            assert f"{tmp_path / file}, line " in message
            assert file == "2.csv" or pa.types.is_floating(kind), "the type of the first file is that of its values"
            continue
        values = [value for batch in batches for value in values_of(batch.column("v"))]
        for text, value in zip(lines, values, strict=True):
            if text:
                check_value(value, text, kind)
            else:
                assert value is None


# ---- strptime formats ----

FORMATS = [
    "%d/%m/%Y",
    "%d/%m/%Y %H:%M:%S",
    "%Y%m%d",
    "%d.%m.%y %H:%M",
    "%m/%d/%Y %I:%M:%S %p",
    "%d %b %Y",
    "%T %F",
    "%d-%m-%Y %H:%M%z",
    "%F %T",
    "%Y-%m-%dT%H:%M:%S",
    "%F %T%z",
]
PARTS = st.fixed_dictionaries({
    "d": st.integers(0, 32), "m": st.integers(0, 13), "Y": st.sampled_from([0, 1, 24, 999, 1000, 1900, 2023, 2024, 9999]),
    "H": st.integers(0, 24), "M": st.integers(0, 60), "S": st.integers(0, 62), "padded": st.booleans(),
    "z": st.sampled_from(["+0000", "-11:30", "+02:00", "Z"]),
})  # fmt: skip


def in_format(parts: dict[str, Any], format: str) -> str:
    """Write parts that need not be a date; a month or hour that has no name is left as a number."""
    width = 2 if parts["padded"] else 1
    texts = {
        **{name: f"{parts[name]:0{width}d}" for name in "dmHMS"},
        "Y": f"{parts['Y']:0{4 if parts['padded'] else 1}d}",
        "y": f"{parts['Y'] % 100:02d}",
        "b": date(2000, min(12, max(1, parts["m"])), 1).strftime("%b"),
        "I": f"{parts['H'] % 12 or 12:0{width}d}",
        "p": "PM" if parts["H"] >= 12 else "AM",
        "z": parts["z"],
    }
    format = format.replace("%T", "%H:%M:%S").replace("%F", "%Y-%m-%d")
    return re.sub("%(.)", lambda found: texts[found[1]], format)


@MANY
@given(
    parts=PARTS,
    formats=st.lists(st.sampled_from(FORMATS), min_size=1, max_size=2, unique=True),
    unit=st.sampled_from(["s", "ms", "us", "days"]),
)
def test_a_time_in_a_format_is_the_one_that_python_reads_or_is_refused(tmp_path, parts, formats, unit):
    text = in_format(parts, formats[0])
    zone = "UTC" if "%z" in formats[0] else None
    kind = pa.date32() if unit == "days" and zone is None else pa.timestamp("us" if unit == "days" else unit, zone)
    path = tmp_path / "a.csv"
    path.write_text(f"n,v\n1,\n2,{text}\n")
    source = FileSource(
        path, schema=pa.schema([("n", pa.int64()), ("v", kind)]), csv=CsvOptions(timestamp_formats=tuple(formats))
    )
    expected = []
    for format in formats:
        try:
            expected.append(datetime.strptime(text, format.replace("%T", "%H:%M:%S").replace("%F", "%Y-%m-%d")))
        except ValueError:
            continue
    batches: list[pa.RecordBatch] = []
    message = refusal(partial(read_into, batches, source))
    if message is not None:
        assert f"{path}, line 3: " in message
        is_plain = bool(expected) and parts["padded"] and expected[0].year >= 1000
        assert not is_plain or (kind == pa.date32() and expected[0].time() != time()), (text, formats, message)
        return
    value = to_python(batches[0].column("v"))[1]
    assert expected, (text, formats, value)
    found = expected[0] if expected[0].tzinfo is None else expected[0].astimezone(UTC)
    assert value == (found.date() if kind == pa.date32() else found), (text, formats)


@pytest.mark.parametrize("text", ["31/02/2024", "29/02/2023", "31/04/2024", "30/02/2024"])
def test_a_date_that_does_not_exist_is_refused_and_text_when_inferred(tmp_path, text):
    (tmp_path / "a.csv").write_text(f"at\n29/02/2024\n{text}\n")
    csv = CsvOptions(timestamp_formats=("%d/%m/%Y",))
    for kind in (pa.timestamp("us"), pa.date32()):
        source = FileSource(tmp_path / "a.csv", schema=pa.schema([("at", kind)]), csv=csv)
        with pytest.raises(
            SchemaError, match=rf"a.csv, line 3: conversion error to .*: the value '{text}' in column 'at'"
        ):
            read_all(source, 10)
    assert [row["at"] for row in read_all(FileSource(tmp_path / "a.csv", csv=csv), 10)] == ["29/02/2024", text]
    (tmp_path / "a.csv").write_text("at\n29/02/2024\n")
    assert read_all(FileSource(tmp_path / "a.csv", csv=csv), 10) == [{"at": datetime(2024, 2, 29)}]


@pytest.mark.parametrize("second", [58, 59, 60, 61])
@pytest.mark.parametrize("minute", ["2024-01-01 10:00", "2024-12-31T23:59", "2024-01-31 23:59", "2016-12-31 23:59"])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_second_that_rolls_over_is_refused_in_every_format(tmp_path, minute, second, unit):
    (tmp_path / "a.csv").write_text(f"at,n\n{minute}:{second},1\n")
    schema = pa.schema([pa.field("at", pa.timestamp(unit)), pa.field("n", pa.int64())])
    expected = None if second > 59 else datetime.fromisoformat(f"{minute}:{second}")
    for formats in ((), ("%F %T",), ("%FT%T",), ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S")):
        source = FileSource(tmp_path / "a.csv", schema=schema, csv=CsvOptions(timestamp_formats=formats))
        if expected is not None:
            assert [row["at"] for row in read_all(source, 10)] == [expected]
            continue
        with pytest.raises(SchemaError, match=rf"a.csv, line 2: .*conversion error to timestamp.*{minute}:{second}'"):
            read_all(source, 10)


def test_a_declared_unit_is_that_of_numbers_and_fractions_in_text(tmp_path):
    """The rows of a job have no unit of seconds, so that durations in seconds were read as milliseconds."""
    (tmp_path / "a.csv").write_text("v\n5\n-7\n")
    for unit, per_unit in IN_NS.items():
        schema = as_declared({"v": pa.duration(unit)}, "test")
        [batch] = read_batches(FileSource(tmp_path / "a.csv", schema=schema))
        assert values_of(batch.column(0)) == [5 * per_unit, -7 * per_unit]
        rows, bad = in_kafka("csv", schema, ["5", "-7"])
        assert same(rows, batch) and not bad
    (tmp_path / "a.csv").write_text("v\n5\n9223372036854776\n")
    source = FileSource(tmp_path / "a.csv", schema=as_declared({"v": pa.duration("s")}, "test"))
    with pytest.raises(
        SchemaError, match=r"a.csv, line 3: conversion error to duration\[s\] .*'v': .*9223372036854776"
    ):
        read_all(source, 10)


@dataclass
class Deep:
    at: pa.timestamp("s")  # type: ignore[valid-type]  # types of Arrow are values


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("digits", [0, 1, 3, 4, 6, 7, 9])
@pytest.mark.parametrize(
    ("nested", "kind_of"),
    [
        ("{}", lambda at: at),
        ("[{}]", pa.list_),
        ('{{"at":{}}}', lambda at: pa.struct([("at", at)])),
        ('[{{"at":{}}}]', lambda at: pa.list_(pa.struct([("at", at)]))),
    ],
)
def test_times_in_json_keep_all_digits_or_are_refused_at_every_depth(tmp_path, unit, digits, nested, kind_of):
    text = "2024-01-01T00:00:59" + ("." + "123456789"[:digits] if digits else "")
    line = f'{{"v":{nested.format(json.dumps(text))}}}'
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    schema = as_declared({"v": kind_of(pa.timestamp(unit))}, "test")
    source = FileSource(tmp_path / "a.jsonl", schema=schema, on_bad_record="drop")
    batches = read_batches(source)
    found = [value for batch in batches for leaf in leaves(batch.column(0)) for value in values_of(leaf)]
    fits = digits <= {"s": 0, "ms": 3, "us": 6, "ns": 9}[unit]
    assert found == ([_times_in_ns(text)] if fits else [])
    rows, bad = in_kafka("json", schema, [line])
    assert rows.schema == source.schema and (len(rows), bad) == ((1, set()) if fits else (0, {0}))


def test_seconds_are_kept_in_what_is_declared_for_text_and_are_milliseconds_in_rows():
    spec = {"v": Deep, "w": list[Deep], "x": pa.duration("s"), "y": dict[str, Deep]}
    declared, rows = as_declared(spec, "test"), as_schema(spec, "test")
    in_s, in_ms = (pa.struct([("at", pa.timestamp(unit))]) for unit in ("s", "ms"))
    assert declared.types[:3] == [in_s, pa.large_list(in_s), pa.duration("s")]
    assert rows.types == [in_ms, pa.large_list(in_ms), pa.duration("ms"), pa.map_(pa.large_string(), in_ms)]


@pytest.mark.parametrize("format", ["%d/%m/%Y %", "%j %Y", "%s", "%d %Z", "%H:%M:%S.%f", "%\n", "%d\0", 3])
def test_a_format_that_is_not_read_alike_everywhere_is_refused(format):
    with pytest.raises(ConfigError, match="CsvOptions: timestamp_formats has"):
        CsvOptions(timestamp_formats=(format,))


# ---- JSON lines ----

JSON_VALUES = [
    *TEXTS,
    *(json.dumps(text) for text in TEXTS),
    *('"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\x01"', '"a', "'a'", "{", "[]", "[1]", "{}"),
    *('{"a":1}', "1]", "1}", "//", "1 // x", "1,", ',1', '1,"v":2', '1,"\\u0076":2', "[" * 500 + "]" * 500, "undefined"),
]  # fmt: skip


def in_json(text: str, kind: pa.DataType) -> Any:
    """The value of JSON text for Python, None for null. Raises ValueError if it is none of that type."""
    text = re.sub(r"^Inf$|^-Inf$", lambda found: found[0] + "inity", text)
    text = re.sub(r"^\s*-NaN\s*$", "NaN", text)
    row = json.loads('{"v":' + text + "}", parse_float=Decimal, parse_int=Decimal)
    value = row["v"]
    if value is None:
        return None
    number = isinstance(value, (Decimal, float))
    types = pa.types
    if types.is_boolean(kind) and isinstance(value, bool):
        return value
    if types.is_integer(kind) and isinstance(value, Decimal) and not re.search(r"[.eE]", text):
        return int(value)
    if types.is_floating(kind) and number:
        return value if isinstance(value, float) else _float(str(value))
    if types.is_decimal(kind) and not isinstance(value, bool) and isinstance(value, (Decimal, str)):
        return _fitting(Decimal(value), kind)
    is_text = types.is_large_string(kind) or types.is_large_binary(kind) or types.is_temporal(kind)
    if isinstance(value, str) and is_text and not types.is_duration(kind):
        return in_python(value, kind)
    raise ValueError(text)


def check_json_value(value: Any, text: str, kind: pa.DataType) -> None:
    try:
        expected = in_json(text, kind)
    except (ValueError, KeyError, InvalidOperation, RecursionError):
        raise AssertionError(f"{text!r} as {kind} became {value!r}, but Python refuses it") from None
    if isinstance(expected, Fraction):
        assert is_nearest(value, expected, kind), (text, kind, value)
    else:
        assert value == expected or (math.isnan(value) and math.isnan(expected)), (text, kind, value)


IN_JSON = [kind for kind in KINDS if not pa.types.is_duration(kind)]


@pytest.mark.parametrize("kind", IN_JSON, ids=str)
def test_each_hostile_text_in_json_has_the_value_that_python_reads_or_is_refused(tmp_path, kind):
    lines = [f'{{"n":{at},"v":{text}}}' for at, text in enumerate(JSON_VALUES)]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode())
    schema = pa.schema([pa.field("n", pa.int64()), pa.field("v", kind)])
    [batch] = read_batches(FileSource(tmp_path / "a.jsonl", schema=schema, on_bad_record="drop"))
    accepted = to_list(batch.column("n"))
    for at, value in zip(accepted, values_of(batch.column("v")), strict=True):
        check_json_value(value, JSON_VALUES[at], kind)
    assert any(batch.column("v").is_valid()), "some of them are values of each type"
    rows, bad = in_kafka("json", schema, lines)
    assert [at for at in range(len(lines)) if at not in bad] == accepted
    assert same(rows, batch)


@MANY
@given(text=TEXT | TEXT.map(json.dumps) | st.sampled_from(JSON_VALUES), kind=st.sampled_from(IN_JSON))
def test_any_text_in_json_has_the_value_that_python_reads_or_is_refused(tmp_path, text, kind):
    path = tmp_path / "a.jsonl"
    path.write_bytes(f'{{"v":null}}\n{{"v":{text}}}\n{{"v":null}}\n'.encode())
    batches: list[pa.RecordBatch] = []
    source = FileSource(path, schema=pa.schema([("v", kind)]))
    message = refusal(partial(read_into, batches, source))
    if message is None:
        check_json_value(values_of(batches[0].column("v"))[1], text, kind)
    else:
        assert f"{path}, line 2: " in message


@pytest.mark.parametrize("number", ["1" * 400, "-" + "1" * 400 + ".5", "1" * 400 + "e1"])
@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.list_(pa.float64()), pa.struct([("x", pa.float64())])])
def test_a_json_number_with_so_many_digits_that_it_became_infinite_is_refused(tmp_path, number, kind):
    value = {"list": f"[{number}]", "struct": f'{{"x":{number}}}'}.get(str(kind).partition("<")[0], number)
    (tmp_path / "a.jsonl").write_text(f'{{"v":null,"f":Infinity}}\n{{"v":{value}}}\n')
    source = FileSource(tmp_path / "a.jsonl", schema=pa.schema([("v", kind), ("f", pa.float64())]))
    with pytest.raises(
        SchemaError, match=r"line 2: .*in column 'v' is beyond the range of that type|line 2: .*Number too big"
    ):
        read_all(source, 10)


@pytest.mark.parametrize(
    "value", ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "[\n" * 60 + "]" * 60]
)
def test_json_that_is_nested_too_deep_to_infer_its_type_is_refused(tmp_path, value):
    (tmp_path / "a.jsonl").write_text(f'{{"v":1,"deep":{value}}}\n')
    with pytest.raises(StorageError, match=r"a\.jsonl: .*nested more than 50 deep; declare schema="):
        FileSource(tmp_path / "a.jsonl")
    assert read_all(FileSource(tmp_path / "a.jsonl", schema=pa.schema([("v", pa.int64())])), 10) == [{"v": 1}]


def test_brackets_in_strings_are_not_nested(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"v":"{smile}"}}\n' for smile in [":[", '\\":{'] * 60))
    assert len(read_all(FileSource(tmp_path / "a.jsonl"), 1000)) == 120


@settings(MANY, max_examples=examples(60))
@given(
    times=st.lists(st.none() | st.times(), min_size=1, max_size=5),
    unit=st.sampled_from(["us", "ns"]),
    nested=st.booleans(),
)
def test_times_of_day_come_back_from_json(tmp_path, times, unit, nested):
    kind: pa.DataType = pa.time64(unit)
    values: list[Any] = times
    if nested:
        kind = pa.struct([("at", pa.large_list(kind)), ("n", pa.int64())])
        values = [None if at is None else {"at": [at, None], "n": 1} for at in times] + [{"at": None, "n": 2}]
    rows = pa.record_batch([pa.array(values, kind)], names=["v"])
    with open(tmp_path / "a.jsonl", "wb") as file:
        new_encoder("jsonl", file, rows.schema).write(rows)
    read = read_batches(FileSource(tmp_path / "a.jsonl", schema=rows.schema))
    assert [value for batch in read for value in batch.column("v").to_pylist()] == rows.column("v").to_pylist()


# ---- encodings and empty files ----


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("schema", [None, pa.schema([("v", pa.string())])])
def test_the_mark_of_another_encoding_is_named(tmp_path, name, encoding, schema):
    (tmp_path / name).write_bytes(("v,n\nx,1\n" if name == "a.csv" else '{"v":"x","n":1}\n').encode(encoding))
    with pytest.raises(StorageError, match=r"a\.\w+: begins with the byte order mark of UTF-16 or UTF-32"):
        read_all(FileSource(tmp_path / name, schema=schema, on_bad_record="drop"), 10)


@pytest.mark.parametrize("suffix", ["gz", "zst", "lz4", "zip"])
@pytest.mark.parametrize(("name", "text"), [("a.csv", b"v\n1\n"), ("a.jsonl", b'{"v":1}\n')])
def test_a_compressed_file_without_the_suffix_is_refused_by_its_beginning(tmp_path, name, text, suffix):
    packed = tmp_path / f"{name}.{suffix}"
    if suffix == "zip":
        with zipfile.ZipFile(packed, "w") as file:
            file.writestr(name, text)
    else:
        kind: Any = {"gz": "gzip", "zst": "zstd", "lz4": "lz4"}[suffix]
        with pa.CompressedOutputStream(pa.OSFile(str(packed), "wb"), kind) as stream:
            stream.write(text)
    assert read_all(FileSource(packed), 10) == [{"v": 1}]
    packed.rename(tmp_path / name)
    for schema in (None, pa.schema([("v", pa.int64())])):
        with pytest.raises(DataError, match=rf"{name}: begins as \.{suffix} files do; .* let it end in \.{suffix}"):
            read_all(FileSource(tmp_path / name, schema=schema, on_bad_record="drop"), 10)


def test_text_that_is_not_utf8_is_refused_with_its_line_and_never_inferred_as_bytes(tmp_path):
    for name, text in (("a.csv", "n,v\n1,x\n2,café\n"), ("a.jsonl", '{"n":1,"v":"x"}\n\n{"n":2,"v":"café"}\n')):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        schemas = [schema_of([("v", pa.string()), ("n", pa.int64())]), None]
        for schema in schemas if name == "a.csv" else schemas[:1]:
            with pytest.raises(MidstreamError, match=rf"{name}, line 3: .*; only UTF-8 can be read: convert the file"):
                read_all(FileSource(tmp_path / name, schema=schema), 10)
    with pytest.raises(MidstreamError, match=r"a\.jsonl: .*; only UTF-8 can be read: convert the file"):
        FileSource(tmp_path / "a.jsonl")
    (tmp_path / "h.csv").write_bytes("é\n1\n".encode("latin-1"))
    with pytest.raises(MidstreamError, match=r"h\.csv: .*; only UTF-8 can be read: convert the file"):
        FileSource(tmp_path / "h.csv")
    as_bytes = FileSource(tmp_path / "a.csv", schema=pa.schema([("v", pa.binary())]))
    assert [row["v"] for row in read_all(as_bytes, 10)] == [b"x", "café".encode("latin-1")]
