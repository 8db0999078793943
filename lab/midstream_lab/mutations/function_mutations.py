"""Known bugs of functions that fail for some rows, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from midstream.engine.core.batches import concat
from midstream.engine.operators import row_functions
from midstream.engine.operators.failed_rows import FailedRows
from midstream.engine.operators.row_conversion import USER_ERRORS, Row, to_batch
from midstream.engine.operators.row_functions import FlatMapOperator, MapBatchesOperator
from midstream.engine.state.keyed_states import State
from midstream_lab.mutations.mutation import Mutation, Replacements, named, nothing
from midstream_lab.scenarios.scenario import Scenario, draw


def results_before_the_failure_stay() -> Replacements:
    """What a function has yielded for a row before it fails comes out, although the row goes to the side output."""

    def made_apart(self: Any, batch: pa.RecordBatch, failed: FailedRows) -> pa.RecordBatch:
        made: list[Row] = []
        for index, row in row_functions.rows_apart(batch, self._where, failed):
            try:
                self._take(row, made, batch, index)
            except USER_ERRORS as error:
                failed.add(index, error)
        return to_batch(made, self.schema, self._where)

    return [(FlatMapOperator, "_made_apart", made_apart)]


def one_failure_a_batch() -> Replacements:
    """Of the failed rows of a batch, only the first goes to the side output."""
    original = FailedRows.add

    def add(self: Any, row: int, error: BaseException) -> None:
        if not self._found:
            original(self, row, error)

    return [(FailedRows, "add", add)]


def halves_fail_as_a_whole() -> Replacements:
    """Of a batch that fails, the half with the failing row is not processed further: its last row counts as the failed one."""

    def made_apart(self: Any, batch: pa.RecordBatch, failed: FailedRows) -> pa.RecordBatch | None:
        made = []
        for first, rows in ((0, batch.num_rows // 2), (batch.num_rows // 2, batch.num_rows - batch.num_rows // 2)):
            try:
                made.append(self._fitting(self._function(batch.slice(first, rows))))
            except USER_ERRORS as error:
                failed.add(first + rows - 1, error)
        return concat(made) if made else None

    return [(MapBatchesOperator, "_made_apart", made_apart)]


def states_are_not_undone() -> Replacements:
    """What a function has done to its states for a row for which it fails stays."""
    return [(State, "roll_back", nothing)]


def failing(seed: int) -> Scenario:
    return draw(seed, topology="failing", rows=60)


MUTATIONS: Final = named(
    Mutation("what a function yields for a row before it fails comes out", results_before_the_failure_stay, failing),
    Mutation("of the failed rows of a batch all but one are lost", one_failure_a_batch, failing),
    Mutation("changes of state stay of a row for which the function fails", states_are_not_undone, failing),
    Mutation("rows that share half a batch with a failing one are lost", halves_fail_as_a_whole, failing),
)
