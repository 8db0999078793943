"""What single sinks roll back: Delta tables that others write to, Postgres, files that were moved."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.fs
import pytest
from connector_worlds import SCHEMA, batch, written
from deltalake import DeltaTable, write_deltalake
from going_back_world import World, committed, graph_of

from committers import committer_of
from midstream.connectors.delta.delta_files import WrittenFile
from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.connectors.files.file_sink import FileSink
from midstream.connectors.postgres.postgres_sink import PostgresSink
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.sink_api import CommittedOutput

pytestmark = pytest.mark.usefixtures("few_attempts")


def delta_sink(table: Path, *, append: bool = False) -> DeltaSink:
    sink = DeltaSink(table, append=append)
    sink.validate(SCHEMA, restoring=True)
    return sink


def delta_rows(table: Path) -> list[int]:
    return sorted(pl.read_delta(str(table))["n"].to_list())


def delta_of(table: Path, jobs: dict[str, Iterable[int]]) -> DeltaSink:
    """A table to which each job has committed these checkpoints, of one row each: the checkpoint's number."""
    sink = delta_sink(table)
    for job_id, checkpoints in jobs.items():
        committer = committer_of(sink, job_id)
        assert committer is not None
        for checkpoint_id in checkpoints:
            rows = written(sink, batch(checkpoint_id), checkpoint_id, job_id=job_id, attempt=checkpoint_id)
            committer.commit(checkpoint_id, rows)
    return sink


def commit_number(sink: FileSink, job_id: str, number: int) -> None:
    committer_of(sink, job_id).commit(number, written(sink, batch(number), number, job_id=job_id))


def file_rows(out: Path) -> list[int]:
    return sorted(n for file in out.glob("*.parquet") for n in pl.read_parquet(file)["n"].to_list())


def test_a_driver_that_wakes_up_while_it_rolls_back_files_leaves_those_of_its_successor_alone(tmp_path: Path) -> None:
    output = CommittedOutput("out", frozenset("a"))
    for number in (1, 2):
        commit_number(FileSink(tmp_path / "out"), "a", number)
    frozen, successor = FileSink(tmp_path / "out"), FileSink(tmp_path / "out")
    for sink in (frozen, successor):
        sink.check_rollback(output, 1)
    successor.roll_back(output, 1, ())
    commit_number(successor, "c", 3)
    pending = written(successor, batch(4), 4, job_id="c")
    frozen.roll_back(output, 1, ())
    committer_of(successor, "c").commit(4, pending)
    assert file_rows(tmp_path / "out") == [1, 3, 4]


def test_files_of_a_job_of_which_only_the_directory_knows_are_rolled_back(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "out")
    for job_id, number in (("forgotten", 1), ("forgotten", 2), ("a", 3)):
        commit_number(sink, job_id, number)
    output = CommittedOutput("out", frozenset("a"))
    sink.check_rollback(output, 1)
    sink.roll_back(output, 1, ())
    assert file_rows(tmp_path / "out") == [1]


def test_a_newer_file_of_an_unknown_job_is_not_rolled_back_silently(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "out")
    commit_number(sink, "a", 1)
    (file,) = (tmp_path / "out").glob("*.parquet")
    file.rename(file.with_name(f"part-000002-0000-0000-{0:016x}.parquet"))
    with pytest.raises(ConfigError, match="is newer than checkpoint 1, and it is not known which job wrote it"):
        sink.check_rollback(CommittedOutput("out", frozenset("a")), 1)


def test_a_delta_table_rolls_back_what_was_committed_after_a_checkpoint(tmp_path: Path) -> None:
    table = tmp_path / "table"
    sink = delta_of(table, {"a": range(1, 6), "b": (6, 7)})
    output = CommittedOutput("out", frozenset("ab"))
    assert sink.newest_committed(output) == 7
    sink.check_rollback(output, 6)
    sink.roll_back(output, 6, ())
    assert (delta_rows(table), sink.newest_committed(output)) == ([1, 2, 3, 4, 5, 6], 6)
    version = DeltaTable(table).version()
    sink.roll_back(output, 6, ())
    assert DeltaTable(table).version() == version, "once is enough"
    sink.roll_back(output, 2, ())
    assert (delta_rows(table), sink.newest_committed(output)) == ([1, 2], 2)
    committer = committer_of(sink, "c")
    assert committer is not None
    committer.commit(8, written(sink, batch(8), 8, job_id="c"))
    assert delta_rows(table) == [1, 2, 8]
    sink.roll_back(CommittedOutput("out", frozenset("abc")), 0, ())
    assert delta_rows(table) == []


@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 3), (0, 0)])
def test_after_that_a_driver_that_wakes_up_commits_nothing_more(tmp_path: Path, before: int, after: int) -> None:
    """Not even if nothing newer was committed yet, or nothing at all."""
    sink = delta_of(tmp_path / "table", {"a": range(1, before + 1)})
    late = written(sink, batch(4), 4, job_id="a", attempt=9)
    output = CommittedOutput("out", frozenset("a"))
    sink.check_rollback(output, after)
    sink.roll_back(output, after, ())
    committer = committer_of(sink, "a")
    assert committer is not None
    with pytest.raises(ConfigError, match=f"another job has resumed from checkpoint {after} of this one"):
        committer.commit(4, late)
    assert delta_rows(tmp_path / "table") == list(range(1, after + 1))


def test_a_delta_table_that_others_have_written_to_since_is_left_alone(tmp_path: Path) -> None:
    table = tmp_path / "table"
    sink, output = delta_of(table, {"a": range(1, 4)}), CommittedOutput("out", frozenset("a"))
    write_deltalake(table, pa.table({"n": [100]}), mode="append")
    with pytest.raises(ConfigError, match=r"other writers have changed the table since: version 4 is WRITE"):
        sink.check_rollback(output, 2)
    DeltaTable(table).optimize.compact()
    with pytest.raises(ConfigError, match="other writers have changed the table since"):
        sink.roll_back(output, 2, ())
    assert delta_rows(table) == [1, 2, 3, 100]
    assert sink.newest_committed(CommittedOutput("out", frozenset("b"))) == 0
    sink.check_rollback(output, 3)


def test_a_delta_log_that_no_longer_goes_back_so_far_says_so(tmp_path: Path) -> None:
    table = tmp_path / "table"
    sink, output = delta_of(table, {"a": range(1, 4)}), CommittedOutput("out", frozenset("a"))
    DeltaTable(table).create_checkpoint()
    for version in range(3):
        (table / "_delta_log" / f"{version:020d}.json").unlink()
    with pytest.raises(ConfigError, match="log no longer goes back to checkpoint 1: version 2 is no longer in it"):
        sink.check_rollback(output, 1)
    sink.check_rollback(output, 3)  # nothing is newer, so no older version is needed


def test_postgres_says_what_is_committed_and_that_it_cannot_be_rolled_back(database: str) -> None:
    sink = PostgresSink(database, "numbers")
    sink.validate(SCHEMA, restoring=False)
    committer = committer_of(sink, "a")
    assert committer is not None
    for checkpoint_id in (1, 2):
        committer.commit(
            checkpoint_id, written(sink, batch(checkpoint_id), checkpoint_id, job_id="a", attempt=checkpoint_id)
        )
    assert sink.newest_committed(CommittedOutput("out", frozenset("ab"))) == 2
    assert sink.newest_committed(CommittedOutput("out", frozenset("b"))) == 0
    assert sink.newest_committed(CommittedOutput("other", frozenset("a"))) == 0
    with pytest.raises(ConfigError, match="do not show which commit wrote them"):
        sink.check_rollback(CommittedOutput("out", frozenset("a")), 1)


def test_output_that_was_committed_elsewhere_is_newer_too_and_is_not_rolled_back(tmp_path: Path) -> None:
    """The sink has moved since: what newer checkpoints have committed is in the directory of before."""
    world = World(tmp_path, only="out")
    world.files["out"] = FileSink(tmp_path / "out", format="jsonl")
    world.graph = graph_of({**world.files})
    committed(world)
    before = world.rows()
    moved = FileSink(tmp_path / "moved", format="jsonl")
    world.files["out"] = moved
    world.graph = graph_of({"out": moved})
    with pytest.raises(
        ConfigError, match="checkpoint 3 is older than what has been committed: sink 'out' up to checkpoint 5"
    ):
        world.start("3")
    with pytest.raises(
        ConfigError, match=r"of checkpoint 4, were written to .*/out, and the sink now writes to .*/moved"
    ):
        world.start("3", "rollback")
    assert world.rows() == before
    world.start("latest").complete(1)
    assert (world.rows(), world.rows("moved")) == (before, [10])


def test_output_that_was_moved_with_its_directory_is_rolled_back(tmp_path: Path) -> None:
    world = World(tmp_path, only="out")
    committed(world)
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / ".out.midstream").rename(tmp_path / ".moved.midstream")
    moved = FileSink(tmp_path / "moved", format="jsonl", filesystem=world.files["out"].filesystem)
    world.files["out"] = moved
    world.graph = graph_of({"out": moved})
    world.start("3", "rollback").complete(2)
    assert world.rows("moved") == list(range(8))


def test_a_delta_table_that_the_sink_wrote_to_before_is_newer_too(tmp_path: Path) -> None:
    table, output = tmp_path / "table", CommittedOutput("out", frozenset("a"))
    delta_of(table, {"a": range(1, 4)})
    other = delta_of(tmp_path / "other", {})
    place = DeltaSink(table).location
    held = msgspec.msgpack.encode(
        WrittenFile("a", "out", "part-0001-0000-000000-0123456789abcdef.parquet", 1, 1, {}, "{}", place)
    )
    assert other.newest_committed(output) == 0
    newer = CommittedOutput("out", frozenset("a"), ((3, held),))
    assert other.newest_committed(newer) == 3
    with pytest.raises(
        ConfigError, match=r"rows of checkpoint 3 were written to .*/table, and the sink now writes to .*/other"
    ):
        other.check_rollback(newer, 1)
