"""Known bugs, put back, must be found soon: this measures the simulator, not the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from midstream.sim.kills import applied, search
from midstream.sim.mutations import EQUIVALENT, MUTATIONS
from midstream.sim.run import run
from midstream.sim.scenario import draw

SEEDS_MAX = 400
MEASURED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "mutations.json").read_text())["mutations"]
"""What `midstream simulate --mutations --json` has said."""
FOUND: dict[str, dict[str, Any]] = {kill["name"]: kill["own"] or kill["random"] for kill in MEASURED}
"""Where to begin: at the seed that found it. Should that not find it any more, those behind it may."""


def _name(name: str) -> Any:
    if name not in FOUND or FOUND[name]["seed"] is not None:
        return name
    hole = f"a hole in the simulator: survived {FOUND[name]['seeds']} seeds when it was measured"
    return pytest.param(name, marks=pytest.mark.xfail(run=False, reason=hole))


@pytest.mark.timeout(1200)  # one that is not found any more takes hundreds of seeds
@pytest.mark.parametrize("name", [_name(name) for name in MUTATIONS])
def test_the_simulator_finds(name: str) -> None:
    mutation = MUTATIONS[name]
    found = search(mutation, mutation.scenario or draw, SEEDS_MAX, FOUND[name]["seed"] if name in FOUND else 0)
    assert found.seed is not None, f"{mutation.what}: survived {SEEDS_MAX} seeds"
    assert not found.own_error, f"what failed is the mutation itself: {found.own_error}"


@pytest.mark.parametrize("name", EQUIVALENT)
def test_what_changes_nothing_is_not_looked_for(name: str) -> None:
    assert name not in MUTATIONS
    assert EQUIVALENT[name].proof


def test_a_mutation_ends_with_its_context() -> None:
    with applied(MUTATIONS["skip_alignment"]):
        pass
    assert not run(draw(0, rows=100)).failures
