"""Known bugs, put back, must be found soon: this measures the simulator, not the engine."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from midstream_lab.mutations import catalog as mutations
from midstream_lab.mutations.catalog import EQUIVALENT, MUTATIONS
from midstream_lab.mutations.mutation_score import applied, search
from midstream_lab.run import run
from midstream_lab.scenarios.random_scenarios import random_scenario
from midstream_lab.scenarios.scenario import draw

SEEDS_MAX = 400
MEASURED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "mutations.json").read_text())["mutations"]
"""The output of `python -m midstream_lab mutations --json`."""
SEARCHES: dict[str, dict[str, Any]] = {kill["name"]: kill["own"] or kill["random"] for kill in MEASURED}
FIRST_SEEDS: dict[str, int] = {name: one["seed"] for name, one in SEARCHES.items() if one["seed"] is not None}
"""Where to begin: at the seed that found it. Should that not find it any more, later ones may."""
HOLES = [name for name in SEARCHES if name not in FIRST_SEEDS]
"""Bugs that the simulator does not find as of now."""


def test_no_mutation_hides_another_of_its_name() -> None:
    rooms = [room for room in vars(mutations).values() if inspect.ismodule(room) and hasattr(room, "MUTATIONS")]
    assert sum(len(room.MUTATIONS) for room in rooms) == len(MUTATIONS)


def test_what_mutations_replace_exists() -> None:
    missing = []
    for name, mutation in MUTATIONS.items():
        try:
            with applied(mutation):
                pass
        except AttributeError as error:
            missing.append(f"{name}: {error}")
    assert missing == []


def test_every_mutation_was_measured() -> None:
    assert sorted(SEARCHES) == sorted(MUTATIONS)


@pytest.mark.systems
@pytest.mark.turns(10)  # all of them take five minutes of a core
@pytest.mark.timeout(1200)  # one that is not found any more takes hundreds of seeds
@pytest.mark.parametrize("name", FIRST_SEEDS)
def test_the_simulator_finds(name: str) -> None:
    mutation = MUTATIONS[name]
    found = search(mutation, mutation.scenario or random_scenario, SEEDS_MAX, FIRST_SEEDS[name])
    assert found.seed is not None, f"{mutation.what}: survived {SEEDS_MAX} seeds"
    assert not found.own_error, f"what failed is the mutation itself: {found.own_error}"


def test_bugs_that_are_not_found_yet_still_fit_the_engine() -> None:
    """And are still not found by their first seed: one that is joins those above, once it is measured again."""
    for name in HOLES:
        mutation = MUTATIONS[name]
        found = search(mutation, mutation.scenario or random_scenario, 1)
        assert not found.own_error, f"what failed is the mutation itself: {found.own_error}"
        assert found.seed is None, f"{mutation.what}: found now ({found.failure}); measure the mutations again"


@pytest.mark.parametrize("name", EQUIVALENT)
def test_what_changes_nothing_is_not_looked_for(name: str) -> None:
    assert name not in MUTATIONS
    assert EQUIVALENT[name].proof


def test_a_mutation_ends_with_its_context() -> None:
    with applied(MUTATIONS["skip_alignment"]):
        pass
    assert not run(draw(0, rows=100)).failures
