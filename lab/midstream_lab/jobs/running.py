"""Running aggregates in a simulated job: each row leaves with the number that it is of its key, which sinks check.

The state, the number of rows of each key and the sum of their ids, is checked in each checkpoint. Aggregates at multiples
of event time collect the ids of a key; like a window that is emitted again, each emission has all rows of the last one. The first rows of a key are as many that
they are all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.elements import Assigned
from midstream.engine.operators.base import Combiner, OperatorContext, Output
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.periodic_aggregate import periodic_aggregate_operator, periodic_top_operator
from midstream.engine.operators.functions.running_aggregate import running_aggregate_operator
from midstream.engine.operators.windows.aggregates import Count, Min, Sum
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside, numbered, time_ms
from midstream_lab.jobs.timed import TUMBLING_MS, Ids
from midstream_lab.jobs.wrapped_operator import Around

PARTS: Final = "table:parts"
"""The state with what each key has come to."""
COLUMNS: Final = ("rows:n", "ids:sum")
"""The columns of `PARTS` with the number of rows, and the sum of their ids."""
_ALL: Final = 1_000_000
"""More than a run has rows."""
_N: Final = SCHEMA.get_field_index("n")


class Running(Around):
    """The operator of running aggregates. Each row must have what the one before it of its key had, and itself."""

    def __init__(self, uid: str, outside: Outside) -> None:
        self._given = uid, outside
        self._uid = uid
        self._emitted: list[pa.RecordBatch] = []
        self._known: dict[int, tuple[int, int, int]] = {}
        """What the last row of each key had that has come since this subtask began."""
        aggregates = {"rows": Count(), "ids": Sum("id"), "lowest": Min("id")}
        inner = running_aggregate_operator(uid, keys=["key"], event_time="ts", aggregates=aggregates, schema=SCHEMA)
        super().__init__(outside, inner)

    def __reduce__(self) -> tuple[type[Running], tuple[str, Outside]]:
        return Running, self._given

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out
        super().open(context, self)

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        self._emitted.append(batch)

    def watermark(self, watermark_us: int) -> None:
        self._out.watermark(watermark_us)

    def idle(self, idle: bool, assigned: Assigned = ()) -> None:
        self._out.idle(idle, assigned)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        super().process(batch, 0)
        [made], self._emitted = self._emitted, []
        if any(made.column(name) != batch.column(name) for name in ("key", "ts")):
            self._outside.world.bug(f"{self._uid} has emitted rows of other keys or times than it has received")
        columns = (batch.column(name) for name in ("id", "key"))
        found = (made.column(name) for name in ("rows", "ids", "lowest"))
        for row, key, *values in zip(*map(to_list, (*columns, *found)), strict=True):
            before = self._known.get(key)
            self._known[key] = rows, ids, lowest = values[0], values[1], values[2]
            if before is not None and (rows, ids, lowest) != (before[0] + 1, before[1] + row, min(before[2], row)):
                self._outside.world.bug(
                    f"{self._uid}: row {row} of key {key} has {values}, and the one before {before}"
                )
        n = made.column("rows").to_numpy()
        ids = batch.column("id").to_numpy()
        self._outside.counted.setdefault(self._uid, set()).update(numbered(ids, n))
        self._out.emit(batch.set_column(_N, "n", pa.array(n.astype(np.int64))))


class Periodic(Around):
    """The operator of aggregates, or of the first rows, at each multiple of event time; it emits windows that begin in 1970,
    for `Stack`."""

    def __init__(self, uid: str, outside: Outside, kind: str) -> None:
        self._given = uid, outside, kind
        self._uid = uid
        shared: dict[str, Any] = {
            "keys": ["key"],
            "event_time": TimeColumn("ts"),
            "schema": SCHEMA,
            "every_us": TUMBLING_MS * 1000,
        }
        inner = (
            periodic_aggregate_operator(uid, aggregates={"ids": Ids()}, **shared)
            if kind == "periodic"
            else periodic_top_operator(uid, count=_ALL, by=["id"], descending=True, **shared)
        )
        super().__init__(outside, inner)

    def __reduce__(self) -> tuple[type[Periodic], tuple[str, Outside, str]]:
        return Periodic, self._given

    def combiner(self, tags: Collection[str]) -> Combiner | None:
        return None

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out
        super().open(context, self)

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        if tag is not None:
            self._out.emit(batch, tag)
            return
        if "rank" in batch.schema.names:
            batch = self._ids_of(batch)
        ends_us = batch.column("ts").view(pa.int64()).to_numpy()
        for end_us, ids in zip(ends_us.tolist(), to_list(batch.column("ids")), strict=True):
            newest_ms = max(map(time_ms, ids))
            if not end_us - TUMBLING_MS * 1000 <= newest_ms * 1000 < end_us:
                self._outside.world.bug(f"at {end_us} µs a key is emitted whose newest row is of {newest_ms} ms")
        start = pa.array(np.zeros(batch.num_rows, np.int64)).view(pa.timestamp("us"))
        self._out.emit(batch.append_column("window_start", start))

    def _ids_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return one row for the first rows of each key, which must be in order, with their ranks."""
        ranks, keys, ids = (batch.column(name).to_numpy() for name in ("rank", "key", "id"))
        is_first = ranks == 1
        starts = np.flatnonzero(is_first)
        follows = ~is_first[1:]
        in_order = (ranks[1:] == ranks[:-1] + 1) & (keys[1:] == keys[:-1]) & (ids[1:] <= ids[:-1])
        if not is_first[0] or not in_order[follows].all():
            self._outside.world.bug(f"{self._uid} emits ids {ids.tolist()} of keys {keys.tolist()} as {ranks.tolist()}")
        offsets = pa.array([*starts.tolist(), len(ids)], pa.int32())
        lists = pa.ListArray.from_arrays(offsets, batch.column("id"))
        rows = batch.take(starts)
        return pa.RecordBatch.from_arrays([rows.column("key"), rows.column("ts"), lists], names=["key", "ts", "ids"])

    def watermark(self, watermark_us: int) -> None:
        self._out.watermark(watermark_us)

    def idle(self, idle: bool, assigned: Assigned = ()) -> None:
        self._out.idle(idle, assigned)
