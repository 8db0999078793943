"""The events and instructions of a coordinator: its whole interface to the outside.

The shell around a coordinator (`shell`) feeds it events one at a time, until it has ended, and carries out the
instructions of each step in order before the next event. The result of an instruction comes back later, as another
event. Nothing else passes between the coordinator and its surroundings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from midstream.engine.core.config import JobConfig
from midstream.engine.core.errors import MidstreamError
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.protocol.job_status import JobStatus
from midstream.engine.protocol.messages import ClientRequest, FromSlot, JobModules, Register, Reply, ToSlot

EndState: TypeAlias = Literal["finished", "stopped", "failed"]
NewerOutput: TypeAlias = Literal["rollback", "keep"]

NO_STORAGE: Final = "job has no checkpoint_dir: pass checkpoint_dir=…"
"""Why a request that needs checkpoints is refused."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Everything that is known about a job before it runs."""

    job_id: str
    """The id of this start of the program; two starts never share a file or a port's secret."""
    graph: JobGraph
    graph_bytes: bytes
    """The pickled `graph`, as slots receive it."""
    config: JobConfig
    restore: str | None = None
    """The checkpoint from which to resume: "latest", an id ("17") or a path. None: begin at the beginning."""
    allow_dropped_state: bool = False
    """Whether state of operators that the graph no longer has may be dropped."""
    newer_output: NewerOutput | None = None
    """What happens to output that is newer than the checkpoint to restore. None: the start is refused if there is any.
    """
    fresh: bool = False
    """Whether to begin at the beginning although there are completed checkpoints."""
    resume: bool = False
    """With `restore` "latest": whether the last start is repeated if it has completed no checkpoint, and began at the
    beginning or at a checkpoint older than the newest. False: this start is refused in that case.
    """
    modules: JobModules = field(default=JobModules(), repr=False)
    """The modules that slots import. They stay those of the program's start for as long as the job runs."""
    rescaled: Callable[[int], JobPlan] | None = field(default=None, compare=False, repr=False)
    """Returns the plan of the same job at another parallelism. It runs on the I/O pool, and raises MidstreamError if
    there is no such plan. None: the job cannot be rescaled while it runs.
    """

    @property
    def slots_max(self) -> int:
        """The most slots that the job may need, at any parallelism that it chooses by itself."""
        bounds = self.config.autoscale
        return self.graph.slots if bounds is None or bounds.is_advice else max(self.graph.slots, bounds.max)


# ---- events ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The first event, which comes once: the job starts."""


@dataclass(frozen=True, slots=True)
class SlotConnected:
    """A slot has authenticated itself and registered.

    `slot` is the number of the connection, from 0, which is never used again. It is the slot's id everywhere; the
    slot receives it with the answer `Welcome`.
    """

    slot: int
    register: Register


@dataclass(frozen=True, slots=True)
class SlotMessage:
    """A message of a connected slot has arrived, in the order in which the slot sent it. It is never a `Register`."""

    slot: int
    message: FromSlot


@dataclass(frozen=True, slots=True)
class SlotLost:
    """The connection is closed, or no heartbeat came in time. Heartbeats are checked by the connections, not here."""

    slot: int
    reason: str
    crash: str = ""
    """How its process has ended, if it crashed: the same crash may happen each time. Empty: an outage, or unknown."""
    last_lines: str = ""
    """The last lines that its tasks have printed and logged."""


@dataclass(frozen=True, slots=True)
class SlotLeaving:
    """The executor or host of the slot is going to end, and takes no other slot. The slot works until `SlotLost`."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class SlotRequestFailed:
    """`RequestSlot(request)` will not lead to a slot: its process has ended, or has never begun."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class SlotsGone:
    """No slot is available any more, and the present ones end, because what they run on (a Spark session) has ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class ClientRequested:
    """A client has sent a request. Each request gets exactly one `ReplyTo`, with the same `client`."""

    client: int
    request: ClientRequest


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The job must end now, without a checkpoint (Ctrl-C, or the program exits). What has been committed stays."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer that was set has fired. A timer that fires although it was just cancelled is ignored."""

    token: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """`seconds` have passed since the last such event, on a monotonic clock. It comes about once a second, from the
    start of the job to its end.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class IoDone:
    """`RunIo(token)` has returned or raised."""

    token: str
    outcome: Done[object] | Failed


CoordinatorEvent: TypeAlias = (
    Started
    | SlotConnected
    | SlotMessage
    | SlotLost
    | SlotLeaving
    | SlotRequestFailed
    | SlotsGone
    | ClientRequested
    | CancelRequested
    | TimerFired
    | TimePassed
    | IoDone
)

# ---- instructions ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Caused:
    cause: int = field(default=0, compare=False, kw_only=True)
    """The number of the event that led to the instruction (the first event is 1), so that a trace reads as cause and
    effect. It does not take part in comparisons.
    """


@dataclass(frozen=True, slots=True)
class Send(_Caused):
    """Send a message to a slot, after everything sent to it before. If the slot is gone, drop the message."""

    slot: int
    message: ToSlot


@dataclass(frozen=True, slots=True)
class RequestSlot(_Caused):
    """Start one more slot, which registers with `request`. If that fails, `SlotRequestFailed` follows."""

    request: str


@dataclass(frozen=True, slots=True)
class CloseSlot(_Caused):
    """Flush what was sent to the slot, then close its connection. No `SlotLost` follows for it."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetTimer(_Caused):
    """Feed `TimerFired(token)` once, in `delay_s` seconds. Tokens are never used twice."""

    token: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class CancelTimer(_Caused):
    """The timer need not fire. It may have fired already."""

    token: str


@dataclass(frozen=True, slots=True)
class RunIo(_Caused):
    """Run `work` on the I/O pool, then feed `IoDone(token)`. Tokens are never used twice.

    Several may run together, in any order: where order matters, the coordinator waits. `work` does storage I/O or calls
    a user's source or committer, and may raise any exception.
    """

    token: str
    work: Callable[[], object]


@dataclass(frozen=True, slots=True)
class ReplyTo(_Caused):
    client: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class NotifyUser(_Caused):
    """Show a text to the user immediately: a failure, and the restart that follows it."""

    text: str


@dataclass(frozen=True, slots=True)
class JobEnded(_Caused):
    """The job has ended: slots are released, and I/O is over. This is the last instruction of all.

    `error` is set if the state is `failed`; it is ready to be raised to the user, and its text contains the traceback
    of the user's function if there is one.
    """

    state: EndState
    error: MidstreamError | None
    status: JobStatus
    checkpoint: str | None = None
    """The path of the checkpoint or savepoint with which a stop ended the job; None otherwise."""


Instruction: TypeAlias = (
    Send | RequestSlot | CloseSlot | SetTimer | CancelTimer | RunIo | ReplyTo | NotifyUser | JobEnded
)
