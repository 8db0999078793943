"""Simulated jobs whose rows go to real files and tables: these show what is committed, whatever is struck, and no more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from effort import known, some
from midstream_lab.fault_kinds import COMMIT_FROZEN, ROLLBACK_FROZEN
from midstream_lab.mutations.catalog import MUTATIONS
from midstream_lab.mutations.mutation_score import applied
from midstream_lab.run import run
from midstream_lab.scenarios.scenario import draw
from midstream_lab.scenarios.targeted_targets import KINDS, committing_to

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


@pytest.mark.turns(5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_target_shows_what_is_committed_and_nothing_else(kind: str) -> None:
    checkpoints = 0
    for seed in some(range(6)):
        outcome = run(committing_to(kind)(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        checkpoints += outcome.checkpoints
    assert checkpoints > 0


@pytest.mark.parametrize("kind", ["parquet", "delta keyed", "iceberg"])
def test_drivers_that_wake_up_in_a_commit_or_a_rollback_do_no_damage(kind: str) -> None:
    """Of the first, one once deleted the pending files of its successor; of the others, one its committed files."""
    struck: Counter[str] = Counter()
    of_commits = committing_to(kind, strikes=(COMMIT_FROZEN, COMMIT_FROZEN, "stop_driver"))
    of_rollbacks = committing_to(kind, strikes=("go_back", "go_back", ROLLBACK_FROZEN))
    for seed in known((9,), range(40)):
        for scenario in (of_commits(seed), of_rollbacks(seed)):
            outcome = run(scenario)
            assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
            struck += outcome.faults
    assert struck[COMMIT_FROZEN] > 0
    assert struck[ROLLBACK_FROZEN] > 0


def test_a_run_with_a_real_target_depends_on_its_seed_alone() -> None:
    scenario = committing_to("iceberg keyed")(3)
    first, second = run(scenario), run(scenario)
    assert (first.hash, first.steps) == (second.hash, second.steps)


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg deleting"])
def test_without_faults_a_real_target_has_every_row(kind: str) -> None:
    outcome = run(replace(draw(1, topology="keyed", faults=(), rows=30), target=kind))
    assert not outcome.failures, outcome.failures[0]
    assert outcome.checkpoints > 0


def test_a_sink_that_keeps_the_first_row_of_a_key_is_found_by_what_its_table_shows() -> None:
    with applied(MUTATIONS["first_row_of_a_key_remains"]):
        failures = run(committing_to("delta keyed")(0)).failures
    assert failures
    assert "no order of commits gives what is visible" in failures[0]
