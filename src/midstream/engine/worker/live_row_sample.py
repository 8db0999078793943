"""Shows users the next batch that an operator emits. Without a request, the cost is one comparison per batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from midstream.engine.core.error_rows import sendable, value_text
from midstream.engine.core.interfaces import Executor
from midstream.engine.graph.job_graph import Vertex
from midstream.engine.protocol.live_rows import (
    CHARS_MAX,
    COLUMNS_MAX,
    NAME_CHARS_MAX,
    VALUE_CHARS_MAX,
    WAIT_S,
    Column,
    RowSample,
    SampleRows,
)
from midstream.engine.worker.operator_chain import OperatorChain

VALUE_BYTES_MAX: Final = 64 * 1024
"""Of a larger value only its size is shown: converting it to text would block the task."""


def sample_next_batch(
    request: SampleRows,
    subtask: int,
    vertex: Vertex,
    chain: OperatorChain,
    executor: Executor,
    reply: Callable[[RowSample], None],
) -> None:
    """Reply with the next rows that the operator emits, if it is one of `chain` and emits any within WAIT_S.

    Of two concurrent requests for the same operator, this task answers the later one.
    """
    index = next((i for i, spec in enumerate(vertex.specs) if spec.uid == request.operator), None)
    if index is None:
        return
    output = chain.outputs[index if vertex.source is not None else index + 1]

    def show(batch: pa.RecordBatch, side_output: str | None) -> None:
        if side_output == request.side_output:
            output.tap = None
            reply(row_sample(request, subtask, batch))

    def stop() -> None:
        if output.tap is show:
            output.tap = None

    output.tap = show
    executor.call_later(WAIT_S, stop)


def row_sample(request: SampleRows, subtask: int, batch: pa.RecordBatch) -> RowSample:
    """The first rows of `batch`: the requested number, within the limits on columns and characters."""
    fields = list(batch.schema)[:COLUMNS_MAX]
    rows: list[tuple[str | None, ...]] = []
    left = CHARS_MAX
    for row in range(min(request.rows, batch.num_rows)):
        values = tuple(_value(batch.column(at), row) for at in range(len(fields)))
        left -= sum(len(value) for value in values if value is not None)
        if left < 0:
            break
        rows.append(values)
    columns = tuple(
        Column(_short(field.name, NAME_CHARS_MAX), _short(str(field.type), NAME_CHARS_MAX)) for field in fields
    )
    return RowSample(request.number, subtask, columns, tuple(rows), batch.num_rows, batch.num_columns - len(fields))


def _value(column: pa.Array[Any], row: int) -> str | None:
    one = column.slice(row, 1)
    if one.null_count:
        return None
    if one.nbytes > VALUE_BYTES_MAX:
        return f"({one.nbytes:,} bytes)"
    return _short(value_text(one), VALUE_CHARS_MAX)


def _short(text: str, chars_max: int) -> str:
    text = sendable(text)
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"
