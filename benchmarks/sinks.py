"""What one subtask puts into a table, and what the commit costs. Needs a database with nothing in it that matters.

python benchmarks/sinks.py 'host=127.0.0.1 dbname=test user=me'      PostgreSQL: add, and replace by key
python benchmarks/sinks.py                                           Delta and Iceberg, in a temporary directory
python benchmarks/sinks.py kafka HOST:PORT TOPIC                     Kafka, exactly once and at least once, into a topic that exists
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.connectors.iceberg.iceberg_sink import IcebergSink
from midstream.connectors.kafka.kafka_sink import KafkaSink
from midstream.connectors.postgres.postgres_sink import PostgresSink
from midstream.engine.core.interfaces import Done, Storage, Timer
from midstream.engine.operators.sink_api import CommitterContext, Sink, WriterContext
from midstream.runtime.storage.file_storage import FileStorage

ROWS = 1_000_000
BATCH_ROWS = 65_536


class AtOnce:
    """An executor without threads."""

    def post(self, mail: Callable[[], None]) -> None:
        mail()

    def call_later(self, delay_s: float, mail: Callable[[], None]) -> Timer:
        raise AssertionError("sinks set no timers")

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        done(Done(work()))


def rows() -> pa.RecordBatch:
    n = np.arange(ROWS)
    who = pa.array([f"user-{i % 5000}" for i in range(ROWS)], pa.large_string())
    x = np.random.default_rng(1).random(ROWS)
    return pa.RecordBatch.from_pydict({"n": n, "who": who, "x": x, "at": pa.array(n * 1000, pa.timestamp("us"))})


def measure(name: str, sink: Sink, batch: pa.RecordBatch, storage: Storage | None = None) -> None:
    def fail(error: BaseException) -> None:
        raise error

    sink.validate(batch.schema, restoring=False)
    job_id = f"{name}-{time.time_ns()}"
    writer = sink.writer(WriterContext("out", "out", 0, 0, job_id, batch.schema, AtOnce(), fail, storage))
    began_s = time.perf_counter()
    for start in range(0, ROWS, BATCH_ROWS):
        writer.write(batch.slice(start, BATCH_ROWS))
    prepare = writer.prepare(1)
    assert prepare is not None
    committables = prepare()
    prepared_s = time.perf_counter()
    committer = sink.committer(CommitterContext("out", "out", job_id, storage, threading.Event()))
    if committer is not None:
        committer.commit(1, committables)
        committer.close()
    committed_s = time.perf_counter()
    rate = ROWS / (prepared_s - began_s)
    print(f"{name:<10} prepared {rate:>11,.0f} rows/s   commit of {ROWS:,} rows {committed_s - prepared_s:.2f} s")


if __name__ == "__main__":
    made = rows()
    if sys.argv[1:2] == ["kafka"]:
        _, _, servers, topic = sys.argv
        with tempfile.TemporaryDirectory() as directory:
            measure(
                "once", KafkaSink(servers, topic, guarantee="exactly_once", key="who"), made, FileStorage(directory)
            )
        measure("at least", KafkaSink(servers, topic, guarantee="at_least_once", key="who"), made)
    elif len(sys.argv) > 1:
        token = time.time_ns()
        measure("add", PostgresSink(sys.argv[1], f"bench_add_{token}"), made)
        measure("by key", PostgresSink(sys.argv[1], f"bench_key_{token}", key=["n"]), made)
    else:
        with tempfile.TemporaryDirectory() as directory:
            measure("delta", DeltaSink(f"{directory}/table"), made)
            catalog = {"type": "sql", "uri": f"sqlite:///{directory}/catalog", "warehouse": f"file://{directory}"}
            for by in ([], ["bucket(16, who)"], ["hour(at)"]):
                table = f"lake.table_{len(by) and by[0][:4]}"
                measure("iceberg", IcebergSink(table, catalog=catalog, partition_by=by), made)
