"""The coordinator of one job: what is running, and what comes next.

Its phases, and what leads from one to the next, are in `job_phase.PHASE_TABLE`: CREATED, OPENING, then WAITING_TO_DEPLOY,
DEPLOYING, STARTING, RUNNING for each attempt, CANCELLING after a failure; finally ENDING, ENDED.

`handle` processes one event: `_handle_event` records what it means, then `_step` advances the job, and is called again
until nothing changes any more. `_step` evaluates its conditions each time and stores none of them, so the order in
which their parts become true does not matter.

Messages of slots about another attempt than the current one are ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from midstream.engine.checkpoint.redistribute_state import has_finished
from midstream.engine.coordinator import events as ev
from midstream.engine.coordinator import failures
from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.checkpoints.cleanup import CheckpointCleanup
from midstream.engine.coordinator.checkpoints.commit_queue import CommitQueue
from midstream.engine.coordinator.checkpoints.driver_committers import DriverCommitters
from midstream.engine.coordinator.checkpoints.slot_commit_dispatcher import EligibleSlots
from midstream.engine.coordinator.checkpoints.trigger import trigger_when_due
from midstream.engine.coordinator.effects import Effects, IoKind, TimerKind
from midstream.engine.coordinator.failures import AfterFailure, Failure
from midstream.engine.coordinator.job_phase import PHASE_TABLE, DeploymentObstacle, Phase, PhaseEvent
from midstream.engine.coordinator.notifications import subscribe
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.coordinator.placement.attempt_deployer import AttemptDeployer
from midstream.engine.coordinator.placement.autoscaler import Autoscaler
from midstream.engine.coordinator.placement.rescale import RescaleStage, Rescaling
from midstream.engine.coordinator.placement.slot_pool import PYTHON, SlotPool, other_python
from midstream.engine.coordinator.placement.split_assignment import SplitAssignment
from midstream.engine.coordinator.recent_events import RecentEvents
from midstream.engine.coordinator.requests.client_requests import ClientRequests
from midstream.engine.coordinator.requests.pending_waits import PendingWaits
from midstream.engine.coordinator.requests.savepoints import Savepoints
from midstream.engine.coordinator.requests.status_builder import job_status, state_of
from midstream.engine.coordinator.restart_backoff import RestartBackoff
from midstream.engine.coordinator.restore import open_directory
from midstream.engine.coordinator.restore.distribute import DistributedState, StateDistribution
from midstream.engine.coordinator.restore.open_directory import HAD_FINISHED, OpenedStorage
from midstream.engine.core.errors import InvariantError, MidstreamError, StorageError, assert_never
from midstream.engine.core.interfaces import Done, Failed, Signal, SlotAvailability, Storage
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.job_status import FailureStatus, JobStatus

END_TIMEOUT_S: Final = 10.0
"""The time for which I/O that is still running may keep the job from ending."""
REMEMBERED_MAX: Final = 20


class Coordinator:
    """The machine that decides everything about one job.

    `open_storage` returns the Storage of a directory, `availability` why no slots come; both are called on the I/O pool.
    `stopped` is set when the job ends.

    The class has more attributes than a class should: half of them are the parts of the coordinator, and this is the
    only class that connects all of them; the others are what the status shows of the job as a whole, and how it ends.
    """

    def __init__(
        self,
        plan: ev.JobPlan,
        now_ms: int,
        open_storage: Callable[[str], Storage],
        stopped: Signal,
        availability: Callable[[], SlotAvailability] = SlotAvailability,
    ) -> None:
        self.plan = plan
        self._program = plan.graph
        """The graph at the program's own parallelism, which a rescale does not change."""
        self.phase = Phase.CREATED
        self.started_ms = now_ms
        self.failures: deque[FailureStatus] = deque(maxlen=REMEMBERED_MAX)
        """The most recent failures, newest first."""
        self.warnings: deque[str] = deque(maxlen=REMEMBERED_MAX)
        self.restored_from: str | None = None
        self.outcome: tuple[ev.EndState, MidstreamError | None] | None = None
        self._open_storage = open_storage
        self._recent_events = RecentEvents()
        self._end_reason = ""
        """Why the job ends."""

        self._effects = Effects()
        self.waits = PendingWaits(self._effects, plan.config.name)
        self.slots = SlotPool(self._effects, plan.graph, plan.config.slot_timeout_s, availability)
        self.attempts = AttemptDeployer(self._effects, self.slots, plan.config.heartbeat_timeout_s)
        self.restarts = RestartBackoff(self._effects, plan.config.restart)
        self.requests = ClientRequests(self._effects)
        self._distribution = StateDistribution(self._effects)
        self.rescaling = Rescaling(self._effects, self.slots, self.attempts, self._distribution)
        self.autoscaler = Autoscaler(self._effects, plan.config.autoscale, self._distribution)
        self.savepoints = Savepoints(self._effects, plan, self.requests, open_storage)
        self.cleanup = CheckpointCleanup(self._effects)
        self.sources = SplitAssignment(self._effects, plan.graph)
        self.commits = CommitQueue(
            self._effects, plan, DriverCommitters(plan, stopped), self.slots, EligibleSlots(self)
        )
        self.checkpoints = CheckpointCoordinator(self._effects, plan, self.cleanup, self.commits)
        subscribe(self, self._effects.notifications)

        self.had_finished = False
        """Whether the job had finished in the checkpoint from which it was started: then nothing runs."""
        self._closing = False
        """Whether, while ENDING, only closing the sources and cleaning up remain."""

    @property
    def attempt(self) -> Attempt | None:
        return self.attempts.current

    # ---- interface ----

    def handle(self, event: ev.CoordinatorEvent, now_ms: int) -> list[ev.Instruction]:
        """Process one event. Raises InvariantError, with the events before it, when a rule of the protocol is broken."""
        self._effects.cause, self._effects.now_ms = self._effects.cause + 1, now_ms
        self._recent_events.record(self._effects.cause, self.phase, event)
        try:
            self._handle_event(event)
            while self._step():
                pass
        except InvariantError as error:
            raise InvariantError(f"{error}; the last events: {self._recent_events}") from error
        return self._effects.take()

    def status(self, now_ms: int) -> JobStatus:
        return job_status(self, now_ms)

    def check(self) -> None:
        """Assert everything that must hold between two events."""
        for part in (self.slots, self.checkpoints, self.commits, self.sources):
            part.check()
        if self.phase in (Phase.DEPLOYING, Phase.STARTING, Phase.RUNNING):
            assert self.attempt is not None, self.phase
            assert self.attempt.all_finished or self.slots.live.keys() >= set(self.attempt.slots), self.phase
        is_collecting = self.checkpoints.pending is not None and self.checkpoints.outcome_is_known
        assert not is_collecting or self.phase is Phase.RUNNING, (self.phase, self.checkpoints.pending)
        assert (self.outcome is None) == (self.phase not in (Phase.ENDING, Phase.ENDED)), (self.phase, self.outcome)

    # ---- events ----

    def _transition(self, event: PhaseEvent) -> None:
        self.phase = PHASE_TABLE.next(self.phase, event)

    def _handle_event(self, event: ev.CoordinatorEvent) -> None:  # noqa: PLR0912 - one arm for each event or message
        if self.phase is Phase.ENDED:
            raise InvariantError(f"{type(event).__name__} after the end of the job")
        match event:
            case ev.Started():
                self._start()
            case ev.SlotConnected(slot, register):
                self._slot_connected(slot, register)
            case ev.SlotMessage(slot, message):
                self._handle_message(slot, message)
            case ev.SlotLost():
                self._slot_lost(event)
            case ev.SlotLeaving(slot, reason):
                self._slot_leaving(slot, reason)
            case ev.SlotRequestFailed(request, reason):
                self.slots.request_failed(request, reason)
            case ev.SlotsGone(reason):
                self._slots_gone(reason)
            case ev.ClientRequested(client, request):
                self._handle_request(client, request)
            case ev.CancelRequested(reason):
                self._end("stopped", None, f"the job was cancelled: {reason}")
            case ev.TimerFired(token):
                self._effects.timer_fired(token)
            case ev.TimePassed(seconds):
                self.waits.poll(self, seconds)
                self.autoscaler.poll(self)
            case ev.IoDone(token, outcome):
                self._effects.io_done(token, outcome)
            case _:
                assert_never(event)

    def _start(self) -> None:
        self._transition(PhaseEvent.STARTED)
        try:
            open_directory.check_plan(self.plan)
        except MidstreamError as error:
            self._end("failed", error, str(error))
            return
        if self.plan.config.checkpoint_dir is None:
            self._gather()
            return
        work = partial(open_directory.open_checkpoints, self.plan, self._open_storage)
        what, has_limit = open_directory.describe_opening(self.plan), not open_directory.copies_in(self.plan)
        self._effects.run_io(IoKind.OPEN, work, self._opened, waits_for=what, has_limit=has_limit)

    def _opened(self, outcome: Done[OpenedStorage] | Failed) -> None:
        if self.phase is not Phase.OPENING:
            return
        if isinstance(outcome, Failed):
            failure = failures.failure_of(outcome.error, "the checkpoint directory")
            error = outcome.error if isinstance(outcome.error, MidstreamError) else failure.error
            self._end("failed", error, failure.summary)
            return
        found = outcome.value
        self._effects.notifications.storage_opened(found)
        self.warnings.extend(found.opened.warnings)
        restore = found.opened.restore
        if restore is not None:
            kept = [c for c in restore.committables if c.uid not in found.state.dropped]
            self.commits.add_commits(restore.checkpoint_id, kept)
            self._distribution.keep(restore, self.plan.graph, found.state)
            self.had_finished = has_finished(restore, self.plan.graph)
            self.restored_from = self.checkpoints.newest_path
        if self.had_finished:
            self.slots.resize(0)
            self.warnings.append(f"the job had finished in {self.restored_from}: {HAD_FINISHED}")
        self._gather()

    def _gather(self) -> None:
        self._transition(PhaseEvent.OPENED)
        if self.attempt is None:
            self._reset_sources()
        self.slots.gather()

    # ---- slots ----

    def _slot_connected(self, slot: int, register: m.Register) -> None:
        if self.phase is Phase.ENDING or not self.slots.connected(slot, register):
            self._effects.close_slot(slot, "this slot is not needed")
        elif register.python != PYTHON:
            self._effects.notifications.slots_failed(other_python(slot, register))

    def _slot_lost(self, event: ev.SlotLost) -> None:
        is_harmless = self._loss_is_harmless(event.slot)
        lost = self.slots.lost(event.slot)
        if lost is None:
            return
        self.attempts.slot_lost(event.slot)
        text = f"{lost} is lost: {event.reason}"
        if is_harmless:
            self.warnings.append(text)
        else:
            self._effects.notifications.attempt_failed(failures.slot_lost(text, event.last_lines, event.crash))
        self._replace_missing_slot()

    def _loss_is_harmless(self, slot: int) -> bool:
        """Return whether nothing fails if this slot is lost.

        This must be evaluated before `SlotPool.lost`, after which the slot does not count as leaving any more, and the
        slots are not complete. While no task runs, a commit that kills every slot must count as a failure, or it would be
        repeated indefinitely; it counts once if several slots are lost with their machine.
        """
        match self.phase:
            case Phase.WAITING_TO_DEPLOY:
                return slot in self.slots.leaving or not (self.slots.complete and self.commits.runs_on(slot))
            case Phase.CANCELLING:
                return slot in self.slots.leaving
            case Phase.RUNNING:  # once all tasks have finished their output is committed: a restart would duplicate it
                return self._is_spare(slot) or (self.attempt is not None and self.attempt.all_finished)
            case _:  # no task is known to run on it
                return False

    def _slot_leaving(self, slot: int, reason: str) -> None:
        """No later attempt runs on this slot; `_step_running` moves the current one off it."""
        if self.phase is Phase.ENDING or not self.slots.mark_leaving(slot, reason):
            return
        if self._is_spare(slot):
            self.slots.release_leaving(slot)
        self._replace_missing_slot()

    def _replace_missing_slot(self) -> None:
        if self.phase in (Phase.WAITING_TO_DEPLOY, Phase.CANCELLING):
            self.slots.gather()
        else:
            self.rescaling.slot_is_missing()

    def _is_spare(self, slot: int) -> bool:
        return self.phase is Phase.RUNNING and self.attempt is not None and slot not in self.attempt.slots

    def slots_failed(self, failure: Failure) -> None:
        """Slots did not come. While the job runs, only a rescale or a move needs slots that are missing."""
        if self.phase is Phase.RUNNING:
            self.rescaling.slots_failed(failure.summary)
        elif not self.autoscaler.shrinks(self, failure):
            self.fail_attempt(failure)

    def _slots_gone(self, reason: str) -> None:
        """No slot is available any more, so a restart cannot help. A job that only commits its output needs no slot.

        Several slots may report this, one after the other.
        """
        if self.phase is Phase.ENDING:
            return
        if self.phase is Phase.RUNNING and self.attempt is not None and self.attempt.all_finished:
            self.warnings.append(reason)
            return
        self.rescaling.give_up(reason)
        self._effects.notifications.attempt_failed(failures.slots_gone(reason, self.checkpoints.newest_path))

    # ---- messages of slots ----

    def _handle_message(self, slot: int, message: m.FromSlot) -> None:  # noqa: PLR0912 - one arm for each event or message
        if slot not in self.slots.live or isinstance(message, m.Register):
            return
        attempt = self.attempt
        if isinstance(message, m.SlotStatus):
            self.slots.handle_status(slot, message, attempt.number if attempt else -1, self._effects.now_ms)
            return
        if isinstance(message, m.InCall):
            self.slots.live[slot].in_call = message
            return
        if isinstance(message, (m.CommitDone, m.CommitFailed)):
            self.commits.handle_answer(slot, message)
            return
        if attempt is None or message.attempt != attempt.number:
            return
        if not isinstance(message, (m.Deployed, m.DeployFailed, m.Cancelled)):
            attempt.check_owner(slot, message.task)
        cancelling = self.phase is Phase.CANCELLING
        match message:
            case m.CheckpointAck():
                self.slots.handle_metrics(message.metrics, self._effects.now_ms)
                self.checkpoints.acknowledge(slot, message, attempt)
            case m.Cancelled():
                if cancelling:  # else the job is ending already
                    attempt.unanswered.discard(slot)
            case m.TaskFailed() | m.DeployFailed() if cancelling and self.rescaling.abandons_tasks:
                return  # these tasks are being replaced: they fail mostly because their peers are cancelled
            case m.TaskFailed(_, _, summary, details, fatal, symptom, fingerprint, of_one_row):
                row = summary if of_one_row else ""
                self._task_failed(failures.failure_of_user_code(summary, details, fatal, fingerprint, row), symptom)
            case m.DeployFailed(_, summary, details, fatal, fingerprint):
                failure = failures.failure_of_user_code(summary, details, fatal, fingerprint)
                self._effects.notifications.start_failed(failure)
            case _ if cancelling:
                return
            case m.Deployed():
                attempt.unanswered.discard(slot)
            case m.TaskRunning(_, ref) | m.TaskEndOfData(_, ref):
                attempt.advance(ref, type(message))
            case m.TaskFinished(_, ref, committables, metrics):
                self.slots.handle_metrics(metrics, self._effects.now_ms)
                attempt.advance(ref, type(message))
                self.commits.keep_until_finished(ref, committables)
                self.checkpoints.task_finished(ref)
            case m.CheckpointDecline():
                self.checkpoints.decline(message)
            case m.RequestSplit() | m.SourceProgress():
                self.sources.handle(message)
            case _:
                assert_never(message)

    # ---- progress ----

    def _step(self) -> bool:
        """Advance the job if it can; True if it advanced, and may be able to advance again."""
        self.commits.advance()
        match self.phase:
            case Phase.RUNNING:  # first, because the job is nearly always in this phase
                return self._step_running()
            case Phase.WAITING_TO_DEPLOY:
                return self._try_deploy()
            case Phase.DEPLOYING:
                return self._try_start()
            case Phase.STARTING:
                return self._try_run()
            case Phase.CANCELLING:
                return self._try_gather()
            case Phase.ENDING:
                return self._try_conclude()
            case Phase.CREATED | Phase.OPENING | Phase.ENDED:
                return False
            case _:
                assert_never(self.phase)

    def _try_deploy(self) -> bool:
        if self.slots.leaving and not self.commits.runs_on_slots:
            self.slots.release_leaving(*sorted(self.slots.leaving))
        obstacle = self._deployment_obstacle()
        if obstacle is DeploymentObstacle.STOP:
            self.requests.stop_without_tasks(self.checkpoints.newest_path)
            self._end("stopped", None, "the job was stopped while no task ran")
        elif obstacle is not None:
            return False
        elif self.had_finished:
            self._end("finished", None, "the job had finished before it was started")
        else:
            self._deploy()
        return True

    def _deployment_obstacle(self) -> DeploymentObstacle | None:
        """Return what the next attempt has still to wait for. What removes it is begun here, if it is not under way.

        The order matters:
        - The newest checkpoint must be known first: what is aborted, where a stop ends and what is restored depend on it.
        - A job that has run stops without waiting for the restart's delay: that checkpoint has all that was processed.
        - Only after the delay is the state distributed, and are commits tried again that had failed for the last time:
          if that fails, it fails again only after the next delay.
        - A job that has never run stops once the output that the restored checkpoint holds is committed.
        - Slots come last, since they are requested before, and connect during the other waits.
        """
        if not self.checkpoints.outcome_is_known:
            return DeploymentObstacle.CHECKPOINT_OUTCOME
        self.commits.add_aborts(self.checkpoints.take_to_abort())
        has_run, is_rescaling = self.attempt is not None, self.rescaling.stage is not RescaleStage.NONE
        if has_run and not is_rescaling and self.commits.is_drained and self.requests.can_stop_without_tasks:
            return DeploymentObstacle.STOP
        if self.restarts.delayed:
            return DeploymentObstacle.RESTART_DELAY
        if not self._distribution.is_ready(self.checkpoints.newest, self.plan, self._cannot_restore):
            return DeploymentObstacle.STATE
        if self.commits.is_stalled:
            self.commits.retry_stalled()
        if not self.commits.is_drained:
            return DeploymentObstacle.COMMITS
        if not has_run and self.requests.can_stop_without_tasks:
            return DeploymentObstacle.STOP
        return None if self.slots.complete else DeploymentObstacle.SLOTS

    def _deploy(self) -> None:
        if not self.sources.are_reset:
            self._reset_sources()
        self.restored_from = self.checkpoints.newest_path
        self.attempts.deploy(self.plan, self._state_to_restore(), self.checkpoints.epoch)
        self._distribution.forget()
        self._transition(PhaseEvent.DEPLOYED)

    def _reset_sources(self) -> None:
        state = self._state_to_restore()
        self.sources.reset(state.sources, state.finished)

    def _state_to_restore(self) -> DistributedState:
        return self._distribution.state_of(self.checkpoints.newest, self.plan.graph)

    def _cannot_restore(self, failed: Failed) -> None:
        if self.phase is Phase.WAITING_TO_DEPLOY:
            failure = failures.failure_of(failed.error, "the checkpoint to resume from")
            self._effects.notifications.attempt_failed(failure)

    def _try_start(self) -> bool:
        assert self.attempt is not None
        if not self.attempts.answered:
            return False
        self.sources.deployed(self.attempt)
        self.attempts.start()
        self._transition(PhaseEvent.ANSWERED)
        if self.requests.draining:
            self._stop_sources()
        return True

    def _try_run(self) -> bool:
        assert self.attempt is not None
        if not self.attempt.all_started:
            return False
        self._transition(PhaseEvent.RUNS)
        self._effects.notifications.attempt_runs()
        return True

    def _step_running(self) -> bool:
        assert self.attempt is not None
        uncommitted = self.commits.oldest_uncommitted
        self.savepoints.advance(self.checkpoints.storage, uncommitted)
        self.checkpoints.retain(uncommitted, self.savepoints.oldest_needed)
        stop = self.requests.stop
        if stop is not None and stop.is_stored:
            if self.commits.is_drained and self.savepoints.idle:
                self._end("stopped", None, "the job has stopped")
                return True
            return False
        if self.attempt.all_finished:
            self.commits.commit_kept()
            if self.commits.is_drained and self.checkpoints.outcome_is_known and self.savepoints.idle:
                self._end("finished", None, "the job has finished")
                return True
            return False
        self.rescaling.move_if_needed(self.plan, is_stopping=stop is not None)
        if self.rescaling.stage is RescaleStage.REQUESTING_SLOTS and self.slots.complete:
            self.rescaling.gathered()
            return True
        if self.rescaling.stage is RescaleStage.READY_TO_SWITCH:
            self.rescaling.switching()
            self.sources.pause()
            self._cancel_attempt("the job is being rescaled, or moves to other slots")
            return True
        trigger_when_due(self, self.sources, self._program)
        return False

    # ---- requests of clients ----

    def _handle_request(self, client: int, request: m.ClientRequest) -> None:
        match request:
            case m.GetStatus():
                self._effects.reply(client, m.Reply(status=self.status(self._effects.now_ms)))
            case _ if self.outcome is not None:
                self.requests.refuse([client], f"the job has ended: {self.outcome[0]}")
            case m.DoRescale(parallelism) if self.phase is Phase.RUNNING and self.requests.stop is None:
                self.rescaling.request(partial(self._effects.reply, client), parallelism, self.plan)
            case m.DoRescale():
                self.requests.refuse([client], f"the job is {state_of(self)}: only a running job can be rescaled")
            case m.DoSavepoint() | m.DoStop(savepoint=str()):
                self.savepoints.request(client, request)
            case m.DoCheckpoint() | m.DoStop():
                self.requests.handle(client, request, has_storage=self.plan.config.checkpoint_dir is not None)
            case _:
                assert_never(request)

    def stop_requested(self, drain: bool) -> None:
        if drain:
            self._stop_sources()

    def _stop_sources(self) -> None:
        """Begin to drain the job. Tasks that do not run yet are notified when they start."""
        self.sources.stop()
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            assert self.attempt is not None
            self.attempts.send(m.StopSources(self.attempt.number))

    # ---- failures ----

    def fenced(self, error: StorageError) -> None:
        self._end("failed", error, str(error))

    def start_failed(self, failure: Failure) -> None:
        """A job that has never run is not restarted, since its program or its configuration does not work."""
        self.fail_attempt(replace(failure, fatal=failure.fatal or not self.slots.job_has_run))

    def _task_failed(self, failure: Failure, symptom: bool) -> None:
        if not symptom:
            self._effects.notifications.attempt_failed(failure)
        elif self.phase in (Phase.STARTING, Phase.RUNNING):  # else its cause was reported before
            self.attempts.report_symptom(failure)

    def fail_attempt(self, failure: Failure) -> None:
        """Record a failure, and end the attempt; only the first failure of an attempt leads to a restart."""
        number = self.attempt.number if self.attempt else 0
        self.failures.appendleft(failure.status(self._effects.now_ms, number))
        if self.phase in (Phase.ENDING, Phase.ENDED):
            return
        before = self.rescaling.give_up(failure.summary)
        if before is not None:
            self.sources.pause()
            self.switch_to(before)
        # without checkpoints, a job that has committed some of its output must not restart: it would be duplicated
        would_duplicate = self.commits.is_stalled and self.checkpoints.storage is None
        match failures.after_failure(self.phase, failure, before is not None, would_duplicate):
            case AfterFailure.NOTHING:
                return
            case AfterFailure.REVERTED_RESCALE:
                self.restarts.delay(0.0)
                follows = "The job continues at its previous parallelism."
            case AfterFailure.RESTART if (after_s := self.restarts.schedule_restart(failure)) is not None:
                start = self.checkpoints.newest_path or "the beginning"
                follows = f"Restart {self.restarts.restart_count} in {after_s:g} s, from {start}."
            case _:  # END, or a RESTART too many
                self._end("failed", self.restarts.final_error(failure), failure.summary)
                return
        self._effects.notify_user(self.restarts.describe(failure, follows))
        self.requests.attempt_failed(failure.summary, self.commits.is_stalled)
        self.sources.pause()
        if self.phase is Phase.WAITING_TO_DEPLOY:
            self.slots.gather()
            return
        self._cancel_attempt(f"the job restarts after a failure: {failure.summary}")

    def switch_to(self, plan: ev.JobPlan) -> None:
        """Run the same job at another parallelism from the next attempt on."""
        self.plan = plan
        self.slots.resize(plan.graph.slots)
        self.checkpoints.rescale(plan)
        self.sources.rescale(plan.graph)

    def _cancel_attempt(self, why: str) -> None:
        pending = self.checkpoints.pending
        self._effects.notifications.attempt_over(why, pending is not None and pending.is_stop)
        self._transition(PhaseEvent.ATTEMPT_OVER)

    def _try_gather(self) -> bool:
        if not self.attempts.answered or self.commits.runs_on_slots:  # a slot that a rescale releases may be committing
            return False
        self.attempts.cancelled()
        self._transition(PhaseEvent.CANCELLED)
        if self.rescaling.stage is RescaleStage.SWITCHING:
            self.switch_to(self.rescaling.plan)
            self.slots.gather()
        return True

    # ---- the end ----

    def _end(self, state: ev.EndState, error: MidstreamError | None, why: str) -> None:
        """Begin to end the job: release everything. `why` is the answer to clients that still wait for a checkpoint."""
        if self.phase in (Phase.ENDING, Phase.ENDED):
            return
        assert (error is None) == (state != "failed"), (state, error)
        self._transition(PhaseEvent.ENDS)
        self.outcome = state, error
        self._end_reason = why
        self._effects.cancel_all_timers()
        self._effects.notifications.job_ends(why, state == "stopped")
        self._effects.set_timer(TimerKind.END, END_TIMEOUT_S, self._conclude)

    def _try_conclude(self) -> bool:
        if self._effects.io_in_flight:
            return False
        if self._closing:
            self._conclude()
            return True
        self._closing = True
        self.commits.abort_kept()
        self.commits.add_aborts(self.checkpoints.take_to_abort())
        self.commits.close_when_cleaned_up()
        self.cleanup.run()
        self.sources.close()
        return True

    def _conclude(self) -> None:
        assert self.outcome is not None
        state, error = self.outcome
        self._transition(PhaseEvent.CONCLUDED)
        self._effects.cancel_all_timers()
        stop = self.requests.stop
        path = stop.checkpoint if stop is not None and state == "stopped" else None
        done = state == "finished" or path is not None or (stop is not None and stop.is_stored)
        reply = m.Reply(checkpoint=path) if done else m.Reply(error=str(error or self._end_reason))
        self.requests.job_ended(reply, self._end_reason)
        if self.checkpoints.pending is not None:
            self.requests.refuse(self.checkpoints.pending.clients, self._end_reason)
        self._effects.end(ev.JobEnded(state, error, self.status(self._effects.now_ms), path, cause=self._effects.cause))
