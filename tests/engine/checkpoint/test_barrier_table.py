"""The barrier handler's table is what its handlers do: no pair, no state and no instruction more, and none less."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from typing import Any, get_args, get_type_hints

import pytest

from midstream.engine.checkpoint import barrier_handler as barriers
from midstream.engine.checkpoint.barrier_handler import (
    BARRIER_TABLE,
    Alignment,
    BarrierAnnounced,
    BarrierEvent,
    BarrierHandler,
    BarrierInstruction,
    BarrierKind,
    BarrierReceived,
    CancelReceived,
    CaptureFailed,
    ChannelEnded,
    EndAnnounced,
    OtherCheckpoint,
    TimedOut,
    TriggerReceived,
)
from midstream.engine.core.elements import CheckpointBarrier
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.state_machine import Transition, nothing

REFUSED = {
    (Alignment.IDLE, TimedOut): "nothing is pending that it could be about",
    (Alignment.IDLE, CaptureFailed): "nothing is pending that it could be about",
    (Alignment.IDLE, OtherCheckpoint.NEWER): "nothing is pending that it could be newer than",
    (Alignment.ALIGNING, TriggerReceived): "a task is triggered once",
    (Alignment.OVERTAKING, TriggerReceived): "a task is triggered once",
    (Alignment.CAPTURING, TriggerReceived): "a task is triggered once",
    (Alignment.OVERTAKING, TimedOut): "there is one timer, and it has fired, or there is none",
    (Alignment.CAPTURING, TimedOut): "there is one timer, and it has fired, or there is none",
    (Alignment.ALIGNING, CaptureFailed): "nothing is captured yet",
    (Alignment.OVERTAKING, CaptureFailed): "nothing is captured yet",
    (Alignment.CAPTURING, BarrierReceived): "it has been taken out of its channel",
}
"""Pairs without a row, and why they cannot be."""


def test_every_event_has_a_row_in_every_state_or_is_refused_on_purpose() -> None:
    kinds: list[BarrierKind] = [*get_args(BarrierEvent), *OtherCheckpoint]
    for state, kind in product(Alignment, kinds):
        assert BARRIER_TABLE.allows(state, kind) != ((state, kind) in REFUSED), (state, kind)


@pytest.mark.parametrize("row", BARRIER_TABLE.rows, ids=lambda row: f"{row.state.name}-{row.event}")
def test_what_a_row_does_takes_its_event(row: Transition[Alignment, BarrierKind]) -> None:
    if row.do is nothing:
        assert row.event is OtherCheckpoint.OVER
        return
    (taken,) = [kind for name, kind in get_type_hints(row.do).items() if name != "return"]
    assert row.event is OtherCheckpoint.NEWER or row.event is taken


@dataclass
class Seen:
    then: set[Alignment] = field(default_factory=set)
    instructions: set[str] = field(default_factory=set)


def snapshot(handler: BarrierHandler) -> Hashable:
    pending = handler._pending
    of_pending = pending and (
        pending.barrier.checkpoint_id,
        pending.may_overtake,
        pending.capturing,
        frozenset(pending.announced),
        frozenset(pending.clear),
        frozenset(pending.received),
    )
    channels = (frozenset(channels) for channels in (handler._open, handler._end_announced, handler._must_align))
    return (*channels, handler._last_id, of_pending)


def events(channels: int, timeouts_ms: tuple[int | None, ...]) -> Iterator[BarrierEvent]:
    for checkpoint_id, timeout_ms in enumerate(timeouts_ms, 1):
        barrier = CheckpointBarrier(checkpoint_id, 0, timeout_ms)
        yield from (BarrierReceived(channel, barrier) for channel in range(channels))
        yield from (CancelReceived(checkpoint_id), TriggerReceived(barrier))
        if timeout_ms is not None:
            yield from (BarrierAnnounced(c, barrier, clear) for c in range(channels) for clear in (False, True))
            yield from (TimedOut(checkpoint_id), CaptureFailed(checkpoint_id))
    yield from (EndAnnounced(channel, clear) for channel in range(channels) for clear in (False, True))
    yield from (ChannelEnded(channel) for channel in range(channels))


def explore(start: BarrierHandler, possible: list[BarrierEvent]) -> None:
    """Every event in every state that a handler can come to; what it refuses leads nowhere."""
    known, to_do = {snapshot(start)}, [start]
    while to_do:
        before = to_do.pop()
        for event in possible:
            handler = deepcopy(before)
            try:
                handler.handle(event)
            except InvariantError:
                continue
            handler.check()
            if snapshot(handler) not in known:
                known.add(snapshot(handler))
                to_do.append(handler)


def test_every_row_is_what_handlers_of_two_channels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[tuple[Alignment, BarrierKind], Seen] = defaultdict(Seen)
    step: Callable[..., list[BarrierInstruction]] = BarrierHandler._step

    def recorded(self: BarrierHandler, kind: BarrierKind, event: BarrierEvent) -> list[BarrierInstruction]:
        before = self.state
        out = step(self, kind, event)
        seen[before, kind].then.add(self.state)
        seen[before, kind].instructions.update(type(instruction).__name__ for instruction in out)
        return out

    monkeypatch.setattr(BarrierHandler, "_step", recorded)
    for capturable, timeouts_ms in product(((), (0,), (0, 1)), ((None, 0), (0, 50), (50, None))):
        explore(BarrierHandler(2, capturable), list(events(2, timeouts_ms)))
    names = {kind.__name__ for kind in get_args(barriers.BarrierInstruction)}
    assert {(row.state, row.event) for row in BARRIER_TABLE.rows} == seen.keys()
    for row in BARRIER_TABLE.rows:
        found = seen[row.state, row.event]
        assert set(row.then) == found.then, row
        assert names & set(re.findall(r"\w+", row.what)) == found.instructions, row


def test_an_error_tells_the_story() -> None:
    handler = BarrierHandler(2)
    barrier = CheckpointBarrier(7, 0)
    handler.handle(BarrierReceived(1, barrier))
    with pytest.raises(InvariantError) as refused:
        handler.handle(TriggerReceived(barrier))
    assert str(refused.value).splitlines() == [
        "barrier handler: TriggerReceived while ALIGNING; its last events:",
        f"    IDLE: {BarrierReceived(1, barrier)}",
        f"    ALIGNING: {TriggerReceived(barrier)}",
    ]


def test_a_state_that_does_not_follow_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def go_on(self: Any, newly_received: int | None = None) -> list[BarrierInstruction]:
        self._pending = None
        return []

    handler = BarrierHandler(2)
    handler.handle(BarrierReceived(0, CheckpointBarrier(1, 0)))
    monkeypatch.setattr(BarrierHandler, "_advance", go_on)
    with pytest.raises(InvariantError, match="EndAnnounced while ALIGNING leads to IDLE; its last events:"):
        handler.handle(EndAnnounced(1))
