"""Known bugs around rescaling, finishing and event time, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import msgspec

from midstream.engine.checkpoint import redistribute_state, store
from midstream.engine.coordinator import coordinator as machine
from midstream.engine.coordinator.checkpoints import checkpoint_coordinator as checkpoints
from midstream.engine.coordinator.checkpoints import commit_queue, metadata_builder
from midstream.engine.coordinator.checkpoints import trigger as triggering
from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.checkpoints.pending_checkpoint import CheckpointProgress
from midstream.engine.coordinator.placement import split_assignment
from midstream.engine.coordinator.placement.rescale import RescaleStage, Rescaling
from midstream.engine.coordinator.placement.slot_pool import SlotPool
from midstream.engine.coordinator.requests.client_requests import ClientRequests
from midstream.engine.coordinator.restart_backoff import RestartBackoff
from midstream.engine.core.elements import MAX_WATERMARK_US, EndOfData, Watermark
from midstream.engine.core.ids import TaskId
from midstream.engine.operators import watermarks
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.state.state_parts import Redistribute
from midstream.engine.worker import source_reader
from midstream.engine.worker.deployment import Deployment
from midstream.engine.worker.operator_chain import OperatorChain
from midstream.engine.worker.task import Step, Task, TaskState
from midstream.engine.worker.task_operators import TaskOperators
from midstream.engine.worker.task_snapshots import TaskSnapshots
from midstream_lab.mutations.mutation import Mutation, Replacements, named, nothing, owner_of
from midstream_lab.scenarios import targeted
from midstream_lab.scenarios.targeted_at_rest import partly_finished
from midstream_lab.scenarios.targeted_ends import intolerant_saving

# ---- metadata that is written late


def late_metadata_is_failed() -> Replacements:
    """A checkpoint whose metadata was not written in time counts as one that will never be."""

    def expired(self: Any, checkpoint_id: int, timeout_s: float) -> None:
        self.pending.timer = None
        self._abort(self.pending, "not complete within its time", counts=True, retry=False)

    return [(CheckpointCoordinator, "_expired", expired)]


def late_metadata_completes() -> Replacements:
    """A checkpoint that has been given up is complete all the same once its metadata is written."""
    original = CheckpointCoordinator._published

    def published(self: Any, pending: Any, metadata: Any, own: Any, outcome: Any) -> None:
        if self.pending is None:
            self.pending, self.progress = pending, CheckpointProgress.PUBLISHING
        original(self, pending, metadata, own, outcome)

    return [(CheckpointCoordinator, "_published", published)]


# ---- failures


def checkpoints_do_not_count() -> Replacements:
    """The same failure ends the job though checkpoints completed in between."""
    return [(RestartBackoff, "checkpoint_completed", nothing)]


def savepoints_count() -> Replacements:
    """A checkpoint for a savepoint that fails counts against the failures that the job tolerates."""
    original = CheckpointCoordinator._abort

    def abort(self: Any, pending: Any, reason: str, **how: Any) -> None:
        pending.is_savepoint = False
        original(self, pending, reason, **how)

    return [(CheckpointCoordinator, "_abort", abort)]


# ---- rescaling while the job runs


def rescale_keeps_splits() -> Replacements:
    """The splits that are left are those of now, not those of the checkpoint."""
    original = machine.Coordinator.switch_to

    def go_on_with(self: Any, plan: Any) -> None:
        original(self, plan)
        if self.sources.storage is not None and self.sources._discovers:
            self.sources.are_reset = True

    return [(machine.Coordinator, "switch_to", go_on_with)]


def rescale_keeps_layout() -> Replacements:
    """Checkpoints are described by the graph that the job began with."""
    return [(CheckpointCoordinator, "rescale", lambda self, plan: None)]


def rescale_is_not_answered() -> Replacements:
    """The client that has requested a rescale which is given up gets no answer."""
    original = Rescaling.give_up

    def give_up(self: Any, reason: str) -> Any:
        if self._current is not None and self._current.answer is not None:
            self._current.answer = lambda reply: None
        return original(self, reason)

    return [(Rescaling, "give_up", give_up)]


def rescale_does_not_go_back() -> Replacements:
    """Once it has left the old plan, the job retries the new one until it runs."""
    original = Rescaling.give_up

    def give_up(self: Any, reason: str) -> Any:
        original(self, reason)

    return [(Rescaling, "give_up", give_up)]


def rescale_keeps_slots() -> Replacements:
    """Slots that are too many stay."""

    def resize(self: Any, needed: int) -> None:
        self.needed = needed
        self._stop_if_complete()

    return [(SlotPool, "resize", resize), (SlotPool, "check", lambda self: None)]


def rescale_before_stored() -> Replacements:
    """The job switches when the checkpoint is taken, and names it as the one to resume from, before it is complete."""
    original = CheckpointCoordinator._publish

    def publish(self: Any, pending: Any) -> None:
        original(self, pending)
        owner = owner_of(self)
        if (
            pending.is_rescale
            and not self.outcome_is_known
            and owner.rescaling.stage is RescaleStage.REQUESTING_CHECKPOINT
        ):
            owner.rescaling._current.checkpoint, owner.rescaling.stage = (
                self.path_of(pending.checkpoint_id),
                RescaleStage.READY_TO_SWITCH,
            )
            self._effects.cancel_timer(pending.timer)
            self.pending, self.progress = None, CheckpointProgress.NONE

    def published(self: Any, pending: Any, *rest: Any) -> None:
        if self.pending is pending:
            original_published(self, pending, *rest)

    original_published = CheckpointCoordinator._published
    return [(CheckpointCoordinator, "_publish", publish), (CheckpointCoordinator, "_published", published)]


# ---- finishing


def broadcast_of_the_first() -> Replacements:
    """The copy of subtask 0 counts, even if it had finished and has none."""
    original = redistribute_state._assign_part

    def assign_part(name: str, rule: Redistribute, found: Any, own: Any, parallelism: int, *rest: Any) -> Any:
        if rule is Redistribute.BROADCAST:
            return [[part for i, part in found if i == 0]] * parallelism
        return original(name, rule, found, own, parallelism, *rest)

    return [(redistribute_state, "_assign_part", assign_part)]


def union_with_finished() -> Replacements:
    """Union state of an operator some of whose subtasks have finished is accepted."""
    return [(checkpoints, "refusal", lambda *_: "")]


def finished_runs_again() -> Replacements:
    """What had finished in the checkpoint runs again, with nothing in its state, and gets the last watermark again."""
    return [(redistribute_state, "finished_tasks", lambda *_: frozenset())]


def finished_is_opened() -> Replacements:
    """A task that had finished in the checkpoint has operators, which are opened and finish, but waits for nothing."""
    original_build, original_finish = Deployment.__init__, Task._finish
    had_finished: set[tuple[str, int, TaskId]] = set()

    def build(self: Any, slot_id: int, deploy: Any, *rest: Any) -> None:
        had_finished.update((deploy.job_id, deploy.attempt, ref) for ref in deploy.finished)
        original_build(self, slot_id, msgspec.structs.replace(deploy, finished=()), *rest)

    def finish(self: Any) -> None:
        if (self._services.job_id, self._services.attempt, self.ref) not in had_finished:
            original_finish(self)
            return
        self.operators.chain.finish()
        self.operators.outputs.broadcast(EndOfData())
        self.state = TaskState.AWAITS_SENT
        self._end()

    return [(Deployment, "__init__", build), (Task, "_finish", finish)]


def last_timers_are_dropped() -> Replacements:
    """Timers that wait for the clock when the input has ended never fire."""
    return [(ProcessOperator, "_fire_last", lambda self: True)]


def timers_behind_the_end() -> Replacements:
    """Timers that are due when the input ends fire when they have their turn, however late that is."""

    def finish(self: Any) -> None:
        with patch.object(TaskOperators, "stop_timers", nothing):
            original(self)
        self.operators._takes_timers = False

    original = Task._finish
    return [(Task, "_finish", finish), (ProcessOperator, "_fire_last", lambda self: True)]


def timers_forgotten() -> Replacements:
    """Timers that wait for the clock are not restored."""
    original = ProcessOperator.restore

    def restore(self: Any, parts: Any) -> None:
        original(self, {name: part for name, part in parts.items() if name != "timers:processing"})

    return [(ProcessOperator, "restore", restore)]


def checkpoint_while_draining() -> Replacements:
    """A checkpoint may hold some sources as ended by a drain, and others in the middle of their input."""
    original = triggering.trigger_when_due

    def trigger_when_due(*of: Any) -> None:
        with patch.object(ClientRequests, "draining", False):
            original(*of)

    return [(machine, "trigger_when_due", trigger_when_due)]


def every_decline_counts() -> Replacements:
    """That a task is not ready for a checkpoint counts as a failure."""
    original = TaskSnapshots.decline

    def decline(self: Any, checkpoint_id: int, reason: str, counts: bool, *files: Any) -> None:
        original(self, checkpoint_id, reason, True, *files)

    return [(TaskSnapshots, "decline", decline)]


# ---- event time


def watermark_of_the_fastest() -> Replacements:
    """After a restore event time stands where the fastest old subtask was."""
    original = redistribute_state.assign_operator

    def assign_operator(old: Any, *arguments: Any) -> Any:
        with patch.object(redistribute_state, "min", max, create=True):
            return original(old, *arguments)

    return [(redistribute_state, "assign_operator", assign_operator)]


def event_time_of_the_fastest_split() -> Replacements:
    """Rows of all splits of a subtask count as one stream."""
    original = watermarks.TimestampsOperator.open

    def open_merged(self: Any, context: Any, out: Any) -> None:
        original(self, replace(context, splits=None), out)

    return [(watermarks.TimestampsOperator, "open", open_merged)]


def pending_splits_are_newer() -> Replacements:
    """Event time advances, whatever splits wait to be assigned."""
    return [(source_reader.SourceReader, "waiting_from_us", property(lambda self: MAX_WATERMARK_US))]


def parts_among_files() -> Replacements:
    """A split that continues where another ends is not waited for, however many files there are."""
    return [(split_assignment, "_without_follows", list)]


def watermark_before_timers() -> Replacements:
    """A watermark is forwarded when the operator has begun to fire for it."""

    def offer(self: Any, index: int, watermark_us: int) -> None:
        while index < len(self.operators):
            operator = self.operators[index]
            if operator.makes_watermarks and watermark_us != MAX_WATERMARK_US:
                return
            if watermark_us <= self.offered_us[index]:
                return
            self.offered_us[index] = watermark_us
            if index in self._pending or not operator.advance_watermark(watermark_us):
                self._pending[index] = watermark_us
            watermark_us = self._leaving(index, watermark_us)
            index += 1
        if watermark_us > self.offered_us[-1]:
            self.offered_us[-1] = watermark_us
            self._task_outputs.broadcast(Watermark(watermark_us))

    return [(OperatorChain, "offer", offer)]


def timers_before_rows() -> Replacements:
    """Rows have a turn only when no operator's timer is due."""
    original = Task._step

    def step(self: Any, started_s: float) -> bool:
        self._last = Step.READ_GATES
        return original(self, started_s)

    return [(Task, "_step", step)]


def metadata_before_acks() -> Replacements:
    """The checkpoint is published when one task has not answered yet."""
    original = checkpoints.CheckpointCoordinator.acknowledge

    def acknowledge(self: Any, slot: int, ack: Any, attempt: Any) -> None:
        original(self, slot, ack, attempt)
        pending = self.pending
        if pending is not None and self.outcome_is_known and len(pending.missing) == 1 and len(pending.acks) > 1:
            ref = next(iter(pending.missing))
            pending.acks[ref] = msgspec.structs.replace(ack, task=ref, operators=(), files=(), finished=False)
            self._publish(pending)

    return [(checkpoints.CheckpointCoordinator, "acknowledge", acknowledge)]


def commit_before_completion() -> Replacements:
    original = checkpoints.CheckpointCoordinator._publish

    def publish(self: Any, pending: Any) -> None:
        own = metadata_builder.committables_of(pending.acks, self._names, self._newest_id)
        owner = owner_of(self)
        owner.commits._commits.extend(commit_queue._Commit(what, pending.checkpoint_id) for what in own)
        owner.commits._next()
        original(self, pending)

    return [(checkpoints.CheckpointCoordinator, "_publish", publish)]


def forget_committables_on_restore() -> Replacements:
    original = machine.Coordinator._opened

    def opened(self: Any, outcome: Any) -> None:
        add = self.commits.add_commits
        self.commits.add_commits = lambda holder, what: add(holder, ())
        original(self, outcome)
        self.commits.add_commits = add

    return [(machine.Coordinator, "_opened", opened)]


def shared_chunks_by_checkpoint() -> Replacements:
    def split_retained(retained: Any, keep: int, in_use: Any = ()) -> Any:
        ordered = tuple(sorted(retained, key=lambda r: r.checkpoint_id))
        cut = max(len(ordered) - keep, 0)
        dropped, kept = ordered[:cut], ordered[cut:]
        return kept, dropped, frozenset().union(*(r.files for r in dropped))

    return [(checkpoints, "split_retained", split_retained)]


def pending_splits_late() -> Replacements:
    """The coordinator's splits are taken when the checkpoint completes, not when it is triggered."""
    original = checkpoints.CheckpointCoordinator._publish
    owner: dict[str, Any] = {}
    trigger = triggering.trigger_when_due

    def trigger_when_due(job: Any, sources: Any, program: Any) -> None:
        owner["sources"] = sources
        trigger(job, sources, program)

    def publish(self: Any, pending: Any) -> None:
        pending.sources = owner["sources"].snapshot()
        original(self, pending)

    return [
        (machine, "trigger_when_due", trigger_when_due),
        (checkpoints.CheckpointCoordinator, "_publish", publish),
    ]


def no_fence() -> Replacements:
    return [(store, "check_epoch", lambda *_, **__: None)]


def zombie_goes_on() -> Replacements:
    return [(checkpoints.CheckpointCoordinator, "check_epochs", nothing)]


MUTATIONS: Final = named(
    Mutation(
        "a savepoint that fails counts against the failures that the job tolerates", savepoints_count, intolerant_saving
    ),
    Mutation("publish while a task has not answered", metadata_before_acks),
    Mutation("commit before the metadata is durable", commit_before_completion),
    Mutation("forget committables on restore", forget_committables_on_restore),
    Mutation("shared chunks are deleted by checkpoint", shared_chunks_by_checkpoint),
    Mutation("pending splits are those at completion", pending_splits_late),
    Mutation("a stale coordinator is not fenced", no_fence),
    Mutation("a stale coordinator without files restarts indefinitely", zombie_goes_on, targeted.superseded),
    Mutation("that a task is not ready counts as a failure", every_decline_counts),
    Mutation("event time is restored as of the fastest subtask", watermark_of_the_fastest, targeted.on_time),
    Mutation("event time is that of all splits together", event_time_of_the_fastest_split, targeted.several_splits),
    Mutation(
        "event time does not wait for splits that no reader has", pending_splits_are_newer, targeted.several_splits
    ),
    Mutation(
        "event time does not wait for the second part of one file among several",
        parts_among_files,
        targeted.many_splits,
    ),
    Mutation("broadcast state is taken from subtask 0, finished or not", broadcast_of_the_first, partly_finished),
    Mutation("union state is accepted when some subtasks have finished", union_with_finished, targeted.ending_rescaled),
    Mutation("a finished operator runs again and gets the last watermark again", finished_runs_again, targeted.summed),
    Mutation("a finished operator is opened again", finished_is_opened, targeted.summed),
    Mutation("timers that wait for the clock at the end never fire", last_timers_are_dropped, targeted.alarmed),
    Mutation("timers that are due at the end fire after it", timers_behind_the_end, targeted.alarmed),
    Mutation("timers that wait for the clock are not restored", timers_forgotten, targeted.alarmed),
    Mutation("a watermark is forwarded before all its timers have fired", watermark_before_timers, targeted.on_time),
    Mutation("timers that are always due keep the rows waiting", timers_before_rows, targeted.always_due),
    Mutation("a checkpoint while only some sources have drained", checkpoint_while_draining, targeted.draining),
    Mutation("metadata that is not written in time counts as failed", late_metadata_is_failed, targeted.hanging),
    Mutation("a checkpoint that was given up becomes complete", late_metadata_completes, targeted.hanging),
    Mutation("failures are in a row in spite of checkpoints", checkpoints_do_not_count, targeted.poisoned),
    Mutation("a rescale continues with the splits of now", rescale_keeps_splits, targeted.rescaled),
    Mutation("checkpoints are described as before the rescale", rescale_keeps_layout, targeted.rescaled),
    Mutation("a rescale that is given up is not answered", rescale_is_not_answered, targeted.rescaled),
    Mutation("a plan that does not work is not left again", rescale_does_not_go_back, targeted.rescaled),
    Mutation("slots that are too many stay", rescale_keeps_slots, targeted.rescaled),
    Mutation("a rescale switches before its checkpoint is complete", rescale_before_stored, targeted.rescaled),
)
