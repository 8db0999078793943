"""Known bugs around slots that have to leave, to be put back on purpose: see `sim.mutations`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from midstream.coordinator.checkpointing.checkpoints import Checkpoints
from midstream.coordinator.machine import Coordinator
from midstream.coordinator.phase import Phase
from midstream.coordinator.placement.attempts import Attempts
from midstream.coordinator.placement.slots import Slots
from midstream.operators.base import Snapshot
from midstream.protocol.messages import OperatorSnapshot, Start
from midstream.sim import regions
from midstream.sim.mutation import Mutation, Replacements, nothing
from midstream.worker.snapshots import TaskSnapshots


def sources_do_not_hold() -> Replacements:
    original = Checkpoints.trigger

    def trigger(
        self: Any, attempt: Any, sources: Any, clients: Any, is_stop: bool, is_rescale: bool, *rest: Any
    ) -> int:
        checkpoint_id = original(self, attempt, sources, clients, is_stop, False, *rest)
        self.pending.is_rescale = is_rescale
        return checkpoint_id

    return [(Checkpoints, "trigger", trigger)]


def metrics_as_usual() -> Replacements:
    original = TaskSnapshots.store

    def store(
        self: TaskSnapshots,
        checkpoint_id: int,
        operators: list[tuple[OperatorSnapshot, Snapshot]],
        *,
        alignment_ms: float,
        began_s: float,
        finished: bool,
        with_metrics: bool,
    ) -> None:
        times = {"alignment_ms": alignment_ms, "began_s": began_s}
        original(self, checkpoint_id, operators, **times, finished=finished, with_metrics=False)

    return [(TaskSnapshots, "store", store)]


def used_again() -> Replacements:
    return [(Slots, "ids", lambda self: tuple(sorted(self.live)))]


def let_go_at_once() -> Replacements:
    original = Slots.leaves

    def leaves(self: Any, slot: int, reason: str) -> bool:
        is_new = original(self, slot, reason)
        if is_new:
            self.let_leave(slot)
        return is_new

    return [(Slots, "leaves", leaves)]


def end_is_no_failure() -> Replacements:
    original = Coordinator._slot_lost

    def slot_lost(self: Any, event: Any) -> None:
        if event.slot in self.slots.leaving and self.phase is Phase.RUNNING:
            self.slots.lost(event.slot)
            self.attempts.slot_lost(event.slot)
        else:
            original(self, event)

    return [(Coordinator, "_slot_lost", slot_lost)]


def not_a_peer() -> Replacements:
    def start(self: Any) -> None:
        self.tell(Start(self.current.number, self._slots.peers(self._slots.ids())))

    return [(Attempts, "start", start)]


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "move_sources_do_not_hold": Mutation(
        "sources are not paused after the checkpoint from which a job resumes elsewhere",
        sources_do_not_hold,
        regions.leaving,
    ),
    "move_without_metrics": Mutation(
        "the checkpoint with which a job moves is acknowledged without metrics", metrics_as_usual, regions.leaving
    ),
    "move_sources_hold_for_ever": Mutation(
        "sources stay paused when a move or a rescale is given up",
        lambda: [(Attempts, "resume_sources", nothing)],
        regions.given_up,
    ),
    "move_slot_used_again": Mutation("a slot that has to leave is used again", used_again, regions.leaving),
    "move_slot_let_go_at_once": Mutation("a slot that has to leave is let go at once", let_go_at_once, regions.leaving),
    "move_end_is_no_failure": Mutation(
        "a slot that has ended before its tasks have moved is no failure", end_is_no_failure, regions.leaving
    ),
    "move_slot_is_not_a_peer": Mutation(
        "tasks are not connected to those on a slot that has to leave", not_a_peer, regions.leaving
    ),
}
