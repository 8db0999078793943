"""Where lanes are committed when all tasks have finished and slots are lost one by one."""

from __future__ import annotations

from random import Random

import pytest

from midstream.engine.coordinator.checkpoints.slot_commit_dispatcher import in_place_of_lost


@pytest.mark.parametrize("seed", range(200))
def test_a_lane_moves_only_when_its_slot_is_lost(seed: int) -> None:
    random = Random(seed)
    slots = tuple(random.sample(range(20), random.randint(1, 8)))
    live = {*slots, *random.sample(range(20, 30), random.randint(0, 3))}
    before = slots
    while live:
        now = in_place_of_lost(slots, live)
        assert now is not None and len(now) == len(slots) and live.issuperset(now)
        assert all(new == old or old not in live for new, old in zip(now, before, strict=True)), (now, before, live)
        before = now
        if live.isdisjoint(slots) and random.random() < 0.3:
            live.add(max(live) + random.randint(1, 3))  # one more connects
        else:
            live.remove(random.choice(sorted(live)))
    assert in_place_of_lost(slots, live) is None


def test_the_next_slot_that_lives_stands_in() -> None:
    assert in_place_of_lost((5, 6, 7, 8), {5, 8, 9}) == (5, 8, 8, 8)
    assert in_place_of_lost((5, 6, 7, 8), {6, 9}) == (6, 6, 6, 6)
    assert in_place_of_lost((5, 6, 7, 8), {11, 9}) == (9, 9, 9, 9)
