"""Rows for which a user's function fails: they fail the job, or are dropped, or go to a side output with the error."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.error_rows import row_text, sendable
from midstream.engine.core.errors import JobError, MidstreamError, text_of
from midstream.engine.operators.bad_records import TALLY, Tally
from midstream.engine.operators.base import NOTHING, Output, Snapshot, SnapshotResult
from midstream.engine.operators.row_conversion import at_row, user_error
from midstream.engine.state.state_parts import StatePart

FAILED: Final = "failed rows"
"""The tag of the side output of rows for which a function failed, with `on_error="side_output"`."""
FAILED_RIGHT: Final = "failed rows of the right"
"""The same for the rows of the second of two connected streams."""
OnError: TypeAlias = Literal["fail", "drop", "side_output"]
FailedMax: TypeAlias = tuple[int, int]
"""(failed rows, rows): how many may fail in each block of rows that a subtask processes."""
ERROR_CHARS_MAX: Final = 10_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What happens to a row for which a function fails. `schema`: the columns of the rows that the function takes; `right`:
    those of the second of two connected streams.
    """

    on_error: OnError = "fail"
    failed_max: FailedMax | None = None
    schema: pa.Schema | None = None
    right: pa.Schema | None = None

    @property
    def side_outputs(self) -> Mapping[str, pa.Schema]:
        if self.on_error != "side_output":
            return {}
        assert self.schema is not None, self
        right = {} if self.right is None else {FAILED_RIGHT: failed_schema(self.right)}
        return {FAILED: failed_schema(self.schema), **right}


FAIL: Final = ErrorPolicy()


def failed_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns of `side_output(FAILED)` for rows of `schema`."""
    text = pa.large_string()
    return pa.schema(
        [
            ("row", pa.struct(list(canonical_schema(schema)))),
            ("function", text),
            ("error_type", text),
            ("error", text),
        ]
    )


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of an object's class; a lambda is `<lambda>`."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


class FailedRows:
    """Takes the failed rows of one operator in one subtask, batch by batch.

    `where`: the operator, for messages. `what`: the function's name. `left`: those of the first of two inputs, which are
    counted together with these of the second.
    """

    def __init__(self, policy: ErrorPolicy, where: str, what: str, left: FailedRows | None = None) -> None:
        self._policy = policy
        self._where = where
        self._what = what
        self._tag = FAILED if left is None else FAILED_RIGHT
        self._tally: Tally = Tally(policy.failed_max) if left is None else left._tally
        self._found: list[tuple[int, BaseException]] = []

    @property
    def total(self) -> int:
        """Failed rows since the task was deployed."""
        return self._tally.total

    def add(self, row: int, error: BaseException) -> None:
        """Take the row at a position of the current batch, with what the function raised, or how its result is wrong.

        Raises a MemoryError again: it is not the row's fault.
        """
        if isinstance(error, MemoryError):
            raise error
        self._found.append((row, error))

    def flush(self, batch: pa.RecordBatch, out: Output) -> None:
        """Count the rows of a batch that has been processed, and emit those that failed.

        Raises JobError for the row that exceeds `failed_max`.
        """
        found, self._found = sorted(self._found, key=lambda one: one[0]), []
        before = 0
        for row, error in found:
            self._tally.advance(row - before)
            before = row + 1
            if self._tally.lose():
                raise self._too_many(batch, row, error) from error
            self._tally.advance(1)
            if self._tally.is_reported:
                text = sendable(str(self._error_of(batch, row, error)))
                _log.warning("%s (failed row %d of this subtask, on_error=%r)", text, self.total, self._policy.on_error)
        self._tally.advance(batch.num_rows - before)
        if found and self._policy.on_error == "side_output":
            out.emit(self._rows_of(batch, found), self._tag)

    def _rows_of(self, batch: pa.RecordBatch, found: Sequence[tuple[int, BaseException]]) -> pa.RecordBatch:
        schema = self._policy.side_outputs[self._tag]
        rows = batch.take(pa.array([row for row, _ in found], pa.int64()))
        row_type = schema.field("row").type
        columns: list[pa.Array[Any]] = [pa.StructArray.from_arrays(rows.columns, fields=list(row_type))]
        for texts in (
            [self._what] * len(found),
            [type(error).__name__ for _, error in found],
            [_shortened(text_of(error)) for _, error in found],
        ):
            columns.append(pa.array([sendable(text) for text in texts], pa.large_string()))
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _error_of(self, batch: pa.RecordBatch, row: int, error: BaseException) -> BaseException:
        if not isinstance(error, MidstreamError) or not str(error).startswith(self._where):
            return user_error(self._where, self._what, error, (batch, row))
        # a result that does not fit: the message names the operator, and that of a function on rows the row
        is_complete = isinstance(error, JobError) and error.row is not None
        return error if is_complete else JobError(f"{error}; the row is {row_text(batch, row)}")

    def _too_many(self, batch: pa.RecordBatch, row: int, error: BaseException) -> JobError:
        made = self._error_of(batch, row, error)
        most, tally = self._policy.failed_max, self._tally
        assert most is not None
        return at_row(
            JobError(
                f"{made}; {tally.lost} of the last {tally.block + 1} rows of this subtask have failed, and failed_max allows "
                f"{most[0]} of {most[1]}. Repair the function or the rows, or allow more of them"
            ),
            row,
        )

    # ---- state ----

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if TALLY in parts:
            self._tally.restore(parts[TALLY])

    def snapshot(self, new_id: Callable[[], str]) -> Snapshot:
        part = self._tally.snapshot(new_id)
        return NOTHING if part is None else Snapshot(SnapshotResult({TALLY: part}))


def _shortened(text: str) -> str:
    return text if len(text) <= ERROR_CHARS_MAX else f"{text[:ERROR_CHARS_MAX]} …"
