"""Rescales a running job, or moves it off slots that have to leave: it gathers slots, requests a checkpoint, then
switches.

The stages, and what leads from one to the next, are in RESCALE_TABLE.

Up to READY_TO_SWITCH the job continues to run, so giving up before then changes nothing. Its sources are paused after the
checkpoint, so that no row is read twice. After a failure while SWITCHING, the job resumes with the plan before, from
the same checkpoint. The requester of a rescale receives the outcome in each case.

A move keeps the plan: it begins at REQUESTING_SLOTS, and a failure while SWITCHING is a failure of the job like any other. A
rescale that is requested meanwhile replaces the move, since it also avoids slots that are leaving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from midstream.engine.checkpoint.edge_identity import loses_edges
from midstream.engine.checkpoint.metadata import CheckpointMetadata, layout_of
from midstream.engine.coordinator.effects import Effects, IoKind
from midstream.engine.coordinator.events import NO_STORAGE, JobPlan
from midstream.engine.coordinator.placement.attempt_deployer import AttemptDeployer
from midstream.engine.coordinator.placement.slot_pool import SlotPool
from midstream.engine.coordinator.restore.distribute import StateDistribution
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.core.state_machine import Transition, TransitionTable
from midstream.engine.protocol.messages import Reply

if TYPE_CHECKING:
    from midstream.engine.coordinator.checkpoints.pending_checkpoint import AbortedCheckpoint, CompletedCheckpoint


class RescaleStage(Enum):
    NONE = auto()
    PLANNING = auto()
    REQUESTING_SLOTS = auto()
    """The slots that the new plan needs beyond the present ones are requested."""
    REQUESTING_CHECKPOINT = auto()
    """A checkpoint is requested, or in progress."""
    DISTRIBUTING = auto()
    """The checkpoint is distributed to the new tasks, which proves that they can resume from it. No other checkpoint is
    triggered meanwhile.
    """
    READY_TO_SWITCH = auto()
    SWITCHING = auto()
    """The old tasks are cancelled, and the new ones deployed."""


class RescaleEvent(Enum):
    """The events that lead to another stage."""

    REQUESTED = auto()
    PLANNED = auto()
    SLOT_LEAVES = auto()
    SLOT_MISSING = auto()
    GATHERED = auto()
    COMPLETED = auto()
    """The checkpoint that was made for it has completed."""
    DISTRIBUTED = auto()
    SWITCHES = auto()
    RUNS = auto()
    """All tasks of the new plan run."""
    GIVEN_UP = auto()
    """It is given up, or the job ends."""


_REQUESTED, _PLANNED, _SLOT_LEAVES, _SLOT_MISSING, _GATHERED, _COMPLETED, _DISTRIBUTED, _SWITCHES, _RUNS, _GIVEN_UP = (
    RescaleEvent
)
RESCALE_TABLE: Final[TransitionTable[RescaleStage, RescaleEvent]] = TransitionTable(
    "rescale",
    (
        Transition(RescaleStage.NONE, _REQUESTED, (RescaleStage.PLANNING,), "the plan for the new parallelism is made"),
        Transition(RescaleStage.NONE, _SLOT_LEAVES, (RescaleStage.REQUESTING_SLOTS,), "a move, with the present plan"),
        Transition(
            RescaleStage.PLANNING,
            _PLANNED,
            (RescaleStage.REQUESTING_SLOTS,),
            "slots are requested in addition to the present ones",
        ),
        Transition(
            RescaleStage.REQUESTING_SLOTS, _GATHERED, (RescaleStage.REQUESTING_CHECKPOINT,), "a checkpoint is requested"
        ),
        Transition(
            RescaleStage.REQUESTING_CHECKPOINT,
            _COMPLETED,
            (RescaleStage.DISTRIBUTING,),
            "sources are paused, the checkpoint is distributed",
        ),
        Transition(
            RescaleStage.DISTRIBUTING, _DISTRIBUTED, (RescaleStage.READY_TO_SWITCH,), "new tasks can resume from it"
        ),
        *(
            Transition(
                stage,
                _SLOT_MISSING,
                (RescaleStage.REQUESTING_SLOTS,),
                "another one is requested; paused sources are resumed",
            )
            for stage in (RescaleStage.REQUESTING_SLOTS, RescaleStage.REQUESTING_CHECKPOINT, RescaleStage.DISTRIBUTING)
        ),
        Transition(RescaleStage.READY_TO_SWITCH, _SWITCHES, (RescaleStage.SWITCHING,), "the old tasks are cancelled"),
        Transition(RescaleStage.SWITCHING, _RUNS, (RescaleStage.NONE,), "its requester is answered"),
        *(
            Transition(
                stage,
                _GIVEN_UP,
                (RescaleStage.NONE,),
                "its requester is answered; while SWITCHING, a rescale returns to its old plan",
            )
            for stage in RescaleStage
            if stage is not RescaleStage.NONE
        ),
    ),
)


@dataclass(slots=True)
class _Rescale:
    answer: Callable[[Reply], None] | None
    """Called with the outcome of a rescale. None: it is a move."""
    parallelism: int
    before: JobPlan
    after: JobPlan | None = None
    checkpoint: str | None = None
    checkpoint_id: int = 0
    """The id of the checkpoint, known from DISTRIBUTING on, like its path in `checkpoint`."""
    has_failed: bool = False
    """Whether a move's checkpoint has failed: then the next one is not triggered immediately, but when it is due."""


class Rescaling:
    """Does at most one rescale or move at a time."""

    def __init__(
        self,
        effects: Effects,
        slots: SlotPool,
        attempts: AttemptDeployer,
        distribution: StateDistribution,
    ) -> None:
        self._effects = effects
        self._slots = slots
        self._attempts = attempts
        self._distribution = distribution
        self.stage = RescaleStage.NONE
        self._current: _Rescale | None = None
        self._is_rolled_back = False
        """Whether the job returns to the plan before, and its tasks do not run yet."""

    def _transition(self, event: RescaleEvent) -> None:
        self.stage = RESCALE_TABLE.next(self.stage, event)

    @property
    def is_under_way(self) -> bool:
        return self._current is not None

    @property
    def needs_checkpoint(self) -> bool:
        return self.stage is RescaleStage.REQUESTING_CHECKPOINT

    @property
    def is_urgent(self) -> bool:
        """Whether the checkpoint must be triggered immediately."""
        return self._current is not None and self.needs_checkpoint and not self._current.has_failed

    @property
    def is_move(self) -> bool:
        return self._current is not None and self._current.answer is None

    @property
    def abandons_tasks(self) -> bool:
        """Whether the tasks that are being cancelled belong to a plan that is being left: their failures mean nothing."""
        return self._is_rolled_back or self.stage is RescaleStage.SWITCHING

    @property
    def plan(self) -> JobPlan:
        """The plan to switch to."""
        assert self._current is not None and self._current.after is not None
        return self._current.after

    @property
    def must_align(self) -> bool:
        """Whether rows in flight would have no edge in the new plan, since the ends of an edge then run in one task."""
        assert self._current is not None
        return loses_edges(self._current.before.graph, self.plan.graph)

    def request(self, answer: Callable[[Reply], None], parallelism: int, plan: JobPlan) -> None:
        """Rescale the job, and call `answer` with the outcome."""
        bounds = plan.config.autoscale
        if bounds is not None and not bounds.is_advice and not bounds.min <= parallelism <= bounds.max:
            text = (
                f"the job scales itself between {bounds.min} and {bounds.max}: {parallelism} is outside of autoscale="
            )
            answer(Reply(error=text))
            return
        if self.is_move:
            self.give_up("a rescale was requested")
        if self._current is not None:
            text = f"the job is being rescaled already, to parallelism {self._current.parallelism}"
            answer(Reply(error=text))
        elif plan.config.checkpoint_dir is None:
            answer(Reply(error=f"the {NO_STORAGE}"))
        elif parallelism == plan.config.parallelism:
            answer(Reply())
        elif plan.rescaled is None:
            text = "this job cannot be rescaled while it runs; stop it and start it at that parallelism"
            answer(Reply(error=text))
        else:
            self._transition(RescaleEvent.REQUESTED)
            self._current = _Rescale(answer, parallelism, plan)
            work = partial(plan.rescaled, parallelism)
            planned = partial(self._planned, self._current)
            what = f"the plan of the job at parallelism {parallelism}"
            self._effects.run_io(IoKind.RESCALE, work, planned, about=parallelism, waits_for=what)

    def _planned(self, rescale: _Rescale, outcome: Done[JobPlan] | Failed) -> None:
        if self._current is not rescale:
            return
        if isinstance(outcome, Failed):
            self.give_up(str(outcome.error))
            return
        # the program's plan does not have what the driver has made of `tls="auto"`
        config = msgspec.structs.replace(outcome.value.config, tls=rescale.before.config.tls)
        after = replace(outcome.value, config=config)
        if layout_of(after.graph) == layout_of(rescale.before.graph):
            self.give_up("the job sets the parallelism of every operator itself: nothing would change")
            return
        rescale.after = after
        self._gather(RescaleEvent.PLANNED)

    def move_if_needed(self, plan: JobPlan, *, is_stopping: bool) -> None:
        """Begin a move if slots are leaving. A rescale in progress also avoids these slots."""
        if not self._slots.leaving or self._current is not None or is_stopping:
            return
        if plan.config.checkpoint_dir is None:
            self._keep_slots(f"the {NO_STORAGE}")
            return
        self._current = _Rescale(None, plan.config.parallelism, plan, after=plan)
        self._gather(RescaleEvent.SLOT_LEAVES)

    def _gather(self, because: RescaleEvent) -> None:
        """Request enough slots for the old tasks and for the new ones, not counting slots that are leaving."""
        assert self._current is not None
        self._transition(because)
        before = self._current.before.graph.slots - len(self._slots.leaving)
        self._slots.resize(max(self.plan.graph.slots, before))
        self._slots.gather()

    def gathered(self) -> None:
        """All slots are present; the tasks still run as before."""
        self._transition(RescaleEvent.GATHERED)

    def slot_is_missing(self) -> None:
        """A slot is missing on which no task runs yet: request another one, and make the checkpoint once it is present."""
        if RESCALE_TABLE.allows(self.stage, RescaleEvent.SLOT_MISSING):
            self._release_checkpoint()
            self._gather(RescaleEvent.SLOT_MISSING)

    def slots_failed(self, reason: str) -> None:
        """The slots do not come. In the case of a move, the tasks stay on the slots that are leaving."""
        if self.is_move:
            self._keep_slots(reason)
        self.give_up(reason)

    def checkpoint_completed(self, completed: CompletedCheckpoint) -> None:
        if completed.pending.rescales:
            self.stored(completed.metadata, completed.path)

    def checkpoint_aborted(self, aborted: AbortedCheckpoint) -> None:
        if aborted.pending.rescales and not aborted.retry:
            self.checkpoint_failed(str(aborted))

    def stop_requested(self, _: bool) -> None:
        if self.stage is not RescaleStage.SWITCHING:
            self.give_up("a stop was requested")

    def checkpoint_failed(self, reason: str) -> None:
        """The checkpoint that was made for this has failed."""
        rescale = self._current
        if rescale is None or not self.is_move:
            self.give_up(reason)
        elif rescale.before.config.checkpoint_interval_s is None:
            self.slots_failed(reason)
        else:
            rescale.has_failed = True

    def stored(self, metadata: CheckpointMetadata, path: str) -> None:
        """The checkpoint that was made for this has completed."""
        rescale = self._current
        if rescale is None or self.stage is not RescaleStage.REQUESTING_CHECKPOINT:
            self._attempts.resume_sources(metadata.checkpoint_id)
            return
        rescale.checkpoint, rescale.checkpoint_id = path, metadata.checkpoint_id
        self._transition(RescaleEvent.COMPLETED)
        self._distribution.distribute(metadata, self.plan, partial(self._distributed, rescale, path))

    def _distributed(self, rescale: _Rescale, path: str, failed: Failed | None) -> bool:
        if self._current is not rescale or self.stage is not RescaleStage.DISTRIBUTING or rescale.checkpoint != path:
            return False
        if failed is not None:
            self.give_up(str(failed.error))
            return False
        self._transition(RescaleEvent.DISTRIBUTED)
        return True

    def switching(self) -> None:
        self._transition(RescaleEvent.SWITCHES)

    def running(self) -> None:
        """All tasks run: if these are the new ones, the rescale or move is complete."""
        self._is_rolled_back = False
        if self._current is not None and self.stage is RescaleStage.SWITCHING:
            self._transition(RescaleEvent.RUNS)
            done, self._current = self._current, None
            if done.answer is not None:
                done.answer(Reply(checkpoint=done.checkpoint))

    def give_up(self, reason: str) -> JobPlan | None:
        """Give up the rescale or move: the job continues with the plan before, which is returned if it has been left."""
        self._release_checkpoint()
        stage, rescale = self.stage, self._remove()
        if rescale is None:
            return None
        if rescale.answer is not None:
            old, new = rescale.before.config.parallelism, rescale.parallelism
            text = f"could not rescale to parallelism {new}; the job continues at {old}: {reason}"
            rescale.answer(Reply(error=text))
        if stage is not RescaleStage.SWITCHING:
            self._slots.resize(rescale.before.graph.slots)
        elif rescale.answer is not None:
            self._is_rolled_back = True
            return rescale.before
        return None

    def job_ended(self, why: str, _: bool) -> None:
        rescale = self._remove()
        if rescale is not None and rescale.answer is not None:
            rescale.answer(Reply(error=why))

    def _remove(self) -> _Rescale | None:
        """Remove and return the current rescale or move, which is over."""
        rescale, self._current = self._current, None
        if rescale is not None:
            self._transition(RescaleEvent.GIVEN_UP)
        return rescale

    def _release_checkpoint(self) -> None:
        """Resume the sources, if they are paused after the checkpoint for this, which becomes an ordinary one."""
        if self._current is not None and self.stage is RescaleStage.DISTRIBUTING:
            self._attempts.resume_sources(self._current.checkpoint_id)

    def _keep_slots(self, why: str) -> None:
        leaving = sorted(self._slots.leaving)
        which, until = ("slots", "they end") if len(leaving) > 1 else ("slot", "it ends")
        numbers = ", ".join(map(str, leaving))
        self._effects.notifications.warned(f"the tasks stay on {which} {numbers} until {until}: {why}")
        self._slots.keep_leaving()
