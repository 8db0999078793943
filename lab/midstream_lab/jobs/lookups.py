"""Rows that wait for a slow function in a simulated job: results in any order, each on its side of every watermark.

How long a call takes, and whether it fails and is repeated, is drawn from the seed of the run.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.elements import MIN_WATERMARK_US, Assigned
from midstream.engine.operators.async_map import IN_FLIGHT, AsyncMapOperator, CallLimits
from midstream.engine.operators.base import OperatorContext, Output
from midstream.engine.operators.row_conversion import Row
from midstream.engine.state.state_parts import StatePart
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside
from midstream_lab.jobs.wrapped_operator import Around

LOOKUPS: Final = ("lookup", "lookup_in_order")
"""The kinds of operators that call a slow function. The second emits the results in the order of the rows."""
CALLED: Final = IN_FLIGHT
"""The state with the rows that have not been emitted."""
_ONE_OF: Final = 16
"""How many calls there are for one that fails."""


class SlowFunction:
    """Returns the row, or fails."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def __call__(self, row: Row) -> Row:
        world = self._outside.world
        if world.below(_ONE_OF) == 0:
            row.clear()
            raise OSError("no answer")
        return row


class Lookup(Around):
    """Calls such a function, and checks the order of what is emitted. `kind` is one of `LOOKUPS`."""

    holds_watermarks = True

    def __init__(self, kind: str, uid: str, outside: Outside) -> None:
        self._given = kind, uid, outside
        limits = CallLimits(capacity=5, timeout_s=0.05, retries=1000, ordered=kind == "lookup_in_order")
        super().__init__(outside, AsyncMapOperator(uid, SlowFunction(outside), SCHEMA, SCHEMA, limits))
        self._checked: _CheckedOutput

    def __reduce__(self) -> tuple[type[Lookup], tuple[str, str, Outside]]:
        return Lookup, self._given

    def open(self, context: OperatorContext, out: Output) -> None:
        kind, uid, outside = self._given
        self._checked = _CheckedOutput(out, uid, outside, context.watermark_us, in_order=kind == "lookup_in_order")
        super().open(context, self._checked)

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if CALLED in parts:
            self._checked.restore(parts[CALLED].table().sort_by("watermark_us"))
        super().restore(parts)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self._checked.receive(to_list(batch.column("id")), self._checked.offered_us)
        super().process(batch, port)

    def advance_watermark(self, watermark_us: int) -> bool:
        self._checked.offered_us = watermark_us
        return super().advance_watermark(watermark_us)

    def ready(self, wake: Callable[[], None]) -> bool:
        return self._inner.ready(wake)

    @property
    def awaits_work(self) -> bool:
        return self._inner.awaits_work


class _CheckedOutput:
    """Compares what is emitted with the rows that were received: `offered_us` is the newest watermark before them."""

    def __init__(self, out: Output, uid: str, outside: Outside, offered_us: int, *, in_order: bool) -> None:
        self.offered_us = offered_us
        self._left_us = offered_us
        """The newest watermark that has left the operator."""
        self._out = out
        self._uid = uid
        self._world = outside.world
        self._in_order = in_order
        self._order: list[int] = []
        self._waiting: dict[int, list[int]] = defaultdict(list)
        """For each row that has not been emitted, the watermarks before it, as often as it was received."""

    def restore(self, rows: pa.Table) -> None:
        marks = [min(mark, self.offered_us) for mark in to_list(rows.column("watermark_us"))]
        for row, mark in zip(to_list(rows.column("row")), marks, strict=True):
            self.receive([row["id"]], mark)
        self._left_us = min(marks, default=self._left_us)

    def receive(self, ids: list[int], before_us: int) -> None:
        self._order += ids
        for row in ids:
            insort(self._waiting[row], before_us)

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        ids = to_list(batch.column("id"))
        if self._in_order:
            due, self._order = self._order[: len(ids)], self._order[len(ids) :]
            if ids != due:
                self._world.bug(f"{self._uid} emits the rows {ids[:5]}, and it was the turn of {due[:5]}")
        for row in ids:
            marks = self._waiting.get(row)
            if not marks:
                self._world.bug(f"{self._uid} emits row {row}, which it has not received, or twice")
                continue
            before_us = marks.pop(0)
            if not marks:
                del self._waiting[row]
            if before_us > self._left_us:
                self._world.bug(f"{self._uid} emits row {row}, and not the watermark {before_us} before it")
        self._out.emit(batch, tag)

    def watermark(self, watermark_us: int) -> None:
        if watermark_us > self.offered_us:
            self._world.bug(f"{self._uid} emits the watermark {watermark_us}, and was offered {self.offered_us}")
        passed = [row for row, marks in self._waiting.items() if marks[0] < watermark_us]
        if passed and watermark_us > MIN_WATERMARK_US:
            self._world.bug(f"{self._uid} emits the watermark {watermark_us} before the rows {passed[:5]}")
        self._left_us = max(self._left_us, watermark_us)
        self._out.watermark(watermark_us)

    def idle(self, idle: bool, assigned: Assigned = ()) -> None:
        self._out.idle(idle, assigned)
