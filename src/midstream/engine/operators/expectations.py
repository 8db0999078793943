"""Conditions that every row must meet: one that does not fails the job, is dropped, or goes to a side output."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import to_polars
from midstream.engine.core.error_rows import row_text
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.operators.elementwise import check_row_by_row
from midstream.engine.operators.expressions import EXPRESSION_ERRORS, Evaluation, columns_read, infer_type
from midstream.engine.operators.failed_rows import ErrorPolicy, FailedRows
from midstream.engine.operators.row_conversion import at_row
from midstream.engine.operators.row_functions import FunctionCaller
from midstream.engine.operators.stateless import expression_error


class ExpectOperator(FunctionCaller):
    """Passes on the rows for which all of `conditions` are true. A condition that is null is not met.

    `conditions`: boolean polars expressions over the columns.
    Raises SchemaError immediately for an unknown column or an expression that is not boolean.
    """

    keeps_rows = True

    def __init__(self, name: str, conditions: Sequence[pl.Expr], schema: pa.Schema, policy: ErrorPolicy) -> None:
        super().__init__(name, expect, schema, policy)
        self._conditions = tuple(conditions)
        check_row_by_row(conditions, self.schema, self._where)
        for condition in conditions:
            kind = infer_type(self.schema, condition, self._where)
            if kind != pa.bool_():
                raise SchemaError(f"{self._where}: a condition must be boolean; this one is {kind}: {condition}")
        self._reads = columns_read(conditions, self.schema)
        self._evaluation = Evaluation(conditions)

    def input_column(self, name: str) -> str | None:
        return name

    def _made(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        found = self._met(batch)
        unmet = (~_all(found)).arg_true()
        if len(unmet):
            row = int(unmet[0])
            raise at_row(JobError(f"{self._error(found, row)}; the row is {row_text(batch, row)}"), row)
        return batch

    def _made_apart(self, batch: pa.RecordBatch, failed: FailedRows) -> pa.RecordBatch:
        found = self._met(batch)
        mask = _all(found)
        if mask.all():
            return batch
        for row in (~mask).arg_true().to_list():
            failed.add(row, self._error(found, row))
        return batch.filter(mask.to_arrow(compat_level=pl.CompatLevel.oldest()))

    def _met(self, batch: pa.RecordBatch) -> pl.DataFrame:
        """Return one column for each condition: true, false or null."""
        named = [condition.alias(str(index)) for index, condition in enumerate(self._conditions)]
        try:
            # with_columns, not select: it gives a literal as many rows as the batch has
            return self._evaluation.of(
                to_polars(batch.select(self._reads)), lambda rows: rows.with_columns(*named)
            ).select(str(index) for index in range(len(named)))
        except EXPRESSION_ERRORS as error:
            raise expression_error(self._where, "a condition", error, batch, self._reads, self._conditions) from error

    def _error(self, found: pl.DataFrame, row: int) -> JobError:
        for condition, value in zip(self._conditions, found.row(row), strict=True):
            if value is not True:
                return JobError(f"{self._where}: expected {condition}, which is {'null' if value is None else 'false'}")
        raise AssertionError(row)


def expect(row: object) -> None:
    """What failed rows name as their function."""


def _all(found: pl.DataFrame) -> pl.Series:
    return found.select(pl.all_horizontal(pl.all().fill_null(False))).to_series()
