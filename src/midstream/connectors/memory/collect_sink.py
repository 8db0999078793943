"""Results collected in the driver's memory, exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import polars as pl
import pyarrow as pa
import xxhash

from midstream.connectors.memory.python_rows import table_rows
from midstream.engine.core.arrow_bytes import NOT_ARROW, read_table
from midstream.engine.core.batches import batch_bytes, check_held_by_polars, to_polars
from midstream.engine.core.errors import UNDECODABLE, ConfigError, JobError, StorageError
from midstream.engine.operators.sink_api import (
    CommittedOutput,
    Committer,
    CommitterContext,
    Sink,
    SinkWriter,
    WriterContext,
    decoded,
)

BYTES_MAX: Final = 64 * 2**20
"""The limit on the rows of one subtask between two checkpoints; they travel in control messages and metadata."""

_committed: set[str] = set()
"""The rows that sinks of this process have committed.

A job that resumes from another's checkpoint commits the last rows of the other job again; if that job's results were in
this process, these rows have been seen already.
"""
_committing = threading.Lock()


class CollectedRows(msgspec.Struct, frozen=True, array_like=True):
    """A committable: an Arrow stream."""

    id: str
    rows: bytes


class CollectSink(Sink):
    """Keeps the rows of completed checkpoints on the driver, for notebooks, tests and small results.

    `rows()`, `table()` and `frame()` may be called from any thread, while the job runs and after it. They show the last
    job in which this sink was used. A job restored in a new process begins with the rows of the checkpoint from which
    it resumes, since it is unknown whether those were seen.

        kept = CollectSink()
        orders.sink(kept).uid("kept")
        env.execute()
        print(kept.frame())
    """

    output_lasts = False  # it shows the rows of one start

    def __init__(self) -> None:
        self._job_id: str | None = None
        self._schema: pa.Schema | None = None
        self._batches: list[pa.RecordBatch] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_job_id": None, "_schema": None, "_batches": []}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows committed so far, as dicts.

        Raises ConfigError before the first job with this sink has started, SchemaError for a value that Python's own
        types cannot hold; use `table()` or `frame()` for those.

            kept = orders.collect()
            env.execute()
            assert len(kept.rows()) == 3
        """
        return table_rows(self.table(), "CollectSink: ", "use table() or frame()")

    def table(self) -> pa.Table:
        """Return the rows committed so far, as an Arrow table.

        Raises ConfigError before the first job with this sink has started.

            kept = orders.collect()
            env.execute()
            assert kept.table().num_rows == 3
        """
        batches = tuple(self._batches)
        schema = batches[0].schema if batches else self._schema
        if schema is None:
            raise ConfigError("CollectSink: no job with this sink has started yet; call execute() or start() first")
        return pa.Table.from_batches(batches, schema=schema)

    def frame(self) -> pl.DataFrame:
        """Return the rows committed so far, as a polars DataFrame.

        Raises ConfigError before the first job with this sink has started, SchemaError for a column that polars cannot
        hold.

            kept = orders.collect()
            env.execute()
            assert kept.frame()["price"].sum() == 12
        """
        table = self.table()
        check_held_by_polars(table.schema, "frame()")
        return to_polars(table)

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        self._schema = schema

    def check_committables(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Raise StorageError for what another kind of sink has prepared."""
        for committable in committables:
            decoded(committable, CollectedRows, "a CollectSink", "CollectSink")

    def writer(self, context: WriterContext) -> SinkWriter:
        return _CollectWriter(context)

    def committer(self, context: CommitterContext) -> Committer:
        if self._job_id != context.job_id:
            self._job_id, self._batches = context.job_id, []
        return _CollectCommitter(self._batches)

    def newest_committed(self, output: CommittedOutput) -> int:
        """Return 0: the sink shows the rows of one start, and is empty again at the next."""
        return 0


class _CollectWriter(SinkWriter):
    def __init__(self, context: WriterContext) -> None:
        self._context = context
        self._prepared = 0
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._bytes += batch_bytes(batch)
        if self._bytes > BYTES_MAX:
            raise JobError(
                f"operator {self._context.name!r}: {self._bytes} bytes of rows since the last checkpoint, more than "
                f"the {BYTES_MAX} that a CollectSink accepts; write them with a FileSink, or checkpoint more often"
            )

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        batches, self._batches, self._bytes = self._batches, [], 0
        if not any(batch.num_rows for batch in batches):
            return None
        self._prepared += 1
        context = self._context
        origin = f"{context.job_id}/{context.uid}/{context.attempt}/{context.subtask}/{self._prepared}"

        def encode() -> Sequence[bytes]:
            stream = pa.BufferOutputStream()
            with pa.ipc.new_stream(stream, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            rows = CollectedRows(xxhash.xxh3_128_hexdigest(origin.encode()), stream.getvalue().to_pybytes())
            return (msgspec.msgpack.encode(rows),)

        return encode


class _CollectCommitter(Committer):
    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self._batches = batches

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        for committable in committables:
            try:
                found = msgspec.msgpack.decode(committable, type=CollectedRows)
                batches = read_table(found.rows).to_batches()
            except (*UNDECODABLE, *NOT_ARROW) as error:
                raise StorageError(
                    f"checkpoint {checkpoint_id}: what collect() stored in it is damaged: {error}"
                ) from error
            with _committing:
                if found.id not in _committed:
                    self._batches.extend(batches)
                    _committed.add(found.id)
