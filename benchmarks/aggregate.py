"""Rows per second of the window operator alone, on one core. Run: python benchmarks/aggregate.py [--rows N] [--batch-rows N]

The rows are those of `python -m midstream_lab bench window`: two halves over the same time, interleaved batch
by batch as a keyed exchange delivers them, a watermark after each pair of batches.
"""

from __future__ import annotations

import os

os.environ.setdefault("POLARS_MAX_THREADS", "1")

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from midstream.engine.core.elements import MAX_WATERMARK_US, Assigned
from midstream.engine.core.key_groups import key_group_range
from midstream.engine.operators.base import Operator, OperatorContext, never_stored
from midstream.engine.operators.windows.aggregates import AnyAggregate, Count, First, Last, Max, Mean, Min, Sum
from midstream.engine.operators.windows.window_factory import Window, session, sliding, tumbling, window_operator
from midstream.engine.operators.windows.window_operator import WindowOperator

KEYS = 10_000


class _Clock:
    def now_ms(self) -> int:
        return int(time.time() * 1000)

    def monotonic_s(self) -> float:
        return time.monotonic()

    own_core_s = stopwatch_s = processor_s = monotonic_s
    core_share = 1.0


class _Ids:
    def new_id(self) -> str:
        return os.urandom(8).hex()


class _Counted:
    rows = 0

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        self.rows += batch.num_rows

    def watermark(self, watermark_us: int) -> None: ...

    def idle(self, idle: bool, assigned: Assigned = ()) -> None: ...


def batches(rows: int, batch_rows: int, text_keys: bool) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Batches, each with the event time in ms up to which its half has come."""
    half = rows // 2
    names = pa.array([f"user-{key:06d}" for key in range(KEYS)], pa.large_string())
    for start in range(0, half, batch_rows):
        for base in (0, half):
            i = np.arange(base + start, base + min(start + batch_rows, half))
            key = ((i * 2654435761) & 0xFFFFFFFF) % KEYS
            ms = (i % half) // 50
            columns = {
                "ts": pa.array(ms.astype("M8[ms]")),
                "key": names.take(pa.array(key)) if text_keys else pa.array(key),
                "value": pa.array((i % 1000) * 0.5),
            }
            yield pa.RecordBatch.from_pydict(columns), int(ms[-1])


def measure(name: str, window: Window, rows: int, batch_rows: int, *, text_keys: bool, all_aggregates: bool) -> None:
    made = list(batches(rows, batch_rows, text_keys))
    aggregates: dict[str, AnyAggregate] = {"total": Sum("value"), "n": Count()}
    if all_aggregates:
        aggregates |= {"low": Min("value"), "high": Max("value"), "mean": Mean("value")}
        aggregates |= {"first": First("value"), "last": Last("value")}
    operator: WindowOperator = window_operator(
        name, window=window, keys=["key"], event_time="ts", aggregates=aggregates, schema=made[0][0].schema
    )
    out = opened(operator, name)
    longest_s = snapshot_s = 0.0
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    for number, (batch, reached_ms) in enumerate(made):
        operator.process(batch, 0)
        if number % 2:
            longest_s = max(longest_s, _fire(operator, reached_ms * 1000 - 1))
        if number == len(made) // 2:
            at_s = time.perf_counter()
            operator.snapshot(1)
            snapshot_s = time.perf_counter() - at_s
    _fire(operator, MAX_WATERMARK_US)
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    figures = {
        "name": name,
        "rows": rows,
        "batch_rows": batch_rows,
        "events_per_s": round(rows / seconds),
        "events_per_cpu_s": round(rows / cpu_s),
        "rows_out": out.rows,
        "slice_ms_max": round(longest_s * 1000, 2),
        "snapshot_pause_ms": round(snapshot_s * 1000, 3),
        "rss_mib_max": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(figures))


def opened(
    operator: Operator,
    name: str,
    stored_bytes: Callable[[str], int | None] = never_stored,
    entry_bytes: int | None = None,
) -> _Counted:
    """As the only subtask; what it emits to."""
    out = _Counted()
    operator.open(
        OperatorContext(
            uid=name,
            name=name,
            subtask=0,
            parallelism=1,
            max_parallelism=128,
            key_groups=key_group_range(0, 1, 128),
            slice_s=0.01,
            clock=_Clock(),
            executor=None,  # type: ignore[arg-type]
            ids=_Ids(),
            storage=None,
            call_at=None,  # type: ignore[arg-type]
            call_later=None,  # type: ignore[arg-type]
            fail=None,  # type: ignore[arg-type]
            stored_bytes=stored_bytes,
            entry_bytes=lambda: entry_bytes,
        ),
        out,
    )
    return out


def _fire(operator: WindowOperator, watermark_us: int) -> float:
    """Fire what is due; the longest slice, in seconds."""
    longest_s = 0.0
    fired_all = False
    while not fired_all:
        started_s = time.perf_counter()
        fired_all = operator.advance_watermark(watermark_us)
        longest_s = max(longest_s, time.perf_counter() - started_s)
    return longest_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8_000_000)
    parser.add_argument("--batch-rows", type=int, default=65_536)
    chosen = parser.parse_args()
    cases: list[tuple[str, Window, bool, bool]] = [
        ("tumbling 10 s, int keys", tumbling("10 s"), False, False),
        ("tumbling 10 s, text keys", tumbling("10 s"), True, False),
        ("tumbling 10 s, seven aggregates", tumbling("10 s"), False, True),
        ("sliding 10 s by 1 s, int keys", sliding("10 s", "1 s"), False, False),
        ("session gap 150 ms, int keys", session("150 ms"), False, False),
    ]
    for name, window, text_keys, all_aggregates in cases:
        measure(name, window, chosen.rows, chosen.batch_rows, text_keys=text_keys, all_aggregates=all_aggregates)


if __name__ == "__main__":
    main()
