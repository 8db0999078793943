"""The workloads `udf` and `keyed_process` as plain Python loops: no exchange, no checkpoints, one process per core."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from definitions import EVENTS_PER_MS, KEYS, MULTIPLIER, WINDOW_MS, label

BATCH = 4096
PROCESS_KEYS = 1_000_000
STRETCH = 360
KEPT = timedelta(hours=1)
Row = dict[str, Any]


def rows_by_python(begin: int, count: int) -> Iterator[Row]:
    for offset in range(count):
        i = begin + offset
        yield {"ts": offset // EVENTS_PER_MS, "key": ((i * MULTIPLIER) & 0xFFFFFFFF) % KEYS, "value": (i % 1000) * 0.5}


def rows_by_numpy(begin: int, count: int) -> Iterator[Row]:
    for first in range(0, count, BATCH):
        offset = np.arange(first, min(count, first + BATCH), dtype=np.int64)
        i = begin + offset
        ts = (offset // EVENTS_PER_MS).tolist()
        key = (((i * MULTIPLIER) & 0xFFFFFFFF) % KEYS).tolist()
        value = ((i % 1000) * 0.5).tolist()
        for t, k, v in zip(ts, key, value, strict=True):
            yield {"ts": t, "key": k, "value": v}


VARIANTS: dict[str, Callable[[int, int], Iterator[Row]]] = {"numpy": rows_by_numpy, "python": rows_by_python}


def label_and_count(
    begin: Callable[[], None], variant: str, first: int, count: int, max_seconds: float | None
) -> tuple[int, int, float, int]:
    """How many rows were read, then what the windows hold: counts, scores, and how many there are."""
    rows = VARIANTS[variant](first, count)
    windows: dict[tuple[int, str], list[float]] = {}
    read = 0
    begin()
    deadline_s = None if max_seconds is None else time.monotonic() + max_seconds
    for row in rows:
        labelled = label(row)
        window = (labelled["ts"] // WINDOW_MS, labelled["name"])
        found = windows.get(window)
        if found is None:
            windows[window] = [1, labelled["score"]]
        else:
            found[0] += 1
            found[1] += labelled["score"]
        read += 1
        if deadline_s is not None and not read % BATCH and time.monotonic() > deadline_s:
            break
    counted = sum(int(count) for count, _ in windows.values())
    return read, counted, sum(score for _, score in windows.values()), len(windows)


def rows_of_hours(begin: int, count: int) -> Iterator[Row]:
    for first in range(0, count, BATCH):
        offset = np.arange(first, min(count, first + BATCH), dtype=np.int64)
        i = begin + offset
        ts = (offset // EVENTS_PER_MS * STRETCH).view("M8[ms]").tolist()
        key = (((i * MULTIPLIER) & 0xFFFFFFFF) % PROCESS_KEYS).tolist()
        value = ((i % 1000) * 0.5).tolist()
        for t, k, v in zip(ts, key, value, strict=True):
            yield {"ts": t, "key": k, "value": v}


def total_and_timers(
    begin: Callable[[], None], first: int, count: int, max_seconds: float | None
) -> tuple[int, int, float, int]:
    """How many rows were read; then how many results there are, their sum, and how many again. Each row is a watermark."""
    totals: dict[int, float] = {}
    timers: list[tuple[datetime, int]] = []
    results: list[Row] = []
    read, number, sum_of_totals = 0, 0, 0.0
    begin()
    deadline_s = None if max_seconds is None else time.monotonic() + max_seconds
    for row in rows_of_hours(first, count):
        while timers and timers[0][0] < row["ts"]:
            key = heapq.heappop(timers)[1]
            results.append({"key": key, "total": totals.pop(key)})
        key = row["key"]
        total = totals.get(key)
        if total is None:
            total = 0.0
            heapq.heappush(timers, (row["ts"] + KEPT, key))
        totals[key] = total + row["value"]
        read += 1
        if not read % BATCH:
            number += len(results)
            sum_of_totals += sum(result["total"] for result in results)
            results.clear()
            if deadline_s is not None and time.monotonic() > deadline_s:
                break
    number += len(results) + len(totals)
    sum_of_totals += sum(result["total"] for result in results) + sum(totals.values())
    return read, number, sum_of_totals, number
