"""What the peers have in common: what their results must come to, and how a result is printed.

Needs numpy only, so that every peer's environment can import it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

KEYS = 10_000
EVENTS_PER_MS = 50
"""In each half."""
WINDOW_MS = 10_000
SLIDE_MS = 2_000
MANY_KEYS = 1_000_000
MULTIPLIER = 2654435761
NAMES = 1000
"""Keys behind `label`."""
PAYLOADS = 65_536
"""So many different ones there are: event i has `i % 65536` as four hex digits, 25 times."""
LATENCY_RATE_PER_S = 20_000
LATENCY_S = 20
LATENCY_KEYS = 1_000
LATENCY_WARM_UP_SHARE = 0.1
SHORTFALL_MAX = 0.1
"""If the rate is missed by more than that, latencies are those of an overloaded job."""

Int64s: TypeAlias = npt.NDArray[np.int64]
Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Of each half of the events those that have been read, from its beginning: first, end."""


def label(row: Mapping[str, Any]) -> dict[str, Any]:
    """The function of the workload `udf`: a row in, a row out."""
    name = f"user-{row['key'] % 1000}"
    return {"ts": row["ts"], "name": name, "score": round(row["value"] * 1.07 + len(name), 2)}


def expected(workload: str, ranges: Ranges, fired_ms: float = float("inf")) -> dict[str, float]:
    """What the results of windows that end at `fired_ms` or before come to: rows (pairs of window and key), sums.

    `n`: of counts. `total`: of values, or of scores. `payloads` of `strings`: of the largest payload of each row, as
    the number that it repeats. All are exact but for the scores, which are within some 1e-9.
    """
    keys = {"udf": NAMES, "sliding": MANY_KEYS, "window_keys": MANY_KEYS}.get(workload, KEYS)
    pane_ms, panes = (SLIDE_MS, WINDOW_MS // SLIDE_MS) if workload == "sliding" else (WINDOW_MS, 1)
    step = pane_ms * EVENTS_PER_MS
    found = dict.fromkeys(("rows", "n", "total", *(["payloads"] if workload == "strings" else [])), 0.0)
    last: deque[tuple[int, float, Int64s]] = deque(maxlen=panes)
    """Of the panes of a window: events, sum, and per key the largest payload, or -1 without any event."""
    in_use = -(-max(end - first for first, end in ranges) // step)
    for pane in range(in_use + panes - 1):
        parts = [np.arange(min(end, first + pane * step), min(end, first + (pane + 1) * step)) for first, end in ranges]
        last.append(_pane(workload, np.concatenate(parts), keys))
        if (pane + 1) * pane_ms <= fired_ms:
            largest = np.max([largest for _, _, largest in last], axis=0)
            found["rows"] += int((largest >= 0).sum())
            found["n"] += sum(count for count, _, _ in last)
            found["total"] += sum(total for _, total, _ in last)
            if workload == "strings":
                found["payloads"] += int(largest[largest >= 0].sum())
    return found


def _pane(workload: str, i: Int64s, keys: int) -> tuple[int, float, Int64s]:
    key = ((i * MULTIPLIER) & 0xFFFFFFFF) % (KEYS if workload == "udf" else keys) % keys
    largest = np.full(keys, -1, np.int64)
    if workload == "strings":
        np.maximum.at(largest, key, i % PAYLOADS)
    else:
        largest[key] = 0
    values = _SCORES[(key >= 10).astype(np.int64) + (key >= 100), i % 1000] if workload == "udf" else i % 1000 * 0.5
    return len(i), float(values.sum()), largest


_SCORES = np.array(
    [[label({"ts": 0, "key": key, "value": v * 0.5})["score"] for v in range(1000)] for key in (1, 10, 100)]
)
"""By `label` itself: half of the scores are ties but for the last bit, which numpy's round() does not look at."""


def sum_of_values(ranges: Ranges) -> float:
    """Of these events; exact."""
    return float(sum((np.arange(first, end) % 1000).sum() for first, end in ranges)) * 0.5


def halves(n: int) -> Ranges:
    return [(0, n // 2), (n // 2, n)]


def require(expected: Mapping[str, float | None], got: Mapping[str, float], *, relative: float = 0.0) -> None:
    """Raises ValueError when a result is not what it must be, or there is nothing to compare. None: it may be anything."""
    if not any(expected.values()):
        raise ValueError("no result is due yet, so there is nothing to check: allow more time, or take smaller batches")
    for what, wanted in expected.items():
        if wanted is not None and not abs(got[what] - wanted) <= relative * abs(wanted):  # nor when it is no number
            raise ValueError(f"the result is wrong: {what} must be {wanted} and is {got[what]}")


def require_rate(n: int, seconds: float) -> None:
    """Raises ValueError when the rows of `latency` did not come as fast as they should."""
    if n / seconds < LATENCY_RATE_PER_S * (1 - SHORTFALL_MAX):
        raise ValueError(f"only {n / seconds:,.0f} of {LATENCY_RATE_PER_S:,} rows/s were reached")


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
