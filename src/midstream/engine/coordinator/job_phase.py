"""The phases of a job, and what leads from one to the next."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from midstream.engine.core.state_machine import Transition, TransitionTable


class Phase(Enum):
    CREATED = auto()
    OPENING = auto()
    """The checkpoint directory, if the job has one, is taken over, and the checkpoint to resume from is read."""
    WAITING_TO_DEPLOY = auto()
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


class DeploymentObstacle(Enum):
    """What keeps the next attempt from being deployed, while WAITING_TO_DEPLOY."""

    CHECKPOINT_OUTCOME = auto()
    """The metadata of a checkpoint is being written, so it is not known which one is the newest."""
    STOP = auto()
    """The job must stop, and needs no tasks for that."""
    RESTART_DELAY = auto()
    STATE = auto()
    """The state to restore is being distributed."""
    COMMITS = auto()
    SLOTS = auto()


class PhaseEvent(Enum):
    """The events that lead to another phase."""

    STARTED = auto()
    OPENED = auto()
    """The checkpoint directory has been opened, if the job has one."""
    DEPLOYED = auto()
    """Nothing is awaited any more, and slots receive their deployments."""
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


PHASE_TABLE: Final[TransitionTable[Phase, PhaseEvent]] = TransitionTable(
    "coordinator",
    (
        Transition(
            Phase.CREATED, PhaseEvent.STARTED, (Phase.OPENING,), "the checkpoint directory is opened, if there is one"
        ),
        Transition(Phase.OPENING, PhaseEvent.OPENED, (Phase.WAITING_TO_DEPLOY,), "sources are reset, slots requested"),
        Transition(
            Phase.WAITING_TO_DEPLOY, PhaseEvent.DEPLOYED, (Phase.DEPLOYING,), "each slot receives its deployment"
        ),
        Transition(Phase.DEPLOYING, PhaseEvent.ANSWERED, (Phase.STARTING,), "splits are assigned, tasks started"),
        Transition(Phase.STARTING, PhaseEvent.RUNS, (Phase.RUNNING,), "checkpoints begin"),
        *(
            Transition(phase, PhaseEvent.ATTEMPT_OVER, (Phase.CANCELLING,), "slots cancel their tasks")
            for phase in (Phase.DEPLOYING, Phase.STARTING, Phase.RUNNING)
        ),
        Transition(Phase.CANCELLING, PhaseEvent.CANCELLED, (Phase.WAITING_TO_DEPLOY,), "missing slots are requested"),
        *(
            Transition(phase, PhaseEvent.ENDS, (Phase.ENDING,), "slots are released, sources and committers closed")
            for phase in Phase
            if phase not in (Phase.ENDING, Phase.ENDED)
        ),
        Transition(Phase.ENDING, PhaseEvent.CONCLUDED, (Phase.ENDED,), "clients that still wait are answered"),
    ),
)
