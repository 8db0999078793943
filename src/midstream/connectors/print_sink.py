"""Rows on standard output, for looking at a stream. At least once."""

from __future__ import annotations

from midstream.operators.sink import Sink, SinkWriter, WriterContext


class PrintSink(Sink):
    """Prints rows as they come, at least once: after a failure some are printed again.

    `prefix`: put before every line. `limit`: rows that each subtask prints per attempt (None: all).
    """

    def __init__(self, prefix: str = "", limit: int | None = None) -> None:
        raise NotImplementedError

    def writer(self, context: WriterContext) -> SinkWriter:
        raise NotImplementedError
