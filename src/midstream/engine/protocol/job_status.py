"""The status of a job, as the driver reports it."""

from __future__ import annotations

from typing import Final

import msgspec

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US

DETAILS_CHARS_MAX: Final = 20_000
"""The limit on a failure's traceback in stored records and lists; of a longer one, the last characters are kept."""
LAG_MAX_S: Final = 365 * 86_400
"""Event times this far from the clock are synthetic, or of old data: their lag says nothing."""


def event_time_lag_s(watermark_us: int | None, now_ms: int) -> float | None:
    """Return the lag of the watermark behind the wall clock; None without a watermark, or if it is a year or more."""
    if watermark_us is None or watermark_us in (MIN_WATERMARK_US, MAX_WATERMARK_US):
        return None
    lag_s = now_ms / 1e3 - watermark_us / 1e6
    return lag_s if abs(lag_s) < LAG_MAX_S else None


class GaugeStatus(msgspec.Struct, frozen=True):
    """The last values of a gauge of a user's function, over the subtasks that have set it.

    For example:

        length = operator.gauges["queue_length"].max
    """

    min: float
    max: float
    sum: float


class OperatorStatus(msgspec.Struct, frozen=True):
    """An operator of a task; counts are sums over its subtasks.

    For example:

        rows = {operator.uid: operator.rows_out for vertex in status.vertices for operator in vertex.operators}
    """

    uid: str
    """The id by which a checkpoint identifies the operator's state."""
    name: str
    parallelism: int
    rows_in: int
    """Rows in since the job began; rows that were read again after a failure count again."""
    rows_out: int
    """Rows out since the job began; rows that were read again after a failure count again."""
    late_rows: int = 0
    """Rows dropped as late since the job began; rows that were read again after a failure count again."""
    bad_records: int = 0
    """Bad records that a source has dropped since the job began, whether the side output is used or not; ones read
    again after a failure count again.
    """
    state_rows: int = 0
    """Rows of state in the newest completed checkpoint."""
    state_bytes: int = 0
    """Bytes of state in the newest completed checkpoint, as they are stored."""
    work: float | None = None
    """Its share of the work of all operators of its task between the last heartbeats, 0 to 1; None if that is
    negligible.
    """
    counters: dict[str, float] = {}
    """Counters of the user's function, by name: the sum over subtasks since the attempt began."""
    gauges: dict[str, GaugeStatus] = {}
    """Gauges of the user's function, by name."""
    failed_rows: int = 0
    """Rows for which the operator's function failed since the job began, dropped or emitted on `side_output(FAILED)`; rows
    that were read again after a failure count again.
    """


class RecoveryStatus(msgspec.Struct, frozen=True):
    """A subtask that is still processing rows that were in flight at the checkpoint.

    For example:

        left_bytes = sum(one.to_recover_bytes - one.recovered_bytes for one in vertex.recovering)
    """

    subtask: int
    to_recover_bytes: int
    """The bytes that were in flight."""
    recovered_bytes: int
    """Those of them that have been processed."""


class SubtaskStatus(msgspec.Struct, frozen=True):
    """One subtask of a task.

    For example:

        late = [subtask.subtask for subtask in vertex.subtasks if subtask.watermark_us is None]
    """

    subtask: int
    rows_in: int
    """Rows in since the attempt began."""
    rows_out: int
    """Rows out since the attempt began."""
    busy: float
    """The share of time spent working, 0 to 1."""
    backpressured: float
    """The share of time for which its output had no room, 0 to 1."""
    watermark_us: int | None
    """Its event time, in microseconds since 1970; None before the first watermark."""


class HeldBackStatus(msgspec.Struct, frozen=True):
    """The subtask, or split of a source, that event time waits for.

    For example:

        if vertex.held_back is not None:
            print(vertex.held_back.name, vertex.held_back.split)
    """

    vertex: int
    """The task, of those in which event time begins, whose event time is least advanced."""
    name: str
    """The name of its first operator."""
    subtask: int
    split: str
    """The split; empty if it is not known; of a very long id, the end."""
    watermark_us: int | None
    """Its event time; None if no row of it has arrived."""
    behind_us: int | None
    """How far it is behind the most advanced of its peers; None if `watermark_us` is."""


class VertexStatus(msgspec.Struct, frozen=True):
    """A task of the job: operators that run one after the other in each of its subtasks.

    For example:

        for vertex in job.status().vertices:
            print(vertex.name, vertex.states, f"{vertex.busy:.0%}")
    """

    id: int
    name: str
    """The names of its operators."""
    parallelism: int
    states: dict[str, int]
    """The number of subtasks in each state."""
    operators: tuple[OperatorStatus, ...]
    watermark_us: int | None
    """The lowest event time of its subtasks, in microseconds since 1970; None before the first watermark."""
    busy: float
    """The share of time spent working, 0 to 1: the mean over subtasks."""
    backpressured: float
    """The share of time for which its output had no room, 0 to 1: the mean over subtasks."""
    recovering: tuple[RecoveryStatus, ...] = ()
    """While any of its subtasks recovers, all that had something to recover."""
    subtasks: tuple[SubtaskStatus, ...] = ()
    """The subtasks that have reported since the attempt began."""
    held_back: HeldBackStatus | None = None
    """What holds back its event time, if something is more advanced."""
    splits_ahead: int = 0
    """The number of splits that its source does not read at present: they are further ahead of the slowest one than
    `drift` allows.
    """

    @property
    def busiest(self) -> SubtaskStatus | None:
        """The subtask that is busiest; None if none has reported."""
        return max(self.subtasks, key=lambda subtask: subtask.busy, default=None)


class FlowStatus(msgspec.Struct, frozen=True):
    """What has passed one edge since the job began; what was emitted again after a failure counts again.

    `bytes`: the size in memory, whether or not the batches have left the process.

        for (source, target, how), flow in zip(status.edges, status.flows):
            print(source, how, target, flow.rows)
    """

    rows: int
    """The rows; those sent to several subtasks (broadcast) count for each of them."""
    bytes: int
    batches: int
    watermark_us: int | None = None
    """The lowest watermark that its consumers have received from producers that they wait for; None before the first
    one, while all are idle, and after the end.
    """


class CheckpointPhases(msgspec.Struct, frozen=True):
    """How the subtask that acknowledged last spent its time, in milliseconds; the phases add up to `duration_ms`.

    For example:

        phases = status.last_checkpoint.phases
    """

    barrier_ms: float
    """The time until the trigger or the first barrier reached it, and that of the acknowledgement to the driver."""
    alignment_ms: float
    """The time for which it waited for the barriers of its other inputs."""
    snapshot_ms: float
    """The time for which it did nothing but take the snapshot."""
    storing_ms: float
    """The time for which state and rows in flight were written while it continued."""


class CheckpointStatus(msgspec.Struct, frozen=True):
    """A checkpoint, in progress or over; times are in milliseconds since 1970, and durations in milliseconds.

    For example:

        if status.last_checkpoint is not None:
            print(status.last_checkpoint.id, status.last_checkpoint.state_bytes)
    """

    id: int
    state: str
    """The state: in_progress, completed, or failed."""
    created_ms: int
    """When it was triggered, in milliseconds since 1970."""
    duration_ms: int
    """The time until all tasks had acknowledged it; in progress, the time so far."""
    state_bytes: int
    """The bytes that it has stored; what earlier checkpoints have stored, and it refers to, does not count."""
    reason: str = ""
    """Why it failed."""
    in_flight_bytes: int = 0
    """The bytes in channels; unlike `state_bytes`, they include what earlier checkpoints have stored and has not been
    consumed.
    """
    alignment_ms: float = 0.0
    """The longest time for which a task waited for the barriers of all its inputs."""
    metadata_ms: int = 0
    """The time that its metadata then took to become durable; not part of `duration_ms`."""
    tasks: int = 0
    """How many subtasks have to acknowledge it."""
    tasks_done: int = 0
    """How many subtasks have acknowledged it."""
    last: str = ""
    """The subtask that acknowledged last or, while it is in progress, the first ones that have not yet."""
    is_savepoint: bool = False
    phases: CheckpointPhases | None = None
    """The phases; None until a subtask has acknowledged it."""
    commit_ms: int | None = None
    """The time from its completion until all output in it and in earlier checkpoints was committed. None: there is
    none, or it is not committed yet.
    """


class StateSize(msgspec.Struct, frozen=True):
    """The size of all operators' state in a completed checkpoint.

    `bytes`: as they are stored.

        sizes = [(size.at_ms, size.bytes) for size in status.state_growth]
    """

    at_ms: int
    """When the checkpoint was completed, in milliseconds since 1970."""
    bytes: int


class FailureStatus(msgspec.Struct, frozen=True):
    """A failure of the job, after which it was restarted or ended.

    For example:

        if status.failures:
            print(status.failures[0].summary)
    """

    at_ms: int
    """When it happened, in milliseconds since 1970."""
    attempt: int
    """The attempt that it ended."""
    summary: str
    """What failed and why, in a line or a few."""
    details: str
    """The whole message, with the traceback."""
    own_lines: str = ""
    """The part of a traceback in `details` with lines of the user's own code; empty if the summary is complete."""


def _shortened(failure: FailureStatus) -> FailureStatus:
    if len(failure.details) <= DETAILS_CHARS_MAX:
        return failure
    return msgspec.structs.replace(failure, details=f"…{failure.details[-DETAILS_CHARS_MAX:]}")


class BottleneckStatus(msgspec.Struct, frozen=True):
    """The task that the others wait for.

    For example:

        if status.bottleneck is not None:
            print(status.bottleneck.name, f"{status.bottleneck.busy:.0%}")
    """

    vertex: int
    name: str
    busy: float
    """The busy share of its busiest subtask."""
    subtask: int | None = None
    """The subtask that does most of the work while others have time left; None if the work is evenly spread."""
    factor: float | None = None
    """How many times as fast it must be for its input never to wait; None if that is unknown."""
    multiplier: str = ""
    """An operator in it or before it that emits many rows for each input row; empty for none."""
    multiplied: float = 1.0
    """The average number of rows that it emits for each input row since the job began."""
    operator: str = ""
    """The operator in it that takes most of that time, if there are several and one takes more than half."""
    work: float = 0.0
    """That operator's share of the time."""
    slot_busy: float = 0.0
    """The busy share of the busiest slot that runs it: subtask i of every task runs on the one thread of slot i."""


class WaitStatus(msgspec.Struct, frozen=True):
    """Something that the job, or a request to it, has been waiting for.

    For example:

        for wait in status.waiting:
            print(wait.sentence)
    """

    what: str
    """What is waited for."""
    for_ms: int
    """How long it has been waited for."""
    limit_ms: int | None = None
    """The time after which the wait is given up; None: it has no limit."""
    is_call: bool = False
    """Whether `what` is an operator that has not returned from one call."""

    @property
    def sentence(self) -> str:
        """What is waited for and for how long, as a sentence."""
        if self.is_call:
            return f"{self.what} has been in one call for {self.for_ms // 1000} s"
        limit = "" if self.limit_ms is None else f" (given up after {self.limit_ms / 1000:g} s)"
        return f"waiting for {self.what}, {self.for_ms // 1000} s so far{limit}"


class AutoscaleChange(msgspec.Struct, frozen=True):
    """A change of the parallelism that the job has made by itself.

    For example:

        for change in status.autoscale.changes:
            print(change.before, change.after, change.reason)
    """

    at_ms: int
    """When the tasks ran at the new parallelism, in milliseconds since 1970."""
    before: int
    after: int
    reason: str


class AutoscaleStatus(msgspec.Struct, frozen=True):
    """How a job with `autoscale=` judges its parallelism.

    For example:

        if status.autoscale is not None:
            print(status.autoscale.desired, status.autoscale.reason)
    """

    min: int
    """The lowest parallelism that it may choose."""
    max: int
    """The highest parallelism that it may choose."""
    is_advice: bool
    """Whether it only reports what would be better, and changes nothing."""
    parallelism: int
    """The parallelism at which the job runs."""
    desired: int
    """The parallelism that the last evaluation of the load asks for; the job changes once several have agreed."""
    reason: str
    """Why, as a sentence without its end."""
    changes: tuple[AutoscaleChange, ...] = ()
    """The most recent changes, newest first."""

    @property
    def sentence(self) -> str:
        """What the job does about its load, and why, as a sentence."""
        if self.is_advice and self.desired != self.parallelism:
            return f"parallelism {self.desired} would be better than {self.parallelism}: {self.reason}"
        if self.is_advice:
            return f"parallelism {self.parallelism} is right: {self.reason}"
        return f"the job runs at parallelism {self.parallelism}, of {self.min} to {self.max}: {self.reason}"


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The complete status of a job.

    For example:

        status = env.execute()
        for vertex in status.vertices:
            print(vertex.name, [operator.rows_out for operator in vertex.operators])
    """

    job_id: str
    """The id of this start of the job."""
    name: str
    state: str
    """The state: created, deploying, running, restarting, rescaling, moving (off slots that have to leave), stopping,
    finished, stopped, or failed.

    In records of jobs it may also be lost: the driver has disappeared without reporting how the job ended.
    """
    attempt: int
    """The number of the current deployment of its tasks, which grows with every restart."""
    started_ms: int
    """When the job was started, in milliseconds since 1970."""
    now_ms: int
    """When this status was made, in milliseconds since 1970."""
    slots: int
    """The number of slots that the job has."""
    slots_needed: int
    """The number of slots that it needs."""
    vertices: tuple[VertexStatus, ...]
    edges: tuple[tuple[int, int, str], ...]
    """For each edge, the source vertex, the target vertex and the partitioning."""
    checkpoints_completed: int
    checkpoints_failed: int
    last_checkpoint: CheckpointStatus | None
    checkpoints: tuple[CheckpointStatus, ...]
    """The most recent checkpoints, newest first."""
    failures: tuple[FailureStatus, ...]
    """The most recent failures, newest first."""
    restarts: int
    """How often its tasks were deployed again after a failure."""
    restored_from: str | None
    """The path of the checkpoint or savepoint from which the tasks were last deployed; None if it was none."""
    had_finished: bool = False
    """Whether the job had finished in the checkpoint from which it was started: nothing runs."""
    checkpoint_dir: str | None
    tls: str = "off"
    """Whether the connections between driver, slots and commands are encrypted: off, on (with a certificate of this
    start of the job), or the directory of the certificate. They are authenticated in any case.
    """
    slot_memory_bytes: tuple[int, ...] = ()
    """The memory that each slot's process uses."""
    slot_memory_limit_bytes: tuple[int, ...] = ()
    """The memory limit of each slot's process; processes of one container share its limit. 0 if unknown."""
    slot_state_memory_bytes: tuple[int, ...] = ()
    """The state in columns that each slot holds in memory."""
    slot_state_disk_bytes: tuple[int, ...] = ()
    """The state in columns that lies on each slot's local disk."""
    slot_pids: tuple[int, ...] = ()
    """The process id of each slot."""
    slot_hosts: tuple[str, ...] = ()
    """The address of each slot's machine, as other slots reach it."""
    warnings: tuple[str, ...] = ()
    """Problems that do not keep the job from running, newest last."""
    waiting: tuple[WaitStatus, ...] = ()
    """What has been waited for noticeably long, oldest first."""
    bottleneck: BottleneckStatus | None = None
    state_growth: tuple[StateSize, ...] = ()
    """Up to 65 completed checkpoints from the job's beginning to the newest one, oldest first."""
    flows: tuple[FlowStatus, ...] = ()
    """The flow on each of `edges`, in their order."""
    autoscale: AutoscaleStatus | None = None
    """How the job judges its parallelism; None without `autoscale=`."""

    @property
    def has_ended(self) -> bool:
        """Whether the job is finished, stopped or failed."""
        return self.state in ("finished", "stopped", "failed")

    def shortened(self) -> JobStatus:
        """Return the status with long tracebacks shortened, since records and pages are bounded."""
        return msgspec.structs.replace(self, failures=tuple(map(_shortened, self.failures)))

    @property
    def rows_read(self) -> int:
        """The rows emitted by all sources; rows that were read again after a failure count again."""
        fed = {target for _, target, _ in self.edges}
        return sum(
            vertex.operators[0].rows_out for vertex in self.vertices if vertex.operators and vertex.id not in fed
        )

    def __repr__(self) -> str:
        """Summarise the status for a shell or notebook; each part is an attribute."""
        failed = f"; last failure: {self.failures[0].summary}" if self.failures else ""
        return (
            f"<JobStatus of {self.name!r} {self.job_id}: {self.state}, rows_read={self.rows_read}, "
            f"checkpoints_completed={self.checkpoints_completed}, restarts={self.restarts}{failed}>"
        )
