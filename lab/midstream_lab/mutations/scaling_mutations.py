"""Known bugs of jobs that scale themselves, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, Final

import msgspec

from midstream.engine.coordinator.placement.autoscaler import Autoscaler
from midstream.engine.protocol.messages import Reply
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios.scenario import Scenario, draw


def scaling(seed: int) -> Scenario:
    """A job that scales itself while slots die."""
    drawn = draw(seed, topology="keyed", parallelism=2, rescale_to=3, faults=("kill_slot",) * (seed % 2), rows=300)
    return replace(drawn, key_groups=16, is_scaling=True, row_us=200)


def losing(seed: int) -> Scenario:
    """A job that scales itself and loses slots, in whose place others come too late."""
    drawn = draw(seed, topology="keyed", parallelism=3, faults=("slots_late", "kill_slot", "slots_late"), rows=300)
    return replace(drawn, key_groups=16, is_scaling=True, row_us=200, interval_s=0.01)


def shrinks_on_advice() -> Replacements:
    original = Autoscaler.shrinks

    def shrinks(self: Any, job: Any, failure: Any) -> bool:
        bounds, self._bounds = self._bounds, msgspec.structs.replace(self._bounds, min=1, is_advice=False)
        is_shrinking = original(self, job, failure)
        self._bounds = bounds
        return is_shrinking

    return [(Autoscaler, "shrinks", shrinks)]


def scales_on_advice() -> Replacements:
    original = Autoscaler._change

    def change(self: Any, job: Any, wanted: int) -> None:
        bounds, self._bounds = self._bounds, msgspec.structs.replace(self._bounds, is_advice=False)
        original(self, job, wanted)
        self._bounds = bounds

    return [(Autoscaler, "_change", change)]


def scaling_counts_when_requested() -> Replacements:
    original, answered = Autoscaler._change, Autoscaler._answered

    def change(self: Any, job: Any, wanted: int) -> None:
        if not self._bounds.is_advice and not job.rescaling.is_under_way:
            answered(self, 0.0, job.plan.config.parallelism, wanted, "", Reply(checkpoint=""))
        original(self, job, wanted)

    return [(Autoscaler, "_change", change), (Autoscaler, "_answered", lambda *_: None)]


def scales_without_limit() -> Replacements:
    original = Autoscaler.poll

    def poll(self: Any, job: Any) -> None:
        self._changed_s = deque(maxlen=1000)
        original(self, job)

    return [(Autoscaler, "poll", poll)]


MUTATIONS: Final = named(
    Mutation("a job that only gives advice scales itself", scales_on_advice, scaling),
    Mutation("a change of the parallelism counts when it is requested", scaling_counts_when_requested, scaling),
    Mutation("the changes in an hour have no limit", scales_without_limit, scaling),
    Mutation("a job shrinks although it only gives advice", shrinks_on_advice, losing),
)
