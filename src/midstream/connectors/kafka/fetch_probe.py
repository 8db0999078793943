"""Decides how a process reads Kafka: from the client's memory if a probe shows that this is right here, else as objects.

What the fast reader relies on is not all part of an interface (see `fetched_records`): where a consumer has its handle, and
which events come through which queue. A wrong guess ends or hangs the process. So the probe is a process of its own, with
the same Python and the same libraries, started once in each process that reads Kafka, before it opens its first
partition. It reads records that it has written, with keys, times, headers and without, and the client's reports, both
ways, from the mock cluster that librdkafka contains. Only if both ways give what was written, and the process ends as it
should, records are read from memory.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from typing import Any, Final

import confluent_kafka
from confluent_kafka import Consumer, KafkaError, Producer

from midstream.connectors.common import external_waits as outside
from midstream.connectors.common.external_waits import ExternalWait
from midstream.connectors.kafka.fetched_records import FetchClient, Fetcher, MemoryFetcher, ObjectFetcher
from midstream.connectors.kafka.shared_consumer import SharedConsumers
from midstream.engine.core.errors import InvariantError, StorageError

_LIMIT_S: Final = 60.0
"""The time for the probe, which takes 0.7 s on an idle machine; a client that hangs costs this once."""
_TOPIC: Final = "probe"
_TOPIC_BYTES_MAX: Final = 512
"""For longer names the client returns a null pointer, which confluent-kafka does not expect. Brokers allow up to 249."""
_RECORDS: Final = 300
_SIZES: Final = (None, 0, 1, 3, 4, 11, 12, 13, 63, 64, 1_000, 70_000)
"""Sizes of values and keys. Arrow stores up to 12 bytes differently; None: there is none."""
_METADATA: Final = ("topic", "partition", "offset", "timestamp", "key")
_PROBE: Final = "from midstream.connectors.kafka.fetch_probe import probe; probe()"
_lock: Final = threading.Lock()
_log = logging.getLogger(__name__)


def new_fetcher(
    consumers: SharedConsumers,
    new_consumer: Callable[[Callable[[KafkaError], None]], Consumer],
    topic: str,
    partition: int,
    metadata: Collection[str],
    errors: Callable[[KafkaError], None],
) -> Fetcher:
    """`new_consumer`: makes one with this `error_cb`. `metadata`: the parts of records that are needed besides their
    values. `errors`: is called for errors of the consumer, within calls of the fetcher.
    """
    if len(topic.encode()) > _TOPIC_BYTES_MAX:
        raise StorageError(f"Kafka's client cannot read a topic of so long a name: {topic}")
    client = None if "headers" in metadata else probed_client()
    if client is None:
        return ObjectFetcher(new_consumer(errors), topic, partition)
    return MemoryFetcher(consumers, lambda: new_consumer(_ignore), client, topic, partition, errors)


def _ignore(error: KafkaError) -> None:
    """Take the place of the callback that `SharedConsumer` sets, until it is set: confluent-kafka needs one."""


def probed_client() -> FetchClient | None:
    """Return the calls for reading from memory; None if that is not right here, which the log and the status report."""
    with _lock:  # several threads open partitions
        return _probed()


@cache
def _probed() -> FetchClient | None:
    why = refusal()
    if why is None:
        return FetchClient(confluent_kafka.cimpl.__file__)
    text = (
        f"records of Kafka are read as Python objects, which takes about twice the processor time: confluent-kafka "
        f"{confluent_kafka.__version__} with librdkafka {confluent_kafka.libversion()[0]} was probed, and {why}"
    )
    _log.warning("%s", text)
    outside.warn(text)
    return None


def refusal(program: str = _PROBE, limit_s: float = _LIMIT_S) -> str | None:
    """Run the probe in a process of its own, and return why records must not be read from memory; None if they may."""
    command = [sys.executable, "-P", "-c", program]
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    wait = ExternalWait()
    wait.begin("the probe of Kafka's client")
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the probe did not end within {limit_s:g} s"
    except (OSError, ValueError) as error:
        return f"the probe could not be started: {error}"
    finally:
        wait.end()
    last = done.stderr.strip().rpartition("\n")[2]
    if done.returncode < 0:
        return f"the probe was ended by signal {-done.returncode} ({signal.strsignal(-done.returncode)})"
    if done.returncode:
        return f"the probe failed: {last or f'exit status {done.returncode}'}"
    if done.stdout != _libraries():
        return f"the probe used other libraries: {done.stdout!r} and not {_libraries()!r}"
    return None


def _libraries() -> str:
    """Return what the probe has in common with the process that it is for."""
    return json.dumps(
        [sys.version, confluent_kafka.cimpl.__file__, confluent_kafka.__version__, confluent_kafka.libversion()]
    )


# ---- in the process of the probe ----


def probe() -> None:
    """Compare both ways of reading, and print which libraries were used. Raises where they differ."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(round(_LIMIT_S))  # the process for which this is may have been killed
    client = FetchClient(confluent_kafka.cimpl.__file__)
    if client.version() != confluent_kafka.libversion()[1]:
        raise InvariantError("there is another librdkafka as well as that of confluent-kafka")
    cluster = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "linger.ms": 1})
    servers = ",".join(
        f"{broker.host}:{broker.port}" for broker in cluster.list_topics(timeout=_LIMIT_S).brokers.values()
    )
    written = _write(cluster)
    found = _Ways(servers, None), _Ways(servers, client)
    for rows_max in (_RECORDS, 7):
        for way in found:
            rows = way.records(rows_max)
            _check("the number of records", len(rows), len(written))
            for row, wanted in zip(rows, written, strict=True):
                for name in wanted:
                    _check(f"the {name} of record {wanted['offset']}", row[name], wanted[name])
    for way in found:
        _check("the report of an offset out of range", way.report_of(_RECORDS + 1), [KafkaError._AUTO_OFFSET_RESET])
        _check("the error of an unknown partition", way.error_of(999), KafkaError._UNKNOWN_PARTITION)
    sys.stdout.write(_libraries())


def _check(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise InvariantError(f"{what}: {str(found)[:100]} was read in place of {str(wanted)[:100]}")


def _write(producer: Any) -> list[dict[str, Any]]:
    """Write records of all sizes to partition 1, and return what a reader should find."""
    contents = [None if size is None else bytes(at * 37 % 251 for at in range(size)) for size in _SIZES]
    rows = []
    for at in range(_RECORDS):
        value, key = contents[at % len(contents)], contents[at // len(contents) % len(contents)]
        headers = [("a", None), ("a", b""), ("", b"x")] if at % 5 == 0 else None
        ms = 1_700_000_000_000 + at * 1_001
        producer.produce(_TOPIC, value, key, 1, timestamp=ms, headers=headers)
        rows.append({"value": value, "topic": _TOPIC, "partition": 1, "offset": at, "timestamp": ms, "key": key})
    _check("records that could not be written", producer.flush(_LIMIT_S), 0)
    return rows


class _Ways:
    """One way to read: from memory with a client, as objects without."""

    def __init__(self, servers: str, client: FetchClient | None) -> None:
        self._servers = servers
        self._client = client

    def records(self, rows_max: int) -> list[dict[str, Any]]:
        """Read partition 1 from its beginning to its end."""
        import pyarrow as pa

        rows: list[dict[str, Any]] = []
        with self._fetcher(1, []) as fetcher:
            fetcher.assign(0)
            while True:
                records, reports = fetcher.take(rows_max)
                if len(records):
                    columns = {"value": records.values(), **{what: records.metadata(what) for what in _METADATA}}
                    columns["timestamp"] = columns["timestamp"].cast(pa.int64())
                    rows += pa.table(columns).to_pylist()
                    _check("the last offset", records.offset(-1), rows[-1]["offset"])
                if reports:
                    codes = [(error.code(), at) for error, at in reports]
                    _check("the report of the end", codes, [(KafkaError._PARTITION_EOF, len(rows))])
                    return rows
                if not len(records):
                    time.sleep(0.001)

    def report_of(self, offset: int) -> object:
        """Return what is reported of an offset that no record has."""
        with self._fetcher(1, []) as fetcher:
            fetcher.assign(offset)
            while not (reports := fetcher.take(_RECORDS)[1]):
                time.sleep(0.001)
            return [error.code() for error, _ in reports]

    def error_of(self, partition: int) -> object:
        """Return the first error that the callback is given for a partition that does not exist."""
        errors: list[KafkaError] = []
        with self._fetcher(partition, errors) as fetcher:
            fetcher.assign(0)
            while not errors:
                records, reports = fetcher.take(_RECORDS)
                _check("records and reports of an unknown partition", (len(records), reports), (0, []))
                time.sleep(0.001)
        return errors[0].code()

    @contextmanager
    def _fetcher(self, partition: int, errors: list[KafkaError]) -> Iterator[Fetcher]:
        config = {
            "bootstrap.servers": self._servers,
            "group.id": "probe",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 5,
            "topic.metadata.propagation.max.ms": 0,
            "topic.metadata.refresh.interval.ms": 20,
            "error_cb": errors.append,
        }
        place = _TOPIC, partition
        if self._client is None:
            with closing(ObjectFetcher(Consumer(config), *place)) as fetcher:
                yield fetcher
            return
        shared, new = SharedConsumers(), partial(Consumer, config)
        with (
            closing(MemoryFetcher(shared, new, self._client, _TOPIC, 0, _ignore)) as other,
            closing(MemoryFetcher(shared, new, self._client, *place, errors.append)) as reading,
        ):
            came = threading.Event()
            reading.on_rows(came.set)
            yield reading
            if not errors:
                _check("that rows have come is reported", came.wait(_LIMIT_S), True)
                other.assign(0)
                _check("records of another partition", len(other.take(_RECORDS)[0]), 0)
