"""The contract of keyed sinks for lakehouse tables: which rows the table has after commits, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from connector_worlds import Loop, failure_of, open_writer, written
from keyed_tables import TEXT, USERS, KeyedDelta, KeyedIceberg, KeyedTable, rows_of, users

from committers import committer_of
from midstream.connectors.files import keyed_files
from midstream.connectors.iceberg import iceberg_merges
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError


@pytest.fixture(params=[KeyedDelta, KeyedIceberg])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> KeyedTable:
    made: KeyedTable = request.param(tmp_path)
    return made


# ---- what is in the table ----------------------------------------------------


def test_rows_are_put_and_deleted_by_key_and_the_last_operation_of_a_checkpoint_counts(there):
    sink = there.sink()
    committer, before = committer_of(sink, "job-a"), there.commits()
    first = users((1, "ann", "insert"), (2, "bob", "insert"), (3, "cy", "insert"), (3, None, "delete"))
    committables = written(sink, first) + written(sink, users((4, "di", "update")), subtask=1)
    assert there.found() == []
    assert len(there.waiting()) == 2
    committer.commit(1, committables)
    assert there.found() == [(1, "ann"), (2, "bob"), (4, "di")]
    assert there.commits() == before + 1, "one commit for all subtasks"
    second = users(
        *((1, "anna", "update"), (2, None, "delete"), (9, None, "delete"), (4, None, "delete"), (4, "dee", "insert")),
        *((1, "annie", "insert"), (5, "eve", "insert"), (5, None, "delete"), (5, "ev", "update")),
    )
    committer.commit(2, written(sink, second, 2, subtask=2))
    assert there.found() == [(1, "annie"), (4, "dee"), (5, "ev")]
    assert there.waiting() == []


def test_of_a_deleting_row_only_the_key_counts(there):
    fields = [("id", pa.int64(), False), ("name", pa.string(), False), ("n", pa.int32(), True)]
    there.fill(pa.schema([pa.field(*field) for field in fields]).empty_table())
    columns = schema_of([*((name, USERS.field(name).type) for name in USERS.names), ("n", pa.int64())])
    sink = there.sink(columns)
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, rows_of(columns, (1, "ann", "insert", 1), (2, "bob", "insert", 2))))
    gone = rows_of(columns, (1, None, "delete", None), (2, "x", "delete", 2**40), (3, None, "delete", None))
    committer.commit(2, written(sink, gone, 2, subtask=1))
    assert there.found() == []
    error = failure_of(sink, rows_of(columns, (1, None, "delete", 1), (2, None, "update", 1)))
    assert isinstance(error, SchemaError)
    assert "row 1 since the last checkpoint: column 'name' must have a value, but it is null" in str(error)


def test_the_last_of_many_rows_of_a_key_remains_over_batches_and_files(there, monkeypatch):
    monkeypatch.setattr(keyed_files, "_BATCH_ROWS", 1000)
    monkeypatch.setattr(iceberg_merges, "_BATCH_ROWS", 700)
    sink, loop = there.sink(roll_size=1, partition_by=there.by_id), Loop()
    committer = committer_of(sink, "job-a")
    before = pa.record_batch([range(0, 60_000, 3), ["old"] * 20_000, ["insert"] * 20_000], schema=USERS)
    committer.commit(1, written(sink, before, attempt=7))
    writer = open_writer(sink, USERS, loop)
    for start in range(0, 300_000, 50_000):
        ids = [i % 40_000 for i in range(start, start + 50_000)]
        ops = ["delete" if i % 40_000 % 10 == 0 and i >= 240_000 else "update" for i in range(start, start + 50_000)]
        names = [str(i) for i in range(start, start + 50_000)]
        writer.write(pa.record_batch([ids, names, ops], schema=USERS))
        loop.run()
    later = writer.prepare(2)
    assert later is not None
    committables = list(later())
    assert len(committables) > 1
    committer.commit(2, committables)
    last = {i % 40_000: i for i in range(300_000)}
    kept = [(key, str(i)) for key, i in last.items() if key % 10 or i < 240_000]
    assert sorted(there.found()) == sorted(kept + [(key, "old") for key in range(40_002, 60_000, 3)])


def test_without_operations_rows_replace_others_and_columns_that_the_stream_lacks_stay(there):
    fields: list[tuple[str, pa.DataType]] = [
        *(("id", pa.int64()), ("name", pa.string())),
        *(("since", pa.int64()), ("tags", pa.list_(pa.string()))),
    ]
    there.fill(pa.table([[1, 2], ["ann", "bob"], [2001, 2002], [["a", None], []]], schema=pa.schema(fields)))
    columns = schema_of([("id", pa.int64()), ("name", TEXT)])
    sink = there.sink(columns, op=None)
    committer_of(sink, "job-a").commit(1, written(sink, rows_of(columns, (2, "bo"), (3, "cy"), (3, "cyd"))))
    assert there.found() == [(1, "ann", 2001, ["a", None]), (2, "bo", 2002, []), (3, "cyd", None, None)]


def test_rows_that_are_all_key_are_kept_once(there):
    columns = schema_of([("a", pa.int64()), ("b", TEXT)])
    sink = there.sink(columns, key=["b", "a"], op=None)
    for checkpoint_id, rows in enumerate([[(1, "x"), (1, "y"), (1, "x")], [(1, "y"), (2, "y")]], 1):
        made = written(sink, rows_of(columns, *rows), checkpoint_id, subtask=checkpoint_id)
        committer_of(sink, "job-a").commit(checkpoint_id, made)
    assert there.found() == [(1, "x"), (1, "y"), (2, "y")]


def test_rows_that_the_sink_has_added_before_are_found(there):
    """Their least and greatest texts are cut, and with NaN there are none."""
    columns = schema_of([("id", TEXT), ("x", pa.float64())])
    keys = [*("\u00e9" * 40 + end for end in ("a", "b", "\U0010ffff" * 40)), "", "x" * 5000]
    adding = there.unchecked()
    adding.validate(columns, restoring=False)
    for n, key in enumerate(keys):
        made = written(adding, rows_of(columns, (key, float("nan") if n == 1 else 0.0)), n, subtask=n)
        committer_of(adding, "job-a").commit(n, made)
    sink = there.sink(columns, op=None)
    for n, key in enumerate(keys, 10):
        committer_of(sink, "job-b").commit(n, written(sink, rows_of(columns, (key, 1.0)), n, job_id="job-b", subtask=n))
    assert there.found() == sorted(((key, 1.0) for key in keys), key=repr)


HOSTILE = ["a.b", 'q"uote', "back`tick", "sp ace", "UPPER", "größe", "it's", "semi;colon", "new\nline", "s.c0", "t", "row", "k0", "deletes", "%41", "--"]  # fmt: skip


def test_columns_of_any_name_are_found(there):
    columns = schema_of([*((name, pa.int64()) for name in HOSTILE), ("op", TEXT)])
    sink = there.sink(columns, key=HOSTILE[::2])
    width = len(HOSTILE)

    def row(key: int, value: int, op: str) -> tuple[Any, ...]:
        return (*(key if i % 2 == 0 else value for i in range(width)), op)

    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, rows_of(columns, row(1, 1, "insert"), row(2, 2, "insert"))))
    committer.commit(2, written(sink, rows_of(columns, row(1, 9, "update"), row(2, 0, "delete")), 2, subtask=1))
    assert there.found() == [row(1, 9, "")[:-1]]


# ---- exactly once ------------------------------------------------------------


def test_a_repeated_commit_changes_nothing_whichever_job_repeats_it(there):
    sink = there.sink()
    first, second = written(sink, users((1, "a", "insert"))), written(sink, users((1, "b", "update")), 2, subtask=1)
    committer = committer_of(sink, "job-a")
    committer.commit(1, first)
    committer.commit(2, second)
    before = there.commits()
    for checkpoint_id, committables in ((1, first), (2, second), (1, first)):
        sink.check_committables(checkpoint_id, committables)
        committer.commit(checkpoint_id, committables)
        committer_of(sink, "job-a").commit(checkpoint_id, committables)
    assert there.commits() == before
    for job in ("job-b", "job-c", "job-a"):
        committer_of(sink, job).commit(2, second)
        assert there.found() == [(1, "b")]
    assert there.commits() == before + 1, "that another job has resumed is noted once"
    with pytest.raises(ConfigError, match="another job has resumed from checkpoint 2 of this one"):
        committer.commit(3, written(sink, users((1, "c", "update")), 3, subtask=2))
    assert there.found() == [(1, "b")]


def test_rows_are_merged_by_the_key_and_into_the_table_that_they_were_written_for(there):
    sink = there.sink()
    committer_of(sink, "job-a").commit(1, written(sink, users((1, "ann", "insert"), (2, "bob", "insert"))))
    held = written(sink, users((1, "anna", "update"), (2, None, "delete")), 2, subtask=1)
    columns = schema_of([("id", pa.int64()), ("name", TEXT)])
    moved = there.sink(columns, key=["name"], op=None, table="elsewhere")
    successor = committer_of(moved, "job-b")
    for _ in range(2):
        moved.check_committables(2, held)
        successor.commit(2, held)
    successor.commit(3, written(moved, rows_of(columns, (5, "x"), (6, "x")), 3, job_id="job-b"))
    assert there.found() == [(1, "anna")]
    assert there.found("elsewhere") == [(6, "x")]
    appending = there.unchecked(append=True)
    appending.validate(columns, restoring=True)
    held = written(sink, users((1, "annie", "update")), 3, job_id="job-c")
    committer_of(appending, "job-d").commit(3, held)
    assert there.found() == [(1, "annie")]


# ---- files -------------------------------------------------------------------


def test_a_file_that_is_damaged_while_it_waits_is_no_commit(there):
    sink = there.sink()
    committables = written(sink, users((1, "a", "insert")))
    (path,) = there.waiting()
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(StorageError, match="cannot commit checkpoint 1"):
        committer_of(sink, "job-a").commit(1, committables)
    path.write_bytes(data)
    crafted = msgspec.structs.replace(msgspec.msgpack.decode(committables[0], type=there.committable), key=("who",))
    with pytest.raises(StorageError, match="has no columns who; the checkpoint is corrupt or forged"):
        committer_of(sink, "job-a").commit(1, [msgspec.msgpack.encode(crafted)])
    committer_of(sink, "job-a").commit(1, committables)
    assert there.found() == [(1, "a")]


def test_an_aborted_checkpoint_leaves_no_file_and_one_that_is_missing_is_named(there):
    sink = there.sink()
    committables = written(sink, users((1, "a", "insert")))
    for _ in range(2):
        committer_of(sink, "job-a").abort(committables)
    assert there.waiting() == []
    for act in (sink.check_committables, committer_of(sink, "job-a").commit):
        with pytest.raises(StorageError, match=r"_midstream/part-.*\.parquet with 1 rows is missing; only a job"):
            act(1, committables)


def test_what_older_attempts_have_left_is_deleted_once_a_newer_one_commits(there):
    sink = there.sink()
    committer = committer_of(sink, "job-a")
    for attempt in (0, 1):
        written(sink, users((attempt, "old", "insert")), attempt=attempt)
    others = written(sink, users((7, "others", "insert")), job_id="job-x")
    newest = written(sink, users((2, "new", "insert")), 2, attempt=2)
    later = written(sink, users((3, "later", "insert")), 3, attempt=2, subtask=1)
    committer.commit(2, newest)
    assert len(there.waiting()) == 2, "what the same attempt has written since, and what another job has, stays"
    committer.commit(3, later)
    committer_of(sink, "job-x").commit(1, others)
    assert there.found() == [(2, "new"), (3, "later"), (7, "others")]


def test_what_a_job_has_left_is_deleted_once_its_successor_commits(there):
    sink = there.sink()
    held = written(sink, users((1, "held", "insert")))
    written(sink, users((2, "left", "insert")), 2, subtask=1)
    successor = committer_of(sink, "job-b")
    successor.commit(1, held)
    assert len(there.waiting()) == 1
    successor.commit(2, written(sink, users((3, "new", "insert")), 2, job_id="job-b"))
    assert there.waiting() == []
    assert there.found() == [(1, "held"), (3, "new")]


# ---- tables ------------------------------------------------------------------


def test_several_rows_of_one_key_in_the_table_are_reported_and_not_put_right(there):
    there.fill(pa.table({"id": [1, 2, 3], "name": list("ace")}), pa.table({"id": [1, 3], "name": list("bd")}))
    sink = there.sink()
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, users((2, "x", "update"), (3, None, "delete"))))
    assert there.found() == [(1, "a"), (1, "b"), (2, "x")], "a key that is deleted has no row left"
    committables = written(sink, users((1, "y", "update"), (4, "new", "insert")), 2, subtask=1)
    with pytest.raises(ConfigError, match=r"after the commit of checkpoint 2: the table had several rows with the same \(id\): 1 more than"):  # fmt: skip
        committer.commit(2, committables)
    assert there.found() == [(1, "y"), (1, "y"), (2, "x"), (4, "new")]
    committer_of(sink, "job-b").commit(2, committables)
    assert there.waiting() == []


def test_a_table_that_has_rows_is_taken_and_rows_without_a_key_in_it_stay(there):
    there.fill(pa.table({"id": pa.array([1, None], pa.int64()), "name": ["a", "b"]}))
    sink = there.sink()
    committer_of(sink, "job-a").commit(1, written(sink, users((1, None, "delete"), (2, "c", "insert"))))
    assert sorted(row[1] for row in there.found()) == ["b", "c"]


@pytest.mark.parametrize(
    ("options", "columns", "error", "said"),
    [
        ({"key": []}, USERS, ConfigError, "Sink: op='op' needs the columns by which rows are found"),
        ({"key": "id"}, USERS, ConfigError, "Sink: key='id' is a string"),
        ({"op": "what"}, USERS, SchemaError, "operation column 'what' is not in the stream; it has id, name, op"),
        ({"key": ["who"]}, USERS, SchemaError, "key column 'who' is not in the stream"),
        ({"op": "id", "key": ["name"]}, USERS, SchemaError, "operation column 'id' is int64; it must be text"),
        ({"key": ["x"]}, schema_of([("x", pa.float64()), ("op", TEXT)]), SchemaError, "key column 'x' is double"),
        ({"key": ["x"]}, schema_of([("x", pa.struct([("a", pa.int64())])), ("op", TEXT)]), SchemaError, "key column 'x' is struct"),
        ({"key": ["x"]}, schema_of([("x", pa.large_list(pa.int64())), ("op", TEXT)]), SchemaError, "key column 'x' is large_list"),
        ({}, schema_of([("id", pa.int64()), ("midstream_deletes", TEXT), ("op", TEXT)]), SchemaError, "may not be called 'midstream_deletes'"),
    ],
)  # fmt: skip
def test_arguments_and_columns_that_do_not_fit_are_refused(there, options, columns, error, said):
    with pytest.raises(error, match=said):
        there.sink(columns, **options)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((7, "x", "upsert"), "operation column 'op' is 'upsert'; it must be 'insert', 'update' or 'delete'"),
        ((7, "x", None), "operation column 'op' is None"),
        ((None, "x", "delete"), "key column 'id' is null"),
    ],
)
def test_a_row_that_cannot_be_merged_fails_before_the_checkpoint(there, row, said):
    error = failure_of(there.sink(), users((1, "ann", "insert"), row))
    assert isinstance(error, SchemaError)
    assert f"row 1 since the last checkpoint: {said}" in str(error)
    assert str(error).startswith(f"operator 'sink out': {there.what} on ")
    assert there.waiting() == []
