"""Decides how a checkpoint's rows are committed to Kafka exactly once, whatever fails in between; performs no I/O.

The rows of one subtask (a *lane*, with a transactional id of its own) and one checkpoint go into one transaction,
together with a *marker*: an offset, equal to the checkpoint's id, that is committed for a group of the lane's own. So
the marker says which checkpoint of the lane is in the topic, and it cannot be wrong: rows and marker become visible
together, or neither does.

    LOOK_UP      a note of ours in the checkpoint storage, which marks older commits as done
    FENCE     a new producer takes the transactional id: what another one has left open is aborted, and no older
              producer of the lane can ever commit again. Only then is it certain what the marker will contain
    READ      the marker
    BEGIN, PRODUCE, MARK, COMMIT
    NOTE      write down that it is done; from here on nothing depends on the marker, which the brokers forget in time
    CLEAN     delete the staged rows

After any failure from FENCE to COMMIT the producer is thrown away, and all is decided anew behind a new fence: a commit
whose answer was lost has happened, or it has not, and the marker shows which.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from midstream.engine.core.errors import InvariantError


class CommitStep(Enum):
    LOOK_UP = auto()
    FENCE = auto()
    READ = auto()
    BEGIN = auto()
    PRODUCE = auto()
    MARK = auto()
    COMMIT = auto()
    NOTE = auto()
    CLEAN = auto()
    DONE = auto()
    LOST = auto()
    """There is no marker, so it cannot be determined whether the rows are in the topic."""
    TOO_EARLY = auto()
    """Rows that the lane has staged for an earlier checkpoint have not been committed."""


_AT_THE_BROKERS: Final = (
    CommitStep.FENCE,
    CommitStep.READ,
    CommitStep.BEGIN,
    CommitStep.PRODUCE,
    CommitStep.MARK,
    CommitStep.COMMIT,
)
_ENDS: Final = (CommitStep.DONE, CommitStep.LOST, CommitStep.TOO_EARLY)
_NEXT: Final = {
    CommitStep.FENCE: CommitStep.READ,
    CommitStep.BEGIN: CommitStep.PRODUCE,
    CommitStep.PRODUCE: CommitStep.MARK,
    CommitStep.MARK: CommitStep.COMMIT,
    CommitStep.NOTE: CommitStep.CLEAN,
    CommitStep.CLEAN: CommitStep.DONE,
}


class LaneState:
    """The data about a lane that is kept from one commit to the next, together with its producer."""

    def __init__(self) -> None:
        self.marker: int | None = None
        """The marker's value while no other producer takes the transactional id; None: read it after a new fence."""


class LaneCommit:
    """The commit of `checkpoint_id`. `after`: the checkpoint for which the lane staged rows before, 0 if none.

    Do what `step` requires, then call `succeeded`, with the result of LOOK_UP and READ, or `failed`.
    """

    def __init__(self, lane: LaneState, checkpoint_id: int, after: int) -> None:
        if not 0 <= after < checkpoint_id:
            raise InvariantError(f"checkpoint {checkpoint_id} is committed after {after}")
        self.lane = lane
        self.checkpoint_id = checkpoint_id
        self.after = after
        self.was_ours = False
        """Whether a transaction of this commit committed the rows, rather than an earlier one."""
        self.step = CommitStep.LOOK_UP
        if lane.marker is not None:
            self._decide(lane.marker)

    @property
    def is_over(self) -> bool:
        return self.step in _ENDS

    def succeeded(self, found: int | None = None) -> None:
        """Record the success of the step. `found`: the checkpoint id from LOOK_UP or READ; None without a note or marker."""
        match self.step:
            case CommitStep.LOOK_UP:
                self.step = CommitStep.CLEAN if found is not None and found >= self.checkpoint_id else CommitStep.FENCE
            case CommitStep.READ:
                self.lane.marker = found
                self._decide(found)
            case CommitStep.COMMIT:
                self.lane.marker = self.checkpoint_id
                self.was_ours = True
                self.step = CommitStep.NOTE
            case step if step in _NEXT:
                self.step = _NEXT[step]
            case step:
                raise InvariantError(f"there is nothing to do at {step}")

    def failed(self) -> None:
        """Record a failure at the brokers, of any kind. Failures elsewhere are not recorded: the whole commit is called
        again.
        """
        if self.step not in _AT_THE_BROKERS:
            raise InvariantError(f"{self.step} requests nothing from the brokers")
        self.lane.marker = None
        self.step = CommitStep.FENCE

    def _decide(self, marker: int | None) -> None:
        if marker is None:
            self.step = CommitStep.LOST
        elif marker >= self.checkpoint_id:
            self.step = CommitStep.NOTE
        elif marker < self.after:
            self.step = CommitStep.TOO_EARLY
        else:
            self.step = CommitStep.BEGIN
