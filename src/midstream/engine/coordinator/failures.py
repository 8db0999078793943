"""Failures of the job, and what the user is shown of them."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import Enum, auto

from midstream.engine.coordinator.effects import Effects
from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.core.errors import (
    ClusterError,
    InvariantError,
    JobError,
    MidstreamError,
    UnavailableError,
    is_permanent,
)
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.core.tracebacks import kind_and_line, users_part
from midstream.engine.protocol.job_status import FailureStatus


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of the job. `details` is a traceback, or empty. `fatal`: a restart cannot help."""

    summary: str
    details: str
    error: MidstreamError
    """The error that is raised to the user if the job ends because of this failure."""
    fatal: bool = False
    fingerprint: str = ""
    """Equal whenever the same code fails in the same way; empty if the next time may differ."""
    row: str = ""
    """Equal whenever the same row fails in the same way; empty if the row is not known, or may not fail the next time."""

    def status(self, at_ms: int, attempt: int) -> FailureStatus:
        """Return the failure as the job's status shows it."""
        return FailureStatus(at_ms, attempt, self.summary, self.details, users_part(self.details))


class AfterFailure(Enum):
    """What follows from a failure of an attempt."""

    NOTHING = auto()
    """The attempt is being ended already: the failure is only recorded."""
    REVERTED_RESCALE = auto()
    """The rescale has failed, and not the job, which continues with the plan before."""
    END = auto()
    RESTART = auto()
    """The job restarts, or ends if its restart strategy allows no further restart."""


def after_failure(phase: Phase, failure: Failure, reverts_rescale: bool, would_duplicate: bool) -> AfterFailure:
    """Decide what follows from a failure in `phase`, which is not an end of the job.

    `reverts_rescale`: it ends a rescale whose tasks have been, or are being, replaced. `would_duplicate`: after a
    restart the job would commit again what it has committed.
    """
    if phase in (Phase.CANCELLING, Phase.OPENING) and (reverts_rescale or not failure.fatal):
        return AfterFailure.NOTHING
    if reverts_rescale:
        return AfterFailure.REVERTED_RESCALE
    return AfterFailure.END if failure.fatal or would_duplicate else AfterFailure.RESTART


def failure_of_user_code(summary: str, details: str, fatal: bool, fingerprint: str, row: str = "") -> Failure:
    """Return the failure that a slot has reported; `details` is the traceback."""
    return Failure(
        summary, details, JobError(f"{summary}\n\n{details}" if details else summary), fatal, fingerprint, row
    )


def failure_of(error: BaseException, where: str) -> Failure:
    """Return the failure of something that ran on the driver. A MidstreamError keeps its class."""
    summary = f"{where}: {error}" if isinstance(error, MidstreamError) else f"{where}: {type(error).__name__}: {error}"
    details = "".join(traceback.format_exception(error))
    if isinstance(error, MidstreamError):
        shown: MidstreamError = type(error)(summary)
    else:
        shown = JobError(f"{summary}\n\n{details}")
    shown.__cause__ = error
    fatal = is_permanent(error) or isinstance(error, InvariantError)
    what = kind_and_line(error)
    return Failure(summary, details, shown, fatal, what and f"{where}: {what}")


def warn_if_failed(effects: Effects, where: str, outcome: Done[None] | Failed) -> None:
    if isinstance(outcome, Failed):
        effects.notifications.warned(failure_of(outcome.error, where).summary)


def slot_lost(text: str, last_lines: str, crash: str) -> Failure:
    """Return the failure of a lost slot. `text`: which slot, and how. `crash`: its `Failure.fingerprint`."""
    last = f"Its last lines:\n{last_lines}" if last_lines else ""
    return Failure(text, last, ClusterError(f"{text}\n\n{last}" if last else text), fingerprint=crash)


def slots_gone(reason: str, newest_checkpoint: str | None) -> Failure:
    """Return the failure of all slots together, after which the job can only be started again."""
    last = f"its last checkpoint is {newest_checkpoint}" if newest_checkpoint else "it has no checkpoint to resume from"
    error = UnavailableError(f"{reason}, and all slots of the job with it; {last}. Start the job again")
    return Failure(str(error), "", error, fatal=True)
