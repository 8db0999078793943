"""Any PySpark Python Data Source as a sink: its stream writer, or its batch writer."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from pyspark.sql.datasource import DataSource

from midstream.operators.sink import Committer, Sink, SinkWriter, WriterContext


class DataSourceSink(Sink):
    """Writes through `streamWriter(schema, overwrite=False)`, or `writer` where there is no stream writer.

    `write` runs once per subtask and checkpoint, on a thread of its own; `commit(messages, batchId)` on
    the driver with the checkpoint's id once the checkpoint has completed, and again after a restore: it
    must be idempotent per id, as Spark itself requires.
    """

    def __init__(self, data_source: type[DataSource] | DataSource, *, options: Mapping[str, str] | None = None) -> None:
        raise NotImplementedError

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        raise NotImplementedError

    def writer(self, context: WriterContext) -> SinkWriter:
        raise NotImplementedError

    def committer(self, job_id: str) -> Committer | None:
        raise NotImplementedError
