"""What people who know polars, PySpark or Flink type: it works, or names what to use."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pytest

from midstream import (
    Count,
    DataStream,
    Environment,
    JobError,
    KeyedStream,
    SchemaError,
    WatermarkStrategy,
    WindowedStream,
    testing,
    tumbling,
)
from midstream.api import hints as hints_of

HERE = re.escape(Path(__file__).name)
ROWS = [{"t": datetime(2024, 1, 1), "k": "a", "v": 1, "x": 0.5}]


def stream() -> DataStream:
    return Environment("polars").from_collection(ROWS)


def refused(kind: type[Exception], part: str):
    """The message begins with this file and the line of the call, and contains `part`."""
    return pytest.raises(kind, match=rf"(?s)^{HERE}:\d+: .*{part}")


def test_select_and_with_columns_take_what_polars_takes():
    made = stream().select(["k", pl.col("v")], ["t"]).columns
    assert made == ["k", "v", "t"]
    given = stream().with_columns([(pl.col("v") * 2).alias("twice")], who="k", one=1, none=None, day=date(2024, 1, 1))
    expected = pl.DataFrame(
        {"twice": [2], "who": ["a"], "one": [1], "none": [None], "day": [date(2024, 1, 1)]},
        schema_overrides={"one": pl.Int32},
    )
    assert pl.DataFrame(given.schema.empty_table()).select(expected.columns).schema == expected.schema
    assert stream().select(cs.integer()).columns == ["v"]
    not_columns: list[Any] = [3, b"v", {"v": 1}, pl.Series([1]), None]
    for wrong in not_columns:
        with refused(JobError, "is not a column or a polars expression"):
            stream().select("k", wrong)
    others: dict[str, Any] = {"v": [1], "w": object(), "x": {"a": 1}}
    for name, value in others.items():
        with refused(JobError, f"{name}=.* is not a polars expression"):
            stream().with_columns(**{name: value})
    with refused(JobError, "name at least one"):
        stream().select([])


def test_a_filter_takes_several_conditions_and_values():
    rows = [{"k": k, "v": v} for k in "ab" for v in range(4)] + [{"k": None, "v": 1}]
    every = Environment("conditions").from_collection(rows, schema={"k": str, "v": int})
    found = [
        testing.run(made).rows
        for made in (
            every.filter(pl.col("v") > 0, pl.col("v") < 3, k="a"),
            every.filter([pl.col("v") > 0, pl.col("v") < 3], pl.col("k") == "a"),
            every.filter(pl.col("v") > 0).filter(pl.col("v") < 3).filter(lambda row: row["k"] == "a"),
        )
    ]
    assert found == [[{"k": "a", "v": 1}, {"k": "a", "v": 2}]] * 3
    flags = every.with_columns(is_one=pl.col("v") == 1)
    assert len(testing.run(flags.filter("is_one")).rows) == 3
    with refused(JobError, r"filter: k=None is not a value .*filter\(pl.col\('k'\).is_null\(\)\)"):
        every.filter(k=None)
    with refused(JobError, "a function is the only argument"):
        every.filter(lambda row: True, pl.col("v") > 0)  # type: ignore[call-overload]  # what is refused
    with refused(JobError, "a function is the only argument"):
        every.filter(lambda row: True, v=1)  # type: ignore[call-overload]  # what is refused
    with refused(JobError, "name at least one condition"):
        every.filter()
    with refused(SchemaError, "must be boolean; this one is int64"):
        every.filter("v")
    with refused(SchemaError, "column 'w' is not in the stream's schema"):
        every.filter(w=1)


def test_columns_are_dropped_and_renamed():
    made = stream().drop("v").columns
    assert "v" not in made and "k" in made
    assert stream().drop(["v", "k"], cs.temporal()).columns == [
        name for name in stream().columns if name not in ("v", "k", "t")
    ]
    not_columns: list[tuple[Any, type[Exception]]] = [("w", SchemaError), (pl.col("v") + 1, JobError), (3, JobError)]
    for wrong, error in not_columns:
        with refused(error, "drop: "):
            stream().drop(wrong)
    with refused(JobError, "no column is left"):
        stream().drop(*stream().columns)
    with refused(JobError, "name at least one column"):
        stream().drop()

    timed = stream().with_watermarks("t", WatermarkStrategy.monotonous())
    swapped = timed.rename({"t": "at", "k": "v", "v": "k"})
    assert swapped.event_time == "at" and swapped.columns[:3] == ["at", "v", "k"]
    assert timed.drop("t").event_time is None and timed.drop("v").event_time == "t"
    not_names: list[Any] = [{}, "k", {"k": 3}, {"k": ""}, {3: "k"}]
    for wrong in not_names:
        with refused(JobError, "rename: "):
            stream().rename(wrong)
    with refused(SchemaError, "'w' is not in the stream's schema"):
        stream().rename({"w": "x"})
    with refused(SchemaError, ".*'v'"):
        stream().rename({"k": "v"})


@pytest.mark.parametrize("name", ["*", "^v.*$", "^.*$", "v 1", "literal", "element"])
def test_columns_may_have_names_that_are_patterns_in_polars(name: str):
    rows = [{name: n, "v1": 10 + n, "v2": 20 + n, "z": 30 + n} for n in range(3)]
    every = Environment("patterns").from_collection(rows)
    for dropped in (["z"], ["v1", "z"], [name]):
        assert testing.run(every.drop(dropped)).rows == [
            {each: row[each] for each in row if each not in dropped} for row in rows
        ]
    for new in ({"z": "y"}, {name: "z", "z": name}, {"v1": "^z$", "v2": "q"}):
        assert testing.run(every.rename(new)).rows == [{new.get(each, each): row[each] for each in row} for row in rows]
    assert testing.run(every.filter(**{name: 1})).rows == [rows[1]]
    assert testing.run(every.filter(**{name: 7})).rows == []
    flags = every.with_columns(z=pl.col("v1") == 11).rename({"z": "^v$"})
    assert [row["v1"] for row in testing.run(flags.filter("^v$")).rows] == [11]


@pytest.mark.parametrize("name", ["*", "^v.*$", "^.*$"])
@pytest.mark.parametrize(
    "use",
    [
        lambda s, name: s.key_by(name),
        lambda s, name: s.key_by("v1"),
        lambda s, name: s.window_all(tumbling("1 s")),
        lambda s, name: s.drop_duplicates("v1"),
        lambda s, name: s.distinct(),
        lambda s, name: s.join(s.select("v1", "at"), on="v1", within=(0, "1 s")),
        lambda s, name: s.select("v1", "at").join_asof(s, on="v1"),
        lambda s, name: s.join_table(pl.DataFrame({"v1": [1]}), on="v1"),
        lambda s, name: s.select("v1").join_table(pl.DataFrame({"v1": [1], name: [2]}), on="v1"),
    ],
)
def test_what_has_state_refuses_names_that_are_patterns_in_polars(use: Callable[[DataStream, str], Any], name: str):
    """An aggregate of "*" would otherwise be that of another column."""
    rows = [{name: n, "v1": 10 + n, "at": datetime(2026, 1, 1)} for n in range(3)]
    stream = Environment("patterns").from_collection(rows).with_watermarks("at", WatermarkStrategy.bounded("1 s"))
    with pytest.raises(
        SchemaError, match=r"polars reads the name of column .* as a pattern of names; rename it before"
    ):
        use(stream, name)


@pytest.mark.parametrize(
    "kind",
    [pa.time32("s"), pa.decimal256(50, 2), pa.binary(3), pa.map_(pa.string(), pa.int8()), pa.timestamp("us", "+02:00")],
    ids=str,
)
def test_columns_that_are_dropped_or_renamed_keep_their_types(kind: pa.DataType):
    every = Environment("types").from_collection([{"k": 1, "c": None}], schema=pa.schema({"k": pa.int64(), "c": kind}))
    for made, name in ((every.drop("k"), "c"), (every.rename({"k": "j"}), "c"), (every.rename({"c": "d"}), "d")):
        assert made.schema.field(name).type == every.schema.field("c").type
        assert testing.run(made).rows[0][name] is None


def test_drop_takes_what_polars_drops():
    columns = stream().columns
    every: list[Any] = [pl.col("k"), pl.col("k", "v"), pl.col("^k|v$"), pl.exclude("t"), pl.nth(0), ~cs.by_name("k")]
    for dropped in every:
        assert stream().drop(dropped).columns == [
            name for name in columns if name in pl.DataFrame(ROWS).drop(dropped).columns
        ]
    assert stream().drop(cs.by_dtype(pl.Int8)).columns == columns
    with refused(SchemaError, r"drop: .*not found .*t, k, v, x"):
        stream().drop(cs.by_name("w"))


def test_constants_of_numpy_are_constants_and_others_are_refused():
    given: dict[str, Any] = {
        "a": np.int8(1),
        "b": np.bool_(True),
        "c": np.float32(0.5),
        "d": np.datetime64("2024-01-01"),
    }
    assert testing.run(stream().select(**given)).rows == pl.DataFrame(ROWS).select(**given).to_dicts()
    assert len(testing.run(stream().filter(v=np.int64(1))).rows) == 1
    others: list[Any] = [Decimal("NaN"), np.complex128(1), np.datetime64("NaT")]
    for value in others:
        with refused(JobError, "x=.* is not a polars expression"):
            stream().with_columns(x=value)
        with refused(JobError, "k=.* is not a value that a column equals"):
            stream().filter(k=value)
    for call in (
        lambda name: stream().select(name),
        lambda name: stream().with_columns(**{name: 1}),
        lambda name: stream().rename({"k": name}),
    ):
        for name in ("a\ud800", "a\0"):
            with refused(SchemaError, "has a (lone surrogate|NUL) in its name"):
                call(name)


def test_windows_use_an_event_time_that_was_renamed():
    at = datetime(2024, 1, 1)
    rows = [{"k": "a", "t": at + timedelta(seconds=n)} for n in range(4)]
    timed = Environment("renamed").from_collection(rows).with_watermarks("t", WatermarkStrategy.monotonous())
    counted = timed.rename({"t": "at", "k": "t"}).key_by("t").window(tumbling("2 s")).aggregate(n=Count())
    assert [(row["t"], row["n"]) for row in testing.run(counted).rows] == [("a", 2), ("a", 2)]


def test_names_of_other_systems_are_refused_with_the_name_to_use():
    made = stream()
    keyed = made.key_by("k")
    windows = made.with_watermarks("t", WatermarkStrategy.monotonous()).key_by("k").window(tumbling("1 s"))
    for one, name, use in (
        (made, "where", r"filter\("),
        (made, "withColumn", r"with_columns\("),
        (made, "groupBy", r"key_by\("),
        (made, "withWatermark", r"with_watermarks\("),
        (made, "show", r"preview\("),
        (made, "crossJoin", r"join\("),
        (keyed, "join", r"join\(.*before key_by"),
        (keyed.connect(keyed), "interval_join", r"join\("),
        (made, "process_batches", r"key_by\(…\)\.process"),
        (windows, "trigger", r"emit_every\("),
        (Environment("other"), "read_csv", r"read_files\("),
        (Environment("other"), "from_elements", r"from_collection\("),
        (keyed, "agg", r"window\("),
        (keyed, "filter", r"before key_by\("),
        (windows, "count", r"aggregate\(n=Count"),
    ):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'; use .*{use}"):
            getattr(one, name)
        assert not hasattr(one, name)
    for hints, kind in ((hints_of.OF_STREAMS, DataStream), (hints_of.OF_KEYED_STREAMS, KeyedStream)):
        assert not [name for name in hints if name in dir(kind)], "a hint for a method that there is"
        used = {name for hint in hints.values() for name in re.findall(r"(?:^|, |or )(\w+)\(", hint)}
        assert all(
            hasattr(DataStream, name) or hasattr(KeyedStream, name) or hasattr(WindowedStream, name) for name in used
        )
    with pytest.raises(AttributeError, match=r"^DataStream has no attribute 'nope'$"):
        _ = made.nope  # type: ignore[attr-defined]
    with refused(JobError, r"aggregate: Count has no column; name one"):
        windows.aggregate(Count())  # type: ignore[arg-type]  # the mistake under test


def test_a_stream_shows_its_columns():
    timed = stream().with_watermarks("t", WatermarkStrategy.monotonous())
    assert repr(timed) == "DataStream(t: timestamp[us], k: large_string, v: int64, x: double, event_time='t')"
    assert re.fullmatch(r"KeyedStream\(.*keys=\['k'\]\)", repr(timed.key_by("k")))
    assert timed.columns == timed.schema.names
