"""Waiting for a condition, with a deadline; never for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil


def until(
    what: str, condition: Callable[[], Any], timeout_s: float = 60.0, *, found: Callable[[], Any] | None = None
) -> Any:
    """Wait for a condition; its value once it is true. `found`: what to show of the time when there is no more patience."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"{what}: not within {timeout_s} s{f'; found {found()!r}' if found else ''}")
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
