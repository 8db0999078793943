"""Control messages, schema-checked on arrival. One connection per slot, FIFO both ways.

Order matters: messages to a slot before `TriggerCheckpoint` (splits, above all) are in that checkpoint, later ones are
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, TypeAlias

import msgspec

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.ids import TaskId
from midstream.engine.protocol.job_status import JobStatus
from midstream.engine.protocol.live_rows import LiveRows
from midstream.engine.protocol.task_metrics import TaskMetrics
from midstream.engine.state.state_parts import StoredForm


class ChunkHandle(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The location of an immutable chunk of state: `length` bytes at `offset` of `file` in the checkpoint storage, or
    inline.
    """

    id: str
    file: str
    offset: int
    length: int
    checksum: int
    """The xxh3_64 of those bytes."""
    rows: int
    key_group_min: int = -1
    key_group_max: int = -1
    inline: bytes = b""
    """The bytes themselves, for a small chunk (see `engine.checkpoint.extents`); then `file` is empty."""
    removed: tuple[ChunkHandle, ...] = ()
    """Deletion vectors: chunks with the positions of those of the rows that have been removed since they were stored."""

    @property
    def live_rows(self) -> int:
        return self.rows - sum(vector.rows for vector in self.removed)

    @property
    def stored_bytes(self) -> int:
        return self.length + sum(vector.length for vector in self.removed)


class PartHandle(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of operator state: the rows of `chunks`, in order.

    In a restore with split redistribution several tasks share the chunks: this one owns the rows
    `index`, `index + stride`, … counted over all chunks together (see `engine.checkpoint.state_files`).
    """

    name: str
    redistribute: str
    chunks: tuple[ChunkHandle, ...]
    index: int = 0
    stride: int = 1
    stored: StoredForm | None = None
    """In a restore: how the state was declared, if it has to be converted to what is declared now."""

    @property
    def extents(self) -> Iterator[ChunkHandle]:
        """All that has bytes in storage: the chunks, each followed by its deletion vectors."""
        for chunk in self.chunks:
            yield chunk
            yield from chunk.removed


class EarlierCommittables(msgspec.Struct, frozen=True):
    """What was prepared for checkpoint `checkpoint_id`, if the task has not been notified of its completion."""

    checkpoint_id: int
    committables: tuple[bytes, ...]


class OperatorSnapshot(msgspec.Struct, frozen=True):
    """The contribution of one operator of one subtask to a checkpoint."""

    uid: str
    parts: tuple[PartHandle, ...] = ()
    committables: tuple[bytes, ...] = ()
    earlier: tuple[EarlierCommittables, ...] = ()
    """In an acknowledgement: the committables of older checkpoints that were not reported as completed.

    Rows prepared for a failed checkpoint are not written again while the job runs on, so the task reports them with
    each later checkpoint until one that holds them completes. The coordinator drops those whose checkpoints had
    completed after all.
    """
    watermark_in_us: int = MIN_WATERMARK_US
    """The last watermark passed to the operator, which may still be firing for it."""
    watermark_out_us: int = MIN_WATERMARK_US
    """The last watermark that the operator has emitted."""


class Segment(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Some whole batches of one channel: `length` bytes at `offset` of `file` in the checkpoint storage, or inline."""

    file: str
    offset: int
    length: int
    checksum: int
    """The xxh3_64 of those bytes."""
    batches: int
    rows: int
    inline: bytes = b""
    """The bytes themselves, if they are few (see `engine.checkpoint.extents`); then `file` is empty."""
    combined: int = 0
    """How many of the batches were combined before they were sent."""


class ChannelState(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Batches in flight from subtask `producer` to subtask `consumer` over `edge`, oldest first.

    The input part (`is_output` false) was held by the consumer, and precedes what its producers held. The first `skip`
    batches are no longer part of it, nor are rows of other key groups than `key_groups` (the first, and one past the
    last), if that is given (see `engine.checkpoint.channel_state_references`). There may be 130,000 of these objects, so they
    are as small as possible and not tracked by the garbage collector.
    """

    edge: int
    producer: int
    consumer: int
    is_output: bool
    segments: tuple[Segment, ...]
    skip: int = 0
    key_groups: tuple[int, int] | None = None
    ahead: tuple[tuple[int, int, int], ...] = ()
    """Ranges of `key_groups` (the first, and one past the last, in order) of which more batches than `skip` have been
    consumed, and how many.
    """
    number: int | None = None
    """Identifies, after redistribution, what was split from one state of this edge.

    Other consumers have their key groups of the same batches under the same number. None if it has just been stored,
    and is not shared.
    """


class Peer(msgspec.Struct, frozen=True):
    slot: int
    host: str
    port: int


# ---- coordinator to slot ---------------------------------------------------


class Deploy(msgspec.Struct, frozen=True, tag="deploy"):
    """Build these tasks (state restored, nothing running yet), then answer `Deployed`.

    `graph` is the pickled JobGraph; if empty, it is the last one sent to the slot, in a `Deploy` or `CommitSinks`: it
    may be large, and attempts reuse slots. `slots[i]` is the slot id that runs subtask i of every vertex. `finished`:
    the tasks of the slot that had finished in the checkpoint to restore; they run nothing.
    """

    job_id: str
    attempt: int
    config: bytes
    """The JobConfig in msgpack."""
    graph: bytes
    slots: tuple[int, ...]
    tasks: tuple[TaskId, ...]
    restore: bytes = b""
    """A `Restored` in msgpack, which may be large, so it is encoded and decoded on I/O threads. Empty: nothing to
    restore.
    """
    finished: tuple[TaskId, ...] = ()
    checkpoint_root: str | None = None
    """The URL of the checkpoint storage; None if the job has none."""
    epoch: int = 0
    """The epoch of the coordinator; with `attempt` it is part of each state file's name
    (`engine.checkpoint.state_files.state_file`).
    """


class Restored(msgspec.Struct, frozen=True):
    """What the tasks of one slot restore from a checkpoint."""

    tasks: tuple[tuple[TaskId, tuple[OperatorSnapshot, ...]], ...] = ()
    """The state of each task."""
    channels: tuple[tuple[TaskId, tuple[ChannelState, ...]], ...] = ()
    """The rows in flight to each task, by its current edges, in order."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """All slots are deployed: connect to the peers and run."""

    attempt: int
    peers: tuple[Peer, ...]


class TriggerCheckpoint(msgspec.Struct, frozen=True, tag="trigger"):
    attempt: int
    checkpoint_id: int
    created_ms: int
    tasks: tuple[TaskId, ...]
    timeout_ms: int | None = None
    """See `engine.core.elements.CheckpointBarrier`."""
    pauses_sources: bool = False
    """Sources emit nothing after the barrier, unless the checkpoint is aborted: the job stops with it, or resumes
    elsewhere.
    """
    completed_id: int = 0
    """See `engine.core.elements.CheckpointBarrier`."""


class CheckpointCompleted(msgspec.Struct, frozen=True, tag="completed"):
    attempt: int
    checkpoint_id: int


class CheckpointAborted(msgspec.Struct, frozen=True, tag="aborted"):
    attempt: int
    checkpoint_id: int


class ResumeSources(msgspec.Struct, frozen=True, tag="resume_sources"):
    """Checkpoint `checkpoint_id`, after which the sources are paused, has completed, but the tasks continue: resume the
    sources.
    """

    attempt: int
    checkpoint_id: int


class AssignSplit(msgspec.Struct, frozen=True, tag="assign"):
    """Assigns `split`, an encoded engine.operators.source_api.Split.

    `waiting_from_us`: the highest watermark for which no row of the splits that are still unassigned is late; the highest of
    all if only ones that follow all others are.
    `assigned`: how many splits of the source have been assigned in this attempt, to any subtask, including this one.
    """

    attempt: int
    task: TaskId
    split: bytes
    waiting_from_us: int = MAX_WATERMARK_US
    assigned: int = 0


class SplitsAssigned(msgspec.Struct, frozen=True, tag="splits_assigned"):
    """All splits are assigned, to any subtask: event time need not wait for unassigned ones.

    `none_waits`: the answer to the subtask's last request. There is no split for it at present, not even one that
    follows others.
    `assigned`: as in `AssignSplit`. The subtask has been sent those of them that are its own.
    """

    attempt: int
    task: TaskId
    none_waits: bool = False
    assigned: int = 0


class DriftCeiling(msgspec.Struct, frozen=True, tag="drift_ceiling"):
    """How far the splits of a source may be read at present (see `coordinator.placement.source_drift`). It replaces the
    ceiling before it, and may be lower.
    """

    attempt: int
    vertex: int
    ceiling_us: int
    """A split beyond this event time is not read; the highest int64 if all may be."""


class NoMoreSplits(msgspec.Struct, frozen=True, tag="no_more_splits"):
    attempt: int
    task: TaskId


class StopSources(msgspec.Struct, frozen=True, tag="stop_sources"):
    """End every source as if its input had ended now (stop with drain)."""

    attempt: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Drop every task of this attempt immediately, then answer `Cancelled`."""

    attempt: int


class CommitSinks(msgspec.Struct, frozen=True, tag="commit_sinks"):
    """The sinks whose commits may be sent to the slot. Sent once, before the first `Commit`."""

    job_id: str
    graph: bytes
    """The pickled JobGraph, which contains the sinks. Empty: see `Deploy`."""
    checkpoint_root: str | None
    """The URL of the checkpoint storage; None if the job has none."""
    epoch: int
    """The epoch of the coordinator: once a newer one has taken over, nothing more is committed. 0 without a storage."""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Commit what a sink prepared for a checkpoint on one of its lanes, then answer `CommitDone` or `CommitFailed`.

    The lane's next commit follows that answer. It may arrive while no task is deployed.
    """

    request: int
    """The number to which the answer refers, unique within the job."""
    uid: str
    lane: int
    checkpoint_id: int
    committables: tuple[bytes, ...]
    aborts: bool = False
    """Clean them up instead: no checkpoint holds them, or ever will."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The slot is no longer needed: cancel what runs, and end."""


class JobModules(msgspec.Struct, frozen=True):
    """What a slot needs in addition to its midstream to unpickle the job and to run its functions."""

    archive: bytes = b""
    """A zip whose root belongs on the import path; empty: none."""
    packages: tuple[tuple[str, str], ...] = ()
    """Installed modules that unpickling imports: the name, and the driver's version, such as "pillow 11.0"."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to `Register`, with the slot's identity."""

    slot: int
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    modules: JobModules = JobModules()


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Shows the slot that the driver is alive."""


ToSlot: TypeAlias = (
    Welcome
    | Deploy
    | Start
    | TriggerCheckpoint
    | CheckpointCompleted
    | CheckpointAborted
    | ResumeSources
    | AssignSplit
    | SplitsAssigned
    | DriftCeiling
    | NoMoreSplits
    | StopSources
    | Cancel
    | CommitSinks
    | Commit
    | Release
    | Heartbeat
)

# ---- slot to coordinator ---------------------------------------------------


class Register(msgspec.Struct, frozen=True, tag="register"):
    host: str
    """The address at which peers reach this slot's data port."""
    port: int
    pid: int
    python: str
    """The major.minor version of its interpreter: user functions can only be unpickled on the same one."""
    request: str
    """The driver's request for a slot that this answers."""


SLOT_WAITS_MAX: Final = 20
SLOT_WARNINGS_MAX: Final = 20
WAIT_CHARS_MAX: Final = 500
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=WAIT_CHARS_MAX)]


class SlotWait(msgspec.Struct, frozen=True):
    """Something outside of the job for which the slot waits, such as brokers that do not respond."""

    what: _Text
    """The text that completes "waiting for …"."""
    for_ms: int


class SlotStatus(msgspec.Struct, frozen=True, tag="slot_status"):
    """A heartbeat with the slot's current metrics."""

    attempt: int
    tasks: tuple[TaskMetrics, ...]
    memory_bytes: int = 0
    """The resident memory of the slot's process; 0 if unknown."""
    memory_limit_bytes: int = 0
    """The memory limit of the process, see `runtime.process.slot_memory`; 0 if unknown."""
    waits: Annotated[tuple[SlotWait, ...], msgspec.Meta(max_length=SLOT_WAITS_MAX)] = ()
    """The waits of the process for something outside of the job, longest first."""
    warnings: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=SLOT_WARNINGS_MAX)] = ()
    """Conditions of the process that the job's status has to show."""
    state_memory_bytes: int = 0
    """The state in columns that its tasks hold in memory."""
    state_disk_bytes: int = 0
    """The state in columns that lies on its local disk."""


class InCall(msgspec.Struct, frozen=True, tag="in_call"):
    """A heartbeat in place of `SlotStatus`: the slot's loop has been inside one call for a while.

    Sent by another thread of the slot, so that a long call does not make the slot appear dead.
    """

    operator: str
    """The operator whose call it is, with the subtask, as displayed."""
    for_ms: int
    where: str
    """The innermost line of the user's code that is running: file, line, function. Empty if there is none."""


class Deployed(msgspec.Struct, frozen=True, tag="deployed"):
    attempt: int


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    attempt: int


class TaskRunning(msgspec.Struct, frozen=True, tag="running"):
    attempt: int
    task: TaskId


class TaskEndOfData(msgspec.Struct, frozen=True, tag="end_of_data_reached"):
    """The task has processed all its data, and waits for the checkpoint that makes that final."""

    attempt: int
    task: TaskId


class TaskFinished(msgspec.Struct, frozen=True, tag="finished"):
    """The task has finished. `committables` per operator uid: only if the job has no checkpoints to carry them.

    `metrics`: its last ones, since the job may end before the next heartbeat. A task that was deployed as finished has
    none.
    """

    attempt: int
    task: TaskId
    committables: tuple[tuple[str, tuple[bytes, ...]], ...] = ()
    metrics: TaskMetrics | None = None


class TaskFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The task has failed. `summary` is one line with the operator's name; `details` is the traceback, user frames
    first.

    `fatal`: restarting cannot help (a schema or configuration error). `symptom`: the cause is elsewhere, and another
    task will probably report it (the connection to a peer is lost). `same`: equal whenever the same code fails in the
    same way; empty if the next time may differ. `of_one_row`: the summary names the row, and the exception depends on
    its values alone, as far as its type shows: if the same summary occurs again, it will occur each time.
    """

    attempt: int
    task: TaskId
    summary: str
    details: str
    fatal: bool = False
    symptom: bool = False
    same: str = ""
    of_one_row: bool = False


class DeployFailed(msgspec.Struct, frozen=True, tag="deploy_failed"):
    attempt: int
    summary: str
    details: str
    fatal: bool = False
    same: str = ""
    """See `TaskFailed`."""


class CheckpointAck(msgspec.Struct, frozen=True, tag="ack"):
    attempt: int
    checkpoint_id: int
    task: TaskId
    operators: tuple[OperatorSnapshot, ...]
    files: tuple[str, ...]
    """New files written for this checkpoint by this task, to be deleted if the checkpoint fails."""
    state_bytes: int
    alignment_ms: float = 0.0
    finished: bool = False
    """The task had reached the end of its data when it took the snapshot."""
    channels: tuple[ChannelState, ...] = ()
    """The rows in flight to and from the task that it must store."""
    metrics: TaskMetrics | None = None
    """The metrics of a task that has reached the end of its data, or whose job stops or moves with this checkpoint: it
    may send no heartbeat after it. Also the metrics of a task that has dropped something: a task restored from the
    checkpoint does not drop it again, so it must be reported now."""
    snapshot_ms: float = 0.0
    """The time for which the task did nothing but take the snapshot."""
    storing_ms: float = 0.0
    """The time from then until everything was stored, including what was in flight."""


class CheckpointDecline(msgspec.Struct, frozen=True, tag="decline"):
    """The task cannot take part in the checkpoint. `counts`: whether it counts against tolerable failures."""

    attempt: int
    checkpoint_id: int
    task: TaskId
    reason: str
    counts: bool
    files: tuple[str, ...] = ()
    """Files that the task had written for the checkpoint, to be deleted."""


class CommitDone(msgspec.Struct, frozen=True, tag="commit_done"):
    request: int


FAILURE_SUMMARY_CHARS_MAX: Final = 20_000
FAILURE_DETAILS_CHARS_MAX: Final = 200_000


class CommitFailed(msgspec.Struct, frozen=True, tag="commit_failed"):
    """The commit has failed. `summary`, `details`, `fatal` and `same`: see `TaskFailed`."""

    request: int
    summary: Annotated[str, msgspec.Meta(max_length=FAILURE_SUMMARY_CHARS_MAX)]
    details: Annotated[str, msgspec.Meta(max_length=FAILURE_DETAILS_CHARS_MAX)]
    fatal: bool = False
    same: Annotated[str, msgspec.Meta(max_length=FAILURE_SUMMARY_CHARS_MAX)] = ""
    stopped: bool = False
    """The attempt ended before the commit did: it was stopped, which does not mean that the next try will fail."""


class RequestSplit(msgspec.Struct, frozen=True, tag="request_split"):
    attempt: int
    task: TaskId


class SourceProgress(msgspec.Struct, frozen=True, tag="source_progress"):
    """How far the slowest split of a source subtask is whose strategy limits the drift (see `worker.drift_limit`)."""

    attempt: int
    task: TaskId
    lowest_us: int
    """Its event time; the lowest int64 before its first row, the highest one if the subtask waits for the rows of no
    split."""
    splits: int
    """The number of splits that the subtask had been assigned by then, in this attempt."""


FromSlot: TypeAlias = (
    Register
    | SlotStatus
    | InCall
    | Deployed
    | DeployFailed
    | Cancelled
    | TaskRunning
    | TaskEndOfData
    | TaskFinished
    | TaskFailed
    | CheckpointAck
    | CheckpointDecline
    | CommitDone
    | CommitFailed
    | RequestSplit
    | SourceProgress
)

# ---- slot to driver, and not to its coordinator ----

LOG_LINE_CHARS_MAX: Final = 4096
LOG_NAME_CHARS_MAX: Final = 256
LOG_LINES_MAX: Final = 1024
"""The limit on the lines of one message."""

_LogName: TypeAlias = Annotated[str, msgspec.Meta(max_length=LOG_NAME_CHARS_MAX)]


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A line that user code in a slot has printed or logged."""

    at_ms: int
    text: Annotated[str, msgspec.Meta(max_length=LOG_LINE_CHARS_MAX)]
    logger: _LogName
    """The name of the logger; `stdout` or `stderr` for printed lines."""
    level: int = 0
    """The level as in `logging`; 0 for printed lines."""
    operator: _LogName = ""
    """The operator that was running; empty if unknown, as on threads of user code."""
    uid: _LogName = ""
    subtask: int = -1


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """Lines that were printed and logged. `dropped`: the number of earlier lines that exceeded the limit."""

    lines: Annotated[tuple[LogLine, ...], msgspec.Meta(max_length=LOG_LINES_MAX)]
    dropped: int = 0


# ---- command line to coordinator -------------------------------------------


class GetStatus(msgspec.Struct, frozen=True, tag="get_status"):
    pass


class DoCheckpoint(msgspec.Struct, frozen=True, tag="do_checkpoint"):
    pass


class DoSavepoint(msgspec.Struct, frozen=True, tag="do_savepoint"):
    """Make a savepoint. `place`: the path or URL of the directory to create; None: one below the checkpoint
    directory."""

    place: str | None = None


class DoStop(msgspec.Struct, frozen=True, tag="do_stop"):
    """Stop the job.

    `drain`: end the sources and process everything that is in flight; otherwise stop at a checkpoint, from which the
    job can resume. `savepoint`: the directory of a savepoint of that checkpoint; if it cannot be made, the job does not
    stop.
    """

    drain: bool = False
    savepoint: str | None = None


class DoRescale(msgspec.Struct, frozen=True, tag="do_rescale"):
    """Change the parallelism of operators that do not set their own, by resuming from a checkpoint made for it."""

    parallelism: int


ClientRequest: TypeAlias = GetStatus | DoCheckpoint | DoSavepoint | DoStop | DoRescale


class GetLogs(msgspec.Struct, frozen=True, tag="get_logs"):
    """Return what the slots have printed and logged after entry `after`, as much as fits into an answer. For the
    driver.
    """

    after: int = -1


class LogEntry(msgspec.Struct, frozen=True, gc=False):
    number: int
    """The number of the entry, from 0, over all slots. Missing numbers are entries that were dropped."""
    slot: int
    line: LogLine


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to a request. `error` is empty if it succeeded.

    A checkpoint and a savepoint are answered when they have completed, a stop when the job has ended, a rescale when it
    runs again.
    """

    error: str = ""
    status: JobStatus | None = None
    checkpoint: str | None = None
    """The path of the checkpoint or savepoint made, for DoCheckpoint, DoSavepoint, DoStop and DoRescale (None if the
    parallelism was the same already).
    """
    logs: tuple[LogEntry, ...] = ()
    rows: LiveRows | None = None
    """The rows, for GetRows."""
