"""Accumulators as aggregates: their parts are pickles, made and merged by Python functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import polars as pl
import pyarrow as pa

from midstream.core.batches import canonical_type
from midstream.core.errors import JobError, MidstreamError, SchemaError
from midstream.core.values import form_of, to_array, to_python
from midstream.operators.aggregates import Accumulator, Aggregate, Columns
from midstream.operators.expressions import empty_frame
from midstream.operators.rows import copied, user_error


class AccumulatorAggregate(Aggregate):
    def __init__(self, accumulator: Accumulator[Any], where: str) -> None:
        if not isinstance(getattr(accumulator, "type", None), pa.DataType):
            raise SchemaError(f"{where}: {type(accumulator).__name__}.type must be the Arrow type of its result")
        self.columns = tuple(accumulator.columns)
        self._accumulator = accumulator
        self._where = where
        self.failure: JobError | None = None
        """What a function of the user's raised: on its way through polars an exception loses its traceback."""
        self._kind = canonical_type(accumulator.type)
        try:
            form_of(self._kind)
        except SchemaError as error:
            raise SchemaError(f"{where}: the type of {type(accumulator).__name__}: {error}") from None
        self._result_type = empty_frame(pa.schema([("result", self._kind)]), where).schema["result"]

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        # the event time gives groups a length also where no column is read
        exprs = [event_time, *(pl.col(name) for name in self.columns)]
        return {"accumulator": pl.map_groups(exprs, self._add, return_dtype=pl.Binary, returns_scalar=True)}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        exprs = [part("accumulator")]
        return {"accumulator": pl.map_groups(exprs, self._merge, return_dtype=pl.Binary, returns_scalar=True)}

    def finish(self, part: Columns) -> pl.Expr:
        return part("accumulator").map_batches(self._results, return_dtype=self._result_type)

    def _add(self, columns: Sequence[pl.Series]) -> bytes:
        def work() -> Any:
            values = [_python(column) for column in columns[1:]]
            accumulator = self._accumulator.init()
            for index in range(len(columns[0])):
                row = {name: values[i][index] for i, name in enumerate(self.columns)}
                accumulator = self._accumulator.add(accumulator, row)
            return accumulator

        return _dumps(self._guard("add", work))

    def _merge(self, columns: Sequence[pl.Series]) -> bytes:
        def work() -> Any:
            parts = columns[0].to_list()
            if not parts:  # polars asks for nothing's result to learn the type
                return self._accumulator.init()
            first, *rest = map(cloudpickle.loads, parts)
            for other in rest:
                first = self._accumulator.merge(first, other)
            return first

        return _dumps(self._guard("merge", work))

    def _results(self, column: pl.Series) -> pl.Series:
        def work() -> pl.Series:
            values = [copied(self._accumulator.result(cloudpickle.loads(data))) for data in column.to_list()]
            return pl.Series(column.name, pl.from_arrow(to_array(values, self._kind)))

        series: pl.Series = self._guard("result", work)
        return series

    def _guard(self, method: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except MidstreamError:
            raise
        except Exception as error:
            failure = user_error(self._where, f"{type(self._accumulator).__name__}.{method}", error)
            self.failure = failure
            raise failure from error


def _python(column: pl.Series) -> list[Any]:
    return to_python(column.to_arrow(compat_level=pl.CompatLevel.oldest()))


def _dumps(accumulator: Any) -> bytes:
    data: bytes = cloudpickle.dumps(accumulator)
    return data
