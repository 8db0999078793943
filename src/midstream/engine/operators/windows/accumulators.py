"""Accumulators as aggregates: their parts are pickled, and Python functions make and merge them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import polars as pl
import pyarrow as pa

from midstream.engine.core.errors import MidstreamError, SchemaError
from midstream.engine.core.python_values import converter_of, to_array, to_python
from midstream.engine.core.schemas import as_type
from midstream.engine.operators.expressions import empty_frame
from midstream.engine.operators.row_conversion import USER_ERRORS, copied, user_error
from midstream.engine.operators.windows.aggregates import Accumulator, Aggregate, Columns
from midstream.engine.state.safe_pickle import OwnCode, Pickles

T = TypeVar("T")


class AccumulatorAggregate(Aggregate):
    def __init__(self, accumulator: Accumulator[Any], where: str) -> None:
        if getattr(accumulator, "type", None) is None:
            raise SchemaError(f"{where}: {type(accumulator).__name__} has no type; write for example type = int")
        self.columns = tuple(accumulator.columns)
        self._accumulator = accumulator
        self._where = where
        self._what = f"{where}: an accumulator of {type(accumulator).__name__}"
        self.pickles = Pickles(OwnCode())
        self.failure: MidstreamError | None = None
        """The exception that ended the run, usually from a user's function: an exception that passes through polars
        loses its traceback.
        """
        self._kind = as_type(accumulator.type, f"{where}: {type(accumulator).__name__}.type")
        try:
            converter_of(self._kind)
        except SchemaError as error:
            raise SchemaError(f"{where}: the type of {type(accumulator).__name__}: {error}") from None
        self._result_type = empty_frame(pa.schema([("result", self._kind)]), where).schema["result"]

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        # The event time gives each group a length even if the accumulator reads no column.
        exprs = [event_time, *(pl.col(name) for name in self.columns)]
        return {"accumulator": pl.map_groups(exprs, self._add, return_dtype=pl.Binary, returns_scalar=True)}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        exprs = [part("accumulator")]
        return {"accumulator": pl.map_groups(exprs, self._merge, return_dtype=pl.Binary, returns_scalar=True)}

    def finish(self, part: Columns) -> pl.Expr:
        return part("accumulator").map_batches(self._results, return_dtype=self._result_type)

    def scan(
        self, before: Sequence[bytes | None], columns: Mapping[str, pl.Series], lengths: Sequence[int]
    ) -> list[bytes]:
        """Add the rows of several keys one by one, and return the accumulator after each.

        `before`: the accumulator of each key, None for a new one. `columns`: the rows, key after key, `lengths` of each.
        """

        def work() -> list[bytes]:
            rows = zip(*(_python(columns[name]) for name in self.columns), strict=True) if self.columns else None
            found = []
            for begun, length in zip(before, lengths, strict=True):
                accumulator = self._accumulator.init() if begun is None else self._read(begun)
                for _ in range(length):
                    row = {} if rows is None else dict(zip(self.columns, next(rows), strict=True))
                    accumulator = self._accumulator.add(accumulator, row)
                    found.append(self._written(accumulator))
            return found

        return self._guard("add", work)

    def _add(self, columns: Sequence[pl.Series]) -> bytes:
        def work() -> bytes:
            values = [_python(column) for column in columns[1:]]
            accumulator = self._accumulator.init()
            for index in range(len(columns[0])):
                row = {name: values[i][index] for i, name in enumerate(self.columns)}
                accumulator = self._accumulator.add(accumulator, row)
            return self._written(accumulator)

        return self._guard("add", work)

    def _merge(self, columns: Sequence[pl.Series]) -> bytes:
        def work() -> bytes:
            parts = columns[0].to_list()
            if not parts:  # polars calls this without parts to learn the type
                return b""
            first, *rest = map(self._read, parts)
            for other in rest:
                first = self._accumulator.merge(first, other)
            return self._written(first)

        return self._guard("merge", work)

    def _results(self, column: pl.Series) -> pl.Series:
        def work() -> pl.Series:
            values = [copied(self._accumulator.result(self._read(data))) for data in column.to_list()]
            return pl.Series(column.name, pl.from_arrow(to_array(values, self._kind)))

        return self._guard("result", work)

    def _written(self, accumulator: Any) -> bytes:
        return self.pickles.dumps(accumulator, self._what)

    def _read(self, data: bytes) -> Any:
        return self.pickles.loads(data, self._what)

    def _guard(self, method: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except MidstreamError as error:
            self.failure = error
            raise
        except USER_ERRORS as error:
            failure = user_error(self._where, f"{type(self._accumulator).__name__}.{method}", error)
            self.failure = failure
            raise failure from error


def _python(column: pl.Series) -> list[Any]:
    return to_python(column.to_arrow(compat_level=pl.CompatLevel.oldest()))
