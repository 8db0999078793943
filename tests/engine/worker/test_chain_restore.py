"""Where event time stood is where it continues, also for operators that ran apart and are chained now."""

from __future__ import annotations

import pyarrow as pa
import pytest

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US, Event, Watermark, WatermarkStatus
from midstream.engine.operators.base import Operator
from midstream.engine.worker.operator_chain import OperatorChain, TaskOutputs
from standing_clock import StandingClock


class Fires(Operator):
    def __init__(self) -> None:
        self.at: list[int] = []

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        raise AssertionError("no rows here")

    def advance_watermark(self, watermark_us: int) -> bool:
        self.at.append(watermark_us)
        return True


class Generates(Fires):
    makes_watermarks = True


class Heard(TaskOutputs):
    """There are no partitions: what they would be told is noted."""

    def __init__(self) -> None:
        super().__init__(())
        self.watermarks: list[int] = []
        self.statuses: list[WatermarkStatus] = []

    def broadcast(self, event: Event) -> None:
        if isinstance(event, Watermark):
            self.watermarks.append(event.timestamp_us)
        elif isinstance(event, WatermarkStatus):
            self.watermarks.append(-1 if event.idle else -2)
            self.statuses.append(event)


def restored(marks: dict[int, tuple[int, int]], *operators: Fires) -> tuple[OperatorChain, Heard]:
    edges = Heard()
    chain = OperatorChain(list(operators), edges, StandingClock())
    chain.restore(marks)
    while chain.is_firing:
        chain.pump()
    return chain, edges


@pytest.mark.parametrize(
    "marks",
    [
        {0: (100, 100), 1: (40, 40)},
        {0: (100, 100), 1: (40, 20)},
        {0: (100, 100), 1: (100, 40)},
        {0: (100, 90), 1: (40, 40)},
        {0: (100, 100)},
    ],
)
def test_the_second_operator_hears_what_the_first_had_let_out(marks: dict[int, tuple[int, int]]) -> None:
    first, second = Fires(), Fires()
    chain, edges = restored(marks, first, second)
    assert second.at[-1] == 100 and edges.watermarks[-1] == 100
    assert chain.watermark_us == 100


def test_what_had_come_through_is_not_fired_again() -> None:
    first, second = Fires(), Fires()
    chain, _ = restored({0: (100, 100), 1: (100, 100)}, first, second)
    assert not first.at and not second.at and chain.watermark_us == 100


def test_event_time_of_before_does_not_pass_a_new_generator() -> None:
    first, generator, last = Fires(), Generates(), Fires()
    _, edges = restored({0: (100, 100)}, first, generator, last)
    assert not last.at and not edges.watermarks


@pytest.mark.parametrize("others", [{}, {1: (MIN_WATERMARK_US, 100), 2: (100, 100)}])
def test_the_end_of_event_time_passes_a_generator_that_ran_apart_or_is_new(others: dict[int, tuple[int, int]]) -> None:
    first, generator, last = Fires(), Generates(), Fires()
    chain, edges = restored({0: (MAX_WATERMARK_US, MAX_WATERMARK_US), **others}, first, generator, last)
    chain.offer(0, MAX_WATERMARK_US)  # the source ends again
    assert last.at == [MAX_WATERMARK_US] and edges.watermarks == [MAX_WATERMARK_US]


class Delays(Fires):
    watermark_delay_us = 30


def test_an_operator_that_still_emits_earlier_rows_delays_watermarks_but_not_the_end_of_time() -> None:
    first, last, edges = Delays(), Fires(), Heard()
    chain = OperatorChain([first, last], edges, StandingClock())
    for watermark_us in (MIN_WATERMARK_US + 1, 100, 120, MAX_WATERMARK_US):
        chain.offer(0, watermark_us)
        chain.check()
    assert first.at == [MIN_WATERMARK_US + 1, 100, 120, MAX_WATERMARK_US]
    assert last.at == edges.watermarks == [70, 90, MAX_WATERMARK_US]


@pytest.mark.parametrize(
    ("marks", "fired"),
    [
        ({0: (100, 70), 1: (70, 70)}, []),
        ({0: (100, 70), 1: (70, 40)}, [70]),
        ({0: (100, 60), 1: (60, 60)}, [70]),
        ({0: (100, 80), 1: (80, 80)}, []),  # its delay was shorter then
        ({0: (MAX_WATERMARK_US, 70), 1: (70, 70)}, [MAX_WATERMARK_US]),
    ],
)
def test_a_delayed_watermark_is_restored_where_it_was(marks: dict[int, tuple[int, int]], fired: list[int]) -> None:
    first, second = Delays(), Fires()
    chain, edges = restored(marks, first, second)
    assert second.at == edges.watermarks == fired
    chain.check()
    if not fired:
        chain.offer(0, 120)
        assert edges.watermarks == [90]


def test_a_delayed_watermark_leaves_after_all_slices_have_fired() -> None:
    class DelaysInSlices(FiresInSlices):
        watermark_delay_us = 30

    edges = Heard()
    chain = OperatorChain([DelaysInSlices(2)], edges, StandingClock())
    chain.offer(0, 100)
    assert edges.watermarks == [] and chain.is_firing
    chain.pump()
    assert edges.watermarks == [70] and not chain.is_firing


class FiresInSlices(Fires):
    def __init__(self, slices: int) -> None:
        super().__init__()
        self.slices = slices

    def advance_watermark(self, watermark_us: int) -> bool:
        super().advance_watermark(watermark_us)
        self.slices -= 1
        return self.slices <= 0


IDLE, ACTIVE = -1, -2
"""As `TaskOutputs` has them among the watermarks."""


def test_a_chain_is_not_idle_before_its_last_watermark_has_fired() -> None:
    edges = Heard()
    chain = OperatorChain([FiresInSlices(3)], edges, StandingClock())
    chain.offer(0, 100)
    chain.idle(0, True)
    assert edges.watermarks == []
    while chain.is_firing:
        chain.pump()
    assert edges.watermarks == [100, IDLE]


def test_a_chain_that_fires_reports_the_splits_that_it_considers_before_it_is_idle() -> None:
    edges = Heard()
    chain = OperatorChain([FiresInSlices(3)], edges, StandingClock())
    chain.idle(0, True, ((0, 1),))
    chain.offer(0, 100)
    chain.idle(0, True, ((0, 2),))
    assert edges.statuses == [WatermarkStatus(True, ((0, 1),)), WatermarkStatus(False, ((0, 2),))]
    while chain.is_firing:
        chain.pump()
    assert edges.watermarks == [IDLE, ACTIVE, 100, IDLE]
    assert edges.statuses[2:] == [WatermarkStatus(True, ((0, 2),))]


def test_a_chain_that_was_idle_for_a_moment_only_says_nothing_of_it() -> None:
    edges = Heard()
    chain = OperatorChain([FiresInSlices(3)], edges, StandingClock())
    chain.offer(0, 100)
    chain.idle(0, True)
    chain.idle(0, False)
    while chain.is_firing:
        chain.pump()
    assert edges.watermarks == [100]
    chain.idle(0, True)
    chain.idle(0, True)
    chain.idle(0, False)
    assert edges.watermarks == [100, IDLE, ACTIVE]
