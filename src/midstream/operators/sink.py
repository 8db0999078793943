"""What a sink is: writers on the subtasks, committers on the driver or on slots; two-phase commit.

Committables travel with the checkpoint acknowledgement, never as records, and are kept in the
checkpoint's metadata until they are committed. After a restore they are committed again, so
`commit` must be idempotent.
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
    """Grows with every restart of the job: two attempts must never write the same file."""
    job_id: str
    schema: pa.Schema
    executor: Executor
    fail: Callable[[BaseException], None]
    storage: Storage | None = None
    """The job's checkpoint storage, for the I/O pool only; None when the job has none."""
    metrics: UserMetrics = field(default_factory=UserMetrics)
    """Counters and gauges, for the loop thread only."""


@dataclass(frozen=True, slots=True)
class CommitterContext:
    """For whom, and with what, a committer works."""

    uid: str
    name: str
    job_id: str
    storage: Storage | None
    """The job's checkpoint storage; None when the job has none."""
    stopped: Signal
    """Set when nothing waits for the commit any more: its attempt is over, or its process ends.

    A commit that waits for a server waits for this too, with `stopped.wait(seconds)`, and raises once it is set.
    """


class SinkWriter(ABC):
    """Takes rows on the loop thread; never blocks there."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None: ...

    def ready(self) -> bool:
        """False while the writer cannot take more without unbounded memory; the task then waits for `on_ready`."""
        return True

    def on_ready(self, wake: Callable[[], None]) -> None:
        """`wake` is to be called, on the loop thread, whenever `ready` may have become true."""

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        """Close what was written since the last call; the answer runs on the I/O pool, makes it durable and returns the committables.

        None when there is nothing to commit.
        """
        return None

    def close(self) -> None:
        """Stop; what was not prepared may be deleted."""


class Committer(ABC):
    """Runs on the I/O pool of the driver or, with `Sink.commits_on_slots`, of a slot; one call of an object at a time."""

    @abstractmethod
    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Make visible what was prepared, all of it once however often this is called for it.

        Called only when there is something to commit.
        """

    def abort(self, committables: Sequence[bytes]) -> None:
        """These belong to a checkpoint that never completed: clean them up."""

    def close(self) -> None:
        """No call comes after this one: let go of connections and threads.

        Called when the attempt is over (on slots) or the job is (on the driver). A process that is killed does
        not come to it, nor for certain one that ends: what must not be left behind is not to be left to it.
        """


@dataclass(frozen=True, slots=True)
class Output:
    """What several starts of one job have put out through one sink."""

    uid: str
    jobs: frozenset[str]
    """Their ids: all that may have gone on from one another's checkpoints."""
    held: tuple[tuple[int, bytes], ...] = ()
    """Committables of newer checkpoints that are complete, each with the id it was prepared for.

    What is no longer pending was committed: perhaps to where the sink wrote then, and not to where it does now.
    """


class Sink(ABC):
    """Configuration that pickles."""

    own: OwnCode = OwnCode()
    """The code that the job ships; set before it does. Untyped values can be of its classes."""
    commits_on_slots: ClassVar[bool] = False
    """Whether commits and aborts run on the slots of the job, in parallel by `lane`, instead of on the driver."""

    @property
    def is_transactional(self) -> bool:
        """Whether rows appear when a checkpoint completes; otherwise as they come, and after failures again."""
        return type(self).committer is not Sink.committer

    @property
    def needs_checkpoints(self) -> bool:
        """Whether it can do nothing in a job that has no checkpoint directory."""
        return False

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        """On the driver, before anything runs: raise if this stream cannot be written there.

        Unless `restoring`, also raise if the target is not free (a directory with files in it).
        """

    def check_parallelism(self, subtasks: int, beside: Sequence[tuple[Sink, int]] = ()) -> None:
        """On the driver, once validated: raise if the target cannot serve so many writers at once.

        `beside`: the other sinks of the job, and their subtasks.
        """

    def check_committables(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """On the driver, before a job goes on from a checkpoint that holds these: raise if they cannot be committed.

        They may have been committed already, and the sink may be another one by now. Changes nothing.
        """

    def newest_committed(self, output: Output) -> int | None:
        """On the driver: the newest checkpoint of which any of these jobs has committed something here; 0 if none has.

        None, by default: the sink cannot say. A job then takes it that all completed checkpoints are committed.
        """
        return None

    def check_take_back(self, output: Output, after: int) -> None:
        """On the driver: raise ConfigError, saying why, unless `take_back` can do what it is to do. Changes nothing."""
        raise ConfigError("it has no way to take back what it has committed")

    def take_back(self, output: Output, after: int, kept: Sequence[bytes]) -> None:
        """On the driver: remove what these jobs have committed of checkpoints newer than `after`, and nothing else.

        From then on none of them can commit anything newer either. `kept`: committables that are still to
        be committed. Whoever is killed meanwhile calls again, so half of it may have been done.
        """
        raise InvariantError(f"{type(self).__name__} says that it can take back, and has no take_back()")

    @abstractmethod
    def writer(self, context: WriterContext) -> SinkWriter: ...

    def committer(self, context: CommitterContext) -> Committer | None:
        """None for sinks that have nothing to commit (print).

        With `commits_on_slots` there is one for each lane, and calls for different lanes may come at the same time.
        """
        return None

    def lane(self, committable: bytes) -> int:
        """With `commits_on_slots`: which of the sink's lanes this committable goes. All go lane 0 by default.

        What goes one lane is committed in the order in which it was prepared, all of a checkpoint in one call, by
        one slot as long as an attempt lasts; different lanes are committed at the same time. Called on the
        driver's loop thread: look into `committable`, and nowhere else.
        """
        return 0
