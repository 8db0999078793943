"""The output of a job, by the names that a test uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa

from midstream.api.data_stream import DataStream
from midstream.api.stream_sinks import StreamSink
from midstream.connectors.memory.python_rows import table_rows
from midstream.engine.core.batches import check_held_by_polars, to_polars
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.sink_api import Sink
from midstream.engine.operators.windows.window_specs import LATE, LATE_RIGHT
from midstream.inprocess.rewrite import KeptOutput

Name: TypeAlias = "str | tuple[str, str] | DataStream | StreamSink | Sink"
"""The name of an output: the uid or name of a sink or of the operator at the end of a stream, the tag of a side output
(or uid and tag), the stream itself, or the result of `collect()`.
"""
Row: TypeAlias = dict[str, Any]


class Result:
    """The rows of every sink, stream end and side output: `result["totals"]`, or `result.rows` for the only one.

    `result.late` has the rows that were too late, by the uid of the window. `print(result)` shows all.

        >>> result = testing.run(orders.filter(pl.col("price") > 4))
        >>> result.rows
        [{'user': 'bob', 'price': 5}]
        >>> result
        Result(
          filter-1: 1 row
            {'user': 'bob', 'price': 5}
        )
    """

    def __init__(self, outputs: Sequence[KeptOutput], taken: Mapping[str, Sequence[pa.RecordBatch]]) -> None:
        self._outputs = tuple(outputs)
        self._tables = {
            output.id: pa.Table.from_batches(list(taken.get(output.id, ())), schema=output.schema) for output in outputs
        }

    def __getitem__(self, name: Name) -> list[Row]:
        """Return the rows as dicts, in order of arrival. Raises ConfigError for an unknown or ambiguous name."""
        return table_rows(self.table(name))

    def table(self, name: Name) -> pa.Table:
        """Return the rows of an output as an Arrow table, with the types that they have in the job.

        `name`: as for `RunningJob.take`.

        Raises ConfigError for an unknown or ambiguous name.

            >>> testing.run(orders).table(orders).num_rows
            3
        """
        return self._tables[find(self._outputs, name).id]

    def frame(self, name: Name) -> pl.DataFrame:
        """Return the rows of an output as a polars DataFrame.

        `name`: as for `RunningJob.take`.

        Raises ConfigError for an unknown or ambiguous name, SchemaError for a column that polars cannot hold.

            >>> testing.run(orders).frame(orders)["price"].sum()
            12
        """
        table = self.table(name)
        check_held_by_polars(table.schema, "frame()")
        return to_polars(table)

    @property
    def rows(self) -> list[Row]:
        """The rows of the only sink or stream end."""
        return table_rows(self._tables[only(self._outputs).id])

    @property
    def late(self) -> dict[str, list[Row]]:
        """Rows that came too late for a window or join, by its uid; only of those that had some. Of a join, those of the
        left stream come first."""
        late: dict[str, list[Row]] = {}
        for tag in (LATE, LATE_RIGHT):
            for output in self._outputs:
                if output.tag == tag and (rows := table_rows(self._tables[output.id])):
                    late.setdefault(output.uid, []).extend(rows)
        return late

    def __iter__(self) -> Iterator[str]:
        return (output.label for output in self._outputs)

    def tables(self) -> dict[str, pa.Table]:
        """Return all outputs as Arrow tables, by a text that names each.

        For example:

            >>> list(testing.run(orders).tables())
            ['orders (collection)']
        """
        return {output.label: self._tables[output.id] for output in self._outputs}

    def __repr__(self) -> str:
        parts = [f"{label}: {rows_text(table_rows(table))}" for label, table in self.tables().items()]
        return "Result(\n" + "".join(f"  {part}\n" for part in parts) + ")"


def rows_text(rows: Sequence[Row], rows_max: int = 10) -> str:
    if not rows:
        return "no rows"
    shown = [f"    {row}" for row in rows[:rows_max]]
    if len(rows) > rows_max:
        shown.append(f"    … {len(rows) - rows_max} more")
    return f"{len(rows)} row{'s' * (len(rows) > 1)}\n" + "\n".join(shown)


def only(outputs: Sequence[KeptOutput]) -> KeptOutput:
    """Return the only output that is an end of the job."""
    ends = [output for output in outputs if output.is_end]
    if len(ends) != 1:
        raise ConfigError(f"rows: there are {len(ends)} outputs; name one: {_known(outputs)}")
    return ends[0]


def find(outputs: Sequence[KeptOutput], name: Name) -> KeptOutput:
    """Return the output of that name. A uid takes precedence over a name, and a name over a side output's tag."""
    first = name.core.origins[0] if isinstance(name, DataStream) else None
    node = (name.node, None) if isinstance(name, StreamSink) else (first.node, first.tag) if first else None
    ways: list[Callable[[KeptOutput], bool]] = [
        lambda output: isinstance(name, Sink) and output.sink is name,
        lambda output: (output.node, output.tag) == node and output.is_end,
        lambda output: (output.node, output.tag) == node,
        lambda output: (output.uid, output.tag) == name,
        lambda output: output.uid == name and output.tag is None,
        lambda output: output.name == name and output.tag is None,
        lambda output: output.tag is not None and output.tag == name,
        lambda output: output.label == name,
    ]
    for is_meant in ways:
        found = [output for output in outputs if is_meant(output)]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(
                f"output {name!r}: there are {len(found)} of that name; name one by its uid: {_known(found)}"
            )
    raise ConfigError(f"output {name!r}: the job has none of that name; it has: {_known(outputs)}")


def _known(outputs: Sequence[KeptOutput]) -> str:
    return ", ".join(repr(o.uid) if o.tag is None else repr((o.uid, o.tag)) for o in outputs) or "none"
