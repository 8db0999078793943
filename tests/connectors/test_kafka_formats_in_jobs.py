"""Avro and Protobuf through real jobs and a real broker, with bad records aside, while a slot dies and the registry is gone."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from deltalake import DeltaTable

from kafka_broker import Kafka
from machine import limit_s
from midstream import BAD_RECORDS, Environment
from midstream.connectors.formats.avro import AvroEncoder
from midstream.connectors.kafka.fetched_records import ObjectRecords
from midstream.connectors.kafka.record_parser import RecordParser
from midstream.connectors.kafka.schema_registry import header
from midstream.engine.core.arrow_types import schema_of, to_list
from midstream.runtime.process.process_slots import ProcessSlots
from protobuf_samples import Order
from schema_registry_stub import StubRegistry, running_registry
from waiting import until

ROWS = 3_000


def is_bad(n: int) -> bool:
    return n % 10 == 7


def read(out: Path) -> pl.DataFrame:
    files = sorted(out.glob("**/*.parquet"))
    return pl.concat([pl.read_parquet(file) for file in files]) if files else pl.DataFrame({"n": [], "position": []})


def avro(registry: StubRegistry, columns: dict[str, pa.DataType], rows: list[dict[str, Any]]) -> list[bytes | None]:
    """Registered as the newest schema of the subject in-value."""
    schema = pa.schema(list(columns.items()))
    encoder = AvroEncoder(schema, "in", "test")
    schema_id = registry.register("in-value", encoder.avro_schema)
    return [*encoder.encode(pa.RecordBatch.from_pylist(rows, schema), header(schema_id))]


def test_avro_goes_in_and_out_and_what_is_bad_goes_aside_once(
    kafka: Kafka, tmp_path: Path, running: Any, caplog: Any
) -> None:
    source, target = kafka.topic("in", partitions=2), kafka.topic("out")
    with running_registry() as registry:
        values = avro(registry, {"n": pa.int32()}, [{"n": n} for n in range(ROWS)])
        bad = [header(4_000) + (value or b"")[5:] if is_bad(n) else value for n, value in enumerate(values)]
        for partition in range(2):
            kafka.produce(source, bad[partition::2], partition=partition)
        reader = json.dumps(AvroEncoder(schema_of([("n", pa.int64()), ("t", pa.large_string())]), "in", "").avro_schema)
        env = Environment("avro", parallelism=2, checkpoint_dir=tmp_path / "checkpoints", checkpoint_interval="200 ms")
        where = {"url": registry.url}
        stream = env.read_kafka(
            kafka.servers,
            source,
            format="avro",
            schema=reader,
            registry=where,
            on_bad_record="drop",
            bad_records_max=(250, 1_000),
            rows_per_s=2_000,
            interval="300 ms",
        ).uid("in")
        stream.write_parquet(tmp_path / "good").uid("good")
        stream.side_output(BAD_RECORDS).write_parquet(tmp_path / "bad").uid("bad")
        stream.write_kafka(kafka.servers, target, guarantee="at_least_once", format="avro", registry=where).uid("out")
        job = env.start(slots=ProcessSlots())
        running.append(job)
        until("bad records committed", lambda: len(read(tmp_path / "bad")) > 50)
        registry.stop()
        newer = registry.register(
            "in-value", {"type": "record", "name": "in", "fields": [{"name": "t", "type": "string"}]}
        )
        kafka.produce(source, [header(newer) + b"\x02x"])
        os.kill(next(pid for pid in job.status().slot_pids if pid), signal.SIGKILL)
        until("a word of it", lambda: any("waiting at offset" in record.getMessage() for record in caplog.records))
        gone = f"the schema registry of topic {source!r}"
        until("it is in the status", lambda: gone in {wait.what for wait in job.status().waiting})
        registry.start()
        until("all rows", lambda: len(read(tmp_path / "good")) >= ROWS * 9 // 10 + 1, 120)
        assert job.status().restarts >= 1
        until("it is not any more", lambda: gone not in {wait.what for wait in job.status().waiting})
        job.stop(timeout_s=limit_s(60))
        good = read(tmp_path / "good")
        assert sorted(good["n"].drop_nulls().to_list()) == [n for n in range(ROWS) if not is_bad(n)]
        assert good["t"].drop_nulls().to_list() == ["x"]
        aside = read(tmp_path / "bad")
        assert sorted(aside["bytes"].to_list()) == sorted(bad[n] for n in range(ROWS) if is_bad(n))  # type: ignore[type-var]
        assert set(aside["source"]) == {source} and set(aside["partition"]) == {1}, "numbers that end in 7"
        assert all("schema 4000: the schema registry does not have it" in error for error in aside["error"])
        parser = RecordParser("avro", None, (), False, "test", registry=where, subject=f"{target}-value")
        found, _ = parser.rows(ObjectRecords(kafka.read(target)), "target")
        assert set(found.column("n").to_pylist()) == {None, *(n for n in range(ROWS) if not is_bad(n))}


def test_protobuf_goes_in_and_out_once_with_the_key_beside_it(kafka: Kafka, tmp_path: Path, running: Any) -> None:
    source, target = kafka.topic("in", partitions=2), kafka.topic("out")

    def send(first: int, last: int) -> None:
        for partition in range(2):
            numbers = range(first + partition, last, 2)
            values = [Order(id=n, note=f"n{n}", lines=[{"item": "x"}]).SerializeToString() for n in numbers]
            kafka.produce(source, [*values, b"\x08"], partition=partition)

    send(0, 300)
    with running_registry() as registry:
        where = {"url": registry.url}
        env = Environment(
            "protobuf", parallelism=2, checkpoint_dir=tmp_path / "checkpoints", checkpoint_interval="200 ms"
        )
        stream = env.read_kafka(
            kafka.servers,
            source,
            format="protobuf",
            message=Order,
            on_bad_record="drop",
        ).uid("in")
        stream.side_output(BAD_RECORDS).write_parquet(tmp_path / "bad").uid("bad")
        keyed = stream.select("id", "lines", pl.col("note").alias("who"))
        keyed.write_kafka(kafka.servers, target, format="protobuf", message=Order, registry=where, key="who").uid("out")
        job = env.start(slots=ProcessSlots())
        running.append(job)
        until("rows are committed", lambda: kafka.read(target))
        os.kill(next(pid for pid in job.status().slot_pids if pid), signal.SIGKILL)
        until("its end is noticed", lambda: job.status().restarts)
        send(300, 600)
        until("all rows are committed", lambda: len(kafka.read(target)) >= 600, 90)
        job.stop(drain=True, timeout_s=limit_s(60))
        written = kafka.read(target)
        parser = RecordParser("protobuf", None, (), False, "test", registry=where, message=Order)
        rows, _ = parser.rows(ObjectRecords(written), "target")
    assert sorted(to_list(rows.column("id"))) == list(range(600))
    assert rows.column("lines").to_pylist() == [[{"item": "x", "count": None}]] * 600
    assert [record.key() for record in written] == [f"n{n}".encode() for n in rows.column("id").to_pylist()]
    assert len(read(tmp_path / "bad")) == 4


def test_changes_of_a_database_keep_a_delta_table_equal_to_it(kafka: Kafka, tmp_path: Path, running: Any) -> None:
    """Debezium's envelopes, keyed as Debezium keys them; a slot is killed on the way."""
    topic, draws = kafka.topic("in", partitions=2), random.Random(1)
    rows: dict[int, int] = {}
    sent: list[list[bytes | None]] = [[], []]
    for n in range(4_000):
        key = draws.randrange(100)
        old = {"id": key, "v": rows[key]} if key in rows else None
        if old is not None and draws.random() < 0.3:
            del rows[key]
            envelopes: list[dict[str, Any] | None] = [{"op": "d", "before": old, "after": None}, None]
        else:
            rows[key] = n
            envelopes = [{"op": "c" if old is None else "u", "before": old, "after": {"id": key, "v": n}}]
        sent[key % 2] += [None if each is None else json.dumps(each).encode() for each in envelopes]
    for partition, values in enumerate(sent):
        kafka.produce(topic, values, partition=partition)
    env = Environment("copy", parallelism=2, checkpoint_dir=tmp_path / "checkpoints", checkpoint_interval="200 ms")
    changes = env.read_kafka(
        kafka.servers, topic, format="debezium", schema={"id": int, "v": int}, stop="latest", rows_per_s=2_000
    ).uid("in")
    changes.write_delta(tmp_path / "copy", key=["id"], op="_op").uid("out")
    job = env.start(slots=ProcessSlots())
    running.append(job)
    until(
        "something committed",
        lambda: DeltaTable.is_deltatable(tmp_path / "copy") and DeltaTable(tmp_path / "copy").version(),
    )
    os.kill(next(pid for pid in job.status().slot_pids if pid), signal.SIGKILL)
    job.wait(limit_s(60))
    assert job.status().restarts == 1
    assert dict(pl.read_delta(str(tmp_path / "copy")).select("id", "v").rows()) == rows


def test_a_column_that_a_database_gets_reaches_the_table_after_a_change_of_the_program(
    kafka: Kafka, tmp_path: Path, running: Any
) -> None:
    topic, copy = kafka.topic("in", partitions=2), tmp_path / "copy"

    def produce(*rows: dict[str, Any]) -> None:
        for row in rows:
            envelope = {"op": "u", "before": None, "after": row}
            kafka.produce(topic, [json.dumps(envelope).encode()], partition=row["id"] % 2)

    def start(schema: dict[str, type], **options: Any) -> Any:
        env = Environment("copy", parallelism=2, checkpoint_dir=tmp_path / "checkpoints", checkpoint_interval="200 ms")
        changes = env.read_kafka(kafka.servers, topic, format="debezium", schema=schema).uid("in")
        changes.write_delta(copy, key=["id"], op="_op", evolve=True).uid("out")
        running.append(env.start(slots=ProcessSlots(), **options))
        return running[-1]

    def rows() -> dict[int, Any]:
        if not DeltaTable.is_deltatable(copy):
            return {}
        return {row["id"]: row for row in pl.read_delta(str(copy)).to_dicts()}

    produce({"id": 1, "v": 10}, {"id": 2, "v": 20})
    job = start({"id": int, "v": int})
    until("the rows", lambda: len(rows()) == 2)
    produce({"id": 1, "v": 11, "city": "Bern"})  # the program does not have the column yet
    until("the update", lambda: rows()[1]["v"] == 11)
    job.stop(savepoint=tmp_path / "saved", timeout_s=limit_s(60))
    produce({"id": 2, "v": 21, "city": "Rome"}, {"id": 3, "v": 30, "city": None})
    job = start({"city": str, "id": int, "v": int}, restore_from=tmp_path / "saved")
    until("the rest", lambda: len(rows()) == 3 and rows()[2]["v"] == 21)
    job.stop(drain=True, timeout_s=limit_s(60))
    assert rows() == {
        1: {"id": 1, "v": 11, "city": None},
        2: {"id": 2, "v": 21, "city": "Rome"},
        3: {"id": 3, "v": 30, "city": None},
    }
