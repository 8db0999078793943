"""The contract of sinks: writers on the subtasks, committers on the driver or on slots; two-phase commit.

Committables travel with the checkpoint acknowledgement, never as records, and are kept in the checkpoint's metadata
until they are committed. After a restore they are committed again, so `commit` must be idempotent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from midstream.core.errors import ConfigError, InvariantError
from midstream.core.seams import Executor, Signal, Storage
from midstream.operators.user_metrics import UserMetrics
from midstream.state.pickles import OwnCode


@dataclass(frozen=True, slots=True)
class WriterContext:
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
    """What a committer is given: the job and sink, the storage, and a signal to stop."""

    uid: str
    name: str
    job_id: str
    storage: Storage | None
    """The job's checkpoint storage; None if the job has none."""
    stopped: Signal
    """Set when the commit is no longer needed: its attempt is over, or its process ends.

    A commit that waits for a server waits for this as well, with `stopped.wait(seconds)`, and raises once it is set.
    """


class SinkWriter(ABC):
    """The part of a sink that takes rows. It runs on the loop thread, where it must never block."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None: ...

    def ready(self) -> bool:
        """Whether the writer can take more rows within bounded memory; if not, the task waits for `on_ready`."""
        return True

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Register `wake`, which must be called on the loop thread whenever `ready` may have become true."""

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        """Close the output written since the last call. The returned function runs on the I/O pool, makes this output
        durable, and returns the committables.

        Returns None if there is nothing to commit.
        """
        return None

    def close(self) -> None:
        """Stop the writer. Output that was not prepared may be deleted."""


class Committer(ABC):
    """Commits on the I/O pool of the driver or, with `Sink.commits_on_slots`, of a slot; one call at a time per object."""

    @abstractmethod
    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Make the output of these committables visible, exactly once even if the call is repeated.

        Called only when there is something to commit.
        """

    def abort(self, committables: Sequence[bytes]) -> None:
        """Clean up committables of a checkpoint that never completed."""

    def close(self) -> None:
        """Release connections and threads; no call follows.

        Called when the attempt is over (on slots) or the job is (on the driver). It is not called in a process that is
        killed, and not reliably in one that ends: do not rely on it to remove anything.
        """


@dataclass(frozen=True, slots=True)
class Output:
    """What several starts of one job have written through one sink."""

    uid: str
    jobs: frozenset[str]
    """The ids of all starts that may have resumed from one another's checkpoints."""
    held: tuple[tuple[int, bytes], ...] = ()
    """Committables of newer checkpoints that are complete, each with the id it was prepared for.

    Those that are no longer pending have been committed, possibly to an earlier target of the sink.
    """


class Sink(ABC):
    """The configuration of a sink; it must pickle."""

    own: OwnCode = OwnCode()
    """The code that the job ships; set before the job is shipped. Untyped values can be instances of its classes."""
    commits_on_slots: ClassVar[bool] = False
    """Whether commits and aborts run on the slots of the job, in parallel by `lane`, instead of on the driver."""

    @property
    def is_transactional(self) -> bool:
        """Whether rows appear when a checkpoint completes; otherwise they appear at once, and again after failures."""
        return type(self).committer is not Sink.committer

    @property
    def needs_checkpoints(self) -> bool:
        """Whether the sink cannot work in a job that has no checkpoint directory."""
        return False

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        """Raise if this stream cannot be written to the target. Runs on the driver, before the job starts.

        Unless `restoring`, also raise if the target is in use (for example, a directory with files in it).
        """

    def check_parallelism(self, subtasks: int, beside: Sequence[tuple[Sink, int]] = ()) -> None:
        """Raise if the target cannot serve so many writers at once. Runs on the driver, after `validate`.

        `beside`: the other sinks of the job, and their subtasks.
        """

    def check_committables(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Raise if these committables cannot be committed. Runs on the driver, before a job resumes from their
        checkpoint.

        They may have been committed already, and the sink may have been replaced since. Changes nothing.
        """

    def newest_committed(self, output: Output) -> int | None:
        """Return the newest checkpoint from which any of these jobs has committed something to this target; 0 if none
        has. Runs on the driver.

        None, the default, means that the sink cannot tell; the job then assumes that all completed checkpoints are
        committed.
        """
        return None

    def check_take_back(self, output: Output, after: int) -> None:
        """Raise ConfigError with the reason if `take_back` cannot do its work. Runs on the driver; changes nothing."""
        raise ConfigError("it cannot take back what it has committed")

    def take_back(self, output: Output, after: int, kept: Sequence[bytes]) -> None:
        """Remove what these jobs have committed from checkpoints newer than `after`, and nothing else. Runs on the
        driver.

        Afterwards none of these jobs can commit anything newer. `kept`: committables that are still to be committed.
        The call is repeated after a crash, so part of the work may already be done.
        """
        raise InvariantError(f"{type(self).__name__} reports that it can take back, but has no take_back()")

    @abstractmethod
    def writer(self, context: WriterContext) -> SinkWriter: ...

    def committer(self, context: CommitterContext) -> Committer | None:
        """Return a committer; None for sinks that have nothing to commit (print).

        With `commits_on_slots` there is one for each lane, and calls for different lanes may run at the same time.
        """
        return None

    def lane(self, committable: bytes) -> int:
        """Return the lane of this committable, with `commits_on_slots`; by default all are in lane 0.

        Committables of one lane are committed in the order in which they were prepared, all of a checkpoint in one
        call, by one slot for the whole attempt; different lanes are committed concurrently. Called on the driver's loop
        thread: read only `committable`.
        """
        return 0
