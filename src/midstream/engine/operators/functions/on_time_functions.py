"""Functions on batches that get no late rows: these leave through a side output.

A row is late if event time had passed it when it came. Event time is kept per key group as part of the state: after a
restore, rows that were late stay late, and what has been emitted is not emitted again, though the watermark begins from
the lowest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from midstream.engine.core.key_groups import key_groups
from midstream.engine.operators.base import OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.event_time_column import Int64s
from midstream.engine.operators.functions.batch_functions import BatchFunction, BatchFunctionOperator
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.key_group_watermarks import KeyGroupWatermarks
from midstream.engine.operators.row_conversion import check_keys
from midstream.engine.operators.windows.window_specs import LATE
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart

PROGRESS: Final = "progress"


class OnTimeFunctionOperator(BatchFunctionOperator):
    """Runs a function on batches, and emits late rows, unchanged, to a side output instead.

    `late_tags`: the side output for the late rows of each port; without any, no row is late. `hidden`: columns that late
    rows leave out. Every port has an event time, and keys unless the operator runs at parallelism 1.
    """

    runs_users_function = False

    def __init__(
        self,
        name: str,
        function: BatchFunction,
        ports: Sequence[Port],
        schema: pa.Schema,
        late_tags: Sequence[str] = (LATE,),
        hidden: Collection[str] = (),
    ) -> None:
        super().__init__(name, function, ports, schema)
        self.side_outputs = {
            tag: pa.schema([field for field in port.schema if field.name not in hidden])
            for tag, port in zip(late_tags, self._ports, strict=bool(late_tags))
        }
        self._late_tags = tuple(late_tags)
        self._fired: KeyGroupWatermarks

    def open(self, context: OperatorContext, out: Output) -> None:
        super().open(context, out)
        self._fired = KeyGroupWatermarks(context.key_groups)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if not self._late_tags:
            super().process(batch, port)
            return
        keys = self._ports[port].keys
        check_keys(batch, keys, self._where)
        times = self._last_us(batch, port)
        is_late = times <= self._reached(batch, keys)
        if is_late.any():
            tag = self._late_tags[port]
            self._out.emit(batch.select(self.side_outputs[tag].names).filter(pa.array(is_late)), tag)
            batch = batch.filter(pa.array(np.logical_not(is_late)))
        if batch.num_rows:
            self._call(batch, port)

    def _reached(self, batch: pa.RecordBatch, keys: tuple[str, ...]) -> Int64s:
        """Return the watermark that each row's key group has reached."""
        if self._fired.is_even or not keys:
            return np.full(batch.num_rows, self._fired.lowest)
        return self._fired.of(key_groups(batch, keys, self._runtime.max_parallelism))

    def _last_us(self, batch: pa.RecordBatch, port: int) -> Int64s:
        """Return, for each row, the event time as of which it is late."""
        time = self._times[port]
        assert time is not None, f"{self._where} has no event time"
        return time.us(batch)

    def advance_watermark(self, watermark_us: int) -> bool:
        super().advance_watermark(watermark_us)
        if self._late_tags:
            self._fired.reach(watermark_us)
        return True

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        rows, marks = super().snapshot(checkpoint_id), self._fired.table()
        if marks is None:
            return rows
        part = StatePart(Redistribute.KEYED, (Chunk(self._runtime.ids.new_id(), marks),))
        return Snapshot(SnapshotResult({PROGRESS: part}), rows.later)

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        super().restore({name: part for name, part in parts.items() if name != PROGRESS})
        if PROGRESS in parts:
            self._fired.restore(parts[PROGRESS])
