"""Duplicates that are dropped and rows that are sorted by time, in a simulated job, and the rules for what is emitted.

Which row of a key is the first depends on the order of everything. Whatever it is, the kept rows of a key are far from
each other, each dropped row is near a kept one, and late rows are apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.elements import Assigned
from midstream.engine.operators.base import Operator, OperatorContext, Output
from midstream.engine.operators.functions.duplicates import drop_duplicates_operator
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.time_sort import sort_by_time_operator
from midstream.engine.operators.windows.window_factory import LATE
from midstream.simulation.outside import SOURCE_IDS
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside, time_ms
from midstream_lab.jobs.wrapped_operator import Around

WITHIN_MS: Final = {"unique": None, "unique_near": 5}
"""The kinds of operators that drop duplicates, and how far apart these are at most; None: however far."""
SORTING: Final = "table:waiting"
"""The state with the rows that wait to be sorted."""
KEPT: Final = "table:kept"
"""The state with the keys and times of rows that were kept."""


class Timely(Around):
    """An operator of `kind`, "sorted" or one of `WITHIN_MS`; `on_time`: the sources of which no row is late here."""

    def __init__(self, kind: str, uid: str, outside: Outside, on_time: frozenset[int]) -> None:
        self._given = kind, uid, outside, on_time
        self._kind = kind
        self._checked: _CheckedOutput
        super().__init__(outside, _operator(kind, uid))

    def __reduce__(self) -> tuple[type[Timely], tuple[str, str, Outside, frozenset[int]]]:
        return Timely, self._given

    @property
    def side_outputs(self) -> Mapping[str, pa.Schema]:
        return {} if self._kind == "unique" else {LATE: SCHEMA}

    def open(self, context: OperatorContext, out: Output) -> None:
        _, uid, outside, on_time = self._given
        self._checked = _CheckedOutput(out, uid, outside, on_time, is_sorted=self._kind == "sorted")
        super().open(context, self._checked)

    def advance_watermark(self, watermark_us: int) -> bool:
        self._checked.reached_us = watermark_us
        return super().advance_watermark(watermark_us)


def _operator(kind: str, uid: str) -> Operator:
    if kind == "sorted":
        return sort_by_time_operator(uid, Port("process", ("key",), "ts", SCHEMA))
    within_ms = WITHIN_MS[kind]
    port = Port("process", ("key",), None if within_ms is None else "ts", SCHEMA)
    return drop_duplicates_operator(uid, port, None if within_ms is None else within_ms * 1000)


class _CheckedOutput:
    """Checks rows as they are emitted. `reached_us`: the newest watermark."""

    def __init__(self, out: Output, uid: str, outside: Outside, on_time: frozenset[int], *, is_sorted: bool) -> None:
        self.reached_us: int | None = None
        self._out = out
        self._uid = uid
        self._world = outside.world
        self._on_time = on_time
        self._is_sorted = is_sorted
        self._last: dict[int, int] = {}
        """The time of the last row of each key."""

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        ids = to_list(batch.column("id"))
        if tag == LATE:
            early = [row for row in ids if row // SOURCE_IDS in self._on_time]
            if early:
                self._world.bug(f"{self._uid} treats rows as late that cannot be: {early[:5]}")
        elif self._is_sorted:
            for row, key in zip(ids, to_list(batch.column("key")), strict=True):
                if time_ms(row) < self._last.get(key, time_ms(row)):
                    self._world.bug(f"{self._uid} emits row {row} of key {key} after a row of a later time")
                if self.reached_us is None or time_ms(row) * 1000 > self.reached_us:
                    self._world.bug(f"{self._uid} emits row {row}, which event time has not passed: {self.reached_us}")
                self._last[key] = time_ms(row)
        self._out.emit(batch, tag)

    def watermark(self, watermark_us: int) -> None:
        self._out.watermark(watermark_us)

    def idle(self, idle: bool, assigned: Assigned = ()) -> None:
        self._out.idle(idle, assigned)


@dataclass(frozen=True, slots=True)
class Sifted:
    """The ids of the rows that an operator of `kind` has received, and their keys."""

    kind: str
    received: Counter[int]
    keys: Mapping[int, int]


def wrong_duplicates(uid: str, sifted: Sifted, kept: Counter[int], late: Counter[int]) -> Iterator[str]:
    """Yield complaints about the rows that an operator has emitted."""
    surplus = kept + late - sifted.received
    if surplus:
        yield f"{uid} has emitted {surplus.total()} rows that it has not received, or twice: {sorted(surplus)[:5]}"
    times: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, n in kept.items():
        times[sifted.keys.get(row, 0)] += [(time_ms(row), row)] * n
    within = WITHIN_MS[sifted.kind]
    for of_key in times.values():
        of_key.sort()
        for (time, row), (later, other) in pairwise(of_key):
            if within is None or later - time <= within:
                yield f"{uid} has kept row {row} and its duplicate {other}"
    for row in sifted.received - kept - late:
        of_key = times.get(sifted.keys[row], [])
        at = 0 if within is None else bisect_left(of_key, (time_ms(row) - within, 0))
        if at == len(of_key) or (within is not None and of_key[at][0] > time_ms(row) + within):
            yield f"{uid} has dropped row {row}, of which there is no duplicate"
