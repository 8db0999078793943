"""Any PySpark Python Data Source as a sink, through its stream writer or its batch writer.

The writer is created once, on the driver, as in Spark; its pickled form goes to the slots with the sink, so `validate`
must be called before the job graph is pickled.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle
import msgspec
import pyarrow as pa
from pyspark.sql import datasource as spark_datasource
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from midstream.connectors.common.async_writer import QUEUED_BYTES_MAX
from midstream.engine.core.batches import batch_bytes, conform
from midstream.engine.core.errors import ConfigError, InvariantError, JobError
from midstream.engine.core.job_pickle import pickled
from midstream.engine.operators.sink_api import Committer, CommitterContext, Sink, SinkWriter, WriterContext, decoded
from midstream.engine.state.safe_pickle import OwnCode, Pickles
from midstream.spark.datasource_rows import arrow_schema, make_data_source, rows_of, spark_struct
from midstream.spark.task_context import task_context

_ARROW_WRITERS = tuple(
    getattr(spark_datasource, name)
    for name in ("DataSourceArrowWriter", "DataSourceStreamArrowWriter")
    if hasattr(spark_datasource, name)
)


class WrittenPartition(msgspec.Struct, frozen=True, array_like=True):
    """A committable: the WriterCommitMessage of one subtask for one checkpoint, pickled (it is the user's)."""

    checkpoint_id: int
    message: bytes


class _Messages:
    """Encodes the user's messages as committables."""

    def __init__(self, own: OwnCode, where: str) -> None:
        self._pickles = Pickles(own)
        self._what = f"{where}: a commit message"

    def encode(self, checkpoint_id: int, message: Any) -> bytes:
        return msgspec.msgpack.encode(WrittenPartition(checkpoint_id, self._pickles.dumps(message, self._what)))

    def decode(self, committable: bytes) -> tuple[int, Any]:
        written = msgspec.msgpack.decode(committable, type=WrittenPartition)
        return written.checkpoint_id, self._pickles.loads(written.message, self._what)


class DataSourceSink(Sink):
    """Writes through `streamWriter(schema, overwrite=False)`, or `writer` where there is no stream writer.

    `write` runs once per subtask and checkpoint that has rows, on a thread of its own, where `TaskContext.get()`
    identifies the subtask. `commit(messages, batchId)` runs on the driver with the checkpoint's id once the checkpoint
    has completed, and again after a restore: it must be idempotent per id, as Spark itself requires. A batch writer's
    `commit` has no id by which it could detect a repetition: what it commits just before a crash may be committed
    twice.

    Raises ConfigError if there is no writer, SchemaError for a column without a Spark type.
    """

    def __init__(self, data_source: type[DataSource] | DataSource, *, options: Mapping[str, str] | None = None) -> None:
        self._data_source = make_data_source(data_source, options)
        self._where = f"data source {self._data_source.name()!r}"
        self._streams = type(self._data_source).streamWriter is not DataSource.streamWriter
        if not self._streams and type(self._data_source).writer is DataSource.writer:
            raise ConfigError(f"{self._where}: has neither streamWriter() nor writer(); it cannot be written to")
        self._struct: StructType | None = None
        self._writer: Any = None
        self._pickled_writer = b""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        struct = spark_struct(schema, self._where)
        arrow_schema(struct, self._where)
        make = self._data_source.streamWriter if self._streams else self._data_source.writer
        self._writer = make(struct, False)
        try:
            self._pickled_writer = pickled(self._writer)
        except Exception as error:
            raise JobError(f"{self._where}: its writer cannot be sent to the slots: {error}") from error
        self._struct = struct

    def check_committables(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Raise StorageError for what another kind of sink has prepared.

        The content of the messages, and where it belongs, is only known to the writers that send and receive them.
        """
        for committable in committables:
            decoded(committable, WrittenPartition, "a data source", self._where)

    def writer(self, context: WriterContext) -> SinkWriter:
        if self._struct is None:
            raise InvariantError(f"{self._where}: was shipped before it was validated")
        return _DataSourceWriter(context, self._pickled_writer, self._struct, _Messages(self.own, self._where))

    def committer(self, context: CommitterContext) -> Committer:
        if self._writer is None:
            raise InvariantError(f"{self._where}: commits on the driver, where it has not been validated")
        return _DataSourceCommitter(self._writer, self._streams, _Messages(self.own, self._where))


class _Cancelled(Exception):
    """Raised from the iterator of the user's `write` when the attempt ends."""


class _Write:
    """One call of the user's `write`, to which the loop feeds rows."""

    def __init__(
        self, context: WriterContext, number: int, writer: Any, struct: StructType, on_taken: Callable[[], None]
    ) -> None:
        self._context = context
        self._number = number
        self._writer = writer
        self._struct = struct
        self._on_taken = on_taken
        self._queue: queue.SimpleQueue[pa.RecordBatch | type[_Cancelled] | None] = queue.SimpleQueue()
        self._added_bytes = 0
        self._taken_bytes = 0
        self._cancelled = False
        self._has_returned = False
        self._message: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"midstream-write-{context.uid}-{number}", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        return 0 if self._has_returned else self._added_bytes - self._taken_bytes

    def add(self, batch: pa.RecordBatch) -> None:
        self._added_bytes += batch_bytes(batch)
        self._queue.put(batch)

    def end(self) -> None:
        self._queue.put(None)

    def cancel(self) -> None:
        self._cancelled = True
        self._queue.put(_Cancelled)

    def result(self) -> Any:
        """Block until `write` has returned, and return its message. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._message

    def _run(self) -> None:
        arrow = isinstance(self._writer, _ARROW_WRITERS)
        context = self._context
        try:
            with task_context(context.subtask, context.attempt, self._number):
                self._message = self._writer.write(self._batches() if arrow else self._rows())
        except BaseException as error:  # noqa: BLE001 - it is raised where the task sees it
            self._error = error
            if not self._cancelled:
                context.executor.post(partial(context.fail, error))
        finally:
            self._has_returned = True  # even if it did not read all rows
            context.executor.post(self._on_taken)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        schema = arrow_schema(self._struct, "the stream")
        while (batch := self._queue.get()) is not None:
            if not isinstance(batch, pa.RecordBatch):
                raise _Cancelled
            yield conform(batch, schema, "the stream")
            self._taken_bytes += batch_bytes(batch)
            self._context.executor.post(self._on_taken)

    def _rows(self) -> Iterator[Any]:
        for batch in self._batches():
            yield from rows_of(batch, self._struct)


class _DataSourceWriter(SinkWriter):
    def __init__(self, context: WriterContext, pickled_writer: bytes, struct: StructType, messages: _Messages) -> None:
        self._context = context
        self._messages = messages
        self._pickled_writer = pickled_writer
        self._struct = struct
        self._numbers = itertools.count(context.subtask << 32)
        self._write: _Write | None = None
        self._wake: Callable[[], None] | None = None
        self._closed = False

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._write is None:
            writer = cloudpickle.loads(self._pickled_writer)
            self._write = _Write(self._context, next(self._numbers), writer, self._struct, self._taken)
        self._write.add(batch)

    def ready(self) -> bool:
        return self._write is None or self._write.waiting_bytes < QUEUED_BYTES_MAX

    def on_ready(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        write, self._write = self._write, None
        if write is None:
            return None
        write.end()
        self._context.executor.post(self._taken)
        return lambda: [self._messages.encode(checkpoint_id, write.result())]

    def close(self) -> None:
        self._closed = True
        write, self._write = self._write, None
        if write is not None:
            write.cancel()

    def _taken(self) -> None:
        if self._wake is not None and not self._closed and self.ready():
            self._wake()


class _DataSourceCommitter(Committer):
    def __init__(self, writer: Any, streams: bool, messages: _Messages) -> None:
        self._writer = writer
        self._messages = messages
        self._streams = streams

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        messages = [message for _, message in map(self._messages.decode, committables)]
        self._call_writer(self._writer.commit, messages, checkpoint_id)

    def abort(self, committables: Sequence[bytes]) -> None:
        found = sorted(map(self._messages.decode, committables), key=lambda pair: pair[0])
        for checkpoint_id, pairs in itertools.groupby(found, key=lambda pair: pair[0]):
            self._call_writer(self._writer.abort, [message for _, message in pairs], checkpoint_id)

    def _call_writer(self, what: Callable[..., None], messages: list[Any], checkpoint_id: int) -> None:
        if self._streams:
            what(messages, checkpoint_id)
        else:
            what(messages)
