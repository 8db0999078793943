"""Determines by the shape of a job where the rows of a source can be late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from midstream_lab.jobs.recorded_rows import SimSource, is_ordered
from midstream_lab.jobs.shapes import Shape

_TIMES: Final = frozenset(("times", "tight", "idle"))
"""The kinds of operators that assign event time. No event time waits for a source without one and without an end."""
_HOLDING: Final = frozenset(("timer", "table"))
"""The kinds of operators that hold rows back until event time has passed them."""


def on_time_at(shape: Shape, sources: Iterable[SimSource]) -> list[frozenset[int]]:
    """Return for each node the numbers of the sources whose rows are never late there, whatever happens to the others.

    The splits of such a source are in order, no older one is found later, none counts as idle, and on no path does a
    row wait for the wall clock. No split counts as idle that ends: nor does a subtask, if all were found together. Event time never passes such a source, since it is the minimum over all inputs that are
    not idle. A source with a single split may be idle as long as its rows meet no others: event time is then its own. So
    may one whose splits end and follow each other in time: a subtask without splits is idle, and event time waits for it
    as soon as another one reads what was found together with a split for it.

    Rows that were held back with a source that may be idle are on time as long as they meet only sources with which
    they were held. A subtask may be idle while it holds them, and event time passes an idle subtask.
    """
    remaining = iter(sources)
    found: list[frozenset[int]] = []
    may_be_idle: set[int] = set()
    out: list[dict[int, frozenset[int] | None]] = []
    """The sources whose rows each node emits, and for each the sources that its rows may meet and still be on time: None
    if it may meet all."""
    for node in shape:
        came: dict[int, frozenset[int] | None] = {}
        if node.chain[0] == "source":
            source = next(remaining)
            number, nothing = source.number, frozenset[int]()
            if "idle" in node.chain and not (source.bounded or (source.splits_end and source.rounds == 1)):
                may_be_idle.add(number)
                is_alone_on_time = len(source.rows) == 1 or (source.splits_end and is_ordered(number))
                came[number] = frozenset((number,)) if is_alone_on_time else nothing
            else:
                is_waited_for = source.bounded or not _TIMES.isdisjoint(node.chain)
                came[number] = None if is_waited_for and (source.rounds == 1 or is_ordered(number)) else nothing
        for entry in node.inputs:
            for number, company in out[entry.node].items():
                came[number] = _both(came.get(number), company)
        there = frozenset(came)
        found.append(frozenset(number for number, company in came.items() if company is None or there <= company))
        is_held = not _HOLDING.isdisjoint(node.chain) and not may_be_idle.isdisjoint(there)
        for number, company in came.items():
            if number not in found[-1] or not {"alarm", "clocks"}.isdisjoint(node.chain):
                came[number] = frozenset()
            elif is_held:
                came[number] = _both(company, there)
        out.append(came)
    return found


def _both(one: frozenset[int] | None, other: frozenset[int] | None) -> frozenset[int] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def behind_timers(shape: Shape) -> set[int]:
    """Return the nodes that receive rows which a timer, or a table, has held back."""
    found: set[int] = set()
    for index, node in enumerate(shape):
        if any(entry.node in found or not _HOLDING.isdisjoint(shape[entry.node].chain) for entry in node.inputs):
            found.add(index)
    return found
