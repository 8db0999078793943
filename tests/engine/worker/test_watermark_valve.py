"""Event time of a task with several channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.engine.core.elements import ALL_ASSIGNED, MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.graph.idleness import IdleOrigin
from midstream.engine.worker.watermark_valve import WatermarkValve
from midstream.simulation.world import Tempo, World
from midstream_lab.checkers.watermark_checker import CheckedWatermarkValve


def apart(channels: int) -> list[IdleOrigin]:
    """As from a source: each subtask is idle on its own."""
    return [IdleOrigin(frozenset(), frozenset((0,)), subtask) for subtask in range(channels)]


def together(vertex: int, channels: int) -> list[IdleOrigin]:
    """As from subtasks that all read every subtask of one source."""
    return [IdleOrigin(frozenset((vertex,)))] * channels


def test_time_is_that_of_the_slowest_channel() -> None:
    valve = WatermarkValve(apart(2))
    assert valve.advance(0, 10) is None
    assert valve.advance(1, 5) == 5
    assert valve.advance(1, 5) is None
    assert valve.advance(1, 20) == 10


def test_of_many_channels_not_all_are_looked_at_whenever_one_advances() -> None:
    class Counted(list[int]):
        looks = 0

        def __iter__(self) -> Iterator[int]:
            Counted.looks += len(self)
            return super().__iter__()

        def count(self, value: int) -> int:
            Counted.looks += len(self)
            return super().count(value)

    channels = 1000
    valve = WatermarkValve(apart(channels))
    valve.watermarks = Counted(valve.watermarks)
    for second in range(5):
        for channel in range(channels):
            assert valve.advance(channel, second) == (second if channel == channels - 1 else None)
    assert Counted.looks <= 5 * 3 * channels


def test_an_idle_channel_is_not_waited_for() -> None:
    valve = WatermarkValve(apart(2))
    valve.advance(0, 10)
    assert valve.set_idle(1, True) == 10
    assert not valve.is_idle
    assert valve.set_idle(0, True) is None
    assert valve.is_idle
    assert valve.set_idle(0, False) is None
    assert valve.advance(0, 30) == 30
    assert valve.set_idle(1, False) is None, "a channel that comes back does not turn time back"
    assert valve.advance(1, 20) is None
    assert valve.advance(1, 40) is None
    assert valve.advance(0, 50) == 40


def test_an_idle_channel_is_waited_for_until_it_considers_all_splits_that_another_one_does() -> None:
    valve = WatermarkValve(apart(3))
    for channel in range(3):
        valve.advance(channel, 10)
        valve.set_idle(channel, True)
    assert valve.set_idle(1, False, ((0, 2),)) is None
    assert valve.advance(1, 90) is None, "one of the two splits may be another subtask's"
    assert valve.set_idle(1, True, ((0, 2),)) is None, "though it was read to its end"
    assert not valve.is_idle and not valve.assigned
    assert valve.set_idle(2, True, ((0, 2),)) is None
    assert valve.set_idle(0, False, ((0, 2),)) is None, "it was this one's"
    assert valve.assigned == ((0, 2),)
    assert valve.advance(0, 50) == 50
    assert valve.set_idle(0, True, ((0, 2),)) == 90
    assert valve.is_idle


def test_an_idle_channel_is_not_waited_for_because_of_splits_of_another_source() -> None:
    valve = WatermarkValve([*apart(2), *together(1, 1)])
    for channel in range(3):
        valve.advance(channel, 10)
    valve.set_idle(0, True)
    valve.set_idle(1, True)
    valve.set_idle(2, False, ((1, 7),))
    assert valve.advance(2, 90) == 90


def test_a_channel_that_has_ended_is_not_waited_for_and_its_end_is_no_split_that_others_have_to_consider() -> None:
    valve = WatermarkValve(apart(2))
    valve.advance(0, 10)
    valve.advance(1, 20)
    valve.set_idle(0, True, ((0, 1),))
    valve.set_idle(1, False, ((0, 2),))
    assert valve.advance(1, 40) is None
    assert valve.advance(1, MAX_WATERMARK_US) is None
    assert valve.assigned == ((0, 1),), "the other one is still to become active, or to consider the second split"
    assert valve.set_idle(0, True, ((0, 2),)) == 40
    both = WatermarkValve([*apart(1), *together(1, 1)])
    both.set_idle(1, False, ((1, 4),))
    both.advance(0, MAX_WATERMARK_US)
    assert both.assigned == ((0, ALL_ASSIGNED), (1, 4)), "nothing more comes of source 0"
    after = WatermarkValve(apart(2))
    after.advance(0, 30)
    after.advance(1, 10)
    assert after.set_idle(1, True, ((0, 4),)) == 30
    after.set_idle(0, False, ((0, ALL_ASSIGNED),))
    assert after.advance(0, 50) == 50


def test_those_that_may_hold_it_back_are_neither_idle_nor_at_their_end() -> None:
    valve = WatermarkValve(apart(4))
    assert valve.waited_for() == [0, 1, 2, 3]
    valve.advance(0, 10)
    valve.advance(3, MAX_WATERMARK_US)
    valve.set_idle(1, True)
    assert valve.waited_for() == [0, 2] and valve.watermarks[0] == 10
    valve.set_idle(2, True)
    valve.set_idle(0, True)
    assert valve.is_idle and valve.waited_for() == []
    valve.set_idle(1, False)
    assert valve.waited_for() == [1]
    alike = WatermarkValve(together(0, 2))
    alike.set_idle(1, True)
    assert alike.waited_for() == [0, 1], "the idle one is about to come back: its origins are active"


def test_when_nobody_is_left_to_wait_for_time_is_that_of_the_furthest() -> None:
    valve = WatermarkValve(apart(3))
    assert [valve.advance(channel, mark) for channel, mark in enumerate((10, 30, 20))] == [None, None, 10]
    assert [valve.set_idle(channel, True) for channel in (1, 0)] == [None, 20]
    assert valve.set_idle(2, True) == 30
    assert valve.is_idle
    assert valve.set_idle(0, False) is None, "time does not turn back"
    assert valve.advance(0, 40) == 40


def test_the_end_of_a_channel_says_nothing_of_how_far_the_idle_ones_are() -> None:
    valve = WatermarkValve(apart(2))
    valve.advance(0, 10)
    valve.advance(1, MAX_WATERMARK_US)
    assert valve.watermark_us == 10
    assert valve.set_idle(0, True) is None


def test_time_is_the_same_whether_a_channel_ends_before_the_others_are_idle_or_after() -> None:
    first, last = WatermarkValve(apart(2)), WatermarkValve(apart(2))
    for valve in (first, last):
        valve.advance(0, 10)
        valve.advance(1, 30)
    first.advance(1, MAX_WATERMARK_US)
    assert first.watermark_us == 10
    assert first.set_idle(0, True) == 30
    last.set_idle(0, True)
    assert last.watermark_us == 30
    assert last.advance(1, MAX_WATERMARK_US) is None
    assert first.is_idle and last.is_idle


def test_an_idle_channel_is_waited_for_while_one_is_active_that_hears_of_the_same() -> None:
    valve = WatermarkValve(together(0, 2))
    valve.advance(0, 10)
    assert valve.advance(1, 20) == 10
    valve.set_idle(0, True)
    assert valve.watermark_us == 10, "it may have rows that are due behind 10"
    assert valve.set_idle(1, True) is None, "nor does it pass the other when both are idle"
    assert valve.is_idle
    valve.set_idle(1, False)
    assert valve.advance(1, 30) is None, "channel 0 comes back, too"
    valve.set_idle(0, False)
    assert valve.advance(0, 25) == 25


def test_a_channel_that_ends_does_not_pass_an_idle_one_that_hears_of_the_same() -> None:
    valve = WatermarkValve(together(0, 2))
    valve.advance(0, 10)
    valve.advance(1, 20)
    valve.advance(1, MAX_WATERMARK_US)
    assert valve.set_idle(0, True) is None
    assert valve.watermark_us == 10


def test_who_hears_of_more_is_waited_for_and_who_hears_of_less_is_not() -> None:
    source, both = apart(1), together(0, 1)
    valve = WatermarkValve([*source, *both])
    valve.advance(0, 20)
    valve.advance(1, 10)
    valve.set_idle(1, True)
    assert valve.watermark_us == 10, "the source is active, so the task that reads it comes back"
    other = WatermarkValve([*source, *both])
    other.advance(1, 10)
    assert other.set_idle(0, True) == 10, "another subtask of the source may be what the task has heard of"


def test_subtasks_that_are_all_idle_are_waited_for_while_one_is_active_that_hears_of_them() -> None:
    """A source of two subtasks is read beside an operator that reads both. Only the first subtask has rows."""
    valve = WatermarkValve([*apart(2), *together(0, 1)])
    valve.set_idle(1, True)
    valve.advance(0, 10)
    assert valve.advance(2, 10) == 10
    valve.set_idle(0, True)
    assert valve.advance(2, 20) is None, "the subtask of which the operator has heard comes back"
    assert valve.waited_for() == [0, 1, 2]
    assert valve.set_idle(2, True) is None, "nor does the operator pass the furthest subtask when all are idle"
    assert valve.is_idle
    assert valve.set_idle(0, False) is None
    assert valve.set_idle(2, False) is None
    assert valve.advance(0, 20) == 20
    assert valve.advance(2, 30) is None
    assert valve.set_idle(0, True) is None
    assert valve.set_idle(1, False) is None, "the second one is behind"
    assert valve.advance(1, 25) == 25, "while one of them is active, an idle one is not waited for"


def test_subtasks_that_have_ended_say_how_far_an_operator_may_have_come_that_reads_them() -> None:
    valve = WatermarkValve([*apart(2), *together(0, 1)])
    valve.advance(0, 10)
    valve.advance(1, 30)
    valve.advance(1, MAX_WATERMARK_US)
    valve.set_idle(0, True)
    valve.advance(2, 30)
    assert valve.set_idle(2, True) == 30, "it has heard of that from the subtask that has ended"
    other = WatermarkValve([*apart(2), *together(0, 1)])
    other.advance(1, MAX_WATERMARK_US)
    other.advance(0, 10)
    other.set_idle(0, True)
    other.advance(2, 30)
    assert other.watermark_us == 10
    assert other.set_idle(2, True) is None, "only the other subtask can have come so far"


def test_subtasks_that_read_one_subtask_each_are_idle_on_their_own() -> None:
    valve = WatermarkValve([IdleOrigin(frozenset((0,)), frozenset((1,)), subtask) for subtask in range(2)])
    valve.advance(0, 10)
    assert valve.set_idle(1, True) == 10
    assert valve.advance(0, 15) == 15
    assert valve.set_idle(0, True) is None
    valve.set_idle(1, False)
    assert valve.advance(1, 25) == 25


def test_an_idle_channel_that_ends_does_not_hold_back_the_end_of_time() -> None:
    valve = WatermarkValve(apart(2))
    valve.set_idle(0, True)
    assert valve.advance(1, MAX_WATERMARK_US) is None, "the idle channel may still have rows"
    assert valve.advance(0, MAX_WATERMARK_US) == MAX_WATERMARK_US
    assert not valve.is_idle


def test_a_channel_that_has_ended_cannot_become_idle_and_hold_back_the_end_of_time() -> None:
    valve = WatermarkValve(apart(2))
    valve.advance(0, MAX_WATERMARK_US)
    assert valve.set_idle(0, True) is None
    assert not valve.is_idle
    assert valve.advance(1, MAX_WATERMARK_US) == MAX_WATERMARK_US


def test_when_the_last_active_channel_ends_the_rest_is_idle() -> None:
    valve = WatermarkValve(apart(2))
    valve.set_idle(0, True)
    assert not valve.is_idle
    valve.advance(1, MAX_WATERMARK_US)
    assert valve.is_idle, "who reads us must not wait for us"
    valve.set_idle(0, False)
    assert not valve.is_idle


@settings(max_examples=examples(300))
@given(
    channels=st.integers(1, 4),
    events=st.lists(st.tuples(st.integers(0, 3), st.one_of(st.booleans(), st.integers(-50, 50))), max_size=60),
)
def test_time_never_goes_back_nor_past_an_active_channel(channels: int, events: list[tuple[int, bool | int]]) -> None:
    valve = WatermarkValve(apart(channels))
    marks = [MIN_WATERMARK_US] * channels
    idle = [False] * channels
    time = MIN_WATERMARK_US
    for channel, event in events:
        channel %= channels
        if isinstance(event, bool):
            idle[channel] = event
            grown = valve.set_idle(channel, event)
        else:
            marks[channel] = max(marks[channel], event)
            grown = valve.advance(channel, event)
        if grown is not None:
            assert grown > time
            time = grown
        active = [mark for mark, is_idle in zip(marks, idle, strict=True) if not is_idle]
        due = min(active) if active else max(marks)
        assert grown is None or time == due
        assert time >= due, "time stood still although nothing held it back"
        assert valve.is_idle == (not active)
    for channel in range(channels):
        valve.advance(channel, MAX_WATERMARK_US)
    assert valve.watermark_us == MAX_WATERMARK_US


ORIGINS = st.builds(
    lambda every, one, subtask: IdleOrigin(every, one - every, subtask if one - every else 0),
    st.frozensets(st.integers(0, 2)),
    st.frozensets(st.integers(0, 2), min_size=1),
    st.integers(0, 2),
)


STATUSES = st.tuples(st.booleans(), st.integers(0, 3), st.sampled_from((0, 0, 0, 1, 2)))
"""Whether a channel is idle, and how many more splits of a source it considers."""


@settings(max_examples=examples(300))
@given(
    origins=st.lists(ORIGINS, min_size=1, max_size=6),
    events=st.lists(st.tuples(st.integers(0, 5), st.one_of(STATUSES, st.integers(-50, 50), st.none())), max_size=60),
)
def test_time_is_what_is_said_of_it_whatever_the_origins(
    origins: list[IdleOrigin], events: list[tuple[int, tuple[bool, int, int] | int | None]]
) -> None:
    world = World(0, Tempo())
    valve = CheckedWatermarkValve(world, origins)
    ended: set[int] = set()
    considered: list[Counter[int]] = [Counter() for _ in origins]
    for channel, event in events:
        channel %= len(origins)
        if event is None:
            ended.add(channel)
            valve.advance(channel, MAX_WATERMARK_US)
        elif isinstance(event, tuple):
            idle, source, more = event
            considered[channel][source] += more
            valve.set_idle(channel, idle, tuple(sorted(considered[channel].items())))
        elif channel not in ended:
            valve.advance(channel, event)
    for channel in range(len(origins)):
        valve.advance(channel, MAX_WATERMARK_US)
    assert valve.watermark_us == MAX_WATERMARK_US
    assert not world.bugs
