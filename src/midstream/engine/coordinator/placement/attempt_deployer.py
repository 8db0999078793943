"""The attempts to run the job, one after the other: what their slots receive, and which slots have not answered yet.

deploy --all slots have answered--> start --...--> cancel --all have answered, or are given up--> deploy
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from midstream.engine.coordinator.effects import Effects, TimerKind
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.coordinator.failures import Failure
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.coordinator.placement.deploy_messages import deployments
from midstream.engine.coordinator.placement.slot_pool import SlotPool
from midstream.engine.coordinator.restore.distribute import DistributedState
from midstream.engine.protocol.messages import Cancel, CheckpointCompleted, ResumeSources, Start, ToSlot

if TYPE_CHECKING:
    from midstream.engine.coordinator.checkpoints.pending_checkpoint import CompletedCheckpoint

CAUSE_WAIT_S: Final = 1.0
"""The time for which a task's report that a peer is gone waits for its cause: the peers of a lost slot may report its
loss before the driver notices it.
"""


class AttemptDeployer:
    """Deploys, starts and cancels attempts. `timeout_s`: the time that slots have to cancel their tasks."""

    def __init__(self, effects: Effects, slots: SlotPool, timeout_s: float) -> None:
        self.current: Attempt | None = None
        """The current attempt; after its end it stays here until there is another. None before the first one."""
        self._effects = effects
        self._slots = slots
        self._timeout_s = timeout_s
        self._count = 0
        self._cancel_timer: str | None = None
        self._symptom: str | None = None
        """The timer at which the attempt fails, if the cause of a task's symptom is not reported before."""

    def deploy(self, plan: JobPlan, state: DistributedState, epoch: int) -> None:
        """Begin a new attempt, on the slots that are present."""
        attempt = Attempt(self._count, plan.graph, self._slots.begin_attempt(), state.finished)
        self.current = attempt
        self._count += 1
        for slot, deploy in deployments(plan, attempt, state, epoch, self._slots.graph_for):
            self._effects.send(slot, deploy)

    def start(self) -> None:
        attempt = self._attempt()
        self.send(Start(attempt.number, self._slots.peers(attempt.slots)))

    def send(self, message: ToSlot) -> None:
        """Send a message to all slots of the current attempt."""
        for slot in self._attempt().slots:
            self._effects.send(slot, message)

    def checkpoint_completed(self, completed: CompletedCheckpoint) -> None:
        pending, attempt = completed.pending, completed.pending.attempt
        if not pending.attempt_is_over:
            self.send(CheckpointCompleted(attempt.number, pending.checkpoint_id))
            attempt.checkpoint_completed(ref for ref, ack in pending.acks.items() if ack.finished)

    def resume_sources(self, checkpoint_id: int) -> None:
        """Resume the sources, which are paused after this checkpoint: the tasks continue."""
        self.send(ResumeSources(self._attempt().number, checkpoint_id))

    def slot_lost(self, slot: int) -> None:
        if self.current is not None:
            self.current.unanswered.discard(slot)

    @property
    def answered(self) -> bool:
        """Whether every slot that is still present has answered: the attempt is deployed, or cancelled, everywhere."""
        return not self._attempt().unanswered

    def report_symptom(self, failure: Failure) -> None:
        """A task has reported that a peer is gone. Wait `CAUSE_WAIT_S` for the cause, which users must see."""
        if self._symptom is None:
            unexplained = partial(self._effects.notifications.attempt_failed, failure)
            self._symptom = self._effects.set_timer(TimerKind.SYMPTOM, CAUSE_WAIT_S, unexplained)

    def cancel(self, *_: object) -> None:
        attempt = self._attempt()
        attempt.unanswered = set(attempt.slots) & self._slots.live.keys()
        for slot in sorted(attempt.unanswered):
            self._effects.send(slot, Cancel(attempt.number))
        self._effects.cancel_timer(self._symptom)
        self._symptom = None
        self._cancel_timer = self._effects.set_timer(TimerKind.CANCEL, self._timeout_s, self._cancel_timed_out)

    def _cancel_timed_out(self) -> None:
        """Release the slots that have not answered. They may still write files, which the attempt's number sets apart."""
        self._cancel_timer = None
        attempt = self._attempt()
        for slot in sorted(attempt.unanswered):
            self._effects.close_slot(slot, "it did not cancel its tasks in time")
            lost = self._slots.lost(slot)
            call = lost.in_call if lost is not None else None
            why = "" if call is None else f": {call.operator} had been in one call for {call.for_ms // 1000} s"
            self._effects.notifications.warned(f"slot {slot} did not cancel its tasks in time and was given up{why}")
        attempt.unanswered.clear()
        self._slots.gather()

    def cancelled(self) -> None:
        """All slots have answered."""
        self._effects.cancel_timer(self._cancel_timer)
        self._cancel_timer = None

    def _attempt(self) -> Attempt:
        assert self.current is not None
        return self.current
