"""Exactly once into Kafka, against a real broker: staged, committed, and committed again after a death at any step."""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from connector_worlds import Loop, open_writer

from committers import committer_of
from kafka_broker import BACK_SOON, PASSWORD, USER, Broker, Kafka
from machine import limit_s
from midstream import ConfigError, Environment, JobError, SchemaError, StorageError
from midstream.connectors.kafka import committer as kafka_committer
from midstream.connectors.kafka import staged_writer
from midstream.connectors.kafka.commit_protocol import CommitStep
from midstream.connectors.kafka.committer import KafkaCommitter
from midstream.connectors.kafka.kafka_sink import KafkaSink
from midstream.connectors.kafka.staged_records import StagedRecords, decode
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.interfaces import Signal
from midstream.engine.operators.sink_api import CommitterContext, SinkWriter
from midstream.runtime.process.process_slots import ProcessSlots
from midstream.runtime.storage.file_storage import TEMPORARY, LocalStorage
from waiting import until

own_broker_only = pytest.mark.skipif(
    "KAFKA_BOOTSTRAP" in os.environ, reason="KAFKA_BOOTSTRAP names a broker that tests may not stop"
)
AT_THE_BROKERS = [
    CommitStep.FENCE,
    CommitStep.READ,
    CommitStep.BEGIN,
    CommitStep.PRODUCE,
    CommitStep.MARK,
    CommitStep.COMMIT,
]
STEPS = [CommitStep.LOOK_UP, *AT_THE_BROKERS, CommitStep.RECORD, CommitStep.CLEAN]
HEADERS = pa.large_list(pa.struct([("name", pa.large_string()), ("value", pa.large_binary())]))


def numbers(*values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": pa.array(values, pa.int64())})


class Staging:
    """A job's sink on one topic, its checkpoint storage, and writers and committers of it."""

    def __init__(self, servers: str, topic: str, directory: Path, **arguments: Any) -> None:
        self.directory = directory
        self.storage = LocalStorage(str(directory))
        self.sink: KafkaSink = pickle.loads(pickle.dumps(KafkaSink(servers, topic, **arguments)))
        self.loop = Loop()
        self._opened: list[Any] = []

    def writer(self, schema: pa.Schema, **place: Any) -> SinkWriter:
        writer = open_writer(self.sink, schema, self.loop, storage=self.storage, **place)
        self._opened.append(writer)
        return writer

    def staged(self, batch: pa.RecordBatch, checkpoint_id: int = 1, **place: Any) -> list[bytes]:
        """By one subtask, with a writer of its own."""
        return self.prepared(self.writer(batch.schema, **place), checkpoint_id, batch)

    def prepared(self, writer: SinkWriter, checkpoint_id: int, *batches: pa.RecordBatch) -> list[bytes]:
        for batch in batches:
            writer.write(batch)
        self.loop.run()
        for failure in self.loop.failures:
            raise failure
        later = writer.prepare(checkpoint_id)
        return [] if later is None else list(later())

    def committer(self, job_id: str = "job-a", stopped: Signal | None = None) -> KafkaCommitter:
        if stopped is None:
            committer = committer_of(self.sink, job_id, storage=self.storage)
        else:
            committer = self.sink.committer(CommitterContext("out", "sink out", job_id, self.storage, stopped))
        assert isinstance(committer, KafkaCommitter)
        self._opened.append(committer)
        return committer

    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.glob("sinks/*/*"))

    def close(self) -> None:
        for each in self._opened:
            each.close()
        self.loop.run()


@pytest.fixture
def staging(kafka: Kafka, tmp_path: Path) -> Iterator[Staging]:
    staging = Staging(kafka.servers, kafka.topic(partitions=2), tmp_path)
    yield staging
    staging.close()


def found(kafka: Kafka, staging: Staging) -> list[int]:
    """In the order of each partition."""
    return [msgspec.json.decode(message.value())["n"] for message in kafka.read(staging.sink.topic)]


def in_any_order(kafka: Kafka, staging: Staging) -> list[int]:
    return sorted(found(kafka, staging))


# ---- what is there when ---------------------------------------------------------


def test_rows_appear_with_the_commit_once_however_often_it_is_repeated(kafka, staging):
    writer = staging.writer(numbers(1).schema)
    first = staging.prepared(writer, 1, numbers(1, 2), numbers(3))
    second = staging.prepared(writer, 2, numbers(4))
    assert staging.prepared(writer, 3) == [], "there is nothing to commit"
    assert found(kafka, staging) == []
    committer = staging.committer()
    for checkpoint_id, items in ((1, first), (1, first), (2, second), (1, first)):
        committer.commit(checkpoint_id, items)
    assert in_any_order(kafka, staging) == [1, 2, 3, 4]
    assert staging.files() == ["job-a-0.committed"]
    staging.committer("job-b").commit(2, second)
    (staging.directory / "sinks").rename(staging.directory / "elsewhere")
    staging.committer("job-b").commit(2, second)  # the marker says so
    assert in_any_order(kafka, staging) == [1, 2, 3, 4]


def test_all_that_a_record_has_arrives(kafka, tmp_path):
    batch = pa.RecordBatch.from_pydict(
        {
            "v": pa.array([b"\x00", None, b"z"], pa.large_binary()),
            "k": pa.array([b"1", None, b"3"], pa.large_binary()),
            "h": pa.array([[{"name": "a", "value": b"\xff"}, {"name": "a", "value": None}], [], None], HEADERS),
            "p": pa.array([2, 1, 0], pa.int32()),
        }
    )
    arguments = {"format": "bytes", "key": "k", "headers": "h", "partition": "p"}
    staging = Staging(kafka.servers, kafka.topic(partitions=3), tmp_path, **arguments)
    staging.sink.validate(batch.schema, restoring=False)
    staging.committer().commit(1, staging.staged(batch))
    records = [(m.partition(), m.key(), m.value(), m.headers()) for m in kafka.read(staging.sink.topic)]
    assert records == [
        (0, b"3", b"z", None),
        (1, None, None, None),
        (2, b"1", b"\x00", [("a", b"\xff"), ("a", None)]),
    ]
    staging.close()


def test_rows_keep_their_order_through_many_files_and_a_small_queue(kafka, tmp_path, monkeypatch):
    monkeypatch.setattr(staged_writer, "FILE_BYTES", 20_000)
    options = {"queue.buffering.max.messages": 100}
    staging = Staging(kafka.servers, kafka.topic(), tmp_path, options=options)
    writer = staging.writer(numbers(1).schema)
    batches = [numbers(*range(first, first + 500)) for first in range(0, 5000, 500)]
    items = staging.prepared(writer, 1, *batches)
    assert len(decode(items[0]).files) > 2
    staging.committer().commit(1, items)
    assert found(kafka, staging) == list(range(5000))
    staging.close()


def test_sinks_and_jobs_on_one_topic_do_not_disturb_each_other(kafka, staging, tmp_path):
    job_b = Staging(kafka.servers, staging.sink.topic, tmp_path / "b")
    places: list[dict[str, Any]] = [{"uid": "out"}, {"uid": "other"}, {"uid": "out", "subtask": 1}]
    all_staged = [staging.staged(numbers(n), **place) for n, place in enumerate(places)]
    of_job_b = job_b.staged(numbers(3), job_id="job-b")
    committer = staging.committer()
    committer.commit(1, all_staged[2])
    job_b.committer("job-b").commit(1, of_job_b)
    committer.commit(1, all_staged[1])
    committer.commit(1, all_staged[0])
    assert in_any_order(kafka, staging) == [0, 1, 2, 3]
    assert len({decode(items[0]).transactional_id for items in (*all_staged, of_job_b)}) == 4
    job_b.close()


def test_rows_go_to_the_topic_they_were_staged_for_whatever_the_sink_is_now(kafka, staging, tmp_path):
    items = staging.staged(numbers(1, 2))
    moved = Staging(kafka.servers, kafka.topic("other"), tmp_path, guarantee="at_least_once")
    moved.committer("job-b").commit(1, items)
    assert in_any_order(kafka, staging) == [1, 2]
    assert found(kafka, moved) == []
    moved.close()


# ---- deaths -----------------------------------------------------------------------


class Killed(BaseException):
    """No code of a process that is killed runs any more."""


@pytest.mark.parametrize("at", STEPS, ids=lambda step: step.name)
def test_a_commit_that_dies_at_any_step_is_done_by_the_next_and_by_no_other(kafka, staging, monkeypatch, at):
    staged = [staging.staged(numbers(n, n + 10), subtask=n) for n in (0, 1)]
    real = kafka_committer._CommitRun._do

    def dying(self: Any, step: CommitStep) -> int | None:
        if step is not at:
            return real(self, step)
        if self._staged.subtask == 1:
            real(self, step)  # dies after it
        raise Killed

    dead = [staging.committer(), staging.committer()]
    with monkeypatch.context() as patch:
        patch.setattr(kafka_committer._CommitRun, "_do", dying)
        patch.setattr(KafkaCommitter, "_forget", lambda *_: None)
        for committer, items in zip(dead, staged, strict=True):
            with pytest.raises(Killed):
                committer.commit(1, items)
    successor = staging.committer("job-b")
    for items in staged:
        successor.commit(1, items)
    assert in_any_order(kafka, staging) == [0, 1, 10, 11]
    for committer, items in zip(dead, staged, strict=True):
        committer.commit(1, items)  # zombies after all
    assert in_any_order(kafka, staging) == [0, 1, 10, 11]


@pytest.mark.parametrize("at", STEPS, ids=lambda step: step.name)
def test_a_committer_that_sleeps_at_any_step_while_another_does_its_work_changes_nothing(
    kafka, staging, monkeypatch, at
):
    items = staging.staged(numbers(1, 2, 3))
    other, real = staging.committer("job-b"), kafka_committer._CommitRun._do
    slept = []

    def sleeping(self: Any, step: CommitStep) -> int | None:
        if step is at and not slept:
            slept.append(step)
            other.commit(1, items)
        return real(self, step)

    monkeypatch.setattr(kafka_committer._CommitRun, "_do", sleeping)
    committer = staging.committer()
    committer.commit(1, items)
    assert slept == [at]
    assert in_any_order(kafka, staging) == [1, 2, 3]


@own_broker_only
def test_a_commit_waits_for_a_broker_that_is_gone(kafka, kafka_broker: Broker, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("midstream.connectors.kafka.client._SILENCE_S", 0.5)
    begun: list[CommitStep] = []
    real = kafka_committer._CommitRun._do

    def noted(self: kafka_committer._CommitRun, step: CommitStep) -> int | None:
        begun.append(step)
        return real(self, step)

    monkeypatch.setattr(kafka_committer._CommitRun, "_do", noted)
    options = {"transaction.timeout.ms": 2000, **BACK_SOON}
    staging = Staging(kafka.servers, kafka.topic(partitions=2), tmp_path, options=options)
    writer = staging.writer(numbers(1).schema)
    first, second = staging.prepared(writer, 1, numbers(1)), staging.prepared(writer, 2, numbers(2))
    committer = staging.committer()
    committer.commit(1, first)
    begun.clear()
    kafka_broker.stop(crash=True)
    done: list[bool] = []
    try:
        thread = threading.Thread(target=lambda: done.append(committer.commit(2, second) is None), daemon=True)
        thread.start()
        until("it is said", lambda: "does not answer; waiting" in caplog.text)
        # Its records are given up with the transaction, which is not taken for a word of the broker.
        until("a new producer tries", lambda: CommitStep.FENCE in begun)
        assert CommitStep.PRODUCE in begun and not done
        assert "answers again" not in caplog.text
    finally:
        kafka_broker.start()
    until("it is committed", lambda: done, 120)
    assert in_any_order(kafka, staging) == [1, 2]
    staging.close()


def test_an_attempt_that_ends_waits_for_no_broker(tmp_path, monkeypatch):
    monkeypatch.setattr("midstream.connectors.kafka.cluster.ANSWER_S", 1.0)
    staging = Staging("127.0.0.1:1", "t", tmp_path)
    staged = StagedRecords(1, 1, 0, "job-a", "out", 0, 0, "t", 0, ())
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(StorageError, match="KafkaSink on t: the attempt ended before the commit was done"):
        staging.committer(stopped=stopped).commit(1, [msgspec.json.encode(staged)])
    writer = staging.writer(numbers(1).schema)
    writer.write(numbers(1))
    staging.loop.run()
    finish = writer.prepare(1)
    assert finish is not None
    writer.close()
    with pytest.raises(StorageError):
        finish()
    assert staging.files() == []


# ---- markers ------------------------------------------------------------------------


def forget_marker(kafka: Kafka, items: Sequence[bytes]) -> None:
    """As the brokers do in time."""
    group = decode(items[0]).transactional_id
    kafka.admin.delete_consumer_groups([group])[group].result(limit_s(30))


def set_marker(kafka: Kafka, items: Sequence[bytes], checkpoint_id: int) -> None:
    """What docs/guide/kafka.md says."""
    from confluent_kafka import Consumer, TopicPartition

    staged = decode(items[0])
    consumer = Consumer({"bootstrap.servers": kafka.servers, "group.id": staged.transactional_id})
    consumer.commit(offsets=[TopicPartition(staged.topic, 0, checkpoint_id)], asynchronous=False)
    consumer.close()


def test_without_a_marker_nothing_is_guessed_and_the_user_can_say_what_is_so(kafka, staging, monkeypatch):
    writer = staging.writer(numbers(1).schema)
    first, second = staging.prepared(writer, 1, numbers(1)), staging.prepared(writer, 2, numbers(2, 3))
    with monkeypatch.context() as patch:
        patch.setattr(kafka_committer, "record_committed", _killed)
        with pytest.raises(Killed):
            staging.committer().commit(1, first)
    forget_marker(kafka, first)
    expected = (
        r"cannot commit checkpoint 1 of subtask 0: the brokers have forgotten .* \(group 'midstream-job-a-.*-0' has no offset of "
        r"partition 0\), .* whether the 1 rows of checkpoint 1 are.* commit offset 1 for that group if it does, or 0 if it does not"
    )
    for _ in range(2):
        with pytest.raises(StorageError, match=expected):
            staging.committer("job-b").commit(1, first)
    set_marker(kafka, first, 1)
    staging.committer("job-b").commit(1, first)
    assert in_any_order(kafka, staging) == [1]
    forget_marker(kafka, second)
    with pytest.raises(StorageError, match="commit offset 2 for that group if it does, or 1 if it does not"):
        staging.committer("job-b").commit(2, second)
    set_marker(kafka, second, 1)
    staging.committer("job-b").commit(2, second)
    assert in_any_order(kafka, staging) == [1, 2, 3]


def _killed(*_: object) -> None:
    raise Killed


def test_what_was_committed_long_ago_needs_no_marker(kafka, staging):
    items = staging.staged(numbers(1))
    staging.committer().commit(1, items)
    forget_marker(kafka, items)
    staging.committer("job-b").commit(1, items)
    assert in_any_order(kafka, staging) == [1]


def test_a_subtask_without_rows_for_long_has_its_marker_written_again(kafka, staging):
    writer: Any = staging.writer(numbers(1).schema)
    now_s = writer._now_s()
    writer._now_s = lambda: now_s
    committer = staging.committer()
    assert staging.prepared(writer, 1) == [], "it has none"
    now_s += 2 * staged_writer.REFRESHED_S
    assert staging.prepared(writer, 2) == [], "it needs none"
    committer.commit(3, staging.prepared(writer, 3, numbers(1)))
    assert staging.prepared(writer, 4) == []
    now_s += staged_writer.REFRESHED_S + 1  # more than what sums of seconds are rounded by
    empty = staging.prepared(writer, 5)
    committer.commit(5, empty)
    assert staging.prepared(writer, 6) == []
    assert decode(empty[0]).rows == 0
    committer.commit(7, staging.prepared(writer, 7, numbers(2)))
    staging.committer("job-b").commit(5, empty)
    assert in_any_order(kafka, staging) == [1, 2]


def test_a_later_checkpoint_is_not_committed_before_an_earlier_one(kafka, staging):
    writer = staging.writer(numbers(1).schema)
    first, second = staging.prepared(writer, 1, numbers(1)), staging.prepared(writer, 2, numbers(2))
    with pytest.raises(InvariantError, match=r"its rows for checkpoint 1 are not in topic .* yet"):
        staging.committer().commit(2, second)
    committer = staging.committer()
    committer.commit(1, first)
    committer.commit(2, second)
    assert in_any_order(kafka, staging) == [1, 2]


def test_what_one_marker_could_not_tell_apart_is_not_committed(kafka, staging):
    items = [*staging.staged(numbers(1)), *staging.staged(numbers(2), attempt=1)]
    with pytest.raises(InvariantError, match="has staged rows for checkpoint 1 twice"):
        staging.committer().commit(1, items)
    assert found(kafka, staging) == []


# ---- files ----------------------------------------------------------------------------


def test_staged_rows_that_are_gone_or_damaged_are_named_and_nothing_is_sent(kafka, staging):
    items = staging.staged(numbers(1, 2))
    (name,) = staging.files()
    (path,) = staging.directory.glob(f"sinks/*/{name}")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + b"x" + whole[-8:])
    with pytest.raises(StorageError, match=rf"its 2 rows are not in topic .* yet, and .*{name}.* damaged"):
        staging.committer().commit(1, items)
    path.unlink()
    with pytest.raises(StorageError, match=rf"its 2 rows are not in topic .* yet, and .*{name}"):
        staging.committer().commit(1, items)
    path.write_bytes(whole)
    staging.committer().commit(1, items)
    assert in_any_order(kafka, staging) == [1, 2]


def test_what_no_checkpoint_will_hold_is_deleted(kafka, staging):
    writer = staging.writer(numbers(1).schema)
    items = staging.prepared(writer, 1, numbers(1))
    staging.committer().abort(items)
    assert staging.files() == []
    writer.write(numbers(2))
    staging.loop.run()
    writer.close()
    staging.loop.run()
    assert staging.files() == [] and found(kafka, staging) == []


def test_what_dead_attempts_have_left_goes_with_the_first_commit_of_a_newer_one(kafka, staging):
    staging.staged(numbers(1), attempt=0, subtask=3)
    staging.staged(numbers(2), 4, job_id="job-0")
    staging.committer("job-0").commit(3, staging.staged(numbers(3), 3, job_id="job-0", subtask=1))
    other_sink = staging.staged(numbers(4), attempt=0, uid="other")
    committer = staging.committer()
    beside = staging.staged(numbers(5), 5, attempt=1, subtask=1)
    folder = next(path for path in staging.directory.glob("sinks/*") if len(list(path.iterdir())) > 1)
    (folder / f"{TEMPORARY}0011223344556677-job-a-0-3-0-1.arrow").write_bytes(b"half")
    (folder / "not-ours.txt").write_bytes(b"kept")
    committer.commit(5, staging.staged(numbers(6), 5, attempt=1))
    assert sorted(path.name for path in folder.iterdir() if path.suffix != "") == [
        "job-a-0.committed",
        "job-a-1-1-0-0.arrow",
        "not-ours.txt",
    ]
    committer.commit(5, beside)
    committer.commit(1, other_sink)
    assert in_any_order(kafka, staging) == [3, 4, 5, 6]


def test_a_committer_that_did_not_commit_itself_deletes_nothing_of_others(kafka, staging, monkeypatch):
    """A driver that was thought dead must not take its successor's rows for leftovers."""
    items = staging.staged(numbers(1))
    real = kafka_committer._CommitRun._do
    successors: list[list[bytes]] = []

    def sleeping(self: Any, step: CommitStep) -> int | None:
        if step is CommitStep.FENCE and not successors:
            successors.append([])
            staging.committer("job-b").commit(1, items)
            successors[0] = staging.staged(numbers(2), 2, job_id="job-b")
        return real(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(kafka_committer._CommitRun, "_do", sleeping)
        staging.committer().commit(1, items)
    staging.committer("job-b").commit(2, successors[0])
    assert in_any_order(kafka, staging) == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "staged in format 2, but this version of midstream reads 1"),
        ({"files": [{"path": "epochs/00000001", "bytes": 1, "checksum": ""}]}, "is corrupt or forged"),
        ({"files": [{"path": "sinks/../_job", "bytes": 1, "checksum": ""}]}, "is corrupt or forged"),
        ({"after": 1}, "impossible numbers"),
        ({"checkpoint": -1}, "impossible numbers"),
        ({"topic": ""}, "impossible numbers"),
        ({"rows": "many"}, "not prepared by a Kafka sink"),
        ({"uid": "another"}, "is corrupt or forged"),
    ],
    ids=["version", "file", "path", "after", "checkpoint", "topic", "rows", "uid"],
)
def test_a_checkpoint_cannot_have_anything_else_sent_or_deleted(staging, change, message):
    items = staging.staged(numbers(1))
    crafted = [msgspec.json.encode({**msgspec.json.decode(items[0]), **change})]
    committer = staging.committer()
    for act in (staging.sink.check_committables, committer.commit, lambda _, what: committer.abort(what)):
        with pytest.raises(StorageError, match=message):
            act(1, crafted)
    assert len(staging.files()) == 1
    with pytest.raises(StorageError, match="are to be committed as checkpoint 2"):
        committer.commit(2, items)


# ---- what is refused ---------------------------------------------------------------------


def test_rows_that_the_brokers_would_refuse_are_refused_before_their_checkpoint_completes(kafka, tmp_path):
    topic = kafka.topic(max_message_bytes=4000, partitions=2)
    text = pa.RecordBatch.from_pydict({"t": pa.array(["x" * 3000], pa.large_string()), "p": [1]})
    with pytest.raises(
        ConfigError, match=r"accepts records of up to 4000 bytes .*options=\{'message.max.bytes': 3488\}"
    ):
        KafkaSink(kafka.servers, topic).validate(text.schema, restoring=False)
    arguments = {"options": {"message.max.bytes": 3488}, "partition": "p", "format": "text"}
    staging = Staging(kafka.servers, topic, tmp_path, **arguments)
    staging.sink.validate(text.schema, restoring=False)
    with pytest.raises(SchemaError, match=r"a record of 3000 bytes, but message.max.bytes leaves 2976"):
        staging.staged(text)
    staging.loop.failures.clear()
    for partition, message in ((2, rf"is for partition 2, and topic '{topic}' has 2"), (-1, "has a number below 0")):
        bad = pa.RecordBatch.from_pydict({"t": pa.array(["x"], pa.large_string()), "p": [partition]})
        with pytest.raises(SchemaError, match=message):
            staging.staged(bad)
        staging.loop.failures.clear()
    kafka.grow(topic, 3)
    large = pa.RecordBatch.from_pydict({"t": pa.array(["y" * 2976], pa.large_string()), "p": [2]})
    staging.committer().commit(1, staging.staged(large))
    assert [message.partition() for message in kafka.read(topic)] == [2]
    staging.close()


def test_a_transaction_timeout_above_the_brokers_limit_is_refused(kafka):
    options = {"transaction.timeout.ms": 1_000_000}
    sink = KafkaSink(kafka.servers, kafka.topic(), options=options)
    with pytest.raises(
        ConfigError, match=r"transaction.timeout.ms that is not above the brokers' transaction.max.timeout"
    ):
        sink.validate(numbers(1).schema, restoring=False)


@own_broker_only
def test_each_right_that_is_missing_is_named_and_with_all_of_them_it_works(kafka_broker: Broker, tmp_path):
    kafka = Kafka(kafka_broker.servers)
    topic = kafka.topic()
    options = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": PASSWORD,
    }
    staging = Staging(kafka_broker.secured, topic, tmp_path, options=options)
    grants = [
        (("topic", topic, "DESCRIBE"), f"topic '{topic}' is not permitted"),
        (("topic", topic, "WRITE"), r"has no right to write \(Write\)"),
        (
            ("transactional_id", "midstream-", "WRITE"),
            "needs Write and Describe on transactional ids that begin with midstream-",
        ),
        (("group", "midstream-", "READ"), "needs Read on the group"),
        (("topic", topic, "READ"), "also Read, on a topic that is written to"),
    ]
    for (kind, name, operation), message in grants:
        with pytest.raises(ConfigError, match=message):
            staging.sink.validate(numbers(1).schema, restoring=False)
        kafka.allow(name, operation, kind=kind)
    staging.sink.validate(numbers(1).schema, restoring=False)
    staging.committer().commit(1, staging.staged(numbers(7)))
    assert in_any_order(kafka, staging) == [7]
    staging.close()


def test_without_checkpoints_it_is_refused_and_at_least_once_is_not(kafka, running):
    def job(**arguments: Any) -> Environment:
        env = Environment("numbers")
        stream = env.generate(lambda i: {"n": i}, count=10)
        stream.write_kafka(kafka.servers, topic, **arguments).name("topic")
        return env

    topic = kafka.topic()
    with pytest.raises(
        JobError, match=r"sink 'topic' keeps rows in the checkpoint .* give Environment\(checkpoint_dir"
    ):
        job().start(slots=ProcessSlots())
    running.append(job(guarantee="at_least_once").start(slots=ProcessSlots()))
    running[0].wait(limit_s(60))
    assert len(kafka.read(topic)) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"guarantee": "at_most_once"}, "guarantee 'at_most_once' is not one of exactly_once, at_least_once"),
        ({"options": {"transactional.id": "x"}}, "'transactional.id' cannot be set"),
        (
            {"options": {"transaction.timeout.ms": 1}, "guarantee": "at_least_once"},
            "'transaction.timeout.ms' requires guarantee='exactly_once'",
        ),
    ],
    ids=["guarantee", "transactional-id", "timeout"],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        KafkaSink("127.0.0.1:1", **{"topic": "t", **arguments})
