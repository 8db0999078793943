"""Waiting for a condition, with a deadline; never for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

from machine import limit_s


def until(
    what: str, condition: Callable[[], Any], timeout_s: float = 60.0, *, found: Callable[[], Any] | None = None
) -> Any:
    """Wait for a condition and return its value once it is true.

    `timeout_s`: for an idle machine; it stretches with this one. `found`: what to show when the time is over.
    """
    began_s = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        waited_s = time.monotonic() - began_s
        if waited_s >= timeout_s and waited_s >= limit_s(timeout_s):
            raise AssertionError(f"{what}: not within {waited_s:.0f} s{f'; found {found()!r}' if found else ''}")
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def until_spark_is_idle(spark: Any) -> None:
    """No Spark job is active. Spark keeps these books a little behind the truth."""
    tracker = spark.sparkContext.statusTracker()
    until("Spark is idle", lambda: tracker.getActiveJobsIds() == [], 20)
