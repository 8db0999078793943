"""What a stream is made of, for the packages that add operators to it or read its program; users see the stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa

from midstream.api.program import MakeOperator, Program
from midstream.engine.core.errors import JobError
from midstream.engine.graph.job_graph import Partitioning
from midstream.engine.graph.logical_graph import Input
from midstream.engine.operators.event_time_column import TimeColumn

_KEEPS_ROWS: Final = frozenset(
    (
        *("filter", "expect", "select", "with_columns", "drop", "rename", "window", "window_all", "aggregate", "top"),
        *("row_keys", "drop_duplicates", "sort_by_time", "join", "join_asof", "join_table"),
    )
)
"""The kinds of operators that pass on the event-time column as it is, or state that they compute it; windows in LATE."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One of the outputs from which a stream's rows come; a union has several."""

    node: int
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class StreamCore:
    """Rows of one schema: where in a program they come from, and which subtasks of the next operator get them.

    `side_outputs`: the columns and the event time of each other output of the operator that they come from.
    `overwritten`: the call that computed the event-time column again, after which the rows have no event time; "" if none.
    """

    program: Program
    origins: tuple[Origin, ...]
    schema: pa.Schema
    event_time: TimeColumn | None = None
    side_outputs: Mapping[str, tuple[pa.Schema, TimeColumn | None]] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    partitioning: Partitioning | None = None
    overwritten: str = ""

    @property
    def event_time_name(self) -> str | None:
        return None if self.event_time is None else self.event_time.name

    def inputs(self, port: int = 0) -> list[Input]:
        """These rows as input `port` of an operator."""
        how = Partitioning.KEYED if self.keys else self.partitioning
        return [Input(origin.node, self.schema, origin.tag, how, self.keys, port) for origin in self.origins]

    def then(
        self,
        kind: str,
        make: MakeOperator,
        *,
        second: StreamCore | None = None,
        parallelism: int | None = None,
    ) -> StreamCore:
        """Add an operator that reads these rows, and those of `second` as its second input; return its output.

        The event time is the first of the inputs' that is still a column. That of windows, a unit before their end, ends at
        functions: a row that one emits at the end of a window would be late.
        """
        inputs, event_times, overwritten = self.inputs(), [self.event_time], self.overwritten
        if second is not None:
            inputs += second.inputs(1)
            event_times.append(second.event_time)
            overwritten = overwritten or second.overwritten
        if kind not in _KEEPS_ROWS and any(time is not None and time.is_end for time in event_times):
            event_times = []
        node = self.program.add(kind, inputs, make, parallelism=parallelism)
        assert node.schema is not None, kind
        side_outputs: Mapping[str, pa.Schema] = getattr(node.operator, "side_outputs", {})
        sides = {tag: (side, _surviving(event_times, side)) for tag, side in side_outputs.items()}
        return StreamCore(
            self.program,
            (Origin(node.id),),
            node.schema,
            _surviving(event_times, node.schema),
            sides,
            overwritten=overwritten,
        )

    def toward(self, partitioning: Partitioning) -> StreamCore:
        return replace(self, side_outputs={}, keys=(), partitioning=partitioning)

    def check_not_overwritten(self, method: str) -> None:
        """Raise JobError if an expression has computed the event-time column again: watermarks do not follow its values."""
        if self.overwritten:
            raise JobError(
                f"{method}: {self.overwritten}, but watermarks follow the times that the column had before; give the new "
                "column another name, or call with_watermarks() again after it"
            )

    def check_event_time(self, method: str, why: str = "") -> None:
        """Raise JobError unless the rows have an event time that watermarks follow."""
        self.check_not_overwritten(method)
        if self.event_time is None:
            timestamps = [field.name for field in self.schema if pa.types.is_timestamp(field.type)]
            raise JobError(
                f"{method}: {why and why + ', and '}the stream has no event time; call with_watermarks(column, strategy) "
                f"before it (timestamp columns: {', '.join(timestamps) or 'none'})"
            )

    def check_program(self, other: StreamCore, method: str) -> None:
        """Raise JobError unless `other` is of the same program."""
        if other.program is not self.program:
            raise JobError(f"{method}: the streams are of two Environments; build a job from one")


def _surviving(event_times: Iterable[TimeColumn | None], schema: pa.Schema) -> TimeColumn | None:
    """Return the first of these event-time columns that is still a timestamp column of `schema`."""
    for time in event_times:
        if time is not None:
            index = schema.get_field_index(time.name)
            if index >= 0 and pa.types.is_timestamp(schema.field(index).type):
                return time
    return None
