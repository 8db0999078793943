"""The outcomes of the newest checkpoints, as the job's status shows them, and how their time was spent."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from midstream.engine.core.ids import TaskId
from midstream.engine.protocol.job_status import CheckpointPhases, CheckpointStatus
from midstream.engine.protocol.messages import CheckpointAck

HISTORY_MAX: Final = 20


class CheckpointHistory:
    def __init__(self) -> None:
        self.newest_first: deque[CheckpointStatus] = deque(maxlen=HISTORY_MAX)
        """The newest checkpoints that have completed or failed."""
        self.completed_count = 0
        self.failed_count = 0
        """The number of failed checkpoints, without those for savepoints."""
        self.last_completed: CheckpointStatus | None = None
        self._committing_since: dict[int, int] = {}
        """When each checkpoint completed whose output is not all committed, by id, in milliseconds since 1970."""

    def failed(self, status: CheckpointStatus) -> None:
        self.failed_count += not status.is_savepoint
        self.newest_first.appendleft(status)

    def completed(self, status: CheckpointStatus, has_output: bool, now_ms: int) -> None:
        self.completed_count += 1
        self.last_completed = status
        self.newest_first.appendleft(status)
        if has_output:
            self._committing_since[status.id] = now_ms

    def committed(self, oldest_uncommitted: int | None, now_ms: int) -> None:
        """All output is committed, except that of `oldest_uncommitted` and later checkpoints."""
        if not self._committing_since:
            return
        done = [known for known in self._committing_since if oldest_uncommitted is None or known < oldest_uncommitted]
        for checkpoint_id in done:
            commit_ms = max(0, now_ms - self._committing_since.pop(checkpoint_id))
            for at, status in enumerate(self.newest_first):
                if status.id == checkpoint_id and status.state == "completed":
                    self.newest_first[at] = updated = msgspec.structs.replace(status, commit_ms=commit_ms)
                    if status is self.last_completed:
                        self.last_completed = updated


def phases_of(acks: Mapping[TaskId, CheckpointAck], duration_ms: int) -> CheckpointPhases | None:
    """Return how the task spent its time whose acknowledgement is the last of `acks`. It came at most `duration_ms`
    after the trigger.
    """
    if not acks:
        return None
    last = acks[next(reversed(acks.keys()))]  # type: ignore[call-overload]  # of a dict, and so of this, they can be reversed
    known_ms = last.alignment_ms + last.snapshot_ms + last.storing_ms
    return CheckpointPhases(max(0.0, duration_ms - known_ms), last.alignment_ms, last.snapshot_ms, last.storing_ms)
