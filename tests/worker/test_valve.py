"""Event time of a task with several channels."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.worker.valve import WatermarkValve


def test_time_is_that_of_the_slowest_channel() -> None:
    valve = WatermarkValve(2)
    assert valve.advance(0, 10) is None
    assert valve.advance(1, 5) == 5
    assert valve.advance(1, 5) is None
    assert valve.advance(1, 20) == 10


def test_an_idle_channel_is_not_waited_for() -> None:
    valve = WatermarkValve(2)
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


def test_when_nobody_is_left_to_wait_for_time_is_that_of_the_furthest() -> None:
    valve = WatermarkValve(3)
    assert [valve.advance(channel, mark) for channel, mark in enumerate((10, 30, 20))] == [None, None, 10]
    assert [valve.set_idle(channel, True) for channel in (1, 0)] == [None, 20]
    assert valve.set_idle(2, True) == 30
    assert valve.is_idle
    assert valve.set_idle(0, False) is None, "time does not turn back"
    assert valve.advance(0, 40) == 40


def test_channels_that_have_ended_say_nothing_of_how_far_the_idle_ones_are() -> None:
    valve = WatermarkValve(2)
    valve.advance(0, 10)
    valve.advance(1, MAX_WATERMARK_US)
    assert valve.watermark_us == 10
    assert valve.set_idle(0, True) is None


def test_an_idle_channel_that_ends_does_not_hold_back_the_end_of_time() -> None:
    valve = WatermarkValve(2)
    valve.set_idle(0, True)
    assert valve.advance(1, MAX_WATERMARK_US) is None, "the idle channel may still have rows"
    assert valve.advance(0, MAX_WATERMARK_US) == MAX_WATERMARK_US
    assert not valve.is_idle


def test_a_channel_that_has_ended_cannot_become_idle_and_hold_back_the_end_of_time() -> None:
    valve = WatermarkValve(2)
    valve.advance(0, MAX_WATERMARK_US)
    assert valve.set_idle(0, True) is None
    assert not valve.is_idle
    assert valve.advance(1, MAX_WATERMARK_US) == MAX_WATERMARK_US


def test_when_the_last_active_channel_ends_the_rest_is_idle() -> None:
    valve = WatermarkValve(2)
    valve.set_idle(0, True)
    assert not valve.is_idle
    valve.advance(1, MAX_WATERMARK_US)
    assert valve.is_idle, "who reads us must not wait for us"
    valve.set_idle(0, False)
    assert not valve.is_idle


@settings(max_examples=300, deadline=None)
@given(
    channels=st.integers(1, 4),
    events=st.lists(st.tuples(st.integers(0, 3), st.one_of(st.booleans(), st.integers(-50, 50))), max_size=60),
)
def test_time_never_goes_back_nor_past_an_active_channel(channels: int, events: list[tuple[int, bool | int]]) -> None:
    valve = WatermarkValve(channels)
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
