"""The file sink: what a reader sees at each step, and what is left when a step is missing or comes twice."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.fs
import pytest
from connector_worlds import SCHEMA, Loop, batch, open_writer, prepared
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from committers import committer_of
from effort import examples
from midstream.connectors.files.file_sink import FileSink, PendingFile
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from permissions import unprivileged


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def visible(out: Path) -> list[int]:
    files = sorted(out.glob("**/*.parquet")) if out.exists() else []
    return sorted(n for file in files for n in pl.read_parquet(file)["n"].to_list())


def pending(out: Path) -> list[str]:
    hidden = out.parent / f".{out.name}.midstream"
    return sorted(str(p.relative_to(hidden)) for p in hidden.rglob("*") if p.is_file() and p.name != "committed")


def test_rows_are_visible_after_the_commit_and_not_before(out):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1, 2, 3))
    loop.run()
    assert not out.exists()
    committables = prepared(writer, 1)
    assert not out.exists()
    assert len(pending(out)) == 1
    committer_of(sink, "job-a").commit(1, committables)
    assert visible(out) == [1, 2, 3]
    assert pending(out) == []
    assert pl.read_parquet(out)["n"].to_list() == [1, 2, 3], "the directory as a whole is readable"


def test_polars_reads_the_directory_while_files_are_pending(out):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    committer = committer_of(sink, "job-a")
    writer.write(batch(1))
    committer.commit(1, prepared(writer, 1))
    writer.write(batch(2))
    assert prepared(writer, 2)
    assert pl.read_parquet(out)["n"].to_list() == [1]


def test_committing_twice_changes_nothing(out):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1, 2))
    committables = prepared(writer, 1)
    committer_of(sink, "job-a").commit(1, committables)
    committer_of(sink, "job-b").commit(1, committables)
    assert visible(out) == [1, 2]


def test_a_commit_that_stopped_half_way_is_completed_by_the_next(out):
    sink, loop = FileSink(out), Loop()
    committables = []
    for subtask in range(3):
        writer = open_writer(sink, SCHEMA, loop, subtask=subtask)
        writer.write(batch(subtask))
        committables += prepared(writer, 4)
    committer_of(sink, "job-a").commit(4, committables[:2])
    assert visible(out) == [0, 1]
    committer_of(sink, "job-b").commit(4, committables)
    assert visible(out) == [0, 1, 2]


def test_a_committed_file_that_a_reader_has_taken_away_stays_away(out):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1))
    committables = prepared(writer, 1)
    committer_of(sink, "job-a").commit(1, committables)
    for file in out.iterdir():
        file.unlink()
    committer_of(sink, "job-b").commit(1, committables)
    assert visible(out) == []


def test_a_pending_file_that_is_gone_is_an_error_and_no_silent_loss(out):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1, 2))
    committables = prepared(writer, 3)
    for name in pending(out):
        (out.parent / ".out.midstream" / name).unlink()
    with pytest.raises(
        StorageError, match=r"the 2 rows in it were to be committed with checkpoint 3, and it is missing"
    ):
        committer_of(sink, "job-a").commit(3, committables)


def test_an_aborted_checkpoint_leaves_no_file(out):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1))
    committables = prepared(writer, 1)
    committer = committer_of(sink, "job-a")
    committer.abort(committables)
    committer.abort(committables)
    assert pending(out) == []
    assert visible(out) == []


def test_closing_deletes_what_was_not_prepared(out):
    sink, loop = FileSink(out, roll_size=1), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(pa.record_batch({"n": pa.array(range(200_000))}))
    loop.run()
    assert len(pending(out)) == 1
    writer.write(batch(1))
    writer.close()
    loop.run()
    assert pending(out) == []
    assert loop.failures == []


def test_pending_files_of_a_failed_attempt_are_deleted_once_the_next_one_commits(out):
    sink, loop = FileSink(out), Loop()
    committer = committer_of(sink, "job-a")
    for attempt in (0, 1):
        writer = open_writer(sink, SCHEMA, loop, attempt=attempt)
        writer.write(batch(attempt))
        assert prepared(writer, 1)
    assert len(pending(out)) == 2
    writer = open_writer(sink, SCHEMA, loop, attempt=2)
    writer.write(batch(2))
    committer.commit(2, prepared(writer, 2))
    assert pending(out) == []
    assert visible(out) == [2]


def test_a_restored_job_first_commits_the_checkpoint_then_deletes_the_rest_of_the_killed_one(out):
    sink, loop = FileSink(out), Loop()
    killed = open_writer(sink, SCHEMA, loop, job_id="job-a")
    killed.write(batch(1))
    of_checkpoint = prepared(killed, 1)
    killed.write(batch(99))
    assert prepared(killed, 2)
    restored = committer_of(sink, "job-b")
    restored.commit(1, of_checkpoint)
    assert visible(out) == [1]
    assert len(pending(out)) == 1
    writer = open_writer(sink, SCHEMA, loop, job_id="job-b")
    writer.write(batch(2))
    restored.commit(2, prepared(writer, 2))
    assert visible(out) == [1, 2]
    assert pending(out) == []


def test_a_driver_that_wakes_up_in_its_commit_leaves_the_pending_files_of_its_successor_alone(out):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop, job_id="job-a")
    writer.write(batch(1))
    of_checkpoint = prepared(writer, 1)
    frozen, successor = committer_of(sink, "job-a"), committer_of(sink, "job-b")
    successor.commit(1, of_checkpoint)
    writer = open_writer(sink, SCHEMA, loop, job_id="job-b")
    writer.write(batch(2))
    later = prepared(writer, 2)
    frozen.commit(1, of_checkpoint)
    successor.commit(2, later)
    assert visible(out) == [1, 2]


def test_where_adding_is_allowed_the_pending_files_of_other_jobs_are_left_alone(out):
    sink, loop = FileSink(out, append=True), Loop()
    other = open_writer(sink, SCHEMA, loop, job_id="job-other")
    other.write(batch(7))
    theirs = prepared(other, 1)
    writer = open_writer(sink, SCHEMA, loop, job_id="job-a")
    writer.write(batch(1))
    committer_of(sink, "job-a").commit(1, prepared(writer, 1))
    committer_of(sink, "job-other").commit(1, theirs)
    assert visible(out) == [1, 7]


def test_no_two_attempts_subtasks_jobs_or_sinks_ever_write_the_same_file(out):
    sink, loop = FileSink(out, append=True), Loop()
    names: list[str] = []
    for job_id in ("job-a", "job-b"):
        for uid in ("out", "out:2"):
            for attempt in (0, 1):
                for subtask in (0, 1):
                    writer = open_writer(sink, SCHEMA, loop, job_id=job_id, uid=uid, attempt=attempt, subtask=subtask)
                    for checkpoint_id in (1, 2):
                        writer.write(batch(checkpoint_id))
                        committer_of(sink, job_id).commit(checkpoint_id, prepared(writer, checkpoint_id))
                        names = sorted(p.name for p in out.iterdir())
    assert len(names) == 2 * 2 * 2 * 2 * 2
    assert len(visible(out)) == len(names)


def test_large_output_rolls_into_several_files(out):
    sink, loop = FileSink(out, roll_size="100 KiB"), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    for start in range(0, 600_000, 50_000):
        writer.write(pa.record_batch({"n": pa.array(range(start, start + 50_000))}))
        loop.run()
    committer_of(sink, "job-a").commit(1, prepared(writer, 1))
    assert len(list(out.iterdir())) > 1
    assert visible(out) == list(range(600_000))


def test_the_writer_holds_the_task_back_when_the_disk_is_slow_and_wakes_it_again(out):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    woken: list[bool] = []
    writer.on_ready(lambda: woken.append(writer.ready()))
    big = pa.record_batch({"n": pa.array(range(1_000_000))})
    written = 0
    while writer.ready():
        writer.write(big)
        written += 1
    assert 1 < written < 10
    loop.run()
    assert woken == [True]
    committer_of(sink, "job-a").commit(1, prepared(writer, 1))
    assert len(visible(out)) == written * 1_000_000


def test_a_writer_that_was_not_ready_is_ready_after_a_checkpoint(out):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    woken: list[bool] = []
    writer.on_ready(lambda: woken.append(writer.ready()))
    while writer.ready():
        writer.write(pa.record_batch({"n": pa.array(range(1_000_000))}))
    loop.work.clear()
    assert writer.prepare(1) is not None
    loop.run()
    assert woken == [True]


def test_an_error_while_writing_fails_the_task(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    sink, loop = FileSink(blocked / "out"), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(pa.record_batch({"n": pa.array(range(200_000))}))
    loop.run()
    (failure,) = loop.failures
    assert isinstance(failure, StorageError)
    assert "operator 'sink out': cannot write below" in str(failure)
    with pytest.raises(StorageError):
        prepared(writer, 1)


def test_json_lines_are_one_object_a_row(out):
    schema = schema_of([("at", pa.timestamp("us")), ("who", pa.large_string()), ("x", pa.float64())])
    sink, loop = FileSink(out, format="jsonl"), Loop()
    writer = open_writer(sink, schema, loop)
    at = datetime(2013, 1, 1, 5, 30)
    writer.write(
        pa.RecordBatch.from_pylist([{"at": at, "who": 'a"\n', "x": 1.5}, {"at": None, "who": None, "x": None}], schema)
    )
    committer_of(sink, "job-a").commit(1, prepared(writer, 1))
    (file,) = out.iterdir()
    assert file.suffix == ".jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [{"at": "2013-01-01 05:30:00", "who": 'a"\n', "x": 1.5}, {"at": None, "who": None, "x": None}]


def test_a_sink_travels_to_the_slots_by_pickle(out):
    sink, loop = pickle.loads(pickle.dumps(FileSink(out))), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1))
    committer_of(sink, "job-a").commit(1, prepared(writer, 1))
    assert visible(out) == [1]


# ---- before anything runs ----


def test_a_directory_with_files_in_it_is_refused_unless_restoring_or_adding(out):
    out.mkdir()
    FileSink(out).validate(SCHEMA, restoring=False)
    (out / "old.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is not empty \(it has old.parquet\).*append=True"):
        FileSink(out).validate(SCHEMA, restoring=False)
    FileSink(out).validate(SCHEMA, restoring=True)
    FileSink(out, append=True).validate(SCHEMA, restoring=False)
    assert [p.name for p in out.iterdir()] == ["old.parquet"]


def test_a_job_without_rows_leaves_an_empty_directory(out):
    FileSink(out).validate(SCHEMA, restoring=False)
    assert list(out.iterdir()) == []
    FileSink(out).validate(SCHEMA, restoring=False)


@pytest.mark.parametrize("closed", [".", "out"])
def test_a_directory_that_cannot_be_written_beside_or_into_is_refused_before_anything_runs(open_path, closed):
    out = open_path / "out"
    out.mkdir()
    for path in (open_path, out):
        path.chmod(0o777)
    (open_path / closed).chmod(0o555)
    with (
        unprivileged(),
        pytest.raises(
            StorageError, match=r"FileSink: cannot write to .*/out: files are prepared in .*/\.out\.midstream .*denied"
        ),
    ):
        FileSink(out).validate(SCHEMA, restoring=False)


def test_directories_between_which_no_file_can_be_moved_are_refused_before_anything_runs(out, monkeypatch):
    def refused(source: str, target: str) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source)

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(StorageError, match=r"must be writable and on one filesystem: .*Invalid cross-device link"):
        FileSink(out).validate(SCHEMA, restoring=False)
    assert list((out.parent / ".out.midstream").iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_a_directory_where_nobody_may_make_one_is_refused_to_root_too():
    with pytest.raises(StorageError, match="cannot write to /proc/nowhere/out"):
        FileSink("/proc/nowhere/out").validate(SCHEMA, restoring=False)


# ---- a sink that writes elsewhere now ----


def test_what_was_written_for_another_directory_is_committed_there(out, tmp_path):
    old, loop = FileSink(out), Loop()
    writer = open_writer(old, SCHEMA, loop)
    writer.write(batch(1))
    committables = prepared(writer, 1)
    writer.write(batch(99))
    assert prepared(writer, 2), "of no checkpoint that completed"
    moved = FileSink(tmp_path / "elsewhere", format="jsonl")
    moved.check_committables(1, committables)
    committer = committer_of(moved, "job-b")
    for _ in range(2):
        committer.commit(1, committables)
    moved.check_committables(1, committables)
    assert visible(out) == [1]
    assert len(pending(out)) == 1
    writer = open_writer(moved, SCHEMA, loop, job_id="job-b")
    writer.write(batch(2))
    committer.commit(2, prepared(writer, 2))
    assert pending(out) == [], "what was left is deleted with the first commit of the job's own"
    assert visible(out) == [1]
    assert [p.read_text() for p in (tmp_path / "elsewhere").iterdir()] == ['{"n":2}\n']


def test_a_directory_may_be_moved_with_all_that_waits_for_it(out, tmp_path):
    sink, loop = FileSink(out), Loop()
    committables = []
    for subtask in range(2):
        writer = open_writer(sink, SCHEMA, loop, subtask=subtask)
        writer.write(batch(subtask))
        committables += prepared(writer, 1)
    committer_of(sink, "job-a").commit(1, committables[:1])
    out.rename(tmp_path / "elsewhere")
    moved = FileSink(tmp_path / "elsewhere")
    (tmp_path / ".out.midstream").rename(tmp_path / ".elsewhere.midstream")
    moved.check_committables(1, committables)
    committer_of(moved, "job-b").commit(1, committables)
    assert visible(tmp_path / "elsewhere") == [0, 1]
    assert not out.exists()


def test_what_is_neither_pending_nor_committed_is_refused_before_anything_runs(out, tmp_path):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1, 2))
    committables = prepared(writer, 3)
    shutil.rmtree(tmp_path / ".out.midstream")
    with pytest.raises(StorageError, match=r"\.out\.midstream/.*: the 2 rows in it .* checkpoint 3, and it is missing"):
        FileSink(tmp_path / "elsewhere").check_committables(3, committables)


def test_what_is_on_another_filesystem_is_refused_before_anything_runs(out, tmp_path):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1))
    committables = prepared(writer, 3)
    elsewhere = FileSink(tmp_path / "elsewhere", filesystem=pyarrow.fs.PyFileSystem(CopyingFiles()))  # type: ignore[abstract]  # it has what is called
    with pytest.raises(
        ConfigError, match=r"1 rows .* checkpoint 3 to local:/.*/out, and the sink now writes to py::copying:/"
    ):
        elsewhere.check_committables(3, committables)


@pytest.mark.parametrize(
    "changes",
    [
        {"pending": "../victim", "name": "../moved"},
        {"pending": "/etc/passwd"},
        {"pending": "out-00000000/job-a/0-0-0/.."},
        {"pending": "out-00000000/job-b/0-0-0"},
        {"name": "../part-000001-0000-0000-0123456789abcdef.parquet"},
        {"name": "/tmp/part-000001-0000-0000-0123456789abcdef.parquet"},
        {"name": "s3://bucket/part-000001-0000-0000-0123456789abcdef.parquet"},
        {"name": "notes.txt"},
        {"place": "local:/tmp/../etc"},
        {"place": "local:etc"},
        {"place": "local:/"},
    ],
)
def test_a_checkpoint_cannot_have_any_other_file_moved_or_deleted(out, changes):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1))
    (committable,) = prepared(writer, 1)
    (out.parent / "victim").write_text("precious")
    before = sorted(out.parent.rglob("*"))
    crafted = msgspec.structs.replace(msgspec.msgpack.decode(committable, type=PendingFile), **changes)
    committer = committer_of(sink, "job-b")
    for act in (sink.check_committables, committer.commit, lambda _, what: committer.abort(what)):
        with pytest.raises(StorageError, match=r"is corrupt or forged"):
            act(1, [msgspec.msgpack.encode(crafted)])
    assert sorted(out.parent.rglob("*")) == before


def test_a_symbolic_link_does_not_lead_out_of_the_sinks_directories(out, tmp_path):
    sink, loop = FileSink(out), Loop()
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1))
    committables = prepared(writer, 1)
    (folder,) = (tmp_path / ".out.midstream").iterdir()
    (folder / "job-a").rename(tmp_path / "outside")
    (folder / "job-a").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match=r"leads out of .*\.out\.midstream through a symbolic link"):
        committer_of(sink, "job-b").commit(1, committables)
    assert len(list((tmp_path / "outside").iterdir())) == 1


def test_what_another_kind_of_sink_has_prepared_is_refused(out):
    with pytest.raises(StorageError, match="what the checkpoint has to commit was not prepared by a file sink"):
        FileSink(out).check_committables(1, [msgspec.msgpack.encode(["id", b"rows"])])


def test_bad_settings_and_targets_are_named(tmp_path):
    with pytest.raises(ConfigError, match="format 'xml' is not one of parquet, jsonl"):
        FileSink(tmp_path / "out", format="xml")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ConfigError, match="roll_size: 0 bytes"):
        FileSink(tmp_path / "out", roll_size=0)
    with pytest.raises(ConfigError, match="is a root"):
        FileSink("/")
    with pytest.raises(ConfigError, match="cannot use 'nosuch://x/y'"):
        FileSink("nosuch://x/y")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; give a directory"):
        FileSink(tmp_path / "file").validate(SCHEMA, restoring=False)
    with pytest.raises(StorageError, match=r"cannot write to .*/file/out: .*Not a directory"):
        FileSink(tmp_path / "file" / "out").validate(SCHEMA, restoring=False)


def test_columns_that_the_format_cannot_hold_are_named(out):
    with pytest.raises(SchemaError, match=r"column 'raw' is large_binary, and JSON has no form for large_binary"):
        FileSink(out, format="jsonl").validate(pa.schema([("raw", pa.large_binary())]), restoring=False)
    with pytest.raises(SchemaError, match=r"column 'm' is month_day_nano_interval, which Parquet cannot hold"):
        FileSink(out).validate(pa.schema([("m", pa.month_day_nano_interval())]), restoring=False)
    with pytest.raises(
        SchemaError, match=r"column 'd' is decimal128\(5, -2\), which Parquet cannot hold: .*; cast it first"
    ):
        FileSink(out).validate(pa.schema([("d", pa.decimal128(5, -2))]), restoring=False)
    with pytest.raises(SchemaError, match="no columns"):
        FileSink(out).validate(pa.schema([]), restoring=False)


# ---- stores without a rename ----


class CopyingFiles(pyarrow.fs.FileSystemHandler):
    """Like an object store: a move is a copy and a delete; the process may die in between."""

    def __init__(self) -> None:
        self.base = pyarrow.fs.LocalFileSystem()
        self.dies_between = False

    def get_type_name(self) -> str:
        return "copying"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[pyarrow.fs.FileInfo]:  # type: ignore[override]  # pyarrow gives it lists
        return self.base.get_file_info(paths)

    def get_file_info_selector(self, selector: pyarrow.fs.FileSelector) -> list[pyarrow.fs.FileInfo]:
        return self.base.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self.base.create_dir(path, recursive=recursive)

    def delete_file(self, path: str) -> None:
        self.base.delete_file(path)

    def copy_file(self, src: str, dest: str) -> None:
        self.base.copy_file(src, dest)

    def move(self, src: str, dest: str) -> None:
        self.base.copy_file(src, dest)
        if self.dies_between:
            raise OSError("killed")
        self.base.delete_file(src)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.base.open_input_stream(path)

    def open_output_stream(self, path: str, metadata: object) -> pa.NativeFile:
        return self.base.open_output_stream(path)


# what no sink and no source needs
CopyingFiles.__abstractmethods__ = frozenset()


def test_a_store_that_copies_instead_of_renaming_dies_between_copy_and_delete(tmp_path):
    handler = CopyingFiles()  # type: ignore[abstract]  # it has what is called
    out = tmp_path / "out"
    sink, loop = FileSink(out, filesystem=pyarrow.fs.PyFileSystem(handler)), Loop()
    sink.validate(SCHEMA, restoring=False)
    writer = open_writer(sink, SCHEMA, loop)
    writer.write(batch(1, 2))
    committables = prepared(writer, 1)
    handler.dies_between = True
    with pytest.raises(StorageError, match="cannot commit checkpoint 1"):
        committer_of(sink, "job-a").commit(1, committables)
    assert visible(out) == [1, 2]
    assert len(pending(out)) == 1
    handler.dies_between = False
    committer_of(sink, "job-a").commit(1, committables)
    assert visible(out) == [1, 2]
    assert pending(out) == []


# ---- any history ----


def histories() -> st.SearchStrategy[list[str]]:
    return st.lists(
        st.sampled_from(["write", "io", "checkpoint", "lose checkpoint", "fail", "kill driver"]), max_size=25
    )


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories())
def test_whatever_fails_the_committed_files_hold_each_row_once(tmp_path_factory, history):
    out = tmp_path_factory.mktemp("sink") / "out"
    sink, loop = FileSink(out), Loop()
    job, attempt, checkpoint_id = 0, 0, 0
    row = completed_row = 0
    """The next row to write, and the one after the newest completed checkpoint."""
    completed: tuple[int, list[bytes]] = (0, [])
    unconfirmed: list[bytes] = []
    committer = committer_of(sink, "job-0")
    writer = open_writer(sink, SCHEMA, loop, job_id="job-0")

    def restarted() -> Iterator[None]:
        nonlocal writer, row, unconfirmed
        loop.work.clear()
        unconfirmed = []
        row = completed_row
        if completed[1]:
            committer.commit(*completed)
        writer = open_writer(sink, SCHEMA, loop, attempt=attempt, job_id=f"job-{job}")
        yield

    for step in [*history, "checkpoint"]:
        if step == "write":
            writer.write(batch(row))
            row += 1
        elif step == "io":
            loop.run()
        elif step in ("checkpoint", "lose checkpoint"):
            checkpoint_id += 1
            unconfirmed += prepared(writer, checkpoint_id)
            if step == "checkpoint":
                completed, unconfirmed, completed_row = (checkpoint_id, unconfirmed), [], row
                if completed[1]:
                    committer.commit(*completed)
        elif step == "fail":
            attempt += 1
            writer.close()
            list(restarted())
        else:
            job, attempt = job + 1, 0
            committer = committer_of(sink, f"job-{job}")
            list(restarted())
    assert visible(out) == list(range(completed_row))
    assert loop.failures == []
