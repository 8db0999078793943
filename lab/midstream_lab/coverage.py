"""Records which pairs of state and event each state machine has met, and reports which it never has.

During a `recording`, the methods by which events reach the machines (`midstream_lab.watched_machines`) are wrapped; the
machines themselves are unchanged. Impossible pairs are listed with the reason; if one is seen, the
reason is wrong. A pair whose state or event is not listed is reported too, since the list is then wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias
from unittest.mock import patch

import msgspec

from midstream_lab.impossible_pairs import MACHINES

Pair: TypeAlias = tuple[str, str, str]
"""The machine, the state and the event."""


@contextmanager
def recording() -> Iterator[Counter[Pair]]:
    """Count all pairs that occur in this process within the block. Blocks must not overlap."""
    seen: Counter[Pair] = Counter()
    with ExitStack() as stack:
        for machine in MACHINES:
            for of in machine.watched():
                wrapped = _recorded(machine.name, getattr(of.owner, of.method), of.of_call, seen)
                stack.enter_context(patch.object(of.owner, of.method, wrapped))
        yield seen


def _recorded(
    machine: str, method: Callable[..., Any], of_call: Callable[..., tuple[str, str] | None], seen: Counter[Pair]
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        pair = of_call(*arguments, **named)
        if pair is not None:
            state, event = pair
            seen[machine, state, event] += 1
        return method(*arguments, **named)

    return call


# ---- the report --------------------------------------------------------------


class MachineCoverage(msgspec.Struct, frozen=True):
    machine: str
    possible: int
    seen: int
    unseen: tuple[tuple[str, str], ...]
    """The possible pairs (state, event) that were not seen."""
    surprising: tuple[tuple[str, str, str], ...]
    """The pairs that were seen although they are listed as impossible, as (state, event, why)."""
    unlisted: tuple[tuple[str, str], ...]
    """The pairs (state, event) whose state or event is not listed."""
    counts: tuple[tuple[str, str, int], ...]
    """The numbers of pairs, as (state, event, number)."""


def report(seen: Mapping[Pair, int]) -> list[MachineCoverage]:
    found = []
    for machine in MACHINES:
        counts = {(state, event): n for (name, state, event), n in seen.items() if name == machine.name and n}
        possible = machine.possible
        order = {pair: index for index, pair in enumerate(possible)}
        surprising = tuple((*pair, why) for pair in counts if (why := machine.why_impossible(*pair)) is not None)
        listed = sorted(counts, key=lambda pair: (order.get(pair, len(order)), pair))
        found.append(
            MachineCoverage(
                machine=machine.name,
                possible=len(possible),
                seen=sum(pair in counts for pair in possible),
                unseen=tuple(pair for pair in possible if pair not in counts),
                surprising=surprising,
                unlisted=tuple(pair for pair in listed if not machine.lists(*pair)),
                counts=tuple((*pair, counts[pair]) for pair in listed),
            )
        )
    return found


def lines_of(coverage: Sequence[MachineCoverage]) -> Iterator[str]:
    """Format the report: for each machine, one line per state, then the pairs that were never seen."""
    for machine in coverage:
        yield f"{machine.machine}: {machine.seen} of {machine.possible} pairs of state and event seen"
        by_state: dict[str, list[str]] = {}
        for state, event, count in machine.counts:
            by_state.setdefault(state, []).append(f"{event} {count:,}")
        yield from (f"  {state}: {', '.join(events)}" for state, events in by_state.items())
        unseen: dict[str, list[str]] = {}
        for state, event in machine.unseen:
            unseen.setdefault(state, []).append(event)
        yield from (f"  never in {state}: {', '.join(events)}" for state, events in unseen.items())
        for state, event, why in machine.surprising:
            yield f"  SURPRISING: {event} in {state}, though {why}"
        yield from (f"  NOT LISTED: {event} in {state}" for state, event in machine.unlisted)
