"""Decides how a checkpoint's rows are committed to Kafka exactly once, whatever fails in between; performs no I/O.

Each subtask has a transactional id. Its rows of one checkpoint go into one transaction, together with a *marker*: an
offset, equal to the checkpoint's id, that is committed for a group of the same name as the transactional id. So the
marker shows which checkpoint of the subtask is in the topic, and it cannot be wrong: rows and marker become visible
together, or neither does.

    LOOK_UP   the record of earlier commits in the checkpoint storage
    FENCE     a new producer takes the transactional id: what another one has left open is aborted, and no older
              producer of the id can ever commit again. Only then is it certain what the marker will contain
    READ      the marker
    BEGIN, PRODUCE, MARK, COMMIT
    RECORD    in the checkpoint storage that it is done; from here on nothing depends on the marker, which the brokers
              forget in time
    CLEAN     delete the staged rows

After any failure from FENCE to COMMIT the producer is thrown away, and all is decided again after a new fence: a commit
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
    RECORD = auto()
    CLEAN = auto()
    DONE = auto()
    MARKER_MISSING = auto()
    """There is no marker, so it cannot be determined whether the rows are in the topic."""
    TOO_EARLY = auto()
    """Rows that the subtask has staged for an earlier checkpoint have not been committed."""


_AT_THE_BROKERS: Final = (
    CommitStep.FENCE,
    CommitStep.READ,
    CommitStep.BEGIN,
    CommitStep.PRODUCE,
    CommitStep.MARK,
    CommitStep.COMMIT,
)
_ENDS: Final = (CommitStep.DONE, CommitStep.MARKER_MISSING, CommitStep.TOO_EARLY)
_NEXT: Final = {
    CommitStep.FENCE: CommitStep.READ,
    CommitStep.BEGIN: CommitStep.PRODUCE,
    CommitStep.PRODUCE: CommitStep.MARK,
    CommitStep.MARK: CommitStep.COMMIT,
    CommitStep.RECORD: CommitStep.CLEAN,
    CommitStep.CLEAN: CommitStep.DONE,
}


class KnownMarker:
    """What is known about the marker of a transactional id, from one commit to the next, together with its producer."""

    def __init__(self) -> None:
        self.marker: int | None = None
        """The marker's value while no other producer takes the transactional id; None: read it after a new fence."""


class MarkedCommit:
    """The commit of `checkpoint_id`. `after`: the checkpoint for which the subtask staged rows before, 0 if none.

    Do what `step` requires, then call `succeeded`, with the result of LOOK_UP and READ, or `failed`.
    """

    def __init__(self, known: KnownMarker, checkpoint_id: int, after: int) -> None:
        if not 0 <= after < checkpoint_id:
            raise InvariantError(f"checkpoint {checkpoint_id} is committed after {after}")
        self.known = known
        self.checkpoint_id = checkpoint_id
        self.after = after
        self.was_ours = False
        """Whether a transaction of this commit committed the rows, rather than an earlier one."""
        self.step = CommitStep.LOOK_UP
        if known.marker is not None:
            self._decide(known.marker)

    @property
    def is_over(self) -> bool:
        return self.step in _ENDS

    def succeeded(self, found: int | None = None) -> None:
        """Record the success of the step. `found`: the checkpoint id from LOOK_UP or READ; None without a record or marker."""
        match self.step:
            case CommitStep.LOOK_UP:
                self.step = CommitStep.CLEAN if found is not None and found >= self.checkpoint_id else CommitStep.FENCE
            case CommitStep.READ:
                self.known.marker = found
                self._decide(found)
            case CommitStep.COMMIT:
                self.known.marker = self.checkpoint_id
                self.was_ours = True
                self.step = CommitStep.RECORD
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
        self.known.marker = None
        self.step = CommitStep.FENCE

    def _decide(self, marker: int | None) -> None:
        if marker is None:
            self.step = CommitStep.MARKER_MISSING
        elif marker >= self.checkpoint_id:
            self.step = CommitStep.RECORD
        elif marker < self.after:
            self.step = CommitStep.TOO_EARLY
        else:
            self.step = CommitStep.BEGIN
