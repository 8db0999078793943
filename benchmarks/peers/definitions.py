"""What the Python peers have in common: what their results must come to, and how a result is printed.

Needs numpy only, so that every peer's environment can import it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

KEYS = 10_000
EVENTS_PER_MS = 50
"""In each half."""
WINDOW_MS = 10_000
SLIDE_MS = 2_000
SLIDING_KEYS = 1_000_000
MULTIPLIER = 2654435761
LATENCY_RATE_PER_S = 20_000
LATENCY_S = 20
LATENCY_KEYS = 1_000
LATENCY_WARM_UP_SHARE = 0.1


def label(row: Mapping[str, Any]) -> dict[str, Any]:
    """The function of the workload `udf`: a row in, a row out."""
    name = f"user-{row['key'] % 1000}"
    return {"ts": row["ts"], "name": name, "score": round(row["value"] * 1.07 + len(name), 2)}


def fired_ranges(n: int, watermark_ms: int | None) -> list[tuple[int, int]]:
    """The events of each half in tumbling windows that end at `watermark_ms` or before; None: all windows."""
    half = n // 2
    fired = half if watermark_ms is None else min(half, watermark_ms // WINDOW_MS * WINDOW_MS * EVENTS_PER_MS)
    return [(0, fired), (half, half + fired)]


def expected_window(ranges: Sequence[tuple[int, int]]) -> tuple[int, float]:
    """The number of events and the sum of `value`: exact."""
    return sum(end - begin for begin, end in ranges), sum(
        _values_below(end) - _values_below(begin) for begin, end in ranges
    )


def expected_sliding(n: int, watermark_ms: int | None = None) -> tuple[int, float]:
    """Count and sum of `value` over windows of 10 s every 2 s that end at `watermark_ms` or before; None: over all."""
    half, step = n // 2, SLIDE_MS * EVENTS_PER_MS
    panes = WINDOW_MS // SLIDE_MS
    count, total = 0, 0.0
    for pane in range(-(-half // step)):
        fired = panes if watermark_ms is None else min(panes, max(0, watermark_ms // SLIDE_MS - pane))
        begin, end = pane * step, min(half, (pane + 1) * step)
        count += 2 * (end - begin) * fired
        total += fired * (_values_below(end) - _values_below(begin))
        total += fired * (_values_below(half + end) - _values_below(half + begin))
    return count, total


def expected_udf(ranges: Sequence[tuple[int, int]]) -> tuple[int, float]:
    """The number of events and the sum of `score`; the sum to some 1e-9 relative.

    There are few different (value, length of name), so each score is computed once, by `label` itself.
    """
    user = np.arange(1000)
    digits = 1 + (user >= 10) + (user >= 100)
    counts = np.zeros(1000 * 3, np.int64)
    for begin, end in ranges:
        for first in range(begin, end, 1 << 20):
            i = np.arange(first, min(end, first + (1 << 20)), dtype=np.int64)
            key = ((i * MULTIPLIER) & 0xFFFFFFFF) % KEYS
            counts += np.bincount((i % 1000) * 3 + digits[key % 1000] - 1, minlength=len(counts))
    scores = [
        label({"ts": 0, "key": 10 ** (length - 1) - (length == 1), "value": value * 0.5})["score"]
        for value in range(1000)
        for length in (1, 2, 3)
    ]
    return int(counts.sum()), float(counts @ np.array(scores))


def _values_below(i: int) -> float:
    """The sum of `value` over the events below i: exact, being multiples of 0.5 far below 2**52."""
    cycles, rest = divmod(i, 1000)
    return 0.5 * (cycles * 499_500 + rest * (rest - 1) // 2)


def require(expected: Sequence[float], got: Sequence[float], *, relative: float = 0.0) -> None:
    """Raises ValueError when a result is not what it must be, or there is nothing to compare."""
    if not any(expected):
        raise ValueError("no result is due yet, so there is nothing to check: allow more time, or take smaller batches")
    for wanted, found in zip(expected, got, strict=True):
        if not abs(found - wanted) <= relative * abs(wanted):  # nor when it is no number
            raise ValueError(f"the result is wrong: it must be {list(expected)} and is {list(got)}")


def percentiles_ms(latencies_ms: Iterable[float]) -> dict[str, float]:
    values = np.fromiter(latencies_ms, float) if not isinstance(latencies_ms, np.ndarray) else latencies_ms
    if not len(values):
        raise ValueError("no latencies were measured")
    return {f"p{share:g}_ms": round(float(np.percentile(values, share)), 3) for share in (50, 99)}


def peak_mb(pids: Iterable[int]) -> float:
    """The peak resident size so far, summed over processes; one that has gone counts nothing."""
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    return round(total / 1e6, 1)


def arguments(description: str | None, workloads: Sequence[str], **more: Any) -> argparse.Namespace:
    """The command line that all peers have; `more`: name of a further option → its default.

    From then on a polite kill ends the process as an exception does, so that its children do not outlive it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: terminated"))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=workloads)
    parser.add_argument("--variant", default=None)
    parser.add_argument("--events", type=int, default=None)
    parser.add_argument("--max-seconds", type=float, default=None)
    parser.add_argument("--parallelism", type=int, default=2)
    for name, default in more.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    return parser.parse_args()


def print_result(
    *,
    engine: str,
    version: str,
    workload: str,
    variant: str,
    events: int,
    parallelism: int,
    seconds: float,
    **more: Any,
) -> None:
    result = {
        "engine": engine,
        "version": version,
        "workload": workload,
        "variant": variant,
        "events": events,
        "parallelism": parallelism,
        "seconds": round(seconds, 3),
        "events_per_s": round(events / seconds),
        "correct": True,
        **more,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
