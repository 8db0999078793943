"""What can be seen of a job from outside, as the driver says it."""

from __future__ import annotations

from typing import Final

import msgspec

DETAILS_CHARS_MAX: Final = 20_000
"""Of a failure's traceback, where it is kept or shown in bulk: the last characters of a longer one."""


class GaugeStatus(msgspec.Struct, frozen=True):
    """What a gauge of a user's function was last set to, over the subtasks that have set it."""

    min: float
    max: float
    sum: float


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
    state_rows: int = 0
    state_bytes: int = 0
    """Both as of the newest completed checkpoint; bytes as they are stored."""
    work: float | None = None
    """Its part of what all operators of its task worked between the last heartbeats, 0 to 1; None where that is hardly anything."""
    counters: dict[str, float] = {}
    """Of the user's function, by name: the sum over subtasks since the attempt began."""
    gauges: dict[str, GaugeStatus] = {}


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


class HeldBackStatus(msgspec.Struct, frozen=True):
    """The subtask, or split of a source, that event time waits for, see `coordinator.requests.event_time`."""

    vertex: int
    """The task in which event time begins that has come the least far."""
    name: str
    """Of its first operator."""
    subtask: int
    split: str
    """Empty where it is not known; of a very long id the end."""
    watermark_us: int | None
    """How far it has come; None: nowhere, as no row of it has come."""
    behind_us: int | None
    """How much further the furthest of those beside it has come; None where `watermark_us` is."""


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
    held_back: HeldBackStatus | None = None
    """What holds its event time back, where something is further."""

    @property
    def busiest(self) -> SubtaskStatus | None:
        return max(self.subtasks, key=lambda subtask: subtask.busy, default=None)


class FlowStatus(msgspec.Struct, frozen=True):
    """What has passed one edge since the job began; what was emitted again after a failure counts again."""

    rows: int
    """What goes to several subtasks (broadcast) counts for each of them."""
    bytes: int
    """As they lie in memory, whether or not they have left the process."""
    batches: int
    watermark_us: int | None = None
    """The least of what its consumers have been told, by producers that they wait for: None before the first one, while
    all are idle, and after the end."""


class CheckpointPhases(msgspec.Struct, frozen=True):
    """Where the time of the subtask went that acknowledged last, in milliseconds; together `duration_ms`."""

    barrier_ms: float
    """Until the trigger or the first barrier had come to it, and the acknowledgement to the driver."""
    alignment_ms: float
    """It waited for the barriers of its other inputs."""
    snapshot_ms: float
    """It did nothing else."""
    storing_ms: float
    """State, and rows in flight, were written, while it went on."""


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
    metadata_ms: int = 0
    """How long it then took until its metadata was durable; `duration_ms` is without it."""
    tasks: int = 0
    tasks_done: int = 0
    """How many subtasks are to acknowledge it, and have done so."""
    last: str = ""
    """Of a completed one: the subtask that acknowledged it last. Of one in progress: the first ones that have not yet."""
    is_savepoint: bool = False
    phases: CheckpointPhases | None = None
    """None as long as no subtask has acknowledged it."""
    commit_ms: int | None = None
    """How long it took, once it had completed, until all output that it and those before it hold was committed. None: it
    holds none, or that is not done."""


class StateSize(msgspec.Struct, frozen=True):
    """What a completed checkpoint held of the state of all operators."""

    at_ms: int
    bytes: int


class FailureStatus(msgspec.Struct, frozen=True):
    at_ms: int
    attempt: int
    summary: str
    details: str
    own_lines: str = ""
    """Of a traceback in `details` the part with lines of the user's own; empty where the summary says everything."""


def _shortened(failure: FailureStatus) -> FailureStatus:
    if len(failure.details) <= DETAILS_CHARS_MAX:
        return failure
    return msgspec.structs.replace(failure, details=f"…{failure.details[-DETAILS_CHARS_MAX:]}")


class BottleneckStatus(msgspec.Struct, frozen=True):
    """The task that the others wait for, see `protocol.bottleneck`."""

    vertex: int
    name: str
    busy: float
    """Of its busiest subtask."""
    subtask: int | None = None
    """The one that does most of the work while others have time left; None where the work is spread evenly."""
    factor: float | None = None
    """How many times as fast it would have to be for what feeds it never to wait; None where that is not known."""
    multiplier: str = ""
    """An operator in it or before it that gives out many rows for each that it takes in; empty for none."""
    multiplied: float = 1.0
    """How many, on average since the job began."""
    operator: str = ""
    """The operator in it that takes most of that time, if there are several and one takes more than half."""
    work: float = 0.0
    """Its part of the time."""
    slot_busy: float = 0.0
    """Of the busiest slot that runs it: subtask i of every task runs on the one thread of slot i."""


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
    """created, deploying, running, restarting, rescaling, stopping, finished, stopped, or failed.

    In records of jobs also lost: the driver is gone and has not told how the job ended.
    """
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
    tls: str = "off"
    """Whether the connections between driver, slots and commands are encrypted: off, on (with a certificate of this
    start of the job), or the directory of the certificate. They are authenticated in any case."""
    slot_memory_bytes: tuple[int, ...] = ()
    slot_memory_limit_bytes: tuple[int, ...] = ()
    """What each slot's process can have at most; processes of one container share its limit. 0 where unknown."""
    slot_pids: tuple[int, ...] = ()
    slot_hosts: tuple[str, ...] = ()
    """The address of each slot's machine, as other slots reach it."""
    warnings: tuple[str, ...] = ()
    """What is not as it should be, but does not keep the job from running; the newest last."""
    waiting: tuple[WaitStatus, ...] = ()
    """What has taken a while and is not there yet, the oldest first."""
    bottleneck: BottleneckStatus | None = None
    state_growth: tuple[StateSize, ...] = ()
    """Up to 65 completed checkpoints from the job's beginning to the newest one, oldest first."""
    flows: tuple[FlowStatus, ...] = ()
    """Of each of `edges`, in their order; none in records of jobs that older versions ran."""

    @property
    def has_ended(self) -> bool:
        return self.state in ("finished", "stopped", "failed")

    def shortened(self) -> JobStatus:
        """The same with long tracebacks cut: a record and a page are bounded."""
        return msgspec.structs.replace(self, failures=tuple(map(_shortened, self.failures)))

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
