"""A writer that works on the I/O pool: rows are queued, and one job at a time drains the queue."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import pyarrow as pa

from midstream.engine.core.batches import batch_bytes
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.operators.sink_api import SinkWriter, WriterContext

QUEUED_BYTES_MAX: Final = 32 * 2**20
"""The bytes that may be queued before the task has to wait."""


class AsyncPart(ABC):
    """The output of one subtask between two checkpoints.

    `add` is called from the loop; `drain`, `finish` and `discard` from the I/O pool, possibly from two of its threads
    at once. A lock makes them take turns: its holder writes all that is queued, so none of them ever waits for work
    that has not begun.
    """

    def __init__(self) -> None:
        self._queue: deque[pa.RecordBatch] = deque()
        self._turn = threading.Lock()
        self._failed: BaseException | None = None
        self._closed = False
        self.added_bytes = 0
        self.taken_bytes = 0
        self.draining = False
        """A `drain` is running. Used by the loop only."""

    def add(self, batch: pa.RecordBatch) -> None:
        self.added_bytes += batch_bytes(batch)
        self._queue.append(batch)

    @property
    def waiting_bytes(self) -> int:
        return self.added_bytes - self.taken_bytes

    def drain(self) -> None:
        with self._turn:
            self._take_all()

    def finish(self, checkpoint_id: int) -> Sequence[bytes]:
        """Make everything durable, and return the committables."""
        with self._turn:
            self._take_all()
            if self._closed:  # the attempt has ended, so nothing needs the committables
                return ()
            self._closed = True
            try:
                return self._finish(checkpoint_id)
            except BaseException:
                self._discard()
                raise

    def discard(self) -> None:
        """Delete what was written, unless the part is finished."""
        with self._turn:
            self._queue.clear()
            if not self._closed:
                self._closed = True
                self._discard()

    def _take_all(self) -> None:
        if self._failed is not None:
            raise self._failed
        try:
            while self._queue and not self._closed:
                batch = self._queue.popleft()
                self._write(batch)
                self.taken_bytes += batch_bytes(batch)
        except BaseException as error:
            self._failed = error
            self._closed = True
            self._discard()
            raise

    @abstractmethod
    def _write(self, batch: pa.RecordBatch) -> None: ...

    @abstractmethod
    def _finish(self, checkpoint_id: int) -> Sequence[bytes]: ...

    @abstractmethod
    def _discard(self) -> None:
        """Undo what was written. Must not raise if that is incomplete."""


class AsyncWriter(SinkWriter):
    """Feeds one part after the other, a new one for each checkpoint that has rows."""

    def __init__(self, context: WriterContext, new_part: Callable[[], AsyncPart]) -> None:
        self._context = context
        self._new_part = new_part
        self._part: AsyncPart | None = None
        self._wake: Callable[[], None] | None = None
        self._closed = False

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._part is None:
            self._part = self._new_part()
        self._part.add(batch)
        self._drain(self._part)

    def ready(self) -> bool:
        return self._part is None or self._part.waiting_bytes < QUEUED_BYTES_MAX

    def on_ready(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        part, self._part = self._part, None
        if part is None:
            return None
        if self._wake is not None:
            self._context.executor.post(self._wake)
        return partial(part.finish, checkpoint_id)

    def close(self) -> None:
        self._closed = True
        part, self._part = self._part, None
        if part is not None:
            self._context.executor.submit(part.discard, _ignore)

    def _drain(self, part: AsyncPart) -> None:
        if not part.draining:
            part.draining = True
            self._context.executor.submit(part.drain, partial(self._drained, part))

    def _drained(self, part: AsyncPart, outcome: Done[None] | Failed) -> None:
        part.draining = False
        if self._closed:
            return
        if isinstance(outcome, Failed):
            self._context.fail(outcome.error)
            return
        if part is self._part:
            if part.waiting_bytes:
                self._drain(part)
            if self._wake is not None and self.ready():
                self._wake()


def _ignore(outcome: Done[None] | Failed) -> None:
    """Ignore the outcome: a file that an ended attempt cannot delete is an orphan, which the next attempt's committer
    deletes.
    """
