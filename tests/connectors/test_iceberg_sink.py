"""The Iceberg sink: what readers of the table see at each step, and what is refused before any of them."""

from __future__ import annotations

import errno
import pickle
import re
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from connector_worlds import SCHEMA, Loop, batch, failure_of, open_writer, prepared, written
from iceberg_rest import rest_catalog
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, ForbiddenError
from pyiceberg.expressions import EqualTo, Reference
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import SetSnapshotRefUpdate
from pyiceberg.transforms import BucketTransform, DayTransform
from pyiceberg.types import LongType, NestedField, StringType, StructType

from committers import committer_of
from midstream import Environment
from midstream.connectors.files import rolling_files
from midstream.connectors.iceberg import iceberg_commits, iceberg_sink, iceberg_tables
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable, IcebergFile
from midstream.connectors.iceberg.iceberg_sink import IcebergSink
from midstream.engine.core.arrow_types import schema_of, to_list
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.operators.sink_api import CommittedOutput
from midstream.runtime.process.process_slots import ProcessSlots

NAME = "lake.numbers"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
    return load_catalog("midstream", **properties)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg_sink, "_PAUSE_S", 0.0)


def new_sink(
    catalog: Catalog, schema: pa.Schema = SCHEMA, table: str = NAME, *, restoring: bool = False, **options: Any
) -> IcebergSink:
    sink = IcebergSink(table, catalog=catalog, **options)
    sink.validate(schema, restoring=restoring)
    return sink


def opened(catalog: Catalog, name: str = NAME) -> Table:
    return catalog.load_table(name)


def newest(catalog: Catalog) -> Snapshot:
    found = opened(catalog).current_snapshot()
    assert found is not None
    return found


def summary(catalog: Catalog) -> Mapping[str, str]:
    found = newest(catalog).summary
    return {} if found is None else found.additional_properties


def numbers(catalog: Catalog, name: str = NAME) -> list[int]:
    return sorted(to_list(opened(catalog, name).scan().to_arrow()["n"]))


def snapshots(catalog: Catalog) -> int:
    return len(opened(catalog).metadata.snapshots)


def data_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "warehouse").rglob("*.parquet"))


# ---- exactly once -----------------------------------------------------------


def test_a_snapshot_notes_its_checkpoint_and_the_totals_of_the_table(catalog):
    sink = new_sink(catalog)
    committer_of(sink, "job-a").commit(1, written(sink, batch(1, 2, 3)) + written(sink, batch(4, 5), subtask=1))
    found = summary(catalog)
    assert (found["total-records"], found["total-data-files"], found["midstream.checkpoint"]) == ("5", "2", "1")


def test_two_that_commit_the_same_at_once_agree_on_one(catalog, monkeypatch):
    """The second one has loaded the table before the first has committed."""
    sink = new_sink(catalog)
    first, second = written(sink, batch(1)), written(sink, batch(2), 2, subtask=1)
    one, other = committer_of(sink, "job-a"), committer_of(new_sink(catalog, restoring=True), "job-a")
    one.commit(1, first)
    stale, real = opened(catalog), CatalogTable.opened
    one.commit(2, second)
    answers = [stale]
    monkeypatch.setattr(CatalogTable, "opened", lambda self: answers.pop() if answers else real(self))
    other.commit(2, second)
    assert (numbers(catalog), snapshots(catalog), answers) == ([1, 2], 2, [])


def test_a_stale_commit_fails_although_the_table_was_set_back_in_between(catalog, monkeypatch):
    sink = new_sink(catalog)
    committer_of(sink, "job-a").commit(1, written(sink, batch(1)))
    stale, real = opened(catalog), CatalogTable.opened
    second = written(sink, batch(2), 2, subtask=1)
    committer_of(sink, "job-a").commit(2, second)
    sink.roll_back(CommittedOutput("out", frozenset({"job-a"})), 1, ())
    answers = [stale]
    monkeypatch.setattr(CatalogTable, "opened", lambda self: answers.pop() if answers else real(self))
    with pytest.raises(ConfigError, match="another job has resumed from checkpoint 1 of this one"):
        committer_of(sink, "job-a").commit(2, second)
    assert numbers(catalog) == [1]


@pytest.mark.parametrize("lands", [True, False])
def test_a_commit_of_which_no_answer_comes_is_decided_by_what_the_table_has(catalog, monkeypatch, lands):
    sink = new_sink(catalog)
    committables, real, calls = written(sink, batch(1, 2)), catalog.commit_table, []

    def commit_table(*arguments: Any) -> Any:
        calls.append(lands)
        if len(calls) > 1:
            return real(*arguments)
        if lands:
            real(*arguments)
        raise CommitStateUnknownException("502 Bad Gateway")

    monkeypatch.setattr(catalog, "commit_table", commit_table)
    committer_of(sink, "job-a").commit(1, committables)
    assert (numbers(catalog), snapshots(catalog)) == ([1, 2], 1)
    assert len(calls) == (1 if lands else 2)


def test_a_commit_that_lost_leaves_no_file_of_metadata(catalog, tmp_path, monkeypatch):
    sink = new_sink(catalog)
    committables, real, lost = written(sink, batch(1)), catalog.commit_table, []

    def commit_table(*arguments: Any) -> Any:
        if len(lost) < 3:
            lost.append(1)
            raise CommitFailedException("Table has been updated by another process")
        return real(*arguments)

    monkeypatch.setattr(catalog, "commit_table", commit_table)
    committer_of(sink, "job-a").commit(1, committables)
    assert numbers(catalog) == [1]
    assert len(list((tmp_path / "warehouse").rglob("*.avro"))) == 2, "a manifest and a manifest list"


def test_a_commit_for_which_there_is_no_space_leaves_no_file_of_metadata(catalog, tmp_path, monkeypatch):
    sink = new_sink(catalog)
    committables = written(sink, batch(1))

    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(iceberg_commits, "_make_durable", full)
        with pytest.raises(StorageError, match=r"cannot commit checkpoint 1: OSError: .*No space left on device"):
            committer_of(sink, "job-a").commit(1, committables)
    assert list((tmp_path / "warehouse").rglob("*.avro")) == []
    committer_of(sink, "job-a").commit(1, committables)
    assert numbers(catalog) == [1]


def test_other_writers_that_always_come_first_are_named(catalog, monkeypatch):
    sink = new_sink(catalog)

    def commit_table(*_: Any) -> Any:
        raise CommitFailedException("branch main has changed")

    monkeypatch.setattr(catalog, "commit_table", commit_table)
    with pytest.raises(
        StorageError, match="checkpoint 1: other writers keep committing first: branch main has changed"
    ):
        committer_of(sink, "job-a").commit(1, written(sink, batch(1)))


def test_commits_of_several_jobs_and_of_other_writers_do_not_disturb_each_other(catalog):
    sink = new_sink(catalog)
    one, other = committer_of(sink, "job-a"), committer_of(sink, "job-b")
    one.commit(1, written(sink, batch(1)))
    opened(catalog).append(pa.table({"n": pa.array([100], pa.int64())}))
    other.commit(1, written(sink, batch(2), job_id="job-b"))
    opened(catalog).delete("n == 100")
    one.commit(2, written(sink, batch(3), 2, subtask=1))
    everything = opened(catalog).scan().to_arrow()
    opened(catalog).overwrite(everything)  # compaction
    one.commit(3, written(sink, batch(4), 3, subtask=2))
    assert numbers(catalog) == [1, 2, 3, 4]
    assert summary(catalog)["total-records"] == "4"


def test_expired_snapshots_do_not_make_a_commit_repeat(catalog):
    sink = new_sink(catalog)
    committables = written(sink, batch(1))
    committer_of(sink, "job-a").commit(1, committables)
    opened(catalog).append(pa.table({"n": pa.array([100], pa.int64())}))
    oldest = opened(catalog).metadata.snapshots[0].snapshot_id
    opened(catalog).maintenance.expire_snapshots().by_id(oldest).commit()
    committer_of(sink, "job-a").commit(1, committables)
    assert numbers(catalog) == [1, 100]


def test_many_small_manifests_become_one(catalog, monkeypatch):
    monkeypatch.setattr(iceberg_commits, "SMALL_MANIFESTS_MAX", 5)
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    sink = new_sink(catalog)
    committer = committer_of(sink, "job-a")
    for n in range(1, 13):
        committer.commit(n, written(sink, batch(n), n, attempt=n))
        assert len(newest(catalog).manifests(opened(catalog).io)) <= 5
    assert numbers(catalog) == list(range(1, 13))
    assert len(pl.scan_iceberg(opened(catalog)).collect()) == 12


# ---- a table that is another one now ----------------------------------------


def test_a_table_that_was_renamed_gets_what_waits_for_it(catalog):
    sink = new_sink(catalog)
    committables = written(sink, batch(1))
    catalog.rename_table(NAME, "lake.renamed")
    moved = new_sink(catalog, table="lake.renamed", restoring=True)
    moved.check_committables(1, committables)
    committer_of(moved, "job-b").commit(1, committables)
    assert numbers(catalog, "lake.renamed") == [1]


@pytest.mark.parametrize("again", [False, True])
def test_a_table_that_was_dropped_gets_nothing_of_what_was_written_for_it(catalog, again):
    sink = new_sink(catalog)
    committables = written(sink, batch(1))
    running = committer_of(sink, "job-a")
    catalog.drop_table(NAME)
    said = "was dropped and made again" if again else "the table does not exist in the catalog"
    other = IcebergSink(NAME, catalog=catalog)
    if again:
        other = new_sink(catalog)
    for act in (
        lambda: running.commit(1, committables),
        lambda: committer_of(other, "job-b").commit(1, committables),
        lambda: other.check_committables(1, committables),
    ):
        with pytest.raises(ConfigError, match=said):
            act()
    if again:
        assert numbers(catalog) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../victim"},
        {"name": "victim"},
        {"name": "/etc/passwd"},
        {"name": "../part-0000-0000-000000-0123456789abcdef.parquet"},
        {"directory": "file:///tmp"},
        {"partition": [b"\x00"]},
        {"spec_id": 7},
    ],
)
def test_a_checkpoint_cannot_have_any_other_file_added_or_deleted(catalog, tmp_path, changes):
    sink = new_sink(catalog)
    (committable,) = written(sink, batch(1))
    crafted = msgspec.structs.replace(msgspec.msgpack.decode(committable, type=IcebergFile), **changes)
    committer = committer_of(sink, "job-b")
    before = sorted(tmp_path.rglob("*"))
    acts: list[Callable[..., Any]] = [sink.check_committables, committer.commit]
    if "name" in changes or "directory" in changes:
        acts.append(lambda _, what: committer.abort(what))
    for act in acts:
        with pytest.raises(StorageError, match=r"is corrupt or forged|set the table's property write.data.path back"):
            act(1, [msgspec.msgpack.encode(crafted)])
    assert sorted(tmp_path.rglob("*")) == before


# ---- what is left -----------------------------------------------------------


# ---- rolling back -----------------------------------------------------------


def with_commits(catalog: Catalog, jobs: dict[str, Any]) -> IcebergSink:
    sink = new_sink(catalog, restoring=True)
    for job_id, checkpoints in jobs.items():
        for n in checkpoints:
            committer_of(sink, job_id).commit(n, written(sink, batch(n), n, job_id=job_id, attempt=n))
    return sink


def test_a_table_rolls_back_what_was_committed_after_a_checkpoint(catalog):
    sink = with_commits(catalog, {"a": range(1, 6), "b": (6, 7)})
    output = CommittedOutput("out", frozenset("ab"))
    assert sink.newest_committed(output) == 7
    sink.check_rollback(output, 6)
    sink.roll_back(output, 6, ())
    assert (numbers(catalog), sink.newest_committed(output)) == ([1, 2, 3, 4, 5, 6], 6)
    count = snapshots(catalog)
    sink.roll_back(output, 6, ())
    assert snapshots(catalog) == count, "once is enough"
    opened(catalog).append(pa.table({"n": pa.array([100], pa.int64())}))
    sink.roll_back(output, 2, ())
    assert (numbers(catalog), sink.newest_committed(output)) == ([1, 2, 100], 2), "rows of others stay"
    committer_of(sink, "c").commit(8, written(sink, batch(8), 8, job_id="c"))
    assert numbers(catalog) == [1, 2, 8, 100]
    output = CommittedOutput("out", frozenset("abc"))
    sink.check_rollback(output, 0)
    sink.roll_back(output, 0, ())
    assert numbers(catalog) == [100]
    assert summary(catalog)["total-records"] == "1"


@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 3), (0, 0)])
def test_after_that_a_driver_that_wakes_up_commits_nothing_more(catalog, before, after):
    """Not even if nothing newer was committed yet, or nothing at all."""
    sink = with_commits(catalog, {"a": range(1, before + 1)})
    late = written(sink, batch(4), 4, job_id="a", attempt=9)
    output = CommittedOutput("out", frozenset("a"))
    sink.check_rollback(output, after)
    sink.roll_back(output, after, ())
    with pytest.raises(ConfigError, match=f"another job has resumed from checkpoint {after} of this one"):
        committer_of(sink, "a").commit(4, late)
    assert numbers(catalog) == list(range(1, after + 1))


def test_files_that_others_have_rewritten_are_not_rolled_back(catalog):
    sink, output = with_commits(catalog, {"a": range(1, 4)}), CommittedOutput("out", frozenset("a"))
    opened(catalog).overwrite(opened(catalog).scan().to_arrow())  # compaction
    for act in (sink.check_rollback, lambda out, after: sink.roll_back(out, after, ())):
        with pytest.raises(
            ConfigError, match=r"other writers have changed the table since checkpoint 2: snapshot \d+ is"
        ):
            act(output, 2)
    assert numbers(catalog) == [1, 2, 3]
    sink.check_rollback(output, 3)


def test_a_history_that_no_longer_goes_back_so_far_says_so(catalog):
    sink, output = with_commits(catalog, {"a": range(1, 5)}), CommittedOutput("out", frozenset("a"))
    oldest = [snapshot.snapshot_id for snapshot in opened(catalog).metadata.snapshots[:3]]
    opened(catalog).maintenance.expire_snapshots().by_ids(oldest).commit()
    with pytest.raises(
        ConfigError, match=r"history no longer goes back to checkpoint 1: the snapshot of checkpoint 3 has expired"
    ):
        sink.check_rollback(output, 1)
    sink.check_rollback(output, 4)


def test_output_in_another_table_is_newer_too_and_is_not_rolled_back(catalog):
    old = new_sink(catalog)
    committables = written(old, batch(1), 5)
    committer_of(old, "job-a").commit(5, committables)
    now = new_sink(catalog, table="lake.elsewhere")
    output = CommittedOutput("out", frozenset({"job-a"}), ((5, committables[0]),))
    assert now.newest_committed(output) == 5
    with pytest.raises(ConfigError, match=r"rows of checkpoint 5 were written to lake\.numbers"):
        now.check_rollback(output, 4)


# ---- partitions, types, statistics ------------------------------------------

VISITS = schema_of(
    [
        ("who", pa.large_string()),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("n", pa.int64()),
        ("raw", pa.large_binary()),
    ]
)


def visit(n: int, who: str | None = "ann") -> dict[str, Any]:
    at, raw = datetime(2024, 1, 1 + n % 3, n % 24, tzinfo=UTC), None if who is None else who.encode()
    return {"who": who, "at": at, "day": date(2024, 1, 1 + n % 2), "n": n, "raw": raw}


@pytest.mark.parametrize(
    ("by", "said", "files"),
    [
        (["who"], "who", 4),
        (["day(at)", "who"], "day(at), who", 12),
        (["days(at)"], "day(at)", 3),
        (["hour(at)"], "hour(at)", 20),
        (["month(at)", "year(day)"], "month(at), year(day)", 1),
        (["bucket(4, who)"], "bucket[4](who)", None),
        (["truncate(10, n)"], "truncate[10](n)", 2),
        (["truncate(1, raw)"], "truncate[1](raw)", 4),
        (["day", "bucket(2, n)"], "day, bucket[2](n)", 4),
        (["at"], "at", 20),
    ],
)
def test_rows_are_kept_by_partition(catalog, tmp_path, by, said, files):
    rows = pa.RecordBatch.from_pylist([visit(n, ["a/b=c", "é ?", None, ""][n % 4]) for n in range(20)], VISITS)
    sink = new_sink(catalog, VISITS, partition_by=by)
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    got = opened(catalog).scan().to_arrow().sort_by("n")
    assert got.to_pylist() == rows.to_pylist()
    if files is not None:
        assert len(data_files(tmp_path)) == files
    for n in (0, 3, 10, 19):  # planning by partition and by bounds finds each row
        assert opened(catalog).scan(f"n == {n}").to_arrow()["n"].to_pylist() == [n]
        at = rows.to_pylist()[n]["at"].isoformat()
        assert n in opened(catalog).scan(f"at == '{at}'").to_arrow()["n"].to_pylist()
    assert sorted(to_list(opened(catalog).scan("who == 'a/b=c'").to_arrow()["n"])) == [0, 4, 8, 12, 16]
    with pytest.raises(ConfigError, match=re.escape(f"the table is partitioned by ({said})")):
        new_sink(catalog, VISITS, append=True, partition_by=["bucket(99, who)"])
    again = new_sink(catalog, VISITS, append=True, partition_by=by)
    committer_of(again, "job-b").commit(1, written(again, rows, job_id="job-b"))
    assert len(opened(catalog).scan().to_arrow()) == 40


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int32(), -(2**31)),
        (pa.int64(), -(2**63)),
        (pa.decimal128(5, 2), Decimal("-999.99")),
        (pa.decimal128(38, 0), Decimal(1 - 10**38)),
    ],
    ids=str,
)
def test_a_number_that_cannot_be_truncated_is_refused(catalog, kind, value):
    """Truncating rounds down, which the least numbers of a type do not have room for."""
    sink = IcebergSink("lake.t", catalog=catalog, partition_by=["truncate(7, v)"])
    schema = pa.schema([("v", kind)])
    sink.validate(schema, restoring=False)
    error = failure_of(sink, pa.record_batch([pa.array([1, value, None], kind)], schema=schema))
    assert isinstance(error, SchemaError)
    assert f"column 'v' has the value {value}, and the partition field truncate[7] of it is less than any" in str(error)


def test_files_of_an_older_partitioning_are_committed_with_it(catalog):
    sink = new_sink(catalog, VISITS, partition_by=["who"])
    old = written(sink, pa.RecordBatch.from_pylist([visit(1), visit(2, "bob")], VISITS))
    with opened(catalog).update_spec() as update:
        update.remove_field("who")
        update.add_field("at", DayTransform(), "at_day")
    committer_of(sink, "job-a").commit(1, old)
    now = new_sink(catalog, VISITS, restoring=True)
    new = written(now, pa.RecordBatch.from_pylist([visit(3), visit(4)], VISITS), 2, subtask=1)
    old = written(sink, pa.RecordBatch.from_pylist([visit(5)], VISITS), 2, subtask=2)
    committer_of(now, "job-a").commit(2, [*new, *old])
    assert numbers(catalog) == [1, 2, 3, 4, 5]
    assert opened(catalog).scan("who == 'bob'").to_arrow()["n"].to_pylist() == [2]
    assert sorted({file.file.spec_id for file in opened(catalog).scan().plan_files()}) == [0, 1]


def test_values_of_all_types_come_back_as_they_were(catalog):
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
            "clock": pa.array([time(23, 59, 59, 1), None], pa.time64("us")),
            "local": pa.array([moment, None], pa.timestamp("us")),
            "moment": pa.array([moment.replace(tzinfo=UTC), None], pa.timestamp("ns", "Europe/Berlin")),
            "texts": pa.array([["a", None, ""], None], pa.large_list(pa.large_string())),
            "inner": pa.array(
                [{"x": 1, "y": ["z"]}, None], pa.struct([("x", pa.uint32()), ("y", pa.large_list(pa.large_string()))])
            ),
        }
    )
    sink = new_sink(catalog, rows.schema)
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    expected = rows.to_pylist()
    expected[0]["huge"] = Decimal(2**64 - 1)
    expected[0]["moment"] = moment.replace(tzinfo=UTC)
    got = opened(catalog).scan().to_arrow().to_pylist()
    assert str(got[0].pop("real")) == str(expected[0].pop("real")) == "nan"
    assert got == expected


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.0, float("nan")]),
        pa.array([float("nan"), None]),
        pa.array(["a" * 5000, ""], pa.large_string()),
        pa.array(["\U0010ffff" * 20, ""], pa.large_string()),
        pa.array(["\ud7ff" * 20, ""], pa.large_string()),
        pa.array([0, 253_402_300_800_000_000], pa.timestamp("us", "UTC")),
        pa.array([0, -(2**31)], pa.date32()),
        pa.array([Decimal(10) ** 34, None], pa.decimal128(38, 3)),
    ],
    ids=[
        "NaN",
        "NaN alone",
        "long text",
        "last characters",
        "before surrogates",
        "the year 10000",
        "before the year 1",
        "decimal",
    ],
)
def test_bounds_never_hide_a_row(catalog, column):
    rows = pa.record_batch({"n": pa.array([1, 2]), "x": column})
    sink = new_sink(catalog, rows.schema)
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    got = opened(catalog).scan("n == 2", selected_fields=("n",)).to_arrow()
    assert got["n"].to_pylist() == [2]
    (task,) = opened(catalog).scan().plan_files()
    x = opened(catalog).schema().find_field("x").field_id
    if pa.types.is_floating(column.type):
        assert x not in task.file.upper_bounds
    assert task.file.null_value_counts[x] == column.null_count


@pytest.mark.parametrize("kind", [pa.large_string(), pa.large_binary()])
@pytest.mark.parametrize("values", [["b" * 5000, "b"], ["b", "b" * 5000]])
def test_bounds_of_one_row_group_do_not_stand_for_another(catalog, monkeypatch, kind, values):
    """Parquet has no bounds of a row group with long text."""
    monkeypatch.setattr(rolling_files, "HELD_ROWS", 1)
    column = pa.array(values, pa.large_string()).cast(kind)
    sink, loop = new_sink(catalog, pa.schema([("n", pa.int64()), ("x", kind)])), Loop()
    writer = open_writer(sink, pa.schema([("n", pa.int64()), ("x", kind)]), loop)
    for n in range(2):
        writer.write(pa.record_batch({"n": [n], "x": column[n : n + 1]}))
        loop.run()
    committer_of(sink, "job-a").commit(1, prepared(writer, 1))
    assert len(list(opened(catalog).scan().plan_files())) == 1
    for n in range(2):
        assert opened(catalog).scan(EqualTo(term=Reference("x"), value=column[n].as_py())).to_arrow()[
            "n"
        ].to_pylist() == [n]


@pytest.mark.parametrize("version", ["1", "2"])
def test_files_wait_although_the_column_of_their_partitions_is_dropped(catalog, version):
    schema = schema_of([("p", pa.int64()), ("n", pa.int64())])
    catalog.create_namespace("lake")
    columns = iceberg_tables.new_schema(schema)
    spec = iceberg_tables.new_spec(["p"], columns, "here")
    catalog.create_table(NAME, columns, partition_spec=spec, properties={"format-version": version})
    sink = new_sink(catalog, schema)
    committer_of(sink, "job-a").commit(1, written(sink, pa.record_batch({"p": [7], "n": [1]})))
    waiting = written(sink, pa.record_batch({"p": [7, 8], "n": [2, 3]}), 2, attempt=1)
    with opened(catalog).update_spec() as update:
        update.remove_field("p")
        if version == "1":
            update.add_field("n", BucketTransform(2), "n_bucket")
    with opened(catalog).update_schema() as change:
        change.delete_column("p")
    committer_of(sink, "job-a").commit(2, waiting)
    now = new_sink(catalog, restoring=True, partition_by=["bucket(2, n)"] if version == "1" else [])
    committer_of(now, "job-a").commit(3, written(now, batch(4), 3, attempt=2))
    assert numbers(catalog) == [1, 2, 3, 4]
    now.roll_back(CommittedOutput("out", frozenset({"job-a"})), 1, ())
    assert opened(catalog).scan("n > 0").to_arrow().to_pylist() == [{"n": 1}]


def test_manifests_of_a_dropped_column_become_one_as_well(catalog, monkeypatch):
    monkeypatch.setattr(iceberg_commits, "SMALL_MANIFESTS_MAX", 2)
    schema = schema_of([("p", pa.int64()), ("n", pa.int64())])
    sink = new_sink(catalog, schema, partition_by=["p"])
    for n in (1, 2):
        committer_of(sink, "job-a").commit(n, written(sink, pa.record_batch({"p": [n], "n": [n]}), n, attempt=n))
    with opened(catalog).update_spec() as update:
        update.remove_field("p")
    with opened(catalog).update_schema() as change:
        change.delete_column("p")
    now = new_sink(catalog, restoring=True)
    for n in (3, 4, 5):
        committer_of(now, "job-a").commit(n, written(now, batch(n), n, attempt=n))
    assert numbers(catalog) == [1, 2, 3, 4, 5]


def test_columns_that_the_stream_lacks_are_null_to_readers(catalog):
    catalog.create_namespace("lake")
    day = NestedField(3, "more", StringType(), required=False)
    inner = NestedField(4, "inner", StructType(NestedField(5, "y", LongType(), required=False)), required=False)
    schema = Schema(NestedField(2, "n", LongType(), required=True), day, inner)
    spec = PartitionSpec(PartitionField(3, 1000, iceberg_identity(), "more"))
    catalog.create_table(NAME, schema, partition_spec=spec)
    sink = new_sink(catalog)
    committer_of(sink, "job-a").commit(1, written(sink, batch(1, 2)))
    assert opened(catalog).scan("more is null").to_arrow().to_pylist() == [
        {"n": 1, "more": None, "inner": None},
        {"n": 2, "more": None, "inner": None},
    ]
    assert len(opened(catalog).scan("more is not null").to_arrow()) == 0
    refused = failure_of(sink, pa.record_batch({"n": pa.array([1, None], pa.int64())}))
    assert "column 'n' must have a value, but it is null in a row" in str(refused)


def iceberg_identity() -> Any:
    from pyiceberg.transforms import IdentityTransform

    return IdentityTransform()


def test_files_have_the_ids_of_fields_and_survive_a_rename_and_a_new_column(catalog, tmp_path):
    sink = new_sink(catalog, schema_of([("n", pa.int64()), ("who", pa.large_string())]))
    committables = written(sink, pa.record_batch({"n": [1], "who": ["ann"]}))
    with opened(catalog).update_schema() as update:
        update.rename_column("who", "name")
    with opened(catalog).update_schema() as update:
        update.add_column("who", LongType())
    committer_of(sink, "job-a").commit(1, committables)
    assert opened(catalog).scan().to_arrow().to_pylist() == [{"n": 1, "name": "ann", "who": None}]
    (path,) = data_files(tmp_path)
    assert [field.metadata for field in pq.read_schema(path)] == [{b"PARQUET:field_id": n} for n in (b"1", b"2")]


# ---- refused ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        ({"n": pa.duration("us")}, r"column 'n' is duration\[us\], which Iceberg cannot hold"),
        ({"n": pa.large_string()}, "column 'n' is large_string in the stream and int64 in the table"),
        ({"m": pa.int64()}, "the table has no column 'm'; it has n"),
        ({"n": pa.int64(), "N": pa.int64()}, "columns 'n' and 'N' are the same to Iceberg"),
        ({}, "the stream has no columns to write"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_anything_runs(catalog, stream, said):
    new_sink(catalog)
    with pytest.raises(SchemaError, match=said):
        new_sink(catalog, schema_of(list(stream.items())))


def test_a_table_whose_rows_were_deleted_is_empty(catalog):
    sink = new_sink(catalog)
    committer_of(sink, "job-a").commit(1, written(sink, batch(1)))
    with pytest.raises(ConfigError, match="the table is not empty; name another one"):
        new_sink(catalog)
    opened(catalog).delete("n == 1")
    new_sink(catalog)


@pytest.mark.parametrize(
    ("by", "error", "said"),
    [
        (["weeks(at)"], ConfigError, r"partition_by has 'weeks\(at\)'; give a column, year\(c\)"),
        (["bucket(who)"], ConfigError, r"partition_by has 'bucket\(who\)'; give"),
        (["bucket(0, who)"], ConfigError, r"partition_by has 'bucket\(0, who\)'; give"),
        (["bucket(4294967297, who)"], ConfigError, r"partition_by has 'bucket\(4294967297, who\)'; give"),
        (["place.x"], ConfigError, r"partition field 'place\.x' is made of a field within a column"),
        (["real"], ConfigError, "partition field 'real' is identity of a column that is double"),
        (["day(who)"], SchemaError, r"partition_by has 'day\(who\)', and column 'who' is string"),
        (["day(when)"], SchemaError, "there is no column 'when'; there are who, at, day, n, raw, real, place"),
        (["nope"], SchemaError, "there is no column 'nope'"),
        (["who", "who"], ConfigError, "partition_by names 'who' twice"),
    ],
)
def test_partitioning_that_iceberg_does_not_know_is_refused(catalog, by, error, said):
    more = [pa.field("real", pa.float64()), pa.field("place", pa.struct([("x", pa.int64())]))]
    with pytest.raises(error, match=said):
        new_sink(catalog, pa.schema([*VISITS, *more]), partition_by=by)
    assert not catalog.table_exists(NAME)


@pytest.mark.parametrize("table", ["numbers", "", "lake.", ".numbers", "lake..numbers", 7])
def test_what_is_no_identifier_is_refused(catalog, table):
    with pytest.raises(ConfigError, match=r"is not the identifier of a table, such as 'lake\.orders'"):
        IcebergSink(table, catalog=catalog)


def test_a_catalog_that_is_not_there_is_named(tmp_path):
    sink = IcebergSink(NAME, catalog={"type": "sql", "uri": f"sqlite:///{tmp_path}/no/such/catalog.db"})
    with pytest.raises(StorageError, match=r"IcebergSink on lake.numbers: .*unable to open database file"):
        sink.validate(SCHEMA, restoring=False)
    with pytest.raises(StorageError, match="the catalog cannot be opened"):
        IcebergSink(NAME, catalog={"type": "no such type"}).validate(SCHEMA, restoring=False)


@pytest.mark.parametrize("metrics", ["none", "counts", "full"])
def test_a_column_that_was_made_required_since_is_not_given_a_file_with_nulls(catalog, metrics):
    new_sink(catalog)
    with opened(catalog).transaction() as change:
        change.set_properties({"write.metadata.metrics.default": metrics})
    sink = new_sink(catalog)
    with_null = written(sink, pa.record_batch({"n": pa.array([1, None], pa.int64())}))
    without = written(sink, batch(3), subtask=1)
    with opened(catalog).update_schema(allow_incompatible_changes=True) as update:
        update.update_column("n", required=True)
    with pytest.raises(SchemaError, match="column 'n' of the table must have a value now"):
        committer_of(sink, "job-a").commit(1, with_null)
    committer_of(sink, "job-a").commit(1, without)
    assert numbers(catalog) == [3]


def test_nor_is_a_struct_that_was_made_required(catalog):
    rows = pa.record_batch({"s": pa.array([{"b": 1}, None])})
    sink = new_sink(catalog, rows.schema)
    committables = written(sink, rows)
    with opened(catalog).update_schema(allow_incompatible_changes=True) as update:
        update.update_column("s", required=True)
    with pytest.raises(SchemaError, match="column 's' of the table must have a value now"):
        committer_of(sink, "job-a").commit(1, committables)


def test_a_property_that_no_sink_writes_is_not_guessed_at(catalog):
    sink = new_sink(catalog)
    with opened(catalog).transaction() as change:
        change.set_properties({"midstream/job-a/out": "seven"})
    with pytest.raises(StorageError, match="property 'midstream/job-a/out' is 'seven', which no Iceberg sink writes"):
        committer_of(sink, "job-a").commit(1, written(sink, batch(1)))


@pytest.mark.parametrize("mode", ["some", "truncate(0)", "truncate"])
def test_metrics_that_pyiceberg_does_not_know_are_refused(catalog, mode):
    new_sink(catalog)
    with opened(catalog).transaction() as change:
        change.set_properties({"write.metadata.metrics.column.n": mode})
    with pytest.raises(
        ConfigError, match=r"in one of the table's properties write\.metadata\.metrics\.\*; set it to none"
    ):
        new_sink(catalog)


def test_a_table_that_iceberg_cannot_make_names_the_cure(catalog):
    columns = schema_of([("n", pa.int64()), ("n_bucket", pa.int64())])
    with pytest.raises(
        ConfigError, match="a name that exists in schema: n_bucket; rename the column, or make the table"
    ):
        new_sink(catalog, columns, partition_by=["bucket(2, n)"])
    inner = pa.struct([("b", pa.int64())])
    with pytest.raises(ConfigError, match=r"multiple fields for name s\.b: 2 and 3; rename the column"):
        new_sink(catalog, schema_of([("s", inner), ("s.b", pa.int64())]))


def test_a_namespace_that_exists_need_not_be_created(catalog, monkeypatch):
    def create_namespace(*_: Any) -> None:
        raise ForbiddenError("not allowed")

    catalog.create_namespace("lake")
    monkeypatch.setattr(catalog, "create_namespace", create_namespace)
    new_sink(catalog)
    with pytest.raises(StorageError, match="cannot be opened or made: ForbiddenError: not allowed"):
        new_sink(catalog, table="sea.numbers")


def test_old_metadata_goes_if_the_table_says_so(catalog, tmp_path):
    new_sink(catalog)
    with opened(catalog).transaction() as change:
        change.set_properties(
            {"write.metadata.delete-after-commit.enabled": "true", "write.metadata.previous-versions-max": "2"}
        )
    sink = new_sink(catalog)
    for n in range(1, 8):
        committer_of(sink, "job-a").commit(n, written(sink, batch(n), n, attempt=n))
    assert len(list((tmp_path / "warehouse").rglob("*.metadata.json"))) == 3
    assert numbers(catalog) == list(range(1, 8))


def test_how_long_a_branch_keeps_snapshots_stays(catalog):
    sink = with_commits(catalog, {"a": [1]})
    kept = {"ref-name": "main", "snapshot-id": newest(catalog).snapshot_id, "type": "branch", "max-snapshot-age-ms": 7}
    catalog.commit_table(opened(catalog), (), (SetSnapshotRefUpdate.model_validate(kept),))
    committer_of(sink, "a").commit(2, written(sink, batch(2), 2, job_id="a"))
    assert opened(catalog).metadata.refs["main"].max_snapshot_age_ms == 7


@pytest.mark.parametrize("given", [None, 7, [("type", "sql")]])
def test_what_is_no_catalog_is_refused(given):
    with pytest.raises(ConfigError, match="is no catalog; give the name of one that pyiceberg is configured with"):
        IcebergSink(NAME, catalog=given)


def test_properties_may_have_the_name_of_the_catalog(tmp_path):
    uri = f"sqlite:///{tmp_path}/catalog.db"
    properties = {"name": "prod", "type": "sql", "uri": uri, "warehouse": f"file://{tmp_path}/warehouse"}
    IcebergSink(NAME, catalog=properties).validate(SCHEMA, restoring=False)
    assert load_catalog("prod", type="sql", uri=uri).table_exists(NAME)


def test_the_catalog_does_not_travel(catalog):
    sink = new_sink(catalog)
    assert b"sqlite" not in pickle.dumps(sink)
    assert pickle.loads(pickle.dumps(sink))._table is None


# ---- catalogs behind HTTP, and several at once ------------------------------


@pytest.mark.parametrize("status", [200, 500, 502, 504])
def test_a_rest_catalog_whose_answers_are_lost_gets_each_row_once(catalog, status):
    """The commit is applied, and then the answer is lost, for each second commit."""
    with rest_catalog(catalog) as (server, url):
        server.before_answer = lambda: status if status != 200 and server.commits % 2 else None
        properties = {"type": "rest", "uri": url}
        sink = IcebergSink(NAME, catalog=properties, partition_by=["bucket(2, n)"])
        sink.validate(SCHEMA, restoring=False)
        committer = committer_of(sink, "job-a")
        for n in range(1, 5):
            committer.commit(n, written(sink, batch(n, n + 100), n, attempt=n))
        sink.roll_back(CommittedOutput("out", frozenset({"job-a"})), 3, ())
        assert server.commits == 5
    assert numbers(catalog) == [1, 2, 3, 101, 102, 103]


def test_a_catalog_that_does_not_answer_is_named_after_a_limit(catalog, monkeypatch):
    sink = new_sink(catalog)
    committables, wait = written(sink, batch(1)), threading.Event()
    monkeypatch.setattr(iceberg_commits, "ANSWER_S", 0.2)
    monkeypatch.setattr(iceberg_sink, "_TRIES_MAX", 2)
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "commit_table", lambda *_: wait.wait())
        with pytest.raises(
            StorageError, match=r"the catalog does not confirm it: the catalog has not answered for 0\.2 s"
        ):
            committer_of(sink, "job-a").commit(1, committables)
        patch.setattr(catalog, "load_table", lambda *_: wait.wait())
        with pytest.raises(StorageError, match=r"on lake\.numbers: the catalog has not answered for 0\.2 s"):
            committer_of(sink, "job-a").commit(1, committables)
    wait.set()
    monkeypatch.setattr(iceberg_commits, "ANSWER_S", 60)
    committer_of(sink, "job-a").commit(1, committables)
    assert numbers(catalog) == [1]


def test_committers_that_race_add_each_file_once(catalog):
    """Two drivers of one job, and another job, commit the same checkpoints at the same time, while a reader appends."""
    sink = new_sink(catalog)
    ours = {n: written(sink, batch(n), n, attempt=n) for n in range(1, 5)}
    theirs = {n: written(sink, batch(100 + n), n, attempt=n, job_id="job-b") for n in range(1, 5)}
    failures: list[BaseException] = []

    def commit(job_id: str, held: Mapping[int, list[bytes]]) -> None:
        try:
            mine = committer_of(new_sink(catalog, restoring=True), job_id)
            for n, committables in held.items():
                mine.commit(n, committables)
        except Exception as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [
        threading.Thread(target=commit, args=each) for each in (("job-a", ours), ("job-a", ours), ("job-b", theirs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert numbers(catalog) == [1, 2, 3, 4, 101, 102, 103, 104]
    assert snapshots(catalog) == 8


def test_a_job_with_checkpoints_makes_the_table_before_anything_asks_for_it(tmp_path: Path) -> None:
    env = Environment("job", checkpoint_dir=tmp_path / "ck")
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}"}
    env.from_collection([{"n": 1}]).write_iceberg("lake.rows", catalog=properties)
    env.execute(slots=ProcessSlots())
    assert load_catalog("midstream", **properties).load_table("lake.rows").scan().to_arrow().to_pylist() == [{"n": 1}]
