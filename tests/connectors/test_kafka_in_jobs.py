"""Kafka as the ends of real jobs on processes: slots and brokers die, jobs are rescaled and continue, no row is lost or doubled."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from jobs import Held
from kafka_broker import BACK_SOON, PASSWORD, USER, Broker, Kafka
from machine import limit_s
from midstream import Count as Rows
from midstream import Environment, KeyedProcessFunction, ProcessContext, ValueState, WatermarkStrategy, tumbling
from midstream.connectors.memory.collection_source import from_rows
from midstream.engine.core.errors import MidstreamError
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

WHO = 7
own_broker_only = pytest.mark.skipif(
    "KAFKA_BOOTSTRAP" in os.environ, reason="KAFKA_BOOTSTRAP names a broker that tests may not stop"
)


class Counted(KeyedProcessFunction):
    """How many rows of its key there were up to this one."""

    rows = ValueState(default=0)

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> dict[str, Any]:
        self.rows.value += 1
        return {"who": row["who"], "n": row["n"], "rows": self.rows.value}


def records(first: int, last: int) -> list[bytes | None]:
    return [json.dumps({"n": n, "who": n % WHO}).encode() for n in range(first, last)]


def job(kafka: Kafka, topic: str, directory: Path, **source: Any) -> Environment:
    """Kafka, a state by key, and files in which each row is once; in `out`."""
    env = Environment("kafka", parallelism=2, checkpoint_dir=directory / "checkpoints", checkpoint_interval="200 ms")
    source = {"interval": "300 ms", **source}
    stream = env.read_kafka(kafka.servers, topic, schema={"n": int, "who": int}, **source).uid("in")
    counted = stream.key_by("who").process(Counted(), schema={"who": int, "n": int, "rows": int}).uid("counted")
    counted.write_parquet(directory / "out").uid("out")
    return env


def written(directory: Path) -> pl.DataFrame:
    files = sorted((directory / "out").glob("**/*.parquet"))
    return (
        pl.concat([pl.read_parquet(file) for file in files])
        if files
        else pl.DataFrame({"n": [], "who": [], "rows": []})
    )


def check_each_once(directory: Path, rows: int) -> None:
    """Every row is there, and the state has seen every row, once."""
    found = written(directory)
    assert sorted(found["n"].to_list()) == list(range(rows))
    for who in range(WHO):
        of_who = sorted(found.filter(pl.col("who") == who)["rows"].to_list())
        assert of_who == list(range(1, len(of_who) + 1)), who


def kill_a_slot(running: Any) -> None:
    os.kill(next(pid for pid in running.status().slot_pids if pid), signal.SIGKILL)


def test_a_live_job_that_resumes_with_a_stop_ends_by_itself(kafka, tmp_path, running):
    topic = kafka.topic(partitions=2)
    kafka.produce(topic, records(0, 50), partition=0)
    live = job(kafka, topic, tmp_path).start(slots=ProcessSlots())
    running.append(live)
    until("rows are written", lambda: written(tmp_path).height == 50)
    live.stop()
    live.wait()
    kafka.produce(topic, records(50, 70), partition=0)
    kafka.grow(topic, 3)
    kafka.produce(topic, records(70, 100), partition=2)
    ending = job(kafka, topic, tmp_path, stop="latest").start(slots=ProcessSlots(), restore_from="latest")
    running.append(ending)
    assert ending.wait(limit_s(60)).state == "finished"
    check_each_once(tmp_path, 100)


def test_every_row_is_there_once_although_a_slot_is_killed(kafka, tmp_path, running):
    topic = kafka.topic(partitions=3)
    for first in range(0, 12_000, 2000):
        kafka.transaction(topic, records(first, first + 2000), partition=first // 4000, commit=True)
        kafka.transaction(topic, records(first, first + 500), partition=first // 4000, commit=False)
    running.append(job(kafka, topic, tmp_path, rows_per_s=5000).start(slots=ProcessSlots()))
    until("something is written", lambda: len(written(tmp_path)))
    kill_a_slot(running[0])
    until("the restart", lambda: running[0].status().restarts)
    until("everything is written", lambda: len(written(tmp_path)) >= 12_000, 90)
    running[0].stop(drain=True, timeout_s=limit_s(60))
    check_each_once(tmp_path, 12_000)


def test_records_that_are_gone_end_the_job_until_it_is_told_to_go_on_without_them(kafka, tmp_path, running):
    topic = kafka.topic()
    kafka.produce(topic, records(0, 1000))
    running.append(job(kafka, topic, tmp_path).start(slots=ProcessSlots()))
    until("all is written", lambda: len(written(tmp_path)) == 1000)
    running[0].stop(timeout_s=limit_s(60))
    kafka.produce(topic, records(1000, 3000))
    kafka.forget(topic, before=2000)
    failing = job(kafka, topic, tmp_path).start(slots=ProcessSlots(), restore_from="latest")
    running.append(failing)
    expected = (
        rf"topic '{topic}', partition 0: reading must resume at offset 1000, and the broker has 2000 to 2999: 1000 "
    )
    with pytest.raises(MidstreamError, match=expected):
        failing.wait(limit_s(60))
    assert failing.status().restarts == 0, "trying again would not bring them back"
    running.append(job(kafka, topic, tmp_path, on_gap="skip").start(slots=ProcessSlots(), restore_from="latest"))
    until("the rest is written", lambda: len(written(tmp_path)) == 2000)
    running[2].stop(drain=True, timeout_s=limit_s(60))
    assert sorted(written(tmp_path)["n"].to_list()) == [*range(1000), *range(2000, 3000)]


def test_a_topic_that_is_recreated_while_a_job_reads_it_ends_the_job_and_every_one_that_resumes(
    kafka, tmp_path, running
):
    topic = kafka.topic()
    kafka.produce(topic, records(0, 1000))
    running.append(job(kafka, topic, tmp_path).start(slots=ProcessSlots()))
    until("all is written", lambda: len(written(tmp_path)) == 1000)
    kafka.delete(topic)
    assert kafka.topic() == topic
    kafka.produce(topic, records(5000, 7000))
    recreated = f"topic '{topic}' was deleted and recreated"
    with pytest.raises(MidstreamError, match=f"{recreated}|topic '{topic}'.* has disappeared"):  # as discovery met it
        running[0].wait(limit_s(60))
    running.append(job(kafka, topic, tmp_path).start(slots=ProcessSlots(), restore_from="latest"))
    with pytest.raises(MidstreamError, match=recreated):
        running[1].wait(limit_s(60))


def test_a_job_with_an_end_does_not_resume_in_a_topic_that_was_recreated(kafka, tmp_path, running):
    topic = kafka.topic()
    kafka.produce(topic, records(0, 1000))
    first = job(kafka, topic, tmp_path, stop="latest", rows_per_s=200)
    running.append(first.start(slots=ProcessSlots()))
    until("something is written", lambda: len(written(tmp_path)) > 0)
    running[0].stop(timeout_s=limit_s(60))
    before = len(written(tmp_path))
    assert before < 1000
    kafka.delete(topic)
    assert kafka.topic() == topic
    kafka.produce(topic, records(5000, 7000))
    again = job(kafka, topic, tmp_path, stop="latest")
    running.append(again.start(slots=ProcessSlots(), restore_from="latest"))
    with pytest.raises(MidstreamError, match=f"topic '{topic}' was deleted and recreated"):
        running[1].wait(limit_s(60))
    assert running[1].status().restarts == 0, "trying again would not bring its records back"
    assert len(written(tmp_path)) == before


@own_broker_only
def test_new_partitions_a_rescale_and_a_broker_that_crashes_cost_no_row(kafka, kafka_broker: Broker, tmp_path, running):
    topic = kafka.topic(partitions=2)
    kafka.produce(topic, records(0, 1000))
    running.append(job(kafka, topic, tmp_path, options=BACK_SOON).start(slots=ProcessSlots()))
    until("the first rows are written", lambda: len(written(tmp_path)) == 1000)
    kafka.grow(topic, 5)
    kafka.produce(topic, records(1000, 2000), partition=4)
    until("those of the new partition are", lambda: len(written(tmp_path)) == 2000)
    running[0].rescale(3)
    kafka_broker.stop(crash=True)
    kafka_broker.start()
    kafka.produce(topic, records(2000, 3000), partition=3)
    until("those after the crash are", lambda: len(written(tmp_path)) == 3000, 90)
    running[0].stop(drain=True, timeout_s=limit_s(60))
    check_each_once(tmp_path, 3000)


@own_broker_only
def test_brokers_that_are_gone_are_in_the_status_until_they_answer(kafka, kafka_broker: Broker, tmp_path, running):
    source, sink = kafka.topic("in", partitions=3), kafka.topic("out")
    kafka.produce(source, records(0, 1000))
    env = Environment("kafka", parallelism=2, checkpoint_dir=tmp_path / "state", checkpoint_interval="300 ms")
    stream = env.read_kafka(kafka.servers, source, schema={"n": int}, rows_per_s=150, options=BACK_SOON).uid("in")
    others = env.source(Held(from_rows([{"n": n} for n in range(100)]), tmp_path / "gone", first=0)).uid("others")
    stream.union(others).write_kafka(kafka.servers, sink, options=BACK_SOON).uid("out")
    running.append(env.start(slots=ProcessSlots()))
    until("something is committed", lambda: kafka.read(sink))
    kafka_broker.stop(crash=True)
    (tmp_path / "gone").touch()  # so that there are rows to commit, whatever was read of the topic before

    def said() -> set[str]:
        return {wait.what for wait in running[0].status().waiting if wait.what.startswith("brokers")}

    gone = f"brokers {kafka.servers} of topic"
    reads = f"{gone} {source!r}"
    writes = {f"{gone} {sink!r}, to {step} rows" for step in ("stage", "commit")}  # what a subtask was about to do

    def is_complete() -> bool:
        waits = said()
        return reads in waits and bool(waits & writes) and waits <= {reads, *writes}

    until("the status has both brokers that are waited for", is_complete, 90, found=said)
    kafka_broker.start()
    until("the status has them no more, though there are no new records", lambda: not said(), 90, found=said)
    until("all is committed", lambda: len(kafka.read(sink)) == 1100, 90)


def test_a_job_goes_on_from_its_checkpoint_and_the_group_says_how_far_it_is(kafka, tmp_path, running):
    from confluent_kafka import Consumer, TopicPartition

    topic = kafka.topic(partitions=4)
    options = {"group.id": f"{topic}-group"}
    kafka.produce(topic, records(0, 3000))
    running.append(job(kafka, topic, tmp_path, options=options).start(slots=ProcessSlots()))
    until("all is written", lambda: len(written(tmp_path)) == 3000)
    running[0].stop(timeout_s=limit_s(60))
    kafka.produce(topic, records(3000, 5000))
    again = job(kafka, topic, tmp_path, options=options, start="latest")
    running.append(again.start(slots=ProcessSlots(), restore_from="latest", parallelism=3))
    until("the rest is written", lambda: len(written(tmp_path)) == 5000)
    watcher = Consumer({"bootstrap.servers": kafka.servers, **options})
    places = [TopicPartition(topic, partition) for partition in range(4)]

    def lag() -> int:
        ends = [watcher.get_watermark_offsets(place, timeout=limit_s(10))[1] for place in places]
        return sum(ends) - sum(max(at.offset, 0) for at in watcher.committed(places, timeout=limit_s(10)))

    until("the group has no lag", lambda: lag() == 0)
    watcher.close()
    running[1].stop(drain=True, timeout_s=limit_s(60))
    check_each_once(tmp_path, 5000)


def test_a_sink_has_every_row_at_least_once_and_in_order_of_its_key(kafka, tmp_path, running):
    source, sink = kafka.topic("in", partitions=2), kafka.topic("out", partitions=2)
    for partition in range(2):
        kafka.produce(source, records(partition * 4000, (partition + 1) * 4000), partition=partition)
    env = Environment("kafka", parallelism=2, checkpoint_dir=tmp_path, checkpoint_interval="200 ms")
    schema = {"n": int, "who": int}
    stream = env.read_kafka(kafka.servers, source, schema=schema, rows_per_s=4000, interval="300 ms").uid("in")
    counted = stream.key_by("who").process(Counted(), schema={"who": int, "n": int, "rows": int}).uid("counted")
    named = counted.with_columns(key=pl.col("who").cast(pl.String))
    named.write_kafka(kafka.servers, sink, key="key", guarantee="at_least_once").uid("out")
    running.append(env.start(slots=ProcessSlots()))
    until("something is written", lambda: kafka.read(sink))
    kill_a_slot(running[0])
    until("the restart", lambda: running[0].status().restarts)

    def found() -> list[dict[str, int]]:
        return [json.loads(message.value()) for message in kafka.read(sink)]

    until("every row is there", lambda: {row["n"] for row in found()} >= set(range(8000)), 90)
    running[0].stop(drain=True, timeout_s=limit_s(60))
    rows = found()
    assert {row["n"] for row in rows} == set(range(8000))
    for who in range(WHO):
        counts = [row["rows"] for row in rows if row["who"] == who]
        # What comes again after the failure begins anew at the checkpoint: beside that it only rises.
        steps = Counter(after - before for before, after in itertools.pairwise(counts))
        assert [step for step in steps if step > 1] == [] and steps[1] >= len(set(counts)) - 1
        assert sum(count for step, count in steps.items() if step <= 0) <= 2


def test_event_time_waits_for_the_slowest_partition(kafka, tmp_path):
    topic = kafka.topic(partitions=2)
    for partition, rows in ((0, 3000), (1, 600)):
        ahead = [
            json.dumps({"at": f"2024-05-01T{n // 3600:02}:{n // 60 % 60:02}:{n % 60:02}"}).encode() for n in range(rows)
        ]
        kafka.produce(topic, ahead, partition=partition)
    env = Environment("kafka", parallelism=1)
    stream = env.read_kafka(kafka.servers, topic, schema={"at": pl.Datetime("us")}, stop="latest")
    timed = stream.with_watermarks("at", WatermarkStrategy.monotonous())
    minutes = timed.window_all(tumbling("1 min")).aggregate(rows=Rows()).collect()
    env.execute(slots=ProcessSlots())
    assert minutes.frame()["rows"].to_list() == [120] * 10 + [60] * 40


@pytest.mark.parametrize("given", ["literal", "env"])
def test_a_password_opens_the_door_and_is_nowhere_else(
    kafka_broker: Broker, tmp_path, running, monkeypatch, caplog, given
):
    kafka = Kafka(kafka_broker.servers)
    source, sink = kafka.topic("in"), kafka.topic("out")
    kafka.produce(source, records(0, 500))
    kafka.allow(source, "READ")
    kafka.allow(sink, "WRITE")
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    options = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": PASSWORD if given == "literal" else "env:KAFKA_PASSWORD",
    }
    env = Environment("kafka", checkpoint_dir=tmp_path, checkpoint_interval="100 ms")
    stream = env.read_kafka(
        kafka_broker.secured, source, schema={"n": int}, stop="latest", options=options, rows_per_s=500
    )
    stream.write_kafka(kafka_broker.secured, sink, guarantee="at_least_once", options=options)
    shown = [env.explain()]
    caplog.set_level("DEBUG")
    running.append(env.start(slots=ProcessSlots()))
    until("there is a checkpoint", lambda: any(tmp_path.glob("**/*")))
    shown += [repr(running[0].status()), repr(running[0].wait(limit_s(60))), caplog.text]
    assert len(kafka.read(sink)) == 500
    assert not [text for text in shown if PASSWORD in text]
    files = [path for path in tmp_path.glob("**/*") if path.is_file()]
    assert files and not [path for path in files if PASSWORD.encode() in path.read_bytes()]
