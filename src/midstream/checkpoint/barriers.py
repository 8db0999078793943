"""The barrier handler of one task: when is its snapshot due, and what does it wait for?

Theory of operation. Rows that came before barrier n on their channel belong to checkpoint n, rows
behind it do not. A barrier is *announced* when it arrives at the channel, and *received* when the
task has read everything before it. The snapshot is taken

- aligned: when every channel's barrier has been received. A channel is blocked from its barrier
  until then, so nothing behind a barrier gets into the snapshot.
- overtaking: as soon as one barrier is announced. What lies before the others' barriers is not
  in the operators' state then; it is captured from the channels, as it is there and as it comes
  in, until every barrier has been announced. Only channels whose rows can be given to any
  subtask later can be captured (`capturable`): the others' barriers must have been received, or
  announced with no row before them (`is_clear`), so that a task that may not emit anything, and
  therefore reads nothing, holds no checkpoint up.

Which of the two is a matter of time: a barrier says how long after its creation (`timeout_ms`)
it may overtake; 0 is at once, None never. Ids only grow; at most one checkpoint is pending, and
a newer one aborts it.

    state         event                          next          instructions
    IDLE          first barrier n, of many       ALIGNING(n)   Block if received; Timer if it has a timeout
    IDLE          barrier n, only channel        IDLE          TakeSnapshot(n)
    ALIGNING(n)   barrier n received, more open  ALIGNING(n)   Block
    ALIGNING(n)   barrier n received, the last   IDLE          TakeSnapshot(n), Resume
    ALIGNING(n)   may overtake, and no channel   CAPTURING(n)  TakeSnapshot(n, overtaking), Resume
                  is open that cannot be
                  captured, and is not clear
    CAPTURING(n)  the last barrier announced     IDLE          CaptureComplete(n)
    CAPTURING(n)  capture failed n               IDLE          -
    any pending   barrier m > n                  as from IDLE  AbortCheckpoint(n), Resume, ...
    any pending   cancel m >= n                  IDLE          AbortCheckpoint(n), Resume, AbortCheckpoint(m)
    any           barrier or cancel too old      same          -

A channel that has ended, or whose end has arrived, counts as having delivered every later
barrier. This machine does not know what a channel is: channels are numbers from 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from midstream.core.elements import CheckpointBarrier
from midstream.core.errors import InvariantError, assert_never

# ---- events ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BarrierAnnounced:
    """It has arrived at the channel; rows may be waiting before it, unless it `is_clear`."""

    channel: int
    barrier: CheckpointBarrier
    is_clear: bool = False


@dataclass(frozen=True, slots=True)
class BarrierReceived:
    """Everything before it has been read."""

    channel: int
    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """A marker from upstream, or the coordinator's word: checkpoint `checkpoint_id` is not to be had."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class EndAnnounced:
    """No barrier will come on this channel any more; rows may be waiting before its end, unless it `is_clear`."""

    channel: int
    is_clear: bool = False


@dataclass(frozen=True, slots=True)
class ChannelEnded:
    """Everything in it has been read, its end too."""

    channel: int


@dataclass(frozen=True, slots=True)
class TriggerReceived:
    """From the coordinator, to a source, or to a task all of whose producers have finished.

    In the latter the last rows and the ends of the channels may still be on their way: nobody
    would replay them, so the snapshot waits until every channel has ended, or captures them.
    """

    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The checkpoint may overtake from now on."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class CaptureFailed:
    """What was captured for the checkpoint could not be written: its barriers are not overtaken any more."""

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
    """Forward the barrier, then snapshot, before anything else is read.

    `overtaking`: the barrier overtakes what is queued for the consumers, too. `capture`: channels
    whose rows are to be captured until their barriers are announced, then comes `CaptureComplete`;
    `overtaken`: those of them whose barriers are announced already, and not received any more.
    """

    barrier: CheckpointBarrier
    overtaking: bool = False
    capture: tuple[int, ...] = ()
    overtaken: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CaptureComplete:
    """Every barrier is there: what was captured is all of it."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class AbortCheckpoint:
    """Forward the cancellation, tell the coordinator, drop what was captured."""

    checkpoint_id: int
    reason: str


BarrierInstruction: TypeAlias = Block | Resume | TakeSnapshot | CaptureComplete | AbortCheckpoint


class Alignment(Enum):
    """The state of a handler, as its table names it."""

    IDLE = auto()
    ALIGNING = auto()
    OVERTAKING = auto()
    """ALIGNING, and it may overtake: only channels that cannot be captured are still to be read up to their barriers."""
    CAPTURING = auto()


class _Pending:
    __slots__ = ("announced", "barrier", "capturing", "clear", "may_overtake", "received")

    def __init__(self, barrier: CheckpointBarrier) -> None:
        self.barrier = barrier
        self.may_overtake = barrier.timeout_ms == 0
        self.announced: set[int] = set()
        """Channels whose barrier has arrived, received or not."""
        self.clear: set[int] = set()
        """Those of them that had no row before it."""
        self.received: set[int] = set()
        """Blocked, unless the snapshot has been taken."""
        self.capturing = False


class BarrierHandler:
    """All state of one task's alignment. Channels are blocked exactly while they are in `received`, before the snapshot."""

    def __init__(self, channels: int, capturable: Collection[int] = ()) -> None:
        self._open: set[int] = set(range(channels))
        """Channels whose end has not been read."""
        self._ending: set[int] = set()
        """Those of them whose end has arrived."""
        self._must_align = self._open - set(capturable)
        self._pending: _Pending | None = None
        self._last_id = -1
        """The newest checkpoint that was begun, taken or cancelled here."""

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
        """The checkpoint that is being aligned or captured for."""
        return self._pending.barrier.checkpoint_id if self._pending else None

    @property
    def pending(self) -> CheckpointBarrier | None:
        return self._pending.barrier if self._pending else None

    @property
    def awaited(self) -> Collection[int]:
        """Channels that have to be read up to their barriers before the pending checkpoint may overtake the others."""
        pending = self._pending
        if pending is None or pending.capturing or not pending.may_overtake:
            return ()
        return self._must_align - pending.received - pending.clear

    def handle(self, event: BarrierEvent) -> list[BarrierInstruction]:
        match event:
            case BarrierAnnounced(channel, barrier, is_clear):
                return self._on_announced(channel, barrier, is_clear)
            case BarrierReceived(channel, barrier):
                return self._on_received(channel, barrier)
            case CancelReceived(checkpoint_id):
                return self._on_cancel(checkpoint_id)
            case EndAnnounced(channel, is_clear):
                if channel in self._open:
                    self._ending.add(channel)
                    if is_clear:
                        self._must_align.discard(channel)
                return self._go_on()
            case ChannelEnded(channel):
                return self._on_end(channel)
            case TriggerReceived(barrier):
                return self._on_trigger(barrier)
            case TimedOut(checkpoint_id):
                if self._pending is not None and self._pending.barrier.checkpoint_id == checkpoint_id:
                    self._pending.may_overtake = True
                return self._go_on()
            case CaptureFailed(checkpoint_id):
                if self._pending is not None and self._pending.barrier.checkpoint_id == checkpoint_id:
                    assert self._pending.capturing, checkpoint_id
                    self._pending = None
                return []
            case _:
                assert_never(event)

    def _on_announced(self, channel: int, barrier: CheckpointBarrier, is_clear: bool) -> list[BarrierInstruction]:
        if channel not in self._open:
            return []  # what was captured took it along, and the end behind it was read before this was
        out = self._begin(barrier)
        if out is None or self._pending is None:
            return out or []
        self._pending.announced.add(channel)
        if is_clear:
            self._pending.clear.add(channel)
        return out + self._go_on()

    def _on_received(self, channel: int, barrier: CheckpointBarrier) -> list[BarrierInstruction]:
        if channel not in self._open:
            raise InvariantError(f"barrier {barrier.checkpoint_id} on channel {channel}, which has ended")
        blocked = self._pending is not None and not self._pending.capturing and channel in self._pending.received
        if blocked:
            raise InvariantError(f"barrier {barrier.checkpoint_id} on channel {channel}, which is blocked")
        out = self._begin(barrier)
        if out is None or self._pending is None:
            return out or []
        pending = self._pending
        if pending.capturing:
            raise InvariantError(f"barrier {barrier.checkpoint_id} on channel {channel}, where it was overtaken")
        pending.announced.add(channel)
        pending.received.add(channel)
        done = self._go_on(newly_received=channel)
        if done or self._pending is not pending:
            return out + done
        return [*out, Block(channel)]

    def _begin(self, barrier: CheckpointBarrier) -> list[BarrierInstruction] | None:
        """Make the barrier's checkpoint the pending one. None: it is settled here already."""
        pending = self._pending
        if pending is not None and pending.barrier.checkpoint_id == barrier.checkpoint_id:
            return []
        if barrier.checkpoint_id <= self._last_id:
            return None
        out = self._give_up(f"checkpoint {barrier.checkpoint_id} began before it was complete")
        self._pending = _Pending(barrier)
        self._last_id = barrier.checkpoint_id
        return out

    def _on_cancel(self, checkpoint_id: int) -> list[BarrierInstruction]:
        pending_id = self.pending_id
        if pending_id is not None and checkpoint_id >= pending_id:
            out = self._give_up(f"checkpoint {checkpoint_id} was cancelled upstream")
            self._last_id = checkpoint_id
            return [*out, AbortCheckpoint(checkpoint_id, "cancelled upstream")] if pending_id < checkpoint_id else out
        if pending_id is None and checkpoint_id > self._last_id:
            self._last_id = checkpoint_id
            return [AbortCheckpoint(checkpoint_id, "cancelled upstream")]
        return []

    def _on_end(self, channel: int) -> list[BarrierInstruction]:
        if channel not in self._open:
            raise InvariantError(f"channel {channel} ends twice")
        pending = self._pending
        if pending is not None and not pending.capturing and channel in pending.received:
            raise InvariantError(f"channel {channel} ends while it is blocked")
        self._open.discard(channel)
        self._ending.discard(channel)
        self._must_align.discard(channel)
        return self._go_on()

    def _on_trigger(self, barrier: CheckpointBarrier) -> list[BarrierInstruction]:
        out = self._begin(barrier)
        return [] if out is None else out + self._go_on()

    def _go_on(self, newly_received: int | None = None) -> list[BarrierInstruction]:
        """Take the snapshot, or complete it, if the time has come. `newly_received` is not blocked yet."""
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
            open_ones = self._open - pending.received
            pending.capturing = True
            overtaken = tuple(sorted(open_ones & pending.announced))
            snapshot = TakeSnapshot(barrier, True, tuple(sorted(open_ones)), overtaken)
            return [snapshot, *resume, *self._complete_capture(pending)]
        return []

    def _complete_capture(self, pending: _Pending) -> list[BarrierInstruction]:
        if self._open - pending.announced - self._ending:
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
        """While a checkpoint is pending somebody is still missing; who is blocked is open."""
        pending = self._pending
        assert self._ending <= self._open, (self._ending, self._open)
        if pending is None:
            return
        if pending.capturing:
            assert self._open - pending.announced - self._ending, pending.barrier
        else:
            assert pending.received <= self._open, (pending.received, self._open)
            assert not pending.received >= self._open, pending.barrier
