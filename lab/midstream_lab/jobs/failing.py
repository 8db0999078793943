"""Functions of a simulated job that fail for some rows, which then go to a side output."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Final

import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.operators.base import Operator, OperatorContext, Output
from midstream.engine.operators.failed_rows import FAILED, ErrorPolicy, FailedRows
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction, ProcessContext
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.row_conversion import Row
from midstream.engine.operators.row_functions import FlatMapOperator, MapBatchesOperator
from midstream.engine.state.keyed_states import ListState, ValueState
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside
from midstream_lab.jobs.shapes import SIDE
from midstream_lab.jobs.wrapped_operator import Around

_ONE_OF: Final = 3
"""The function fails for rows whose id is divisible by this."""
_BLOCK: Final = 1_000_000
"""More rows than a job has: the count of failed rows is in its checkpoints, and never too high."""

logging.getLogger(FailedRows.__module__).setLevel(logging.ERROR)  # simulated rows fail by design


class Splitting:
    """A function with a life, for single rows or for batches; it fails after a part of its result."""

    def __init__(self) -> None:
        self.is_open = False

    def open(self, context: OperatorContext) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


class OfRows(Splitting):
    def __call__(self, row: Row) -> Iterator[Row]:
        assert self.is_open
        yield row
        if row["id"] % _ONE_OF == 0:
            raise ValueError(f"row {row['id']}")


class OfBatches(Splitting):
    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        assert self.is_open
        wrong = [row for row in to_list(batch.column("id")) if row % _ONE_OF == 0]
        if wrong:
            raise ValueError(f"row {wrong[-1]}")
        return batch


class WithState(KeyedProcessFunction):
    """Fails after it has changed states, set a timer and emitted a row; finds nothing of that afterwards."""

    fails: ValueState[bool] = ValueState(bool, default=False)
    last: ListState[int] = ListState(int)

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def process(self, row: Row, ctx: ProcessContext) -> Iterator[Row]:
        number = row["id"]
        if self.fails.value or any(one % _ONE_OF == 0 for one in self.last):
            self._outside.world.bug(f"row {number} finds states of a row for which the function has failed")
        self.fails.value = number % _ONE_OF == 0
        self.last.set([*self.last, number][-3:])
        yield row
        if self.fails.value:
            ctx.timers.processing_time(ctx.now)
            raise ValueError(f"row {number}")

    def on_timer(self, time: datetime, ctx: ProcessContext) -> None:
        self._outside.world.bug("a timer fires that was set for a row for which the function has failed")


class Failing(Around):
    """An operator that calls such a function: "failing" for each row, "failing_batches" for batches, "failing_process" for
    each row with states and timers.

    The failed rows go to the side output `SIDE`, as they were.
    """

    def __init__(self, kind: str, uid: str, outside: Outside) -> None:
        self._given = kind, uid, outside
        self._uid = uid
        policy = ErrorPolicy("side_output", (_BLOCK - 1, _BLOCK), SCHEMA)
        inner: Operator
        match kind:
            case "failing":
                inner = FlatMapOperator(uid, OfRows(), SCHEMA, policy)
            case "failing_batches":
                inner = MapBatchesOperator(uid, OfBatches(), SCHEMA, "arrow", policy)
            case _:
                ports = [Port("process", ("key",), None, SCHEMA)]
                inner = ProcessOperator(uid, WithState(outside), ports, SCHEMA, {}, policy)
        super().__init__(outside, inner)
        self._out: Output

    def __reduce__(self) -> tuple[type[Failing], tuple[str, str, Outside]]:
        return Failing, self._given

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out
        super().open(context, self)  # type: ignore[arg-type]  # only what the inner operator calls

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        super().process(batch, port)
        self.failed_rows = self._inner.failed_rows

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        """Emit what the inner operator emits, a failed row in the form in which it came."""
        if tag != FAILED:
            self._out.emit(batch, tag)
            return
        column = batch.column("row")
        assert isinstance(column, pa.StructArray)
        rows = pa.RecordBatch.from_struct_array(column)
        name = {"failing": "OfRows", "failing_batches": "OfBatches"}.get(self._given[0], "WithState.process")
        errors = [(name, "ValueError", f"row {row}") for row in to_list(rows.column("id"))]
        found = list(zip(*(to_list(batch.column(name)) for name in ("function", "error_type", "error")), strict=True))
        if found != errors:
            self._outside.world.bug(f"{self._uid}: failed rows have the errors {found[:3]} instead of {errors[:3]}")
        self._out.emit(pa.RecordBatch.from_arrays(rows.columns, schema=SCHEMA), SIDE)
