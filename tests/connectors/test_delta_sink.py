"""The Delta sink: what readers of the table see at each step, and what is refused before any of them."""

from __future__ import annotations

import json
import pickle
import shutil
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from connector_worlds import SCHEMA, Loop, batch, failure_of, open_writer, written
from deltalake import DeltaTable, Schema, write_deltalake

from committers import committer_of
from midstream.connectors.delta.delta_files import WrittenFile
from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.connectors.delta.delta_tables import check_features
from midstream.engine.core.arrow_types import schema_of, to_list
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "numbers"


def new_sink(table: Path, schema: pa.Schema = SCHEMA, **options: Any) -> DeltaSink:
    sink = DeltaSink(table, **options)
    sink.validate(schema, restoring=False)
    return sink


def numbers(table: Path) -> list[int]:
    return sorted(pl.read_delta(str(table))["n"].to_list())


def version(table: Path) -> int:
    return DeltaTable(table).version()


def files(table: Path) -> list[str]:
    return sorted(path.name for path in table.rglob("*.parquet"))


# ---- exactly once -----------------------------------------------------------


def test_two_that_commit_the_same_at_once_agree_on_one(table):
    sink = new_sink(table)
    first, second = written(sink, batch(1)), written(sink, batch(2), 2, subtask=1)
    one, other = committer_of(sink, "job-a"), committer_of(sink, "job-a")
    one.commit(1, first)
    other.commit(1, first)
    stale = other._table.newest
    other._table.newest = lambda: (setattr(other._table, "newest", stale), other._table.table)[1]
    one.commit(2, second)
    other.commit(2, second)  # begins from the version before
    assert numbers(table) == [1, 2]
    assert version(table) == 2


def test_commits_of_several_jobs_and_of_other_writers_do_not_disturb_each_other(table):
    sink = new_sink(table)
    one, other = committer_of(sink, "job-a"), committer_of(sink, "job-b")
    one.commit(1, written(sink, batch(1)))
    write_deltalake(table, pa.table({"n": [100]}), mode="append")
    other.commit(1, written(sink, batch(2), job_id="job-b"))
    one.commit(2, written(sink, batch(3), 2, subtask=1))
    DeltaTable(table).optimize.compact()
    one.commit(3, written(sink, batch(4), 3, subtask=2))
    assert numbers(table) == [1, 2, 3, 4, 100]


# ---- a sink that writes elsewhere now ---------------------------------------


def test_a_table_may_be_moved_with_all_that_waits_for_it(table, tmp_path):
    sink = new_sink(table)
    first, second = written(sink, batch(1)), written(sink, batch(2), 2, subtask=1)
    committer_of(sink, "job-a").commit(1, first)
    table.rename(tmp_path / "elsewhere")
    moved = DeltaSink(tmp_path / "elsewhere")
    moved.validate(SCHEMA, restoring=True)
    for checkpoint_id, committables in ((1, first), (2, second)):
        moved.check_committables(checkpoint_id, committables)
        committer_of(moved, "job-b").commit(checkpoint_id, committables)
    assert numbers(tmp_path / "elsewhere") == [1, 2]
    assert not table.exists()


@pytest.mark.parametrize("key", [(), ("n",)])
@pytest.mark.parametrize("versions", [0, 1, 5])
def test_a_table_that_was_dropped_and_made_again_gets_nothing_of_the_job(table, key, versions):
    """It would lack what was committed before. What the committer has read of the old one does not hide that."""
    sink = new_sink(table, key=key)
    committers = [committer_of(sink, "job-a"), committer_of(sink, "job-a")]
    for n in (1, 2, 3):
        committers[0].commit(n, written(sink, batch(n), n, subtask=n))
    shutil.rmtree(table)
    for n in range(versions + 1):
        write_deltalake(table, pa.table({"n": [100 + n]}), mode="append")
    later = written(sink, batch(4), 4, subtask=4)
    for act in (sink.check_committables, *(each.commit for each in committers)):
        with pytest.raises(ConfigError, match=r"checkpoint 4: the table was replaced by another .* --fresh"):
            act(4, later)
    assert numbers(table) == [100 + n for n in range(versions + 1)]


def test_what_is_neither_there_nor_committed_is_refused_before_anything_runs(table, tmp_path):
    sink = new_sink(table)
    committables = written(sink, batch(1, 2))
    shutil.rmtree(table)
    moved = new_sink(tmp_path / "elsewhere")
    with pytest.raises(
        StorageError, match=r"elsewhere: cannot commit checkpoint 3: .*\.parquet with 2 rows is missing"
    ):
        moved.check_committables(3, committables)
    far = msgspec.structs.replace(msgspec.msgpack.decode(committables[0], type=WrittenFile), place="s3:bucket/table")
    with pytest.raises(ConfigError, match="to be committed to s3:bucket/table, which cannot be reached from here"):
        moved.check_committables(3, [msgspec.msgpack.encode(far)])


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../victim"},
        {"name": "victim"},
        {"name": "/etc/passwd"},
        {"name": "../part-0000-0000-000000-0123456789abcdef.parquet"},
        {"name": "p=../part-0000-0000-000000-0123456789abcdef.parquet", "partition": {"p": "0"}},
        {"name": "file:///tmp/part-0000-0000-000000-0123456789abcdef.parquet"},
        {"place": "local:/tmp/../etc"},
        {"place": "local:relative"},
    ],
)
def test_a_checkpoint_cannot_have_any_other_file_added_or_deleted(table, changes):
    sink = new_sink(table)
    (committable,) = written(sink, batch(1))
    for victim in (table / "victim", table.parent / "victim"):
        victim.write_text("precious")
    before = sorted(table.parent.rglob("*"))
    crafted = msgspec.structs.replace(msgspec.msgpack.decode(committable, type=WrittenFile), **changes)
    committer = committer_of(sink, "job-b")
    for act in (sink.check_committables, committer.commit, lambda _, what: committer.abort(what)):
        with pytest.raises(StorageError, match=r"is corrupt or forged"):
            act(1, [msgspec.msgpack.encode(crafted)])
    assert sorted(table.parent.rglob("*")) == before


def test_a_symbolic_link_does_not_lead_out_of_the_table(table, tmp_path):
    sink = new_sink(table, pa.schema([("n", pa.int64()), ("p", pa.int64())]), partition_by=["p"])
    committables = written(sink, pa.record_batch({"n": [1], "p": [0]}))
    (table / "p=0").rename(tmp_path / "outside")
    (table / "p=0").symlink_to(tmp_path / "outside")
    committer = committer_of(sink, "job-b")
    for act in (sink.check_committables, committer.commit, lambda _, what: committer.abort(what)):
        with pytest.raises(StorageError, match=r"leads out of .* through a symbolic link"):
            act(1, committables)
    assert len(list((tmp_path / "outside").iterdir())) == 1


# ---- what is left -----------------------------------------------------------


# ---- partitions, types, statistics ------------------------------------------

VISITS = schema_of([("who", pa.large_string()), ("day", pa.date32()), ("n", pa.int64())])


def test_rows_are_kept_by_partition(table):
    rows = pa.RecordBatch.from_pylist(
        [
            {"who": who, "day": date(2024, 1, 1 + n % 2), "n": n}
            for n, who in enumerate(["a/b=c", "é ?", None, "a/b=c"] * 5)
        ],
        VISITS,
    )
    sink = new_sink(table, VISITS, partition_by=["who", "day"])
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    got = pl.read_delta(str(table)).select("who", "day", "n").sort("n")
    assert got.rows() == [tuple(row.values()) for row in rows.to_pylist()]
    assert DeltaTable(table).metadata().partition_columns == ["who", "day"]
    assert len(files(table)) == 4
    found = DeltaTable(table).to_pyarrow_table(filters=[("who", "=", "a/b=c"), ("day", "=", date(2024, 1, 1))])
    assert sorted(to_list(found["n"])) == [0, 4, 8, 12, 16]
    later = new_sink(table, VISITS, append=True)
    committer_of(later, "job-b").commit(1, written(later, rows, job_id="job-b"))
    assert pl.read_delta(str(table)).height == 40


def test_a_partition_column_of_each_kind_comes_back(table):
    schema = schema_of([("flag", pa.bool_()), ("code", pa.int16()), ("day", pa.date32()), ("n", pa.int64())])
    rows = pa.RecordBatch.from_pylist([{"flag": True, "code": -1, "day": date(1999, 12, 31), "n": 1}, {"n": 2}], schema)
    sink = new_sink(table, schema, partition_by=["flag", "code", "day"])
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    got = DeltaTable(table).to_pyarrow_table().sort_by("n").select(schema.names)
    assert got.to_pylist() == rows.to_pylist()


def test_values_of_all_types_come_back_as_they_were(table):
    moment = datetime(2024, 2, 29, 23, 59, 59, 123456)
    rows = pa.RecordBatch.from_pydict(
        {
            "flag": pa.array([True, None]),
            "small": pa.array([255, None], pa.uint8()),
            "huge": pa.array([2**64 - 1, None], pa.uint64()),
            "n": pa.array([2**63 - 1, None], pa.int64()),
            "real": pa.array([float("nan"), None]),
            "money": pa.array([Decimal("-1.230"), None], pa.decimal128(30, 3)),
            "words": pa.array(["é\n\0", None], pa.large_string()),
            "raw": pa.array([b"\x00\xff", None], pa.large_binary()),
            "day": pa.array([date(1, 1, 1), None]),
            "local": pa.array([moment, None], pa.timestamp("us")),
            "moment": pa.array([moment.replace(tzinfo=UTC), None], pa.timestamp("ns", "Europe/Berlin")),
            "texts": pa.array([["a", None, ""], None], pa.large_list(pa.large_string())),
            "inner": pa.array(
                [{"x": 1, "y": ["z"]}, None], pa.struct([("x", pa.uint32()), ("y", pa.large_list(pa.large_string()))])
            ),
        }
    )
    sink = new_sink(table, rows.schema)
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    expected = rows.to_pylist()
    expected[0]["huge"] = Decimal(2**64 - 1)
    expected[0]["moment"] = moment.replace(tzinfo=UTC)
    got = DeltaTable(table).to_pyarrow_table().to_pylist()
    assert str(got[0].pop("real")) == str(expected[0].pop("real")) == "nan"
    assert got == expected


def stats_of(table: Path) -> Any:
    (line,) = [line for line in (table / "_delta_log" / f"{1:020}.json").read_text().splitlines() if '"add"' in line]
    return json.loads(json.loads(line)["add"]["stats"], parse_float=Decimal)


def test_readers_can_skip_files_by_what_the_log_says_of_them(table):
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    whole = pa.RecordBatch.from_pydict(
        {
            "n": pa.array(range(5)),
            "at": pa.array([moment.replace(microsecond=n) for n in range(5)], pa.timestamp("us", "UTC")),
            "who": pa.array(["w0", "w1", None, "x" * 40, "a" * 40], pa.large_string()),
            "x": pa.array([0.5, None, float("inf"), 1, 2]),
            "flag": pa.array([True, False, True, None, None]),
            "cost": pa.array([Decimal("1.10"), None, Decimal(10) ** 34, Decimal(0), None], pa.decimal128(38, 3)),
            "raw": pa.array([b"a"] * 5, pa.large_binary()),
            "never": pa.array([None] * 5, pa.float64()),
            "inner": pa.array([{"y": 1}, None, None, None, None], pa.struct([("y", pa.int64())])),
            "many": pa.array([[1]] * 5, pa.large_list(pa.int64())),
        }
    )
    sink = new_sink(table, whole.schema)
    committer_of(sink, "job-a").commit(1, written(sink, whole))
    assert stats_of(table) == {
        "numRecords": 5,
        "minValues": {
            "n": 0,
            "at": "2024-01-01T00:00:00.000000Z",
            "who": "a" * 32,
            "x": 0.5,
            "flag": False,
            "cost": 0,
            "inner": {},
        },
        "maxValues": {
            "n": 4,
            "at": "2024-01-01T00:00:00.000004Z",
            "who": "x" * 32 + "\U0010ffff",
            "x": "Infinity",
            "flag": True,
            "cost": 10**34,
            "inner": {},
        },
        "nullCount": {"n": 0, "at": 0, "who": 1, "x": 1, "flag": 2, "cost": 2, "raw": 0, "never": 5},
    }
    assert pl.scan_delta(str(table)).filter(pl.col("at") > moment.replace(microsecond=2)).collect().height == 2
    assert pl.scan_delta(str(table)).filter(pl.col("n") > 9).collect().height == 0


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.0, float("nan")]),
        pa.array([float("nan"), None]),
        pa.array(["a" * 5000, ""], pa.large_string()),
        pa.array([0, 253_402_300_800_000_000], pa.timestamp("us", "UTC")),
        pa.array([0, -(2**31)], pa.date32()),
    ],
    ids=["NaN among others", "NaN alone", "long text", "a moment in the year 10000", "a day before the year 1"],
)
def test_a_file_has_bounds_for_all_columns_or_for_none(table, column):
    """deltalake takes a bound that is missing for NULL, and NaN is above the greatest value that Parquet knows."""
    rows = pa.record_batch({"n": pa.array([1, 2]), "x": column})
    sink = new_sink(table, rows.schema)
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    assert stats_of(table) == {"numRecords": 2, "nullCount": {"n": 0, "x": column.null_count}}
    found = DeltaTable(table).to_pyarrow_table(filters=[("n", "=", 2)]).combine_chunks()
    got = found["x"].chunk(0).cast(column.type)
    assert str(got) == str(column.slice(1))
    assert DeltaTable(table).to_pyarrow_table(columns=["n"], filters=pc.is_valid(pc.field("x"))).num_rows == len(
        column.drop_null()
    )


def test_columns_that_the_stream_lacks_are_null_to_readers(table):
    inner = pa.struct([("y", pa.int64())])
    DeltaTable.create(table, schema_of([("n", pa.int64()), ("more", pa.float64()), ("inner", inner)]))
    sink = new_sink(table)
    committer_of(sink, "job-a").commit(1, written(sink, batch(1, 2)))
    for name in ("more", "inner"):
        assert DeltaTable(table).to_pyarrow_table(filters=pc.is_null(pc.field(name))).num_rows == 2
        assert DeltaTable(table).to_pyarrow_table(filters=pc.is_valid(pc.field(name))).num_rows == 0


def test_columns_are_cast_to_those_of_the_table_where_that_loses_nothing(table):
    there = pa.schema(
        [pa.field("n", pa.int32(), nullable=False), *schema_of([("x", pa.float64()), ("more", pa.string())])]
    )
    DeltaTable.create(table, there)
    stream = schema_of([("x", pa.float32()), ("n", pa.int64())])
    sink = new_sink(table, stream)
    committer_of(sink, "job-a").commit(1, written(sink, pa.RecordBatch.from_pylist([{"x": 0.5, "n": 7}], stream)))
    assert DeltaTable(table).to_pyarrow_table().to_pylist() == [{"n": 7, "x": 0.5, "more": None}]
    too_large = failure_of(sink, pa.RecordBatch.from_pylist([{"x": 0.5, "n": 2**40}], stream))
    assert isinstance(too_large, SchemaError)
    assert "column 'n' is int64, declared as int32" in str(too_large)
    missing = failure_of(sink, pa.RecordBatch.from_pylist([{"x": 0.5, "n": None}], stream))
    assert isinstance(missing, SchemaError)
    assert "column 'n' must have a value" in str(missing)


# ---- what is refused at the start -------------------------------------------


@pytest.mark.parametrize(
    ("there", "stream", "said"),
    [
        (
            [("m", pa.int64())],
            SCHEMA,
            r"the table has no column 'n'; it has m\. Add it there \(evolve=True does\), or leave it out",
        ),
        ([("n", pa.string())], SCHEMA, "column 'n' is int64 in the stream and large_string in the table; cast it"),
        (
            [("n", pa.int64()), pa.field("must", pa.int64(), nullable=False)],
            SCHEMA,
            "column 'must' of the table must have",
        ),
        (None, pa.schema([("n", pa.time64("us"))]), r"column 'n' is time64\[us\], which Delta cannot hold"),
        (None, pa.schema([("n", pa.struct([("x", pa.null())]))]), "which Delta cannot hold"),
        (None, pa.schema([("n", pa.struct([]))]), r"column 'n' is struct<>, which Delta cannot hold"),
        (
            None,
            pa.schema([("a", pa.int64()), ("A", pa.int64())]),
            "columns 'a' and 'A' are the same to Delta.*; rename",
        ),
        (
            None,
            pa.schema([("x", pa.list_(pa.struct([("b", pa.int64()), ("B", pa.int64())])))]),
            r"columns 'x\.b' and 'x\.B' are the same",
        ),
        (None, pa.schema([]), "no columns"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_anything_runs(table, there, stream, said):
    if there:
        DeltaTable.create(table, pa.schema(there))
    with pytest.raises(SchemaError, match=said):
        new_sink(table, stream)


def nested(kind: Any) -> Schema:
    fields = [{"name": "x", "type": kind, "nullable": True, "metadata": {}}]
    return Schema.from_json(json.dumps({"type": "struct", "fields": fields}))


NOT_NULL = {"type": "struct", "fields": [{"name": "a", "type": "long", "nullable": False, "metadata": {}}]}


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        (NOT_NULL, pa.struct([("a", pa.int64())])),
        ({"type": "array", "elementType": "long", "containsNull": False}, pa.large_list(pa.int64())),
        (
            {"type": "array", "elementType": NOT_NULL, "containsNull": True},
            pa.large_list(pa.struct([("a", pa.int64())])),
        ),
    ],
    ids=["field of a struct", "element of a list", "field of a struct in a list"],
)
def test_a_column_with_not_null_inside_is_refused(table, kind, stream):
    """deltalake could no longer read a table that had a null there."""
    DeltaTable.create(table, nested(kind))
    with pytest.raises(SchemaError, match=r"column 'x' is .*not null.* in the table, .*; make its fields nullable"):
        new_sink(table, pa.schema([("x", stream)]))


def test_files_are_not_added_to_a_table_that_no_longer_takes_nulls_inside(table):
    stream = pa.schema([("x", pa.struct([("a", pa.int64())]))])
    sink = new_sink(table, stream)
    committables = written(sink, pa.RecordBatch.from_pylist([{"x": {"a": None}}], stream))
    empty = pa.schema(nested(NOT_NULL).to_arrow()).empty_table()  # type: ignore[arg-type]
    write_deltalake(table, empty, mode="overwrite", schema_mode="overwrite")
    with pytest.raises(SchemaError, match=r"column 'x' was struct<a: int64> .*, and is now struct<a: int64 not null>"):
        committer_of(sink, "job-b").commit(1, committables)


def test_a_table_with_not_null_inside_of_another_column_is_taken(table):
    DeltaTable.create(table, nested(NOT_NULL))
    DeltaTable(table).alter.add_columns(Schema.from_arrow(SCHEMA).fields)
    sink = new_sink(table)
    committer_of(sink, "job-a").commit(1, written(sink, batch(1)))
    assert DeltaTable(table).to_pyarrow_table().to_pylist() == [{"x": None, "n": 1}]


def test_a_directory_that_is_something_else_is_refused(table):
    table.mkdir()
    (table / "old.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is not empty \(it has old.parquet\) and is not a Delta table"):
        new_sink(table)
    with pytest.raises(StorageError, match="cannot be opened or made"):
        new_sink(table / "old.parquet" / "below")


def test_partitioning_that_is_not_the_tables_is_refused(table):
    DeltaTable.create(table, VISITS, partition_by=["who"])
    with pytest.raises(ConfigError, match=r"the table is partitioned by \(who\), not by \(day\)"):
        new_sink(table, VISITS, partition_by=["day"])
    with pytest.raises(SchemaError, match="partition column 'who' is not in the stream; it has n"):
        new_sink(table, SCHEMA)
    with pytest.raises(ConfigError, match=r"partition_by='n' is a string; give a list: \['n'\]"):
        DeltaSink(table, partition_by="n")
    with pytest.raises(ConfigError, match="all columns are partition columns"):
        new_sink(table.parent / "other", SCHEMA, partition_by=["n"])
    with pytest.raises(SchemaError, match="partition column 'x' is double; supported types are text, integers"):
        new_sink(table.parent / "other", schema_of([("x", pa.float64()), ("n", pa.int64())]), partition_by=["x"])


def test_a_table_with_deletion_vectors_as_deltalake_makes_it_is_written(table):
    plain = pa.schema([("n", pa.int64())])
    DeltaTable.create(str(table), plain, configuration={"delta.enableDeletionVectors": "true"})
    assert "variantType" in (DeltaTable(table).protocol().writer_features or ())
    sink = new_sink(table, append=True)
    committer_of(sink, "job-a").commit(1, written(sink, batch(1, 2)))
    assert numbers(table) == [1, 2]


def described(column: object, features: list[str], **configuration: str) -> Any:
    """A table as deltalake describes it, of a protocol that it cannot make itself."""
    field = {
        "name": "n",
        "nullable": True,
        "metadata": {},
        **(column if isinstance(column, dict) else {"type": column}),
    }
    return SimpleNamespace(
        protocol=lambda: SimpleNamespace(writer_features=features),
        metadata=lambda: SimpleNamespace(configuration=configuration),
        schema=lambda: SimpleNamespace(to_json=lambda: json.dumps({"type": "struct", "fields": [field]})),
    )


LISTED = ["variantType", "typeWidening", "inCommitTimestamp", "deletionVectors"]
NESTED = {"type": "array", "elementType": "variant", "containsNull": True}
WIDENED = {"type": "long", "metadata": {"delta.typeChanges": [{"fromType": "integer", "toType": "long"}]}}


@pytest.mark.parametrize(
    ("column", "features", "configuration", "said"),
    [
        ("long", LISTED, {}, None),
        ("variant", LISTED, {}, "columns of the type variant"),
        (NESTED, LISTED, {}, "columns of the type variant"),
        (WIDENED, LISTED, {}, "columns whose type was widened"),
        ("long", LISTED, {"delta.enableInCommitTimestamps": "true"}, "in-commit timestamps"),
        ("long", ["rowTracking"], {}, "rowTracking"),
        ("long", ["clustering"], {}, "clustering"),
        ("long", ["featureOfTomorrow", *LISTED], {}, "the table uses featureOfTomorrow, which"),
    ],
)
def test_a_feature_of_a_table_is_refused_if_it_is_in_use_or_unknown(column, features, configuration, said):
    found = described({"type": column} if column is NESTED else column, features, **configuration)
    if said is None:
        check_features(found, "here")
    else:
        with pytest.raises(ConfigError, match=said):
            check_features(found, "here")


def test_a_table_that_checks_its_rows_is_refused(table):
    write_deltalake(table, pa.table({"n": [0]}))
    DeltaTable(table).alter.add_constraint({"positive": "n >= 0"})
    with pytest.raises(ConfigError, match="the table uses check constraints, which this sink does not support"):
        new_sink(table, append=True)


def replace_table(table: Path, schema: pa.Schema, **options: Any) -> None:
    empty = pa.Table.from_batches([], schema)
    write_deltalake(table, empty, mode="overwrite", schema_mode="overwrite", **options)


@pytest.mark.parametrize("job", ["job-a", "job-b"])
@pytest.mark.parametrize(
    ("now", "said"),
    [
        (pa.schema([("n", pa.string())]), "column 'n' was int64 in the table .*, and is now large_string"),
        (pa.schema([("n", pa.int32())]), "column 'n' was int64 in the table .*, and is now int32"),
        (pa.schema([("m", pa.int64())]), "column 'n' was int64 in the table .*, and no longer exists"),
    ],
)
def test_files_are_not_added_to_a_table_that_could_not_be_read_with_them(table, job, now, said):
    sink = new_sink(table)
    committables = written(sink, batch(1, 2))
    replace_table(table, now)
    before = version(table)
    with pytest.raises(SchemaError, match=rf"DeltaSink on .*: cannot commit checkpoint 1: {said}.*; change it back"):
        committer_of(sink, job).commit(1, committables)
    assert version(table) == before
    replace_table(table, SCHEMA)
    committer_of(sink, job).commit(1, committables)
    assert numbers(table) == [1, 2]


def test_files_are_added_to_a_table_that_has_got_more_columns(table):
    sink = new_sink(table)
    committables = written(sink, batch(1, 2))
    replace_table(table, schema_of([("m", pa.string()), ("n", pa.int64())]))
    committer_of(sink, "job-a").commit(1, committables)
    assert numbers(table) == [1, 2]


def test_files_are_not_added_to_a_table_that_has_begun_to_ask_for_more(table):
    sink = new_sink(table)
    committables = written(sink, batch(1, 2))
    DeltaTable(table).alter.add_constraint({"few": "n < 2"})
    with pytest.raises(ConfigError, match="cannot commit checkpoint 1: the table uses check constraints"):
        committer_of(sink, "job-a").commit(1, committables)


@pytest.mark.parametrize("value", ["y" * 252, "__HIVE_DEFAULT_PARTITION__"])
def test_a_partition_value_that_no_folder_can_be_named_after_is_refused_by_its_row(table, value):
    schema = schema_of([("n", pa.int64()), ("who", pa.large_string())])
    sink, loop = new_sink(table, schema, partition_by=["who"]), Loop()
    writer = open_writer(sink, schema, loop)
    for names in (["a", None], ["x" * 251, "é" * 41, value]):
        writer.write(pa.RecordBatch.from_pydict({"n": list(range(len(names))), "who": names}, schema))
        loop.run()
    (error,) = loop.failures
    assert isinstance(error, SchemaError)
    assert "operator 'sink out': DeltaSink on " in str(error)
    assert f"row 4 since the last checkpoint: partition column 'who' has '{value[:3]}" in str(error)
    assert len(str(error)) < 500
    assert files(table) == []


@pytest.mark.parametrize("day", [-719_163, 2_932_897])
def test_a_partition_date_that_no_folder_can_be_named_after_is_refused_by_its_row(table, day):
    schema = schema_of([("n", pa.int64()), ("day", pa.date32())])
    sink, loop = new_sink(table, schema, partition_by=["day"]), Loop()
    writer = open_writer(sink, schema, loop)
    for days in ([-719_162, None], [2_932_896, day]):
        writer.write(pa.RecordBatch.from_arrays([pa.array([1, 2]), pa.array(days, pa.date32())], schema=schema))
        loop.run()
    (error,) = loop.failures
    assert isinstance(error, SchemaError)
    assert f"row 3 since the last checkpoint: partition column 'day' has a date {day} days after" in str(error)
    assert files(table) == []


ODD_VALUES = ("v w", "a/b=c", "é%20 ?#&", "%2F", ':*[]"<>|\\', "\t\n\x01", "..")


def test_all_readers_read_partition_columns_of_any_name(table):
    names = ["day of week", "größe", "a%20b", "a#b?c", "[a]*", "a:b", ".."]
    rows = pa.record_batch(
        {**dict.fromkeys(names, pa.array(ODD_VALUES, pa.large_string())), "n": pa.array(range(len(ODD_VALUES)))}
    )
    sink = new_sink(table, rows.schema, partition_by=names)
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    for name in names:
        expected = list(zip(ODD_VALUES, range(len(ODD_VALUES)), strict=True))
        for read in (
            pl.read_delta(str(table)),
            pl.scan_delta(str(table), use_pyarrow=True).collect(),
            pl.DataFrame(DeltaTable(table).to_pyarrow_table()),
        ):
            assert read.select(name, "n").sort("n").rows() == expected
        for value, n in expected:
            assert pl.scan_delta(str(table)).filter(pl.col(name) == value).collect()["n"].to_list() == [n]
            assert DeltaTable(table).to_pyarrow_table(filters=[(name, "=", value)])["n"].to_pylist() == [n]


@pytest.mark.parametrize("name", ["a=b", "a/b", "a\\b", "../x"])
def test_partition_names_that_are_unfit_for_a_folder_are_encoded_there(table, name):
    rows = pa.record_batch({name: pa.array(["v"], pa.large_string()), "n": pa.array([1])})
    sink = new_sink(table, rows.schema, partition_by=[name])
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    assert DeltaTable(table).to_pyarrow_table(filters=[(name, "=", "v")])["n"].to_pylist() == [1]
    assert len(list(table.glob("*/*.parquet"))) == 1, "one folder below the table"


def test_partition_values_that_just_fit_come_back(table):
    schema = schema_of([("n", pa.int64()), ("who", pa.large_string())])
    names = ["x" * 251, "é" * 41]
    sink = new_sink(table, schema, partition_by=["who"])
    rows = pa.RecordBatch.from_pydict({"n": [1, 2], "who": names}, schema)
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    assert sorted(pl.read_delta(str(table))["who"].to_list()) == sorted(names)


def test_storage_options_do_not_travel(table):
    sink = DeltaSink(table, storage_options={"aws_secret_access_key": "guess-7"})
    sink.validate(SCHEMA, restoring=False)
    assert b"guess-7" not in pickle.dumps(sink)
