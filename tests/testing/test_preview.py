"""`stream.preview()`: the first rows of a job's own sources, in process."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from midstream import (
    ConfigError,
    Count,
    Environment,
    JobError,
    KeyedProcessFunction,
    Sink,
    Source,
    WatermarkStrategy,
    tumbling,
)
from midstream.engine.operators.source_api import Discovery, Split, SplitReader
from midstream.spark.dataframe import DataFrameSource

NOON = datetime(2024, 1, 1, 12)


def test_the_first_rows_of_a_collection():
    stream = Environment().from_collection([{"n": i} for i in range(100)]).filter(pl.col("n") % 2 == 0)
    preview = stream.preview(3)
    assert preview.rows == [{"n": 0}, {"n": 2}, {"n": 4}]
    assert preview.note == ""
    assert preview.frame["n"].to_list() == [0, 2, 4]
    assert "filter-1: 3 rows" in repr(preview)


def test_all_rows_where_there_are_few():
    stream = Environment().from_collection([{"at": NOON, "n": i} for i in range(3)])
    counted = (
        stream.with_watermarks("at", WatermarkStrategy.monotonous()).window_all(tumbling("1 h")).aggregate(n=Count())
    )
    preview = counted.preview()
    assert [row["n"] for row in preview.rows] == [3]
    assert preview.note == ""


@pytest.mark.parametrize("format", ["parquet", "csv", "jsonl"])
def test_files_are_read_as_in_a_job(tmp_path, format):
    for part in range(3):
        frame = pl.DataFrame({"n": range(part * 1000, part * 1000 + 1000)})
        path = tmp_path / f"{part}.{format}"
        {"parquet": frame.write_parquet, "csv": frame.write_csv, "jsonl": frame.write_ndjson}[format](path)  # type: ignore[operator]
    stream = Environment().read_files(tmp_path)
    assert [row["n"] for row in stream.preview(5).rows] == [0, 1, 2, 3, 4]
    assert sorted(row["n"] for row in stream.preview(5000).rows) == list(range(3000))


def test_an_endless_generator_is_read_as_far_as_needed():
    stream = Environment().generate(lambda i: {"n": i}, splits=1)
    assert [row["n"] for row in stream.preview(4).rows] == [0, 1, 2, 3]


def test_a_source_with_a_rate_does_not_keep_people_waiting():
    stream = Environment().generate(lambda i: {"n": i}, rows_per_s=2, splits=1)
    assert [row["n"] for row in stream.preview(10).rows] == list(range(10))


def test_a_window_of_an_endless_stream_fires_with_event_time():
    stream = Environment().generate(lambda i: {"n": i, "at": pa.array(i * 1_000_000, pa.timestamp("us"))})
    window = stream.with_watermarks("at", WatermarkStrategy.monotonous()).window_all(tumbling("1 min"))
    preview = window.aggregate(n=Count()).preview(2, seconds=60)
    assert [row["n"] for row in preview.rows] == [60, 60]
    assert preview.note == ""


def test_where_too_little_comes_the_input_ends_and_the_note_states_it():
    stream = Environment().generate(lambda i: {"at": pa.array(i // 10**12, pa.timestamp("us"))})
    window = stream.with_watermarks("at", WatermarkStrategy.monotonous()).window_all(tumbling("1 h"))
    preview = window.aggregate(n=Count()).preview(2, seconds=0.05)
    [row] = preview.rows
    assert row["n"] > 0
    noun = "row" if row["n"] == 1 else "rows"  # a loaded machine reads one
    assert preview.note.startswith(f"the input ends here after {row['n']:,} {noun}, since 0.05 s have passed")
    assert preview.note in repr(preview)


def test_a_watched_directory_shows_what_is_there_now(tmp_path):
    file = tmp_path / "one.parquet"
    pl.DataFrame({"n": [1, 2]}).write_parquet(file)
    os.utime(file, (1_700_000_000, 1_700_000_000))  # what was written just now may be half written
    preview = Environment().read_files(tmp_path, watch=True).preview(5)
    assert [row["n"] for row in preview.rows] == [1, 2]
    assert "after 2 rows, since there are no more at present" in preview.note


def test_nothing_is_written_and_each_sink_is_shown(tmp_path):
    class Refuses(Sink):
        def writer(self, context):
            raise AssertionError("a preview does not write")

    env = Environment()
    numbers = env.from_collection([{"n": i} for i in range(30)])
    numbers.write_parquet(tmp_path / "out").uid("all")
    numbers.filter(pl.col("n") > 27).sink(Refuses()).uid("few")
    shown = {preview.name.split(" ")[0]: len(preview.rows) for preview in env.preview(5)}
    assert shown == {"all": 5, "few": 2}
    assert not (tmp_path / "out").exists()


class Numbers(Source):
    """Of somebody's own: splits of two rows, found one after the other, and a log of what was called."""

    schema = pa.schema([("n", pa.int64())])

    def __init__(self, log: Path, fail: str = "") -> None:
        self.log = log
        self.fail = fail

    def _note(self, what: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(what + "\n")
        if self.fail == what:
            raise OSError(f"{what}: the database is gone")

    def discover(self, position, context):
        self._note("discover")
        at = 0 if position is None else json.loads(position)
        split = Split(str(at), json.dumps(at).encode())
        return Discovery((split,), json.dumps(at + 1).encode(), at == 2)

    def open_split(self, split):
        self._note("open")
        return Reader(json.loads(split.payload), split.offset)

    def close(self):
        self._note("close")


class Reader(SplitReader):
    def __init__(self, split: int, offset: int) -> None:
        self.split = split
        self.offset = offset

    def read(self, rows_max):
        if self.offset == 2:
            return None
        self.offset += 1
        return pa.RecordBatch.from_pydict({"n": [self.split * 2 + self.offset - 1]}), self.offset

    def close(self):
        pass


def test_a_source_of_ones_own_is_searched_for_splits_and_closed(tmp_path):
    log = tmp_path / "log"
    stream = Environment().source(Numbers(log))
    assert [row["n"] for row in stream.preview().rows] == list(range(6))
    called = log.read_text().split()
    assert called[0] == "discover"
    assert called[-1] == "close"
    assert (called.count("discover"), called.count("open"), called.count("close")) == (3, 3, 1)


@pytest.mark.parametrize("where", ["discover", "open"])
def test_a_source_that_fails_raises(tmp_path, where):
    stream = Environment().source(Numbers(tmp_path / "log", fail=where)).uid("numbers")
    with pytest.raises(OSError, match=f"{where}: the database is gone"):
        stream.preview()


def test_a_function_that_raises_raises_here(tmp_path):
    class Fails(KeyedProcessFunction):
        def process(self, row, ctx):
            raise LookupError(row["n"])

    stream = Environment().from_collection([{"n": 7}]).key_by("n").process(Fails(), {"n": int})
    with pytest.raises(LookupError, match="7"):
        stream.preview()


def test_a_dataframe_is_refused_by_name():
    source = DataFrameSource.__new__(DataFrameSource)
    source.schema = pa.schema([("n", pa.int64())])
    stream = Environment().source(source).uid("sales")
    with pytest.raises(
        JobError, match=r"source 'sales' \(DataFrameSource\) is read with Spark, which a preview does not"
    ):
        stream.preview()


@pytest.mark.parametrize("rows", [0, -1, True, 2.5, "3"], ids=str)
def test_a_number_of_rows_that_is_none_is_refused(rows):
    with pytest.raises(ConfigError, match="is not a number of rows"):
        Environment().from_collection([{"n": 1}]).preview(rows)


@pytest.mark.parametrize("seconds", [0, -1, True, float("nan"), float("inf"), "1 s"], ids=str)
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(ConfigError, match="is not a time in seconds"):
        Environment().from_collection([{"n": 1}]).preview(seconds=seconds)


def test_rows_that_polars_cannot_hold_are_shown_all_the_same():
    table = pa.table({"m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))})
    preview = Environment().from_collection(table).preview()
    assert preview.rows == [{"m": {"a": 1}}]
    assert '"a": 1' in repr(preview)


def test_a_preview_changes_nothing_for_the_job():
    def ticks(i):
        return {"n": i, "at": [NOON + timedelta(seconds=int(each)) for each in i]}

    stream = Environment().generate(ticks, count=5)
    assert stream.preview(2).rows == stream.preview(2).rows
    assert len(stream.preview().rows) == 5


def test_slow_functions_do_not_make_a_preview_long():
    def slow(row):
        time.sleep(0.02)
        return row

    for splits in (1, 4):
        numbers = Environment().generate(lambda i: {"n": i}, 2_000, splits=splits)
        shown = numbers.map(slow).preview(2_000, seconds=0.5)
        assert 0 < shown.table.num_rows <= 100  # half a second of them, and as much again
        assert "since 0.5 s have passed" in shown.note


class Slow(KeyedProcessFunction):
    def process(self, row, ctx):
        ctx.timers.event_time(row["at"] + timedelta(days=365))

    def on_timer(self, at, ctx):
        time.sleep(0.02)
        return {"n": ctx.key}


def test_slow_timers_at_the_end_of_the_input_do_not_make_a_preview_long():
    numbers = Environment().from_collection([{"n": i, "at": NOON + timedelta(seconds=i)} for i in range(400)])
    timed = numbers.with_watermarks("at", WatermarkStrategy.bounded("1 s"))
    assert timed.key_by("n").process(Slow(), {"n": int}).preview(400, seconds=0.5).table.num_rows <= 200
