"""How far a job is."""

from __future__ import annotations

from enum import Enum, auto


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
