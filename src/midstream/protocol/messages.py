"""Control messages, schema-checked on arrival. One connection per slot, FIFO both ways.

Order matters: whatever the coordinator sends to a slot before `TriggerCheckpoint` (splits, above
all) is in that checkpoint, and whatever it sends afterwards is not.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from midstream.core.elements import MIN_WATERMARK_US
from midstream.core.ids import TaskId
from midstream.protocol.job_status import JobStatus
from midstream.protocol.live_rows import LiveRows
from midstream.protocol.task_metrics import TaskMetrics


class ChunkHandle(msgspec.Struct, frozen=True, gc=False):
    """Where an immutable chunk of state lies: `length` bytes at `offset` of `file` in the checkpoint storage, or here."""

    id: str
    file: str
    offset: int
    length: int
    checksum: int
    """xxh3_64 of those bytes."""
    rows: int
    key_group_min: int = -1
    key_group_max: int = -1
    inline: bytes = b""
    """The bytes themselves, of a small chunk (see `checkpoint.extents`); then `file` is empty."""


class PartHandle(msgspec.Struct, frozen=True):
    """A part of operator state: the rows of `chunks`, in order.

    In a restore with split redistribution several tasks share the chunks: this one owns the rows
    `index`, `index + stride`, … counted over all chunks together (see `checkpoint.state_files`).
    """

    name: str
    redistribute: str
    chunks: tuple[ChunkHandle, ...]
    index: int = 0
    stride: int = 1


class EarlierCommittables(msgspec.Struct, frozen=True):
    """What was prepared for checkpoint `checkpoint_id`, of which the task does not know yet that it completed."""

    checkpoint_id: int
    committables: tuple[bytes, ...]


class OperatorSnapshot(msgspec.Struct, frozen=True):
    """What one operator of one subtask put into a checkpoint."""

    uid: str
    parts: tuple[PartHandle, ...] = ()
    committables: tuple[bytes, ...] = ()
    earlier: tuple[EarlierCommittables, ...] = ()
    """In an acknowledgement: the committables of older checkpoints that were not reported completed.

    Rows prepared for a checkpoint that failed are not written again while the job runs on, so the
    task reports them with each later checkpoint until one that held them completes. The
    coordinator knows which of those had completed after all, and drops them.
    """
    watermark_in_us: int = MIN_WATERMARK_US
    """The last one offered to the operator. It may still be firing for it."""
    watermark_out_us: int = MIN_WATERMARK_US
    """The last one that left it."""


class Segment(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Some whole batches of one channel: `length` bytes at `offset` of `file` in the checkpoint storage, or here."""

    file: str
    offset: int
    length: int
    checksum: int
    """xxh3_64 of those bytes."""
    batches: int
    rows: int
    inline: bytes = b""
    """The bytes themselves, if they are few (see `checkpoint.extents`); then `file` is empty."""


class ChannelState(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Batches in flight from subtask `producer` to subtask `consumer` over `edge`, oldest first.

    The input part (`is_output` false) lay with the consumer, and comes before what lay with its
    producers. The first `skip` batches are not part of it any more; nor are rows of other key groups
    than `key_groups` (first, and one behind the last), if that is given (see `checkpoint.references`).
    There may be 130,000 of them, so none is larger than it must be or known to the garbage collector.
    """

    edge: int
    producer: int
    consumer: int
    is_output: bool
    segments: tuple[Segment, ...]
    skip: int = 0
    key_groups: tuple[int, int] | None = None
    ahead: tuple[tuple[int, int, int], ...] = ()
    """Of these `key_groups` (first, and one behind the last, in order) more batches are gone than `skip`: so many."""
    number: int | None = None
    """Since it was dealt out, which of those on this edge it is: with the same number other consumers have their key
    groups of the same batches. None if it has just been stored: nobody else has it."""


class Peer(msgspec.Struct, frozen=True):
    slot: int
    host: str
    port: int


# ---- coordinator to slot ---------------------------------------------------


class Deploy(msgspec.Struct, frozen=True, tag="deploy"):
    """Build these tasks (state restored, nothing running yet), then answer `Deployed`.

    `graph` is the pickled JobGraph; empty: the one that the slot was sent last, in a `Deploy` or `CommitSinks`. It may be large,
    and an attempt begins on the slots of the one before. `slots[i]` is the slot id that runs subtask i of every vertex.
    `finished`: those of its tasks that had finished in the checkpoint to restore, which run nothing.
    """

    job_id: str
    attempt: int
    config: bytes
    """JobConfig, msgpack."""
    graph: bytes
    slots: tuple[int, ...]
    tasks: tuple[TaskId, ...]
    restore: bytes = b""
    """`Restored`, msgpack: it may be large, so it is encoded and decoded on I/O threads. Empty: there is nothing."""
    finished: tuple[TaskId, ...] = ()
    checkpoint_root: str | None = None
    """URL of the checkpoint storage; None when the job has none."""
    epoch: int = 0
    """Of the coordinator; with `attempt` it is part of the name of every state file (`checkpoint.state_files.state_file`)."""


class Restored(msgspec.Struct, frozen=True):
    """What the tasks of one slot take over from a checkpoint."""

    tasks: tuple[tuple[TaskId, tuple[OperatorSnapshot, ...]], ...] = ()
    """The state of each."""
    channels: tuple[tuple[TaskId, tuple[ChannelState, ...]], ...] = ()
    """What was in flight to each, by its edges as they are now, in order."""


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
    """See `core.elements.CheckpointBarrier`."""
    holds: bool = False
    """Sources emit nothing behind it, unless it is aborted: the job stops with it, or goes on from it elsewhere."""
    completed_id: int = 0
    """See `core.elements.CheckpointBarrier`."""


class CheckpointCompleted(msgspec.Struct, frozen=True, tag="completed"):
    attempt: int
    checkpoint_id: int


class CheckpointAborted(msgspec.Struct, frozen=True, tag="aborted"):
    attempt: int
    checkpoint_id: int


class ReadOn(msgspec.Struct, frozen=True, tag="read_on"):
    """Checkpoint `checkpoint_id`, behind which the sources hold still, has completed, but the tasks run on: the sources read on."""

    attempt: int
    checkpoint_id: int


class AssignSplit(msgspec.Struct, frozen=True, tag="assign"):
    """`split` is an encoded operators.source.Split.

    `is_last`: of those that were found with it, only such as follow them all are still to be handed out.
    """

    attempt: int
    task: TaskId
    split: bytes
    is_last: bool = True


class SplitsAssigned(msgspec.Struct, frozen=True, tag="splits_assigned"):
    """So it is now, whoever got the last one: event time need not wait for splits that nobody has."""

    attempt: int
    task: TaskId


class NoMoreSplits(msgspec.Struct, frozen=True, tag="no_more_splits"):
    attempt: int
    task: TaskId


class StopSources(msgspec.Struct, frozen=True, tag="stop_sources"):
    """End every source as if its input had ended here (stop with drain)."""

    attempt: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Drop every task of this attempt at once, then answer `Cancelled`."""

    attempt: int


class CommitSinks(msgspec.Struct, frozen=True, tag="commit_sinks"):
    """The sinks whose commits the slot may be asked for. Sent once, before the first `Commit`."""

    job_id: str
    graph: bytes
    """The pickled JobGraph: they are in it. Empty: see `Deploy`."""
    checkpoint_root: str | None
    """URL of the checkpoint storage; None when the job has none."""
    epoch: int
    """The coordinator's: once another one has taken over nothing more is committed. 0 without a storage."""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Commit what a sink prepared for a checkpoint and goes one of its lanes, then answer `CommitDone` or `CommitFailed`.

    The next one of the lane comes after that answer. It may come while no task is deployed.
    """

    request: int
    """Named by the answer. No other one of the job has it."""
    uid: str
    lane: int
    checkpoint_id: int
    committables: tuple[bytes, ...]
    aborts: bool = False
    """Clean them up instead: no checkpoint holds them, or ever will."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The slot is no longer needed: cancel what runs and end."""


class JobModules(msgspec.Struct, frozen=True):
    """What a slot needs besides its midstream to unpickle the job and to run its functions."""

    archive: bytes = b""
    """A zip whose root belongs on the import path; empty: nothing."""
    packages: tuple[tuple[str, str], ...] = ()
    """Installed modules that unpickling imports: name, and what the driver has, such as "pillow 11.0"."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to `Register`: who you are."""

    slot: int
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    modules: JobModules = JobModules()


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Says that the driver lives."""


ToSlot: TypeAlias = (
    Welcome
    | Deploy
    | Start
    | TriggerCheckpoint
    | CheckpointCompleted
    | CheckpointAborted
    | ReadOn
    | AssignSplit
    | SplitsAssigned
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
    """Where peers reach this slot's data port."""
    port: int
    pid: int
    python: str
    """major.minor of its interpreter: user functions only unpickle on the same one."""
    request: str
    """Which of the driver's requests for a slot this answers."""


SLOT_WAITS_MAX: Final = 20
WAIT_CHARS_MAX: Final = 500


class SlotWait(msgspec.Struct, frozen=True):
    """Something outside of the job, such as brokers that do not answer."""

    what: Annotated[str, msgspec.Meta(max_length=WAIT_CHARS_MAX)]
    """As behind "waiting for"."""
    for_ms: int


class SlotStatus(msgspec.Struct, frozen=True, tag="slot_status"):
    """A heartbeat with what there is to show."""

    attempt: int
    tasks: tuple[TaskMetrics, ...]
    memory_bytes: int = 0
    """Resident memory of the slot's process; 0 where unknown."""
    memory_limit_bytes: int = 0
    """What the process can have at most, see `runtime.memory`; 0 where unknown."""
    waits: Annotated[tuple[SlotWait, ...], msgspec.Meta(max_length=SLOT_WAITS_MAX)] = ()
    """What the process waits for outside of the job, the longest first."""


class InCall(msgspec.Struct, frozen=True, tag="in_call"):
    """A heartbeat in place of `SlotStatus`: the slot's loop has been inside one call for so long.

    Sent by another thread of the slot, so that a function that takes its time costs no slot its life.
    """

    operator: str
    """Whose call it is, with the subtask, as people know it."""
    for_ms: int
    where: str
    """The innermost line of the user's that is being run: file, line, function. Empty if there is none."""


class Deployed(msgspec.Struct, frozen=True, tag="deployed"):
    attempt: int


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    attempt: int


class TaskRunning(msgspec.Struct, frozen=True, tag="running"):
    attempt: int
    task: TaskId


class TaskEndOfData(msgspec.Struct, frozen=True, tag="end_of_data_reached"):
    """All its data is processed; it waits for the checkpoint that makes that final."""

    attempt: int
    task: TaskId


class TaskFinished(msgspec.Struct, frozen=True, tag="finished"):
    """`committables` per operator uid: only when the job has no checkpoints to carry them."""

    attempt: int
    task: TaskId
    committables: tuple[tuple[str, tuple[bytes, ...]], ...] = ()


class TaskFailed(msgspec.Struct, frozen=True, tag="failed"):
    """`summary` is one line with the operator's name; `details` the traceback, user frames first.

    `fatal`: restarting cannot help (a schema or configuration error). `symptom`: the cause is
    elsewhere, and most likely somebody is about to report it (the connection to a peer is gone). `same`:
    equal whenever the same code fails the same way; empty when the next time may be otherwise.
    """

    attempt: int
    task: TaskId
    summary: str
    details: str
    fatal: bool = False
    symptom: bool = False
    same: str = ""


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
    """New files written for this checkpoint by this task, to be deleted if it fails."""
    state_bytes: int
    alignment_ms: float = 0.0
    finished: bool = False
    """The task had reached the end of its data when it took the snapshot."""
    channels: tuple[ChannelState, ...] = ()
    """What was in flight to and from the task, and is its own to store."""
    metrics: TaskMetrics | None = None
    """As of now. A job that stops with this checkpoint may have no heartbeat after it."""
    snapshot_ms: float = 0.0
    """How long the task did nothing else, to take the snapshot."""
    storing_ms: float = 0.0
    """From there until all of it was stored, what was in flight as well."""


class CheckpointDecline(msgspec.Struct, frozen=True, tag="decline"):
    """`counts`: whether it counts against tolerable failures."""

    attempt: int
    checkpoint_id: int
    task: TaskId
    reason: str
    counts: bool
    files: tuple[str, ...] = ()
    """Files that the task had written for it, to be deleted."""


class CommitDone(msgspec.Struct, frozen=True, tag="commit_done"):
    request: int


FAILURE_SUMMARY_CHARS_MAX: Final = 20_000
FAILURE_DETAILS_CHARS_MAX: Final = 200_000


class CommitFailed(msgspec.Struct, frozen=True, tag="commit_failed"):
    """`summary`, `details`, `fatal` and `same`: see `TaskFailed`."""

    request: int
    summary: Annotated[str, msgspec.Meta(max_length=FAILURE_SUMMARY_CHARS_MAX)]
    details: Annotated[str, msgspec.Meta(max_length=FAILURE_DETAILS_CHARS_MAX)]
    fatal: bool = False
    same: Annotated[str, msgspec.Meta(max_length=FAILURE_SUMMARY_CHARS_MAX)] = ""
    stopped: bool = False
    """The attempt was over before the commit was: it was told to stop, and says nothing about the next try."""


class RequestSplit(msgspec.Struct, frozen=True, tag="request_split"):
    attempt: int
    task: TaskId


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
)

# ---- slot to driver, and not to its coordinator ----

LOG_LINE_CHARS_MAX: Final = 4096
LOG_NAME_CHARS_MAX: Final = 256
LOG_LINES_MAX: Final = 1024
"""In one message."""

_LogName: TypeAlias = Annotated[str, msgspec.Meta(max_length=LOG_NAME_CHARS_MAX)]


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What user code in a slot has printed or logged."""

    at_ms: int
    text: Annotated[str, msgspec.Meta(max_length=LOG_LINE_CHARS_MAX)]
    logger: _LogName
    """Its name; `stdout` or `stderr` of what was printed."""
    level: int = 0
    """As `logging` counts; 0 of what was printed."""
    operator: _LogName = ""
    """Name of the operator that was at work; empty where that is not known, as on threads of user code."""
    uid: _LogName = ""
    subtask: int = -1


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """`dropped`: lines before these that there were too many of."""

    lines: Annotated[tuple[LogLine, ...], msgspec.Meta(max_length=LOG_LINES_MAX)]
    dropped: int = 0


# ---- command line to coordinator -------------------------------------------


class GetStatus(msgspec.Struct, frozen=True, tag="get_status"):
    pass


class DoCheckpoint(msgspec.Struct, frozen=True, tag="do_checkpoint"):
    pass


class DoSavepoint(msgspec.Struct, frozen=True, tag="do_savepoint"):
    """`place`: path or URL of the directory to make; None: one below the checkpoint directory."""

    place: str | None = None


class DoStop(msgspec.Struct, frozen=True, tag="do_stop"):
    """`drain`: end the sources and let everything flow out; else stop at a checkpoint, to go on from it.

    `savepoint`: the place of a savepoint of that checkpoint, without which the job does not stop.
    """

    drain: bool = False
    savepoint: str | None = None


class DoRescale(msgspec.Struct, frozen=True, tag="do_rescale"):
    """Go on at another parallelism, of the operators that do not say their own, from a checkpoint made for it."""

    parallelism: int


ClientRequest: TypeAlias = GetStatus | DoCheckpoint | DoSavepoint | DoStop | DoRescale


class GetLogs(msgspec.Struct, frozen=True, tag="get_logs"):
    """What the slots have printed and logged behind entry `after`: as many as fit into an answer. For the driver."""

    after: int = -1


class LogEntry(msgspec.Struct, frozen=True, gc=False):
    number: int
    """From 0, of all slots together. Where some are missing, there were too many to keep."""
    slot: int
    line: LogLine


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """`error` is empty when it went well.

    A checkpoint and a savepoint answer when they have completed, a stop when the job has ended, a rescale when
    it runs again.
    """

    error: str = ""
    status: JobStatus | None = None
    checkpoint: str | None = None
    """Path of the checkpoint or savepoint made, for DoCheckpoint, DoSavepoint, DoStop and DoRescale (None when it
    was at that parallelism)."""
    logs: tuple[LogEntry, ...] = ()
    rows: LiveRows | None = None
    """For GetRows."""
