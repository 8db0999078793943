"""What all joins by event time share: the columns of their results, and their late rows.

A row that event time has passed may have lost its partners, or its absence may have been emitted already. So it is not
joined but goes to a side output.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import from_polars, to_polars
from midstream.engine.core.errors import SchemaError
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.batch_functions import CoBatchFunction
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.on_time_functions import PROGRESS, OnTimeFunctionOperator
from midstream.engine.operators.windows.window_specs import LATE, LATE_RIGHT
from midstream.engine.state.declared_state import DeclaredState
from midstream.engine.state.state_parts import StatePart
from midstream.engine.state.table_state import TableState


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


class EventTimeJoinOperator(OnTimeFunctionOperator):
    """Base of the joins by event time. `tables`: the state, by name."""

    result_time: TimeColumn
    """The event time of the results."""

    def __init__(self, name: str, tables: Mapping[str, TableState], ports: Sequence[Port], schema: pa.Schema) -> None:
        self._tables = dict(tables)
        super().__init__(name, CoBatchFunction(), ports, schema, (LATE, LATE_RIGHT))

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

    def _call(self, batch: pa.RecordBatch, port: int) -> None:
        self._emit(self._joined(to_polars(batch), port))

    def advance_watermark(self, watermark_us: int) -> bool:
        self._emit(self._completed(watermark_us))
        self._fired.reach(watermark_us)
        return True

    def _emit(self, made: pl.DataFrame | None) -> None:
        if made is not None and made.height:
            self._out.emit(from_polars(made, self.schema, self._where))

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        super().restore(parts)
        if PROGRESS in parts:
            self._drop_completed()
