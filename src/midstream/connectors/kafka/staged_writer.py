"""Writes the rows of a subtask to files in the checkpoint storage, as records that are ready to be sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from midstream.connectors.common.async_writer import AsyncPart, AsyncWriter
from midstream.connectors.common.external_waits import ExternalWait
from midstream.connectors.kafka.client import BrokerSilence, ClientConfig
from midstream.connectors.kafka.cluster import KafkaCluster
from midstream.connectors.kafka.staged_records import (
    VERSION,
    StagedFile,
    StagedRecords,
    encode,
    staged_path,
    transactional_id,
    write_staged,
)
from midstream.connectors.kafka.transactional_producer import marker_partition
from midstream.engine.core.arrow_types import byte_lengths
from midstream.engine.core.batches import batch_bytes
from midstream.engine.core.errors import InvariantError, SchemaError, StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.operators.sink_api import WriterContext

FILE_BYTES: Final = 32 * 2**20
"""The size of records in memory at which they are written to a file; a checkpoint may need several."""
PATIENCE_S: Final = 120.0
"""The time for which a subtask waits for brokers before it stages its first rows; then the job restarts."""
REFRESHED_S: Final = 3600.0
"""A subtask without rows for this long commits an empty transaction, so that the brokers do not forget its marker."""
_PAUSE_S: Final = 1.0


class Staging(Protocol):
    """The conversion of rows to records; see `connectors.kafka.kafka_sink.Encoding`."""

    def staged(self, batch: pa.RecordBatch) -> pa.RecordBatch: ...


class StagedWriter(AsyncWriter):
    """A writer with a separate part, in separate files, for each checkpoint."""

    def __init__(
        self,
        context: WriterContext,
        storage: Storage,
        connection: ClientConfig,
        topic: str,
        encoding: Staging,
        record_bytes_max: int,
        where: str,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.context = context
        self.storage = storage
        self.marked_topic = _MarkedTopic(context, connection, topic, where)
        self.encoding = encoding
        self.record_bytes_max = record_bytes_max
        self.where = where
        numbers = count()
        self._after = 0
        self._now_s = now_s
        self._refreshed_s = now_s()
        super().__init__(context, lambda: StagedPart(self, next(numbers)))

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        now_s = self._now_s()
        if self._part is None and self._after and now_s - self._refreshed_s >= REFRESHED_S:
            self._part = self._new_part()
        if isinstance(self._part, StagedPart):
            self._part.after, self._after, self._refreshed_s = self._after, checkpoint_id, now_s
        return super().prepare(checkpoint_id)

    def close(self) -> None:
        self.marked_topic.stopped.set()
        super().close()


class _MarkedTopic:
    """The data that the parts of one subtask share: its marker, and the topic's number of partitions. Used on the I/O
    pool only.
    """

    def __init__(self, context: WriterContext, connection: ClientConfig, topic: str, where: str) -> None:
        self.topic = topic
        self.stopped = threading.Event()
        self._id = transactional_id(context.job_id, context.uid, context.subtask)
        self._connection = connection
        self._where = where
        self._turn = threading.Lock()
        self._is_open = False
        self._partitions = 0

    def open(self) -> None:
        """Make sure that there is a marker, before there is anything whose commit it could record.

        Everything that older attempts have staged for this transactional id is committed, or never will be: if there is
        no marker, one that records no commit is correct for all that follows.
        """
        with self._turn:
            if not self._is_open:
                partition_id = marker_partition(self.topic)

                def ensure(cluster: KafkaCluster) -> None:
                    if not cluster.committed(self._id, [partition_id]):
                        cluster.commit(self._id, {partition_id: 0})

                self._requested(ensure)
                self._is_open = True

    def partitions(self, more_than: int) -> int:
        """Return the topic's number of partitions; it is requested again unless more than `more_than` are known."""
        with self._turn:
            if self._partitions <= more_than:
                self._partitions = self._requested(lambda cluster: cluster.topics((self.topic,))[self.topic].partitions)
            return self._partitions

    def _requested(self, request: Callable[[KafkaCluster], int | None]) -> int:
        """Query the cluster, waiting for brokers that do not answer."""
        with ExternalWait() as wait:
            return self._answered(request, wait)

    def _answered(self, request: Callable[[KafkaCluster], int | None], wait: ExternalWait) -> int:
        silence = BrokerSilence(self._where, self._connection.servers)
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                with closing(KafkaCluster(self._connection, self._where)) as cluster:
                    return request(cluster) or 0
            except StorageError:
                if time.monotonic() > deadline_s:
                    raise
                wait.begin(f"brokers {self._connection.servers} of topic {self.topic!r}, to stage rows")
            silence.polled(False)
            if self.stopped.wait(_PAUSE_S):
                raise StorageError(f"{self._where}: the attempt ended before the brokers answered")


class StagedPart(AsyncPart):
    """The rows that one subtask stages for one checkpoint."""

    def __init__(self, writer: StagedWriter, number: int) -> None:
        super().__init__()
        self.after = 0
        """The previous checkpoint for which the subtask staged something; set before `finish`."""
        self._writer = writer
        self._number = number
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._rows = 0
        self._files: list[StagedFile] = []

    def _write(self, batch: pa.RecordBatch) -> None:
        records = self._writer.encoding.staged(batch)
        self._check(records)
        self._waiting.append(records)
        self._waiting_bytes += batch_bytes(records)
        self._rows += records.num_rows
        if self._waiting_bytes >= FILE_BYTES:
            self._store()

    def _finish(self, checkpoint_id: int) -> Sequence[bytes]:
        context = self._writer.context
        self._writer.marked_topic.open()
        if self._waiting:
            self._store()
        return [
            encode(
                StagedRecords(
                    version=VERSION,
                    checkpoint=checkpoint_id,
                    after=self.after,
                    job=context.job_id,
                    uid=context.uid,
                    attempt=context.attempt,
                    subtask=context.subtask,
                    topic=self._writer.marked_topic.topic,
                    rows=self._rows,
                    files=tuple(self._files),
                )
            )
        ]

    def _discard(self) -> None:
        self._waiting.clear()
        files, self._files = self._files, []
        for file in files:
            self._writer.storage.delete(file.path)

    def _store(self) -> None:
        context = self._writer.context
        path = staged_path(
            context.job_id, context.uid, context.attempt, context.subtask, self._number, len(self._files)
        )
        self._files.append(write_staged(self._writer.storage, path, self._waiting))
        self._waiting, self._waiting_bytes = [], 0

    def _check(self, records: pa.RecordBatch) -> None:
        """Refuse records now that the brokers would refuse after the checkpoint is complete, again with each attempt."""
        sizes = byte_lengths(records.column("value")).fill_null(0)
        if "key" in records.schema.names:
            sizes = pc.add(sizes, byte_lengths(records.column("key")).fill_null(0))
        if "headers" in records.schema.names:
            sizes = pc.add(sizes, _header_bytes(records.column("headers")))
        largest = pc.max(sizes).as_py() or 0
        if largest > self._writer.record_bytes_max:
            raise SchemaError(
                f"{self._writer.where}: a row is a record of {largest} bytes, but message.max.bytes leaves "
                f"{self._writer.record_bytes_max} for one; raise it (options=), and the topic's max.message.bytes with it"
            )
        if "partition" in records.schema.names:
            numbers: dict[str, Any] = pc.min_max(records.column("partition")).as_py()  # type: ignore[assignment]  # its stub has a list of them
            if numbers["min"] is not None and numbers["min"] < 0:
                raise InvariantError(f"{self._writer.where}: a partition below 0 was not refused")
            if numbers["max"] is not None and numbers["max"] >= self._writer.marked_topic.partitions(numbers["max"]):
                raise SchemaError(
                    f"{self._writer.where}: a row is for partition {numbers['max']}, and topic {self._writer.marked_topic.topic!r} has "
                    f"{self._writer.marked_topic.partitions(0)}"
                )


def _header_bytes(headers: pa.Array[Any]) -> pa.Array[Any]:
    """Return the size of each row's headers: names, values, and their lengths."""
    sizes = [
        sum(len(each["name"].encode()) + len(each["value"] or b"") + 10 for each in row or ())
        for row in headers.to_pylist()
    ]
    return pa.array(sizes, pa.int64())
