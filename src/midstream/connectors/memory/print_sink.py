"""Rows on standard output, for looking at a stream; at least once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice

import pyarrow as pa

from midstream.connectors.common.async_writer import AsyncPart, AsyncWriter
from midstream.engine.core.config import is_whole
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.sink_api import Sink, SinkWriter, WriterContext


class PrintSink(Sink):
    """Prints rows to the standard output of the slots as they arrive, at least once: after a failure some are printed
    again.

    `prefix`: put before every line.
    `limit`: the number of rows that each subtask prints per attempt; None for all.

    Raises ConfigError for a limit that is not a whole number.

        >>> from midstream.connectors import PrintSink
        >>> _ = orders.sink(PrintSink("order: ", limit=10))
    """

    def __init__(self, prefix: str = "", limit: int | None = None) -> None:
        if limit is not None and not is_whole(limit):
            raise ConfigError(f"PrintSink: limit {limit!r} is not a whole number; None prints every row")
        self._prefix = prefix
        self._limit = limit

    def writer(self, context: WriterContext) -> SinkWriter:
        lines = _Lines(self._prefix, self._limit)
        return AsyncWriter(context, lambda: lines)


class _Lines(AsyncPart):
    """The one part of a writer: printing does not depend on checkpoints."""

    def __init__(self, prefix: str, limit: int | None) -> None:
        super().__init__()
        self._prefix = prefix
        self._left = limit

    def finish(self, checkpoint_id: int) -> Sequence[bytes]:
        self.drain()
        return ()

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._left is not None:
            batch = batch.slice(0, self._left)
            self._left -= batch.num_rows
        rows = (row for piece in range(0, batch.num_rows, 1024) for row in batch.slice(piece, 1024).to_pylist())
        while chunk := "".join(f"{self._prefix}{row}\n" for row in islice(rows, 1024)):
            sys.stdout.write(chunk)
        sys.stdout.flush()

    def _finish(self, checkpoint_id: int) -> Sequence[bytes]:
        return ()

    def _discard(self) -> None: ...
