"""What counts as finding a known bug, and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from midstream.engine.worker.task import Task
from midstream_lab.mutations.catalog import MUTATIONS
from midstream_lab.mutations.mutation import Mutation, Replacements
from midstream_lab.mutations.mutation_score import SCENARIO_SEEDS_MAX, applied, bounded, kill_of, search, unmutated
from midstream_lab.run import run
from midstream_lab.scenarios.scenario import Scenario, draw


def small(seed: int) -> Scenario:
    return draw(seed, topology="keyed", parallelism=2, rows=30, faults=())


def hasty(seed: int) -> Scenario:
    """No run comes to its end in so few steps."""
    return replace(small(seed), steps_max=10)


def _raises() -> Replacements:
    def on_completed(self: Any, checkpoint_id: int) -> None:
        raise LookupError("this is not what the mutation is about")

    return [(Task, "_on_completed", on_completed)]


def _does_not_fit() -> Replacements:
    def trigger_checkpoint(self: Any) -> None:
        pass

    return [(Task, "trigger_checkpoint", trigger_checkpoint)]


def test_a_run_that_fails_without_the_mutation_too_is_no_kill() -> None:
    found = search(MUTATIONS["skip_alignment"], hasty, 3)
    assert found.seed is None
    assert found.unfit == (0, 1, 2)


def test_a_run_that_fails_where_the_engine_passes_is_one() -> None:
    found = search(Mutation("nothing is committed", MUTATIONS["ack_before_write"].replacements), small, 5)
    assert found.seed == found.seeds - 1
    assert found.failure
    assert not found.unfit


def test_a_call_of_the_mutation_that_does_not_fit_is_no_kill() -> None:
    found = search(Mutation("its signature is old", _does_not_fit), small, 2)
    assert found.seed is None
    assert "_does_not_fit.<locals>" in found.own_error


def test_what_the_code_of_a_mutation_raises_is_no_kill() -> None:
    found = search(Mutation("its code fails", _raises), small, 2)
    assert found.seed is None
    assert "LookupError" in found.own_error


def test_what_has_no_scenario_of_its_own_is_looked_for_in_random_runs() -> None:
    kill = kill_of("ack_before_write", random_seeds_max=0)
    assert kill.own is None
    assert kill.random is not None
    assert kill.random.seeds <= SCENARIO_SEEDS_MAX


def test_random_runs_that_do_not_come_to_what_is_replaced_cannot_find_it() -> None:
    seeds = range(3)
    mutation = MUTATIONS["forget_recovered"]
    target = mutation.replacements()[0][:2]
    skipped = [seed for seed in seeds if target not in unmutated(seed).reached]
    assert skipped
    for seed in skipped:
        with applied(mutation):
            mutated = run(bounded(draw(seed)))
        assert mutated.hash == run(bounded(draw(seed))).hash
