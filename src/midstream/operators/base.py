"""The contract between a task and the operators of its chain.

Life of an operator: `open`, then `restore` if there is state for it, then any order of
`process`, `advance_watermark`, `snapshot`, `checkpoint_completed` / `checkpoint_aborted`;
`end_input` once per port when that input ends, `finish` once all have, and `close` always.
All calls come from the loop thread, one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import pyarrow as pa

from midstream.core.seams import Clock, Executor, Ids, Storage, Timer
from midstream.operators.user_metrics import UserMetrics
from midstream.state.parts import StatePart
from midstream.state.pickles import OwnCode


class Output(Protocol):
    """Where an operator puts what it makes: the next operator of the chain, or the task's edges."""

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        """Hand on rows; `tag` names a side output."""
        ...

    def watermark(self, watermark_us: int) -> None:
        """Only for operators with `makes_watermarks`."""
        ...

    def idle(self, idle: bool) -> None:
        """Only for operators with `makes_watermarks`."""
        ...


class Splits(Protocol):
    """The splits that the source of this task reads, each by a number that means nothing outside of the task."""

    @property
    def current(self) -> int:
        """The split that the rows in hand are of: each batch is of one."""
        ...

    @property
    def open(self) -> Iterable[int]:
        """Those that the task has, begun or not, and has not read to the end."""
        ...

    @property
    def all_assigned(self) -> bool:
        """Whether some task has each split that was found (and that does not follow all the others)."""
        ...

    def is_starved(self, split: int, since_s: float) -> bool:
        """Whether the split has not had its turn since then (monotonic), though there may be rows of it."""
        ...

    def on_change(self, changed: Callable[[], None]) -> None:
        """Have `changed` called in a step of the task when `open` or `all_assigned` has changed."""
        ...


def never_stored(chunk_id: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class OperatorContext:
    uid: str
    name: str
    subtask: int
    parallelism: int
    max_parallelism: int
    key_groups: range
    """The key groups this subtask owns."""
    slice_s: float
    """How long one call may keep the loop, in seconds; longer work is to be done in slices."""
    clock: Clock
    executor: Executor
    ids: Ids
    storage: Storage | None
    """The job's checkpoint storage; None when the job has none."""
    call_at: Callable[[int, Callable[[], None]], Timer]
    """`call_at(time_ms, mail)`: run `mail` between two steps of this task once the wall clock reaches it.

    Not behind the end of the task's data, when nothing may be emitted any more: what is not due by then is dropped.
    """
    fail: Callable[[BaseException], None]
    """Fail the task from a mail that has no caller to raise to."""
    job_id: str = ""
    attempt: int = 0
    """Grows with every restart of the job (for sinks: see WriterContext)."""
    stored_bytes: Callable[[str], int | None] = never_stored
    """How long the chunk with this id is in a file of a completed checkpoint: a snapshot need only refer to it. None: in none."""
    splits: Splits | None = None
    """Of the source in this task, if every operator in between keeps their rows apart."""
    metrics: UserMetrics = field(default_factory=UserMetrics)


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """What one operator gives to a checkpoint."""

    parts: Mapping[str, StatePart] = field(default_factory=dict)
    committables: tuple[bytes, ...] = ()
    """What the sink's committer must commit once the checkpoint is complete."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`now` is taken on the loop; `later`, if any, runs on the I/O pool and gives the rest.

    `later` may touch only what it captured, all of it immutable.
    """

    now: SnapshotResult = SnapshotResult()
    later: Callable[[], SnapshotResult] | None = None

    def complete(self) -> SnapshotResult:
        """All of it. On the I/O pool; raises whatever `later` raises."""
        if self.later is None:
            return self.now
        rest = self.later()
        return SnapshotResult({**self.now.parts, **rest.parts}, (*self.now.committables, *rest.committables))


NOTHING = Snapshot()

KEY: Final = "the key"
"""Settings of state (`Operator.state_settings`) that say by which columns a stream is keyed begin with this."""


class Operator(ABC):
    """Base of all operators. An instance is configuration until `open`, and must pickle until then."""

    makes_watermarks: bool = False
    """True: watermarks from upstream stop here (but the one at the end of the stream does not)."""
    keeps_splits: bool = False
    """True: what it emits for a batch, it emits while it processes that batch."""
    own: OwnCode = OwnCode()
    """The code that the job ships; set before it does. Untyped values can be of its classes."""
    keeps_rows: bool = False
    """True: what it emits for a batch is one batch of a row for each of its rows, in order, or for fewer of them."""
    timers_dropped: int = 0
    """Timers of users that were set when the last ones had their turn, and never fire."""
    user_metrics: UserMetrics | None = None
    """Those of the user's function, once it is open."""

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        """What the operator's state depends on, before `open`: by part ("" for all of it), what it is and its value.

        State that was made with another value is not restored; both values are shown to people.
        """
        return {}

    def open(self, context: OperatorContext, out: Output) -> None:
        """Prepare to work. Must leave no trace outside the process."""

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        """Take back state; the task has already kept only the rows that belong to this subtask."""

    @abstractmethod
    def process(self, batch: pa.RecordBatch, port: int) -> None:
        """Handle one batch of input `port` (0, or 1 for the second input of connect())."""

    def advance_watermark(self, watermark_us: int) -> bool:
        """Event time has reached `watermark_us` on all ports; fire what is due.

        Returns False when the slice is used up and more is due: the task calls again with the
        same watermark, and forwards it only after True. What has not fired must still be in state.
        """
        return True

    def ready(self, wake: Callable[[], None]) -> bool:
        """Whether another batch can be taken. If not, `wake` is called on the loop once it may be."""
        return True

    def end_input(self, port: int) -> None:
        """No more rows will come on `port`."""

    def finish(self) -> None:
        """All inputs have ended; emit what is left."""

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        return NOTHING

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Every checkpoint up to this one is settled."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None: ...

    def close(self) -> None:
        """Let go of everything. Comes exactly once, also after a failure; must not raise for what is half open."""
