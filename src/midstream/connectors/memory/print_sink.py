"""Rows on standard output, for looking at a stream; at least once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from midstream.connectors.common.async_writer import AsyncPart, AsyncWriter
from midstream.engine.core.config import is_whole
from midstream.engine.core.error_rows import literal_text
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.python_values import to_python
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
        rows = (row for piece in range(0, batch.num_rows, 1024) for row in _rows(batch.slice(piece, 1024)))
        while chunk := "".join(f"{self._prefix}{row}\n" for row in islice(rows, 1024)):
            sys.stdout.write(chunk)
        sys.stdout.flush()

    def _finish(self, checkpoint_id: int) -> Sequence[bytes]:
        return ()

    def _discard(self) -> None: ...


class _Text(str):
    """The text of a value, which a dict shows without quotes."""

    __repr__ = str.__str__


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    names, columns = batch.schema.names, map(_values, batch.columns)
    return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def _values(column: pa.Array[Any]) -> Sequence[Any]:
    """Return the values of a column; as texts if Python cannot hold one of them, such as a time after the year 9999."""
    try:
        return to_python(column)
    except (ValueError, OverflowError):
        return [_Text(literal_text(column.slice(row, 1))) for row in range(len(column))]
