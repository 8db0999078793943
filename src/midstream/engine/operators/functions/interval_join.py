"""The inner join of two keyed streams by time, as a function on batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import polars as pl
import pyarrow as pa

from midstream.engine.core.errors import JobError
from midstream.engine.operators.base import OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.batch_functions import BatchContext, BatchFunctionOperator, CoBatchFunction
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.windows.fired_watermarks import FiredWatermarks
from midstream.engine.state.join_index import JoinIndex
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart

PROGRESS: Final = "progress"
_FURTHEST_US: Final = 2**62
"""A limit within int64: no two event times are further apart."""


def interval_join_operator(name: str, ports: Sequence[Port], lower_us: int, upper_us: int) -> BatchFunctionOperator:
    """Return the operator that pairs rows of equal keys if the second is `lower_us` to `upper_us` after the first.

    A pair has the columns of the first row, then those of the second except its keys. It is emitted when the later of
    its rows arrives; a row is kept until, by event time, only late rows can match it. Times are compared in whole
    microseconds.
    """
    first, second = ports
    lower_us, upper_us = max(lower_us, -_FURTHEST_US), min(upper_us, _FURTHEST_US)
    keys, names = list(first.keys), dict(zip(second.keys, first.keys, strict=True))
    renamed = pa.schema([field.with_name(names.get(field.name, field.name)) for field in second.schema])
    twice = [field.name for field in second.schema if field.name not in names and field.name in first.schema.names]
    if twice:
        raise JobError(
            f"operator {name!r}: both streams have a column {twice[0]!r}; rename it in one of them, with "
            f"rename({{{twice[0]!r}: …}})"
        )
    added = [field for field in renamed if field.name not in keys]
    schema = pa.schema([*first.schema, *added])
    assert first.event_time is not None and second.event_time is not None
    first_time, second_time = (
        TimeColumn(time) if isinstance(time, str) else time for time in (first.event_time, second.event_time)
    )
    second_time = replace(second_time, name=names.get(second_time.name, second_time.name))
    second_names = [field.name for field in added]

    def side_by_side(left: pl.DataFrame, right: pl.DataFrame) -> pl.DataFrame:
        return left.hstack(right.select(second_names))

    class IntervalJoin(CoBatchFunction):
        left = _index(first.schema, first_time, upper_us)
        right = _index(renamed, second_time, -lower_us)

        def process1(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame | None:
            pairs = self.right.pairs(self.left.append(rows), lower_us, upper_us)
            return None if pairs is None else side_by_side(*pairs)

        def process2(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame | None:
            pairs = self.left.pairs(self.right.append(rows.rename(names)), -upper_us, -lower_us)
            return None if pairs is None else side_by_side(*reversed(pairs))

    return IntervalJoinOperator(name, IntervalJoin(), ports, schema)


def _index(schema: pa.Schema, time: TimeColumn, held_us: int) -> JoinIndex:
    return JoinIndex(schema, time.name, held_us, time.times(schema.field(time.name).type))


class IntervalJoinOperator(BatchFunctionOperator):
    """The operator of an interval join. It stores expired rows together with the progress of event time."""

    def open(self, context: OperatorContext, out: Output) -> None:
        super().open(context, out)
        self._fired = FiredWatermarks(context.key_groups)

    def advance_watermark(self, watermark_us: int) -> bool:
        self._fired.reach(watermark_us)
        for side in self._sides:
            side.advance(watermark_us)
        return True

    @property
    def _sides(self) -> list[JoinIndex]:
        return [state for state in self._states.values() if isinstance(state, JoinIndex)]

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        if any(side.holds_late for side in self._sides):  # a restore would drop them by the stored progress
            for side in self._sides:
                side.without_dead()
        rows = super().snapshot(checkpoint_id)
        if not any(side.holds_dead for side in self._sides):
            return rows
        marks = self._fired.table()
        assert marks is not None, "rows are dead, and there was no watermark"
        part = StatePart(Redistribute.KEYED, (Chunk(self._runtime.ids.new_id(), marks),))
        return Snapshot(SnapshotResult({PROGRESS: part}), rows.later)

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        super().restore({name: part for name, part in parts.items() if name != PROGRESS})
        if PROGRESS in parts:
            self._fired.restore(parts[PROGRESS].table())
            for side in self._sides:
                side.drop(self._fired.of)
