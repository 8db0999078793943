"""What can happen to a coordinator, and what it can ask for: the whole border between it and the world.

The shell around a coordinator (`shell`) feeds it events one at a time, until it has ended, and
carries out the instructions of each step in order before the next event. What an instruction
leads to comes back as another event, later. Nothing else crosses this border.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from midstream.core.config import JobConfig
from midstream.core.errors import MidstreamError
from midstream.core.seams import Done, Failed
from midstream.graph.job_graph import JobGraph
from midstream.protocol.job_status import JobStatus
from midstream.protocol.messages import ClientRequest, FromSlot, JobModules, Register, Reply, ToSlot

EndState: TypeAlias = Literal["finished", "stopped", "failed"]
NewerOutput: TypeAlias = Literal["take-back", "keep"]

NO_STORAGE: Final = "job has no checkpoint_dir: pass checkpoint_dir=…"
"""Why what needs checkpoints is refused."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Everything that is known about a job before it runs."""

    job_id: str
    """New for every start of the program, so that two runs never share a file or a port's secret."""
    graph: JobGraph
    graph_bytes: bytes
    """`graph` pickled, as slots get it."""
    config: JobConfig
    restore: str | None = None
    """None: from the beginning. "latest", a checkpoint's id ("17") or its path: from there."""
    allow_dropped_state: bool = False
    """Whether state of operators that the graph no longer has may be left behind."""
    newer_output: NewerOutput | None = None
    """What becomes of output that is newer than the checkpoint to restore. None: there must be none."""
    fresh: bool = False
    """From the beginning although there are completed checkpoints."""
    resume: bool = False
    """With `restore` "latest": a start over (`fresh`) that has completed no checkpoint yet is begun again, not refused."""
    modules: JobModules = field(default=JobModules(), repr=False)
    """Imported by slots; those of the program's start, for as long as the job runs."""
    rescaled: Callable[[int], JobPlan] | None = field(default=None, compare=False, repr=False)
    """The same job at another parallelism; runs on the I/O pool. Raises MidstreamError when that cannot be."""


# ---- events ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The first event, once: go."""


@dataclass(frozen=True, slots=True)
class SlotConnected:
    """A slot has authenticated itself and registered.

    `slot` is a number from 0 that is given to each connection and never given again. It is the slot's id everywhere; the answer `Welcome` tells it to the slot.
    """

    slot: int
    register: Register


@dataclass(frozen=True, slots=True)
class SlotMessage:
    """A message of a connected slot, in the order in which the slot sent it. Never a `Register`."""

    slot: int
    message: FromSlot


@dataclass(frozen=True, slots=True)
class SlotLost:
    """The connection is gone or no heartbeat came in time. Heartbeats are the business of the lines."""

    slot: int
    reason: str
    crash: str = ""
    """How its process has ended, if that was of its own doing: it may do so each time. Empty: an outage, or unknown."""
    last_lines: str = ""
    """What its tasks have printed and logged last."""


@dataclass(frozen=True, slots=True)
class SlotLeaving:
    """What the slot runs on is to end, and takes no other slot any more. Until then, `SlotLost`, it works as before."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class SlotRequestFailed:
    """`RequestSlot(request)` will not lead to a slot (any more): its process ended or never began."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class SlotsGone:
    """No slot can be had any more, and those that there were end: what they ran on has ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class ClientAsked:
    """`client` names whom to answer; each question gets exactly one `ReplyTo`."""

    client: int
    request: ClientRequest


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """End the job now, without a checkpoint (Ctrl-C, the program exits). What has been committed stays."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer that was set and not cancelled. One that fires although it was just cancelled is ignored."""

    token: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """So many seconds since the last one, on a clock that nobody sets. Told about once a second from the start to the end."""

    seconds: float


@dataclass(frozen=True, slots=True)
class IoDone:
    """The outcome of `RunIo(token)`, good or bad."""

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
    | ClientAsked
    | CancelRequested
    | TimerFired
    | TimePassed
    | IoDone
)

# ---- instructions ----------------------------------------------------------
# `cause` is the number of the event that led to the instruction (the first event is 1), so that a
# trace reads as cause and effect. It does not take part in comparisons.


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a slot, after everything sent to it before. To a slot that is gone: drop it."""

    slot: int
    message: ToSlot
    cause: int = field(default=0, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class RequestSlot:
    """Start one more slot; it registers with `request`. Failing that: `SlotRequestFailed`."""

    request: str
    cause: int = field(default=0, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class CloseSlot:
    """Flush what was sent to the slot, then close its connection. No `SlotLost` is expected for it."""

    slot: int
    reason: str
    cause: int = field(default=0, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class SetTimer:
    """`TimerFired(token)` once, in `delay_s` seconds. Tokens are never used twice."""

    token: str
    delay_s: float
    cause: int = field(default=0, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """The timer need not fire. It may have fired already."""

    token: str
    cause: int = field(default=0, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class RunIo:
    """Run `work` on the I/O pool, then `IoDone(token)`. Tokens are never used twice.

    Several may run at once, in any order: where order matters the coordinator waits. `work` does
    storage I/O or calls a user's source or committer; it raises whatever it raises.
    """

    token: str
    work: Callable[[], object]
    cause: int = field(default=0, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class ReplyTo:
    client: int
    reply: Reply
    cause: int = field(default=0, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Tell:
    """People are to hear of it now: a failure, and the restart that follows it."""

    text: str
    cause: int = field(default=0, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The last instruction of all: slots are released, I/O is over.

    `error` is set when the state is `failed`; it is ready to be raised to the user, and carries the
    traceback of the user's function in its text where there is one.
    """

    state: EndState
    error: MidstreamError | None
    status: JobStatus
    checkpoint: str | None = None
    """Path of the checkpoint that a stop made; None otherwise."""
    cause: int = field(default=0, compare=False, kw_only=True)


Instruction: TypeAlias = Send | RequestSlot | CloseSlot | SetTimer | CancelTimer | RunIo | ReplyTo | Tell | JobEnded
