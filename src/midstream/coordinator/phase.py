"""How far a job is, and what takes it further."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from midstream.core.transitions import Row, Table


class Phase(Enum):
    CREATED = auto()
    OPENING = auto()
    """The checkpoint directory is read."""
    GATHERING = auto()
    """Waiting for slots, the restart's delay, commits, and the outcome of a checkpoint being published."""
    DEPLOYING = auto()
    STARTING = auto()
    RUNNING = auto()
    CANCELLING = auto()
    ENDING = auto()
    """Slots are let go; I/O comes to its end."""
    ENDED = auto()


class PhaseTurn(Enum):
    """What leads to another phase."""

    STARTED = auto()
    OPENED = auto()
    """The checkpoint directory, if the job has one."""
    DEPLOYED = auto()
    """Nothing is waited for any more, and slots are told what to build."""
    ANSWERED = auto()
    """All slots have built it."""
    RUNS = auto()
    """All tasks do."""
    ATTEMPT_OVER = auto()
    """A failure, a rescale, a move."""
    CANCELLED = auto()
    """By all slots, or they were given up."""
    ENDS = auto()
    """It has finished, stopped, or failed for good."""
    CONCLUDED = auto()


PHASE_TABLE: Final[Table[Phase, PhaseTurn]] = Table(
    "coordinator",
    (
        Row(Phase.CREATED, PhaseTurn.STARTED, (Phase.OPENING,), "the checkpoint directory is opened, if there is one"),
        Row(Phase.OPENING, PhaseTurn.OPENED, (Phase.GATHERING,), "sources are reset, slots asked for"),
        Row(Phase.GATHERING, PhaseTurn.DEPLOYED, (Phase.DEPLOYING,), "each slot is told what to build"),
        Row(Phase.DEPLOYING, PhaseTurn.ANSWERED, (Phase.STARTING,), "splits are handed out, tasks started"),
        Row(Phase.STARTING, PhaseTurn.RUNS, (Phase.RUNNING,), "checkpoints begin"),
        *(
            Row(phase, PhaseTurn.ATTEMPT_OVER, (Phase.CANCELLING,), "slots are told to cancel their tasks")
            for phase in (Phase.DEPLOYING, Phase.STARTING, Phase.RUNNING)
        ),
        Row(Phase.CANCELLING, PhaseTurn.CANCELLED, (Phase.GATHERING,), "slots that are missing are asked for"),
        *(
            Row(phase, PhaseTurn.ENDS, (Phase.ENDING,), "slots are released, sources and committers closed")
            for phase in Phase
            if phase not in (Phase.ENDING, Phase.ENDED)
        ),
        Row(Phase.ENDING, PhaseTurn.CONCLUDED, (Phase.ENDED,), "those who still wait are answered"),
    ),
)
