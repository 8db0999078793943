"""The checkpoint in progress: its request, its state, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from midstream.engine.checkpoint.channel_state_references import InFlight
from midstream.engine.checkpoint.metadata import CheckpointMetadata, Committables, SourcePosition
from midstream.engine.coordinator.placement.attempt import Attempt, CheckpointPlan
from midstream.engine.core.ids import TaskId
from midstream.engine.core.state_machine import Transition, TransitionTable
from midstream.engine.protocol.messages import CheckpointAck


class CheckpointProgress(Enum):
    """The state of the checkpoint in progress."""

    NONE = auto()
    COLLECTING = auto()
    """Tasks that have not finished have still to acknowledge it."""
    PUBLISHING = auto()
    """Its metadata is being written, and the outcome is not known yet."""
    ORPHANED = auto()
    """Its metadata is being written, and its attempt is over."""


class CheckpointEvent(Enum):
    """The events that lead to another state."""

    TRIGGERED = auto()
    ACKNOWLEDGED = auto()
    """Every expected task has acknowledged it."""
    ATTEMPT_OVER = auto()
    COMPLETED = auto()
    FAILED = auto()
    """It was declined or refused, was not written, has timed out, or a task has finished or failed meanwhile."""


_TRIGGERED, _ACKNOWLEDGED, _ATTEMPT_OVER, _COMPLETED, _FAILED = CheckpointEvent
CHECKPOINT_TABLE: Final[TransitionTable[CheckpointProgress, CheckpointEvent]] = TransitionTable(
    "checkpoint",
    (
        Transition(
            CheckpointProgress.NONE,
            _TRIGGERED,
            (CheckpointProgress.COLLECTING,),
            "tasks without an unfinished producer are triggered",
        ),
        Transition(
            CheckpointProgress.COLLECTING, _ACKNOWLEDGED, (CheckpointProgress.PUBLISHING,), "the metadata is written"
        ),
        Transition(
            CheckpointProgress.COLLECTING, _FAILED, (CheckpointProgress.NONE,), "slots and waiting clients are notified"
        ),
        Transition(
            CheckpointProgress.PUBLISHING,
            _ATTEMPT_OVER,
            (CheckpointProgress.ORPHANED,),
            "no attempt restores before its outcome is known",
        ),
        Transition(
            CheckpointProgress.ORPHANED,
            _ATTEMPT_OVER,
            (CheckpointProgress.ORPHANED,),
            "the job ends before the tasks are cancelled",
        ),
        Transition(
            CheckpointProgress.PUBLISHING, _COMPLETED, (CheckpointProgress.NONE,), "it is the newest one from now on"
        ),
        Transition(
            CheckpointProgress.ORPHANED,
            _COMPLETED,
            (CheckpointProgress.NONE,),
            "it is the newest one, from which the job resumes",
        ),
        Transition(
            CheckpointProgress.PUBLISHING,
            _FAILED,
            (CheckpointProgress.NONE,),
            "nothing is deleted if it may yet have been written",
        ),
        Transition(
            CheckpointProgress.ORPHANED, _FAILED, (CheckpointProgress.NONE,), "the job resumes from the one before"
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """What a checkpoint is triggered for. The first four fields are those of `PendingCheckpoint`."""

    clients: tuple[int, ...]
    is_stop: bool
    is_rescale: bool
    is_savepoint: bool
    must_align: bool
    """Whether no barrier may overtake rows, whatever `aligned_timeout` is."""


@dataclass(slots=True)
class PendingCheckpoint:
    checkpoint_id: int
    attempt: Attempt
    created_ms: int
    plan: CheckpointPlan
    sources: tuple[SourcePosition, ...]
    clients: tuple[int, ...]
    """The clients that have requested a checkpoint, and wait for this one."""
    is_stop: bool
    """Whether the job stops with this checkpoint."""
    is_rescale: bool
    """Whether the job continues from this checkpoint at another parallelism, or on other slots."""
    is_savepoint: bool
    """Whether it is for a savepoint: its failure does not count against the job, since a restart would not help."""
    acks: dict[TaskId, CheckpointAck] = field(default_factory=dict)
    in_flight: InFlight = field(default_factory=InFlight)
    """What was in flight in `acks`: there may be 100,000s of channels, so they are counted as they come."""
    timer: str | None = None
    attempt_is_over: bool = False
    files: frozenset[str] = frozenset()
    """The files that its metadata references; empty before that is being written."""

    @property
    def alignment_ms(self) -> float:
        """The longest time for which a task has waited for its barriers."""
        return max((ack.alignment_ms for ack in self.acks.values()), default=0.0)

    @property
    def stops(self) -> bool:
        """Whether the job stops with it: only if its attempt is not over before."""
        return self.is_stop and not self.attempt_is_over

    @property
    def rescales(self) -> bool:
        return self.is_rescale and not self.attempt_is_over

    @property
    def missing(self) -> frozenset[TaskId]:
        return self.plan.expected - self.acks.keys()


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    pending: PendingCheckpoint
    metadata: CheckpointMetadata
    committables: tuple[Committables, ...]
    """The committables to be committed now, without those that older checkpoints hold."""
    path: str
    is_first: bool
    """Whether it is the first checkpoint of its attempt, which is not over."""


@dataclass(frozen=True, slots=True)
class AbortedCheckpoint:
    pending: PendingCheckpoint
    reason: str
    retry: bool
    """Whether nothing is wrong, and a new checkpoint is triggered in its place."""

    def __str__(self) -> str:
        return f"checkpoint {self.pending.checkpoint_id} failed: {self.reason}"
