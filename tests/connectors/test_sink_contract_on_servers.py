"""`testing.check_sink` for the sinks that write to servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg
import pytest

from kafka_broker import Kafka
from midstream import testing
from midstream.connectors.kafka.kafka_sink import KafkaSink
from midstream.connectors.postgres.postgres_sink import PostgresSink
from midstream.testing.sinks import Target

ROWS = [{"n": n, "text": f"row {n}"} for n in range(12)]


def check(target: Callable[[], Target], op: str | None) -> None:
    if op is None:
        testing.check_sink(target, {"n": int, "text": str}, ROWS)
        return

    def with_operations() -> Target:
        sink, read = target()
        return sink, lambda: [{**row, op: "insert"} for row in read()]

    testing.check_sink(with_operations, {"n": int, "text": str, op: str}, [{**row, op: "insert"} for row in ROWS])


@pytest.mark.parametrize(
    "options",
    [{}, {"key": ["n"]}, {"key": ["n"], "op": "op"}, {"evolve": True}],
    ids=["append", "keyed", "operations", "evolve"],
)
def test_the_postgres_sink_keeps_to_it(database: str, options: dict[str, Any]) -> None:
    numbers = count()

    def target() -> Target:
        table = f"numbers_{next(numbers)}"
        columns = "n bigint" if "evolve" in options else "n bigint PRIMARY KEY, text text"

        def read() -> Iterator[dict[str, Any]]:
            with psycopg.connect(database, autocommit=True) as connection:
                for n, text in connection.execute(f"SELECT n, text FROM {table}").fetchall():
                    yield {"n": n, "text": text}

        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {table} ({columns})")
        return PostgresSink(database, table, **options), read

    check(target, options.get("op"))


@pytest.mark.timeout(600)
def test_the_kafka_sink_keeps_to_it(kafka: Kafka) -> None:
    numbers = count()

    def target() -> Target:
        topic = kafka.topic(f"in-{next(numbers)}", partitions=2)

        def read() -> list[dict[str, Any]]:
            return [json.loads(message.value() or b"") for message in kafka.read(topic)]

        return KafkaSink(kafka.servers, topic), read

    check(target, None)
