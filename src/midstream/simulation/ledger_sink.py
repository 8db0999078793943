"""The sink of simulated jobs: a ledger, which stands for an external transactional system."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from midstream.engine.checkpoint.directory_records import EpochFile, unsealed
from midstream.engine.core.batches import concat
from midstream.engine.core.errors import StorageError
from midstream.engine.operators.sink_api import (
    CommittedOutput,
    Committer,
    CommitterContext,
    Sink,
    SinkWriter,
    WriterContext,
)
from midstream.simulation.disk import Disk
from midstream.simulation.network import SIM
from midstream.simulation.outside import Outside, Staged


class LedgerSink(Sink):
    """Stages rows under a name when a checkpoint is prepared; they count once the name is committed."""

    def __init__(self, outside: Outside, *, capacity_rows: int = 0, pause_s: float = 0.0) -> None:
        self.outside = outside
        self.capacity_rows = capacity_rows
        """Above 0: the number of rows after which the writer pauses for `pause_s`."""
        self.pause_s = pause_s

    def ids_of(self, batch: pa.RecordBatch) -> Sequence[int]:
        """Return the ids of rows; none where rows of any schema are written."""
        return ()

    def writer(self, context: WriterContext) -> SinkWriter:
        self.outside.check_open(context)
        return _LedgerWriter(self, context)

    def committer(self, context: CommitterContext) -> Committer:
        return LedgerCommitter(self.outside, context)

    def newest_committed(self, output: CommittedOutput) -> int:
        self.outside.world.io_point()
        return max((self.outside.staged[name].checkpoint_id for name in self._committed(output)), default=0)

    def check_rollback(self, output: CommittedOutput, after: int) -> None:
        self.outside.world.io_point()

    def roll_back(self, output: CommittedOutput, after: int, kept: Sequence[bytes]) -> None:
        """Roll back output that waits to be committed first, so that it cannot be committed meanwhile."""
        outside = self.outside
        outside.strike_rollback()
        waits = [name for name, staged in outside.staged.items() if self._is_of(output, staged)]
        for name in sorted(waits, key=lambda name: name in outside.committed):
            if outside.staged[name].checkpoint_id > after:
                outside.world.io_point()
                outside.rolled_back.setdefault(name)
                outside.committed.pop(name, None)
                outside.world.note(("rolled back", name))

    def _committed(self, output: CommittedOutput) -> list[str]:
        return [name for name in self.outside.committed if self._is_of(output, self.outside.staged[name])]

    def _is_of(self, output: CommittedOutput, staged: Staged) -> bool:
        return staged.sink == output.uid and staged.job_id in output.jobs


@dataclass(slots=True)
class _LedgerWriter(SinkWriter):
    sink: LedgerSink
    context: WriterContext
    rows: list[pa.RecordBatch] = field(default_factory=list)
    busy_rows: int = 0
    timer_is_set: bool = False
    is_closed: bool = False
    wake: Callable[[], None] | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self.sink.outside.poison:
            self.sink.outside.check_poison(self.sink.ids_of(batch))
        self.rows.append(batch)
        self.busy_rows += batch.num_rows

    def ready(self) -> bool:
        if not self.sink.capacity_rows or self.busy_rows < self.sink.capacity_rows:
            return True
        if not self.timer_is_set:
            self.timer_is_set = True
            self.context.executor.call_later(self.sink.pause_s, self._rested)
        return False

    def _rested(self) -> None:
        self.timer_is_set = False
        self.busy_rows = 0
        if self.wake is not None and not self.is_closed:
            self.wake()

    def on_ready(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        if not self.rows:
            return None
        batches, self.rows = self.rows, []
        context, outside = self.context, self.sink.outside
        name = f"{context.uid}/{context.job_id}-a{context.attempt}-c{checkpoint_id}-s{context.subtask}"

        def stage() -> Sequence[bytes]:
            outside.world.io_point()
            if name in outside.staged:
                outside.world.bug(f"{name} is staged twice")
            rows = concat(batches)
            ids = tuple(self.sink.ids_of(rows))
            outside.staged[name] = Staged(context.uid, rows, ids, context.job_id, checkpoint_id)
            return [name.encode()]

        return stage

    def close(self) -> None:
        self.is_closed = True
        self.rows = []


class LedgerCommitter(Committer):
    def __init__(self, outside: Outside, context: CommitterContext) -> None:
        self._outside = outside
        self._context = context

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        with self._under_way(committables):
            self._commit(checkpoint_id, committables)

    @contextmanager
    def _under_way(self, committables: Sequence[bytes]) -> Iterator[None]:
        """Record a commit for the time that it takes. When it begins, its coordinator must be the leader of the job."""
        self._check_head()
        under_way = self._outside.under_way
        under_way.update(dict.fromkeys(item.decode() for item in committables))
        try:
            yield
        finally:
            for item in committables:
                under_way.pop(item.decode(), None)

    def _check_head(self) -> None:
        if self._is_superseded():
            self._outside.world.bug(f"{self._context.uid}: {self._context.job_id} commits, and another has taken over")

    def _is_superseded(self) -> bool:
        """Whether another start of the job has taken over since this one."""
        context = self._context
        if not isinstance(context.storage, Disk):
            return False
        files = context.storage.files
        head = max(name for name in files if name.startswith("epochs/") and not name.endswith(".from"))
        return unsealed(files[head], EpochFile, head).job_id != context.job_id

    def _commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        outside = self._outside
        outside.strike_commit()
        for item in committables:
            outside.world.io_point()
            if outside.commit_failures:
                outside.commit_failures -= 1
                raise StorageError(f"the target does not answer {SIM}")
            name = item.decode()
            self._check_name(name)
            if name in outside.rolled_back:
                raise StorageError(f"{name} was rolled back: the job has rewound to an older checkpoint {SIM}")
            self._check_order(name, checkpoint_id)
            outside.committed.setdefault(name)
            outside.world.note(("committed", name, f"for chk {checkpoint_id}"))

    def _check_name(self, name: str) -> None:
        outside = self._outside
        if name not in outside.staged:
            outside.world.bug(f"{name} is committed and was never staged")
        if name in outside.aborted:
            outside.world.bug(f"{name} is committed and was aborted")

    def _check_order(self, name: str, checkpoint_id: int) -> None:
        outside = self._outside
        if name in outside.staged and checkpoint_id != outside.staged[name].checkpoint_id:
            outside.world.bug(f"{name} is committed for checkpoint {checkpoint_id}")
        made_by = name.partition("-a")[0]
        if name not in outside.committed:
            newest = outside.newest_committed.get(made_by, 0)
            if checkpoint_id < newest:
                outside.world.bug(f"{name} is committed for checkpoint {checkpoint_id}, after what {newest} holds")
            outside.newest_committed[made_by] = max(newest, checkpoint_id)

    def abort(self, committables: Sequence[bytes]) -> None:
        outside = self._outside
        for item in committables:
            outside.world.io_point()
            name = item.decode()
            if name in outside.committed:
                outside.world.bug(f"{name} is aborted and was committed")
            outside.aborted.setdefault(name)
