"""Counters and gauges of users' functions, combined from the metrics of a task's subtasks and of committers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from midstream.engine.coordinator.placement.slot_pool import Rate
from midstream.engine.operators.user_metrics import UserMetrics
from midstream.engine.protocol.job_status import GaugeStatus

NAMES_MAX: Final = 200
"""The limit on an operator's counters, and on its gauges, in the status; of more, the first by name are shown."""
_MOST: Final = sys.float_info.max


def user_counters(rates: Iterable[Rate], committers: Mapping[str, UserMetrics]) -> dict[str, dict[str, float]]:
    """Return the sums of counters over subtasks and the committer, by uid and name. `committers`: their metrics by uid."""
    counted = _of_subtasks(rates, True)
    for uid, metrics in committers.items():
        counted += [(uid, name, value) for name, value in metrics.counters.items()]
    return {uid: {name: _sum(values) for name, values in of_it.items()} for uid, of_it in _by_name(counted)}


def user_gauges(rates: Iterable[Rate], committers: Mapping[str, UserMetrics]) -> dict[str, dict[str, GaugeStatus]]:
    """Return the gauges by uid and name, each over the subtasks, and the committer, that have set it."""
    found = _of_subtasks(rates, False)
    for uid, metrics in committers.items():
        found += [(uid, name, value) for name, value in metrics.gauges.items()]
    return {
        uid: {name: GaugeStatus(min(values), max(values), _sum(values)) for name, values in of_it.items()}
        for uid, of_it in _by_name(found)
    }


def _of_subtasks(rates: Iterable[Rate], are_counters: bool) -> list[tuple[str, str, float]]:
    return [
        (one.uid, one.name, one.value) for rate in rates for one in rate.metrics.user if one.is_counter is are_counters
    ]


def _by_name(values: Iterable[tuple[str, str, float]]) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield the values of each uid, by name."""
    found: dict[str, dict[str, list[float]]] = {}
    for uid, name, value in values:
        found.setdefault(uid, {}).setdefault(name, []).append(value)
    for uid, of_it in found.items():
        yield uid, {name: of_it[name] for name in sorted(of_it)[:NAMES_MAX]}


def _sum(values: list[float]) -> float:
    """Return the sum, limited to the finite floats, since JSON has no infinity."""
    return max(-_MOST, min(_MOST, sum(values)))
