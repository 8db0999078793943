"""What all joins by event time share: the columns of their results, and their late rows.

A row that event time has passed may have lost its partners, or its absence may have been emitted already. So it is not
joined but goes to a side output. How far each key group has come is part of the state: a late row stays late after a
restore, at any parallelism.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import from_polars, to_polars
from midstream.engine.core.errors import SchemaError
from midstream.engine.core.key_groups import key_groups
from midstream.engine.operators.base import OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.batch_functions import BatchFunctionOperator, CoBatchFunction
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.row_conversion import check_keys
from midstream.engine.operators.windows.fired_watermarks import FiredWatermarks
from midstream.engine.operators.windows.window_specs import LATE, LATE_RIGHT
from midstream.engine.state.declared_state import DeclaredState
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart
from midstream.engine.state.table_state import TableState

PROGRESS: Final = "progress"


@dataclass(frozen=True, slots=True)
class JoinColumns:
    """The columns of a join: those of the left stream, then those of the right one without its keys."""

    left: pa.Schema
    right: pa.Schema
    """The columns of the right stream as they are named in the result; its keys have the left's names."""
    keys: tuple[str, ...]
    names: Mapping[str, str]
    """The names of the right stream's columns in the result."""
    left_time: TimeColumn
    right_time: TimeColumn

    @classmethod
    def of(cls, ports: Sequence[Port], suffix: str, where: str) -> JoinColumns:
        """Raise SchemaError if two columns of the result would have one name."""
        left, right = ports
        assert left.event_time is not None and right.event_time is not None
        names = dict(zip(right.keys, left.keys, strict=True))
        for name in right.schema.names:
            if name not in names:
                names[name] = name + suffix if name in left.schema.names else name
        made = [*left.schema.names, *(name for own, name in names.items() if own not in right.keys)]
        twice = next((name for number, name in enumerate(made) if name in made[:number]), None)
        if twice is not None:
            raise SchemaError(
                f"{where}: two columns of the result would be called {twice!r}; the right stream's columns whose names the "
                f"left has too get the suffix {suffix!r}: give another suffix=, or rename a column with rename()"
            )
        first, second = (
            TimeColumn(time) if isinstance(time, str) else time for time in (left.event_time, right.event_time)
        )
        schema = pa.schema([field.with_name(names[field.name]) for field in right.schema])
        return cls(left.schema, schema, tuple(left.keys), names, first, replace(second, name=names[second.name]))

    @property
    def added(self) -> list[str]:
        """The columns that the right stream adds to the left's."""
        return [name for name in self.right.names if name not in self.keys]

    @property
    def both(self) -> pa.Schema:
        return pa.schema([*self.left, *(self.right.field(name) for name in self.added)])


class EventTimeJoinOperator(BatchFunctionOperator):
    """Base of the joins by event time. `tables`: the state, by name."""

    result_time: TimeColumn
    """The event time of the results."""

    def __init__(self, name: str, tables: Mapping[str, TableState], ports: Sequence[Port], schema: pa.Schema) -> None:
        self._tables = dict(tables)
        super().__init__(name, CoBatchFunction(), ports, schema)
        self.side_outputs = {LATE: ports[0].schema, LATE_RIGHT: ports[1].schema}
        # The following attribute is set when the operator opens.
        self._fired: FiredWatermarks

    @abstractmethod
    def _joined(self, rows: pl.DataFrame, port: int) -> pl.DataFrame | None:
        """Add rows, none of them late, and return the results that are complete."""

    @abstractmethod
    def _completed(self, watermark_us: int) -> pl.DataFrame | None:
        """Return the results that are complete at this watermark, and remove what nothing can match any more."""

    @abstractmethod
    def _drop_completed(self) -> None:
        """Drop rows that had been removed at the watermarks of their key groups, after a restore."""

    def _declared(self) -> dict[str, DeclaredState]:
        return dict(self._tables)

    def open(self, context: OperatorContext, out: Output) -> None:
        super().open(context, out)
        self._fired = FiredWatermarks(context.key_groups)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        spec, time = self._ports[port], self._times[port]
        check_keys(batch, spec.keys, self._where)
        assert time is not None, spec
        times = time.us(batch)
        if self._fired.is_even:
            is_late = times <= self._fired.lowest
        else:
            groups = key_groups(batch, spec.keys, self._runtime.max_parallelism)
            is_late = times <= self._fired.of(groups)
        if is_late.any():
            self._out.emit(batch.filter(pa.array(is_late)), (LATE, LATE_RIGHT)[port])
            batch = batch.filter(pa.array(~is_late))
        if batch.num_rows:
            self._emit(self._joined(to_polars(batch), port))

    def advance_watermark(self, watermark_us: int) -> bool:
        self._emit(self._completed(watermark_us))
        self._fired.reach(watermark_us)
        return True

    def _emit(self, made: pl.DataFrame | None) -> None:
        if made is not None and made.height:
            self._out.emit(from_polars(made, self.schema, self._where))

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        rows = super().snapshot(checkpoint_id)
        marks = self._fired.table()
        if marks is None:
            return rows
        part = StatePart(Redistribute.KEYED, (Chunk(self._runtime.ids.new_id(), marks),))
        return Snapshot(SnapshotResult({PROGRESS: part}), rows.later)

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        super().restore({name: part for name, part in parts.items() if name != PROGRESS})
        if PROGRESS in parts:
            self._fired.restore(parts[PROGRESS].table())
            self._drop_completed()
