"""Event time over several splits: the slowest of them decides, and only a row out of order in its own split is late."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from operator_world import World

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US, Assigned
from midstream.engine.operators.base import Splits, SplitTimes
from midstream.engine.operators.watermarks import TimestampsOperator, WatermarkStrategy

TIMED = pa.schema([("t", pa.timestamp("us"))])


class FakeSplits(Splits):
    """What a source reports of its splits."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.parts: list[tuple[int, int]] = []
        self.waiting_us = MAX_WATERMARK_US
        self.first_us: dict[int, int] = {}
        """The earliest time that a row of a split may have, if that is known."""
        self.unordered: set[int] = set()
        self.latest: dict[int, int] = {}
        self.counts: Assigned = ()
        self.none_wait = True
        self.unknown: set[int] = set()
        """The splits whose source has not reported that they have no rows."""
        self.changed: Callable[[], None]

    @property
    def current(self) -> Sequence[tuple[int, int]]:
        return self.parts

    @property
    def open(self) -> Sequence[int]:
        return self.numbers

    def held_back_at_us(self, split: int) -> int:
        return self.first_us.get(split, MIN_WATERMARK_US + 1) - 1

    def is_held_to_its_end(self, split: int) -> bool:
        return split in self.unordered and split in self.first_us

    def latest_us(self, split: int) -> int | None:
        return self.latest.get(split)

    def note_latest_us(self, split: int, time_us: int) -> None:
        self.latest[split] = time_us

    @property
    def waiting_from_us(self) -> int:
        return self.waiting_us

    @property
    def assigned(self) -> Assigned:
        return self.counts

    @property
    def none_waits(self) -> bool:
        return self.none_wait

    def quiet_until_s(self, split: int) -> float:
        return float("-inf") if split in self.unknown else float("inf")

    def on_change(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def limit_drift(self, times: SplitTimes, drift_us: int) -> None:
        raise AssertionError("no strategy here has a drift")


class Stream:
    def __init__(self, strategy: WatermarkStrategy) -> None:
        self.splits = FakeSplits()
        self.world = World(TimestampsOperator("t", "t", strategy, TIMED), splits=self.splits)
        self.splits.changed()

    @property
    def watermark(self) -> int | None:
        assert self.world.out.watermarks == sorted(set(self.world.out.watermarks))
        return self.world.out.watermarks[-1] if self.world.out.watermarks else None

    @property
    def idles(self) -> list[bool]:
        return self.world.out.idles

    @property
    def assigned(self) -> list[Assigned]:
        return self.world.out.assigned

    def begin(
        self, *splits: int, all_assigned: bool = True, first: int | None = None, waiting: int = MIN_WATERMARK_US
    ) -> None:
        """`first`: the earliest time of the splits' rows. `waiting`: up to where event time need not wait for others."""
        self.splits.numbers += splits
        self.splits.first_us.update(dict.fromkeys(splits, first) if first is not None else {})
        self.splits.waiting_us = MAX_WATERMARK_US if all_assigned else waiting
        self.splits.changed()

    def end(self, split: int) -> None:
        self.splits.numbers.remove(split)
        self.splits.changed()

    def rows(self, split: int, *times: int) -> None:
        self.splits.parts = [(split, len(times))]
        array = pa.array(times, pa.timestamp("us"))
        self.world.process(pa.RecordBatch.from_arrays([array], schema=TIMED))

    def wait(self, ms: int) -> None:
        self.world.advance_clock(self.world.clock.ms + ms)


def test_the_slowest_open_split_that_is_not_idle_is_reported() -> None:
    stream = Stream(WatermarkStrategy.bounded("5 us", idle_after="1 s"))
    operator = stream.world.operator
    assert isinstance(operator, TimestampsOperator)
    assert operator.slowest_split() is None, "there is none"
    stream.begin(1, 2, 3)
    stream.rows(1, 100)
    stream.rows(2, 300)
    assert operator.slowest_split() == (2 + 1, MIN_WATERMARK_US, 294), "no row of it has come"
    stream.rows(3, 200)
    assert operator.slowest_split() == (1, 94, 294)
    stream.end(2)
    assert operator.slowest_split() == (1, 94, 294), "what was read to the end has come that far"
    stream.wait(600)
    stream.rows(3, 201)
    stream.wait(600)
    assert operator.slowest_split() == (3, 195, 294), "the other one is idle"
    stream.wait(2_000)
    assert operator.slowest_split() is None
    stream.rows(1, 500)
    stream.begin(4, all_assigned=False)
    assert operator.slowest_split() is None, "splits that wait to be handed out hold it back"


def test_the_slowest_split_decides_and_one_without_a_row_holds_event_time() -> None:
    stream = Stream(WatermarkStrategy.monotonous())
    stream.begin(1, 2)
    stream.rows(1, 10, 50)
    assert stream.watermark is None
    stream.rows(2, 5)
    assert stream.watermark == 4
    stream.rows(2, 70)
    assert stream.watermark == 49
    stream.rows(1, 60)
    assert stream.watermark == 59


def test_a_split_that_was_read_to_the_end_holds_nothing_back() -> None:
    stream = Stream(WatermarkStrategy.monotonous())
    stream.begin(1, 2)
    stream.rows(1, 50)
    stream.rows(2, 5)
    stream.end(2)
    assert stream.watermark == 49
    stream.end(1)
    assert stream.watermark == 49


def test_without_a_split_event_time_is_where_the_furthest_has_ended() -> None:
    stream = Stream(WatermarkStrategy.monotonous())
    stream.begin(1, 2)
    stream.rows(1, 50)
    stream.end(1)
    stream.rows(2, 5)
    stream.end(2)
    assert stream.watermark == 49
    stream.begin(3)
    stream.rows(3, 20, 80)
    assert stream.watermark == 79


def test_event_time_stands_until_all_splits_are_handed_out_wherever() -> None:
    stream = Stream(WatermarkStrategy.monotonous())
    stream.begin(1, all_assigned=False)
    stream.rows(1, 50)
    stream.end(1)
    assert stream.watermark is None
    stream.begin(2, all_assigned=False)
    stream.rows(2, 10)
    assert stream.watermark is None
    stream.begin()  # another subtask has got the last one
    assert stream.watermark == 9
    stream.begin(3, all_assigned=False)  # a new round
    stream.rows(2, 100)
    stream.rows(3, 100)
    assert stream.watermark == 9


def test_event_time_waits_for_a_split_from_the_earliest_time_of_its_rows() -> None:
    stream = Stream(WatermarkStrategy.bounded("3 us"))
    stream.begin(1, all_assigned=False, waiting=29)
    stream.rows(1, 10, 20)
    assert stream.watermark == 16, "less than what waits"
    stream.rows(1, 50)
    assert stream.watermark == 26, "rows of splits that are found later may be that much older"
    stream.begin(2, first=30, all_assigned=False, waiting=39)
    assert stream.watermark == 26
    stream.rows(2, 30)
    assert stream.watermark == 26
    stream.rows(2, 45)
    assert stream.watermark == 36
    stream.end(2)
    stream.begin(3, first=43)
    assert stream.watermark == 39
    stream.begin(4)
    stream.rows(3, 60)
    assert stream.watermark == 39, "of this one it is not known"


def test_splits_of_known_times_are_not_idle_while_others_wait() -> None:
    stream = Stream(WatermarkStrategy.monotonous(idle_after="1 s"))
    stream.begin(1, all_assigned=False, waiting=99)
    stream.rows(1, 50)
    stream.end(1)
    stream.wait(5_000)
    assert stream.idles == [] and stream.watermark == 49


def test_the_rows_of_a_split_that_may_have_any_order_hold_event_time_until_it_ends() -> None:
    stream = Stream(WatermarkStrategy.monotonous())
    stream.splits.unordered = {1, 2, 3}
    stream.begin(1, first=10, all_assigned=False, waiting=29)
    stream.rows(1, 90, 12)
    assert stream.watermark == 9
    stream.begin(2, first=30)
    stream.end(1)
    assert stream.watermark == 29
    stream.rows(2, 40)
    stream.end(2)
    assert stream.watermark == 89, "the furthest row of all"
    stream.begin(3)
    stream.rows(3, 100)
    assert stream.watermark == 99, "nothing is known of its rows"


def test_the_latest_row_of_a_split_counts_at_its_end_also_if_it_was_read_before_a_restore() -> None:
    stream = Stream(WatermarkStrategy.bounded("2 us"))
    stream.splits.unordered = {1}
    stream.begin(1, first=10)
    stream.rows(1, 90, 12)
    stream.rows(1, 50)
    assert stream.splits.latest == {1: 90}
    restored = Stream(WatermarkStrategy.bounded("2 us"))
    restored.splits.unordered, restored.splits.latest = {1}, {1: 90}
    restored.begin(1, first=10)
    restored.rows(1, 40)
    assert restored.watermark == 7
    restored.end(1)
    assert restored.watermark == 87


@given(st.data())
def test_no_row_within_the_bound_of_its_split_is_late(data: st.DataObject) -> None:
    delay = data.draw(st.integers(0, 5))
    stream = Stream(WatermarkStrategy.bounded(delay / 1e6))
    waiting = [
        data.draw(st.lists(st.integers(-20, 20), min_size=1, max_size=6)) for _ in range(data.draw(st.integers(1, 4)))
    ]
    stream.splits.unordered = data.draw(st.sets(st.integers(1, 4)))
    knows = [data.draw(st.booleans()) for _ in waiting]
    for number, times in enumerate(waiting, 1):
        for index in range(1, len(times)) if not (knows[number - 1] and number in stream.splits.unordered) else ():
            times[index] = max(times[index], max(times[:index]) - delay)  # within the bound
    newest = max(max(times) for times in waiting)
    first = [
        min(each) - data.draw(st.sampled_from([0, 3])) if known else None
        for known, each in zip(knows, waiting, strict=True)
    ]
    to_come = dict(enumerate(waiting, 1))
    unread = sorted(to_come)
    while to_come:
        number = data.draw(st.sampled_from([*stream.splits.numbers, *unread[:1]]))
        if number in unread:
            unread.remove(number)
            waits = [first[other - 1] for other in unread]
            known = min((each - 1 for each in waits if each is not None), default=MIN_WATERMARK_US)
            stream.begin(
                number,
                first=first[number - 1],
                all_assigned=not unread,
                waiting=MIN_WATERMARK_US if None in waits else known,
            )
        elif to_come[number]:
            time = to_come[number].pop(0)
            assert time > (MIN_WATERMARK_US if stream.watermark is None else stream.watermark)
            stream.rows(number, time)
        else:
            del to_come[number]
            stream.end(number)
    assert stream.watermark == newest - delay - 1


def test_an_idle_split_holds_nothing_back_until_its_next_row() -> None:
    stream = Stream(WatermarkStrategy.monotonous(idle_after="1 s"))
    stream.begin(1, 2)
    stream.rows(1, 10)
    stream.wait(600)
    stream.rows(2, 50)
    assert stream.watermark == 9
    stream.wait(500)
    assert stream.watermark == 49
    assert stream.idles == []
    stream.wait(600)
    assert stream.idles == [True]
    stream.rows(1, 60)
    assert stream.idles == [True, False]
    assert stream.watermark == 59, "the other one is still idle"
    stream.rows(2, 55)
    stream.rows(1, 90)
    assert stream.watermark == 59
    stream.rows(2, 80)
    assert stream.watermark == 79


def test_splits_that_become_idle_together_do_not_hold_back_the_one_that_continues() -> None:
    stream = Stream(WatermarkStrategy.monotonous(idle_after="1 s"))
    stream.begin(1, 2)
    stream.rows(1, 10)
    stream.rows(2, 50)
    stream.wait(1_100)
    assert stream.idles == [True]
    stream.rows(2, 60)
    assert stream.watermark == 59


def test_a_split_is_not_idle_before_its_source_has_reported_that_it_has_no_rows() -> None:
    stream = Stream(WatermarkStrategy.monotonous(idle_after="1 s"))
    stream.begin(1, 2)
    stream.splits.unknown = {2}
    stream.rows(1, 50)
    stream.wait(5_000)
    assert (stream.watermark, stream.idles) == (None, [])
    stream.splits.unknown = set()
    stream.wait(100)
    assert stream.idles == [True]


def test_a_subtask_reports_which_splits_it_considers_when_it_reports_whether_it_is_idle() -> None:
    stream = Stream(WatermarkStrategy.monotonous(idle_after="1 s"))
    stream.begin()
    stream.wait(1_000)
    assert stream.idles == [True] and stream.assigned == [()]
    stream.splits.counts = ((0, 1),)
    stream.begin()
    assert stream.idles == [True, True], "a split of another subtask"
    stream.splits.counts = ((0, 2),)
    stream.begin(1)
    assert stream.idles == [True, True, False], "it considers its split, and is active, in one status"
    stream.splits.counts = ((0, 3),)
    stream.begin()
    assert stream.idles == [True, True, False, False]
    assert stream.assigned == [(), ((0, 1),), ((0, 2),), ((0, 3),)]
    never = Stream(WatermarkStrategy.monotonous())
    never.splits.counts = ((0, 1),)
    never.begin(1)
    assert never.idles == [], "a subtask that is never idle is waited for anyway"


def test_a_subtask_whose_restored_splits_were_not_announced_is_not_idle() -> None:
    splits = FakeSplits()
    splits.numbers, splits.unknown = [1], {1}
    world = World(TimestampsOperator("t", "t", WatermarkStrategy.monotonous(idle_after="1 s"), TIMED), splits=splits)
    world.advance_clock(world.clock.ms + 5_000)
    assert world.out.idles == []
    splits.unknown = set()
    world.advance_clock(world.clock.ms + 100)
    assert world.out.idles == [True]


def test_no_subtask_is_idle_while_splits_wait_and_one_is_active_with_its_next_split() -> None:
    stream = Stream(WatermarkStrategy.monotonous(idle_after="1 s"))
    stream.begin(all_assigned=False)
    stream.wait(5_000)
    assert stream.idles == []
    stream.begin()
    assert stream.idles == [True]
    stream.begin(1)
    assert stream.idles == [True, False]
    stream.end(1)
    stream.wait(1_000)
    assert stream.idles == [True, False, True]
