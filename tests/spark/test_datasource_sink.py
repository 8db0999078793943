"""Python Data Sources as sinks: one write per subtask and checkpoint, commits and aborts by checkpoint."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from committers import committer_of
from machine import limit_s
from midstream.engine.core.arrow_types import schema_of, to_list
from midstream.engine.core.errors import ConfigError, InvariantError, JobError, SchemaError, StorageError
from midstream.engine.operators.sink_api import Sink, SinkWriter, WriterContext
from midstream.engine.state.safe_pickle import OwnCode, Pickles
from midstream.spark import datasource_sink
from midstream.spark.datasource_sink import DataSourceSink


@pytest.fixture(autouse=True)
def own_code_of_the_tests(monkeypatch):
    """As `submit` sets it for a job of these classes."""
    monkeypatch.setattr(Sink, "own", OwnCode(packages=frozenset({__name__})))


SCHEMA = schema_of([("n", pa.int64()), ("who", pa.large_string())])


def rows(*numbers: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"n": n, "who": f"w{n}"} for n in numbers], SCHEMA)


class Posted:
    """An executor for the loop's side; mails come from writing threads."""

    def __init__(self) -> None:
        self.mails: list[Callable[[], None]] = []
        self.arrived = threading.Condition()
        self.failures: list[BaseException] = []

    def post(self, mail: Callable[[], None]) -> None:
        with self.arrived:
            self.mails.append(mail)
            self.arrived.notify_all()

    def run_until(self, is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
        while not is_true():
            with self.arrived:
                assert self.mails or self.arrived.wait(timeout_s), "nothing more comes"
                mails, self.mails = self.mails, []
            for mail in mails:
                mail()


@dataclass
class Message(WriterCommitMessage):
    file: str
    rows: int


class Staged(DataSource):
    """Writes a file per task; commit lists the files of a batch in `<batch>.json`, abort deletes them."""

    @classmethod
    def name(cls) -> str:
        return "staged"

    def schema(self) -> str:
        return "n bigint"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        assert not overwrite
        assert schema.simpleString() == "struct<n:bigint,who:string>"
        return StagedWriter(Path(self.options["dir"]))


class StagedWriter(DataSourceStreamWriter):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, iterator: Iterator[Row]) -> Message:
        context = TaskContext.get()
        assert context is not None
        name = f"{context.partitionId()}-{context.attemptNumber()}-{context.taskAttemptId()}"
        listed = []
        for row in iterator:
            if row.n < 0:
                raise ValueError("no negative numbers")
            listed.append([row.n, row["who"]])
        (self.directory / name).write_text(json.dumps(listed))
        return Message(name, len(listed))

    def commit(self, messages: list[Message], batchId: int) -> None:  # type: ignore[override]  # narrower, as users write it
        (self.directory / f"{batchId}.json").write_text(json.dumps([message.file for message in messages]))

    def abort(self, messages: list[Message], batchId: int) -> None:  # type: ignore[override]  # narrower, as users write it
        for message in messages:
            (self.directory / message.file).unlink()


def sink_on(directory: Path) -> DataSourceSink:
    sink = DataSourceSink(Staged, options={"dir": str(directory)})
    sink.validate(SCHEMA, restoring=False)
    return sink


def open_writer(sink: DataSourceSink, loop: Posted, subtask: int = 0, attempt: int = 0) -> SinkWriter:
    shipped = pickle.loads(pickle.dumps(sink))
    return shipped.writer(WriterContext("out", "sink", subtask, attempt, "job-a", SCHEMA, loop, loop.failures.append))  # type: ignore[arg-type]  # a stand-in


def prepared(writer: SinkWriter, checkpoint_id: int) -> list[bytes]:
    later = writer.prepare(checkpoint_id)
    return [] if later is None else list(later())


def committed(directory: Path) -> list[int]:
    files = [file for batch in sorted(directory.glob("*.json")) for file in json.loads(batch.read_text())]
    return sorted(n for file in files for n, _ in json.loads((directory / file).read_text()))


def test_one_write_per_subtask_and_checkpoint_is_committed_with_the_checkpoints_id(tmp_path):
    sink, loop = sink_on(tmp_path), Posted()
    writers = [open_writer(sink, loop, subtask) for subtask in (0, 1)]
    for checkpoint_id in (7, 8):
        for at, writer in enumerate(writers):
            writer.write(rows(checkpoint_id * 100 + at))
            writer.write(rows(checkpoint_id * 100 + at + 10))
        items = [item for writer in writers for item in prepared(writer, checkpoint_id)]
        committer_of(sink, "job-a").commit(checkpoint_id, items)
        committer_of(sink, "job-a").commit(checkpoint_id, items)
    assert sorted(p.name for p in tmp_path.glob("*.json")) == ["7.json", "8.json"]
    assert committed(tmp_path) == [700, 701, 710, 711, 800, 801, 810, 811]
    assert prepared(writers[0], 9) == [], "nothing to write, nothing to commit"


def test_subtasks_of_one_slot_are_different_partitions_to_the_writer(tmp_path):
    sink, loop = sink_on(tmp_path), Posted()
    writers = [open_writer(sink, loop, subtask, attempt=3) for subtask in range(4)]
    for writer in writers:
        writer.write(rows(1))
    pickles = Pickles(sink.own)
    written = [datasource_sink.msgspec.msgpack.decode(item)[1] for w in writers for item in prepared(w, 1)]
    messages = [pickles.loads(data, "a message") for data in written]
    assert [message.file.split("-")[:2] for message in messages] == [[str(n), "3"] for n in range(4)]
    assert TaskContext.get() is None, "as before"


def test_an_abort_goes_to_the_writer_by_checkpoint(tmp_path):
    sink, loop = sink_on(tmp_path), Posted()
    writer = open_writer(sink, loop)
    items = []
    for checkpoint_id in (1, 2):
        writer.write(rows(checkpoint_id))
        items += prepared(writer, checkpoint_id)
    assert len(list(tmp_path.iterdir())) == 2
    committer_of(sink, "job-a").abort(items)
    assert list(tmp_path.iterdir()) == []


def test_committables_of_a_killed_job_are_committed_by_the_restored_one(tmp_path):
    loop = Posted()
    writer = open_writer(sink_on(tmp_path), loop)
    writer.write(rows(1, 2))
    items = prepared(writer, 1)
    restored = DataSourceSink(Staged, options={"dir": str(tmp_path)})
    restored.validate(SCHEMA, restoring=True)
    committer_of(restored, "job-b").commit(1, items)
    assert committed(tmp_path) == [1, 2]


def test_what_another_kind_of_sink_has_prepared_is_refused(tmp_path):
    sink = sink_on(tmp_path)
    with pytest.raises(StorageError, match="what the checkpoint has to commit was not prepared by a data source"):
        sink.check_committables(1, [msgspec.msgpack.encode(["job", 0, "pending"])])


def test_an_error_of_write_fails_the_task_with_the_users_exception(tmp_path):
    sink, loop = sink_on(tmp_path), Posted()
    writer = open_writer(sink, loop)
    writer.write(rows(1, -1))
    loop.run_until(lambda: bool(loop.failures))
    assert isinstance(loop.failures[0], ValueError)
    with pytest.raises(ValueError, match="no negative numbers"):
        prepared(writer, 1)


def test_closing_ends_the_write_and_its_thread_without_a_word(tmp_path):
    sink, loop = sink_on(tmp_path), Posted()
    writer = open_writer(sink, loop)
    writer.write(rows(1))
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("midstream-write-out")]
    writer.close()
    thread.join(limit_s(10))
    assert not thread.is_alive()
    assert loop.failures == []
    assert list(tmp_path.iterdir()) == []


class Slow(Staged):
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return SlowWriter()


class SlowWriter(DataSourceStreamWriter):
    gate = threading.Event()

    def write(self, iterator: Iterator[Row]) -> Message:
        self.gate.wait(limit_s(10))
        return Message("", sum(1 for _ in iterator))


def test_a_slow_write_holds_the_task_back_and_wakes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(datasource_sink, "QUEUED_BYTES_MAX", 100)
    sink = DataSourceSink(Slow)
    sink.validate(SCHEMA, restoring=False)
    loop = Posted()
    writer = open_writer(sink, loop)
    woken: list[bool] = []
    writer.on_ready(lambda: woken.append(writer.ready()))
    for n in range(20):
        writer.write(rows(n))
    assert not writer.ready()
    SlowWriter.gate.set()
    loop.run_until(writer.ready)
    loop.run_until(lambda: bool(woken))
    assert len(prepared(writer, 1)) == 1


class Batches(DataSource):
    """Only a batch writer, which takes record batches."""

    seen: list[Any] = []

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        return BatchesWriter()


class BatchesWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]  # narrower, as users write it
        total = 0
        for batch in iterator:
            assert batch.schema == schema_of([("n", pa.int64()), ("who", pa.string())]), "Spark's own types"
            total += sum(to_list(batch.column("n")))
        return Message("x", total)

    def commit(self, messages: list[Message]) -> None:  # type: ignore[override]  # narrower, as users write it
        Batches.seen.append([message.rows for message in messages])

    def abort(self, messages: list[Message]) -> None:  # type: ignore[override]  # narrower, as users write it
        Batches.seen.append("aborted")


def test_a_batch_writer_of_record_batches_serves_where_there_is_no_stream_writer():
    Batches.seen.clear()
    sink, loop = DataSourceSink(Batches), Posted()
    sink.validate(SCHEMA, restoring=False)
    writer = open_writer(sink, loop)
    writer.write(rows(1, 2, 3))
    items = prepared(writer, 1)
    committer = committer_of(sink, "job-a")
    committer.commit(1, items)
    committer.abort(items)
    assert Batches.seen == [[6], "aborted"]


def test_what_cannot_be_written_is_refused_at_once(tmp_path):
    class ReadOnly(DataSource):
        def schema(self) -> str:
            return "n bigint"

    with pytest.raises(ConfigError, match=r"has neither streamWriter\(\) nor writer\(\); it cannot be written"):
        DataSourceSink(ReadOnly)

    class Locked(Staged):
        def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
            return threading.Lock()

    with pytest.raises(JobError, match=r"data source 'staged': its writer cannot be sent to the slots: .*lock"):
        DataSourceSink(Locked).validate(SCHEMA, restoring=False)
    sink = DataSourceSink(Staged, options={"dir": str(tmp_path)})
    with pytest.raises(SchemaError, match="column 'u' is uint64, for which Spark has no type"):
        sink.validate(pa.schema([("u", pa.uint64())]), restoring=False)
    with pytest.raises(InvariantError, match="has not been validated"):
        committer_of(sink, "job-a")
