"""The contract of sinks that add rows to lakehouse tables: what readers see at each step, and whose files are left."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from connector_worlds import SCHEMA, Loop, batch, open_writer, prepared, written
from keyed_tables import KeyedDelta, KeyedIceberg, KeyedTable

from committers import committer_of
from midstream.connectors.files import partitioned_files
from midstream.engine.core.errors import ConfigError, InvariantError, StorageError

PARTITIONED = pa.schema([("p", pa.int64()), ("n", pa.int64())])


@pytest.fixture(params=[KeyedDelta, KeyedIceberg])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> KeyedTable:
    made: KeyedTable = request.param(tmp_path)
    return made


# ---- exactly once -----------------------------------------------------------


def test_rows_are_in_the_table_after_the_commit_and_not_before(there):
    sink = there.appending(SCHEMA)
    before = there.commits()
    committables = written(sink, batch(1, 2, 3)) + written(sink, batch(4, 5), subtask=1)
    assert there.found() == []
    assert len(there.files()) == 2
    committer_of(sink, "job-a").commit(1, committables)
    assert there.found() == [(1,), (2,), (3,), (4,), (5,)]
    assert there.commits() == before + 1, "one commit for all subtasks"


def test_a_second_commit_changes_nothing_also_of_another_driver(there):
    sink = there.appending(SCHEMA)
    before = there.commits()
    committables = written(sink, batch(1, 2))
    committer = committer_of(sink, "job-a")
    for _ in range(3):
        committer.commit(1, committables)
    committer_of(sink, "job-a").commit(1, committables)
    assert there.commits() == before + 1
    for job in ("job-b", "job-c", "job-a"):
        committer_of(sink, job).commit(1, committables)
        assert there.found() == [(1,), (2,)]
    assert there.commits() == before + 2, "that another job has resumed is noted once"


def test_a_job_that_another_has_gone_on_from_commits_nothing_more(there):
    sink = there.appending(SCHEMA)
    zombie = committer_of(sink, "job-a")
    first, second = written(sink, batch(1)), written(sink, batch(2), 2, subtask=1)
    zombie.commit(1, first)
    committer_of(sink, "job-b").commit(1, first)
    with pytest.raises(ConfigError, match="another job has resumed from checkpoint 1 of this one"):
        zombie.commit(2, second)
    assert there.found() == [(1,)]


def test_all_that_a_restored_checkpoint_holds_of_several_is_committed(there):
    sink = there.appending(SCHEMA)
    held = [written(sink, batch(n), n, subtask=n) for n in (1, 2, 3)]
    committer_of(sink, "job-a").commit(1, held[0])
    for job in ("job-b", "job-c"):
        committer = committer_of(sink, job)
        for checkpoint_id, committables in enumerate(held, 1):
            committer.commit(checkpoint_id, committables)
        assert there.found() == [(1,), (2,), (3,)]


def test_what_was_written_for_another_table_is_committed_there(there):
    old = there.appending(PARTITIONED, partition_by=["p"])
    committables = written(old, pa.record_batch({"p": [0, 1], "n": [1, 2]}))
    moved = there.appending(SCHEMA, "elsewhere")
    committer = committer_of(moved, "job-b")
    for _ in range(2):
        moved.check_committables(1, committables)
        committer.commit(1, committables)
    committer.commit(2, written(moved, batch(3), 2, job_id="job-b"))
    assert there.found() == [(0, 1), (1, 2)]
    assert there.found("elsewhere") == [(3,)]
    with pytest.raises(ConfigError, match="another job has resumed from checkpoint 1 of this one"):
        committer_of(old, "job-a").commit(2, written(old, pa.record_batch({"p": [0], "n": [9]}), 2, subtask=2))


# ---- what is left -----------------------------------------------------------


def test_an_aborted_checkpoint_leaves_no_file(there):
    sink = there.appending(SCHEMA)
    committables = written(sink, batch(1))
    for _ in range(2):
        committer_of(sink, "job-a").abort(committables)
    assert there.files() == []
    with pytest.raises(StorageError, match="with 1 rows is missing; only a job may delete it"):
        committer_of(sink, "job-a").commit(1, committables)
    assert there.found() == []


def test_closing_deletes_what_was_not_prepared(there):
    sink, loop = there.appending(SCHEMA, roll_size=1), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(pa.record_batch({"n": pa.array(range(200_000))}))
    loop.run()
    assert len(there.files()) == 1
    writer.write(batch(1))
    writer.close()
    loop.run()
    assert (there.files(), loop.failures) == ([], [])


def test_many_partitions_do_not_keep_many_files_open(there, monkeypatch):
    monkeypatch.setattr(partitioned_files, "HELD_BYTES", 1000)
    sink, loop = there.appending(PARTITIONED, partition_by=["p"]), Loop()
    writer = open_writer(sink, PARTITIONED, loop)
    for turn in range(3):
        writer.write(pa.RecordBatch.from_pylist([{"p": p, "n": turn} for p in range(50)], PARTITIONED))
        loop.run()
    assert loop.failures == []
    committer_of(sink, "job-a").commit(1, prepared(writer, 1))
    assert sorted(there.found()) == [(p, turn) for p in range(50) for turn in range(3)]


# ---- what is refused --------------------------------------------------------


def test_a_table_with_rows_is_refused_unless_they_are_to_be_added_to(there):
    there.fill(pa.table({"n": [0]}))
    with pytest.raises(ConfigError, match="the table is not empty; name another one, resume from a checkpoint"):
        there.appending(SCHEMA)
    there.appending(SCHEMA, restoring=True)
    sink = there.appending(SCHEMA, append=True)
    committer_of(sink, "job-a").commit(1, written(sink, batch(1)))
    assert there.found() == [(0,), (1,)]


def test_what_another_kind_of_sink_has_prepared_is_refused(there):
    kind = there.what.removesuffix("Sink")
    with pytest.raises(StorageError, match=f"not prepared by an? {kind} sink"):
        there.appending(SCHEMA).check_committables(1, [msgspec.msgpack.encode(["id", b"rows"])])


def test_a_sink_that_was_not_validated_is_a_bug(there):
    with pytest.raises(InvariantError, match="was shipped before it was validated"):
        open_writer(there.unchecked(), SCHEMA, Loop())
