"""What the random campaign runs: mostly all that there can be, and now and then a region in which bugs have been."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final

from midstream_lab.fault_kinds import FAULTS
from midstream_lab.jobs.shapes import SHAPES
from midstream_lab.scenarios import targeted, targeted_drift, targeted_ends, targeted_idleness, targeted_targets
from midstream_lab.scenarios import targeted_at_rest as at_rest
from midstream_lab.scenarios import targeted_combining as of_combining
from midstream_lab.scenarios.extremes import with_extremes
from midstream_lab.scenarios.scenario import Scenario, draw


def of_one_topology(seed: int) -> Scenario:
    """A shape that has a name, and whatever befalls it."""
    return draw(seed, topology=Random(f"topology {seed}").choice(tuple(SHAPES)))


def of_few_kinds(seed: int) -> Scenario:
    """The same, with faults of one or two kinds, and mostly checkpoints in quick succession."""
    random = Random(f"few kinds {seed}")
    kinds = random.sample(FAULTS, random.choice((1, 2)))
    drawn = draw(seed, topology=random.choice(tuple(SHAPES)), faults=kinds, rows=random.choice((50, 100, 200)))
    return replace(drawn, interval_s=random.choice((0.0005, 0.002, drawn.interval_s)))


NAMED: Final[Mapping[str, Callable[[int], Scenario]]] = {
    "backpressured": targeted.backpressured,
    "superseded": targeted.superseded,
    "hanging": targeted.hanging,
    "barriers_first": targeted.barriers_first,
    "poisoned": targeted.poisoned,
    "on_time": targeted.on_time,
    "always_due": targeted.always_due,
    "far_behind": targeted.far_behind,
    "sent_at_the_end": targeted.sent_at_the_end,
    "writing_at_the_end": targeted.writing_at_the_end,
    "recovering": targeted.recovering,
    "rejoined": targeted.rejoined,
    "dealt_by_groups": targeted.dealt_by_groups,
    "failing_alone": targeted.failing_alone,
    "cancelled_late": targeted.cancelled_late,
    "lying": targeted.lying,
    "unheard": targeted.unheard,
    "segmented": targeted.segmented,
    "unreadable": targeted.unreadable,
    "sliced": targeted.sliced,
    "tight_pool": targeted.tight_pool,
    "ending_rescaled": targeted.ending_rescaled,
    "draining": targeted.draining,
    "changing": targeted.changing,
    "changing_at_the_end": targeted.changing_at_the_end,
    "rescaled": targeted.rescaled,
    "summed": targeted.summed,
    "alarmed": targeted.alarmed,
    "in_tables": targeted.in_tables,
    "leaving": targeted.leaving,
    "given_up": targeted.given_up,
    "saving": targeted.saving,
    "held": targeted.held,
    "held_and_changed": targeted.held_and_changed,
    "stalled": targeted.stalled,
    "timed_out": targeted.timed_out,
    "shared": targeted.shared,
    "firing": targeted.firing,
    "fired_unevenly": targeted.fired_unevenly,
    "adapting": targeted.adapting,
    "unwritable": targeted.unwritable,
    "undisturbed": targeted.undisturbed,
    "cut_short": targeted.cut_short,
    "timely": targeted.timely,
    "tight": targeted.tight,
    "dawdling": targeted.dawdling,
    "joining": targeted.joining,
    "quiet": targeted.quiet("quiet"),
    "quiet_twice": targeted.quiet("quiet_twice"),
    "ending_keyed": targeted.ending("keyed"),
    "ending_broadcast": targeted.ending("broadcast"),
    "joining_tight": targeted.joining_tight,
    "several_splits": targeted.many_splits,
    "going_back_and_forth": at_rest.going_back_and_forth,
    "frozen": at_rest.frozen,
    "outcome_unknown": at_rest.outcome_unknown,
    "intolerant": at_rest.intolerant,
    "finding": at_rest.finding,
    "rescaled_committing": at_rest.struck_committing("rescale", "rescale_struck"),
    "states_dealt_anew": at_rest.dealt_anew("typed", "pickled"),
    "broadcast_dealt_anew": at_rest.dealt_anew("broadcast"),
    "uneven": at_rest.uneven,
    "windows_in_pieces": targeted.in_pieces(at_rest.behind_closely(at_rest.windowed("sliding", "window"))),
    "timers_in_pieces": targeted.in_pieces(partial(draw, topology="timers", faults=("kill_slot", "user_error"))),
    "joins_in_pieces": targeted.in_pieces(partial(draw, topology="join")),
    "in_pieces": targeted.in_pieces(of_one_topology),
    "read_badly": targeted.read_badly,
    "scant": targeted.scant,
    "dying_drained": targeted.dying_drained,
    "saving_slowly": targeted.saving_slowly,
    "denied": targeted.denied,
    "shrinking_committing": at_rest.shrinking_committing,
    "loaded_again": at_rest.loaded_again,
    "deleted_again": at_rest.deleted_again,
    "captured_in_vain": targeted.captured_in_vain,
    "learning_late": at_rest.learning_late,
    "waiting_in_runs": at_rest.waiting_in_runs,
    "ending_with_generators": at_rest.ending_with_generators,
    "given_up_and_frozen": at_rest.given_up_and_frozen,
    "back_to_pending": at_rest.back_to_pending,
    "back_to_pending_keeping": at_rest.back_to_pending_keeping,
    "saved_too_late": at_rest.saved_too_late,
    "combining": of_combining.combining,
    "few_kinds_combined": of_combining.combining_of_few_kinds,
    "combining_in_windows": of_combining.combining_windowed,
    "combined_rows_behind": of_combining.combining_behind,
    "joined_rows_combined": of_combining.combining_joined,
    "combined_rows_rejoined": of_combining.combining_rejoined,
    "back_behind_a_commit": at_rest.back_behind_a_commit,
    "rejoined_in_both_forms": of_combining.rejoined_in_both_forms,
    "back_to_the_deleted": at_rest.back_to_the_deleted,
    "firing_slowly": at_rest.firing_slowly,
    "partly_finished": at_rest.partly_finished,
    "dropping_late": at_rest.dropping_late,
    "rejoined_with_gaps": at_rest.rejoined_with_gaps,
    "ending_without_another": targeted_ends.ending_without_another,
    "intolerant_saving": targeted_ends.intolerant_saving,
    "ending_in_good_time": targeted_ends.ending_in_good_time,
    "in_step": targeted_drift.in_step,
    "in_step_with_lulls": targeted_drift.in_step_with_lulls,
    "watching": targeted_idleness.watching,
    "into_real_targets": targeted_targets.into_real_targets,
}
VISITS: Final = 0.3
"""Of the runs of the random campaign, how many are drawn from a region; the others from all that there can be."""
VISITS_AT_LARGE: Final = 0.4
"""Of these, how many are from the wide ones."""


def random_scenario(seed: int) -> Scenario:
    """What the random campaign runs: a pure function of the seed."""
    random = Random(f"region {seed}")
    if random.random() >= VISITS:
        return with_extremes(draw(seed), seed)
    if random.random() < VISITS_AT_LARGE:
        return with_extremes(random.choice((of_one_topology, of_few_kinds))(seed), seed)
    # Each draws a number and the highest wins, so that a new region takes its share and leaves other seeds as they are.
    return NAMED[max(NAMED, key=lambda name: Random(f"{name} {seed}").random())](seed)
