"""Known bugs around slots that have to leave, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.coordinator import Coordinator
from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.coordinator.placement.attempt_deployer import AttemptDeployer
from midstream.engine.coordinator.placement.slot_pool import SlotPool
from midstream.engine.operators.base import Snapshot
from midstream.engine.protocol.messages import OperatorSnapshot, Start
from midstream.engine.worker.task_snapshots import TaskSnapshots
from midstream_lab.mutations.mutation import Mutation, Replacements, nothing
from midstream_lab.scenarios import targeted


def sources_do_not_hold() -> Replacements:
    original = CheckpointCoordinator.trigger

    def trigger(self: Any, attempt: Any, sources: Any, request: Any) -> int:
        checkpoint_id = original(self, attempt, sources, replace(request, is_rescale=False))
        self.pending.is_rescale = request.is_rescale
        return checkpoint_id

    return [(CheckpointCoordinator, "trigger", trigger)]


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
    return [(SlotPool, "ids", lambda self: tuple(sorted(self.live)))]


def let_go_at_once() -> Replacements:
    original = SlotPool.mark_leaving

    def mark_leaving(self: Any, slot: int, reason: str) -> bool:
        is_new = original(self, slot, reason)
        if is_new:
            self.release_leaving(slot)
        return is_new

    return [(SlotPool, "mark_leaving", mark_leaving)]


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
        self.send(Start(self.current.number, self._slots.peers(self._slots.ids())))

    return [(AttemptDeployer, "start", start)]


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "move_sources_do_not_hold": Mutation(
        "sources are not paused after the checkpoint from which a job resumes elsewhere",
        sources_do_not_hold,
        targeted.leaving,
    ),
    "move_without_metrics": Mutation(
        "the checkpoint with which a job moves is acknowledged without metrics", metrics_as_usual, targeted.leaving
    ),
    "move_sources_hold_for_ever": Mutation(
        "sources stay paused when a move or a rescale is given up",
        lambda: [(AttemptDeployer, "resume_sources", nothing)],
        targeted.given_up,
    ),
    "move_slot_used_again": Mutation("a slot that has to leave is used again", used_again, targeted.leaving),
    "move_slot_let_go_at_once": Mutation(
        "a slot that has to leave is released immediately", let_go_at_once, targeted.leaving
    ),
    "move_end_is_no_failure": Mutation(
        "a slot that has ended before its tasks have moved is no failure", end_is_no_failure, targeted.leaving
    ),
    "move_slot_is_not_a_peer": Mutation(
        "tasks are not connected to those on a slot that has to leave", not_a_peer, targeted.leaving
    ),
}
