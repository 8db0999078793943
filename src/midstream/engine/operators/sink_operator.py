"""The operator around a sink's writer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa

from midstream.engine.operators.base import NOTHING, Operator, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.sink_api import Sink, SinkWriter, WriterContext
from midstream.engine.operators.user_metrics import Gauge

ROWS_OF_LAST_CHECKPOINT: Final = "rows_of_last_checkpoint"
"""The gauge of a transactional sink: how many rows it has prepared for its last checkpoint, which commits them."""


class SinkOperator(Operator):
    """Passes rows to the writer of `sink`, and adds the committables that the writer prepares to the checkpoint.

    `schema` is that of the incoming rows. It emits nothing. The coordinator decides what becomes of an aborted
    checkpoint's committables: they are reported again with the next one.
    """

    def __init__(self, name: str, sink: Sink, schema: pa.Schema) -> None:
        self.schema = schema
        self.sink = sink
        self._name = name
        self._writer: SinkWriter | None = None
        self._rows = 0
        """The number of rows since the last checkpoint."""
        self._prepared: Gauge | None = None

    def open(self, context: OperatorContext, out: Output) -> None:
        self.user_metrics = context.metrics
        if self.sink.is_transactional:
            self._prepared = context.metrics.gauge(ROWS_OF_LAST_CHECKPOINT)
        self._writer = self.sink.writer(
            WriterContext(
                uid=context.uid,
                name=context.name,
                subtask=context.subtask,
                attempt=context.attempt,
                job_id=context.job_id,
                schema=self.schema,
                executor=context.executor,
                fail=context.fail,
                storage=context.storage,
                metrics=context.metrics,
            )
        )

    @property
    def _open_writer(self) -> SinkWriter:
        assert self._writer is not None, f"sink {self._name!r} is not open"
        return self._writer

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self._open_writer.write(batch)
        self._rows += batch.num_rows

    def ready(self, wake: Callable[[], None]) -> bool:
        writer = self._open_writer
        if writer.ready():
            return True
        writer.on_ready(wake)
        return writer.ready()  # it may have become ready just before `wake` was registered

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        store = self._open_writer.prepare(checkpoint_id)
        if self._prepared is not None:
            self._prepared.set(self._rows)
        self._rows = 0
        if store is None:
            return NOTHING
        durable = store

        def later() -> SnapshotResult:
            return SnapshotResult(committables=tuple(durable()))

        return Snapshot(later=later)

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
