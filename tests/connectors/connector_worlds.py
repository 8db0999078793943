"""What sources and sinks need around them in tests: a loop whose mails and I/O are run by hand."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from midstream.engine.core.errors import MidstreamError
from midstream.engine.core.interfaces import Done, Failed, Storage
from midstream.engine.operators.sink_api import Sink, SinkWriter, WriterContext
from midstream.engine.operators.source_api import DiscoveryContext, Source, Split


class Loop:
    """An Executor. `run()` runs what is posted and submitted until nothing is left; I/O errors go to `done`."""

    def __init__(self) -> None:
        self.mails: deque[Callable[[], None]] = deque()
        self.work: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self.failures: list[BaseException] = []

    def post(self, mail: Callable[[], None]) -> None:
        self.mails.append(mail)

    def call_later(self, delay_s: float, mail: Callable[[], None]) -> Any:
        raise NotImplementedError

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.work.append((work, done))

    def run_io(self) -> None:
        work, done = self.work.popleft()
        try:
            outcome: Done[Any] | Failed = Done(work())
        except Exception as error:  # noqa: BLE001
            outcome = Failed(error)
        self.mails.append(lambda: done(outcome))

    def run(self) -> None:
        while self.mails or self.work:
            while self.mails:
                self.mails.popleft()()
            if self.work:
                self.run_io()


def open_writer(
    sink: Sink,
    schema: pa.Schema,
    loop: Loop,
    *,
    subtask: int = 0,
    attempt: int = 0,
    job_id: str = "job-a",
    uid: str = "out",
    storage: Storage | None = None,
) -> SinkWriter:
    context = WriterContext(
        uid=uid,
        name=f"sink {uid}",
        subtask=subtask,
        attempt=attempt,
        job_id=job_id,
        schema=schema,
        executor=loop,
        fail=loop.failures.append,
        storage=storage,
    )
    return sink.writer(context)


def prepared(writer: SinkWriter, checkpoint_id: int) -> list[bytes]:
    later = writer.prepare(checkpoint_id)
    return [] if later is None else list(later())


def written(sink: Sink, rows: pa.RecordBatch, checkpoint_id: int = 1, **place: Any) -> list[bytes]:
    """Committables of one subtask that has written these rows."""
    loop = Loop()
    writer = open_writer(pickle.loads(pickle.dumps(sink)), rows.schema, loop, **place)
    writer.write(rows)
    loop.run()
    assert loop.failures == []
    return prepared(writer, checkpoint_id)


def batch(*values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": pa.array(values, pa.int64())})


SCHEMA = batch().schema


def all_splits(source: Source, parallelism: int = 1, storage: Any = None) -> list[Split]:
    found = source.discover(None, DiscoveryContext(uid="src", parallelism=parallelism, storage=storage))
    return list(found.splits)


def read_split(source: Source, split: Split, rows_max: int = 1000) -> tuple[list[dict[str, Any]], list[int]]:
    """All rows of the split from its offset on, and the offset after each of them."""
    rows: list[dict[str, Any]] = []
    offsets: list[int] = []
    reader = source.open_split(split)
    while (got := reader.read(rows_max)) is not None:
        piece, offset = got
        assert 0 < piece.num_rows <= rows_max
        assert piece.schema.equals(source.schema), (piece.schema, source.schema)
        rows += piece.to_pylist()
        offsets += [-1] * (piece.num_rows - 1) + [offset]
    reader.close()
    return rows, offsets


def read_all(source: Source, rows_max: int = 1000, parallelism: int = 1) -> list[dict[str, Any]]:
    return [row for split in all_splits(source, parallelism) for row in read_split(source, split, rows_max)[0]]


def values(rows: Sequence[dict[str, Any]], column: str = "n") -> list[Any]:
    return [row[column] for row in rows]


def failure_of(sink: Sink, rows: pa.RecordBatch) -> MidstreamError:
    """Return the error with which writing these rows fails."""
    loop = Loop()
    writer = open_writer(sink, rows.schema, loop)
    writer.write(rows)
    loop.run()
    (error,) = loop.failures
    assert isinstance(error, MidstreamError)
    return error
