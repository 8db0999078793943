"""Known bugs of commits that run on slots: where they run, what waits for them and what an answer counts for; see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, Final

from midstream.engine.coordinator.checkpoints import commit_queue
from midstream.engine.coordinator.checkpoints import slot_commit_dispatcher as lanes
from midstream.engine.coordinator.checkpoints.commit_queue import CommitQueue
from midstream.engine.coordinator.checkpoints.slot_commit_dispatcher import SlotCommitDispatcher
from midstream.engine.coordinator.coordinator import Coordinator
from midstream.engine.protocol import messages as m
from midstream.engine.worker import slot_committers
from midstream.engine.worker.slot_committers import SlotCommitters
from midstream_lab.fault_kinds import KILL_ANOTHER
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios.targeted_at_rest import loaded_again, struck_committing


def lanes_are_split() -> Replacements:
    """Every committable is a lane of its own."""

    def lanes_of(sink: Any, items: Any) -> Any:
        return {number: (item,) for number, item in enumerate(items)}

    return [(commit_queue, "lanes_of", lanes_of)]


def lane_is_backwards() -> Replacements:
    """Of what belongs to one lane, the last that was prepared is committed first."""

    def lanes_of(sink: Any, items: Any) -> Any:
        return original(sink, items[::-1])

    original = lanes.lanes_of
    return [(commit_queue, "lanes_of", lanes_of)]


def lane_moves() -> Replacements:
    """A lane is committed by one slot, then by another one."""

    def request(self: Any, slots: Any) -> None:
        turn = self._request_count % len(slots)
        original(self, (*slots[turn:], *slots[:turn]))

    original = SlotCommitDispatcher.request
    return [(SlotCommitDispatcher, "request", request)]


def done_when_asked() -> Replacements:
    """A lane counts as committed when the request is sent to its slot."""

    def request(self: Any, slots: Any) -> None:
        before = set(self._unanswered)
        original(self, slots)
        for number, pending in list(self._unanswered.items()):
            if number not in before:
                self.handle_answer(pending.slot, m.CommitDone(number))

    original = SlotCommitDispatcher.request
    return [(SlotCommitDispatcher, "request", request)]


def answer_of_another_lane() -> Replacements:
    """The answer of a lane counts for the first lane that is being committed."""

    def handle_answer(self: Any, slot: int, answer: Any) -> None:
        pending = self._unanswered.get(answer.request)
        if pending is not None and isinstance(answer, m.CommitDone):
            request, first = next(iter(self._unanswered.items()))
            self._unanswered[answer.request] = replace(pending, lane=first.lane)
            self._unanswered[request] = replace(self._unanswered[request], lane=pending.lane)
        original(self, slot, answer)

    original = SlotCommitDispatcher.handle_answer
    return [(SlotCommitDispatcher, "handle_answer", handle_answer)]


def stopped_counts() -> Replacements:
    """A commit that was stopped counts as done."""

    def handle_answer(self: Any, slot: int, answer: Any) -> None:
        if isinstance(answer, m.CommitFailed) and answer.stopped:
            answer = m.CommitDone(answer.request)
        original(self, slot, answer)

    original = SlotCommitDispatcher.handle_answer
    return [(SlotCommitDispatcher, "handle_answer", handle_answer)]


def failed_lane_counts() -> Replacements:
    """A lane that has failed is not tried again with the others of its checkpoint."""

    def handle_answer(self: Any, slot: int, answer: Any) -> None:
        pending = self._unanswered.get(answer.request)
        original(self, slot, answer)
        if pending is not None and self.failed is not None and len(self.work.remaining) > 1:
            self.work.remaining.pop(pending.lane, None)

    original = SlotCommitDispatcher.handle_answer
    return [(SlotCommitDispatcher, "handle_answer", handle_answer)]


def lost_with_the_slot() -> Replacements:
    """What a slot was committing that has died is not committed by another one."""

    def forget_lost(self: Any, live: Any) -> None:
        for pending in self._unanswered.values():
            if pending.slot not in live:
                del self.work.remaining[pending.lane]
        original(self, live)

    original = SlotCommitDispatcher.forget_lost
    return [(SlotCommitDispatcher, "forget_lost", forget_lost)]


def _not_waiting(method: str) -> Replacements:
    """This method of the coordinator does not wait for commits in progress on slots."""

    def pretending(self: Any) -> bool:
        self.commits._pretends = True
        try:
            return bool(original(self))
        finally:
            self.commits._pretends = False

    def is_drained(self: Any) -> bool:
        if getattr(self, "_pretends", False) and self._dispatcher.under_way:
            return True
        return bool(original_is_drained(self))

    original, original_is_drained = getattr(Coordinator, method), inspect.getattr_static(CommitQueue, "is_drained").fget
    return [(Coordinator, method, pretending), (CommitQueue, "is_drained", property(is_drained))]


def deployed_while_committing() -> Replacements:
    """Tasks are deployed while slots commit what is from before."""
    return _not_waiting("_try_deploy")


def ended_while_committing() -> Replacements:
    """The job ends, and lets its slots go, while they commit."""
    return _not_waiting("_step_running")


def let_go_while_committing() -> Replacements:
    """A rescale lets slots go that are committing."""
    return [(CommitQueue, "runs_on_slots", False)]


def aborted_is_committed() -> Replacements:
    """What no checkpoint holds is committed by the slot that had to clean it up."""

    def commit(self: Any, message: Any) -> None:
        original(
            self, m.Commit(message.request, message.uid, message.lane, message.checkpoint_id, message.committables)
        )

    original = SlotCommitters.commit
    return [(SlotCommitters, "commit", commit)]


def driver_commits() -> Replacements:
    """The driver commits what slots must commit."""

    def eligible_slots(job: Any) -> Any:
        return original(job) or None

    original = lanes.eligible_slots
    return [(lanes, "eligible_slots", eligible_slots)]


def not_told_to_stop() -> Replacements:
    """A commit is not notified that its attempt is over."""

    def end_attempt(self: Any) -> None:
        before, self._stopped = self._stopped, self._services.make_signal()
        original(self)
        self._stopped = before

    original = SlotCommitters.end_attempt
    return [(SlotCommitters, "end_attempt", end_attempt)]


def committers_stay_open() -> Replacements:
    """The committer of an attempt that is over continues in the next one."""
    return [(SlotCommitters, "_close", lambda self, lane, outcome: None)]


def never_loaded_again() -> Replacements:
    """Sinks that could not be loaded fail every commit of their slot."""

    def commit(self: Any, message: Any) -> None:
        sinks, self._sinks = self._sinks, None
        original(self, message)
        self._sinks = sinks

    original = SlotCommitters.commit
    return [(SlotCommitters, "commit", commit)]


def zombie_has_slots_commit() -> Replacements:
    """A driver that was considered dead has its slots continue to commit, although another one has taken over."""
    return [(slot_committers, "check_epoch", lambda storage, epoch: None)]


# ---- where they are searched


_killed = struck_committing("kill_slot", KILL_ANOTHER)
_failed = struck_committing("user_error", KILL_ANOTHER, "cut_control")
_refused = struck_committing("commit_fails", "kill_slot")
_declined = struck_committing("write_fails", KILL_ANOTHER, "publish_fails")
_stopped = struck_committing("stop_driver")
_rescaled = struck_committing("rescale", "rescale_struck")

MUTATIONS: Final = named(
    Mutation("what belongs to one lane is committed in several calls", lanes_are_split, _killed),
    Mutation("a lane is committed in the wrong order", lane_is_backwards, _killed),
    Mutation("a lane changes from slot to slot", lane_moves, _killed),
    Mutation("a lane is committed when the request is sent to its slot", done_when_asked, _killed),
    Mutation("an answer counts for another lane", answer_of_another_lane, _refused),
    Mutation("a commit that was stopped counts as done", stopped_counts, _failed),
    Mutation("a lane that fails alongside others is dropped", failed_lane_counts, _refused),
    Mutation("what a dead slot was committing is dropped", lost_with_the_slot, _killed),
    Mutation("tasks are deployed while slots still commit", deployed_while_committing, _killed),
    Mutation("a job ends while its slots still commit", ended_while_committing, _killed),
    Mutation("a rescale lets slots go that commit", let_go_while_committing, _rescaled),
    Mutation("what must be cleaned up is committed", aborted_is_committed, _declined),
    Mutation("the driver commits although there are slots", driver_commits, _killed),
    Mutation("a commit outlives its attempt", not_told_to_stop, _failed),
    Mutation("slots commit for a driver although another one has taken over", zombie_has_slots_commit, _stopped),
    Mutation("sinks that could not be loaded never are", never_loaded_again, loaded_again),
    Mutation("a committer outlives its attempt", committers_stay_open, _failed),
)
