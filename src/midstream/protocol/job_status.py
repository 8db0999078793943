"""What can be seen of a job from outside, as the driver says it."""

from __future__ import annotations

import msgspec


class OperatorStatus(msgspec.Struct, frozen=True):
    uid: str
    name: str
    parallelism: int
    rows_in: int
    rows_out: int
    """Both since the job began; what was read again after a failure counts again."""
    late_rows: int = 0
    """Dropped as late since the job began; what was read again after a failure counts again."""
    bad_records: int = 0
    """Of a source: left out since the job began, taken aside or not; what was read again after a failure counts again."""


class RecoveryStatus(msgspec.Struct, frozen=True):
    """A subtask that still works off what was in flight at the checkpoint."""

    subtask: int
    to_recover_bytes: int
    recovered_bytes: int


class SubtaskStatus(msgspec.Struct, frozen=True):
    subtask: int
    rows_in: int
    rows_out: int
    """Both since the attempt began."""
    busy: float
    """Share of time spent working, 0 to 1."""
    backpressured: float
    watermark_us: int | None


class VertexStatus(msgspec.Struct, frozen=True):
    id: int
    name: str
    parallelism: int
    states: dict[str, int]
    """How many subtasks are in which state."""
    operators: tuple[OperatorStatus, ...]
    watermark_us: int | None
    busy: float
    """Share of time spent working, 0 to 1, the mean over subtasks."""
    backpressured: float
    recovering: tuple[RecoveryStatus, ...] = ()
    """While any of its subtasks recovers: all that had something to recover."""
    subtasks: tuple[SubtaskStatus, ...] = ()
    """Those that have reported since the attempt began."""

    @property
    def busiest(self) -> SubtaskStatus | None:
        return max(self.subtasks, key=lambda subtask: subtask.busy, default=None)


class CheckpointStatus(msgspec.Struct, frozen=True):
    id: int
    state: str
    """in_progress, completed, or failed."""
    created_ms: int
    duration_ms: int
    state_bytes: int
    reason: str = ""
    in_flight_bytes: int = 0
    """What lay in channels; unlike `state_bytes` with what earlier checkpoints have stored and nobody consumed yet."""
    alignment_ms: float = 0.0
    """How long the task that waited longest for the barriers of all its inputs has done so."""


class FailureStatus(msgspec.Struct, frozen=True):
    at_ms: int
    attempt: int
    summary: str
    details: str


class WaitStatus(msgspec.Struct, frozen=True):
    """Something that the job, or whoever asked something of it, has been waiting for."""

    what: str
    for_ms: int
    limit_ms: int | None = None
    """After so long it is given up; None: it is waited for as long as it takes."""
    is_call: bool = False
    """`what` is an operator, which has not come back from one call."""

    @property
    def sentence(self) -> str:
        if self.is_call:
            return f"{self.what} has been in one call for {self.for_ms // 1000} s"
        limit = "" if self.limit_ms is None else f" (given up after {self.limit_ms / 1000:g} s)"
        return f"waiting for {self.what}, {self.for_ms // 1000} s so far{limit}"


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be seen of a job from outside."""

    job_id: str
    name: str
    state: str
    """created, deploying, running, restarting, rescaling, stopping, finished, stopped, or failed."""
    attempt: int
    started_ms: int
    now_ms: int
    slots: int
    slots_needed: int
    vertices: tuple[VertexStatus, ...]
    edges: tuple[tuple[int, int, str], ...]
    """source vertex, target vertex, partitioning."""
    checkpoints_completed: int
    checkpoints_failed: int
    last_checkpoint: CheckpointStatus | None
    checkpoints: tuple[CheckpointStatus, ...]
    """The most recent ones, newest first."""
    failures: tuple[FailureStatus, ...]
    """The most recent ones, newest first."""
    restarts: int
    restored_from: str | None
    had_finished: bool = False
    """In what it was started from: nothing is run."""
    checkpoint_dir: str | None
    slot_memory_bytes: tuple[int, ...] = ()
    slot_pids: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    """What is not as it should be, but does not keep the job from running; the newest last."""
    waiting: tuple[WaitStatus, ...] = ()
    """What has taken a while and is not there yet, the oldest first."""

    @property
    def has_ended(self) -> bool:
        return self.state in ("finished", "stopped", "failed")

    @property
    def rows_read(self) -> int:
        """Rows given out by all sources; what was read again after a failure counts again."""
        fed = {target for _, target, _ in self.edges}
        return sum(
            vertex.operators[0].rows_out for vertex in self.vertices if vertex.operators and vertex.id not in fed
        )

    def __repr__(self) -> str:
        """What a shell or a notebook shows; each part is an attribute."""
        failed = f"; last failure: {self.failures[0].summary}" if self.failures else ""
        return (
            f"<JobStatus of {self.name!r} {self.job_id}: {self.state}, rows_read={self.rows_read}, "
            f"checkpoints_completed={self.checkpoints_completed}, restarts={self.restarts}{failed}>"
        )
