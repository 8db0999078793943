"""A DataFrame as a source: staged once, the same rows for every restore, nothing left that was temporary."""

from __future__ import annotations

import os
import pickle
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from time import process_time
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import types as spark_types

from committers import committer_of
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ClusterError, ConfigError, JobError, SchemaError, StorageError
from midstream.engine.operators.source_api import DiscoveryContext, Split
from midstream.spark.dataframe import DataFrameSource, _raised_by_user
from midstream.spark.datasource_rows import arrow_schema

pytestmark = pytest.mark.spark
TRACEBACK = "Traceback (most recent call last):\n"
CONTEXT = DiscoveryContext("src", 2, None)


def splits_of(source: DataFrameSource) -> list[Split]:
    found = source.discover(None, CONTEXT)
    assert found.exhausted
    assert source.discover(found.position, CONTEXT).splits == ()
    return list(found.splits)


def read(source: DataFrameSource, split: Split, rows_max: int = 1000) -> list[dict[str, Any]]:
    reader = source.open_split(split)
    rows: list[dict[str, Any]] = []
    while (got := reader.read(rows_max)) is not None:
        assert got[0].schema == source.schema
        rows += got[0].to_pylist()
    reader.close()
    return rows


def test_all_rows_are_staged_below_the_checkpoint_directory_and_read_in_splits(spark, tmp_path):
    source = DataFrameSource(spark.range(0, 1000, 1, 3))
    source.prepare("src", str(tmp_path), restoring=False)
    assert sorted(os.listdir(tmp_path)) == ["staged"]
    splits = splits_of(source)
    shipped = pickle.loads(pickle.dumps(source))
    assert len(splits) == 3
    assert sorted(row["id"] for split in splits for row in read(shipped, split)) == list(range(1000))
    source.close()
    assert len([*read(source, splits[0])]) > 0, "the checkpoints still need it"


def test_from_every_offset_exactly_the_rest_is_read(spark, tmp_path):
    source = DataFrameSource(spark.range(0, 20, 1, 1))
    source.prepare("src", str(tmp_path), restoring=False)
    (split,) = splits_of(source)
    rows = read(source, split)
    for done in range(20):
        assert read(source, msgspec.structs.replace(split, offset=done), rows_max=3) == rows[done:]


def test_a_restored_job_reads_what_was_staged_and_a_fresh_one_stages_anew(spark, tmp_path):
    first = DataFrameSource(spark.range(0, 5, 1, 1))
    first.prepare("src", str(tmp_path), restoring=False)
    old_splits = splits_of(first)
    restored = DataFrameSource(spark.range(100, 105, 1, 1))
    restored.prepare("src", str(tmp_path), restoring=True)
    assert splits_of(restored) == old_splits
    assert [row["id"] for row in read(restored, old_splits[0])] == [0, 1, 2, 3, 4]
    fresh = DataFrameSource(spark.range(100, 105, 1, 1))
    fresh.prepare("src", str(tmp_path), restoring=False)
    assert [row["id"] for row in read(fresh, splits_of(fresh)[0])] == [100, 101, 102, 103, 104]
    assert [row["id"] for row in read(fresh, old_splits[0])] == [0, 1, 2, 3, 4], (
        "older checkpoints can still be restored"
    )


def test_a_source_that_is_new_in_a_restored_job_is_staged(spark, tmp_path):
    source = DataFrameSource(spark.range(3))
    source.prepare("new-one", str(tmp_path), restoring=True)
    assert sum(len(read(source, split)) for split in splits_of(source)) == 3


def test_what_was_staged_half_is_not_taken(spark, tmp_path):
    source = DataFrameSource(spark.range(0, 3, 1, 1))
    source.prepare("src", str(tmp_path), restoring=False)
    (name,) = os.listdir(tmp_path / "staged" / "src")
    (tmp_path / "staged" / "src" / name / "_SUCCESS").unlink()
    again = DataFrameSource(spark.range(0, 3, 1, 1))
    again.prepare("src", str(tmp_path), restoring=True)
    assert len(os.listdir(tmp_path / "staged" / "src")) == 2


def test_what_a_function_of_the_frame_raises_is_shown_and_what_was_staged_half_is_deleted(spark, tmp_path):
    def failing(frames):
        for frame in frames:
            try:
                raise KeyError("lost")
            except KeyError:
                raise ValueError(f"no such thing as {frame.num_rows} rows") from None

    source = DataFrameSource(spark.range(0, 4, 1, 2).mapInArrow(failing, "id long"))
    with pytest.raises(
        JobError,
        match=r"^DataFrameSource: a function of the DataFrame failed: ValueError: no such thing as 2 rows\n\nTraceback",
    ):
        source.prepare("src", str(tmp_path), restoring=False)
    assert os.listdir(tmp_path / "staged" / "src") == []


@pytest.mark.parametrize(
    ("text", "raised"),
    [
        (f"thrown from the Python worker:\n{TRACEBACK}  File\nKeyError: 'a'\n", "KeyError: 'a'"),
        (
            f"{TRACEBACK}  File\nKeyError: 'a'\n\nDuring it:\n\n{TRACEBACK}  File\nValueError: two\n  lines",
            "ValueError: two\n  lines",
        ),
        (f"x\n{TRACEBACK}  File\nKeyError\n\tat org.apache.spark.X\n\tat java.Y\n", "KeyError"),
        ("java.io.IOException: No space left on device\n\tat java.io", ""),
    ],
)
def test_what_was_raised_is_found_in_the_text_of_spark(text, raised):
    assert _raised_by_user(Exception(text))[0] == raised


def test_thousands_of_columns_are_no_more_work_each_than_a_few():
    struct = spark_types.StructType([spark_types.StructField(f"c{i}", spark_types.LongType()) for i in range(20_000)])
    nested = spark_types.StructType([spark_types.StructField("s", struct)])
    began_s = process_time()
    assert len(arrow_schema(struct, "here")) == 20_000
    assert arrow_schema(nested, "here").field("s").type.num_fields == 20_000
    assert process_time() - began_s < 20, "quadratic, it would be minutes"


def test_without_checkpoints_rows_are_staged_in_a_temporary_directory_that_goes_with_the_job(
    spark, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = DataFrameSource(spark.range(10))
    source.prepare("src", None, restoring=False)
    splits = splits_of(source)
    assert sum(len(read(pickle.loads(pickle.dumps(source)), split)) for split in splits) == 10
    assert len(os.listdir(tmp_path)) == 1
    source.close()
    source.close()
    assert os.listdir(tmp_path) == []
    with pytest.raises(StorageError, match="the file has disappeared since it was found"):
        source.open_split(splits[0])


def test_every_common_type_comes_through(spark, tmp_path):
    row = (
        1, "é", 2.5, True, date(2013, 1, 1), datetime(2013, 1, 1, 5, 30, tzinfo=UTC), datetime(9999, 12, 31, 23),
        Decimal("1.20"), [1, None], {"x": "y"}, ("z",), b"\x00\xff",
    )  # fmt: skip
    schema = (
        "i int, s string, d double, b boolean, day date, at timestamp, ntz timestamp_ntz, dec decimal(10,2), "
        "l array<bigint>, m map<string,string>, st struct<q:string>, raw binary"
    )
    source = DataFrameSource(spark.createDataFrame([row, (None,) * 12], schema).coalesce(1))
    source.prepare("src", str(tmp_path), restoring=False)
    (split,) = splits_of(source)
    expected = {
        "i": 1, "s": "é", "d": 2.5, "b": True, "day": date(2013, 1, 1), "at": row[5], "ntz": row[6],
        "dec": Decimal("1.20"), "l": [1, None], "m": [("x", "y")], "st": {"q": "z"}, "raw": b"\x00\xff",
    }  # fmt: skip
    assert read(source, split) == [expected, dict.fromkeys(expected)]
    assert source.schema.field("at").type == pa.timestamp("us", "UTC")


def test_an_empty_frame_has_no_splits(spark, tmp_path):
    source = DataFrameSource(spark.range(0))
    source.prepare("src", str(tmp_path), restoring=False)
    assert splits_of(source) == []


def test_what_cannot_be_a_source_is_refused(spark, tmp_path):
    with pytest.raises(ConfigError, match="int is not a Spark DataFrame"):
        DataFrameSource(3)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ConfigError, match=r"read by Spark itself; .* read_files\(…, watch=True\)"):
        DataFrameSource(spark.readStream.format("rate").load())
    with pytest.raises(SchemaError, match="column 'i' has no Arrow form: i is interval; cast it"):
        DataFrameSource(spark.sql("select make_interval(1) as i"))
    with pytest.raises(SchemaError, match="more than one column 'a'"):
        DataFrameSource(spark.sql("select 1 as a, 2 as a"))
    failing = DataFrameSource(spark.sql("select raise_error('bad row') as x, 1 as n").select("n", "x"))
    with pytest.raises(ClusterError, match=r"Spark could not write its rows to .*staged/src"):
        failing.prepare("src", str(tmp_path), restoring=False)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ClusterError, match="Spark could not write"):
        DataFrameSource(spark.range(1)).prepare("src", str(blocked), restoring=False)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_spark_reads_what_the_file_sink_has_committed(spark, tmp_path, format):
    from midstream.connectors.files.file_sink import FileSink
    from midstream.engine.operators.sink_api import WriterContext

    class Inline:
        def submit(self, work: Any, done: Any) -> None: ...

        def post(self, mail: Any) -> None: ...

    schema = schema_of(
        [("n", pa.int64()), ("who", pa.large_string()), ("at", pa.timestamp("us")), ("l", pa.large_list(pa.int64()))]
    )
    sink = FileSink(tmp_path / "out", format=format)
    writer = sink.writer(WriterContext("out", "sink", 0, 0, "job", schema, Inline(), pytest.fail))  # type: ignore[arg-type]  # a stand-in
    at = datetime(2013, 1, 1, 5, 30, 0, 123456)
    writer.write(pa.RecordBatch.from_pylist([{"n": 1, "who": "é", "at": at, "l": [1, 2]}], schema))
    committables = list(writer.prepare(1)())  # type: ignore[misc]  # there is something to do
    reader = spark.read.schema("n bigint, who string, at timestamp_ntz, l array<bigint>")
    load = reader.parquet if format == "parquet" else reader.json
    committer_of(sink, "job").commit(1, committables)
    writer.write(pa.RecordBatch.from_pylist([{"n": 2}], schema))
    assert writer.prepare(2)()  # type: ignore[misc]  # there is something to do
    assert [tuple(row) for row in load(str(tmp_path / "out")).collect()] == [(1, "é", at, [1, 2])]


# ---- every type of Spark ----

KEPT = {
    "BooleanType": ("true", True),
    "ByteType": ("-128Y", -128),
    "ShortType": ("32767S", 32767),
    "IntegerType": ("2147483647", 2**31 - 1),
    "LongType": ("-9223372036854775808L", -(2**63)),
    "FloatType": ("cast(0.1 as float)", 0.10000000149011612),
    "DoubleType": ("0.1D", 0.1),
    "DecimalType": ("-123456789012345678901234567890.12345678BD", Decimal("-123456789012345678901234567890.12345678")),
    "StringType": ("'é' collate UTF8_LCASE", "é"),
    "BinaryType": ("X'00FF'", b"\x00\xff"),
    "DateType": ("date'0001-01-01'", date(1, 1, 1)),
    "TimestampType": (
        "timestamp'1500-01-01 12:00:00.000001Z'",
        datetime(1500, 1, 1, 12, 0, 0, 1, tzinfo=UTC),
    ),
    "TimestampNTZType": ("timestamp_ntz'9999-12-31 23:59:59.999999'", datetime(9999, 12, 31, 23, 59, 59, 999999)),
    "DayTimeIntervalType": ("interval '-1 02:03:04.000005' day to second", -timedelta(1, 7384, 5)),
    "NullType": ("null", None),
    "ArrayType": ("array('a', null)", ["a", None]),
    "MapType": ("map('a', interval '3' hour)", [("a", timedelta(hours=3))]),
    "StructType": ("named_struct('x', 1, 'X', array())", {"x": 1, "X": []}),
}
"""By the class of the type in PySpark: an SQL expression, and its value."""
REFUSED = {
    "VariantType": ("parse_json('{\"a\": 1}')", r"variant; convert it to a string with to_json\(\)"),
    "GeometryType": ("st_geomfromwkb(X'0101000000000000000000F03F0000000000000040')", r"st_asbinary\(\)"),
    "GeographyType": ("st_geogfromwkb(X'0101000000000000000000F03F0000000000000040')", r"st_asbinary\(\)"),
    "YearMonthIntervalType": ("interval '1-2' year to month", "interval year to month; cast it to int"),
    "CalendarIntervalType": ("make_interval(1)", "interval; cast it, or leave it out"),
}
BY_TYPE_ALONE = {"CharType", "VarcharType", "UserDefinedType", "TimeType"}
"""No expression has these where Spark's settings are as they come."""
OF_NO_VALUE = {"DataType", "AtomicType", "NumericType", "IntegralType", "FractionalType", "DatetimeType", "AnyTimeType"}
OF_NO_VALUE |= {"SpatialType", "AnsiIntervalType", "StructField"}


def read_back(frame: Any) -> list[dict[str, Any]]:
    source = DataFrameSource(frame)
    source.prepare("src", None, restoring=False)
    rows = [row for split in splits_of(source) for row in read(source, split)]
    source.close()
    return rows


def test_each_type_that_pyspark_has_is_kept_or_refused():
    found, above = set(), [spark_types.DataType]
    while above:
        kind = above.pop()
        above += kind.__subclasses__()
        if kind.__module__ == spark_types.__name__:
            found.add(kind.__name__)
    unknown = found - {*KEPT, *REFUSED, *BY_TYPE_ALONE, *OF_NO_VALUE}
    assert not unknown, "add what becomes of these to the tables above"


@pytest.mark.parametrize("name", KEPT)
def test_values_of_each_type_come_back_as_they_were(spark, name):
    sql, value = KEPT[name]
    frame = spark.sql(
        f"select {sql} as v, array({sql}) as a, map(1, {sql}) as m, named_struct('f', {sql}) as s, named_struct('f', "
        f"array(named_struct('g', {sql}))) as d"
    )
    assert type(frame.schema["v"].dataType).__name__ == name
    assert read_back(frame) == [
        {"v": value, "a": [value], "m": [(1, value)], "s": {"f": value}, "d": {"f": [{"g": value}]}}
    ]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(
    ("around", "path"),
    [
        ("{}", "v"),
        ("array({})", "v.element"),
        ("map(1, {})", "v.value"),
        ("named_struct('f', array({}))", "v.f.element"),
    ],
)
def test_values_of_each_other_type_are_refused_by_name_wherever_they_are(spark, name, around, path):
    if not hasattr(spark_types, name):
        pytest.skip(f"this PySpark has no {name}")
    sql, says = REFUSED[name]
    with pytest.raises(SchemaError, match=f"column 'v' has no Arrow form: {path} is .*{says}"):
        DataFrameSource(spark.sql(f"select 1 as n, {around.format(sql)} as v"))


class Celsius(spark_types.UserDefinedType):
    @classmethod
    def sqlType(cls) -> Any:
        return spark_types.DoubleType()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (spark_types.CharType(3), r"v is char\(3\); declare it as string"),
        (spark_types.VarcharType(3), r"v is varchar\(3\); declare it as string"),
        (Celsius(), r"v is udt; make what it stores \(double\) columns of plain types"),
        (spark_types.MapType(spark_types.NullType(), spark_types.LongType()), "v.key is void"),
        (
            spark_types.StructType().add("a", "long").add("a", "long"),
            "v has more than one field 'a'; rename one",
        ),
    ],
)
def test_types_that_only_a_schema_can_have_are_refused_by_name(kind, says):
    with pytest.raises(SchemaError, match=f"there: column 'v' has no Arrow form: {says}"):
        arrow_schema(spark_types.StructType().add("v", kind), "there")


@pytest.mark.skipif(not hasattr(spark_types, "TimeType"), reason="this PySpark has no TimeType")
def test_times_of_day_are_kept_to_the_microsecond(spark):
    spark.conf.set("spark.sql.timeType.enabled", "true")
    try:
        assert read_back(
            spark.sql("select time'12:34:56.123456' as v, array(cast(time'01:02:03.456' as time(3))) as a")
        ) == [{"v": time(12, 34, 56, 123456), "a": [time(1, 2, 3, 456000)]}]
        with pytest.raises(SchemaError, match=r"v is time\(9\); cast it to time\(6\)"):
            DataFrameSource(spark.sql("select cast('12:34:56.123456789' as time(9)) as v"))
    finally:
        spark.conf.unset("spark.sql.timeType.enabled")


def test_timestamps_of_nanoseconds_are_refused_where_there_are_any(spark):
    spark.conf.set("spark.sql.timestampNanosTypes.enabled", "true")
    try:
        frame = spark.sql("select typeof(cast('2020-01-01 00:00:00.123456789' as timestamp_ntz(9))) as v")
    except PySparkException:
        pytest.skip("this Spark has none")
    else:
        assert frame.head().v == "timestamp_ntz(9)"
        with pytest.raises(SchemaError, match=r"PySpark cannot read the types of its columns: .*timestamp_ntz\(9\)"):
            DataFrameSource(spark.sql("select cast('2020-01-01 00:00:00.123456789' as timestamp_ntz(9)) as v"))
    finally:
        spark.conf.unset("spark.sql.timestampNanosTypes.enabled")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("spark.sql.parquet.outputTimestampType", "timestamp_millis"),
        ("spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY"),
        ("spark.sql.parquet.int96RebaseModeInWrite", "LEGACY"),
    ],
)
def test_settings_that_change_values_on_their_way_are_refused(spark, tmp_path, setting, value):
    source = DataFrameSource(spark.range(1))
    spark.conf.set(setting, value)
    try:
        with pytest.raises(ConfigError, match=f"the Spark session has {setting}={value}, which .*; unset it"):
            source.prepare("src", str(tmp_path), restoring=False)
    finally:
        spark.conf.unset(setting)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("spark.sql.parquet.outputTimestampType", "INT96"),
        ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS"),
        ("spark.sql.parquet.writeLegacyFormat", "true"),
    ],
)
def test_settings_that_change_the_form_of_files_change_no_value(spark, setting, value):
    spark.conf.set(setting, value)
    try:
        (row,) = read_back(
            spark.sql(
                "select timestamp'1500-01-01 00:00:00.123456Z' as t, timestamp'9999-12-31 00:00:00.000001Z' as u, "
                "array(named_struct('x', array(1.25BD))) as l, map('a', 1) as m"
            )
        )
    finally:
        spark.conf.unset(setting)
    assert row == {
        "t": datetime(1500, 1, 1, 0, 0, 0, 123456, tzinfo=UTC),
        "u": datetime(9999, 12, 31, 0, 0, 0, 1, tzinfo=UTC),
        "l": [{"x": [Decimal("1.25")]}],
        "m": [("a", 1)],
    }
