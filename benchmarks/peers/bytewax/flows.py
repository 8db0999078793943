"""The workloads as Bytewax dataflows.

`window`:  `columns` sends numpy columns through the dataflow, split by key, as Bytewax's documentation advises for
           speed; what they mean is up to the operator written here. `stateful` is one state per key, written for this
           workload.
`udf`:     `label` per row, then `stateful`.
`strings`: `columns`, with the payload.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import bytewax.operators as op
import numpy as np
import pyarrow as pa
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.operators import StatefulBatchLogic
from bytewax.outputs import DynamicSink, FixedPartitionedSink, StatefulSinkPartition, StatelessSinkPartition
from definitions import (
    EVENTS_PER_MS,
    KEYS,
    LATENCY_KEYS,
    LATENCY_RATE_PER_S,
    LATENCY_WARM_UP_SHARE,
    MULTIPLIER,
    PAYLOADS,
    WINDOW_MS,
    label,
)

ROWS_PER_BATCH = 1_000
COLUMNS_PER_BATCH = 100_000
DRIFT_MS = 10_000
"""By how much event time of one half may run ahead of the other."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
KEY_GROUPS = ("0", "4")
"""The columns of a group travel together. Bytewax places these two names on different ones of two workers."""
TICK = timedelta(milliseconds=1)

PAYLOAD = pa.array([f"{number:04x}" * 25 for number in range(PAYLOADS)])

Output: TypeAlias = tuple[int, float, int]
"""Count and sum of one window and key, and the number that its largest payload repeats, 0 without one."""


class Measured:
    """What this process has seen; Bytewax gives a dataflow no way to return anything."""

    def __init__(self) -> None:
        self.read: dict[str, int] = {}
        self.began_s: float | None = None
        self.counted = 0
        self.total = 0.0
        self.payloads = 0
        self.results = 0
        self.latencies_ms: list[float] = []


measured = Measured()


class Events(FixedPartitionedSource[Any, int]):
    """Partition "0" has the first half of the events, "1" the second."""

    def __init__(self, n: int, shape: str, max_seconds: float) -> None:
        self._n, self._shape, self._max_seconds = n, shape, max_seconds

    def list_parts(self) -> list[str]:
        return ["0", "1"]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> _Half:
        return _Half(for_part, self._n // 2, self._shape, self._max_seconds, resume_state or 0)


class _Half(StatefulSourcePartition[Any, int]):
    def __init__(self, part: str, count: int, shape: str, max_seconds: float, position: int) -> None:
        self._part, self._count, self._shape, self._position = part, count, shape, position
        self._max_seconds = max_seconds
        self._rows = COLUMNS_PER_BATCH if shape == "columns" else ROWS_PER_BATCH

    def next_batch(self) -> Iterable[Any]:
        now_s = time.monotonic()
        if measured.began_s is None:
            measured.began_s = now_s
        if self._position >= self._count or now_s - measured.began_s > self._max_seconds:
            raise StopIteration
        begin, end = self._position, min(self._count, self._position + self._rows)
        self._position = measured.read[self._part] = end
        offset = np.arange(begin, end, dtype=np.int64)
        i = offset + int(self._part) * self._count
        ts = offset // EVENTS_PER_MS
        key = ((i * MULTIPLIER) & 0xFFFFFFFF) % KEYS
        value = (i % 1000) * 0.5
        if self._shape == "columns":
            return [(self._part, i, ts, key, value)]
        moments = {t: EPOCH + timedelta(milliseconds=t) for t in range(int(ts[0]), int(ts[-1]) + 1)}
        columns = zip([moments[t] for t in ts.tolist()], key.tolist(), value.tolist(), strict=True)
        if self._shape == "dicts":
            return [{"ts": t, "key": k, "value": v} for t, k, v in columns]
        return [(str(k), (t, v)) for t, k, v in columns]

    def snapshot(self) -> int:
        return self._position


class Totals(DynamicSink[Output]):
    def build(self, step_id: str, worker_index: int, worker_count: int) -> _Adding:
        return _Adding()


class _Adding(StatelessSinkPartition[Output]):
    def write_batch(self, items: list[Output]) -> None:
        for count, total, payload in items:
            measured.counted += count
            measured.total += total
            measured.payloads += payload
            measured.results += 1


class KeyedWindows(StatefulBatchLogic[Any, Output, Any]):
    """Windows of one key; values are (ts, value). One fires when event time is `DRIFT_MS` past its end."""

    def __init__(self, resume: dict[int, Output] | None) -> None:
        self._windows = dict(resume or {})

    def on_batch(self, values: list[Any]) -> tuple[Iterable[Output], bool]:
        windows = self._windows
        for ts, value in values:
            window = int((ts - EPOCH).total_seconds()) * 1000 // WINDOW_MS
            count, total, _ = windows.get(window, (0, 0.0, 0))
            windows[window] = (count + 1, total + value, 0)
        past = window - DRIFT_MS // WINDOW_MS
        if min(windows) >= past:
            return (), False
        return [windows.pop(old) for old in sorted(windows) if old < past], False

    def on_eof(self) -> tuple[Iterable[Output], bool]:
        return list(self._windows.values()), True

    def snapshot(self) -> dict[int, Output]:
        return dict(self._windows)


class ColumnWindows(StatefulBatchLogic[Any, Output, Any]):
    """Windows of a group of keys, in columns; each batch becomes one table of partial results."""

    def __init__(self, resume: tuple[list[pa.Table], dict[str, int]] | None) -> None:
        self._parts, self._watermarks = resume or ([], {})

    def on_batch(self, values: list[Any]) -> tuple[Iterable[Output], bool]:
        for part, watermark_ms, columns in values:
            self._watermarks[part] = watermark_ms
            if columns:
                grouped = pa.table(columns).group_by(["window", "key"], use_threads=False)
                wanted = [("value", "count"), ("value", "sum")]
                self._parts.append(grouped.aggregate([*wanted, ("payload", "max")] if "payload" in columns else wanted))
        if len(self._watermarks) < 2 or not self._parts:
            return (), False
        done = min(self._watermarks.values()) // WINDOW_MS
        if not any(int(part["window"][0].as_py()) < done for part in self._parts):
            return (), False
        everything = pa.concat_tables(self._parts)
        is_done = pa.compute.less(everything["window"], done)
        self._parts = [part for part in [everything.filter(pa.compute.invert(is_done))] if part.num_rows]
        return _merged(everything.filter(is_done)), False

    def on_eof(self) -> tuple[Iterable[Output], bool]:
        return (_merged(pa.concat_tables(self._parts)) if self._parts else ()), True

    def snapshot(self) -> tuple[list[pa.Table], dict[str, int]]:
        return list(self._parts), dict(self._watermarks)


def _merged(parts: pa.Table) -> list[Output]:
    wanted = [("value_count", "sum"), ("value_sum", "sum")]
    if "payload_max" in parts.column_names:
        wanted.append(("payload_max", "max"))
    result = parts.group_by(["window", "key"], use_threads=False).aggregate(wanted)
    counts, totals = result["value_count_sum"].to_pylist(), result["value_sum_sum"].to_pylist()
    if "payload_max" not in parts.column_names:
        return [(count, total, 0) for count, total in zip(counts, totals, strict=True)]
    payloads = [int(payload[:4], 16) for payload in result["payload_max_max"].to_pylist()]
    return list(zip(counts, totals, payloads, strict=True))


def split(batch: tuple[str, Any, Any, Any, Any], *, has_strings: bool) -> list[tuple[str, Any]]:
    """Columns by key group: (key group, (source partition, watermark, columns))."""
    part, i, ts, key, value = batch
    group = key % len(KEY_GROUPS)
    order = np.argsort(group.astype(np.int8), kind="stable")  # of small integers that is a radix sort
    bounds = np.searchsorted(group[order], np.arange(len(KEY_GROUPS) + 1))
    window, key, value, i = (ts // WINDOW_MS)[order], key[order], value[order], i[order]
    watermark_ms = int(ts[-1])
    pieces = []
    for name, begin, end in zip(KEY_GROUPS, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        columns: dict[str, Any] = {"window": window[begin:end], "key": key[begin:end], "value": value[begin:end]}
        if has_strings:  # made for each piece, as a slice of an Arrow array pickles the whole array
            columns["key"] = pa.array([f"user-{number:06d}" for number in key[begin:end].tolist()])
            columns["payload"] = PAYLOAD.take(pa.array(i[begin:end] % PAYLOADS))
        pieces.append((name, (part, watermark_ms, columns)))
    return pieces


def dataflow(workload: str, variant: str, n: int, max_seconds: float) -> Dataflow:
    flow = Dataflow(f"{workload}_{variant}")
    if workload == "latency":
        op.output("sink", op.input("source", flow, StampedRows(n)), LatencySink(n))
        return flow
    shape = "columns" if variant == "columns" else {"udf": "dicts", "window": "pairs"}[workload]
    stream = op.input("source", flow, Events(n, shape, max_seconds))
    if shape == "columns":
        has_strings = workload == "strings"
        pieces = op.flat_map("split", stream, lambda batch: split(batch, has_strings=has_strings))
        results = op.stateful_batch("windows", pieces, ColumnWindows)
    else:
        if workload == "udf":
            labelled = op.map("label", stream, label)
            stream = op.map("pair", labelled, lambda row: (row["name"], (row["ts"], row["score"])))
        results = op.stateful_batch("windows", stream, KeyedWindows)
    op.output("sink", op.key_rm("totals", results), Totals())
    return flow


class StampedRows(FixedPartitionedSource[Any, int]):
    """Rows (key, (number, creation in ns)) at half the rate in each partition, stamped when they are made."""

    def __init__(self, n: int) -> None:
        self._n = n

    def list_parts(self) -> list[str]:
        return ["0", "1"]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> _Stamping:
        return _Stamping(for_part, self._n // 2, resume_state or 0)


class _Stamping(StatefulSourcePartition[Any, int]):
    def __init__(self, part: str, count: int, position: int) -> None:
        self._part, self._count, self._position = part, count, position
        self._awake = datetime.now(UTC)

    def next_batch(self) -> Iterable[Any]:
        if self._position >= self._count:
            raise StopIteration
        now_s = time.monotonic()
        if measured.began_s is None:
            measured.began_s = now_s
        due = min(self._count, int((now_s - measured.began_s) * LATENCY_RATE_PER_S / 2))
        made_ns = time.time_ns()
        rows = [(str(i % LATENCY_KEYS), (i, made_ns)) for i in range(self._position, due)]
        self._position = measured.read[self._part] = max(due, self._position)
        self._awake = datetime.now(UTC) + TICK
        return rows

    def next_awake(self) -> datetime:
        return self._awake

    def snapshot(self) -> int:
        return self._position


class LatencySink(FixedPartitionedSink[Any, None]):
    """Two partitions; a row goes to that of its key."""

    def __init__(self, n: int) -> None:
        self._warm = int(n // 2 * LATENCY_WARM_UP_SHARE)

    def list_parts(self) -> list[str]:
        return ["0", "1"]

    def part_fn(self, item_key: str) -> int:
        return int(item_key)

    def build_part(self, step_id: str, for_part: str, resume_state: None) -> _Comparing:
        return _Comparing(self._warm)


class _Comparing(StatefulSinkPartition[Any, None]):
    def __init__(self, warm: int) -> None:
        self._warm = warm

    def write_batch(self, values: list[Any]) -> None:
        now_ns = time.time_ns()
        measured.counted += len(values)
        measured.total += sum(i for i, _ in values)
        measured.latencies_ms += [(now_ns - made_ns) / 1e6 for i, made_ns in values if i >= self._warm]

    def snapshot(self) -> None:
        return None
