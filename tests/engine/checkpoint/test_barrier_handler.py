"""Alignment: every checkpoint's snapshot lies exactly at its barriers, on every channel."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.engine.checkpoint.barrier_handler import (
    AbortCheckpoint,
    Alignment,
    BarrierAnnounced,
    BarrierEvent,
    BarrierHandler,
    BarrierInstruction,
    BarrierReceived,
    Block,
    CancelReceived,
    CaptureComplete,
    CaptureFailed,
    ChannelEnded,
    EndAnnounced,
    Resume,
    TakeSnapshot,
    TimedOut,
    TriggerReceived,
)
from midstream.engine.core.elements import CheckpointBarrier
from midstream.engine.core.errors import InvariantError


def barrier(checkpoint_id: int) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, checkpoint_id * 1000)


def came(channel: int, checkpoint_id: int) -> BarrierReceived:
    return BarrierReceived(channel, barrier(checkpoint_id))


def run(handler: BarrierHandler, *events: BarrierEvent) -> list[BarrierInstruction]:
    out: list[BarrierInstruction] = []
    for event in events:
        out += handler.handle(event)
        handler.check()
    return out


def aborted(instructions: list[BarrierInstruction]) -> list[int]:
    return [i.checkpoint_id for i in instructions if isinstance(i, AbortCheckpoint)]


def test_a_task_with_one_channel_takes_its_snapshot_at_once() -> None:
    assert run(BarrierHandler(1), came(0, 1)) == [TakeSnapshot(barrier(1))]


def test_channels_wait_for_the_last_barrier_and_are_resumed_by_it() -> None:
    handler = BarrierHandler(3)
    assert run(handler, came(1, 1), came(0, 1)) == [Block(1), Block(0)]
    assert run(handler, came(2, 1)) == [TakeSnapshot(barrier(1)), Resume((0, 1))]
    assert run(handler, came(2, 2)) == [Block(2)]


def test_a_newer_barrier_gives_up_the_older_checkpoint() -> None:
    handler = BarrierHandler(2)
    run(handler, came(0, 1))
    out = run(handler, came(1, 2))
    assert aborted(out) == [1]
    assert out[1:] == [Resume((0,)), Block(1)]
    assert run(handler, came(0, 2)) == [TakeSnapshot(barrier(2)), Resume((1,))]
    assert run(handler, came(0, 1)) == [], "the rest of an old checkpoint is ignored"


def test_a_cancelled_checkpoint_lets_its_channels_go() -> None:
    handler = BarrierHandler(2)
    run(handler, came(0, 1))
    out = run(handler, CancelReceived(1))
    assert aborted(out) == [1] and out[-1] == Resume((0,))
    assert run(handler, came(1, 1)) == []
    assert aborted(run(handler, CancelReceived(2))) == [2], "before its first barrier"
    assert run(handler, came(0, 2), came(1, 2), CancelReceived(2)) == []


def test_cancelling_a_later_checkpoint_gives_up_the_pending_one_too() -> None:
    handler = BarrierHandler(2)
    run(handler, came(0, 1))
    assert aborted(run(handler, CancelReceived(4))) == [1, 4]
    assert run(handler, came(1, 3)) == []


def test_the_end_of_a_channel_counts_as_its_barrier() -> None:
    handler = BarrierHandler(3)
    run(handler, came(0, 1), came(2, 1))
    assert run(handler, ChannelEnded(1)) == [TakeSnapshot(barrier(1)), Resume((0, 2))]
    assert run(handler, came(0, 2), came(2, 2)) == [Block(0), TakeSnapshot(barrier(2)), Resume((0,))]


def test_a_trigger_waits_until_every_channel_has_ended() -> None:
    handler = BarrierHandler(2)
    assert run(handler, TriggerReceived(barrier(1)), ChannelEnded(0)) == []
    assert run(handler, ChannelEnded(1)) == [TakeSnapshot(barrier(1))]
    assert run(handler, TriggerReceived(barrier(2))) == [TakeSnapshot(barrier(2))]
    assert run(handler, TriggerReceived(barrier(2))) == []


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([ChannelEnded(0), came(0, 1)], "channel 0 was read while it has ended"),
        ([came(0, 1), came(0, 2)], "channel 0 was read while it is blocked"),
        ([ChannelEnded(0), ChannelEnded(0)], "channel 0 was read while it has ended"),
        ([came(0, 1), ChannelEnded(0)], "channel 0 was read while it is blocked"),
        ([came(0, 1), TriggerReceived(barrier(1))], "TriggerReceived while ALIGNING"),
    ],
)
def test_what_cannot_happen_is_not_carried_on_with(events: list[BarrierEvent], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        run(BarrierHandler(2), *events)


# ---- barriers that overtake -------------------------------------------------


def urgent(checkpoint_id: int, timeout_ms: int = 0) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, checkpoint_id * 1000, timeout_ms)


def said(channel: int, checkpoint_id: int, timeout_ms: int = 0) -> BarrierAnnounced:
    return BarrierAnnounced(channel, urgent(checkpoint_id, timeout_ms))


def read(channel: int, checkpoint_id: int, timeout_ms: int = 0) -> BarrierReceived:
    return BarrierReceived(channel, urgent(checkpoint_id, timeout_ms))


def test_the_first_barrier_announced_takes_the_snapshot_and_the_last_one_completes_it() -> None:
    handler = BarrierHandler(3, range(3))
    assert run(handler, said(1, 1)) == [TakeSnapshot(urgent(1), True, (0, 1, 2))]
    assert run(handler, said(0, 1)) == []
    assert run(handler, said(2, 1)) == [CaptureComplete(1)]
    assert handler.pending is None
    assert run(handler, said(0, 1), CancelReceived(1)) == [], "it is settled"


def test_a_task_with_one_channel_captures_what_waits_before_its_barrier() -> None:
    assert run(BarrierHandler(1, [0]), said(0, 1)) == [
        TakeSnapshot(urgent(1), True, (0,)),
        CaptureComplete(1),
    ]


def test_before_its_timeout_a_barrier_aligns_and_blocks() -> None:
    handler = BarrierHandler(2, range(2))
    assert run(handler, said(0, 1, 50), read(0, 1, 50)) == [Block(0)]
    assert run(handler, said(1, 1, 50)) == []
    assert run(handler, read(1, 1, 50)) == [TakeSnapshot(urgent(1, 50)), Resume((0,))]
    assert run(handler, TimedOut(1)) == [], "the timer comes too late"


def test_the_timeout_resumes_what_was_blocked_and_captures_only_what_was_not_received() -> None:
    handler = BarrierHandler(3, range(3))
    run(handler, said(0, 1, 50), read(0, 1, 50), said(1, 1, 50))
    assert run(handler, TimedOut(1)) == [TakeSnapshot(urgent(1, 50), True, (1, 2)), Resume((0,))]
    assert run(handler, said(2, 1, 50)) == [CaptureComplete(1)]


def test_a_timeout_of_another_checkpoint_changes_nothing() -> None:
    handler = BarrierHandler(2, range(2))
    run(handler, said(0, 2, 50))
    assert run(handler, TimedOut(1), TimedOut(3)) == []


def test_with_the_last_barrier_received_after_the_timeout_outputs_are_overtaken_and_nothing_is_captured() -> None:
    """A channel that cannot be captured holds the snapshot up until its barrier is received."""
    handler = BarrierHandler(2, [0])
    assert run(handler, said(0, 1, 50), read(0, 1, 50), TimedOut(1)) == [Block(0)]
    assert run(handler, said(1, 1, 50)) == []
    assert run(handler, read(1, 1, 50)) == [TakeSnapshot(urgent(1, 50), True), Resume((0,))]


def test_a_channel_that_cannot_be_captured_is_waited_for_and_then_the_others_are_overtaken() -> None:
    handler = BarrierHandler(3, [1, 2])
    assert run(handler, said(1, 1), said(0, 1), said(2, 1)) == []
    assert run(handler, read(1, 1)) == [Block(1)], "what came before its barrier has been read meanwhile"
    assert run(handler, read(0, 1)) == [
        TakeSnapshot(urgent(1), True, (2,)),
        Resume((1,)),
        CaptureComplete(1),
    ]


def test_what_has_to_be_read_before_a_checkpoint_may_overtake_is_awaited() -> None:
    handler = BarrierHandler(4, [1])
    run(handler, said(1, 1, 50), read(2, 1, 50))
    assert set(handler.priority_channels) == set(), "it aligns: all are read alike"
    run(handler, TimedOut(1))
    assert set(handler.priority_channels) == {0, 3}
    run(handler, BarrierAnnounced(3, urgent(1, 50), True))
    assert set(handler.priority_channels) == {0}, "no row lies before the barrier of the other"
    run(handler, read(0, 1, 50))
    assert set(handler.priority_channels) == set(), "it has overtaken"


def test_a_channel_that_cannot_be_captured_is_not_waited_for_when_no_row_lies_before_its_barrier() -> None:
    """Its task may read nothing while it may not emit: it would hold the checkpoint up."""
    handler = BarrierHandler(3, [1])
    assert run(handler, BarrierAnnounced(0, urgent(1), True), said(1, 1)) == [], "rows may wait in the third"
    assert run(handler, BarrierAnnounced(2, urgent(1), True)) == [
        TakeSnapshot(urgent(1), True, (0, 1, 2)),
        CaptureComplete(1),
    ]
    assert run(handler, said(0, 2), said(1, 2), BarrierAnnounced(2, urgent(2), True)) == [], "each has its own"
    assert run(handler, EndAnnounced(0, True)) == [
        TakeSnapshot(urgent(2), True, (0, 1, 2)),
        CaptureComplete(2),
    ]


def test_of_several_channels_that_cannot_be_captured_all_are_waited_for() -> None:
    handler = BarrierHandler(3, [0])
    assert run(handler, said(0, 1), said(1, 1), read(1, 1)) == [Block(1)]
    assert run(handler, read(2, 1)) == [
        TakeSnapshot(urgent(1), True, (0,)),
        Resume((1,)),
        CaptureComplete(1),
    ]


def test_the_end_of_a_channel_that_cannot_be_captured_lets_the_snapshot_be_taken() -> None:
    handler = BarrierHandler(3, [1, 2])
    assert run(handler, said(1, 1)) == []
    assert run(handler, EndAnnounced(0)) == [], "rows may still wait before its end"
    assert run(handler, ChannelEnded(0)) == [TakeSnapshot(urgent(1), True, (1, 2))]


def test_an_end_that_has_arrived_counts_as_a_barrier_for_the_capture() -> None:
    handler = BarrierHandler(3, range(3))
    run(handler, EndAnnounced(2))
    assert run(handler, said(0, 1)) == [TakeSnapshot(urgent(1), True, (0, 1, 2))]
    assert run(handler, EndAnnounced(1)) == [CaptureComplete(1)]
    assert run(handler, ChannelEnded(1), ChannelEnded(2)) == []
    assert run(handler, said(0, 2)) == [TakeSnapshot(urgent(2), True, (0,)), CaptureComplete(2)]


def test_an_end_read_during_the_capture_completes_it_if_it_was_not_announced() -> None:
    handler = BarrierHandler(2, range(2))
    run(handler, said(0, 1))
    assert run(handler, ChannelEnded(1)) == [CaptureComplete(1)]


def test_a_trigger_captures_what_has_come_and_waits_for_the_ends_to_arrive() -> None:
    handler = BarrierHandler(2, range(2))
    assert run(handler, TriggerReceived(urgent(1))) == [TakeSnapshot(urgent(1), True, (0, 1))]
    assert run(handler, EndAnnounced(0)) == []
    assert run(handler, EndAnnounced(1)) == [CaptureComplete(1)]
    assert run(BarrierHandler(0), TriggerReceived(urgent(1))) == [TakeSnapshot(urgent(1), True)], "a source"
    aligned = BarrierHandler(1)
    assert run(aligned, TriggerReceived(urgent(1)), EndAnnounced(0)) == [], "its last rows cannot be captured"
    assert run(aligned, ChannelEnded(0)) == [TakeSnapshot(urgent(1), True)]


def test_a_capture_that_is_cancelled_blocks_and_resumes_nothing() -> None:
    handler = BarrierHandler(2, range(2))
    run(handler, said(0, 1))
    assert run(handler, CancelReceived(1)) == [
        AbortCheckpoint(1, "checkpoint 1 was cancelled by the coordinator or a task upstream")
    ]
    assert run(handler, said(1, 1)) == []
    assert run(handler, read(1, 1)) == [], "nor is a barrier in its place minded"
    assert run(handler, said(1, 2), said(0, 2))[-1] == CaptureComplete(2)


def test_a_newer_barrier_gives_up_a_capture() -> None:
    handler = BarrierHandler(2, range(2))
    run(handler, said(0, 1))
    out = run(handler, said(0, 2))
    assert aborted(out) == [1]
    assert out[1:] == [TakeSnapshot(urgent(2), True, (0, 1))]
    assert run(handler, said(1, 1)) == []
    assert run(handler, said(1, 2)) == [CaptureComplete(2)]


def test_the_end_behind_a_captured_barrier_may_be_read_before_its_announcement_is() -> None:
    handler = BarrierHandler(2, range(2))
    run(handler, said(1, 1))
    assert run(handler, ChannelEnded(0)) == [CaptureComplete(1)]
    assert run(handler, said(0, 1)) == []


def test_cancelling_before_the_timeout_resumes_what_was_blocked() -> None:
    handler = BarrierHandler(2, range(2))
    run(handler, said(0, 1, 50), read(0, 1, 50), said(1, 1, 50))
    out = run(handler, CancelReceived(1))
    assert aborted(out) == [1] and out[-1] == Resume((0,))
    assert run(handler, TimedOut(1), read(1, 1, 50)) == []


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([said(0, 1), read(0, 1)], "BarrierReceived while CAPTURING"),
        ([said(0, 1, 50), read(0, 1, 50), read(0, 1, 50)], "channel 0 was read while it is blocked"),
        ([said(0, 1, 50), CaptureFailed(1)], "CaptureFailed while ALIGNING"),
        ([said(0, 1, 50), TimedOut(1), TimedOut(1)], "TimedOut while CAPTURING"),
    ],
)
def test_what_cannot_happen_when_barriers_overtake_is_not_carried_on_with(
    events: list[BarrierEvent], message: str
) -> None:
    with pytest.raises(InvariantError, match=message):
        run(BarrierHandler(2, range(2)), *events)


class Task:
    """A task's channels as it sees them: what has arrived is announced at once, and read in any order."""

    def __init__(self, kinds: list[bool]) -> None:
        self.capturable = kinds
        self.handler = BarrierHandler(len(kinds), [c for c, yes in enumerate(kinds) if yes])
        self.queues: list[deque[object]] = [deque() for _ in kinds]
        self.blocked: set[int] = set()
        self.read: list[set[int]] = [set() for _ in kinds]
        self.capture: dict[int, int] = {}
        """By channel: the checkpoint for which what arrives is captured."""
        self.snapshots: dict[int, list[set[int]]] = {}
        self.captured: dict[int, list[list[int]]] = {}
        self.complete: list[int] = []
        self.aborted: list[int] = []

    def arrive(self, channel: int, item: object) -> None:
        if isinstance(item, CheckpointBarrier):
            if self.capture.get(channel, item.checkpoint_id + 1) <= item.checkpoint_id:
                mine = self.capture.pop(channel) == item.checkpoint_id
                if mine:
                    self.handle(BarrierAnnounced(channel, item))
                    return
            is_clear = self.is_clear(channel)
            self.queues[channel].append(item)
            if item.timeout_ms is not None:
                self.handle(BarrierAnnounced(channel, item, is_clear))
            return
        is_clear = self.is_clear(channel)
        self.queues[channel].append(item)
        if item == "end":
            self.capture.pop(channel, None)
            self.handle(EndAnnounced(channel, is_clear))
        elif isinstance(item, int) and channel in self.capture:
            self.captured[self.capture[channel]][channel].append(item)

    def is_clear(self, channel: int) -> bool:
        """No row waits there."""
        return not any(isinstance(item, int) for item in self.queues[channel])

    def readable(self) -> list[int]:
        return [c for c, queue in enumerate(self.queues) if queue and c not in self.blocked]

    def read_one(self, channel: int) -> None:
        item = self.queues[channel].popleft()
        match item:
            case int():
                self.read[channel].add(item)
            case CheckpointBarrier():
                self.handle(BarrierReceived(channel, item))
            case "end":
                self.handle(ChannelEnded(channel))

    def handle(self, event: BarrierEvent) -> None:
        for instruction in self.handler.handle(event):
            match instruction:
                case Block(channel):
                    assert channel not in self.blocked
                    self.blocked.add(channel)
                case Resume(resumed):
                    assert set(resumed) <= self.blocked
                    self.blocked.difference_update(resumed)
                case TakeSnapshot(barrier, overtaking, capture):
                    assert barrier.checkpoint_id not in self.snapshots
                    assert overtaking or not capture
                    self.snapshots[barrier.checkpoint_id] = [set(rows) for rows in self.read]
                    self.captured[barrier.checkpoint_id] = [[] for _ in self.read]
                    for channel in capture:
                        self._capture(barrier.checkpoint_id, channel)
                        if not self.capturable[channel]:
                            nothing = not self.captured[barrier.checkpoint_id][channel] and channel not in self.capture
                            assert nothing, "that cannot be given to others"
                    if not capture:
                        self.complete.append(barrier.checkpoint_id)
                case CaptureComplete(checkpoint_id):
                    assert checkpoint_id not in self.capture.values()
                    self.complete.append(checkpoint_id)
                case AbortCheckpoint(checkpoint_id):
                    self.aborted.append(checkpoint_id)
                    self.capture.clear()
        self.handler.check()

    def _capture(self, checkpoint_id: int, channel: int) -> None:
        found = self.captured[checkpoint_id][channel]
        for index, item in enumerate(self.queues[channel]):
            if isinstance(item, int):
                found.append(item)
            elif item == "end":
                return
            elif isinstance(item, CheckpointBarrier) and item.checkpoint_id == checkpoint_id:
                del self.queues[channel][index]
                return
        self.capture[channel] = checkpoint_id


@settings(max_examples=examples(250))
@given(data=st.data(), kinds=st.lists(st.booleans(), min_size=1, max_size=4))
def test_every_row_before_a_barrier_is_in_the_snapshot_or_captured_and_no_other(
    data: st.DataObject, kinds: list[bool]
) -> None:
    """Any channels, of either kind, any arrivals before any reads, any timeouts, cancellations, failures and ends."""
    count = data.draw(st.integers(1, 4), "checkpoints")
    timeouts = [data.draw(st.sampled_from([None, 0, 0, 50])) for _ in range(count)]
    cancelled = data.draw(st.sets(st.integers(1, count)), "cancelled")
    coming: list[deque[object]] = []
    before: dict[int, list[set[int]]] = {n: [] for n in range(1, count + 1)}
    unsent: set[int] = set()
    """Some producer took no part in these, so they never complete as a whole: where it sends more rows and ends, this
    task may take them for rows before the barrier."""
    number = 0
    for _ in kinds:
        queue: deque[object] = deque()
        rows: set[int] = set()
        last = data.draw(st.integers(0, count), "barriers before the end of this channel")
        for checkpoint in range(1, count + 1):
            for _ in range(data.draw(st.integers(0, 2)) if checkpoint <= last else 0):
                number += 1
                queue.append(number)
                rows.add(number)
            lost = checkpoint in cancelled and data.draw(st.booleans(), "this barrier was never sent")
            if lost:
                unsent.add(checkpoint)
            if checkpoint <= last and not lost:
                queue.append(CheckpointBarrier(checkpoint, 0, timeouts[checkpoint - 1]))
            before[checkpoint].append(set(rows))
        queue.append("end")
        coming.append(queue)
    begun = {item.checkpoint_id for queue in coming for item in queue if isinstance(item, CheckpointBarrier)}
    task = Task(kinds)
    may_fail, failed = data.draw(st.booleans(), "captured rows may be impossible to write"), set[int]()
    to_cancel = deque(sorted(cancelled))
    timers = deque(n for n in range(1, count + 1) if timeouts[n - 1])
    while any(coming) or any(task.queues) or to_cancel:
        choices = ["arrive"] * any(coming) + ["read"] * 2 * bool(task.readable())
        choices += ["timer"] * (bool(timers) and task.handler.pending_id == timers[0])
        choices += ["cancel"] * bool(to_cancel)
        choices += ["fail"] * (may_fail and task.handler.state is Alignment.CAPTURING)
        assert choices, "every channel that has something is blocked"
        match data.draw(st.sampled_from(choices)):
            case "arrive":
                channel = data.draw(st.sampled_from([c for c, queue in enumerate(coming) if queue]))
                task.arrive(channel, coming[channel].popleft())
            case "read":
                task.read_one(data.draw(st.sampled_from(task.readable())))
            case "timer":
                task.handle(TimedOut(timers.popleft()))
            case "cancel":
                task.handle(CancelReceived(to_cancel.popleft()))
            case "fail":
                failed.add(task.handler.pending_id or 0)
                task.capture.clear()
                task.handle(CaptureFailed(task.handler.pending_id or 0))
        while timers and (task.handler.pending_id or 0) > timers[0]:
            timers.popleft()
    assert not task.blocked and not task.capture and task.handler.pending is None
    assert task.complete == sorted(set(task.complete))
    assert not set(task.complete) & set(task.aborted)
    assert len(task.aborted) == len(set(task.aborted))
    for checkpoint in set(task.complete) - unsent:
        for channel, rows in enumerate(before[checkpoint]):
            held = task.captured[checkpoint][channel]
            assert len(held) == len(set(held)), "captured twice"
            assert not task.snapshots[checkpoint][channel] & set(held), "in the snapshot, and captured"
            assert task.snapshots[checkpoint][channel] | set(held) == rows
            assert held == sorted(held), "captured out of order"
    assert not set(task.complete) & failed
    newest = max(begun, default=0)
    if newest > max(cancelled, default=0) and newest not in failed:
        assert newest in task.complete, "nothing but a cancellation or a newer one loses a checkpoint"


@settings(max_examples=examples(300))
@given(data=st.data(), channels=st.integers(1, 4))
def test_a_snapshot_holds_exactly_what_came_before_its_barriers(data: st.DataObject, channels: int) -> None:
    """Random channels of rows, barriers (some lost to cancellation) and ends; read in any order that blocking allows."""
    count = data.draw(st.integers(0, 5), "checkpoints")
    most = 0
    queues: list[deque[object]] = []
    cuts: dict[int, list[int]] = {n: [] for n in range(1, count + 1)}
    for _ in range(channels):
        queue: deque[object] = deque()
        rows = 0
        last = data.draw(st.integers(0, count), "barriers before the end of this channel")
        most = max(most, last)
        for checkpoint in range(1, count + 1):
            more = data.draw(st.integers(0, 2)) if checkpoint <= last else 0
            queue.extend(["row"] * more)
            rows += more
            if checkpoint <= last:
                queue.append(checkpoint)
            cuts[checkpoint].append(rows)
        queue.append("end")
        queues.append(queue)
    cancelled = data.draw(st.sets(st.integers(1, count)) if count else st.just(set()), "cancelled")
    handler = BarrierHandler(channels)
    blocked: set[int] = set()
    read = [0] * channels
    to_cancel = deque(sorted(cancelled))
    taken: list[int] = []
    dropped: list[int] = []
    while any(queues) or to_cancel:
        readable = [c for c in range(channels) if queues[c] and c not in blocked]
        if to_cancel and (not readable or data.draw(st.booleans())):
            event: BarrierEvent = CancelReceived(to_cancel.popleft())
        else:
            assert readable, "every channel that has something is blocked"
            channel = data.draw(st.sampled_from(readable))
            item = queues[channel].popleft()
            if item == "row":
                read[channel] += 1
                continue
            event = ChannelEnded(channel) if item == "end" else came(channel, int(str(item)))
        for instruction in handler.handle(event):
            match instruction:
                case Block(channel):
                    blocked.add(channel)
                case Resume(resumed):
                    blocked.difference_update(resumed)
                case TakeSnapshot(got):
                    taken.append(got.checkpoint_id)
                    assert read == cuts[got.checkpoint_id]
                case AbortCheckpoint(checkpoint_id):
                    dropped.append(checkpoint_id)
        handler.check()
    assert not blocked
    assert taken == sorted(set(taken))
    assert not set(taken) & set(dropped)
    assert len(dropped) == len(set(dropped))
    if not cancelled:
        assert taken == list(range(1, most + 1)), "nothing but a cancellation loses a checkpoint"
