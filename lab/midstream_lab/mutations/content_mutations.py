"""Known bugs that change what is in recovered or joined batches, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa

from midstream.engine.checkpoint import channel_state
from midstream.engine.core.elements import Batch
from midstream.engine.exchange import element_queue
from midstream.engine.exchange.batch_lease import LeasedBatch, concat_leased
from midstream.engine.worker import gate_recovery
from midstream.engine.worker.task_input import TaskInput
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios import targeted


def _with_last(batch: Batch, change: Callable[[pa.Array[Any]], pa.Array[Any]]) -> Batch:
    """With the last column changed: the only one that nothing in the engine reads."""
    return pa.RecordBatch.from_arrays([*batch.columns[:-1], change(batch.columns[-1])], schema=batch.schema)


def _wiped(batch: Batch) -> Batch:
    return _with_last(batch, lambda column: pa.array([""] * len(column), column.type))


def _swapped(batch: Batch) -> Batch:
    """The last column of the first two rows."""
    rows = pa.array([1, 0, *range(2, batch.num_rows)]) if batch.num_rows > 1 else pa.array(range(batch.num_rows))
    return _with_last(batch, lambda column: column.take(rows))


def _reversed(batch: Batch) -> Batch:
    return batch.take(pa.array(range(batch.num_rows - 1, -1, -1), pa.int64()))


def _recovered(change: Callable[[Batch], Batch]) -> Replacements:
    original = channel_state.rows_of

    def rows_of(*arguments: Any) -> Sequence[Batch]:
        return [change(batch) if batch.num_rows else batch for batch in original(*arguments)]

    return [(gate_recovery, "rows_of", rows_of)]


def _joined(change: Callable[[Batch], Batch]) -> Replacements:
    def changed(parts: Any) -> LeasedBatch:
        found = concat_leased(parts)
        if len(parts) > 1:
            found.batch = change(found.batch)
        return found

    return [(element_queue, "concat_leased", changed)]


def recovered_columns_wiped() -> Replacements:
    return _recovered(_wiped)


def recovered_text_swapped() -> Replacements:
    return _recovered(_swapped)


def recovered_rows_reversed() -> Replacements:
    return _recovered(_reversed)


def recovered_times_of_the_first() -> Replacements:
    """All rows of a recovered batch have the event time of its first one."""

    def change(batch: Batch) -> Batch:
        index = batch.schema.get_field_index("ts")
        column = batch.column(index).take(pa.array([0] * batch.num_rows))
        return batch.set_column(index, batch.schema.field(index), column)

    return _recovered(change)


def joined_columns_wiped() -> Replacements:
    return _joined(_wiped)


def joined_text_swapped() -> Replacements:
    return _joined(_swapped)


def joined_rows_reversed() -> Replacements:
    """Batches that wait after one another are joined the wrong way round."""
    return [(element_queue, "concat_leased", lambda parts: concat_leased(parts[::-1]))]


def filtered_columns_shifted() -> Replacements:
    """Where rows of others are left out, the last column is that of the rows before they were."""
    original = channel_state.rows_of

    def shifted(batch: Batch, whole: Batch) -> Batch:
        if batch.num_rows == whole.num_rows:
            return batch
        return _with_last(batch, lambda column: whole.columns[-1].slice(0, len(column)))

    def rows_of(batches: Sequence[Batch], *rest: Any) -> Sequence[Batch]:
        return [shifted(batch, whole) for batch, whole in zip(original(batches, *rest), batches, strict=True)]

    return [(gate_recovery, "rows_of", rows_of)]


def slices_off_by_one() -> Replacements:
    """Of what is filtered each batch begins one row too late."""
    original = channel_state.rows_of

    def rows_of(batches: Sequence[Batch], *rest: Any) -> Sequence[Batch]:
        kept = original(batches, *rest)
        return kept if kept is batches else [batch.slice(1) if batch.num_rows > 1 else batch for batch in kept]

    return [(gate_recovery, "rows_of", rows_of)]


def rest_off_by_one() -> Replacements:
    """Of a batch that is being processed, the row that was done last is in flight still."""
    original = TaskInput.rests

    def rests(self: Any) -> Any:
        found = original(self)
        return {number: (current_batch, max(0, next_row - 1)) for number, (current_batch, next_row) in found.items()}

    return [(TaskInput, "rests", rests)]


MUTATIONS: Final = named(
    Mutation("a column of recovered rows is empty", recovered_columns_wiped, targeted.backpressured),
    Mutation("a column of two recovered rows is swapped", recovered_text_swapped, targeted.backpressured),
    Mutation("recovered rows of a batch come in the wrong order", recovered_rows_reversed, targeted.backpressured),
    Mutation("recovered rows have the event time of the first of them", recovered_times_of_the_first, targeted.on_time),
    Mutation("a column of joined batches is empty", joined_columns_wiped, targeted.backpressured),
    Mutation("a column of two rows of joined batches is swapped", joined_text_swapped, targeted.backpressured),
    Mutation("batches are joined in the wrong order", joined_rows_reversed, targeted.backpressured),
    Mutation("a column of filtered rows is that of others", filtered_columns_shifted, targeted.backpressured),
    Mutation("filtered batches begin one row too late", slices_off_by_one, targeted.rejoined),
    Mutation("the rest of a batch begins one row too early", rest_off_by_one, targeted.sliced),
)
