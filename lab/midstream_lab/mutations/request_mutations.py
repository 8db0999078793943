"""Known bugs of the coordinator's life: triggers, attempts, and answers to those outside; see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.checkpoints.schedule import CheckpointSchedule
from midstream.engine.coordinator.coordinator import Coordinator
from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.coordinator.placement.attempt import Attempt, CheckpointPlan, TaskPhase
from midstream.engine.coordinator.placement.attempt_deployer import AttemptDeployer
from midstream.engine.coordinator.placement.rescale import Rescaling
from midstream.engine.coordinator.requests.client_requests import ClientRequests
from midstream.engine.coordinator.requests.savepoints import Savepoints
from midstream.engine.coordinator.restore.distribute import StateDistribution
from midstream.engine.protocol.messages import DoStop, Reply
from midstream.simulation.faults import Fault
from midstream_lab.fault_kinds import HANGS
from midstream_lab.mutations.mutation import Mutation, Replacements, named, owner_of
from midstream_lab.scenarios import targeted
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.targeted_at_rest import intolerant, with_requests


def _nothing(*_: Any, **__: Any) -> None:
    pass


# ---- checkpoints


def id_of_a_failed_one_again() -> Replacements:
    """The next checkpoint has the id of the one that has failed."""

    def abort(self: Any, pending: Any, *arguments: Any, **more: Any) -> None:
        self._next_id = pending.checkpoint_id
        original(self, pending, *arguments, **more)

    original = CheckpointCoordinator._abort
    return [(CheckpointCoordinator, "_abort", abort)]


def finished_meanwhile_is_missed() -> Replacements:
    """A checkpoint waits for a task that has ended before its trigger came."""
    return [(CheckpointCoordinator, "task_finished", _nothing)]


def trigger_at_the_sources_only() -> Replacements:
    """A checkpoint begins at the sources, also when they have all ended."""

    def plan_checkpoint(self: Any) -> CheckpointPlan:
        plan = original(self)
        trigger = tuple(ref for ref in plan.trigger if self._graph.vertices[ref.vertex].source is not None)
        return replace(plan, trigger=trigger or plan.trigger[:1])

    original = Attempt.plan_checkpoint
    return [(Attempt, "plan_checkpoint", plan_checkpoint)]


def outcome_is_not_awaited() -> Replacements:
    """The next attempt begins while the metadata of a checkpoint is still being written."""

    def try_deploy(self: Any) -> bool:
        with patch.object(CheckpointCoordinator, "outcome_is_known", True):
            return original(self)

    original = Coordinator._try_deploy
    return [(Coordinator, "_try_deploy", try_deploy)]


def restored_from_what_was_dealt() -> Replacements:
    """A restart uses what was distributed for the one before, although a newer checkpoint is complete."""

    def find(self: Any, metadata: Any, graph: Any) -> Any:
        if metadata is not None and self._distributed is not None and self._distributed[0][1] is graph:
            return self._distributed[1]
        return original(self, metadata, graph)

    original = StateDistribution._find
    return [(StateDistribution, "_find", find), (StateDistribution, "forget", _nothing)]


def pause_is_ignored() -> Replacements:
    """The next checkpoint follows immediately, however long the last one took."""

    def due_ms(self: Any, wanted: bool, is_final: bool, uncommitted: int) -> Any:
        ended, self._ended_ms = self._ended_ms, self._began_ms
        due = original(self, wanted, is_final, uncommitted)
        self._ended_ms = ended
        return due

    original = CheckpointSchedule._due_ms
    return [(CheckpointSchedule, "_due_ms", due_ms)]


def failures_are_never_forgotten() -> Replacements:
    """Checkpoints that complete do not reset the count of those that fail."""

    def published(self: Any, *arguments: Any) -> None:
        failures = self.schedule.failures
        original(self, *arguments)
        self.schedule.failures = max(failures, self.schedule.failures)

    original = CheckpointCoordinator._published
    return [(CheckpointCoordinator, "_published", published)]


# ---- attempts


def cancelled_is_not_awaited() -> Replacements:
    """The next attempt is deployed while slots still run tasks of the one before, which write what they have."""

    def cancel(self: Any, *why: Any) -> None:
        original(self, *why)
        self.current.unanswered.clear()

    original = AttemptDeployer.cancel
    return [(AttemptDeployer, "cancel", cancel)]


def started_before_all_are_deployed() -> Replacements:
    """Tasks start when the first slot has them."""

    def try_start(self: Any) -> bool:
        if len(self.attempt.unanswered) < len(self.attempt.slots):
            self.attempt.unanswered.clear()
        return original(self)

    original = Coordinator._try_start
    return [(Coordinator, "_try_start", try_start)]


def end_of_a_slot_is_no_failure() -> Replacements:
    """A slot that is lost when only some tasks have finished counts as one that has done its work."""

    def slot_lost(self: Any, event: Any) -> None:
        done = property(lambda attempt: attempt._count_by_phase[TaskPhase.FINISHED] > 0)
        with patch.object(Attempt, "all_finished", done):
            original(self, event)

    original = Coordinator._slot_lost
    return [(Coordinator, "_slot_lost", slot_lost)]


# ---- answers


def rescaled_before_it_runs() -> Replacements:
    """A rescale is reported as complete when the old tasks are cancelled."""

    def switching(self: Any) -> None:
        original(self)
        self._current.answer(Reply(checkpoint=self._current.checkpoint))
        self._current.answer = lambda reply: None

    original = Rescaling.switching
    return [(Rescaling, "switching", switching)]


def second_stop_replaces_the_first() -> Replacements:
    """Only the client that requested a stop last is answered."""

    def handle(self: Any, client: int, request: Any, has_storage: bool) -> None:
        if isinstance(request, DoStop) and self.stop is not None and self.stop.drain == request.drain:
            self.stop.clients[:] = [client]
        else:
            original(self, client, request, has_storage)

    original = ClientRequests.handle
    return [(ClientRequests, "handle", handle)]


def retry_is_not_asked_for() -> Replacements:
    """The client that waits for a checkpoint which has to be taken again is forgotten."""
    return [(ClientRequests, "requeue", _nothing)]


def stopped_with_a_failed_one() -> Replacements:
    """A job stops though the checkpoint to stop with has failed."""

    def aborted(self: Any, event: Any) -> None:
        if event.pending.stops and not event.retry:
            self.stop_is_stored(owner_of(self).checkpoints.path_of(event.pending.checkpoint_id))
            self.refuse(event.pending.clients, event.reason)
        else:
            original(self, event)

    original = ClientRequests.checkpoint_aborted
    return [(ClientRequests, "checkpoint_aborted", aborted)]


def asked_after_the_trigger() -> Replacements:
    """A client that requests a checkpoint while one is being made gets that one."""

    def handle_request(self: Any, client: int, request: Any) -> None:
        original(self, client, request)
        pending = self.checkpoints.pending
        if pending is not None and self.checkpoints.outcome_is_known and self.phase is Phase.RUNNING:
            pending.clients = (*pending.clients, *self.requests.take_checkpoint_clients())

    original = Coordinator._handle_request
    return [(Coordinator, "_handle_request", handle_request)]


def savepoint_of_an_older_checkpoint() -> Replacements:
    """A savepoint is made of the checkpoint that is in progress when its place is ready."""

    def claimed(self: Any, savepoint: Any, outcome: Any) -> None:
        original(self, savepoint, outcome)
        for waiting in self._at(savepoint.stage):
            pending = self._in_progress()
            if waiting is savepoint and savepoint.stage.name == "WAITING" and pending is not None:
                savepoint.stage, savepoint.checkpoint_id = (
                    type(savepoint.stage).MAKING_CHECKPOINT,
                    pending.checkpoint_id,
                )

    def init(self: Any, *arguments: Any, **more: Any) -> None:
        original_init(self, *arguments, **more)
        self.savepoints._in_progress = lambda: self.checkpoints.pending

    original, original_init = Savepoints._claimed, Coordinator.__init__
    return [(Savepoints, "_claimed", claimed), (Coordinator, "__init__", init)]


def drained_reads_on() -> Replacements:
    """Sources that had not started when a drain was requested do not get the request to end."""

    def stop_sources(self: Any) -> None:
        if self.phase is not Phase.STARTING:
            original(self)

    original = Coordinator._stop_sources
    return [(Coordinator, "_stop_sources", stop_sources)]


# ---- where they are searched


def _ending(seed: int) -> Scenario:
    """There are no faults, barriers overtake rows, and one checkpoint follows the other while tasks end."""
    drawn = draw(seed, topology=("totals", "finishing")[seed % 2], parallelism=2, faults=(), rows=50)
    tempo = replace(drawn.tempo, mail_us=40, control_us=(400, 5000)[seed // 2 % 2], io_us=100, clock_tick_us=0)
    drawn = replace(drawn, tempo=tempo, interval_s=0.0005, min_pause_s=0.0, aligned_timeout_s=0.0, timeout_s=60.0)
    return replace(drawn, rounds=1, batch_rows=3, row_us=0, sink_rows=0)


def _hanging(seed: int) -> Scenario:
    """A slot dies while metadata is being written, which takes longer than a restart."""
    drawn = with_requests("kill_slot")(seed)
    soon = 2_100_000 + 6 * (seed * 7919 % 3000)
    faults = tuple(Fault(100 + 200 * i + seed * 37 % 200, HANGS, soon) for i in range(3))
    return replace(drawn, faults=faults, tempo=replace(drawn.tempo, io_us=100, control_us=50))


def _again(seed: int) -> Scenario:
    """The job fails again and again, each time with newer checkpoints."""
    drawn = with_requests("user_error", "kill_slot")(seed)
    faults = tuple(replace(fault, step=100 + 200 * i + seed * 37 % 100) for i, fault in enumerate(drawn.faults))
    return replace(drawn, rows=100, faults=faults, interval_s=0.005)


def _paused(seed: int) -> Scenario:
    """Checkpoints take longer than the interval between them, and a pause is required between them."""
    drawn = with_requests("kill_slot")(seed)
    return replace(drawn, min_pause_s=0.005, tempo=replace(drawn.tempo, io_us=2000), faults=drawn.faults[:2])


_restarted = with_requests("kill_slot", "user_error", "crash_at_publish")
_stopped = with_requests("stop", "checkpoint", "write_fails")

MUTATIONS: Final = named(
    Mutation("two checkpoints have one id", id_of_a_failed_one_again, with_requests("write_fails")),
    Mutation("a checkpoint waits for a task that has ended", finished_meanwhile_is_missed, _ending),
    Mutation("no barrier comes after an ended source", trigger_at_the_sources_only, targeted.summed),
    Mutation("a restart does not wait for metadata", outcome_is_not_awaited, _hanging),
    Mutation("a restart resumes from an older checkpoint", restored_from_what_was_dealt, _again),
    Mutation("tasks start before others exist", started_before_all_are_deployed, _restarted),
    Mutation("a slot that dies near the end is not missed", end_of_a_slot_is_no_failure, targeted.summed),
    Mutation("a rescale is answered too soon", rescaled_before_it_runs, targeted.rescaled),
    Mutation(
        "the client that requested a stop first is not answered", second_stop_replaces_the_first, with_requests("stop")
    ),
    Mutation(
        "the client that waits for a checkpoint is forgotten", retry_is_not_asked_for, with_requests("checkpoint")
    ),
    Mutation(
        "a savepoint is made of a checkpoint that was triggered before the request",
        savepoint_of_an_older_checkpoint,
        targeted.saving,
    ),
    Mutation(
        "a job stops with a checkpoint that failed", stopped_with_a_failed_one, with_requests("publish_fails", "stop")
    ),
    Mutation("the pause between checkpoints is ignored", pause_is_ignored, _paused),
    Mutation("failed checkpoints are counted indefinitely", failures_are_never_forgotten, intolerant),
    Mutation("an attempt begins before the last one ends", cancelled_is_not_awaited, _restarted),
    Mutation("a request is answered with a checkpoint that was triggered before it", asked_after_the_trigger, _stopped),
    Mutation("some sources do not get the request to end", drained_reads_on, with_requests("drain", "kill_slot")),
)
