"""Checks the contract of a `Sink`, its writers and its `Committer`: every row once, despite restarts at any time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import pyarrow as pa

from midstream.connectors.memory.python_rows import table_rows
from midstream.engine.core.batches import conform
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.interfaces import Storage
from midstream.engine.core.schemas import SchemaLike, as_schema
from midstream.engine.operators.sink_api import (
    CommittedOutput,
    Committer,
    CommitterContext,
    Sink,
    SinkWriter,
    WriterContext,
)
from midstream.inprocess.virtual_loop import MemoryStorage, VirtualLoop
from midstream.testing.inputs import as_batch, as_sent

Target: TypeAlias = "tuple[Sink, Callable[[], Iterable[Mapping[str, Any]]]]"
"""A sink that writes to an empty target, and a function that reads the rows visible to others there."""

UID: Final = "sink"
JOB: Final = "job-of-the-check"
NEXT_JOB: Final = "next-start-of-it"
SAMPLE: Final = {"n": int, "text": str}
SAMPLE_ROWS: Final = 12


def check_sink(
    target: Callable[[], Target], schema: SchemaLike = SAMPLE, rows: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Check that a sink of your own, with its writers and its committer, shows every row exactly once.

    A sink without a committer is at-least-once: only its writing is checked.

    `target`: returns a sink for a new, empty target, and a function that reads what is visible there; it is called for
    each scenario.
    `schema`, `rows`: at least six different rows to write, if the sink does not accept the columns `n` and `text`.

    Raises AssertionError stating what went wrong, and after which calls: rows that are visible before they are
    committed, or twice because `commit` was repeated by another process; rows of an abandoned attempt; a zombie, a
    writer of an attempt that is over but continues to write, which damages what the next one has written; rows of two
    subtasks that overwrite each other; a driver that is overtaken in the middle of a commit, or while it rolls back
    output, and damages that of its successor; output that was rolled back and remains, or is committed later.

        >>> from tempfile import mkdtemp
        >>> from midstream.connectors import FileSink
        >>> def target():
        ...     directory = Path(mkdtemp(dir=".")).absolute()
        ...     def read():
        ...         return [row for file in directory.glob("*") for row in pl.read_parquet(file).to_dicts()]
        ...     return FileSink(directory), read
        >>> testing.check_sink(target)
    """
    if not callable(target):
        raise AssertionError(f"check_sink: {target!r} is not a function that returns a sink for an empty target")
    columns = as_schema(schema, "check_sink")
    given = [{"n": n, "text": f"row {n}"} for n in range(SAMPLE_ROWS)] if rows is None else list(rows)
    if len(given) < 6 or len({repr(row) for row in given}) < len(given):
        raise AssertionError("check_sink: give at least six rows, all different")
    batch = as_batch(given, columns, "check_sink")
    for scenario in _SCENARIOS:
        made = target()
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Sink) and callable(made[1])):
            raise AssertionError(
                f"check_sink: target() returned {made!r}; it must return a sink for an empty target and a function "
                "that reads it"
            )
        tested = _TestedSink(*made, batch)
        if scenario in (_plain, _subtasks) or tested.committer() is not None:
            tested.validate()
            scenario(tested)


@dataclass(slots=True)
class _TestedSink:
    """A sink and its target, for one scenario."""

    sink: Sink
    read: Callable[[], Iterable[Mapping[str, Any]]]
    batch: pa.RecordBatch
    storage: Storage = field(default_factory=MemoryStorage)
    """The storage of the job's checkpoints."""

    @property
    def name(self) -> str:
        return type(self.sink).__name__

    def copy(self) -> Sink:
        """Return a copy, as a slot or a restarted driver gets it."""
        return as_sent(self.sink, self.name, "; open connections and files in the writer and the committer")

    def validate(self, restoring: bool = False) -> None:
        try:
            self.sink.validate(self.batch.schema, restoring)
        except Exception as error:
            raise AssertionError(
                f"{self.name}.validate refuses {'to resume' if restoring else 'an empty target'}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def writer(self, subtask: int = 0, attempt: int = 0, job_id: str = JOB) -> _TestWriter:
        return _TestWriter(self.copy(), self.batch.schema, self.name, subtask, attempt, self.storage, job_id)

    def committer(self, job_id: str = JOB) -> Committer | None:
        return self.copy().committer(CommitterContext(UID, UID, job_id, self.storage, threading.Event()))

    def driver(self, job_id: str) -> Committer:
        """Return the committer of a driver, for a sink that has one."""
        committer = self.committer(job_id)
        assert committer is not None
        return committer

    def part(self, number: int, of: int) -> pa.RecordBatch:
        rows = self.batch.num_rows
        first, end = rows * number // of, rows * (number + 1) // of
        return self.batch.slice(first, end - first)

    def expect(self, expected: Sequence[pa.RecordBatch], when: str) -> None:
        """Check that exactly these rows are visible, in any order."""
        schema = self.batch.schema
        table = pa.Table.from_batches(list(expected), schema=schema)
        expected_rows = Counter(map(repr, table_rows(table)))
        visible = list(self.read())
        try:
            found_batch = as_batch(visible, schema, "what the target shows")
        except Exception as error:
            raise AssertionError(
                f"{self.name}: {when}, the target shows rows that are not of the schema: {error}"
            ) from error
        found = Counter(map(repr, table_rows(pa.Table.from_batches([conform(found_batch, schema, "target")]))))
        missing, extra = expected_rows - found, found - expected_rows
        if missing or extra:
            parts = [
                f"{kind}: {counted.total()}, such as {next(iter(counted))}"
                for kind, counted in (("rows missing", missing), ("rows that should not be there", extra))
                if counted
            ]
            raise AssertionError(f"{self.name}: {when}, {'; '.join(parts)}")


class _TestWriter:
    """A writer with its own event loop; every wait runs to its end."""

    def __init__(
        self, sink: Sink, schema: pa.Schema, name: str, subtask: int, attempt: int, storage: Storage, job_id: str
    ) -> None:
        self._loop = VirtualLoop(1_700_000_000_000_000)
        self._name = name
        self._failures: list[BaseException] = []
        self.may_fail = False
        """Whether it may be refused, as a zombie may."""
        fail = self._failures.append
        context = WriterContext(UID, UID, subtask, attempt, job_id, schema, self._loop, fail, storage)
        self._writer = sink.writer(context)
        if not isinstance(self._writer, SinkWriter):
            raise AssertionError(f"{name}.writer returned {self._writer!r}, not a SinkWriter")

    def write(self, batch: pa.RecordBatch) -> _TestWriter:
        for row in range(batch.num_rows):
            if not self._writer.ready():
                self._writer.on_ready(lambda: None)
                self._settle()
                if not self._writer.ready():
                    raise AssertionError(f"{self._name}: ready() stays False though all of its work is done")
            self._writer.write(batch.slice(row, 1))
        self._settle()
        return self

    def prepare(self, checkpoint_id: int) -> tuple[bytes, ...]:
        self._settle()
        durable = self._writer.prepare(checkpoint_id)
        self._settle()
        made = () if durable is None else tuple(durable())
        self._settle()
        if not all(isinstance(each, bytes) for each in made):
            raise AssertionError(
                f"{self._name}: prepare returned {made!r}; committables are stored in checkpoints and must be bytes"
            )
        return made

    def close(self) -> None:
        self._writer.close()
        self._settle()

    def _settle(self) -> None:
        self._loop.run()
        if self._failures and not self.may_fail:
            raise AssertionError(f"{self._name}: the writer failed") from self._failures[0]


def _commit(tested: _TestedSink, checkpoint_id: int, committables: Sequence[bytes], when: str) -> None:
    """Commit like a new driver that does not know what was done before."""
    _commit_by(tested.driver(JOB), tested, checkpoint_id, committables, when)


def _commit_by(
    committer: Committer, tested: _TestedSink, checkpoint_id: int, committables: Sequence[bytes], when: str
) -> None:
    tested.sink.check_committables(checkpoint_id, committables)
    try:
        committer.commit(checkpoint_id, committables)
    except Exception as error:
        raise AssertionError(f"{tested.name}: {when}, commit raised {type(error).__name__}: {error}") from error


def _plain(tested: _TestedSink) -> None:
    """Write, prepare and commit."""
    writer = tested.writer().write(tested.batch)
    committables = writer.prepare(1)
    if tested.committer() is None:
        if committables:
            raise AssertionError(
                f"{tested.name}: prepare returns committables, but committer() is None, so they would never be committed"
            )
        writer.close()
        tested.expect([tested.batch], "after all rows were written and the writer closed")
        return
    tested.expect([], "after prepare, before anything was committed")
    if not committables:
        raise AssertionError(f"{tested.name}: rows were written, but prepare returned nothing to commit")
    _commit(tested, 1, committables, "the first time")
    writer.close()
    tested.expect([tested.batch], "after commit")


def _again(tested: _TestedSink) -> None:
    """Repeat a commit, as after a restore, and by another process."""
    writer = tested.writer()
    first = writer.write(tested.part(0, 2)).prepare(1)
    other = tested.writer(subtask=1).write(tested.part(1, 2))
    second = other.prepare(1)
    for time in ("the first time", "a second time", "a third time"):
        _commit(tested, 1, (*first, *second), time)
        tested.expect([tested.batch], f"after commit {time}, by another process each time")
    tested.validate(restoring=True)
    _commit(tested, 1, (*first, *second), "after validate(restoring=True)")
    tested.expect([tested.batch], "after the job was restored and has committed once more")


def _checkpoints(tested: _TestedSink) -> None:
    """Make several checkpoints, in order; between two of them there may be no rows."""
    writer = tested.writer()
    seen: list[pa.RecordBatch] = []
    for checkpoint_id in range(1, 4):
        part = tested.part(checkpoint_id - 1, 3)
        committables = writer.write(part).prepare(checkpoint_id)
        tested.expect(seen, f"before checkpoint {checkpoint_id} was committed")
        _commit(tested, checkpoint_id, committables, f"of checkpoint {checkpoint_id}")
        seen.append(part)
        tested.expect(seen, f"after checkpoint {checkpoint_id} was committed")
        nothing = writer.prepare(checkpoint_id + 10)
        if nothing:
            _commit(tested, checkpoint_id + 10, nothing, "of a checkpoint without rows")
            tested.expect(seen, "after a commit without rows")
    writer.close()
    tested.expect(seen, "after the writer was closed")


def _crash(tested: _TestedSink) -> None:
    """Check that rows which were written but not prepared, or prepared and never committed, are never visible."""
    lost = tested.writer()
    lost.write(tested.batch)
    lost.close()
    tested.expect([], "after a writer was closed that had prepared nothing")
    abandoned = tested.writer(attempt=1).write(tested.batch).prepare(1)
    again = tested.writer(attempt=2).write(tested.batch)
    committables = again.prepare(1)
    _commit(tested, 1, committables, "of the attempt after one that had failed")
    tested.expect([tested.batch], "after an attempt was abandoned after prepare, and the next one has committed")
    committer = tested.committer()
    assert committer is not None
    for time in ("the first time", "a second time"):
        try:
            committer.abort(abandoned)
        except Exception as error:
            raise AssertionError(
                f"{tested.name}: {time}, abort raised {type(error).__name__}: {error}; aborting what no longer exists "
                "must not raise"
            ) from error
    tested.expect([tested.batch], "after abandoned committables were aborted, twice")
    again.close()


def _zombie(tested: _TestedSink) -> None:
    """Let a writer of an ended attempt continue for a while, as it may on another machine."""
    zombie = tested.writer(attempt=0)
    zombie.write(tested.part(0, 2))
    new = tested.writer(attempt=1).write(tested.part(0, 2))
    zombie.write(tested.part(1, 2))
    committables = new.prepare(1)
    zombies = zombie.prepare(1)
    zombie.close()
    _commit(tested, 1, committables, "after a writer of the attempt before has prepared and closed")
    tested.expect(
        [tested.part(0, 2)], "after commit, when a writer of the attempt before has prepared and closed in between"
    )
    rest = new.write(tested.part(1, 2)).prepare(2)
    _commit(tested, 2, rest, "of the next checkpoint")
    tested.expect([tested.batch], "after the commit of the next checkpoint")
    if set(zombies) & {*committables, *rest}:
        raise AssertionError(
            f"{tested.name}: writers of two attempts returned the same committable: they write to the same target"
        )
    new.close()


def _subtasks(tested: _TestedSink) -> None:
    """Let two subtasks and two attempts write concurrently."""
    writers = [tested.writer(subtask=subtask) for subtask in range(3)]
    for subtask, writer in enumerate(writers):
        writer.write(tested.part(subtask, 3))
    committables = [each for writer in writers for each in writer.prepare(1)]
    if tested.committer() is not None:
        _commit(tested, 1, committables, "of three subtasks")
    for writer in writers:
        writer.close()
    tested.expect([tested.batch], "after three subtasks have written a third each")


def _overtaken(tested: _TestedSink) -> None:
    """Let a driver that was presumed dead complete a commit after the next start of the job has taken over."""
    zombie = tested.writer().write(tested.part(0, 2))
    first = zombie.prepare(1)
    frozen, late, successor = tested.driver(JOB), tested.driver(JOB), tested.driver(NEXT_JOB)
    _commit_by(successor, tested, 1, first, "by the start that resumes from the checkpoint")
    writer = tested.writer(job_id=NEXT_JOB).write(tested.part(1, 2))
    second = writer.prepare(2)
    zombie.may_fail = True
    with suppress(Exception):  # as a sink may refuse it
        zombie.write(tested.part(0, 2)).prepare(2)
    zombie.close()
    _too_late(frozen, 1, first)
    tested.expect([tested.part(0, 2)], "after a driver that was overtaken has committed the checkpoint, too")
    _commit_by(successor, tested, 2, second, "of the next start, after a driver that it has overtaken has committed")
    tested.expect([tested.batch], "after the next start has committed its first checkpoint")
    _too_late(late, 1, first)
    tested.expect([tested.batch], "after a driver that was overtaken has committed an older checkpoint")
    writer.close()


def _too_late(committer: Committer, checkpoint_id: int, committables: Sequence[bytes]) -> None:
    """Commit as a driver that was overtaken. It may be refused."""
    with suppress(Exception):
        committer.commit(checkpoint_id, committables)


def _rolled_back(tested: _TestedSink) -> None:
    """Roll back newer output, if the sink can do that, while a driver that was presumed dead still commits."""
    output = CommittedOutput(UID, frozenset({JOB}))
    writer, prepared = tested.writer(), []
    for checkpoint_id in range(1, 5):
        prepared.append(writer.write(tested.part(checkpoint_id - 1, 6)).prepare(checkpoint_id))
    first, second, third, fourth = prepared
    kept = [tested.part(0, 6), tested.part(1, 6)]
    for checkpoint_id, committables in ((1, first), (2, second), (3, third)):
        _commit(tested, checkpoint_id, committables, f"of checkpoint {checkpoint_id}")
    newest = tested.sink.newest_committed(output)
    if newest not in (3, None):
        raise AssertionError(f"{tested.name}: newest_committed returned {newest!r} after the commit of checkpoint 3")
    held = replace(output, held=tuple((number, each) for number, items in ((3, third), (4, fourth)) for each in items))
    if not _can_roll_back(tested.sink, held, 2):
        return
    frozen, drivers = tested.driver(JOB), (tested.copy(), tested.copy())
    for sink in drivers:
        sink.check_rollback(held, 2)
    for time in ("the first time", "a second time"):
        drivers[0].roll_back(held, 2, second)
        tested.expect(kept, f"after output newer than checkpoint 2 was rolled back {time}")
    _too_late(frozen, 4, fourth)
    tested.expect(kept, "after a driver that was overtaken has committed a checkpoint that was rolled back")
    successor = tested.driver(NEXT_JOB)
    _commit_by(successor, tested, 2, second, "repeated after a rollback to this checkpoint")
    writer = tested.writer(job_id=NEXT_JOB)
    for checkpoint_id, number in ((5, 2), (6, 3)):
        committables = writer.write(tested.part(number, 6)).prepare(checkpoint_id)
        if checkpoint_id == 6:  # one is committed by then, the other one is not
            with suppress(Exception):
                drivers[1].roll_back(held, 2, second)
            tested.expect(
                kept, "after a driver that was overtaken has rolled back output that the next start has committed"
            )
        _commit_by(successor, tested, checkpoint_id, committables, f"of checkpoint {checkpoint_id} after a rollback")
        kept.append(tested.part(number, 6))
        tested.expect(kept, f"after the commit of checkpoint {checkpoint_id}, after a rollback")
    writer.close()


def _rolled_back_to_pending(tested: _TestedSink) -> None:
    """Roll back to a checkpoint whose own output is still to be committed."""
    output = CommittedOutput(UID, frozenset({JOB}))
    writer = tested.writer()
    first, second = (writer.write(tested.part(number, 6)).prepare(number + 1) for number in range(2))
    held = replace(output, held=tuple((2, each) for each in second))
    if not _can_roll_back(tested.sink, held, 1):
        return
    tested.sink.check_rollback(held, 1)
    tested.sink.roll_back(held, 1, first)
    tested.expect([], "after a rollback to a checkpoint that is not committed yet")
    _commit_by(tested.driver(NEXT_JOB), tested, 1, first, "of the checkpoint to which output was rolled back")
    tested.expect([tested.part(0, 6)], "after the commit of the checkpoint to which output was rolled back")
    writer.close()


def _can_roll_back(sink: Sink, output: CommittedOutput, after: int) -> bool:
    try:
        sink.check_rollback(output, after)
    except ConfigError:
        return False
    return True


_SCENARIOS: Final = (
    *(_plain, _again, _checkpoints, _crash, _zombie, _subtasks, _overtaken),
    *(_rolled_back, _rolled_back_to_pending),
)
