"""Alignment: every checkpoint's snapshot lies exactly at its barriers, on every channel."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.checkpoint.barriers import (
    AbortCheckpoint,
    BarrierEvent,
    BarrierHandler,
    BarrierInstruction,
    BarrierReceived,
    Block,
    CancelReceived,
    ChannelEnded,
    Resume,
    TakeSnapshot,
    TriggerReceived,
)
from midstream.core.elements import CheckpointBarrier
from midstream.core.errors import InvariantError


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
        ([ChannelEnded(0), came(0, 1)], "which has ended"),
        ([came(0, 1), came(0, 2)], "which is blocked"),
        ([ChannelEnded(0), ChannelEnded(0)], "ends twice"),
        ([came(0, 1), ChannelEnded(0)], "while it is blocked"),
    ],
)
def test_what_cannot_happen_is_not_carried_on_with(events: list[BarrierEvent], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        run(BarrierHandler(2), *events)


@settings(max_examples=300, deadline=None)
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
