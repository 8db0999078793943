"""Rows that put and delete rows of a Delta table by key: what remains, whoever commits, and what is refused before."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pytest
from connector_worlds import Loop, failure_of, open_writer, written
from deltalake import DeltaTable, write_deltalake
from keyed_tables import TEXT, USERS, rows_of, users

from committers import committer_of
from machine import limit_s
from midstream.connectors.common.row_operations import written_columns
from midstream.connectors.delta import delta_merges
from midstream.connectors.delta.delta_files import WrittenFile
from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.operators.sink_api import CommittedOutput


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "users"


def new_sink(table: Path, columns: pa.Schema = USERS, restoring: bool = False, **options: Any) -> DeltaSink:
    sink = DeltaSink(table, **{"key": ["id"], "op": "op", **options})
    sink.validate(columns, restoring=restoring)
    return sink


def found(table: Path) -> list[Any]:
    return sorted(pl.read_delta(str(table)).rows())


def version(table: Path) -> int:
    return DeltaTable(table).version()


def waiting(table: Path) -> list[str]:
    return sorted(path.name for path in (table / "_midstream").glob("*"))


def stale(committer: Any) -> None:
    """Let it see, once more, the table as it last saw it."""
    newest = committer._table.newest
    committer._table.newest = lambda: (setattr(committer._table, "newest", newest), committer._table.table)[1]


# ---- what is in the table ----------------------------------------------------


MIDNIGHT = datetime(2024, 1, 1)
KEYS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int8": (pa.int8(), [-128, 0, 127]),
    "int32": (pa.int32(), [-(2**31), 0, 2**31 - 1]),
    "int64": (pa.int64(), [-(2**63), 2**63 - 1, 2**53, 2**53 + 1]),
    "uint64": (pa.uint64(), [0, 2**64 - 1, 2**64 - 2]),
    "bool": (pa.bool_(), [True, False]),
    "text": (TEXT, ["", " ", "null", "'; --", '"`\\', "e\u0301", "\u00e9", "a\0b", "a\0c", "x" * 5000 + "1", "x" * 5000 + "2"]),
    "binary": (pa.large_binary(), [b"", b"\0", b"\0\0", b"\xff" * 40 + b"a", b"\xff" * 40 + b"b"]),
    "date": (pa.date32(), [date(1, 1, 1), date(1970, 1, 1), date(9999, 12, 31)]),
    "time": (pa.timestamp("us"), [datetime.min, MIDNIGHT, MIDNIGHT.replace(microsecond=1), datetime.max]),
    "instant": (pa.timestamp("us", "Europe/Paris"), [datetime(1900, 1, 1, tzinfo=UTC), MIDNIGHT.replace(tzinfo=UTC), MIDNIGHT.replace(microsecond=999, tzinfo=UTC)]),
    "decimal": (pa.decimal128(38, 0), [Decimal("9" * 38), Decimal("9" * 37 + "8"), Decimal("-" + "9" * 38), Decimal(0)]),
    "small decimal": (pa.decimal128(5, 2), [Decimal("1.10"), Decimal("-1.10"), Decimal("1.11")]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_each_type_are_found_again_and_no_other_is(table, kind):
    of_type, keys = KEYS[kind]
    columns = schema_of([("id", of_type), ("n", pa.int64()), ("op", TEXT)])
    sink = new_sink(table, columns)
    committer, checkpoints = committer_of(sink, "job-a"), iter(range(1, 100))

    def commit(*rows: tuple[Any, ...]) -> None:
        checkpoint_id = next(checkpoints)
        committer.commit(checkpoint_id, written(sink, rows_of(columns, *rows), checkpoint_id, subtask=checkpoint_id))

    for n, key in enumerate(keys):  # each in a file of its own
        commit((key, n, "insert"))
    commit(*((key, n + 100, "update") for n, key in enumerate(keys)))
    assert sorted(pl.read_delta(str(table))["n"]) == [n + 100 for n in range(len(keys))]
    for n, key in enumerate(keys):
        commit((key, n + 200, "update"))
        expected = [m + (200 if m <= n else 100) for m in range(len(keys))]
        assert sorted(pl.read_delta(str(table))["n"]) == sorted(expected)
    for n, key in enumerate(keys):
        commit((key, None, "delete"))
        assert sorted(pl.read_delta(str(table))["n"]) == [m + 200 for m in range(n + 1, len(keys))]


@pytest.mark.parametrize("writer", ["spark", "none of the key", "none"])
def test_rows_are_found_in_files_of_other_writers_whatever_the_log_says_of_them(table, writer):
    """Spark cuts times to milliseconds; others leave columns out."""
    columns = schema_of([("at", pa.timestamp("us")), ("n", pa.int64())])
    new_sink(table, columns, key=["at"], op=None)
    ats = [MIDNIGHT.replace(microsecond=123_456), MIDNIGHT.replace(microsecond=123_789)]
    rows_of(columns, *((at, 0) for at in ats))
    write_deltalake(table, pa.Table.from_batches([rows_of(columns, *((at, 0) for at in ats))]), mode="append")
    log = table / "_delta_log" / f"{1:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    cut = {"at": "2024-01-01T00:00:00.123", "n": 0} if writer == "spark" else {"n": 0}
    for action in actions:
        if "add" in action:
            stats = {"numRecords": 2, "minValues": cut, "maxValues": cut, "nullCount": dict.fromkeys(cut, 0)}
            action["add"]["stats"] = json.dumps(stats if writer != "none" else {"numRecords": 2})
    log.write_text("\n".join(map(json.dumps, actions)))
    sink = new_sink(table, columns, key=["at"], op=None, restoring=True)
    committer_of(sink, "job-a").commit(1, written(sink, rows_of(columns, (ats[1], 1))))
    assert found(table) == [(ats[0], 0), (ats[1], 1)]


def test_a_row_moves_to_another_partition_if_that_is_not_in_the_key(table):
    columns = schema_of([("id", pa.int64()), ("city", TEXT), ("n", pa.int64()), ("op", TEXT)])
    sink = new_sink(table, columns, partition_by=["city"])
    committer = committer_of(sink, "job-a")
    rows = rows_of(columns, (1, "a", 1, "insert"), (2, "b", 2, "insert"), (3, None, 3, "insert"), (4, "", 4, "insert"))
    committer.commit(1, written(sink, rows))
    by_id = lambda: dict(zip(*pl.read_delta(str(table)).select("id", pl.struct("city", "n")), strict=True))  # noqa: E731
    assert by_id() == {1: {"city": "a", "n": 1}, 2: {"city": "b", "n": 2}, 3: {"city": None, "n": 3}, 4: {"city": None, "n": 4}}  # fmt: skip
    odd = "a b/c=d%é'\"\\"
    moved = rows_of(columns, (1, odd, 10, "update"), (2, None, 20, "update"), (3, "a", 30, "update"), (4, "a", None, "delete"))  # fmt: skip
    committer.commit(2, written(sink, moved, 2, subtask=1))
    assert by_id() == {1: {"city": odd, "n": 10}, 2: {"city": None, "n": 20}, 3: {"city": "a", "n": 30}}
    read = DeltaTable(table).to_pyarrow_table().to_pylist()
    assert {row["id"]: row["city"] for row in read} == {1: odd, 2: None, 3: "a"}
    committer.commit(3, written(sink, rows_of(columns, *((i, None, 0, "delete") for i in range(5))), 3, subtask=2))
    assert by_id() == {}


def test_a_partition_column_in_the_key_says_which_files_are_read(table, monkeypatch):
    columns = schema_of([("day", pa.date32()), ("id", pa.large_binary()), ("n", pa.int64())])
    sink = new_sink(table, columns, key=["day", "id"], op=None, partition_by=["day"])
    committer = committer_of(sink, "job-a")
    days = [date(2024, 1, day) for day in (1, 2, 3)]
    committer.commit(1, written(sink, rows_of(columns, *((day, b"x", 1) for day in days))))
    committer.commit(2, written(sink, rows_of(columns, (days[1], b"x", 2), (days[1], b"y", 2)), 2, subtask=1))
    assert found(table) == [(days[0], b"x", 1), (days[1], b"x", 2), (days[1], b"y", 2), (days[2], b"x", 1)]
    metrics = DeltaTable(table).history(1)[0]["operationMetrics"]
    assert metrics["num_target_files_skipped_during_scan"] == 2


# ---- exactly once ------------------------------------------------------------


def test_a_checkpoint_that_changes_nothing_is_noted_as_well(table):
    """deltalake makes no version for such a merge, and its files are deleted."""
    sink = new_sink(table)
    committables = written(sink, users((1, None, "delete")))
    committer_of(sink, "job-a").commit(1, committables)
    assert waiting(table) == []
    assert sink.newest_committed(CommittedOutput("out", frozenset(["job-a"]))) == 1
    committer_of(sink, "job-a").commit(1, committables)
    committer_of(sink, "job-b").commit(1, committables)


def test_two_that_commit_the_same_at_once_agree_on_one(table):
    sink = new_sink(table)
    one, other = committer_of(sink, "job-a"), committer_of(sink, "job-a")
    first = written(sink, users((1, "a", "insert"), (2, "b", "insert")))
    one.commit(1, first)
    other.commit(1, first)
    other._table.table = DeltaTable(table)
    second = written(sink, users((1, None, "delete"), (3, "c", "insert")), 2, subtask=1)
    stale(other)
    kept = {path: path.read_bytes() for path in (table / "_midstream").iterdir()}
    one.commit(2, second)
    for path, data in kept.items():  # the other has opened them before
        path.write_bytes(data)
    other.commit(2, second)  # begins from the version before
    assert found(table) == [(2, "b"), (3, "c")]
    assert version(table) == 2
    assert waiting(table) == []


def test_committers_that_race_over_many_checkpoints_merge_each_once(table):
    """As two drivers of one job, each repeating a commit that fails, as the coordinator does."""
    sink = new_sink(table, partition_by=["name"])
    held = []
    for n in range(1, 9):
        rows = [(i % 5, str((n + i) % 3), ("insert", "update", "delete")[(n * i) % 3]) for i in range(n, n + 4)]
        held.append((n, rows, written(sink, users(*rows), n, subtask=n)))
    expected: dict[int, str] = {}
    for row in (row for _, rows, _ in held for row in rows):
        expected.pop(row[0], None)
        expected.update([row[:2]] if row[2] != "delete" else [])

    def commit_all() -> None:
        committer = committer_of(sink, "job-a")
        for checkpoint_id, _, committables in held:
            for tries in range(5):
                try:
                    committer.commit(checkpoint_id, committables)
                    break
                except StorageError:
                    assert tries < 4

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(commit_all) for _ in range(3)]:
            done.result(limit_s(60))
    assert found(table) == sorted(expected.items())
    marks = [
        action["txn"]["version"]
        for log in sorted((table / "_delta_log").glob("*.json"))
        for action in map(json.loads, log.read_text().splitlines())
        if "txn" in action
    ]
    assert marks == list(range(1, 9))
    assert waiting(table) == []


@pytest.mark.parametrize("between", ["append", "compact", "merge"])
def test_a_merge_begins_again_after_any_other_commit(table, between):
    """What another writer commits in between may have rows with the same keys, or other files with the same rows."""
    sink = new_sink(table)
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, users((1, "a", "insert"), (2, "b", "insert"))))
    committer.commit(2, written(sink, users((3, "c", "insert")), 2, subtask=1))
    committer._table.table = DeltaTable(table)
    stale(committer)
    if between == "append":
        write_deltalake(table, pa.table({"id": [4], "name": ["theirs"]}), mode="append")
    elif between == "compact":
        DeltaTable(table).optimize.compact()
    else:
        committer_of(sink, "job-x").commit(1, written(sink, users((4, "theirs", "insert")), job_id="job-x"))
    committer.commit(3, written(sink, users((4, "ours", "update"), (1, None, "delete")), 3, subtask=2))
    assert found(table) == [(2, "b"), (3, "c"), (4, "ours")]


def test_a_merge_that_others_always_overtake_ends(table, monkeypatch):
    sink = new_sink(table)
    committer = committer_of(sink, "job-a")
    committables = written(sink, users((1, "a", "insert")))
    merged, overtaken = delta_merges._merge, 0

    def overtake(*args: Any, **options: Any) -> Any:
        nonlocal overtaken
        overtaken += 1
        write_deltalake(table, pa.table({"id": [9], "name": ["x"]}), mode="append")
        return merged(*args, **options)

    monkeypatch.setattr(delta_merges, "_merge", overtake)
    with pytest.raises(StorageError, match="cannot commit checkpoint 1: other writers keep committing first"):
        committer.commit(1, committables)
    assert overtaken == 5
    monkeypatch.undo()
    committer.commit(1, committables)
    assert (1, "a") in found(table)


def test_a_commit_whose_answer_is_lost_is_not_repeated_and_its_files_are_deleted(table, monkeypatch):
    sink = new_sink(table)
    committables = written(sink, users((1, "a", "insert")))
    merged = delta_merges._merge

    def lose(*args: Any, **options: Any) -> Any:
        merged(*args, **options)
        raise OSError("the connection broke just then")

    monkeypatch.setattr(delta_merges, "_merge", lose)
    with pytest.raises(StorageError, match="the connection broke just then"):
        committer_of(sink, "job-a").commit(1, committables)
    monkeypatch.undo()
    before = version(table)
    assert len(waiting(table)) == 1
    write_deltalake(table, pa.table({"id": [1], "name": ["theirs"]}), mode="overwrite")
    committer_of(sink, "job-a").commit(1, committables)
    assert found(table) == [(1, "theirs")]
    assert version(table) == before + 1
    assert waiting(table) == []


def test_compaction_that_a_merge_overtakes_does_not_bring_rows_back(table):
    sink = new_sink(table)
    committer = committer_of(sink, "job-a")
    for n in (1, 2, 3):
        committer.commit(n, written(sink, users((n, "x", "insert")), n, subtask=n))
    compaction = DeltaTable(table)
    committer.commit(4, written(sink, users((1, None, "delete"), (2, "y", "update")), 4, subtask=4))
    with pytest.raises(Exception, match="concurrent transaction deleted data"):
        compaction.optimize.compact()
    assert found(table) == [(2, "y"), (3, "x")]


# ---- files -------------------------------------------------------------------


def test_files_that_wait_are_no_part_of_the_table_to_readers_and_vacuum(table):
    sink = new_sink(table, partition_by=["name"])
    committables = written(sink, users((1, "a", "insert")))
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert found(table) == []
    sink.check_committables(1, committables)
    committer_of(sink, "job-a").commit(1, committables)
    assert found(table) == [(1, "a")]


def test_closing_deletes_what_was_not_prepared(table):
    sink, loop = new_sink(table, roll_size=1), Loop()
    writer = open_writer(sink, USERS, loop)
    rows = pa.record_batch([range(200_000), ["x"] * 200_000, ["insert"] * 200_000], schema=USERS)
    writer.write(rows)
    loop.run()
    assert len(waiting(table)) == 1
    writer.close()
    loop.run()
    assert waiting(table) == []
    assert loop.failures == []


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "_midstream/../victim"},
        {"name": "victim"},
        {"name": "part-0000-0000-000000-0123456789abcdef.parquet"},
        {"name": "_delta_log/part-0000-0000-000000-0123456789abcdef.parquet"},
        {"key": ()},
        {"place": "local:/tmp/../etc"},
    ],
)
def test_a_checkpoint_cannot_have_any_other_file_merged_or_deleted(table, changes):
    sink = new_sink(table)
    (committable,) = written(sink, users((1, "a", "insert")))
    (table / "victim").write_text("precious")
    before = sorted(table.parent.rglob("*"))
    crafted = msgspec.structs.replace(msgspec.msgpack.decode(committable, type=WrittenFile), **changes)
    committer = committer_of(sink, "job-b")
    for act in (sink.check_committables, committer.commit, lambda _, what: committer.abort(what)):
        with pytest.raises(StorageError, match="is corrupt or forged"):
            act(1, [msgspec.msgpack.encode(crafted)])
    assert sorted(table.parent.rglob("*")) == before


# ---- going back --------------------------------------------------------------


def test_a_table_rolls_back_what_was_merged_after_a_checkpoint(table):
    sink, output = new_sink(table), CommittedOutput("out", frozenset(["job-a"]))
    committer = committer_of(sink, "job-a")
    states: list[list[Any]] = [[]]
    changes: list[list[tuple[Any, ...]]] = [
        [(1, "a", "insert"), (2, "b", "insert")],
        [(1, "aa", "update"), (2, None, "delete")],
        [(9, None, "delete")],  # changes nothing
        [(2, "bb", "insert"), (3, "c", "insert")],
    ]
    for n, rows in enumerate(changes, 1):
        committer.commit(n, written(sink, users(*rows), n, subtask=n))
        states.append(found(table))
    assert sink.newest_committed(output) == 4
    late = written(sink, users((1, "late", "update")), 5, subtask=5)
    for after in (3, 2, 1):
        sink.check_rollback(output, after)
        sink.roll_back(output, after, ())
        assert (found(table), sink.newest_committed(output)) == (states[after], after)
        sink.roll_back(output, after, ())
    with pytest.raises(ConfigError, match="another job has resumed from checkpoint 1 of this one"):
        committer.commit(5, late)
    successor = committer_of(sink, "job-b")
    successor.commit(5, written(sink, users((2, "again", "update")), 5, job_id="job-b"))
    assert found(table) == [(1, "a"), (2, "again")]
    write_deltalake(table, pa.table({"id": [100], "name": ["theirs"]}), mode="append")
    with pytest.raises(ConfigError, match="other writers have changed the table since"):
        sink.check_rollback(CommittedOutput("out", frozenset(["job-a", "job-b"])), 1)


def test_a_table_whose_old_files_are_deleted_is_not_rolled_back(table):
    columns = schema_of([("id", pa.int64()), ("city", TEXT)])
    sink, output = (
        new_sink(table, columns, op=None, partition_by=["city"]),
        CommittedOutput("out", frozenset(["job-a"])),
    )
    committer = committer_of(sink, "job-a")
    for n, city in enumerate(["a b/c=d%é", "x", "y"], 1):
        committer.commit(n, written(sink, rows_of(columns, (1, city), (n + 1, "same")), n, subtask=n))
    sink.check_rollback(output, 1)
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(
        ConfigError, match=r"version 1 of the table can no longer be restored: .* was deleted, for example by VACUUM"
    ):
        sink.check_rollback(output, 1)
    with pytest.raises(StorageError, match="missing file"):
        sink.roll_back(output, 1, ())
    assert found(table) == [(1, "y"), (2, "same"), (3, "same"), (4, "same")]
    sink.check_rollback(output, 3)


# ---- tables ------------------------------------------------------------------


def test_a_table_with_deletion_vectors_or_a_change_feed_is_merged_into(table):
    options = {"delta.enableDeletionVectors": "true", "delta.enableChangeDataFeed": "true"}
    DeltaTable.create(table, written_columns(USERS, "op"), configuration=options)
    write_deltalake(table, pa.table({"id": [1, 2, 3], "name": list("abc")}), mode="append")
    delete_first_row_by_vector(table)
    assert found(table) == [(2, "b"), (3, "c")]
    sink = new_sink(table)
    rows = users((1, "back", "insert"), (2, "bb", "update"), (3, None, "delete"))
    committer_of(sink, "job-a").commit(1, written(sink, rows))
    assert found(table) == [(1, "back"), (2, "bb")]
    feed = pa.table(DeltaTable(table).load_cdf(starting_version=3).read_all()).select(["id", "_change_type"])
    changes = sorted((row["id"], row["_change_type"]) for row in feed.to_pylist())
    assert changes == [(1, "insert"), (2, "update_postimage"), (2, "update_preimage"), (3, "delete")]


def delete_first_row_by_vector(table: Path) -> None:
    """As Spark deletes a row of version 1: the vector is in the log, in Z85."""
    (add,) = [
        action["add"]
        for action in map(json.loads, (table / "_delta_log" / f"{1:020d}.json").read_text().splitlines())
        if "add" in action
    ]
    removed = {
        "path": add["path"],
        "deletionTimestamp": 1,
        "dataChange": True,
        "partitionValues": {},
        "size": add["size"],
    }
    vector = {"storageType": "i", "pathOrInlineDv": VECTOR_OF_ROW_0, "sizeInBytes": 34, "cardinality": 1}
    actions = [{"commitInfo": {"operation": "DELETE"}}, {"remove": removed}, {"add": {**add, "deletionVector": vector}}]
    (table / "_delta_log" / f"{2:020d}.json").write_text("\n".join(map(json.dumps, actions)))


VECTOR_OF_ROW_0 = "^Bg9^0rr910000000000iXQKl0rr91000005c8Xg00000"


def test_a_partition_column_that_no_folder_can_be_named_after_is_refused(table):
    columns = schema_of([("id", pa.int64()), ("a/b", TEXT), ("op", TEXT)])
    with pytest.raises(SchemaError, match="partition column 'a/b' has a character"):
        new_sink(table, columns, partition_by=["a/b"])


def test_an_append_only_table_is_refused(table):
    DeltaTable.create(table, written_columns(USERS, "op"), configuration={"delta.appendOnly": "true"})
    with pytest.raises(ConfigError, match=r"the table is append-only \(delta.appendOnly\)"):
        new_sink(table)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((7, "x" * 300, "insert"), "partition column 'name' has 'xxx"),
        (
            (7, "__HIVE_DEFAULT_PARTITION__", "insert"),
            "partition column 'name' has '__HIVE_DEFAULT_PARTITION__', which readers take for null",
        ),
    ],
)
def test_a_row_without_a_partition_fails_before_the_checkpoint(table, row, said):
    error = failure_of(new_sink(table, partition_by=["name"]), users((1, "ann", "insert"), row))
    assert isinstance(error, SchemaError)
    assert f"row 1 since the last checkpoint: {said}" in str(error)
    assert str(error).startswith("operator 'sink out': DeltaSink on ")
    assert waiting(table) == []


def test_empty_text_cannot_be_the_key_of_a_partition(table):
    error = failure_of(
        new_sink(table, key=["name"], partition_by=["name"]), users((1, "a", "insert"), (2, "", "insert"))
    )
    assert "row 1 since the last checkpoint: key column 'name' is ''" in str(error)


def test_a_date_that_readers_of_the_log_cannot_read_is_refused(table):
    columns = schema_of([("id", pa.int64()), ("day", pa.date32())])
    rows = pa.record_batch([pa.array([1, 2]), pa.array([0, -719_163], pa.int32()).cast(pa.date32())], schema=columns)
    error = failure_of(new_sink(table, columns, op=None), rows)
    assert "row 1 since the last checkpoint: column 'day' has a date -719163 days after 1970-01-01" in str(error)
