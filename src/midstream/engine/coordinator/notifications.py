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


def subscribe(coordinator: Coordinator, notifications: Notifications) -> None:
    """List the subscribers of each notification in order, with the reason for this order. It is long because it is one
    table.
    """
    notifications.warned = Notification((coordinator.warnings.append, "the status shows it"))
    notifications.attempt_failed = Notification((coordinator.fail_attempt, "the job restarts, or ends"))
    notifications.start_failed = Notification((coordinator.start_failed, "the same, and a job that has never run ends"))
    notifications.slots_failed = Notification(
        (coordinator.slots_failed, "the same, unless only a rescale or a move needs them")
    )
    notifications.storage_opened = Notification(
        (coordinator.cleanup.storage_opened, "nothing is in progress yet, so these may come in any order"),
        (coordinator.sources.storage_opened, "sources may keep files there"),
        (coordinator.commits.storage_opened, "before the committables of the checkpoint are added"),
        (coordinator.checkpoints.storage_opened, "the job resumes from the newest one"),
    )
    notifications.commit_failed = Notification(
        (coordinator.checkpoints.check_epochs, "perhaps another coordinator has taken over")
    )
    notifications.fenced = Notification(
        (coordinator.cleanup.stop, "another coordinator owns the files: the end of the job must not delete any"),
        (coordinator.commits.fenced, "nor may the end of the job clean up any output"),
        (coordinator.fenced, "last: the job ends, and the parts that it closes must be notified before"),
    )
    notifications.checkpoint_completed = Notification(
        (coordinator.attempts.checkpoint_completed, "slots first: all later messages to them presuppose it"),
        (
            coordinator.checkpoints.drop_older_attempts,
            "files of earlier attempts that no checkpoint references are not needed any more",
        ),
        (coordinator.rescaling.checkpoint_completed, "after the slots, which may have to resume their sources"),
        (
            coordinator.savepoints.checkpoint_completed,
            "it is retained for them until its output is committed and it is copied",
        ),
        (
            coordinator.restarts.checkpoint_completed,
            "before its output is committed: if that fails, it fails for the first time",
        ),
        (coordinator.commits.checkpoint_completed, "its output is made visible, in the order of checkpoints"),
        (
            coordinator.sources.checkpoint_completed,
            "after the output is queued, which the checkpoint's metadata holds too: what sources forget now can never be read again",
        ),
        (coordinator.requests.checkpoint_completed, "clients last: by then, what the answer says has been done"),
    )
    notifications.checkpoint_aborted = Notification(
        (
            coordinator.savepoints.checkpoint_aborted,
            "first: a savepoint may wait for the next one, or fail together with its stop",
        ),
        (
            coordinator.requests.checkpoint_aborted,
            "waiting clients are answered, and a stop that still waits for it is cancelled",
        ),
        (coordinator.rescaling.checkpoint_aborted, "last: the job stays as it is"),
    )
    notifications.stop_requested = Notification(
        (coordinator.stop_requested, "first: sources must end before giving up a rescale resumes them"),
        (coordinator.rescaling.stop_requested, "a job that was stopped resumes at the program's own parallelism"),
    )
    notifications.stop_failed = Notification(
        (coordinator.savepoints.stop_failed, "the directory is cleared, then clients are answered")
    )
    notifications.attempt_runs = Notification(
        (coordinator.slots.running, "from now on a slot that does not start is requested again"),
        (coordinator.restarts.running, "the time for which the job runs is counted from now"),
        (coordinator.checkpoints.schedule.running, "the first one comes one interval after this"),
        (coordinator.autoscaler.restarted, "what was measured before is forgotten"),
        (coordinator.rescaling.running, "the requester of a rescale is answered"),
    )
    notifications.attempt_over = Notification(
        (coordinator.requests.attempt_over, "a stop is cancelled before its checkpoint fails, which is not the reason"),
        (coordinator.checkpoints.attempt_over, "the checkpoint in progress fails, unless it is being written"),
        (coordinator.commits.abort_kept, "what finished tasks have prepared is cleaned up, and will be prepared again"),
        (coordinator.checkpoints.check_epochs, "perhaps it failed because another coordinator has taken over"),
        (coordinator.attempts.cancel, "slots receive Cancel after all other messages about the attempt"),
        (coordinator.slots.gather, "missing ones are requested meanwhile"),
    )
    notifications.job_ends = Notification(
        (
            coordinator.savepoints.job_ended,
            "first: savepoints whose checkpoint fails next fail for the job's reason",
        ),
        (coordinator.checkpoints.attempt_over, "the checkpoint in progress fails, unless it is being written"),
        (coordinator.rescaling.job_ended, "the client is answered"),
        (coordinator.sources.end, "nothing more is discovered"),
        (coordinator.commits.job_ended, "nothing is retried, and slots are not waited for: they are released next"),
        (coordinator.slots.release, "last: all other messages to them are sent before"),
    )
