"""Commits and aborts of sinks with `commits_on_slots`: which slots have received requests, and which have answered.

One checkpoint and sink is committed at a time; each lane is one call on one slot, and the lanes run in parallel. The
lanes of a lost slot are sent to another slot as soon as there is one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from midstream.engine.checkpoint.metadata import Committables
from midstream.engine.coordinator.effects import Effects, IoKind
from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.coordinator.placement.slot_pool import SlotPool
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.sink_api import Sink
from midstream.engine.protocol import messages as m

if TYPE_CHECKING:
    from midstream.engine.coordinator.coordinator import Coordinator
    from midstream.engine.coordinator.events import JobPlan

RUNNING_LANES_MAX: Final = 8
"""The number of lanes that run on one slot at a time; it is limited because I/O threads also store checkpoints."""
_LANE_LIMIT: Final = 2**63


def eligible_slots(coordinator: Coordinator) -> tuple[int, ...] | None:
    """Return the slots on which commits can run now: () while there are none, None if there will not be any.

    They are ordered so that lanes stay on their slots: the slot of subtask i has index i. None of them is used while
    tasks are being cancelled, since that stops commits as well.
    """
    attempt = coordinator.attempt
    match coordinator.phase:
        case Phase.RUNNING if attempt is not None:
            live = coordinator.slots.live
            if attempt.all_finished:  # the other slots commit what lost ones have not
                return in_place_of_lost(attempt.slots, live)
            return attempt.slots if live.keys() >= set(attempt.slots) else ()
        case Phase.WAITING_TO_DEPLOY if coordinator.slots.complete:
            return coordinator.slots.ids() or None
        case _:  # slots may be replaced, or there are none
            return ()


def in_place_of_lost(slots: Sequence[int], live: Collection[int]) -> tuple[int, ...] | None:
    """Return `slots` with each lost one replaced by the next one that lives; None if no slot lives.

    So the lanes of a slot that lives stay where they are, whichever others are lost. If none of `slots` lives, the slot
    that connected first commits all lanes: it remains the first when more connect.
    """
    next_live = next((slot for slot in slots if slot in live), min(live, default=None))
    if next_live is None:
        return None
    found = []
    for slot in reversed(slots):
        next_live = slot if slot in live else next_live
        found.append(next_live)
    return tuple(reversed(found))


class EligibleSlots:
    """Caches the result of `eligible_slots`, which is called again only if something it depends on has changed."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.now: tuple[int, ...] | None = ()
        self._coordinator = coordinator
        self._key: object = None
        """What the result depends on, as of the last call."""

    def have_changed(self) -> bool:
        """Return whether the slots for commits may have changed, and bring `now` up to date."""
        coordinator, attempt = self._coordinator, self._coordinator.attempt
        key = coordinator.phase, attempt, attempt is not None and attempt.all_finished, coordinator.slots.changes
        if key == self._key:
            return False
        self._key = key
        self.now = eligible_slots(coordinator)
        return True


def lanes_of(sink: Sink, items: Sequence[bytes]) -> dict[int, tuple[bytes, ...]]:
    """Return the items by lane, the lowest lane first; the items of a lane are in the order in which they were
    prepared.
    """
    lanes: dict[int, list[bytes]] = {}
    for item in items:
        lane = sink.lane(item)
        if type(lane) is not int or not -_LANE_LIMIT <= lane < _LANE_LIMIT:
            raise ConfigError(f"{type(sink).__name__}.lane() returned {lane!r}; a lane is an int of 64 bits")
        lanes.setdefault(lane, []).append(item)
    return {lane: tuple(lanes[lane]) for lane in sorted(lanes)}


@dataclass(frozen=True, slots=True)
class LaneWork:
    """What one sink has prepared for one checkpoint, to be committed or cleaned up."""

    kind: IoKind
    committables: Committables
    remaining: dict[int, tuple[bytes, ...]]
    """What is not done yet, by lane. Lanes that are done are removed."""
    waits_for: str
    """Completes "waiting for …"."""


@dataclass(frozen=True, slots=True)
class EndedWork:
    """Work that the slots do not continue: it has failed, is done, or remains because no slot will come."""

    work: LaneWork
    failed: tuple[int, m.CommitFailed] | None
    """The first lane that has failed, and its answer."""


@dataclass(frozen=True, slots=True)
class _LaneRequest:
    slot: int
    lane: int
    token: str
    """The token that ends the wait for the answer, see `Effects.slot_is_done`."""


class SlotCommitDispatcher:
    """Does one piece of work at a time, on slots."""

    def __init__(self, effects: Effects, plan: JobPlan, slots: SlotPool, eligible: EligibleSlots) -> None:
        self._effects = effects
        self._plan = plan
        self._slots = slots
        self._eligible = eligible
        self.epoch = 0
        """The epoch of the coordinator; 0 if the job has no checkpoint directory."""
        self._initialized: set[int] = set()
        """The slots that have received `CommitSinks`."""
        self._request_count = 0
        self._unanswered: dict[int, _LaneRequest] = {}
        """The unanswered requests, by number."""
        self._distributed_to: Sequence[int] | None = None
        """The slots to which the lanes are distributed. None: they have to be distributed again."""
        self._queues: dict[int, deque[int]] = {}
        """The lanes that wait for their slot, which is busy with `RUNNING_LANES_MAX` others, by slot."""
        self._busy: Counter[int] = Counter()
        """The number of unanswered requests, by slot."""
        self._freed: list[int] = []
        """The slots that have done a lane since queued lanes were last sent."""
        self.work: LaneWork | None = None
        self.failed: tuple[int, m.CommitFailed] | None = None
        """The first lane of `work` that has failed, and its answer. No further lane is begun then."""

    @property
    def under_way(self) -> bool:
        """Whether a request is unanswered."""
        return bool(self._unanswered)

    def runs_on(self, slot: int) -> bool:
        """Whether this slot has been sent a request that is unanswered."""
        return any(request.slot == slot for request in self._unanswered.values())

    def begin(self, work: LaneWork) -> None:
        assert self.work is None and not self._unanswered
        self.work = work
        self.failed = None
        self._distributed_to = None

    def end(self) -> LaneWork | None:
        """End the current work, and return it. Answers that are still to come are ignored."""
        for request in self._unanswered.values():
            self._effects.slot_is_done(request.token)
        self._unanswered.clear()
        self._distributed_to = None
        work, self.work = self.work, None
        return work

    def advance(self) -> EndedWork | None:
        """Continue with the work: slots may have come, gone or answered. Return it when it has ended on slots."""
        work = self.work
        if work is None:
            return None
        if self._eligible.have_changed():
            self.forget_lost(self._slots.live)
        slots = self._eligible.now
        if slots:
            self.request(slots)
        if self.under_way or (self.failed is None and work.remaining and slots is not None):
            return None
        failed = self.failed
        self.end()
        return EndedWork(work, failed)

    def forget_lost(self, live: Collection[int]) -> None:
        """Withdraw the requests to slots that are not `live`: their lanes count as not done."""
        for number, request in list(self._unanswered.items()):
            if request.slot not in live:
                del self._unanswered[number]
                self._distributed_to = None
                self._effects.slot_is_done(request.token)

    def request(self, slots: Sequence[int]) -> None:
        """Send requests to `slots` for lanes that have still to be done, within `RUNNING_LANES_MAX` for each slot.

        There may be thousands of lanes and slots, so only slots that have answered are visited, unless lanes have to be
        distributed again.
        """
        work = self.work
        if work is None or self.failed is not None:
            return
        if slots is not self._distributed_to:
            self._distribute(slots, work)
        for slot in self._freed:
            queue = self._queues.get(slot)
            while queue and self._busy[slot] < RUNNING_LANES_MAX:
                self._send(slot, queue.popleft(), work)
        self._freed.clear()

    def _distribute(self, slots: Sequence[int], work: LaneWork) -> None:
        self._distributed_to = slots
        self._queues = {}
        self._freed.clear()
        self._busy = Counter(request.slot for request in self._unanswered.values())
        under_way = {request.lane for request in self._unanswered.values()}
        for lane in work.remaining:
            slot = slots[lane % len(slots)]
            if lane in under_way:
                continue
            if self._busy[slot] < RUNNING_LANES_MAX:
                self._send(slot, lane, work)
            else:
                self._queues.setdefault(slot, deque()).append(lane)

    def _send(self, slot: int, lane: int, work: LaneWork) -> None:
        self._busy[slot] += 1
        if slot not in self._initialized:
            self._initialized.add(slot)
            plan = self._plan
            graph = self._slots.graph_for(slot, plan.graph_bytes)
            sinks = m.CommitSinks(plan.job_id, graph, plan.config.checkpoint_dir, self.epoch)
            self._effects.send(slot, sinks)
        token = self._effects.wait_for_slot(f"{work.waits_for} (lane {lane}, on slot {slot})")
        self._unanswered[self._request_count] = _LaneRequest(slot, lane, token)
        uid, checkpoint_id, aborts = work.committables.uid, work.committables.checkpoint_id, work.kind is IoKind.ABORT
        items = work.remaining[lane]
        self._effects.send(slot, m.Commit(self._request_count, uid, lane, checkpoint_id, items, aborts))
        self._request_count += 1

    def handle_answer(self, slot: int, answer: m.CommitDone | m.CommitFailed) -> None:
        """A live slot has answered. The answer to a request that was withdrawn is ignored."""
        request = self._unanswered.get(answer.request)
        if request is None or request.slot != slot or self.work is None:
            return
        del self._unanswered[answer.request]
        self._effects.slot_is_done(request.token)
        if isinstance(answer, m.CommitDone):
            del self.work.remaining[request.lane]
            self._busy[slot] -= 1
            self._freed.append(slot)
            return
        self._distributed_to = None
        if not answer.stopped and self.failed is None:
            self.failed = request.lane, answer

    def check(self) -> None:
        lanes = [request.lane for request in self._unanswered.values()]
        assert len(lanes) == len(set(lanes)), lanes
        assert self.work is None or self.work.remaining.keys() >= set(lanes), (self.work.remaining.keys(), lanes)
        assert self.work is not None or not lanes, lanes
