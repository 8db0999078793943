"""How slow this machine is: limits of time in tests are for an idle machine, and stretch with this figure."""

from __future__ import annotations

import os
import time

REFERENCE_S = 0.08
"""What `_reference_task` takes on an idle core of 2026."""


def _reference_task() -> None:
    total = 0
    for number in range(1_000_000):
        total += number


def _measured() -> float:
    """How many times longer than on an idle machine the reference task takes."""
    began_s = time.perf_counter()
    _reference_task()
    return (time.perf_counter() - began_s) / REFERENCE_S


_MEASURED = _measured()
"""Once for each process of a test run."""


def slowness() -> float:
    """At least 1. The reference task measures slow cores, and the load average how many processes share them now."""
    return max(1.0, _MEASURED, os.getloadavg()[0] / (os.cpu_count() or 1))


def limit_s(idle_s: float) -> float:
    """A limit for what is to take at most `idle_s` seconds on an idle machine."""
    return idle_s * slowness()
