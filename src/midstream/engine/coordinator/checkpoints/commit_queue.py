"""Commits what sinks have prepared, once the checkpoint that holds it is complete.

One checkpoint and sink is committed at a time, in the order of checkpoints: on the driver, or on slots, with one call
of a committer for each lane (see `engine.coordinator.checkpoints.slot_commit_dispatcher`). A commit is tried `TRIES_MAX`
times, or once if a repetition cannot help. If it still fails, the attempt fails, and nothing is deployed until the
queue is empty. The states of the queue are in COMMIT_TABLE. The queue is also in the metadata of the newest checkpoint,
so it survives the coordinator. The epochs are checked before each call: a driver that was presumed dead, and whose job
another driver has taken over, commits nothing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final

from midstream.engine.checkpoint.metadata import Committables, names_of
from midstream.engine.coordinator.checkpoints.driver_committers import DriverCommitters
from midstream.engine.coordinator.checkpoints.metadata_builder import merged
from midstream.engine.coordinator.checkpoints.pending_checkpoint import CompletedCheckpoint
from midstream.engine.coordinator.checkpoints.slot_commit_dispatcher import (
    EligibleSlots,
    LaneWork,
    SlotCommitDispatcher,
    lanes_of,
)
from midstream.engine.coordinator.effects import Effects, IoKind, TimerKind
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.coordinator.failures import Failure, failure_of, failure_of_user_code, warn_if_failed
from midstream.engine.coordinator.placement.slot_pool import SlotPool
from midstream.engine.coordinator.restore.open_directory import OpenedStorage
from midstream.engine.core.errors import InvariantError, StorageError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.core.state_machine import Transition, TransitionHistory, TransitionTable, new_history
from midstream.engine.operators.user_metrics import UserMetrics
from midstream.engine.protocol import messages as m

TRIES_MAX = 5
RETRY_S = 0.2
"""The delay before the second try; it doubles with each further one."""


class CommitState(Enum):
    IDLE = auto()
    """Nothing is under way."""
    COMMITTING = auto()
    CLEANING = auto()
    """What no checkpoint holds is being cleaned up."""
    RETRYING = auto()
    """The commit has failed, and is repeated when a timer expires."""
    STALLED = auto()
    """The commit has failed for the last time. It is tried again when the job restarts."""
    STALLED_CLEANING = auto()
    """The same, while something is being cleaned up."""
    FENCING = auto()
    """Another coordinator owns the job's output, and a call on the driver has still to return."""
    FENCED = auto()
    """Another coordinator owns the job's output, and nothing is under way."""


class CommitEvent(Enum):
    COMMIT = auto()
    """The oldest commit of the queue begins."""
    CLEAN_UP = auto()
    COMMITTED = auto()
    FAILED = auto()
    CLEANED_UP = auto()
    """Cleaning up has ended, successfully or not."""
    RETRY_DUE = auto()
    RESUMED = auto()
    """The job restarts, and waits for the queue to be empty."""
    WITHDRAWN = auto()
    """The job ends, and what slots were requested to do counts as not done."""
    JOB_ENDED = auto()
    """The job ends: nothing is repeated any more."""
    TAKEN_OVER = auto()
    """Another coordinator has taken over the job."""


_S, _E = CommitState, CommitEvent
_UNDER_WAY: Final = frozenset({_S.COMMITTING, _S.CLEANING, _S.STALLED_CLEANING, _S.FENCING})
_STALLED: Final = frozenset({_S.STALLED, _S.STALLED_CLEANING, _S.FENCING, _S.FENCED})
_NO_TIMER: Final[tuple[CommitState, ...]] = tuple(state for state in _S if state is not _S.RETRYING)
COMMIT_TABLE: Final[TransitionTable[CommitState, CommitEvent]] = TransitionTable(
    "commits",
    (
        Transition(_S.IDLE, _E.COMMIT, (_S.COMMITTING,), "on the driver or on slots"),
        Transition(_S.IDLE, _E.CLEAN_UP, (_S.CLEANING,), "on the driver or on slots"),
        Transition(_S.COMMITTING, _E.COMMITTED, (_S.IDLE,), "it leaves the queue, and the next one begins"),
        Transition(
            _S.COMMITTING, _E.FAILED, (_S.RETRYING, _S.STALLED), "a timer is set; the last time the attempt fails"
        ),
        Transition(_S.COMMITTING, _E.WITHDRAWN, (_S.STALLED,), "it stays in the queue"),
        Transition(_S.CLEANING, _E.CLEANED_UP, (_S.IDLE,), "what is queued next begins"),
        Transition(_S.CLEANING, _E.WITHDRAWN, (_S.IDLE,), "it is done on the driver, when the job has ended"),
        Transition(_S.RETRYING, _E.RETRY_DUE, (_S.IDLE,), "the commit begins again"),
        Transition(_S.RETRYING, _E.JOB_ENDED, (_S.STALLED,), "the timer is cancelled"),
        Transition(_S.STALLED, _E.RESUMED, (_S.IDLE,), "the commit begins again"),
        Transition(_S.STALLED, _E.CLEAN_UP, (_S.STALLED_CLEANING,), "on the driver or on slots"),
        Transition(_S.STALLED_CLEANING, _E.CLEANED_UP, (_S.STALLED,), "the next clean-up begins"),
        Transition(_S.STALLED_CLEANING, _E.RESUMED, (_S.CLEANING,), "the commit begins again afterwards"),
        Transition(
            _S.STALLED_CLEANING, _E.WITHDRAWN, (_S.STALLED,), "it is done on the driver, when the job has ended"
        ),
        *(
            Transition(state, _E.JOB_ENDED, (state,), "a call on the driver is requested to return")
            for state in _NO_TIMER
        ),
        *(
            Transition(state, _E.TAKEN_OVER, (_S.FENCING,), "the call has still to return; nothing follows it")
            for state in (_S.COMMITTING, _S.CLEANING, _S.STALLED_CLEANING, _S.FENCING)
        ),
        *(
            Transition(state, _E.TAKEN_OVER, (_S.FENCED,), "nothing is committed or cleaned up any more")
            for state in (_S.IDLE, _S.STALLED, _S.FENCED)
        ),
        *(Transition(_S.FENCING, event, (_S.FENCED,)) for event in (_E.COMMITTED, _E.FAILED, _E.CLEANED_UP)),
    ),
)


@dataclass(frozen=True, slots=True)
class _Commit:
    committables: Committables
    holder: int
    """The completed checkpoint whose metadata holds it."""
    remaining: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    """What is not committed yet, by lane, once the commit has begun on slots. Empty for other sinks."""


class CommitQueue:
    """What has still to be committed (commits) and cleaned up (aborts), and the one call that is under way.

    What puts something into the queue, and what ends its work:

    | method | called when | queued commits | queued aborts |
    |---|---|---|---|
    | `add_commits` | a checkpoint has completed, or is restored | added | |
    | `add_aborts` | an attempt is over, with output that no checkpoint holds | | added |
    | `keep_until_finished` | a task has finished, in a job without checkpoints | kept apart | |
    | `commit_kept` | all tasks have finished | what was kept is added | |
    | `abort_kept` | the attempt, or the job, ends before | | what was kept is added |
    | `retry_stalled` | the job restarts after a commit has failed for the last time | committed again | |
    | `job_ended` | the job ends: its slots are released | not retried | cleaned up on the driver |
    | `close_when_cleaned_up` | all I/O has ended after that | | cleaned up; then committers are closed |
    | `fenced` | another coordinator has taken over the job | left to it | left to it |
    """

    def __init__(
        self,
        effects: Effects,
        plan: JobPlan,
        committers: DriverCommitters,
        slots: SlotPool,
        eligible: EligibleSlots,
    ) -> None:
        self._effects = effects
        self._committers = committers
        self._dispatcher = SlotCommitDispatcher(effects, plan, slots, eligible)
        self._commits: deque[_Commit] = deque()
        self._aborts: deque[Committables] = deque()
        self._kept: list[tuple[int, TaskId, str, tuple[bytes, ...]]] = []
        self._names = names_of(plan.graph)
        self.state = CommitState.IDLE
        self._history: TransitionHistory[CommitState] = new_history()
        self._timer: str | None = None
        """The timer of RETRYING."""
        self._tries = 0
        """How often the oldest commit has failed in a row."""
        self._job_has_ended = False
        self._closes_when_cleaned_up = False
        self._last_holder = -1

    def storage_opened(self, found: OpenedStorage) -> None:
        """The job has a checkpoint directory. This is called before anything is added."""
        self._committers.storage_opened(found)
        self._dispatcher.epoch = found.opened.epoch

    @property
    def metrics(self) -> Mapping[str, UserMetrics]:
        """What the committers on the driver count, by uid."""
        return self._committers.metrics

    @property
    def is_drained(self) -> bool:
        """Whether everything has been committed and cleaned up; so it can be true in STALLED as well as in IDLE."""
        return not (self._commits or self._aborts or self.state in _UNDER_WAY)

    @property
    def is_stalled(self) -> bool:
        """Whether nothing is committed until `retry_stalled`, or at all if the job has been taken over."""
        return self.state in _STALLED

    @property
    def uncommitted(self) -> tuple[Committables, ...]:
        return tuple(commit.committables for commit in self._commits)

    @property
    def oldest_uncommitted(self) -> int | None:
        """The oldest completed checkpoint of which not all is committed."""
        return self._commits[0].holder if self._commits else None

    @property
    def uncommitted_count(self) -> int:
        """The number of completed checkpoints of which not all is committed."""
        return len({commit.holder for commit in self._commits})

    def checkpoint_completed(self, completed: CompletedCheckpoint) -> None:
        self.add_commits(completed.metadata.checkpoint_id, completed.committables)

    def add_commits(self, holder: int, committables: Iterable[Committables]) -> None:
        """Queue `committables` to be committed: checkpoint `holder`, which holds them, is complete."""
        if holder < self._last_holder:
            raise InvariantError(f"output of checkpoint {holder} would be committed after that of {self._last_holder}")
        self._last_holder = holder
        for prepared in committables:
            if prepared.checkpoint_id > holder:
                raise InvariantError(
                    f"output of checkpoint {prepared.checkpoint_id} is in that of {holder}, which is older"
                )
            if self._has_committer_for(prepared):
                self._commits.append(_Commit(prepared, holder))
        self._next()

    def keep_until_finished(self, ref: TaskId, committables: Iterable[tuple[str, tuple[bytes, ...]]]) -> None:
        """Keep what a task of a job without checkpoints has prepared; it is committed when all tasks have finished."""
        self._kept += [(0, ref, uid, items) for uid, items in committables]

    def commit_kept(self) -> None:
        kept, self._kept = self._kept, []
        if kept:
            self.add_commits(0, merged(kept, self._names))

    def abort_kept(self, *_: object) -> None:
        kept, self._kept = self._kept, []
        self.add_aborts(merged(kept, self._names))

    def add_aborts(self, committables: Iterable[Committables]) -> None:
        """Queue `committables` to be cleaned up: no checkpoint holds them, or ever will."""
        self._aborts.extend(prepared for prepared in committables if self._has_committer_for(prepared))
        self._next()

    def _has_committer_for(self, committables: Committables) -> bool:
        return bool(committables.items) and committables.uid in self._committers.sinks

    def retry_stalled(self) -> None:
        """Commit again what is queued. The queue must be in STALLED."""
        self._transition(CommitEvent.RESUMED)
        self._tries = 0
        self._next()

    def job_ended(self, *_: object) -> None:
        """The job ends: nothing is repeated, and its slots, which end with it, are not waited for."""
        self._job_has_ended = True
        self._committers.stop()
        work = self._dispatcher.end()
        if work is not None:
            if work.kind is IoKind.ABORT:
                self._aborts.appendleft(work.committables)
            self._transition(CommitEvent.WITHDRAWN)
        self._transition(CommitEvent.JOB_ENDED)
        self._effects.cancel_timer(self._timer)
        self._timer = None

    def fenced(self, _: StorageError) -> None:
        """Commit and clean up nothing more: another coordinator does so now."""
        self.job_ended()
        self._aborts.clear()
        self._transition(CommitEvent.TAKEN_OVER)

    def close_when_cleaned_up(self) -> None:
        """Close the committers, once what is queued to be cleaned up has been cleaned up."""
        self._closes_when_cleaned_up = True
        self._next()

    def _transition(self, event: CommitEvent, then: CommitState | None = None) -> None:
        """Enter the next state; `then` if the table allows several."""
        state, self.state = (
            self.state,
            COMMIT_TABLE.next(self.state, event, self._history)
            if then is None
            else COMMIT_TABLE.check(self.state, event, then, self._history),
        )
        self._history.append((state, event))

    def _next(self) -> None:
        if self.state in _UNDER_WAY:
            return
        if self._closes_when_cleaned_up and not self._aborts:
            self._close_committers()
        if self._commits and self.state is CommitState.IDLE:
            commit = self._commits[0]
            self._transition(CommitEvent.COMMIT)
            self._run(IoKind.COMMIT, commit.committables, commit.remaining)
        elif self._aborts and self.state in (CommitState.IDLE, CommitState.STALLED):
            self._transition(CommitEvent.CLEAN_UP)
            self._run(IoKind.ABORT, self._aborts.popleft(), {})

    def _run(self, kind: IoKind, committables: Committables, remaining: dict[int, tuple[bytes, ...]]) -> None:
        """Begin to commit or clean up. `remaining`: see `_Commit`; empty if this has not begun yet."""
        _, sink = self._committers.sinks[committables.uid]
        if sink.commits_on_slots and not remaining:
            try:
                remaining.update(lanes_of(sink, committables.items))
            except Exception as error:  # noqa: BLE001 - the sink's code: if it fails, the commit fails
                self._outcome(kind, committables, Failed(error))
                return
        if sink.commits_on_slots and not self._job_has_ended:
            self._dispatcher.begin(LaneWork(kind, committables, remaining, self._waits_for(kind, committables)))
            self.advance()
        else:  # also if the job ends: its slots are released
            self._run_on_driver(kind, committables, remaining or {0: committables.items})

    def _run_on_driver(self, kind: IoKind, committables: Committables, lanes: dict[int, tuple[bytes, ...]]) -> None:
        if kind is IoKind.COMMIT:
            work = partial(self._committers.commit, committables, dict(lanes))
        else:
            work = partial(self._committers.abort, committables, dict(lanes))
        self._effects.run_io(
            kind,
            work,
            partial(self._outcome, kind, committables),
            about=f"{committables.uid}:{committables.checkpoint_id}",
            waits_for=self._waits_for(kind, committables),
            has_limit=True,
        )

    def _waits_for(self, kind: IoKind, committables: Committables) -> str:
        sink, _ = self._committers.sinks[committables.uid]
        does = "commit what it wrote" if kind is IoKind.COMMIT else "clean up what was never completed"
        up_to = (
            f" up to checkpoint {committables.checkpoint_id}"
            if kind is IoKind.COMMIT and committables.checkpoint_id
            else ""
        )
        return f"sink {sink!r} to {does}{up_to}"

    # ---- on slots ----

    @property
    def runs_on_slots(self) -> bool:
        """Whether a slot has been requested to commit, or to clean up, and has not answered."""
        return self._dispatcher.under_way

    def runs_on(self, slot: int) -> bool:
        """Whether this slot has been requested to commit, or to clean up, and has not answered."""
        return self._dispatcher.runs_on(slot)

    def handle_answer(self, slot: int, answer: m.CommitDone | m.CommitFailed) -> None:
        """A live slot has answered."""
        self._dispatcher.handle_answer(slot, answer)
        self.advance()

    def advance(self) -> None:
        """Continue with the work on slots, which may have come, gone or answered. This is called with every event."""
        ended = self._dispatcher.advance()
        if ended is None:
            return
        work = ended.work
        if ended.failed is not None:
            self._outcome(work.kind, work.committables, self._failure(work, *ended.failed))
        elif work.remaining:  # no slot will come
            self._run_on_driver(work.kind, work.committables, work.remaining)
        else:
            self._outcome(work.kind, work.committables, Done(None))

    def _failure(self, work: LaneWork, lane: int, answer: m.CommitFailed) -> Failure:
        where = f"{self._describe(work.kind, work.committables)}: lane {lane}"
        fingerprint = f"{where}: {answer.same}" if answer.same else ""
        return failure_of_user_code(f"{where}: {answer.summary}", answer.details, answer.fatal, fingerprint)

    # ---- outcomes ----

    def _outcome(self, kind: IoKind, committables: Committables, outcome: Done[None] | Failed | Failure) -> None:
        if isinstance(outcome, Failed):
            outcome = failure_of(outcome.error, self._describe(kind, committables))
        if kind is IoKind.COMMIT:
            self._committed(committables, outcome)
        else:
            self._aborted(committables, outcome)

    def _committed(self, committables: Committables, outcome: Done[None] | Failure) -> None:
        if isinstance(outcome, Done):
            self._tries = 0
            done = self._commits.popleft()
            assert done.committables is committables
            self._transition(CommitEvent.COMMITTED)
            self._next()
            return
        self._effects.notifications.commit_failed()
        self._tries += 1
        if not self._job_has_ended and self._tries < TRIES_MAX and not outcome.fatal:
            self._transition(CommitEvent.FAILED, CommitState.RETRYING)
            delay_s = RETRY_S * 2 ** (self._tries - 1)
            self._timer = self._effects.set_timer(TimerKind.COMMIT, delay_s, self._retry, committables.uid)
            return
        is_fenced = self.state is CommitState.FENCING
        self._transition(CommitEvent.FAILED, CommitState.FENCED if is_fenced else CommitState.STALLED)
        self._effects.notifications.attempt_failed(outcome)
        self._next()

    def _describe(self, kind: IoKind, committables: Committables) -> str:
        name, _ = self._committers.sinks[committables.uid]
        if kind is IoKind.ABORT:
            return f"sink {name!r}: cleaning up what was never completed"
        if not committables.checkpoint_id:
            return f"sink {name!r}: committing what it wrote"
        kept = "kept in the checkpoint, and committed when the job restarts or is started with --from latest"
        return f"sink {name!r}: committing what it wrote up to checkpoint {committables.checkpoint_id} ({kept})"

    def _retry(self) -> None:
        self._timer = None
        self._transition(CommitEvent.RETRY_DUE)
        self._next()

    def _aborted(self, committables: Committables, outcome: Done[None] | Failure) -> None:
        self._transition(CommitEvent.CLEANED_UP)
        if isinstance(outcome, Failure):
            self._effects.notifications.warned(outcome.summary)
        self._next()

    # ---- the end ----

    def _close_committers(self) -> None:
        for uid, committer in self._committers.take_to_close():
            name, _ = self._committers.sinks[uid]
            closed = partial(warn_if_failed, self._effects, f"sink {name!r}: closing it")
            what = f"sink {name!r} to be closed"
            self._effects.run_io(IoKind.CLOSE, committer.close, closed, about=uid, waits_for=what)

    def check(self) -> None:
        self._dispatcher.check()
        holders = [commit.holder for commit in self._commits]
        assert holders == sorted(holders), holders
