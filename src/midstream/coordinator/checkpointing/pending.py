"""The checkpoint in progress: how far it is, what is known of it, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from midstream.checkpoint.metadata import CheckpointMetadata, Committables, SourcePosition
from midstream.checkpoint.references import InFlight
from midstream.coordinator.placement.attempt import Attempt, CheckpointPlan
from midstream.core.ids import TaskId
from midstream.core.transitions import Row, Table
from midstream.protocol.messages import CheckpointAck


class Progress(Enum):
    """How far the one in progress is."""

    NONE = auto()
    COLLECTING = auto()
    """Acknowledgements of every task that lives."""
    PUBLISHING = auto()
    """Its metadata is being written: the outcome is open."""
    ORPHANED = auto()
    """PUBLISHING, and the attempt is over."""


class CheckpointTurn(Enum):
    """What leads to other progress."""

    TRIGGERED = auto()
    ACKNOWLEDGED = auto()
    """By every task that was to."""
    ATTEMPT_OVER = auto()
    COMPLETED = auto()
    FAILED = auto()
    """Declined, refused, not written, out of time, or a task has ended or failed meanwhile."""


_TRIGGERED, _ACKNOWLEDGED, _ATTEMPT_OVER, _COMPLETED, _FAILED = CheckpointTurn
CHECKPOINT_TABLE: Final[Table[Progress, CheckpointTurn]] = Table(
    "checkpoint",
    (
        Row(Progress.NONE, _TRIGGERED, (Progress.COLLECTING,), "tasks without a living producer are told"),
        Row(Progress.COLLECTING, _ACKNOWLEDGED, (Progress.PUBLISHING,), "the metadata is written"),
        Row(Progress.COLLECTING, _FAILED, (Progress.NONE,), "slots and those who wait for it are told"),
        Row(Progress.PUBLISHING, _ATTEMPT_OVER, (Progress.ORPHANED,), "no attempt restores before it is settled"),
        Row(Progress.ORPHANED, _ATTEMPT_OVER, (Progress.ORPHANED,), "the job ends before the tasks are cancelled"),
        Row(Progress.PUBLISHING, _COMPLETED, (Progress.NONE,), "it is the newest one from now on"),
        Row(Progress.ORPHANED, _COMPLETED, (Progress.NONE,), "it is the newest one, from which the job goes on"),
        Row(Progress.PUBLISHING, _FAILED, (Progress.NONE,), "nothing is deleted if it may yet have been written"),
        Row(Progress.ORPHANED, _FAILED, (Progress.NONE,), "the job goes on from the one before"),
    ),
)


@dataclass(slots=True)
class Pending:
    checkpoint_id: int
    attempt: Attempt
    created_ms: int
    plan: CheckpointPlan
    sources: tuple[SourcePosition, ...]
    clients: tuple[int, ...]
    """Who asked for a checkpoint and waits for this one."""
    is_stop: bool
    """The job stops with this one."""
    is_rescale: bool
    """It goes on at another parallelism, or on other slots, from this one."""
    is_savepoint: bool
    """Its failure does not count against the job: a restart would not mend it."""
    acks: dict[TaskId, CheckpointAck] = field(default_factory=dict)
    in_flight: InFlight = field(default_factory=InFlight)
    """Of these acknowledgements: there may be 100,000s of channels, so they are counted as they come."""
    timer: str | None = None
    attempt_is_over: bool = False
    files: frozenset[str] = frozenset()
    """What its metadata refers to, once that is being written."""

    @property
    def alignment_ms(self) -> float:
        """How long the task that waited longest for its barriers has done so."""
        return max((ack.alignment_ms for ack in self.acks.values()), default=0.0)

    @property
    def stops(self) -> bool:
        """The job stops with it: its attempt goes on until then."""
        return self.is_stop and not self.attempt_is_over

    @property
    def rescales(self) -> bool:
        return self.is_rescale and not self.attempt_is_over

    @property
    def missing(self) -> frozenset[TaskId]:
        return self.plan.expected - self.acks.keys()


@dataclass(frozen=True, slots=True)
class Completed:
    pending: Pending
    metadata: CheckpointMetadata
    committables: tuple[Committables, ...]
    """To be committed now; what older checkpoints hold is not among them."""
    path: str
    is_first: bool
    """Of its attempt, which goes on."""


@dataclass(frozen=True, slots=True)
class Aborted:
    pending: Pending
    reason: str
    retry: bool
    """Nothing is wrong: it only has to be taken again."""

    def __str__(self) -> str:
        return f"checkpoint {self.pending.checkpoint_id} failed: {self.reason}"
