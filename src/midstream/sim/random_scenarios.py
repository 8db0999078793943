"""What the random campaign runs: mostly all that there can be, and now and then a region in which bugs have been."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final

from midstream.sim import regions, regions_of_ends
from midstream.sim import regions_at_rest as at_rest
from midstream.sim import regions_combining as of_combining
from midstream.sim.extremes import with_extremes
from midstream.sim.scenario import FAULTS, Scenario, draw
from midstream.sim.shapes import SHAPES


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
    "backpressured": regions.backpressured,
    "superseded": regions.superseded,
    "hanging": regions.hanging,
    "barriers_first": regions.barriers_first,
    "poisoned": regions.poisoned,
    "on_time": regions.on_time,
    "always_due": regions.always_due,
    "far_behind": regions.far_behind,
    "sent_at_the_end": regions.sent_at_the_end,
    "writing_at_the_end": regions.writing_at_the_end,
    "recovering": regions.recovering,
    "rejoined": regions.rejoined,
    "dealt_by_groups": regions.dealt_by_groups,
    "failing_alone": regions.failing_alone,
    "cancelled_late": regions.cancelled_late,
    "lying": regions.lying,
    "unheard": regions.unheard,
    "segmented": regions.segmented,
    "unreadable": regions.unreadable,
    "sliced": regions.sliced,
    "tight_pool": regions.tight_pool,
    "ending_rescaled": regions.ending_rescaled,
    "draining": regions.draining,
    "changing": regions.changing,
    "changing_at_the_end": regions.changing_at_the_end,
    "rescaled": regions.rescaled,
    "summed": regions.summed,
    "alarmed": regions.alarmed,
    "in_tables": regions.in_tables,
    "leaving": regions.leaving,
    "given_up": regions.given_up,
    "saving": regions.saving,
    "held": regions.held,
    "held_and_changed": regions.held_and_changed,
    "stalled": regions.stalled,
    "timed_out": regions.timed_out,
    "shared": regions.shared,
    "firing": regions.firing,
    "fired_unevenly": regions.fired_unevenly,
    "adapting": regions.adapting,
    "unwritable": regions.unwritable,
    "undisturbed": regions.undisturbed,
    "cut_short": regions.cut_short,
    "timely": regions.timely,
    "tight": regions.tight,
    "dawdling": regions.dawdling,
    "joining": regions.joining,
    "quiet": regions.quiet("quiet"),
    "quiet_twice": regions.quiet("quiet_twice"),
    "ending_keyed": regions.ending("keyed"),
    "ending_broadcast": regions.ending("broadcast"),
    "joining_tight": regions.joining_tight,
    "several_splits": regions.many_splits,
    "going_back_and_forth": at_rest.going_back_and_forth,
    "frozen": at_rest.frozen,
    "outcome_unknown": at_rest.outcome_unknown,
    "intolerant": at_rest.intolerant,
    "finding": at_rest.finding,
    "rescaled_committing": at_rest.struck_committing("rescale", "rescale_struck"),
    "states_dealt_anew": at_rest.dealt_anew("typed", "pickled"),
    "broadcast_dealt_anew": at_rest.dealt_anew("broadcast"),
    "uneven": at_rest.uneven,
    "windows_in_pieces": regions.in_pieces(at_rest.behind_closely(at_rest.windowed("sliding", "window"))),
    "timers_in_pieces": regions.in_pieces(partial(draw, topology="timers", faults=("kill_slot", "user_error"))),
    "joins_in_pieces": regions.in_pieces(partial(draw, topology="join")),
    "in_pieces": regions.in_pieces(of_one_topology),
    "read_badly": regions.read_badly,
    "scant": regions.scant,
    "dying_drained": regions.dying_drained,
    "saving_slowly": regions.saving_slowly,
    "denied": regions.denied,
    "shrinking_committing": at_rest.shrinking_committing,
    "loaded_again": at_rest.loaded_again,
    "deleted_again": at_rest.deleted_again,
    "captured_in_vain": regions.captured_in_vain,
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
    "ending_without_another": regions_of_ends.ending_without_another,
    "intolerant_saving": regions_of_ends.intolerant_saving,
    "ending_in_good_time": regions_of_ends.ending_in_good_time,
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
