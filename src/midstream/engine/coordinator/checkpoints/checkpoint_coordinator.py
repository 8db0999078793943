"""One checkpoint at a time: triggered, acknowledged by every task that has not finished, published, completed.

Its states, and what leads from one to the next, are in `pending_checkpoint.CHECKPOINT_TABLE`.

While the metadata is being written, the outcome is unknown. No attempt restores until it is known (`outcome_is_known`),
or until the checkpoint has timed out. A write that has not returned by then may still take effect at any time, so its
outcome stays unknown: its files and its prepared output are not deleted, its id is never used again, and its output is
not committed unless a newer checkpoint, which contains it, completes. A coordinator that finds it later finds a
checkpoint like any other, or, if a newer epoch has begun meanwhile, one that is superseded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from midstream.engine.checkpoint.metadata import CheckpointMetadata, Committables, SourcePosition, names_of
from midstream.engine.checkpoint.store import (
    FencedError,
    RetainedCheckpoint,
    UnknownOutcomeError,
    check_epoch,
    checkpoint_path,
    publish,
    split_retained,
)
from midstream.engine.coordinator.checkpoints.checkpoint_history import CheckpointHistory, phases_of
from midstream.engine.coordinator.checkpoints.cleanup import CheckpointCleanup
from midstream.engine.coordinator.checkpoints.commit_queue import CommitQueue
from midstream.engine.coordinator.checkpoints.metadata_builder import (
    build_metadata,
    committables_of,
    merged,
    operator_states,
    refusal,
)
from midstream.engine.coordinator.checkpoints.pending_checkpoint import (
    CHECKPOINT_TABLE,
    AbortedCheckpoint,
    CheckpointEvent,
    CheckpointProgress,
    CheckpointRequest,
    CompletedCheckpoint,
    PendingCheckpoint,
)
from midstream.engine.coordinator.checkpoints.schedule import CheckpointSchedule
from midstream.engine.coordinator.checkpoints.state_sizes import StateSizes
from midstream.engine.coordinator.effects import Effects, IoKind, TimerKind
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.coordinator.failures import Failure
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.coordinator.restore.open_directory import OpenedStorage
from midstream.engine.core.errors import InvariantError, StorageError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed, Storage
from midstream.engine.core.urls import below
from midstream.engine.protocol.job_status import CheckpointStatus
from midstream.engine.protocol.messages import CheckpointAborted, CheckpointAck, CheckpointDecline, TriggerCheckpoint

IDS_KEPT: Final = 1_000
"""The least number of ids of completed checkpoints that are kept; not all, since a job may run for years."""


class CheckpointCoordinator:
    def __init__(self, effects: Effects, plan: JobPlan, cleanup: CheckpointCleanup, commits: CommitQueue) -> None:
        self.storage: Storage | None = None
        self.epoch = 0
        self.pending: PendingCheckpoint | None = None
        self.progress = CheckpointProgress.NONE
        self.state_sizes = StateSizes()
        self.newest: CheckpointMetadata | None = None
        """The checkpoint to restore: the newest completed one, or the one from which the job was started."""
        self.retained: tuple[RetainedCheckpoint, ...] = ()
        self.schedule = CheckpointSchedule(effects, plan.config)
        self.history = CheckpointHistory()
        self._effects = effects
        self._plan = plan
        self._names = names_of(plan.graph)
        self._cleanup = cleanup
        self._commits = commits
        self._next_id = 1
        self._newest_id = 0
        """The id of `newest`; 0 if there is none."""
        self._completed_ids: set[int] = set()
        """The ids of the newest completed checkpoints: a late acknowledgement of one of them changes nothing."""
        self._uncertain_id = 0
        """The newest checkpoint whose outcome is unknown for good: it may exist, so its files are kept."""
        self._uncertain_files: frozenset[str] = frozenset()
        self._prepared: dict[tuple[int, TaskId], tuple[tuple[str, tuple[bytes, ...]], ...]] = {}
        """What the sinks of this attempt have prepared for checkpoints that have not completed, by checkpoint and task:
        the sink's uid, and its committables.
        """

    def storage_opened(self, found: OpenedStorage) -> None:
        opened = found.opened
        self.storage = found.storage
        self.epoch = opened.epoch
        self.newest = opened.restore
        if opened.restore is not None:
            self.state_sizes.add(opened.restore, self._effects.now_ms)
        self.retained = opened.retained
        self._next_id = opened.next_checkpoint_id
        self._newest_id = opened.restore.checkpoint_id if opened.restore else 0

    def path_of(self, checkpoint_id: int) -> str:
        assert self._plan.config.checkpoint_dir is not None
        return below(self._plan.config.checkpoint_dir, checkpoint_path(checkpoint_id))

    @property
    def newest_path(self) -> str | None:
        """The path of the checkpoint from which a restart resumes; None: it begins at the beginning."""
        return None if self.newest is None else self.path_of(self.newest.checkpoint_id)

    def rescale(self, plan: JobPlan) -> None:
        """Continue with the same job at another parallelism. This is called between two attempts."""
        assert self.outcome_is_known
        self._plan = plan
        self._names = names_of(plan.graph)

    @property
    def outcome_is_known(self) -> bool:
        """Whether it is known which checkpoint is the newest."""
        return self.progress in (CheckpointProgress.NONE, CheckpointProgress.COLLECTING)

    @property
    def publishing_call(self) -> str | None:
        """What is waited for while the outcome is unknown."""
        if self.pending is None or self.outcome_is_known:
            return None
        return f"the metadata of checkpoint {self.pending.checkpoint_id} to be written in {self._plan.config.checkpoint_dir}"

    # ---- one checkpoint ----

    def trigger(self, attempt: Attempt, sources: tuple[SourcePosition, ...], request: CheckpointRequest) -> int:
        """Trigger a checkpoint, and return its id.

        `sources` must be taken in this very step, see `engine.coordinator.placement.split_assignment`.
        """
        assert self.storage is not None
        self._transition(CheckpointEvent.TRIGGERED)
        checkpoint_id, now_ms = self._next_id, self._effects.now_ms
        self._next_id += 1
        plan = attempt.plan_checkpoint()
        assert plan.trigger, plan
        pending = PendingCheckpoint(
            checkpoint_id=checkpoint_id,
            attempt=attempt,
            created_ms=now_ms,
            plan=plan,
            sources=sources,
            clients=request.clients,
            is_stop=request.is_stop,
            is_rescale=request.is_rescale,
            is_savepoint=request.is_savepoint,
        )
        self.pending = pending
        self.schedule.triggered()
        by_slot: dict[int, list[TaskId]] = {}
        for ref in plan.trigger:
            by_slot.setdefault(attempt.slot_of(ref), []).append(ref)
        timeout_s = self._plan.config.aligned_timeout_s
        overtake_ms = None if timeout_s is None or request.must_align else round(timeout_s * 1000)
        pauses_sources = request.is_stop or request.is_rescale
        for slot, refs in by_slot.items():
            trigger = TriggerCheckpoint(
                attempt.number, checkpoint_id, now_ms, tuple(refs), overtake_ms, pauses_sources, self._newest_id
            )
            self._effects.send(slot, trigger)
        timeout_s = self._plan.config.checkpoint_timeout_s
        expired = partial(self._expired, checkpoint_id, timeout_s)
        pending.timer = self._effects.set_timer(TimerKind.CHECKPOINT, timeout_s, expired, checkpoint_id)
        return checkpoint_id

    def acknowledge(self, slot: int, ack: CheckpointAck, attempt: Attempt) -> None:
        """A task of the current attempt has stored its part."""
        if ack.checkpoint_id in self._completed_ids or ack.checkpoint_id <= self._newest_id - IDS_KEPT:
            return  # a duplicate: its files belong to the checkpoint
        if ack.checkpoint_id >= self._next_id:
            raise InvariantError(f"slot {slot} acknowledges checkpoint {ack.checkpoint_id}, which was never triggered")
        prepared = tuple((op.uid, op.committables) for op in ack.operators if op.committables)
        if prepared:
            self._prepared[ack.checkpoint_id, ack.task] = prepared
        pending = self.pending
        if pending is None or pending.checkpoint_id != ack.checkpoint_id:
            if ack.checkpoint_id > self._uncertain_id:
                self._cleanup.drop((), ack.files)
            self._effects.send(slot, CheckpointAborted(attempt.number, ack.checkpoint_id))
            return
        if ack.task in pending.acks:
            return
        if ack.task not in pending.plan.expected:
            raise InvariantError(f"{ack.task} had finished before checkpoint {ack.checkpoint_id}, and acknowledges it")
        pending.acks[ack.task] = ack
        pending.in_flight.add(ack.channels)
        if len(pending.acks) == len(pending.plan.expected):
            self._publish(pending)

    def decline(self, message: CheckpointDecline) -> None:
        if message.checkpoint_id in self._completed_ids:
            raise InvariantError(f"{message.task} declines checkpoint {message.checkpoint_id}, which is complete")
        self._cleanup.drop((), message.files)
        pending = self.pending
        if pending is None or not self.outcome_is_known or pending.checkpoint_id != message.checkpoint_id:
            return
        reason = f"{self._task_names([message.task])}: {message.reason}" if message.counts else message.reason
        self._abort(pending, reason, counts=message.counts, retry=not message.counts)

    def task_finished(self, ref: TaskId) -> None:
        """A task has finished. If it finished while the trigger was on its way, it will never acknowledge."""
        pending = self.pending
        if pending is None or not self.outcome_is_known or ref in pending.acks:
            return
        if ref in pending.plan.expected:
            self._abort(pending, f"task {ref} finished meanwhile", counts=False, retry=True)

    def attempt_over(self, why: str, _: bool) -> None:
        """The attempt is over: its checkpoint fails, unless its metadata is being written, which is still awaited."""
        pending = self.pending
        if pending is not None:
            pending.attempt_is_over = True
            if self.outcome_is_known:
                self._abort(pending, why, counts=False, retry=False)
            else:
                self._transition(CheckpointEvent.ATTEMPT_OVER)
        self.schedule.attempt_over()

    def check_epochs(self, *_: object) -> None:
        """Check whether another coordinator has taken over, and deleted files of this one: the job would restart
        indefinitely.
        """
        if self.storage is not None:
            check = partial(check_epoch, self.storage, self.epoch)
            what = f"the epochs in {self._plan.config.checkpoint_dir} to be read"
            self._effects.run_io(IoKind.EPOCH, check, self._epochs_read, waits_for=what)

    def _epochs_read(self, outcome: Done[None] | Failed) -> None:
        if isinstance(outcome, Failed) and isinstance(outcome.error, FencedError):
            self._effects.notifications.fenced(outcome.error)

    def take_to_abort(self) -> tuple[Committables, ...]:
        """Remove and return what the last attempt prepared for checkpoints that will never complete."""
        assert self.outcome_is_known
        items = [
            (checkpoint_id, ref, uid, committables)
            for (checkpoint_id, ref), prepared in self._prepared.items()
            for uid, committables in prepared
            if checkpoint_id > self._uncertain_id
        ]
        self._prepared.clear()
        return merged(items, self._names)

    def referenced_files(self) -> frozenset[str]:
        return self._uncertain_files.union(*(retained.files for retained in self.retained))

    def retain(self, uncommitted: int | None, for_savepoint: int | None) -> None:
        """Drop the oldest checkpoints beyond the number to retain, but keep those that are needed, and all newer ones.

        Nothing is dropped while a checkpoint is in progress: it may refer to any file that existed when it was
        triggered. `uncommitted`: the oldest checkpoint with output that is not committed. `for_savepoint`: the oldest
        one that is still to be copied to a savepoint.
        """
        self.history.committed(uncommitted, self._effects.now_ms)
        if self.pending is not None or self.newest is None:
            return  # after a fresh start, older checkpoints are kept until the first new one has completed
        # The one to restore is not the newest on disk if the job was started from an older one.
        needed = self.newest.checkpoint_id
        needed = min(each for each in (needed, uncommitted, for_savepoint) if each is not None)
        keep = max(self._plan.config.retained_checkpoints, sum(r.checkpoint_id >= needed for r in self.retained))
        if len(self.retained) <= keep:
            return
        self.retained, dropped, files = split_retained(self.retained, keep, self._uncertain_files)
        self._cleanup.drop([r.checkpoint_id for r in dropped], files)

    def in_progress(self, now_ms: int) -> CheckpointStatus | None:
        pending = self.pending
        if pending is None:
            return None
        return self._status_of(pending, "in_progress", max(0, now_ms - pending.created_ms))

    def _status_of(
        self, pending: PendingCheckpoint, state: str, duration_ms: int, *, reason: str = "", metadata_ms: int = 0
    ) -> CheckpointStatus:
        last = self.unanswered(pending) if pending.missing else self._task_names([next(reversed(pending.acks))])
        return CheckpointStatus(
            pending.checkpoint_id,
            state,
            pending.created_ms,
            duration_ms,
            0 if state == "failed" else sum(ack.state_bytes for ack in pending.acks.values()),
            reason,
            in_flight_bytes=0 if state == "failed" else pending.in_flight.bytes,
            alignment_ms=pending.alignment_ms,
            metadata_ms=metadata_ms,
            tasks=len(pending.plan.expected),
            tasks_done=len(pending.acks),
            last=last,
            is_savepoint=pending.is_savepoint,
            phases=phases_of(pending.acks, duration_ms),
        )

    # ---- its end ----

    def _expired(self, checkpoint_id: int, timeout_s: float) -> None:
        pending = self.pending
        assert pending is not None and pending.checkpoint_id == checkpoint_id, (pending, checkpoint_id)
        pending.timer = None
        within = f"not complete within {timeout_s:g} s"
        if self.outcome_is_known:
            reason = f"{within}: no answer from {self.unanswered(pending)}"
            self._abort(pending, reason, counts=True, retry=False)
            return
        self._mark_uncertain(pending)
        where = self._plan.config.checkpoint_dir
        reason = (
            f"{within}: the storage has not confirmed the write of its metadata to {where}; the write may still succeed. "
            "Check the storage: the job continues when it answers"
        )
        self._abort(pending, reason, counts=True, retry=False, delete=False)

    def unanswered(self, pending: PendingCheckpoint) -> str:
        """Name the tasks that have still to acknowledge it."""
        tasks = sorted(pending.missing)
        more = f" and {len(tasks) - 5} more" if len(tasks) > 5 else ""
        return f"{self._task_names(tasks[:5])}{more}"

    def _task_names(self, tasks: Iterable[TaskId]) -> str:
        return ", ".join(f"{self._plan.graph.vertices[vertex].name} (subtask {subtask})" for vertex, subtask in tasks)

    def _mark_uncertain(self, pending: PendingCheckpoint) -> None:
        self._uncertain_id = pending.checkpoint_id
        self._uncertain_files |= pending.files

    def _publish(self, pending: PendingCheckpoint) -> None:
        operators = operator_states(self._plan, pending.acks, pending.plan.finished, self.newest)
        written = frozenset(file for ack in pending.acks.values() for file in ack.files)
        why_not = refusal(
            operators, pending.in_flight.files, written.union(*(retained.files for retained in self.retained))
        )
        if why_not:
            self._abort(pending, why_not, counts=False, retry=False)
            return
        own = committables_of(pending.acks, self._names, self._newest_id)
        metadata = build_metadata(
            self._plan, pending, self.epoch, self._effects.now_ms, operators, (*self._commits.uncommitted, *own)
        )
        self._transition(CheckpointEvent.ACKNOWLEDGED)
        pending.files = frozenset(metadata.files)
        assert self.storage is not None
        work = partial(publish, self.storage, metadata)
        what = self.publishing_call
        assert what is not None
        published = partial(self._published, pending, metadata, own)
        self._effects.run_io(IoKind.PUBLISH, work, published, about=pending.checkpoint_id, waits_for=what)

    def _published(
        self,
        pending: PendingCheckpoint,
        metadata: CheckpointMetadata,
        committables: tuple[Committables, ...],
        outcome: Done[str] | Failed,
    ) -> None:
        if self.pending is not pending:  # it timed out before: its outcome is unknown for good
            if isinstance(outcome, Failed) and isinstance(outcome.error, FencedError):
                self._effects.notifications.fenced(outcome.error)
        elif isinstance(outcome, Failed):
            self._not_published(pending, outcome.error)
        else:
            self._completed(pending, metadata, committables)

    def _not_published(self, pending: PendingCheckpoint, error: BaseException) -> None:
        if isinstance(error, FencedError):
            self._over(pending, CheckpointEvent.FAILED)
            pending.attempt_is_over = True
            self._effects.notifications.checkpoint_aborted(AbortedCheckpoint(pending, str(error), retry=False))
            self._effects.notifications.fenced(error)
            return
        certain = not isinstance(error, UnknownOutcomeError)
        if not certain:
            self._mark_uncertain(pending)
        reason = f"its metadata could not be written: {error}"
        self._abort(pending, reason, counts=True, retry=False, delete=certain)

    def _completed(
        self, pending: PendingCheckpoint, metadata: CheckpointMetadata, committables: tuple[Committables, ...]
    ) -> None:
        self._over(pending, CheckpointEvent.COMPLETED)
        if metadata.checkpoint_id <= self._newest_id:
            raise InvariantError(f"checkpoint {metadata.checkpoint_id} completes after {self._newest_id}")
        self.newest = metadata
        self.state_sizes.add(metadata, metadata.completed_ms)
        self._newest_id = metadata.checkpoint_id
        self._completed_ids.add(metadata.checkpoint_id)
        if len(self._completed_ids) > 2 * IDS_KEPT:
            self._completed_ids = {known for known in self._completed_ids if known > self._newest_id - IDS_KEPT}
        for over in [known for known in self._prepared if known[0] <= metadata.checkpoint_id]:
            del self._prepared[over]
        self.retained = (*self.retained, RetainedCheckpoint(metadata.checkpoint_id, frozenset(metadata.files)))
        self.schedule.failures = 0
        self.schedule.ended()  # the writing of the metadata is part of it
        now_ms = self._effects.now_ms
        status = self._status_of(
            pending,
            "completed",
            metadata.completed_ms - pending.created_ms,
            metadata_ms=max(0, now_ms - metadata.completed_ms),
        )
        self.history.completed(status, bool(committables), now_ms)
        path = self.path_of(metadata.checkpoint_id)
        is_first = not (pending.attempt_is_over or pending.attempt.has_checkpoint)
        self._effects.notifications.checkpoint_completed(
            CompletedCheckpoint(pending, metadata, committables, path, is_first)
        )

    def drop_older_attempts(self, completed: CompletedCheckpoint) -> None:
        """Delete the unreferenced files of earlier attempts, once this attempt has completed its first checkpoint."""
        if completed.is_first and completed.pending.attempt.number > 0:
            self._cleanup.drop_attempts_before(completed.pending.attempt.number, self.referenced_files())

    def _abort(
        self, pending: PendingCheckpoint, reason: str, *, counts: bool, retry: bool, delete: bool = True
    ) -> None:
        """The checkpoint fails. `counts`: it counts against the tolerable failures. `retry`: nothing is wrong, and a
        new one is triggered soon. `delete`: its files are deleted.
        """
        self._over(pending, CheckpointEvent.FAILED)
        if delete:
            self._cleanup.drop((), [file for ack in pending.acks.values() for file in ack.files])
        now_ms = self._effects.now_ms
        self.schedule.failed()
        if not retry:
            took_ms = max(0, now_ms - pending.created_ms)
            self.history.failed(self._status_of(pending, "failed", took_ms, reason=reason))
        if pending.attempt_is_over:
            self._effects.notifications.checkpoint_aborted(AbortedCheckpoint(pending, reason, retry=False))
            return
        self.schedule.retry = retry
        for slot in pending.attempt.slots:
            self._effects.send(slot, CheckpointAborted(pending.attempt.number, pending.checkpoint_id))
        self._effects.notifications.checkpoint_aborted(AbortedCheckpoint(pending, reason, retry))
        if counts and not pending.is_savepoint:
            self.schedule.failures += 1
            tolerable = self._plan.config.tolerable_failures
            if self.schedule.failures > tolerable:
                text = (
                    f"{self.schedule.failures} checkpoints in a row have failed (tolerable_failures is {tolerable}); "
                    f"the last one, {pending.checkpoint_id}: {reason}"
                )
                self._effects.notifications.attempt_failed(Failure(text, "", StorageError(text)))

    def _transition(self, event: CheckpointEvent) -> None:
        self.progress = CHECKPOINT_TABLE.next(self.progress, event)

    def _over(self, pending: PendingCheckpoint, how: CheckpointEvent) -> None:
        self._transition(how)
        self.pending = None
        self._effects.cancel_timer(pending.timer)

    def check(self) -> None:
        pending = self.pending
        assert (pending is None) == (self.progress is CheckpointProgress.NONE), (pending, self.progress)
        if pending is not None:
            assert pending.acks.keys() <= pending.plan.expected, pending
            assert self.outcome_is_known == (len(pending.acks) < len(pending.plan.expected)), (pending, self.progress)
            assert self.outcome_is_known or pending.attempt_is_over == (self.progress is CheckpointProgress.ORPHANED), (
                pending
            )
            assert pending.checkpoint_id == self._next_id - 1, (pending.checkpoint_id, self._next_id)
        ids = [retained.checkpoint_id for retained in self.retained]
        assert ids == sorted(set(ids)), ids
