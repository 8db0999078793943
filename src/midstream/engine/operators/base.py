"""The contract between a task and the operators of its chain.

The life cycle of an operator: `open`, then `restore` if there is state for it, then any order of `process`,
`advance_watermark`, `snapshot`, `checkpoint_completed` / `checkpoint_aborted`; `end_input` once per port when that
input ends, `finish` once all have, and `close` always. All calls come from the loop thread, one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import pyarrow as pa

from midstream.engine.core.elements import MIN_WATERMARK_US, Assigned
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.interfaces import (
    Clock,
    Done,
    Executor,
    Failed,
    FunctionCalls,
    Ids,
    OpenCalls,
    Outcomes,
    Storage,
    Timer,
    no_limit,
)
from midstream.engine.operators.user_metrics import UserMetrics
from midstream.engine.state.columnar import FrameRun
from midstream.engine.state.declared_state import DeclaredState
from midstream.engine.state.safe_pickle import OwnCode
from midstream.engine.state.state_parts import StatePart

T = TypeVar("T")


class Output(Protocol):
    """Receives what an operator emits: the next operator of the chain, or the task's edges."""

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        """Emit rows; `tag` names a side output."""
        ...

    def watermark(self, watermark_us: int) -> None:
        """Emit a watermark. Only for operators with `makes_watermarks` or `holds_watermarks`."""
        ...

    def idle(self, idle: bool, assigned: Assigned = ()) -> None:
        """Emit idleness or its end, with the splits that it considers (see `WatermarkStatus`). Only for operators with
        `makes_watermarks`."""
        ...


class SplitTimes(Protocol):
    """How far the splits of a task are in event time."""

    def progress_us(self, split: int) -> int:
        """Return the event time of a split, which the event time of its task never passes unless the split is idle."""
        ...


class Splits(Protocol):
    """The splits that the source of this task reads, each with a number that is only meaningful within the task."""

    @property
    def current(self) -> Sequence[tuple[int, int]]:
        """The splits of the batch that the task processes, each with how many of its rows come from it, in order.

        There are several only if every row has passed the operators before the one that called `on_change`.
        """
        ...

    @property
    def open(self) -> Iterable[int]:
        """The splits of the task that it has not read to the end, begun or not."""
        ...

    def held_back_at_us(self, split: int) -> int:
        """Return the highest watermark for which no row of an open split is late, before any has been read."""
        ...

    def is_held_to_its_end(self, split: int) -> bool:
        """Whether rows of an open split may be as early as `held_back_at_us` says until it has been read to its end."""
        ...

    def latest_us(self, split: int) -> int | None:
        """Return the latest event time that was noted of an open split, also before a restore."""
        ...

    def note_latest_us(self, split: int, time_us: int) -> None:
        """Note the latest event time of the rows so far of an open split, which checkpoints then have."""
        ...

    @property
    def waiting_from_us(self) -> int:
        """The highest watermark for which no row of the splits is late that are still to be assigned to a task.

        MAX_WATERMARK_US if all are that were found; splits marked `follows` do not count.
        """
        ...

    @property
    def assigned(self) -> Assigned:
        """How many splits of the source are assigned, to any task. Of these, `open` has all that are this task's."""
        ...

    @property
    def none_waits(self) -> bool:
        """Whether no split that was found can still be assigned to this task. Later discoveries may find new ones."""
        ...

    def quiet_until_s(self, split: int) -> float:
        """The time (monotonic) until which the split is known to have had no rows but those emitted; -inf if it ends.

        Rows of a split that ends always arrive, however long their reading takes.
        """
        ...

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` in a step of the task when `open`, `waiting_from_us`, `assigned` or `none_waits` has changed."""
        ...

    def limit_drift(self, times: SplitTimes, drift_us: int) -> None:
        """Do not read a split while it is further ahead than `drift_us` of those with which it is kept in step."""
        ...


class Submit(Protocol):
    def __call__(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None: ...


def no_submit(work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
    raise InvariantError("this operator runs outside of a task, and submits work")


def no_calls(of_coroutines: bool, threads_max: int, completed: Callable[[Outcomes], None]) -> FunctionCalls:
    raise InvariantError("this operator runs outside of a task, and opens calls")


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
    """The key groups that this subtask owns."""
    slice_s: float
    """How long one call may occupy the loop, in seconds; longer work must be sliced."""
    clock: Clock
    executor: Executor
    ids: Ids
    storage: Storage | None
    """The job's checkpoint storage; None if the job has none."""
    call_at: Callable[[int, Callable[[], None]], Timer]
    """`call_at(time_ms, mail)`: run `mail` between two steps of this task once the wall clock reaches `time_ms`,
    which may jump.

    Mails that are not due by the end of the task's data, when nothing may be emitted any more, are dropped.
    """
    call_later: Callable[[float, Callable[[], None]], Timer]
    """`call_later(delay_s, mail)`: the same, once `delay_s` seconds have passed on the monotonic clock."""
    fail: Callable[[BaseException], None]
    """Fail the task from a mail, which has no caller to raise to."""
    submit: Submit = no_submit
    """`submit(work, done)`: run `work`, which may block, on the I/O pool, and `done` with its outcome, `Done(value)` or
    `Failed(error)`, between two steps of this task, when it may emit.

    The pool's threads are few and also write checkpoints: for work that takes long, use few calls at a time. An outcome
    that comes after the end of the task's data, or after the attempt has ended, is dropped. A task whose operator
    `awaits_work` does not end its data before.
    """
    open_calls: OpenCalls = no_calls
    """Opens calls of a user's function, many at a time, whose outcomes arrive as those of `submit` do."""
    watermark_us: int = MIN_WATERMARK_US
    """The last watermark that the operator was offered before it was restored."""
    job_id: str = ""
    attempt: int = 0
    """The number of the attempt, which grows with every restart of the job (for sinks: see WriterContext)."""
    stored_bytes: Callable[[str], int | None] = never_stored
    """Returns the size of the chunk with this id if a file of a completed checkpoint holds it, so that a snapshot need
    only refer to it; None otherwise.
    """
    entry_bytes: Callable[[], int | None] = no_limit
    """Returns how many bytes the entries and timers of a process function may take as Python objects; None: any number.
    Whether there is a limit never changes.
    """
    splits: Splits | None = None
    """The splits of the source in this task; None unless every operator in between keeps their rows apart."""
    is_bounded: bool = False
    """Whether every source that the operator depends on is bounded."""
    metrics: UserMetrics = field(default_factory=UserMetrics)
    resources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What Spark has assigned to the slot, which its subtasks share: addresses by name, such as `{"gpu": ["0"]}`."""


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """One operator's part of a checkpoint."""

    parts: Mapping[str, StatePart] = field(default_factory=dict)
    committables: tuple[bytes, ...] = ()
    """Committables, which the sink's committer must commit once the checkpoint is complete."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot in two phases: `now` is taken on the loop; `later`, if set, runs on the I/O pool and returns the rest.

    `later` may only touch what it captured, all of which is immutable.
    """

    now: SnapshotResult = SnapshotResult()
    later: Callable[[], SnapshotResult] | None = None

    def complete(self) -> SnapshotResult:
        """Return the whole result. Runs on the I/O pool; raises whatever `later` raises."""
        if self.later is None:
            return self.now
        rest = self.later()
        return SnapshotResult({**self.now.parts, **rest.parts}, (*self.now.committables, *rest.committables))


NOTHING = Snapshot()


class Combiner(Protocol):
    """Reduces the rows of one input of an operator before they are sent to it.

    It keeps nothing from one batch to the next: each batch is combined or not, and the operator accepts both.
    """

    @property
    def schema(self) -> pa.Schema:
        """The schema of combined batches; it has the key columns of the input, and differs from that of its rows."""
        ...

    def combine(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch that stands for all rows of `batch`, which is not empty. Raises what `process` would raise."""
        ...


KEY: Final = "the key"
"""The prefix of settings of state (`Operator.state_settings`) that name the key columns of a stream."""


class Operator(ABC):
    """Base of all operators. Until `open`, an instance is only configuration, and must pickle."""

    makes_watermarks: bool = False
    """True: watermarks from upstream stop at this operator, except the one at the end of the stream."""
    holds_watermarks: bool = False
    """True: `advance_watermark` takes the watermark, also the one at the end of the stream, and the operator emits it
    with `out.watermark` once the results of the rows before it have left. It does not fire in slices."""
    keeps_splits: bool = False
    """True: the output of a batch is emitted before `process` returns."""
    own: OwnCode = OwnCode()
    """The code that the job ships; set before the job is shipped. Untyped values can be instances of its classes."""
    keeps_rows: bool = False
    """True: for each batch, the operator emits one batch with a row for each input row, or for some of them, in order."""
    keeps_every_row: bool = False
    """True: and it removes none."""
    watermark_delay_us: int = 0
    """By how much a row that the operator emits may be earlier than a watermark that it was given before: each watermark
    is forwarded as one that much earlier, except the one at the end of the stream."""
    timers_dropped: int = 0
    """Users' timers that were still set after the last timers fired, and so never fire."""
    failed_rows: int = 0
    """Rows for which the user's function failed, and which it was configured to drop or to emit apart."""
    user_metrics: UserMetrics | None = None
    """The metrics of the user's function, once it is open."""

    def input_column(self, name: str) -> str | None:
        """Return the column of the input whose value each emitted row has as its column `name`; None if there is none."""
        return None

    def columns_needed(self, wanted: frozenset[str]) -> frozenset[str] | None:
        """Return the columns of the input that the operator needs to emit the columns `wanted` of its output; None: all."""
        return None

    def narrowed(self, columns: frozenset[str]) -> Operator:
        """Return the operator as it is for input rows that have only these columns, those that `columns_needed` returned;
        its `schema` is what it then emits. Called before it is shipped; by default `self`, which needs all columns.
        """
        return self

    @property
    def holds_entries(self) -> bool:
        """Whether it holds state of keys as Python objects, which take up to `OperatorContext.entry_bytes`."""
        return False

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        """Return the settings on which the operator's state depends, with their values, for each part ("" for all of
        it). Called before `open`.

        State that was made with another value is not restored; the error shows both values.
        """
        return {}

    def upgradable_states(self) -> Mapping[str, DeclaredState] | None:
        """Return the states that may be restored from other ones than are declared now, by part; None: the operator has
        none that it does not define itself. Called before `open`.
        """
        return None

    def state_forms(self) -> Mapping[str, pa.Schema]:
        """Return the columns in which states are stored, by part; under "" the key columns. Called before `open`."""
        return {}

    def open(self, context: OperatorContext, out: Output) -> None:
        """Prepare to work. Must leave no trace outside the process."""

    def state_runs(self) -> Iterable[FrameRun]:
        """Return the runs that state in columns lies in, of each state oldest first. Columns of them may be moved until
        the next call."""
        return ()

    def stored_runs(self) -> Iterable[tuple[FrameRun, Callable[[], pa.Table]]]:
        """Return those of the runs of keyed state that are chunks of their own, each with a function that makes the table
        of its chunk. It is called when the task has ended."""
        return ()

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        """Restore state, which the task has already reduced to the rows that belong to this subtask."""

    def combiner(self, tags: Collection[str]) -> Combiner | None:
        """Return what may combine rows of input 0 before they are sent; `tags`: the side outputs that are read."""
        return None

    @abstractmethod
    def process(self, batch: pa.RecordBatch, port: int) -> None:
        """Process one batch of input `port` (0, or 1 for the second input of connect()).

        Its schema is that of the input or, with a combiner, perhaps the combiner's.
        """

    def advance_watermark(self, watermark_us: int) -> bool:
        """Handle event time having reached `watermark_us` on all ports: fire what is due, in the order of time.

        What it emits leaves before the watermark does. But for late rows, nothing has a time at or below a watermark that
        has left, which is `watermark_delay_us` less than this one. The next operator may make watermarks of the first results, which must not pass the others.

        Of several watermarks in a row, with no rows between them, only the last may be delivered.

        Returns False when the slice is used up and more is due: the task calls again with the same watermark, and
        forwards it only after True. Everything that has not fired must still be in state.
        """
        return True

    def ready(self, wake: Callable[[], None]) -> bool:
        """Whether the operator can take another batch. If not, `wake` is called on the loop once it may.

        Its own timers and completions (`OperatorContext.submit`) are called in either case, and `wake` is not needed for a
        change that one of them makes.
        """
        return True

    @property
    def awaits_work(self) -> bool:
        """Whether rows will be emitted when work that is under way outside of the loop completes, or a timer is due.

        Until then the task neither ends its data nor reports that it is idle.
        """
        return False

    def end_input(self, port: int) -> None:
        """Handle the end of input `port`: no more rows follow on it."""

    def finish(self) -> None:
        """Emit what is left after all inputs have ended."""

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        return NOTHING

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Handle the completion of this checkpoint; no earlier checkpoint is pending any more."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None: ...

    def close(self) -> None:
        """Release all resources. Called exactly once, also after a failure; must not raise if the operator is half
        open.
        """
