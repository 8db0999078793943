"""The barrier handler of one task: when is its snapshot due, and which channels wait for it?

Theory of operation. Rows that came before barrier n on their channel belong to checkpoint n, rows
behind it do not. A task with several channels gets the barriers at different times. Aligning
means: a channel whose barrier has come is blocked until all others' have come too; then the
snapshot is taken, and all are resumed. Ids only grow. At most one checkpoint is pending; a newer
one aborts it.

    state        event                      next         instructions
    IDLE         first barrier n of many    ALIGNING(n)  Block
    IDLE         barrier n, only channel    IDLE         TakeSnapshot(n)
    IDLE         cancel n                   IDLE         AbortCheckpoint(n)
    ALIGNING(n)  barrier n, more missing    ALIGNING(n)  Block
    ALIGNING(n)  barrier n, the last        IDLE         TakeSnapshot(n), Resume
    ALIGNING(n)  barrier m > n              ALIGNING(m)  AbortCheckpoint(n), Resume, Block
    ALIGNING(n)  cancel m >= n              IDLE         AbortCheckpoint(n), Resume, AbortCheckpoint(m)
    ALIGNING(n)  a channel ends, the last   IDLE         TakeSnapshot(n), Resume
    IDLE         trigger n, none open       IDLE         TakeSnapshot(n)
    IDLE         trigger n, some open       ALIGNING(n)  -
    any          barrier or cancel too old  same         -

A channel that has ended counts as having delivered every later barrier. This machine does not
know what a channel is: channels are numbers from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from midstream.core.elements import CheckpointBarrier
from midstream.core.errors import InvariantError

# ---- events ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BarrierReceived:
    channel: int
    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """A marker from upstream, or the coordinator's word: checkpoint `checkpoint_id` is not to be had."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class ChannelEnded:
    channel: int


@dataclass(frozen=True, slots=True)
class TriggerReceived:
    """From the coordinator, to a source, or to a task all of whose producers have finished.

    In the latter the last rows and the ends of the channels may still be on their way: nobody
    would replay them, so the snapshot waits until every channel has ended.
    """

    barrier: CheckpointBarrier


BarrierEvent: TypeAlias = BarrierReceived | CancelReceived | ChannelEnded | TriggerReceived

# ---- instructions ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    channel: int


@dataclass(frozen=True, slots=True)
class Resume:
    channels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Forward the barrier, then snapshot, before anything else is read."""

    barrier: CheckpointBarrier


@dataclass(frozen=True, slots=True)
class AbortCheckpoint:
    """Forward the cancellation and tell the coordinator."""

    checkpoint_id: int
    reason: str


BarrierInstruction: TypeAlias = Block | Resume | TakeSnapshot | AbortCheckpoint


class BarrierHandler:
    """All state of one task's alignment. Channels are blocked exactly while they are in `_arrived`."""

    def __init__(self, channels: int) -> None:
        self._open: set[int] = set(range(channels))
        self._pending: CheckpointBarrier | None = None
        self._arrived: set[int] = set()
        self._last_id = -1
        """The newest checkpoint that was begun, taken or cancelled here."""

    @property
    def pending_id(self) -> int | None:
        """The checkpoint that is being aligned for."""
        return self._pending.checkpoint_id if self._pending else None

    def handle(self, event: BarrierEvent) -> list[BarrierInstruction]:
        match event:
            case BarrierReceived(channel, barrier):
                return self._on_barrier(channel, barrier)
            case CancelReceived(checkpoint_id):
                return self._on_cancel(checkpoint_id)
            case ChannelEnded(channel):
                return self._on_end(channel)
            case TriggerReceived(barrier):
                return self._on_trigger(barrier)

    def _on_barrier(self, channel: int, barrier: CheckpointBarrier) -> list[BarrierInstruction]:
        if channel not in self._open:
            raise InvariantError(f"barrier {barrier.checkpoint_id} on channel {channel}, which has ended")
        if channel in self._arrived:
            raise InvariantError(f"barrier {barrier.checkpoint_id} on channel {channel}, which is blocked")
        out: list[BarrierInstruction] = []
        if self._pending is None or barrier.checkpoint_id != self._pending.checkpoint_id:
            if barrier.checkpoint_id <= self._last_id:
                return out  # of a checkpoint that is already settled here
            out += self._give_up(f"checkpoint {barrier.checkpoint_id} began before it was aligned")
            self._pending = barrier
            self._last_id = barrier.checkpoint_id
        self._arrived.add(channel)
        if self._arrived == self._open:
            return out + self._complete(newly_arrived=channel)
        return [*out, Block(channel)]

    def _on_cancel(self, checkpoint_id: int) -> list[BarrierInstruction]:
        if self._pending is not None and checkpoint_id >= self._pending.checkpoint_id:
            older = self._pending.checkpoint_id < checkpoint_id
            out = self._give_up(f"checkpoint {checkpoint_id} was cancelled upstream")
            self._last_id = checkpoint_id
            return [*out, AbortCheckpoint(checkpoint_id, "cancelled upstream")] if older else out
        if self._pending is None and checkpoint_id > self._last_id:
            self._last_id = checkpoint_id
            return [AbortCheckpoint(checkpoint_id, "cancelled upstream")]
        return []

    def _on_end(self, channel: int) -> list[BarrierInstruction]:
        if channel not in self._open:
            raise InvariantError(f"channel {channel} ends twice")
        if channel in self._arrived:
            raise InvariantError(f"channel {channel} ends while it is blocked")
        self._open.discard(channel)
        if self._pending is not None and self._arrived == self._open:
            return self._complete(newly_arrived=None)
        return []

    def _on_trigger(self, barrier: CheckpointBarrier) -> list[BarrierInstruction]:
        if barrier.checkpoint_id <= self._last_id:
            return []
        out = self._give_up(f"checkpoint {barrier.checkpoint_id} began before it was aligned")
        self._last_id = barrier.checkpoint_id
        if self._open:
            self._pending = barrier
            return out
        return [*out, TakeSnapshot(barrier)]

    def _complete(self, newly_arrived: int | None) -> list[BarrierInstruction]:
        """The channel that completes the alignment was never blocked."""
        assert self._pending is not None
        barrier, self._pending = self._pending, None
        blocked = tuple(sorted(self._arrived - {newly_arrived}))
        self._arrived.clear()
        return [TakeSnapshot(barrier), *([Resume(blocked)] if blocked else [])]

    def _give_up(self, reason: str) -> list[BarrierInstruction]:
        if self._pending is None:
            return []
        aborted, self._pending = self._pending.checkpoint_id, None
        blocked = tuple(sorted(self._arrived))
        self._arrived.clear()
        return [AbortCheckpoint(aborted, reason), *([Resume(blocked)] if blocked else [])]

    def check(self) -> None:
        """Blocked channels are open ones, and while a checkpoint is pending somebody is still missing."""
        assert self._arrived <= self._open, (self._arrived, self._open)
        assert self._pending is not None or not self._arrived, self._arrived
        assert self._pending is None or self._arrived != self._open, self._pending
