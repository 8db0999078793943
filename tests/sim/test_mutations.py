"""Known bugs, put back, must be found soon: this measures the simulator, not the engine."""

from __future__ import annotations

import re

import pytest

from midstream.sim.mutations import MUTATIONS, killed_after
from midstream.sim.run import run
from midstream.sim.scenario import draw

SEEDS_MAX = 400
FIRST_SEEDS = {
    "partition_ends_early": 3,
    "grant_nothing_back": 1,
    "zombie_goes_on": 12,
    "commit_before_completion": 36,
    "leak_credit": 15,
    "remaining_behind_the_queue": 35,
    "forget_partly_sent": 40,
    "output_before_input": 18,
    "swallow_read_error": 88,
    "recovery_waits_for_pool": 300,
}
"""Where to begin with those that take longest; `midstream simulate --mutations` begins with 0."""


@pytest.mark.timeout(1200)  # recovery_waits_for_pool takes some hundred seeds, which is minutes on a busy machine
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_finds(name: str) -> None:
    killed = killed_after(name, SEEDS_MAX, FIRST_SEEDS.get(name, 0))
    assert killed is not None, f"{MUTATIONS[name].what}: survived {SEEDS_MAX} seeds"
    frames = re.findall(r'File "(.+?)"', killed[1])
    assert not frames or not frames[-1].endswith("mutations.py"), f"what failed is the mutation itself: {killed[1]}"


def test_a_mutation_ends_with_its_context() -> None:
    killed_after("skip_alignment", 1)
    assert not run(draw(0, rows=100)).failures
