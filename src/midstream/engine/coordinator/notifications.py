"""The notifications among the parts of the coordinator.

A part calls a notification (`Effects.notifications`) and does not depend on its subscribers. These are called
immediately, one after the other, before the part continues. `subscribe` is the one table of them: it lists the
subscribers of each notification in order, with the reason for this order. What follows from several notifications
together is decided by `Coordinator._step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, ParamSpec

if TYPE_CHECKING:
    from midstream.engine.coordinator.checkpoints.pending_checkpoint import AbortedCheckpoint, CompletedCheckpoint
    from midstream.engine.coordinator.coordinator import Coordinator
    from midstream.engine.coordinator.failures import Failure
    from midstream.engine.coordinator.requests.client_requests import Stop
    from midstream.engine.coordinator.restore.open_directory import OpenedStorage
    from midstream.engine.core.errors import StorageError

P = ParamSpec("P")


class Notification(Generic[P]):
    """One kind of notification. `subscribers` are called in this order; each has the reason for its position."""

    def __init__(self, *subscribers: tuple[Callable[P, object], str]) -> None:
        self.subscribers = subscribers

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for notify, _ in self.subscribers:
            notify(*args, **kwargs)


class Notifications:
    """All notifications. A part sends one by calling it."""

    warned: Notification[[str]]
    """Something is lost or tried again, and the job continues."""
    attempt_failed: Notification[[Failure]]
    start_failed: Notification[[Failure]]
    """Something fails that every attempt begins with: deploying tasks, or finding splits."""
    slots_failed: Notification[[Failure]]
    """Slots do not come, or cannot be used."""
    storage_opened: Notification[[OpenedStorage]]
    commit_failed: Notification[[]]
    """A commit has failed: it is tried again, or given up for now."""
    fenced: Notification[[StorageError]]
    """Another coordinator has taken the job over."""
    checkpoint_completed: Notification[[CompletedCheckpoint]]
    checkpoint_aborted: Notification[[AbortedCheckpoint]]
    stop_requested: Notification[[bool]]
    """The job begins to stop. True: with drain, so the sources must end now."""
    stop_failed: Notification[[Stop, str]]
    """A stop with a savepoint is cancelled, for the given reason: its clients have no answer yet."""
    attempt_runs: Notification[[]]
    """All tasks of the attempt run."""
    attempt_over: Notification[[str, bool]]
    """The attempt is over, for the given reason: its tasks are cancelled, and new ones deployed. True: the job would
    have stopped with the checkpoint in progress.
    """
    job_ends: Notification[[str, bool]]
    """The job ends, for the given reason. True: it was stopped."""


def subscribe(job: Coordinator, notifications: Notifications) -> None:
    """List the subscribers of each notification in order, with the reason for this order. It is long because it is one
    table.
    """
    notifications.warned = Notification((job.warnings.append, "the status shows it"))
    notifications.attempt_failed = Notification((job.fail_attempt, "the job restarts, or ends"))
    notifications.start_failed = Notification((job.start_failed, "the same, and a job that has never run ends"))
    notifications.slots_failed = Notification(
        (job.slots_failed, "the same, unless only a rescale or a move needs them")
    )
    notifications.storage_opened = Notification(
        (job.cleanup.storage_opened, "nothing is in progress yet, so these may come in any order"),
        (job.sources.storage_opened, "sources may keep files there"),
        (job.commits.storage_opened, "before the committables of the checkpoint are added"),
        (job.checkpoints.storage_opened, "the job resumes from the newest one"),
    )
    notifications.commit_failed = Notification(
        (job.checkpoints.check_epochs, "perhaps another coordinator has taken over")
    )
    notifications.fenced = Notification(
        (job.cleanup.stop, "another coordinator owns the files: the end of the job must not delete any"),
        (job.commits.abandon, "nor may the end of the job clean up any output"),
        (job.fenced, "last: the job ends, and the parts that it closes must be notified before"),
    )
    notifications.checkpoint_completed = Notification(
        (job.attempts.checkpoint_completed, "slots first: all later messages to them presuppose it"),
        (
            job.checkpoints.drop_older_attempts,
            "files of earlier attempts that no checkpoint references are not needed any more",
        ),
        (job.rescaling.checkpoint_completed, "after the slots, which may have to resume their sources"),
        (job.savepoints.checkpoint_completed, "it is retained for them until its output is committed and it is copied"),
        (
            job.restarts.checkpoint_completed,
            "before its output is committed: if that fails, it fails for the first time",
        ),
        (job.commits.checkpoint_completed, "its output is made visible, in the order of checkpoints"),
        (
            job.sources.checkpoint_completed,
            "after the output is queued, which the checkpoint's metadata holds too: what sources forget now can never be read again",
        ),
        (job.requests.checkpoint_completed, "clients last: by then, what the answer says has been done"),
    )
    notifications.checkpoint_aborted = Notification(
        (
            job.savepoints.checkpoint_aborted,
            "first: a savepoint may wait for the next one, or fail together with its stop",
        ),
        (
            job.requests.checkpoint_aborted,
            "waiting clients are answered, and a stop that still waits for it is cancelled",
        ),
        (job.rescaling.checkpoint_aborted, "last: the job stays as it is"),
    )
    notifications.stop_requested = Notification(
        (job.stop_requested, "first: sources must end before giving up a rescale resumes them"),
        (job.rescaling.stop_requested, "a job that was stopped resumes at the program's own parallelism"),
    )
    notifications.stop_failed = Notification(
        (job.savepoints.stop_failed, "the directory is cleared, then clients are answered")
    )
    notifications.attempt_runs = Notification(
        (job.slots.running, "from now on a slot that does not start is requested again"),
        (job.restarts.running, "the time for which the job runs is counted from now"),
        (job.checkpoints.schedule.running, "the first one comes one interval after this"),
        (job.rescaling.running, "the client that requested a rescale is answered"),
    )
    notifications.attempt_over = Notification(
        (job.requests.attempt_over, "a stop is cancelled before its checkpoint fails, which is not the reason"),
        (job.checkpoints.attempt_over, "the checkpoint in progress fails, unless it is being written"),
        (job.commits.abort_kept, "what finished tasks have prepared is cleaned up, and will be prepared again"),
        (job.checkpoints.check_epochs, "perhaps it failed because another coordinator has taken over"),
        (job.attempts.cancel, "slots receive Cancel after all other messages about the attempt"),
        (job.slots.gather, "missing ones are requested meanwhile"),
    )
    notifications.job_ends = Notification(
        (
            job.savepoints.job_ended,
            "first: savepoints whose checkpoint fails next fail for the job's reason",
        ),
        (job.checkpoints.attempt_over, "the checkpoint in progress fails, unless it is being written"),
        (job.rescaling.job_ended, "the client is answered"),
        (job.sources.end, "nothing more is discovered"),
        (job.commits.give_up, "nothing is retried, and slots are not waited for: they are released next"),
        (job.slots.release, "last: all other messages to them are sent before"),
    )
