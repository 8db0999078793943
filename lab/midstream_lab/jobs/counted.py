"""Windows by count in a simulated job. Which rows share a window depends on arrival; that each is full does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.elements import Assigned
from midstream.engine.operators.base import OperatorContext, Output
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.count_windows import count_window_operator
from midstream.engine.operators.windows.window_factory import count
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside, time_ms
from midstream_lab.jobs.timed import Ids
from midstream_lab.jobs.wrapped_operator import Around

ROWS: Final = 5
"""The number of rows of a window."""


class Counted(Around):
    """The operator of windows by count; it emits windows that begin at their smallest id, for `Stack`."""

    def __init__(self, uid: str, outside: Outside) -> None:
        self._given = uid, outside
        inner = count_window_operator(
            uid,
            window=count(ROWS),
            keys=["key"],
            event_time=TimeColumn("ts"),
            aggregates={"ids": Ids()},
            schema=SCHEMA,
        )
        super().__init__(outside, inner)

    def __reduce__(self) -> tuple[type[Counted], tuple[str, Outside]]:
        return Counted, self._given

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out
        super().open(context, self)

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        bounds = (to_list(batch.column(f"window_{name}").cast(pa.int64())) for name in ("start", "end"))
        listed = to_list(batch.column("ids"))
        for ids, start_us, end_us in zip(listed, *bounds, strict=True):
            times_us = [time_ms(row) * 1000 for row in ids]
            if (start_us, end_us) != (min(times_us), max(times_us)):
                self._outside.world.bug(f"a window of the rows {ids} is from {start_us} to {end_us} µs")
        starts = pa.array(np.array([min(ids) * 1000 for ids in listed], np.int64)).view(pa.timestamp("us"))
        self._out.emit(batch.set_column(batch.schema.get_field_index("window_start"), "window_start", starts), tag)

    def watermark(self, watermark_us: int) -> None:
        self._out.watermark(watermark_us)

    def idle(self, idle: bool, assigned: Assigned = ()) -> None:
        self._out.idle(idle, assigned)


def wrong_windows(
    uid: str, got: Counter[int], keys: Mapping[int, int], emitted: Iterable[tuple[int, int, int]]
) -> Iterator[str]:
    """Yield complaints about all emissions. `got`: the rows that the operator has received. `emitted`: the id, the key and
    the n of rows from `Stack`.
    """
    of_window: dict[tuple[int, int], list[int]] = {}
    for row, key, n in emitted:
        of_window.setdefault((key, n), []).append(row)
    of_key: dict[int, Counter[int]] = {}
    for (key, _), rows in of_window.items():
        if len(rows) % ROWS or any(keys.get(row) != key for row in rows):  # a row that comes twice makes two alike
            yield f"{uid}: a window of key {key} has the rows {rows}"
        of_key.setdefault(key, Counter()).update(rows)
    came: dict[int, Counter[int]] = {}
    for row, times in got.items():
        came.setdefault(keys[row], Counter())[row] += times
    for key, received in came.items():
        found = of_key.pop(key, Counter())
        if not found <= received:
            yield f"{uid}: windows of key {key} have the rows {sorted((found - received).elements())[:5]} too often"
        if found.total() != received.total() // ROWS * ROWS:
            yield f"{uid} has got {received.total()} rows of key {key}, and {found.total()} are in windows of {ROWS}"
    if of_key:
        yield f"{uid} has emitted windows of the keys {sorted(of_key)[:5]}, of which it has got no row"
