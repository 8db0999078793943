"""Known bugs, put back on purpose: how good the simulator is at finding them.

Each mutation replaces a piece of the engine while it is applied. One that survives is a hole in the
simulator, unless nobody could observe it: those are listed apart, with the proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from midstream.sim import (
    barrier_mutations,
    coordination_mutations,
    exchange_mutations,
    in_flight_mutations,
    savepoint_mutations,
    table_mutations,
    worker_mutations,
)
from midstream.sim.mutation import Equivalent, Mutation

MUTATIONS: Final[Mapping[str, Mutation]] = {
    **barrier_mutations.MUTATIONS,
    **exchange_mutations.MUTATIONS,
    **in_flight_mutations.MUTATIONS,
    **worker_mutations.MUTATIONS,
    **coordination_mutations.MUTATIONS,
    **savepoint_mutations.MUTATIONS,
    **table_mutations.MUTATIONS,
}
EQUIVALENT: Final[Mapping[str, Equivalent]] = {}
