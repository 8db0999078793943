"""The contract of sinks: writers on the subtasks, committers on the driver or on slots; two-phase commit.

Committables travel with the checkpoint acknowledgement, never as records, and are kept in the checkpoint's metadata
until they are committed. After a restore they are committed again, so `commit` must be idempotent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import msgspec
import pyarrow as pa

from midstream.engine.core.errors import UNDECODABLE, ConfigError, InvariantError, StorageError
from midstream.engine.core.interfaces import Executor, Signal, Storage
from midstream.engine.operators.user_metrics import UserMetrics
from midstream.engine.state.safe_pickle import OwnCode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WriterContext:
    """What a writer is given: its subtask and attempt, the columns, and the pool for slow work.

    `attempt` grows with every restart: two attempts must never write the same file. `fail` ends the attempt with an
    error from work on the pool.

        def writer(self, context):
            return MyWriter(f"{self.directory}/{context.job_id}-{context.attempt}-{context.subtask}", context.executor)
    """

    uid: str
    name: str
    subtask: int
    attempt: int
    """The number of the attempt, which grows with every restart: two attempts must never write the same file."""
    job_id: str
    schema: pa.Schema
    executor: Executor
    fail: Callable[[BaseException], None]
    storage: Storage | None = None
    """The job's checkpoint storage, for the I/O pool only; None if the job has none."""
    metrics: UserMetrics = field(default_factory=UserMetrics)
    """Counters and gauges, for the loop thread only."""


@dataclass(frozen=True, slots=True)
class CommitterContext:
    """What a committer is given: the job and sink, the storage, a signal to stop, and metrics.

    For example:

        def committer(self, context):
            return MyCommitter(self.connect(), context.stopped)
    """

    uid: str
    name: str
    job_id: str
    storage: Storage | None
    """The job's checkpoint storage; None if the job has none."""
    stopped: Signal
    """Set when the commit is no longer needed: its attempt is over, or its process ends.

    A commit that waits for a server must also wait for this, with `stopped.wait(seconds)`, and raise once it is set.
    """
    metrics: UserMetrics = field(default_factory=UserMetrics)
    """Counters and gauges, for one thread at a time. Only those of committers on the driver are shown."""


class SinkWriter(ABC):
    r"""Takes the rows of one subtask, on the thread that all tasks of the slot share, where it never blocks.

    A writer that only has `write` is at least once. With `prepare`, and a Committer, it is exactly once.

        class AppendWriter(SinkWriter):
            def __init__(self, path):
                self.file = path.open("a")

            def write(self, batch):
                self.file.writelines(f"{n}\n" for n in batch.column("n").to_pylist())

            def close(self):
                self.file.close()
    """

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take a batch of rows; slow work is submitted to the executor of the context.

        `batch`: an Arrow record batch with the columns of the stream; it must not be changed.

            def write(self, batch):
                self.batches.append(batch)
        """
        ...

    def ready(self) -> bool:
        """Return whether the writer can take more rows within bounded memory; if not, the task waits for `on_ready`.

        By default always.

            def ready(self):
                return self.bytes_waiting < 16 * 2**20
        """
        return True

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Register a function to be called whenever `ready` may have become true.

        `wake`: to be called on the loop thread.

            def on_ready(self, wake):
                self.wake = wake
        """

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        """Close what was written since the last call, and return what makes it durable.

        `checkpoint_id`: the checkpoint that covers these rows.

        Return a function that runs on the I/O pool, makes the rows durable, and returns the committables; or None if
        there is nothing to commit, as this default does.

            def prepare(self, checkpoint_id):
                batches, self.batches = self.batches, []
                return (lambda: [self.store(batches)]) if batches else None
        """
        return None

    def close(self) -> None:
        """Stop. What was not prepared may be deleted; no call follows.

        For example:

            def close(self):
                self.file.close()
        """


class Committer(ABC):
    """Makes prepared output visible; on the I/O pool of the driver or, with `Sink.commits_on_slots`, of a slot.

    There is one call at a time per object.

        class RenameCommitter(Committer):
            def commit(self, checkpoint_id, committables):
                for path in map(Path, map(bytes.decode, committables)):
                    if path.exists():
                        path.rename(path.with_suffix(".json"))
    """

    @abstractmethod
    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Make the output of these committables visible, exactly once even if the call is repeated.

        Called only when there is something to commit.

        `checkpoint_id`: the checkpoint for which it was prepared.
        `committables`: what the functions that `prepare` returned have returned, of all subtasks (with lanes, of one
        lane).

        A call that raises is repeated four times, first after 0.2 s, then after twice the previous pause. Then the job
        restarts from its checkpoint, and commits before it deploys a task. A ConfigError or SchemaError ends the job
        at the first call.

            def commit(self, checkpoint_id, committables):
                for name in map(bytes.decode, committables):
                    self.store.publish(name)  # no effect if it is there already
        """

    def abort(self, committables: Sequence[bytes]) -> None:
        """Clean up committables of a checkpoint that never completed.

        `committables`: as for `commit`.

            def abort(self, committables):
                for name in map(bytes.decode, committables):
                    self.store.delete(name)
        """

    def close(self) -> None:
        """Release connections and threads; no call follows.

        Called when the attempt is over (on slots) or the job is (on the driver). It is not called in a process that is
        killed, and not reliably in one that ends: do not leave anything to it that must not remain.

            def close(self):
                self.connection.close()
        """


@dataclass(frozen=True, slots=True)
class CommittedOutput:
    """The output that several starts of one job have written through one sink.

    `uid`: that of the sink.
    `jobs`: the ids of all starts that may have resumed from one another's checkpoints.
    `held`: committables of newer checkpoints that are complete, each with the id it was prepared for. Those that are
    no longer pending were committed, perhaps to an earlier target of the sink.

        def newest_committed(self, output):
            return max((self.log.newest(job) for job in output.jobs), default=0)
    """

    uid: str
    jobs: frozenset[str]
    """The ids of all starts that may have resumed from one another's checkpoints."""
    held: tuple[tuple[int, bytes], ...] = ()
    """Committables of newer checkpoints that are complete, each with the id it was prepared for.

    Those that are no longer pending have been committed, possibly to an earlier target of the sink.
    """


class Sink(ABC):
    r"""A sink of your own: its configuration, which must pickle. It makes a writer for each subtask.

    With a Committer, which makes the output of a completed checkpoint visible, it is exactly once. `testing.check_sink`
    checks it.

        >>> from midstream import Sink, SinkWriter
        >>> class Appending(SinkWriter):
        ...     def __init__(self, path):
        ...         self.path = path
        ...     def write(self, batch):
        ...         with self.path.open("a") as file:
        ...             file.writelines(f"{n}\n" for n in batch.column("n").to_pylist())
        >>> class AppendTo(Sink):
        ...     def __init__(self, path):
        ...         self.path = path
        ...     def writer(self, context):
        ...         return Appending(self.path)
        >>> _ = env.generate(lambda i: {"n": i}, count=3).sink(AppendTo(Path("numbers.txt"))).uid("numbers")
    """

    own: OwnCode = OwnCode()
    """The code that the job ships; set before the job is shipped. Untyped values can be instances of its classes."""
    commits_on_slots: ClassVar[bool] = False
    """Whether commits and aborts run on the slots of the job, in parallel by `lane`, instead of on the driver."""
    output_lasts: ClassVar[bool] = True
    """False for in-memory output, which never outlives a start and so is never newer than the checkpoint from which the
    next start resumes.
    """

    @property
    def is_transactional(self) -> bool:
        """Whether rows appear when a checkpoint completes; otherwise they appear immediately, and again after failures."""
        return type(self).committer is not Sink.committer

    @property
    def needs_checkpoints(self) -> bool:
        """Whether the sink cannot work in a job that has no checkpoint directory."""
        return False

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        """Raise an error if this stream cannot be written to the target. Runs on the driver, before the job starts.

        `schema`: the columns of the stream.
        `restoring`: the job resumes from a checkpoint. If not, also raise if the target is in use (for example, a
        directory with files in it).

            def validate(self, schema, restoring):
                if not restoring and any(self.directory.iterdir()):
                    raise ConfigError(f"{self.directory} is not empty")
        """

    def datasets(self) -> Sequence[str]:
        """Return the URIs of what the sink writes, for lineage, as those of `Source.datasets`; by default none.

        For example:

            def datasets(self):
                return [f"s3://{self.bucket}/{self.prefix}"]
        """
        return ()

    def check_parallelism(self, subtasks: int, beside: Sequence[tuple[Sink, int]] = ()) -> None:
        """Raise an error if the target cannot serve this many concurrent writers. Runs on the driver, after `validate`.

        `subtasks`: the number of writers.
        `beside`: the other sinks of the job, and their subtasks.

            def check_parallelism(self, subtasks, beside=()):
                if subtasks > self.connections_max:
                    raise ConfigError(f"{subtasks} subtasks, but only {self.connections_max} connections")
        """

    def check_committables(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Raise an error if these committables cannot be committed. Runs on the driver, before a job resumes from their
        checkpoint.

        They may have been committed already, and the sink may be another one by now. Changes nothing.

        `checkpoint_id`: the checkpoint for which they were prepared.
        `committables`: what is still to be committed.

            def check_committables(self, checkpoint_id, committables):
                for name in map(bytes.decode, committables):
                    if not self.store.has(name):
                        raise StorageError(f"{name} of checkpoint {checkpoint_id} is gone")
        """

    def newest_committed(self, output: CommittedOutput) -> int | None:
        """Return the newest checkpoint of which any of these jobs has committed something here; 0 if none has. Runs on
        the driver.

        `output`: the starts of the job.

        None, the default, means that the sink does not record it; the job then assumes that all completed checkpoints are
        committed.

            def newest_committed(self, output):
                return max((self.log.newest(job) for job in output.jobs), default=0)
        """
        return None

    def check_rollback(self, output: CommittedOutput, after: int) -> None:
        """Raise ConfigError with the reason if `roll_back` cannot do its work. Runs on the driver; changes nothing.

        `output`: the starts of the job.
        `after`: the checkpoint from which the job resumes.

        By default raises ConfigError: a sink cannot roll back what it has committed.

            def check_rollback(self, output, after):
                if not self.log.has_names_of(output.jobs):
                    raise ConfigError("the log does not record which files are newer")
        """
        raise ConfigError("it cannot roll back what it has committed")

    def roll_back(self, output: CommittedOutput, after: int, kept: Sequence[bytes]) -> None:
        """Remove what these jobs have committed of checkpoints newer than one of them, and nothing else. Runs on the
        driver.

        Afterwards none of them can commit anything newer either, not even one whose first commit is in progress. The call is repeated after a crash, so half of the work may have been done.

        `output`: the starts of the job.
        `after`: the checkpoint from which the job resumes.
        `kept`: committables that are still to be committed.

        The default raises InvariantError: a sink whose `check_rollback` permits it must have this method.

            def roll_back(self, output, after, kept):
                for name in self.log.names(output.jobs, after):
                    self.store.delete(name)
        """
        raise InvariantError(f"{type(self).__name__} reports that it can roll back, but has no roll_back()")

    @abstractmethod
    def writer(self, context: WriterContext) -> SinkWriter:
        """Make the writer of one subtask, in its slot.

        `context`: the subtask, the attempt, the columns, and the pool for slow work.

        Return a SinkWriter.

            def writer(self, context):
                return AppendWriter(self.path)
        """
        ...

    def committer(self, context: CommitterContext) -> Committer | None:
        """Make a committer.

        With `commits_on_slots` there is one for each lane, and calls for different lanes may run at the same time.

        `context`: the job and sink, the storage, and a signal to stop.

        Return a Committer; None, the default, for sinks that have nothing to commit (print).

            def committer(self, context):
                return MyCommitter(self.directory)
        """
        return None

    def lane(self, committable: bytes) -> int:
        """Return the lane of a committable, with `commits_on_slots`; by default all are in lane 0.

        Committables of one lane are committed in the order in which they were prepared, all of a checkpoint in one
        call, by one slot for the whole attempt; different lanes are committed concurrently. Called on the driver's loop
        thread: read only the committable.

        `committable`: what a writer has prepared.

            def lane(self, committable):
                return committable[0]  # the subtask, as the writer has put it there
        """
        return 0


def decoded(data: bytes, kind: type[T], who: str, where: str) -> T:
    """Decode a committable of `who`. Raises StorageError if another kind of sink prepared it.

    That happens when a job resumes from a checkpoint in which another sink had the uid.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        raise StorageError(f"{where}: what the checkpoint has to commit was not prepared by {who}: {error}") from error
