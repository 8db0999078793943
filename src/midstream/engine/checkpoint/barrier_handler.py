"""The barrier handler of one task, which chooses when the task's snapshot is taken, and for which channels it waits.

Theory of operation. Rows before barrier n of their channel belong to checkpoint n, rows after it do not. A barrier is
*announced* when it arrives at the channel, and *received* when the task has read everything before it. The snapshot is
taken either

- aligned: when every channel's barrier has been received. A channel is blocked from its barrier until then, so that no
  row after a barrier gets into the snapshot; or
- overtaking: as soon as one barrier is announced. The rows before the barriers of the other channels are not in the
  operators' state then; they are captured from the channels, those already there and those that arrive later, until
  every barrier has been announced. Only channels whose rows can later be given to any subtask can be captured
  (`capturable`). From every other channel, the barrier must have been received, or announced with no row before it
  (`is_clear`). Without the second case, a task that may not emit, and therefore reads nothing, would delay the
  checkpoint.

The choice depends on time: a barrier carries the time after its creation from which it may overtake (`timeout_ms`; 0:
immediately, None: never). Ids only grow. At most one checkpoint is pending, and a newer one aborts it.

A handler dispatches by `BARRIER_TABLE`, which has every pair of state and event that can occur, and the states that
may follow. An event may concern another checkpoint than the pending one: an event about a checkpoint that is OVER
changes nothing; a barrier of a NEWER one ends the pending checkpoint first and is then handled in IDLE. A pair that the
table lacks cannot occur, and raises: a barrier that has overtaken rows is not received a second time, a timer fires
once, writing can only fail for what is being captured, and a task is triggered once.

A channel that has ended, or whose end has arrived, counts as having delivered every later barrier. This machine
identifies channels only by numbers from 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from midstream.engine.core.elements import CheckpointBarrier
from midstream.engine.core.errors import assert_never
from midstream.engine.core.state_machine import Transition, TransitionHistory, TransitionTable, new_history

# ---- events ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BarrierAnnounced:
    """A barrier has arrived at the channel; rows may be waiting before it, unless it `is_clear`."""

    channel: int
    barrier: CheckpointBarrier
    is_clear: bool = False


@dataclass(frozen=True, slots=True)
class BarrierReceived:
    """Everything before a barrier has been read, and the barrier itself."""

    channel: int
    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """Checkpoint `checkpoint_id` is cancelled, by an event from upstream or a message of the coordinator."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class EndAnnounced:
    """No further barrier will arrive in this channel; rows may be waiting before its end, unless it `is_clear`."""

    channel: int
    is_clear: bool = False


@dataclass(frozen=True, slots=True)
class ChannelEnded:
    """Everything in the channel has been read, including its end."""

    channel: int


@dataclass(frozen=True, slots=True)
class TriggerReceived:
    """The coordinator triggers a checkpoint, at a source, or at a task all of whose producers have finished.

    In the second case, the last rows and the ends of the channels may still be on their way. They would not be sent
    again, so the snapshot waits until every channel has ended, or the rows are captured.
    """

    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The barriers of the checkpoint may overtake from now on."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class CaptureFailed:
    """The rows captured for the checkpoint could not be written, so nothing more is captured for it."""

    checkpoint_id: int


BarrierEvent: TypeAlias = (
    BarrierAnnounced
    | BarrierReceived
    | CancelReceived
    | EndAnnounced
    | ChannelEnded
    | TriggerReceived
    | TimedOut
    | CaptureFailed
)

# ---- instructions ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    channel: int


@dataclass(frozen=True, slots=True)
class Resume:
    channels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Forward the barrier, then take the snapshot, before anything else is read.

    `overtaking`: the barrier also overtakes what is queued for the consumers. `capture`: the channels whose rows are to
    be captured until their barriers are announced; `CaptureComplete` follows then. A barrier of these channels is not
    received any more, even if it was already announced.
    """

    barrier: CheckpointBarrier
    overtaking: bool = False
    capture: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CaptureComplete:
    """Every barrier has been announced, so all rows before them have been captured."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class AbortCheckpoint:
    """Forward the cancellation, report it to the coordinator, and drop what was captured."""

    checkpoint_id: int
    reason: str


BarrierInstruction: TypeAlias = Block | Resume | TakeSnapshot | CaptureComplete | AbortCheckpoint


class Alignment(Enum):
    """The states of a handler."""

    IDLE = auto()
    """No checkpoint is pending."""
    ALIGNING = auto()
    """Channels whose barrier has been received are blocked; the others are read up to their barriers."""
    OVERTAKING = auto()
    """Like ALIGNING, but barriers may overtake: only channels that cannot be captured have still to be read up to their
    barriers.
    """
    CAPTURING = auto()
    """The snapshot has been taken; the rows before barriers that have still to be announced are captured."""


class OtherCheckpoint(Enum):
    """The kinds of events that are about another checkpoint than the pending one."""

    OVER = auto()
    """The event is about a checkpoint that was taken, cancelled or abandoned here: it changes nothing."""
    NEWER = auto()
    """The event is a barrier of a newer checkpoint than the pending one. Once the pending one is abandoned, the event
    is handled again, in IDLE.
    """


BarrierKind: TypeAlias = type[BarrierEvent] | OtherCheckpoint


class _Pending:
    __slots__ = ("announced", "barrier", "capturing", "clear", "may_overtake", "received")

    def __init__(self, barrier: CheckpointBarrier) -> None:
        self.barrier = barrier
        self.may_overtake = barrier.timeout_ms == 0
        self.announced: set[int] = set()
        """The channels whose barrier has arrived, received or not."""
        self.clear: set[int] = set()
        """The channels whose barrier had no row before it when it arrived."""
        self.received: set[int] = set()
        """The channels whose barrier has been received. They are blocked, unless the snapshot has been taken."""
        self.capturing = False


class BarrierHandler:
    """The state of one task's alignment. Channels are blocked exactly while they are in `received`, before the
    snapshot.
    """

    def __init__(self, channels: int, capturable: Collection[int] = ()) -> None:
        self._open: set[int] = set(range(channels))
        """The channels whose end has not been read."""
        self._end_announced: set[int] = set()
        """The channels in `_open` whose end has arrived."""
        self._must_align = self._open - set(capturable)
        self._pending: _Pending | None = None
        self._last_id = -1
        """The newest checkpoint that was begun, taken or cancelled here."""
        self._history: TransitionHistory[Alignment] = new_history()

    @property
    def state(self) -> Alignment:
        pending = self._pending
        if pending is None:
            return Alignment.IDLE
        if pending.capturing:
            return Alignment.CAPTURING
        return Alignment.OVERTAKING if pending.may_overtake else Alignment.ALIGNING

    @property
    def pending_id(self) -> int | None:
        """The checkpoint for which the handler is aligning or capturing."""
        return self._pending.barrier.checkpoint_id if self._pending else None

    @property
    def pending(self) -> CheckpointBarrier | None:
        return self._pending.barrier if self._pending else None

    @property
    def priority_channels(self) -> Collection[int]:
        """The channels that have to be read up to their barriers before the pending checkpoint may overtake the
        others."""
        pending = self._pending
        if pending is None or pending.capturing or not pending.may_overtake:
            return ()
        return self._must_align - pending.received - pending.clear

    def handle(self, event: BarrierEvent) -> list[BarrierInstruction]:
        """Process an event. Raises InvariantError, with the last events, if it is not valid in the current state."""
        if isinstance(event, (BarrierReceived, ChannelEnded)):
            self._check_can_be_read(event)
        kind = self._kind_of(event)
        if kind is OtherCheckpoint.NEWER:
            return self._step(kind, event) + self._step(type(event), event)
        return self._step(kind, event)

    def _step(self, kind: BarrierKind, event: BarrierEvent) -> list[BarrierInstruction]:
        before = self.state
        self._history.append((before, event))
        row = BARRIER_TABLE.row(before, kind, self._history)
        out: list[BarrierInstruction] = row.do(self, event)
        if self.state not in row.then:
            BARRIER_TABLE.check(before, kind, self.state, self._history)
        return out

    def _check_can_be_read(self, event: BarrierReceived | ChannelEnded) -> None:
        pending, channel = self._pending, event.channel
        is_blocked = pending is not None and not pending.capturing and channel in pending.received
        if is_blocked or channel not in self._open:
            rule = f"channel {channel} was read while it {'is blocked' if is_blocked else 'has ended'}"
            raise BARRIER_TABLE.broken(rule, [*self._history, (self.state, event)])

    def _kind_of(self, event: BarrierEvent) -> BarrierKind:
        pending_id = self.pending_id
        match event:
            case BarrierAnnounced(channel) if channel not in self._open:
                return OtherCheckpoint.OVER  # it was captured, and the channel's end was read before this event
            case BarrierReceived(_, barrier) | BarrierAnnounced(_, barrier) | TriggerReceived(barrier):
                checkpoint_id = barrier.checkpoint_id
                is_newer = pending_id is not None and checkpoint_id > pending_id
            case CancelReceived(checkpoint_id):
                is_newer = False  # a cancellation also ends the pending checkpoint, whichever it is about
            case TimedOut(checkpoint_id) | CaptureFailed(checkpoint_id):
                return type(event) if checkpoint_id == pending_id else OtherCheckpoint.OVER
            case EndAnnounced() | ChannelEnded():
                return type(event)
            case _:
                assert_never(event)
        if checkpoint_id <= self._last_id and checkpoint_id != pending_id:
            return OtherCheckpoint.OVER
        return OtherCheckpoint.NEWER if is_newer else type(event)

    def _on_announced(self, event: BarrierAnnounced) -> list[BarrierInstruction]:
        pending = self._begun(event.barrier)
        pending.announced.add(event.channel)
        if event.is_clear:
            pending.clear.add(event.channel)
        return self._advance()

    def _on_received(self, event: BarrierReceived) -> list[BarrierInstruction]:
        pending = self._begun(event.barrier)
        pending.announced.add(event.channel)
        pending.received.add(event.channel)
        return self._advance(newly_received=event.channel) or [Block(event.channel)]

    def _begun(self, barrier: CheckpointBarrier) -> _Pending:
        """Return the pending checkpoint, which is that of this barrier, and begins now if none is pending."""
        if self._pending is None:
            self._pending = _Pending(barrier)
            self._last_id = barrier.checkpoint_id
        return self._pending

    def _on_newer(self, event: BarrierAnnounced | BarrierReceived | TriggerReceived) -> list[BarrierInstruction]:
        return self._give_up(f"checkpoint {event.barrier.checkpoint_id} began before it was complete")

    def _on_cancel(self, event: CancelReceived) -> list[BarrierInstruction]:
        checkpoint_id, last_id = event.checkpoint_id, self._last_id
        self._last_id = checkpoint_id
        reason = f"checkpoint {checkpoint_id} was cancelled by the coordinator or a task upstream"
        out = self._give_up(reason)
        return [*out, AbortCheckpoint(checkpoint_id, reason)] if checkpoint_id > last_id else out

    def _on_end_announced(self, event: EndAnnounced) -> list[BarrierInstruction]:
        if event.channel in self._open:
            self._end_announced.add(event.channel)
            if event.is_clear:
                self._must_align.discard(event.channel)
        return self._advance()

    def _on_end(self, event: ChannelEnded) -> list[BarrierInstruction]:
        for channels in (self._open, self._end_announced, self._must_align):
            channels.discard(event.channel)
        return self._advance()

    def _on_trigger(self, event: TriggerReceived) -> list[BarrierInstruction]:
        self._begun(event.barrier)
        return self._advance()

    def _on_timeout(self, _: TimedOut) -> list[BarrierInstruction]:
        assert self._pending is not None
        self._pending.may_overtake = True
        return self._advance()

    def _on_capture_failed(self, _: CaptureFailed) -> list[BarrierInstruction]:
        self._pending = None
        return []

    def _advance(self, newly_received: int | None = None) -> list[BarrierInstruction]:
        """Take the snapshot, or complete it, if its conditions are met. `newly_received` is not blocked yet."""
        pending = self._pending
        if pending is None:
            return []
        barrier = pending.barrier
        if pending.capturing:
            return self._complete_capture(pending)
        blocked = tuple(sorted(pending.received - {newly_received}))
        resume: list[BarrierInstruction] = [Resume(blocked)] if blocked else []
        if pending.received >= self._open:
            self._pending = None
            return [TakeSnapshot(barrier, pending.may_overtake), *resume]
        if pending.may_overtake and self._must_align <= pending.received | pending.clear:
            pending.capturing = True
            snapshot = TakeSnapshot(barrier, True, tuple(sorted(self._open - pending.received)))
            return [snapshot, *resume, *self._complete_capture(pending)]
        return []

    def _complete_capture(self, pending: _Pending) -> list[BarrierInstruction]:
        if self._open - pending.announced - self._end_announced:
            return []
        self._pending = None
        return [CaptureComplete(pending.barrier.checkpoint_id)]

    def _give_up(self, reason: str) -> list[BarrierInstruction]:
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        blocked = () if pending.capturing else tuple(sorted(pending.received))
        return [AbortCheckpoint(pending.barrier.checkpoint_id, reason), *([Resume(blocked)] if blocked else [])]

    def check(self) -> None:
        """Assert that a barrier is missing while a checkpoint is pending, and that only open channels are blocked."""
        pending = self._pending
        assert self._end_announced <= self._open, (self._end_announced, self._open)
        if pending is None:
            return
        if pending.capturing:
            assert self._open - pending.announced - self._end_announced, pending.barrier
        else:
            assert pending.received <= self._open, (pending.received, self._open)
            assert not pending.received >= self._open, pending.barrier


_IDLE, _ALIGNING, _OVERTAKING, _CAPTURING = _ANY = tuple(Alignment)
_NEWER, _H = OtherCheckpoint.NEWER, BarrierHandler
_OVER: BarrierKind = OtherCheckpoint.OVER
_UNALIGNED = (_OVERTAKING, _CAPTURING, _IDLE)
BARRIER_TABLE: Final[TransitionTable[Alignment, BarrierKind]] = TransitionTable(
    "barrier handler",
    (
        Transition(_IDLE, BarrierAnnounced, _ANY, "TakeSnapshot if it overtakes, CaptureComplete", _H._on_announced),
        Transition(_IDLE, BarrierReceived, _ANY, "Block, or TakeSnapshot, CaptureComplete", _H._on_received),
        Transition(_IDLE, TriggerReceived, _ANY, "TakeSnapshot if no channel is open, CaptureComplete", _H._on_trigger),
        Transition(_IDLE, CancelReceived, (_IDLE,), "AbortCheckpoint", _H._on_cancel),
        Transition(_IDLE, EndAnnounced, (_IDLE,), "counts as every later barrier, announced", _H._on_end_announced),
        Transition(_IDLE, ChannelEnded, (_IDLE,), "counts as every later barrier, received", _H._on_end),
        Transition(_ALIGNING, BarrierAnnounced, (_ALIGNING,), "it has still to be received", _H._on_announced),
        Transition(
            _ALIGNING, BarrierReceived, (_ALIGNING, _IDLE), "Block; the last: TakeSnapshot, Resume", _H._on_received
        ),
        Transition(_ALIGNING, TimedOut, _UNALIGNED, "TakeSnapshot, Resume, CaptureComplete", _H._on_timeout),
        Transition(_ALIGNING, CancelReceived, (_IDLE,), "AbortCheckpoint, Resume", _H._on_cancel),
        Transition(_ALIGNING, EndAnnounced, (_ALIGNING,), "it has still to be read", _H._on_end_announced),
        Transition(_ALIGNING, ChannelEnded, (_ALIGNING, _IDLE), "the last: TakeSnapshot, Resume", _H._on_end),
        Transition(_ALIGNING, _NEWER, (_IDLE,), "AbortCheckpoint, Resume", _H._on_newer),
        Transition(
            _OVERTAKING, BarrierAnnounced, _UNALIGNED, "TakeSnapshot, Resume, CaptureComplete", _H._on_announced
        ),
        Transition(
            _OVERTAKING, BarrierReceived, _UNALIGNED, "Block, or TakeSnapshot, Resume, CaptureComplete", _H._on_received
        ),
        Transition(_OVERTAKING, CancelReceived, (_IDLE,), "AbortCheckpoint, Resume", _H._on_cancel),
        Transition(
            _OVERTAKING, EndAnnounced, _UNALIGNED, "TakeSnapshot, Resume, CaptureComplete", _H._on_end_announced
        ),
        Transition(_OVERTAKING, ChannelEnded, _UNALIGNED, "TakeSnapshot, Resume, CaptureComplete", _H._on_end),
        Transition(_OVERTAKING, _NEWER, (_IDLE,), "AbortCheckpoint, Resume", _H._on_newer),
        Transition(_CAPTURING, BarrierAnnounced, (_CAPTURING, _IDLE), "the last: CaptureComplete", _H._on_announced),
        Transition(_CAPTURING, CancelReceived, (_IDLE,), "AbortCheckpoint", _H._on_cancel),
        Transition(
            _CAPTURING,
            CaptureFailed,
            (_IDLE,),
            "the rows before the remaining barriers are not captured",
            _H._on_capture_failed,
        ),
        Transition(_CAPTURING, EndAnnounced, (_CAPTURING, _IDLE), "the last: CaptureComplete", _H._on_end_announced),
        Transition(_CAPTURING, ChannelEnded, (_CAPTURING, _IDLE), "the last: CaptureComplete", _H._on_end),
        Transition(_CAPTURING, _NEWER, (_IDLE,), "AbortCheckpoint", _H._on_newer),
        *(Transition(state, _OVER, (state,)) for state in Alignment),
    ),
)
"""The text of a row names the instructions that may be given, in their order."""
