"""Rows into a Kafka topic, exactly once or at least once.

Exactly once: each subtask stages its rows in the checkpoint storage (`staged_writer`), and when the checkpoint is
complete they go into the topic in one short transaction (`committer`). No transaction is open across a
checkpoint, so none can time out while the job is down, and a row is visible only if its checkpoint is complete.

At least once: one producer per subtask; librdkafka batches, retries and keeps the order of what it sends (idempotence).
A checkpoint waits until the brokers have acknowledged all rows before its barrier. After a failure the rows after the
last checkpoint are sent again.
"""

from __future__ import annotations

import io
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from midstream.connectors.common.async_writer import AsyncPart, AsyncWriter
from midstream.connectors.files.encoders import check_encodable, new_encoder
from midstream.connectors.kafka.client import (
    NO_PARTITION,
    BrokerSilence,
    ClientConfig,
    OptionValue,
    Record,
    as_headers,
    convert_errors,
    convert_option_errors,
    send_all,
)
from midstream.connectors.kafka.cluster import KafkaCluster
from midstream.connectors.kafka.committer import KafkaCommitter
from midstream.connectors.kafka.record_parser import HEADERS, KafkaFormat, check_written_format
from midstream.connectors.kafka.staged_records import decode
from midstream.connectors.kafka.staged_writer import StagedWriter
from midstream.connectors.kafka.transactional_producer import TIMEOUT, check_transactions
from midstream.engine.core.errors import ConfigError, InvariantError, SchemaError, StorageError
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.operators.row_conversion import require_columns
from midstream.engine.operators.sink_api import (
    CommittedOutput,
    Committer,
    CommitterContext,
    Sink,
    SinkWriter,
    WriterContext,
)

if TYPE_CHECKING:
    from midstream.connectors.kafka.record_parser import Described

Guarantee: TypeAlias = Literal["exactly_once", "at_least_once"]
_GUARANTEES: Final = ("exactly_once", "at_least_once")

_OURS: Final = {
    "acks": "rows count as written when all in-sync replicas have them",
    "request.required.acks": "rows count as written when all in-sync replicas have them",
    "enable.idempotence": "it is on, or retries could change the order",
    "transactional.id": "the sink has one for each of its subtasks; all begin with midstream-",
    "delivery.report.only.error": "the sink needs it",
    "error_cb": "the sink needs it",
    "on_delivery": "the sink needs it",
}
_DEFAULTS: Final = {
    "partitioner": "murmur2_random",  # what Kafka's own clients do with keys
    "queue.buffering.max.kbytes": 65_536,
    "linger.ms": 5,
}
_STEP_S: Final = 0.2
"""The interval at which a wait for brokers checks whether the attempt has ended."""
_RECORD_BYTES_MAX: Final = 1_000_000
"""The default of librdkafka's `message.max.bytes`."""
_OVERHEAD_BYTES: Final = 512
"""More than the size of a record, or of a batch of one record, besides key, value and headers."""


class KafkaSink(Sink):
    """Writes every row once to a topic of a Kafka cluster (2.5 or later), in order per partition and subtask.

    The sink waits for brokers that do not answer. With "exactly_once", rows wait in the checkpoint for as long as
    necessary. Columns of headers and partition are not in the value.

    The arguments are those of `DataStream.write_kafka`.

    Raises ConfigError for invalid arguments; columns and cluster are checked when the job starts.

        orders.sink(KafkaSink("kafka-1:9092", "orders", key="user")).uid("orders-topic")
    """

    commits_on_slots: ClassVar[bool] = True

    def __init__(
        self,
        servers: str | Sequence[str],
        topic: str,
        *,
        guarantee: Guarantee = "exactly_once",
        format: KafkaFormat = "json",
        key: str | None = None,
        headers: str | None = None,
        partition: str | None = None,
        registry: Mapping[str, OptionValue] | None = None,
        message: object = None,
        options: Mapping[str, OptionValue] | None = None,
    ) -> None:
        if not isinstance(topic, str) or not topic:
            raise ConfigError(f"KafkaSink: topic={topic!r} is not a name")
        self.topic = topic
        self._where = f"KafkaSink on {topic}"
        if guarantee not in _GUARANTEES:
            raise ConfigError(f"{self._where}: guarantee {guarantee!r} is not one of {', '.join(_GUARANTEES)}")
        self._described = check_written_format(format, registry, message, topic, self._where)
        for what, name in (("key", key), ("headers", headers), ("partition", partition)):
            if name is not None and not isinstance(name, str):
                raise ConfigError(f"{self._where}: {what}={name!r} is not the name of a column")
        self._is_exactly_once = guarantee == "exactly_once"
        self._format = format
        self._key = key
        self._headers = headers
        self._partition = partition
        self._connection = ClientConfig(servers, options, _OURS, self._where)
        if not self._is_exactly_once and self._connection.option(TIMEOUT) is not None:
            raise ConfigError(f"{self._where}: option {TIMEOUT!r} requires guarantee='exactly_once'")

    @property
    def is_transactional(self) -> bool:
        return self._is_exactly_once

    @property
    def needs_checkpoints(self) -> bool:
        return self._is_exactly_once

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        """Check columns and cluster; with "exactly_once", try a transaction and undo it.

        Raises SchemaError for columns without a form in the format, ConfigError for what is missing in the cluster,
        StorageError if it does not answer.
        """
        Encoding(self, schema, self._where).register()
        self._producer(BrokerSilence(self._where, self._connection.servers), _sends_nothing)  # checks the options
        with closing(KafkaCluster(self._connection, self._where)) as cluster:
            cluster.check_writable(self.topic)
            if self._is_exactly_once:
                self._check_record_bytes(cluster)
                check_id = f"midstream-check-{secrets.token_hex(8)}"
                check_transactions(self._connection, _DEFAULTS, self.topic, check_id, self._where)

    def datasets(self) -> Sequence[str]:
        return self._connection.datasets([self.topic])

    def check_committables(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Raise StorageError for what no such sink has staged."""
        for committable in committables:
            decode(committable)

    def writer(self, context: WriterContext) -> SinkWriter:
        if not self._is_exactly_once:
            return _KafkaWriter(self, context)
        where = f"operator {context.name!r}: {self._where}"
        if context.storage is None:
            raise ConfigError(
                f"{where}: guarantee='exactly_once' needs checkpoints, and the job has none; give "
                "Environment(checkpoint_dir=…), or "
                "write with guarantee='at_least_once'"
            )
        encoding = Encoding(self, context.schema, where)
        record_bytes_max = self._record_bytes_max - _OVERHEAD_BYTES
        return StagedWriter(context, context.storage, self._connection, self.topic, encoding, record_bytes_max, where)

    def committer(self, context: CommitterContext) -> Committer | None:
        """Return a committer, also with "at_least_once": the checkpoint to resume from may be from an exactly-once
        sink.
        """
        return KafkaCommitter(self._connection, _DEFAULTS, context, f"operator {context.name!r}: {self._where}")

    def lane(self, committable: bytes) -> int:
        return decode(committable).subtask

    def check_rollback(self, output: CommittedOutput, after: int) -> None:
        raise ConfigError(f"{self._where}: rows cannot be removed from a topic")

    # ---- for this module

    @property
    def _record_bytes_max(self) -> int:
        value = self._connection.option("message.max.bytes")
        try:
            return _RECORD_BYTES_MAX if value is None else int(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ConfigError(
                f"{self._where}: option 'message.max.bytes' is {value!r}, which is not a number"
            ) from None

    def _check_record_bytes(self, cluster: KafkaCluster) -> None:
        """Check that the topic accepts what the sink accepts: a refusal after the checkpoint is complete would come too
        late.
        """
        limit = cluster.record_bytes_max(self.topic)
        if limit is not None and limit < self._record_bytes_max + _OVERHEAD_BYTES:
            raise ConfigError(
                f"{self._where}: the topic accepts records of up to {limit} bytes (max.message.bytes), and the sink "
                "would send up "
                f"to {self._record_bytes_max}; raise the topic's limit to {self._record_bytes_max + _OVERHEAD_BYTES}, or give "
                f"options={{'message.max.bytes': {max(limit - _OVERHEAD_BYTES, 1000)}}}"
            )

    def _producer(self, silence: BrokerSilence, delivered: Callable[[KafkaError | None, Message], None]) -> Producer:
        ours = {
            "enable.idempotence": True,
            "delivery.report.only.error": True,
            "error_cb": silence.on_error,
            "on_delivery": delivered,
        }
        with convert_option_errors(self._where):
            return Producer({**_DEFAULTS, **self._connection.config(ours)})


class _KafkaWriter(AsyncWriter):
    """Sends rows through one queue for all checkpoints, which keeps their order."""

    def __init__(self, sink: KafkaSink, context: WriterContext) -> None:
        self._records = _Records(sink, context)
        super().__init__(context, lambda: self._records)

    def close(self) -> None:
        self._records.stopped.set()
        super().close()
        self._context.executor.submit(self._records.forget, _ignore)


class _Records(AsyncPart):
    """The one part of a writer: a checkpoint waits until all of it is delivered."""

    def __init__(self, sink: KafkaSink, context: WriterContext) -> None:
        super().__init__()
        self.stopped = threading.Event()
        """Set when the attempt has ended, which stops waits for brokers."""
        self._sink = sink
        self._where = f"operator {context.name!r}: {sink._where}"
        self._encoding = Encoding(sink, context.schema, self._where)
        self._silence = BrokerSilence(
            self._where, sink._connection.servers, what_for=f"of topic {sink.topic!r}, to deliver rows"
        )
        self._producer: Producer | None = None
        self._lost: KafkaError | None = None

    def finish(self, checkpoint_id: int) -> Sequence[bytes]:
        with self._turn:
            self._take_all()
            self._deliver()
        return ()

    def forget(self) -> None:
        """Drop what is not delivered: the next attempt sends it again."""
        self._silence.close()
        with self._turn:
            producer, self._producer = self._producer, None
            if producer is not None:
                producer.purge()
                producer.flush(0)

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._producer is None:
            self._producer = self._sink._producer(self._silence, self._delivered)
        wait = partial(self._wait, self._producer, self._producer.poll)
        with convert_errors(f"{self._where}: a row cannot be sent"):
            send_all(self._producer, self._sink.topic, self._encoding.records(batch), wait)
        self._check()

    def _deliver(self) -> None:
        producer = self._producer
        while producer is not None and len(producer):
            self._wait(producer, producer.flush)
        self._silence.polled(True)  # nothing is waited for any more

    def _wait(self, producer: Producer, step: Callable[[float], object]) -> None:
        before = len(producer)
        step(_STEP_S)
        self._silence.polled(len(producer) < before)
        self._check()
        if self.stopped.is_set():
            raise StorageError(f"{self._where}: the attempt ended before all rows were delivered")

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        """Note a record that was not delivered; called from within `poll` and `flush`."""
        if error is not None and self._lost is None:
            self._lost = error

    def _check(self) -> None:
        if self._lost is not None:
            with convert_errors(f"{self._where}: a row was not delivered"):
                raise KafkaException(self._lost)

    def _finish(self, checkpoint_id: int) -> Sequence[bytes]:
        raise InvariantError("the part of a direct writer is never finished")

    def _discard(self) -> None: ...


class Encoding:
    """Converts rows to records. Raises SchemaError for columns that do not fit."""

    def __init__(self, sink: KafkaSink, schema: pa.Schema, where: str) -> None:
        format, key, headers, partition = sink._format, sink._key, sink._headers, sink._partition
        described = sink._described
        named = [name for name in (key, headers, partition) if name is not None]
        require_columns(schema, named, where, "column")
        self._sink = sink
        self._where = where
        if key is not None and not _is_text_or_binary(schema.field(key).type):
            raise SchemaError(
                f"{where}: key column {key!r} is {schema.field(key).type}; a key must be a string or binary: cast it, "
                "for example with "
                f"with_columns(pl.col({key!r}).cast(pl.String))"
            )
        if headers is not None and not _is_headers(schema.field(headers).type):
            raise SchemaError(
                f"{where}: headers column {headers!r} is {schema.field(headers).type}; headers are a list of structs "
                "of 'name' (string) and 'value' (string or binary)"
            )
        if partition is not None and schema.field(partition).type not in (pa.int32(), pa.int64()):
            raise SchemaError(
                f"{where}: partition column {partition!r} is {schema.field(partition).type}, not int32 or int64"
            )
        left = [name for name in schema.names if name not in (headers, partition)]
        if key is not None and not self._stays(key, schema.field(key).type, described):
            left.remove(key)
        self._columns = left
        values = pa.schema([schema.field(name) for name in left])
        self._described = None if described is None else described.bound(values)
        if described is not None:
            return
        if format == "json":
            check_encodable(values, "jsonl", where)
            return
        if len(left) != 1:
            raise SchemaError(
                f"{where}: format {format!r} writes one column, but besides key, headers and partition there are "
                f"{', '.join(left) or 'none'}; select one, or write json"
            )
        kind = values.field(0).type
        if not (_is_text_or_binary(kind) if format == "bytes" else pa.types.is_large_string(kind)):
            raise SchemaError(f"{where}: column {left[0]!r} is {kind}, which is not {format}; cast it first")

    def _stays(self, key: str, kind: pa.DataType, described: Described | None) -> bool:
        """Whether the key is also part of the value."""
        if described is not None and described.fields is not None:
            return key in described.fields
        return self._sink._format in ("json", "avro") and pa.types.is_large_string(kind)

    def register(self) -> None:
        """Register the schema of Avro or Protobuf values, on the driver. Raises ConfigError or StorageError."""
        if self._described is not None:
            self._described.register()

    def records(self, batch: pa.RecordBatch) -> Iterable[Record]:
        rows, key, headers, partition = batch.num_rows, self._sink._key, self._sink._headers, self._sink._partition
        return zip(
            self._values(batch),
            [None] * rows if key is None else _bytes(batch.column(key)),
            [NO_PARTITION] * rows if partition is None else self._partitions(batch.column(partition)),
            [None] * rows if headers is None else map(as_headers, self._checked_headers(batch).to_pylist()),
            strict=True,
        )

    def staged(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the records as columns: `value`, and `key`, `partition` and `headers` where they exist."""
        key, headers, partition = self._sink._key, self._sink._headers, self._sink._partition
        columns: dict[str, pa.Array[Any]] = {"value": pa.array(self._values(batch), pa.large_binary())}
        if key is not None:
            columns["key"] = batch.column(key).cast(pa.large_binary())
        if partition is not None:
            self._partitions(batch.column(partition))
            columns["partition"] = batch.column(partition)
        if headers is not None:
            columns["headers"] = self._checked_headers(batch).cast(HEADERS)
        return pa.RecordBatch.from_pydict(columns)

    def _values(self, batch: pa.RecordBatch) -> list[bytes | None]:
        if self._described is not None:
            return self._described.values(batch.select(self._columns))
        if self._sink._format != "json":
            return _bytes(batch.column(self._columns[0]))
        values = batch.select(self._columns)
        text = io.BytesIO()
        encoder = new_encoder("jsonl", text, values.schema)
        encoder.write(values)
        encoder.close()
        lines: list[bytes | None] = [*text.getvalue().split(b"\n")]
        if len(lines) != batch.num_rows + 1 or lines[-1]:
            raise InvariantError(f"{self._where}: {batch.num_rows} rows became {len(lines) - 1} lines of JSON")
        return lines[:-1]

    def _checked_headers(self, batch: pa.RecordBatch) -> pa.Array[Any]:
        """Return the column of headers. Raises SchemaError for one that is null, or has a name that Kafka cannot have."""
        assert self._sink._headers is not None
        column: pa.Array[Any] = batch.column(self._sink._headers)
        each: Any = pc.list_flatten(column)
        names = pc.struct_field(each, "name")
        wrong = pc.or_(names.is_null(), pc.match_substring(names, "\0").fill_null(False))
        at = pc.index(wrong, True).as_py()
        if at < 0:
            return column
        row = pc.list_parent_indices(column)[at].as_py()
        what = "is null" if not each[at].is_valid else f"has the name {names[at].as_py()!r}"
        raise SchemaError(
            f"{self._where}: in row {batch.slice(row, 1).to_pylist()[0]!r:.500}, a header of column "
            f"{self._sink._headers!r} {what}; a header of Kafka has a name without NUL characters, and only its value "
            "may be null: filter such headers out first"
        )

    def _partitions(self, column: pa.Array[Any]) -> list[int]:
        numbers = column.to_pylist()
        if any(number is not None and number < 0 for number in numbers):
            raise SchemaError(f"{self._where}: partition column {self._sink._partition!r} has a number below 0")
        return [NO_PARTITION if number is None else int(number) for number in numbers]


def _is_text_or_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def _is_headers(kind: pa.DataType) -> bool:
    if not pa.types.is_large_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    is_right = list(fields) == ["name", "value"] and pa.types.is_large_string(fields["name"])
    return is_right and _is_text_or_binary(fields["value"])


def _bytes(column: pa.Array[Any]) -> list[bytes | None]:
    found: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
    return found


def _sends_nothing(error: KafkaError | None, message: Message) -> None:
    """The delivery callback of a producer that sends nothing."""


def _ignore(outcome: Done[None] | Failed) -> None:
    """Ignore the outcome: the attempt is over, and nothing waits for it."""
