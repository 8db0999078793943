"""The phases of a job, and what leads from one to the next."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from midstream.engine.core.state_machine import Transition, TransitionTable


class Phase(Enum):
    CREATED = auto()
    OPENING = auto()
    """The checkpoint directory, if the job has one, is taken over, and the checkpoint to resume from is read."""
    GATHERING = auto()
    """The job waits for slots, the restart's delay, commits, the outcome of a checkpoint that is being published, and
    the assignment of the state to restore.
    """
    DEPLOYING = auto()
    STARTING = auto()
    RUNNING = auto()
    CANCELLING = auto()
    ENDING = auto()
    """Slots are released, and I/O that is still running is awaited."""
    ENDED = auto()


class PhaseTurn(Enum):
    """What leads to another phase."""

    STARTED = auto()
    OPENED = auto()
    """The checkpoint directory has been opened, if the job has one."""
    DEPLOYED = auto()
    """Nothing is waited for any more, and slots are told what to build."""
    ANSWERED = auto()
    """All slots have built their tasks."""
    RUNS = auto()
    """All tasks run."""
    ATTEMPT_OVER = auto()
    """The attempt is over because of a failure, a rescale or a move."""
    CANCELLED = auto()
    """All slots have cancelled their tasks, or were given up."""
    ENDS = auto()
    """The job has finished, was stopped, or has failed for good."""
    CONCLUDED = auto()


PHASE_TABLE: Final[TransitionTable[Phase, PhaseTurn]] = TransitionTable(
    "coordinator",
    (
        Transition(
            Phase.CREATED, PhaseTurn.STARTED, (Phase.OPENING,), "the checkpoint directory is opened, if there is one"
        ),
        Transition(Phase.OPENING, PhaseTurn.OPENED, (Phase.GATHERING,), "sources are reset, slots requested"),
        Transition(Phase.GATHERING, PhaseTurn.DEPLOYED, (Phase.DEPLOYING,), "each slot is told what to build"),
        Transition(Phase.DEPLOYING, PhaseTurn.ANSWERED, (Phase.STARTING,), "splits are handed out, tasks started"),
        Transition(Phase.STARTING, PhaseTurn.RUNS, (Phase.RUNNING,), "checkpoints begin"),
        *(
            Transition(phase, PhaseTurn.ATTEMPT_OVER, (Phase.CANCELLING,), "slots are told to cancel their tasks")
            for phase in (Phase.DEPLOYING, Phase.STARTING, Phase.RUNNING)
        ),
        Transition(Phase.CANCELLING, PhaseTurn.CANCELLED, (Phase.GATHERING,), "missing slots are requested"),
        *(
            Transition(phase, PhaseTurn.ENDS, (Phase.ENDING,), "slots are released, sources and committers closed")
            for phase in Phase
            if phase not in (Phase.ENDING, Phase.ENDED)
        ),
        Transition(Phase.ENDING, PhaseTurn.CONCLUDED, (Phase.ENDED,), "clients that still wait are answered"),
    ),
)
