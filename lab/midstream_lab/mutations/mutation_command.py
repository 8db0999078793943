"""The command `python -m midstream_lab mutations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from midstream.engine.core.errors import ConfigError
from midstream_lab.mutations.catalog import EQUIVALENT, MUTATIONS
from midstream_lab.mutations.mutation_score import RANDOM_SEEDS_MAX, Kill, Search, kill_table
from midstream_lab.simulate import Simulated, check_seconds

TABLE_CHARS = 180
NOT_ASKED = Search(0, None)


def measure_mutations(
    *,
    names: Sequence[str] = (),
    seeds_max: int = RANDOM_SEEDS_MAX,
    jobs: int | None = None,
    seconds: float | None = None,
    progress: Callable[[Kill], None] | None = None,
) -> Simulated:
    """Put every known bug back, or those of `names`, and measure how soon a run fails, in its own and in random
    scenarios.

    `seeds_max`: the limit on random scenarios; 0: only the mutations' own ones. `seconds`: the limit on the processor
    time of each search. The result is not ok if a mutation survives.
    """
    unknown = [name for name in names if name not in MUTATIONS and name not in EQUIVALENT]
    if unknown:
        raise ConfigError(f"mutations: there is no {unknown[0]!r}; there are {', '.join((*MUTATIONS, *EQUIVALENT))}")
    if seeds_max < 0:
        raise ConfigError(f"seeds-max: {seeds_max} is no number of seeds")
    check_seconds(seconds)
    found: dict[str, Kill] = {}
    chosen = [name for name in MUTATIONS if name in names or not names]
    for kill in kill_table(chosen, seeds_max, jobs, seconds) if chosen else ():
        found[kill.name] = kill
        if progress is not None:
            progress(kill)
    kills = [found[name] for name in chosen]
    survivors = [kill.name for kill in kills if (kill.random or kill.own or NOT_ASKED).seed is None]
    equivalent = {name: EQUIVALENT[name] for name in EQUIVALENT if name in names or not names}
    lines = ["its scenario      random", *map(line_of, kills)]
    lines += [f"{'equivalent':>24}  {name}: {one.what}: {one.proof}" for name, one in equivalent.items()]
    lines.append(f"{len(kills) - len(survivors)} of {len(kills)} mutations are found, {len(equivalent)} change nothing")
    data = {
        "seeds_max": seeds_max,
        "seconds": seconds,
        "survivors": survivors,
        "mutations": msgspec.to_builtins(kills),
        "equivalent": {name: {"what": one.what, "proof": one.proof} for name, one in equivalent.items()},
    }
    return Simulated(data, "\n".join(lines), ok=not survivors)


def line_of(kill: Kill) -> str:
    """Format a result: how many seeds were needed, and how the run failed that found the mutation."""
    found = next((each for each in (kill.random, kill.own) if each is not None and each.seed is not None), NOT_ASKED)
    raised = next((each.own_error for each in (kill.own, kill.random) if each is not None and each.own_error), "")
    result = f"its own code fails: {raised.splitlines()[0]}" if raised else found.failure
    return f"{_seeds(kill.own):>12}{_seeds(kill.random):>12}  {kill.name}: {kill.what} → {result}"[:TABLE_CHARS]


def _seeds(search: Search | None) -> str:
    if search is None:
        return "-"
    return f">{search.seeds}" if search.seed is None else str(search.seeds)
