"""The operator around a sink's writer."""

from __future__ import annotations

import pyarrow as pa

from midstream.operators.base import NOTHING, Operator, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.operators.sink import Sink, SinkWriter, WriterContext


class SinkOperator(Operator):
    """Hands rows to the writer of `sink`, and what it prepared to the checkpoint.

    `schema` is that of the rows coming in. It emits nothing.
    """

    def __init__(self, name: str, sink: Sink, schema: pa.Schema) -> None:
        self.schema = schema
        self.sink = sink
        self._name = name
        self._writer: SinkWriter | None = None
