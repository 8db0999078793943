"""Counters and gauges of users' functions, combined from the metrics of a task's subtasks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

from midstream.engine.coordinator.placement.slot_pool import Rate
from midstream.engine.protocol.job_status import GaugeStatus

NAMES_MAX: Final = 200
"""The limit on an operator's counters, and on its gauges, in the status; of more, the first by name are shown."""
_MOST: Final = sys.float_info.max


def user_counters(rates: Iterable[Rate]) -> dict[str, dict[str, float]]:
    """Return the sums of counters over subtasks, by uid and name."""
    return {uid: {name: _sum(values) for name, values in of_it.items()} for uid, of_it in _values(rates, True).items()}


def user_gauges(rates: Iterable[Rate]) -> dict[str, dict[str, GaugeStatus]]:
    """Return the gauges by uid and name, each over the subtasks that have set it."""
    return {
        uid: {name: GaugeStatus(min(values), max(values), _sum(values)) for name, values in of_it.items()}
        for uid, of_it in _values(rates, False).items()
    }


def _values(rates: Iterable[Rate], are_counters: bool) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for rate in rates:
        for one in rate.metrics.user:
            if one.is_counter is are_counters:
                found.setdefault(one.uid, {}).setdefault(one.name, []).append(one.value)
    return {uid: {name: of_it[name] for name in sorted(of_it)[:NAMES_MAX]} for uid, of_it in found.items()}


def _sum(values: list[float]) -> float:
    """Return the sum, limited to the finite floats, since JSON has no infinity."""
    return max(-_MOST, min(_MOST, sum(values)))
