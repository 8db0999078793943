"""Compaction of small files: no row is lost or doubled by concurrent writers, the death of a driver, or a rollback."""

from __future__ import annotations

import errno
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet
import pytest
from compaction_world import FEW, Driver, before_the_commit, kind_of, live, new_sink, on_disk, partitioned
from connector_worlds import batch, written
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError
from going_back_world import Fate, MortalFiles
from hypothesis import given, settings
from hypothesis import strategies as st
from keyed_tables import users
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitStateUnknownException
from table_worlds import WORLDS, DeltaWorld, IcebergWorld, TableWorld

from committers import committer_of
from effort import examples
from jobs import check_gapless
from machine import limit_s
from midstream import Environment
from midstream.connectors.common import compaction
from midstream.connectors.delta import delta_compaction
from midstream.connectors.files.rolling_files import OpenFile
from midstream.connectors.iceberg import iceberg_compaction, iceberg_sink
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.errors import ConfigError, MidstreamError, StorageError
from midstream.engine.operators.sink_api import CommittedOutput
from midstream.engine.operators.user_metrics import UserMetrics
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

OUTPUT = CommittedOutput("out", frozenset(["job-a"]))


@pytest.fixture(autouse=True)
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "FILES_MIN", FEW)
    monkeypatch.setattr(iceberg_sink, "_PAUSE_S", 0.0)


@pytest.fixture(params=sorted(WORLDS))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> TableWorld:
    return WORLDS[request.param](tmp_path)


# ---- others ------------------------------------------------------------------


def committing(world: TableWorld) -> tuple[Any, str]:
    """What makes the commit."""
    if isinstance(world, IcebergWorld):
        return SqlCatalog, "commit_table"
    return DeltaTable, "create_write_transaction"


@pytest.mark.parametrize("act", ["append", "commit", "delete", "delete_positions", "compact", "add_column", "own"])
def test_what_others_do_at_the_same_time_counts(world: TableWorld, act: str) -> None:
    world.create()
    sink = new_sink(world)
    driver, other = Driver(sink), Driver(sink)
    driver.commit_numbers(1, 2, 3, 4)
    expected, is_done = [1, 2, 3, 4], False

    def happens() -> None:
        nonlocal expected, is_done
        if act == "append":
            world.append(5)
            expected, is_done = [1, 2, 3, 4, 5], True
        elif act == "commit":
            driver.commit_numbers(5)
            expected, is_done = [1, 2, 3, 4, 5], True
        elif act in ("delete", "delete_positions"):
            getattr(world, act)(2)
            expected = [1, 3, 4]
        elif act == "compact":
            world.compact()
        elif act == "add_column":
            world.add_column("late")
        else:
            assert other.compact() is not None

    before_the_commit(driver, happens)
    done = driver.compact()
    assert (done is not None) == is_done
    assert world.numbers() == expected
    assert not set(on_disk(world)) - set(live(world)), "what was written for nothing is deleted"
    driver.commit_numbers(6, 7, 8, 9)
    while driver.compact() is not None:
        pass
    assert world.numbers() == sorted([*expected, 6, 7, 8, 9])


@pytest.mark.parametrize("act", ["delete", "compact", "append"])
def test_a_commit_that_comes_first_at_the_last_moment_wins(
    world: TableWorld, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deltalake itself does not notice that another compaction has removed the same files."""
    driver = Driver(new_sink(world))
    driver.commit_numbers(1, 2, 3, 4)
    owner, name = committing(world)
    real = getattr(owner, name)

    def overtaken(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        world.compact() if act == "compact" else getattr(world, act)(2)
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, overtaken)
    assert driver.compact() is None
    rows = {"delete": [1, 3, 4], "compact": [1, 2, 3, 4], "append": [1, 2, 2, 3, 4]}[act]
    assert world.numbers() == rows
    assert on_disk(world) == []
    driver.commit_numbers(6, 7, 8, 9)
    assert driver.compact() is not None
    assert world.numbers() == sorted([*rows, 6, 7, 8, 9])


@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_compaction_of_which_no_answer_comes_keeps_the_files_that_it_may_have_added(
    world: TableWorld, lands: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`known`: the error is the one of a lost race; of a Delta table it may come although the commit has succeeded."""
    driver = Driver(new_sink(world))
    driver.commit_numbers(1, 2, 3, 4)
    if isinstance(world, IcebergWorld):
        if known:
            pytest.skip("a catalog that answers so has not committed")
        error: Exception = CommitStateUnknownException("lost")
    else:
        error = CommitFailedError("lost") if known else DeltaError("lost")
    owner, name = committing(world)
    real = getattr(owner, name)

    def unanswered(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        if lands:
            real(*arguments, **named)
        elif known:
            world.append(5)
        raise error

    monkeypatch.setattr(owner, name, unanswered)
    if known:
        assert (driver.compact() is not None) == lands
    else:
        with pytest.raises(StorageError, match="lost"):
            driver.compact()
    rows = [1, 2, 3, 4, *([5] if known and not lands else [])]
    assert world.numbers() == rows
    assert (len(live(world)) == 1) == lands
    assert len(on_disk(world)) == (0 if known and not lands else 1)
    driver.commit_numbers(6, 7, 8)
    while driver.compact() is not None:
        pass
    assert world.numbers() == [*rows, 6, 7, 8]
    if isinstance(world, IcebergWorld):
        history = {path.rpartition("/")[2] for path in to_paths(world)}
        assert set(on_disk(world)) <= history, "a try that has not succeeded has left nothing"


def test_what_a_table_got_of_which_no_answer_came_stays_when_another_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = IcebergWorld(tmp_path)
    driver = Driver(new_sink(world))
    driver.commit_numbers(1, 2, 3, 4)
    real = SqlCatalog.commit_table

    def unanswered(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(SqlCatalog, "commit_table", real)
        real(*arguments, **named)
        raise CommitStateUnknownException("lost")

    monkeypatch.setattr(SqlCatalog, "commit_table", unanswered)
    with pytest.raises(StorageError, match="lost"):
        driver.compact()
    world.catalog.rename_table("lake.t", "lake.before")
    world.create()
    world.append(100)
    assert driver.compact() is None
    assert sorted(to_list(world.catalog.load_table("lake.before").scan().to_arrow()["n"])) == [1, 2, 3, 4]
    assert world.numbers() == [100]


def to_paths(world: IcebergWorld) -> list[str]:
    table = world.table
    return [
        entry.data_file.file_path
        for snapshot in table.metadata.snapshots
        for manifest in snapshot.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
    ]


def test_compactions_of_two_drivers_and_others_at_once_lose_and_double_nothing(world: TableWorld) -> None:
    sink = new_sink(world)
    Driver(sink).commit_numbers(*range(12))
    drivers = [Driver(sink, job, first=13) for job in ("job-b", "job-c")]
    start = threading.Barrier(3)

    def compact(driver: Driver) -> None:
        start.wait(limit_s(30))
        for _ in range(5):
            driver.compact()

    with ThreadPoolExecutor(2) as pool:
        compactions = [pool.submit(compact, driver) for driver in drivers]
        start.wait(limit_s(30))
        writer = Driver(sink, "job-d", first=20)
        writer.commit_numbers(100, 101)
        for compaction_of_driver in compactions:
            compaction_of_driver.result(limit_s(60))
    assert world.numbers() == [*range(12), 100, 101]
    assert len(live(world)) < 14


@pytest.mark.systems
def test_the_status_of_a_job_counts_compacted_files(world: TableWorld, tmp_path: Path) -> None:
    """And the page and the metrics show all counters of the status."""
    env = Environment("compacting", parallelism=2, checkpoint_dir=tmp_path / "chk", checkpoint_interval="100 ms")
    numbers = env.generate(lambda i: {"n": i}, rows_per_s=5000).uid("numbers")
    numbers.sink(new_sink(world)).uid("out")
    job = env.start(slots=ProcessSlots())

    def compacted() -> float:
        operators = [op for vertex in job.status().vertices for op in vertex.operators]
        return next((op.counters.get("compacted_files", 0) for op in operators if op.uid == "out"), 0)

    until("a compaction", compacted)
    job.stop(drain=True, timeout_s=limit_s(60))
    assert compacted() >= FEW
    check_gapless(world.numbers())


# ---- commits do not wait -----------------------------------------------------


def test_a_checkpoint_is_committed_while_files_are_written(world: TableWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(new_sink(world))
    driver.commit_numbers(1, 2, 3, 4)
    reading, may_read = threading.Event(), threading.Event()
    iceberg, delta = iceberg_compaction._CompactedDataFiles, delta_compaction._CompactedFiles
    written_files: Any = iceberg if isinstance(world, IcebergWorld) else delta
    real = written_files.__init__

    def slowly(*arguments: Any, **named: Any) -> None:
        reading.set()
        assert may_read.wait(limit_s(60))
        real(*arguments, **named)

    monkeypatch.setattr(written_files, "__init__", slowly)
    driver.compactor._commits = FEW
    driver.compactor.committed()
    assert reading.wait(limit_s(60))
    driver.commit_numbers(5, 6)
    assert world.numbers() == [1, 2, 3, 4, 5, 6]
    assert len(live(world)) == 6
    may_read.set()
    driver.compactor.wait()
    assert world.numbers() == [1, 2, 3, 4, 5, 6]
    assert len(live(world)) == 3


def test_the_end_of_a_job_gives_up_a_compaction(world: TableWorld) -> None:
    driver = Driver(new_sink(world))
    driver.commit_numbers(1, 2, 3, 4)
    before_the_commit(driver, driver.compactor._stopped.set)
    driver.compactor._commits = FEW
    driver.compactor.committed()
    driver.committer.close()
    assert len(live(world)) == 4
    assert on_disk(world) == []


def test_a_compaction_that_fails_is_logged_once_and_tried_less_and_less_often_and_fails_no_job(
    world: TableWorld, caplog: pytest.LogCaptureFixture
) -> None:
    sink, metrics = new_sink(world), UserMetrics()
    committer = committer_of(sink, "job-a", metrics=metrics)
    committer._compactor._commits = -2
    for n in range(1, 5):
        committer.commit(n, written(sink, batch(n), n, attempt=n))
    kept = world.files()[0].read_bytes()
    world.files()[0].write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        for n in range(5, 15):
            committer.commit(n, written(sink, batch(n), n, attempt=n))
            committer._compactor.wait()
    assert [record.message.count("small files could not be compacted") for record in caplog.records] == [1]
    assert metrics.counters == {"compacted_files": 0, "failed_compactions": 2}, "after 6 and 8 more commits"
    assert len(live(world)) == 14
    assert on_disk(world) == []
    next(path for path in world.files() if path.read_bytes() == b"damaged").write_bytes(kept)
    assert world.numbers() == list(range(1, 15))
    for n in range(15, 31):
        assert len(live(world)) == n - 1
        committer.commit(n, written(sink, batch(n), n, attempt=n))
        committer._compactor.wait()
    assert len(live(world)) == 1
    for n in range(31, 31 + FEW):
        committer.commit(n, written(sink, batch(n), n, attempt=n))
        committer._compactor.wait()
    assert metrics.counters == {"compacted_files": 30 + 1 + FEW, "failed_compactions": 2}


# ---- killed ------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(WORLDS))
@pytest.mark.parametrize("keyed", [False, True])
def test_a_driver_that_dies_at_any_step_leaves_every_row_once(kind: str, keyed: bool, tmp_path: Path) -> None:
    step, is_done = 0, False
    while not is_done:
        step += 1
        world = WORLDS[kind](tmp_path / str(step))
        world.path.mkdir()
        fate = Fate()
        files = pyarrow.fs.PyFileSystem(Files(fate))  # type: ignore[abstract]  # it has what a sink needs
        columns, options = kind_of(keyed)
        sink = new_sink(world, columns, filesystem=files, **options)
        driver = Driver(sink)
        for n in range(1, FEW + 1):
            driver.commit(users((n, "x", "insert")) if keyed else batch(n))
        with pytest.MonkeyPatch.context() as patch:
            mortal_commits(world, fate, patch)
            mortal_writes(fate, patch)
            fate.left = step
            with suppress(MidstreamError, OSError):  # with which it dies
                is_done = driver.compact() is not None
        fate.left = None
        column = "id" if keyed else "n"
        assert column_of(world, column) == list(range(1, FEW + 1))
        later = Driver(new_sink(world, columns, restoring=True, **options), "job-b", first=FEW + 1)
        later.commit(users((9, "x", "insert")) if keyed else batch(9))
        later.compact()
        assert column_of(world, column) == [*range(1, FEW + 1), 9]
        assert step < 100
    assert step > 5


class Files(MortalFiles):
    def open_input_file(self, path: str) -> pa.NativeFile:
        self.fate.look()
        return self.base.open_input_file(path)


Files.__abstractmethods__ = frozenset()


def mortal_writes(fate: Fate, patch: pytest.MonkeyPatch) -> None:
    write, end = OpenFile.write, OpenFile.end
    patch.setattr(OpenFile, "write", lambda self, rows: fate.change(lambda: write(self, rows)))
    patch.setattr(OpenFile, "end", lambda self: fate.change(lambda: end(self)))


def mortal_commits(world: TableWorld, fate: Fate, patch: pytest.MonkeyPatch) -> None:
    """The process may die before it commits, or when it has and has not learned that."""
    owner, name = committing(world)
    real = getattr(owner, name)

    def commit(*arguments: Any, **named: Any) -> Any:
        done = fate.change(lambda: real(*arguments, **named))
        fate.change(lambda: None)
        return done

    patch.setattr(owner, name, commit)


def column_of(world: TableWorld, name: str) -> list[int]:
    if isinstance(world, IcebergWorld):
        return sorted(to_list(world.table.scan().to_arrow()[name]))
    read = sorted(pl.read_delta(str(world.path / "t"))[name].to_list())
    assert sorted(to_list(DeltaTable(world.path / "t").to_pyarrow_table()[name])) == read
    return read


# ---- going back --------------------------------------------------------------


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("after", [0, 3, 5, 6, 8])
def test_a_table_rolls_back_past_compactions(world: TableWorld, after: int, keyed: bool) -> None:
    columns, options = kind_of(keyed)
    sink = new_sink(world, columns, **options)
    driver = Driver(sink)
    for n in range(1, 9):
        driver.commit(users((n, "x", "insert")) if keyed else batch(n))
        if n in (5, 7):
            assert (driver.compact() is not None) == (n == 5)
    column = "id" if keyed else "n"
    sink.check_rollback(OUTPUT, after)
    sink.roll_back(OUTPUT, after, ())
    assert column_of(world, column) == list(range(1, after + 1))
    assert sink.newest_committed(OUTPUT) == after
    version = world.version()
    sink.roll_back(OUTPUT, after, ())
    assert world.version() == version, "once is enough"
    with pytest.raises(ConfigError, match=f"another job has resumed from checkpoint {after} of this one"):
        driver.commit(users((100, "x", "insert")) if keyed else batch(100))
    later = Driver(sink, "job-b", first=9)
    for n in range(20, 28):
        later.commit(users((n, "x", "insert")) if keyed else batch(n))
    while later.compact() is not None:
        pass
    assert column_of(world, column) == [*range(1, after + 1), *range(20, 28)]
    both = CommittedOutput("out", frozenset(["job-a", "job-b"]))
    sink.check_rollback(both, 10)
    sink.roll_back(both, 10, ())
    assert column_of(world, column) == [*range(1, after + 1), 20, 21]


def test_a_compaction_that_a_rollback_overtakes_brings_no_row_back(world: TableWorld) -> None:
    sink = new_sink(world)
    driver = Driver(sink)
    driver.commit_numbers(1, 2, 3, 4)
    before_the_commit(driver, lambda: sink.roll_back(OUTPUT, 2, ()))
    assert driver.compact() is None
    assert world.numbers() == [1, 2]
    assert on_disk(world) == []


def test_files_of_others_that_were_compacted_with_newer_ones_are_not_rolled_back(world: TableWorld) -> None:
    sink = new_sink(world)
    driver = Driver(sink)
    driver.commit_numbers(1, 2)
    world.append(100)
    driver.commit_numbers(3)
    if isinstance(world, IcebergWorld):
        sink.check_rollback(OUTPUT, 1)  # as long as they are as they were written
    assert driver.compact() is not None
    with pytest.raises(ConfigError, match="other writers have changed the table since"):
        sink.check_rollback(OUTPUT, 1)
    with pytest.raises(ConfigError, match="other writers have changed the table since"):
        sink.roll_back(OUTPUT, 1, ())
    assert world.numbers() == [1, 2, 3, 100]
    sink.check_rollback(OUTPUT, 2)
    sink.roll_back(OUTPUT, 2, ())
    assert world.numbers() == [1, 2, 100]


def test_compaction_by_others_is_rolled_back_as_well(world: TableWorld) -> None:
    sink = new_sink(world, auto_compact=False)
    committer = committer_of(sink, "job-a")
    for n in range(1, 5):
        committer.commit(n, written(sink, batch(n), n, attempt=n))
        if n == 3:
            world.compact()
    world.compact()
    sink.check_rollback(OUTPUT, 2)
    sink.roll_back(OUTPUT, 2, ())
    assert world.numbers() == [1, 2]


def test_a_delta_table_whose_compacted_files_are_deleted_is_not_rolled_back(tmp_path: Path) -> None:
    world = DeltaWorld(tmp_path)
    sink = new_sink(world)
    driver = Driver(sink)
    driver.commit_numbers(1, 2, 3, 4)
    assert driver.compact() is not None
    DeltaTable(tmp_path / "t").vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(ConfigError, match=r"can no longer be restored: .* was deleted, for example by VACUUM"):
        sink.check_rollback(OUTPUT, 2)
    assert world.numbers() == [1, 2, 3, 4]


# ---- anything, in any order --------------------------------------------------

STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 7)),
    st.tuples(st.just("put"), st.integers(0, 7)),
    st.tuples(st.just("delete"), st.integers(0, 7)),
    st.tuples(st.sampled_from(["compact", "compact during", "others compact", "new driver"]), st.just(0)),
    st.tuples(st.just("roll back"), st.integers(0, 3)),
)


@pytest.mark.parametrize("kind", sorted(WORLDS))
@pytest.mark.parametrize("keyed", [False, True])
@settings(max_examples=examples(30), deadline=None)
@given(steps=st.lists(STEPS, min_size=6, max_size=18))
def test_rows_are_as_without_compaction(kind: str, keyed: bool, steps: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "FILES_MIN", 3)
        world = WORLDS[kind](Path(place))
        columns, options = kind_of(keyed)
        sink = new_sink(world, columns, **options)
        jobs, driver = ["job-0"], Driver(sink, "job-0")
        states: dict[int, tuple[int, ...]] = {0: ()}

        def commit(row: int, operation: str) -> None:
            now = states[max(states)]
            checkpoint = driver.commit(users((row, "x", operation)) if keyed else batch(row))
            if not keyed:
                states[checkpoint] = (*now, row)
            elif operation == "delete":
                states[checkpoint] = tuple(each for each in now if each != row)
            else:
                states[checkpoint] = (*now, row) if row not in now else now

        for step, number in steps:
            if step in ("put", "delete"):
                commit(number, "insert" if step == "put" else "delete")
            elif step == "compact":
                driver.compact()
            elif step == "compact during":
                before_the_commit(driver, lambda: commit(3, "insert"))
                driver.compact()
                driver.compactor.__dict__.pop("_commit", None)
            elif step == "others compact":
                world.compact()
            elif step == "new driver":
                jobs.append(f"job-{len(jobs)}")
                driver = Driver(sink, jobs[-1], first=max(states) + 1)
            else:
                after = max(0, max(states) - number)
                output = CommittedOutput("out", frozenset(jobs))
                sink.check_rollback(output, after)
                sink.roll_back(output, after, ())
                states = {checkpoint: rows for checkpoint, rows in states.items() if checkpoint <= after}
                jobs.append(f"job-{len(jobs)}")
                driver = Driver(sink, jobs[-1], first=after + 1)
            assert column_of(world, "id" if keyed else "n") == sorted(states[max(states)])


@pytest.mark.parametrize("moment", ["write", "end"])
def test_a_full_disk_leaves_the_table_as_it_was_and_no_files(
    world: TableWorld, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, rows = partitioned(world)
    before, real, calls = world.version(), getattr(OpenFile, moment), count()

    def full(*arguments: Any) -> Any:
        if next(calls):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(OpenFile, moment, full)
        with pytest.raises(StorageError, match="No space left on device"):
            driver.compact()
    assert world.version() == before
    assert on_disk(world) == []
    assert driver.compact() is not None
    assert rows() == [(n, p) for n in range(FEW) for p in range(3)]


def test_a_file_that_an_iceberg_table_has_twice_stays_and_keeps_no_other_from_being_compacted(tmp_path: Path) -> None:
    world = IcebergWorld(tmp_path)
    world.create()
    pl.DataFrame({"n": [1]}).write_parquet(tmp_path / "twice.parquet")
    for _ in range(FEW + 2):
        world.table.add_files([f"file://{tmp_path}/twice.parquet"], check_duplicate_files=False)
    driver = Driver(new_sink(world, append=True))
    driver.commit_numbers(*range(2, FEW + 2))
    assert driver.compact() is not None
    assert world.numbers() == (FEW + 2) * [1] + list(range(2, FEW + 2))
    assert len(live(world)) == FEW + 2 + 1


def test_an_append_only_delta_table_is_compacted_since_no_row_changes(tmp_path: Path) -> None:
    world = DeltaWorld(tmp_path)
    DeltaTable.create(tmp_path / "t", pa.schema([("n", pa.int64())]), configuration={"delta.appendOnly": "true"})
    driver = Driver(new_sink(world))
    driver.commit_numbers(1, 2, 3, 4)
    assert driver.compact() is not None
    assert len(live(world)) == 1
    assert world.numbers() == [1, 2, 3, 4]
    assert world.table.metadata().configuration == {"delta.appendOnly": "true"}
