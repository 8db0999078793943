"""A DataFrame as a source: staged once, the same rows for every restore, nothing left that was temporary."""

from __future__ import annotations

import os
import pickle
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from midstream.core.errors import ClusterError, ConfigError, SchemaError, StorageError
from midstream.operators.source import DiscoveryContext, Split
from midstream.spark.dataframe import DataFrameSource

pytestmark = pytest.mark.spark
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
    with pytest.raises(StorageError, match="the file is gone since it was found"):
        source.open_split(splits[0])


def test_every_common_type_comes_through(spark, tmp_path):
    row = (
        1, "é", 2.5, True, date(2013, 1, 1), datetime(2013, 1, 1, 5, 30, tzinfo=timezone.utc), datetime(9999, 12, 31, 23),
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
        DataFrameSource(3)
    with pytest.raises(ConfigError, match="a streaming DataFrame has no end"):
        DataFrameSource(spark.readStream.format("rate").load())
    with pytest.raises(SchemaError, match="column 'i' is interval, which has no Arrow form"):
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
    from midstream.connectors.file_sink import FileSink
    from midstream.operators.sink import WriterContext

    class Inline:
        def submit(self, work: Any, done: Any) -> None: ...

        def post(self, mail: Any) -> None: ...

    schema = pa.schema(
        [("n", pa.int64()), ("who", pa.large_string()), ("at", pa.timestamp("us")), ("l", pa.large_list(pa.int64()))]
    )
    sink = FileSink(tmp_path / "out", format=format)
    writer = sink.writer(WriterContext("out", "sink", 0, 0, "job", schema, Inline(), pytest.fail))
    at = datetime(2013, 1, 1, 5, 30, 0, 123456)
    writer.write(pa.RecordBatch.from_pylist([{"n": 1, "who": "é", "at": at, "l": [1, 2]}], schema))
    committables = list(writer.prepare(1)())
    reader = spark.read.schema("n bigint, who string, at timestamp_ntz, l array<bigint>")
    load = reader.parquet if format == "parquet" else reader.json
    sink.committer("job").commit(1, committables)
    writer.write(pa.RecordBatch.from_pylist([{"n": 2}], schema))
    assert writer.prepare(2)()
    assert [tuple(row) for row in load(str(tmp_path / "out")).collect()] == [(1, "é", at, [1, 2])]
