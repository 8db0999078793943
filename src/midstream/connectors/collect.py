"""Results in the driver's memory, exactly once."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa

from midstream.operators.sink import Committer, Sink, SinkWriter, WriterContext


class CollectSink(Sink):
    """Keeps the rows of completed checkpoints on the driver, for notebooks, tests and small results.

    `rows()`, `table()` and `frame()` may be called from any thread, while the job runs and after
    it. They show the last job that this sink was used in.
    """

    def __init__(self) -> None:
        raise NotImplementedError

    def rows(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def table(self) -> pa.Table:
        """Raises ConfigError before the first job that uses this sink has started."""
        raise NotImplementedError

    def frame(self) -> pl.DataFrame:
        raise NotImplementedError

    def writer(self, context: WriterContext) -> SinkWriter:
        raise NotImplementedError

    def committer(self, job_id: str) -> Committer | None:
        raise NotImplementedError
