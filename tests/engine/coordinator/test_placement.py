"""Where tasks run in the next attempt: a slot keeps what it has, and only the share of a lost one moves."""

from __future__ import annotations

from fractions import Fraction

import pytest
from coordinator_world import Bench
from hypothesis import given
from hypothesis import strategies as st
from test_rescaling import acknowledged_by_all, rescale

from midstream.engine.coordinator.placement.slot_pool import placed


@pytest.mark.parametrize(
    ("before", "there", "after"),
    [
        ((), (0, 1), (0, 1)),
        ((0, 1, 2, 3), (1, 2, 3, 4), (4, 1, 2, 3)),
        ((4, 1, 2, 3), (4, 2, 3, 5), (4, 5, 2, 3)),
        ((0, 1), (0, 1, 2), (0, 2, 1)),
        ((0, 1, 2), (0, 1, 2, 3), (0, 1, 3, 2)),
        ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 3)),
        ((0, 1, 2, 3), (0, 2, 3), (0, 2, 3)),
    ],
)
def test_a_slot_keeps_its_subtask_or_the_one_with_most_of_its_key_groups(
    before: tuple[int, ...], there: tuple[int, ...], after: tuple[int, ...]
) -> None:
    assert placed(before, there, len(after)) == after


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_every_subtask_has_a_slot_of_its_own_and_those_that_stay_keep_half_of_their_part(
    parallelism: int, needed: int, data: st.DataObject
) -> None:
    before = tuple(data.draw(st.permutations(range(parallelism))))
    lost = data.draw(st.sets(st.sampled_from(before)))
    there = tuple(sorted({*range(max(parallelism, needed) + len(lost))} - lost))
    after = placed(before, there, needed)
    assert len({*after}) == needed and {*after} <= {*there}
    stay = [slot for slot in after if slot in before]
    if not lost:
        assert len(stay) == min(parallelism, needed)
        part = Fraction(1, max(parallelism, needed))
        for slot in stay:
            old, new = Fraction(before.index(slot)), Fraction(after.index(slot))
            both = min((old + 1) / parallelism, (new + 1) / needed) - max(old / parallelism, new / needed)
            assert both >= part / 2
    if parallelism == needed:
        assert all(after[index] == slot for index, slot in enumerate(before) if slot not in lost)


def test_a_slot_that_takes_the_place_of_a_lost_one_runs_its_subtasks() -> None:
    bench = Bench().run()
    assert bench.slots == (0, 1)
    bench.lose(0)
    bench.wait(1)
    bench.connect()
    assert bench.slots == (2, 1)


def test_a_rescale_leaves_each_slot_most_of_its_key_groups() -> None:
    bench = Bench().run()
    client = rescale(bench, 3)
    bench.connect()
    acknowledged_by_all(bench)
    assert bench.replies[client].error == "" and bench.slots == (0, 2, 1)
