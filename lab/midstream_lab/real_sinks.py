"""The project's own sinks in simulated jobs: each part of the output goes to the ledger and to a real target.

The ledger and its checkers define what must be committed, and the real sink must show exactly that, whatever its process
is doing when it dies. The committables of a checkpoint are the names of the ledger, which stand for the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from midstream.engine.core.errors import MidstreamError, StorageError
from midstream.engine.core.interfaces import Done, Executor, Failed, Mail, Timer
from midstream.engine.operators.sink_api import (
    CommittedOutput,
    Committer,
    CommitterContext,
    SinkWriter,
    WriterContext,
)
from midstream.simulation.ledger_sink import LedgerCommitter
from midstream.simulation.network import SIM
from midstream.simulation.world import World
from midstream_lab.jobs.recorded_rows import Outside
from midstream_lab.slot_ledger_sink import RowLedgerSink

if TYPE_CHECKING:
    from midstream_lab.real_targets import Target, Targets

T = TypeVar("T")


class RealSinks(RowLedgerSink):
    """The sinks of one start of a job. `launch`: its number."""

    def __init__(self, outside: Outside, targets: Targets, launch: int, capacity_rows: int, pause_s: float) -> None:
        super().__init__(outside, capacity_rows=capacity_rows, pause_s=pause_s)
        self._targets = targets
        self._launch = launch
        self._made: dict[str, PairedSink] = {}

    def at(self, uid: str) -> RowLedgerSink:
        if uid not in self._made:
            self._made[uid] = PairedSink(self, self._targets.at(uid), self._launch)
        return self._made[uid]


class PairedSink(RowLedgerSink):
    outside: Outside

    def __init__(self, like: RowLedgerSink, target: Target, launch: int) -> None:
        super().__init__(target.outside, capacity_rows=like.capacity_rows, pause_s=like.pause_s)
        self.uid = target.uid
        self.schema = target.schema(launch)
        self.real = target.sink()
        with self.outside.world.inspecting():
            self.real.validate(self.schema, restoring=launch > 1)

    @property
    def target(self) -> Target:
        return self.outside.targets[self.uid]

    def real_output(self, output: CommittedOutput) -> CommittedOutput:
        held = ((number, each) for number, item in output.held for each in self.real_committables([item]))
        return replace(output, held=tuple(held))

    def real_committables(self, committables: Sequence[bytes]) -> list[bytes]:
        return [each for item in committables for each in self.target.committables[item.decode()]]

    def check_committables(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        self.real.check_committables(checkpoint_id, self.real_committables(committables))

    def writer(self, context: WriterContext) -> SinkWriter:
        executor = _Uninterrupted(context.executor, self.outside.world)
        real = self.real.writer(replace(context, schema=self.schema, executor=executor))
        return _PairedWriter(self, super().writer(context), real, context)

    def committer(self, context: CommitterContext) -> Committer:
        return _PairedCommitter(self, context)

    def newest_committed(self, output: CommittedOutput) -> int:
        before = super().newest_committed(output)
        newest = self.real.newest_committed(self.real_output(output))
        self.target.inspect()  # another driver, which was frozen, may have rolled output back meanwhile
        of_ledger = min(before, super().newest_committed(output))
        if newest is None or newest < of_ledger:
            self.outside.world.bug(f"{self.uid}: {newest} is reported as committed, and {of_ledger} is")
        return newest or 0

    def check_rollback(self, output: CommittedOutput, after: int) -> None:
        self.real.check_rollback(self.real_output(output), after)

    def roll_back(self, output: CommittedOutput, after: int, kept: Sequence[bytes]) -> None:
        outside = self.outside
        newer = [
            name
            for name, staged in outside.staged.items()
            if staged.sink == output.uid and staged.job_id in output.jobs and staged.checkpoint_id > after
        ]
        with self.target.under_way(self.target.rollbacks, newer):
            self.real.roll_back(self.real_output(output), after, self.real_committables(kept))
        self.target.confirm([name for name in self.target.committed if name not in newer])
        outside.rolled_back.update(dict.fromkeys(newer))


@dataclass(slots=True)
class _PairedWriter(SinkWriter):
    sink: PairedSink
    ledger: SinkWriter
    real: SinkWriter
    context: WriterContext
    parts: int = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self.ledger.write(batch)
        self.real.write(self.sink.target.rows(batch, self._stamp, self.sink.schema))

    @property
    def _stamp(self) -> str:
        context = self.context
        return f"{context.uid}/{context.job_id}-a{context.attempt}-s{context.subtask}-{self.parts}"

    def ready(self) -> bool:
        return self.ledger.ready() and self.real.ready()

    def on_ready(self, wake: Callable[[], None]) -> None:
        self.ledger.on_ready(wake)
        self.real.on_ready(wake)

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        durable, stage = self.real.prepare(checkpoint_id), self.ledger.prepare(checkpoint_id)
        if durable is None or stage is None:
            assert durable is stage, "both have the same rows"
            return None
        stamp, target, world = self._stamp, self.sink.target, self.sink.outside.world
        self.parts += 1

        def both() -> Sequence[bytes]:
            with world.uninterrupted():
                made = tuple(durable())
            staged = stage()
            for item in staged:
                target.committables[item.decode()] = made
                target.stamps[item.decode()] = stamp
            return staged

        return both

    def close(self) -> None:
        self.ledger.close()
        self.real.close()


class _PairedCommitter(LedgerCommitter):
    def __init__(self, sink: PairedSink, context: CommitterContext) -> None:
        super().__init__(sink.outside, context)
        self._sink = sink
        committer = sink.real.committer(context)
        assert committer is not None
        self._real = committer

    def _commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        outside, names = self._outside, [item.decode() for item in committables]
        world, target = outside.world, self._sink.target
        world.io_point()
        for name in names:
            self._check_name(name)
            if name not in outside.rolled_back:
                self._check_order(name, checkpoint_id)
        fails, fails_after = bool(outside.commit_failures), world.chance() < 0.5
        outside.commit_failures -= fails
        if fails and not fails_after:
            raise StorageError(f"the target does not answer {SIM}")
        with self._may_be_superseded(names), target.under_way(target.commits, names):
            self._real.commit(checkpoint_id, self._sink.real_committables(committables))
        if not outside.rolled_back.keys().isdisjoint(names):
            raise StorageError(f"{names} was rolled back: the job has rewound to an older checkpoint {SIM}")
        target.confirm(list(dict.fromkeys((*target.committed, *names))))
        if fails:
            raise StorageError(f"the target has not answered in time {SIM}")

    @contextmanager
    def _may_be_superseded(self, names: Sequence[str]) -> Iterator[None]:
        """Mark the errors that are right: those of a commit that others have overtaken."""
        try:
            yield
        except MidstreamError as error:
            if not self._is_superseded() and self._outside.rolled_back.keys().isdisjoint(names):
                raise
            raise StorageError(f"{error} {SIM}") from error

    def abort(self, committables: Sequence[bytes]) -> None:
        super().abort(committables)
        self._real.abort(self._sink.real_committables(committables))

    def close(self) -> None:
        self._real.close()


@dataclass(slots=True)
class _Uninterrupted(Executor):
    """An executor whose work is not interleaved with that of the same process, which would wait for its lock."""

    executor: Executor
    world: World

    def post(self, mail: Mail) -> None:
        self.executor.post(mail)

    def call_later(self, delay_s: float, mail: Mail) -> Timer:
        return self.executor.call_later(delay_s, mail)

    def submit(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        def alone() -> T:
            with self.world.uninterrupted():
                return work()

        self.executor.submit(alone, done)
