"""Aggregates in bounded memory. A part is bytes.

Results depend on the rows alone, not on how they are divided into batches and subtasks: a restored job emits what it would
have emitted. So quantiles come from a histogram with buckets of fixed relative width (DDSketch, Masson et al., VLDB 2019):
the sketches KLL and REQ choose values at random, and a t-digest depends on the order of its input. Distinct values are
counted by the smallest of their hashes (a theta sketch of fixed size, Dasgupta et al., ICDT 2016): the registers of
HyperLogLog are smaller, but its better estimators depend on the order of the input.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from fractions import Fraction
from math import ceil, exp, inf, log, log1p, nan
from sys import float_info
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.core.config import is_whole
from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.core.key_groups import hash_column
from midstream.engine.operators.windows.aggregates import Aggregate, Columns, Conditional, numeric_kind, with_one_zero

Floats = npt.NDArray[np.float64]
_KEY: Final = np.dtype("<i4")
_COUNT: Final = np.dtype("<i8")
_FLOAT: Final = np.dtype("<f8")
_HASH: Final = np.dtype("<u8")
_BOUNDS_BYTES: Final = 2 * _FLOAT.itemsize
_ZERO_AT: Final = 2**24
"""What is added to the number of a bucket of positive values, so that keys ascend with values: -key is of negative ones."""
_INFINITE: Final = 2**30
"""The key of infinity."""


class _Sketch(Conditional):
    """Base of aggregates whose parts are bytes that are made and merged group by group."""

    _part: str = "sketch"
    """The name of the part. State with another one is not restored."""

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        sketch = pl.map_groups([self._values()], self._sketch_of, return_dtype=pl.Binary, returns_scalar=True)
        return {self._part: sketch}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        parts = [part(self._part)]
        return {self._part: pl.map_groups(parts, self._merged, return_dtype=pl.Binary, returns_scalar=True)}

    def _sketch_of(self, columns: Sequence[pl.Series]) -> bytes:
        return self._add(columns[0].drop_nulls())

    def _merged(self, columns: Sequence[pl.Series]) -> bytes:
        parts = [part for part in columns[0].to_list() if part]  # an empty one has no values
        return parts[0] if len(parts) == 1 else self._union(parts)

    @abstractmethod
    def _values(self) -> pl.Expr: ...

    @abstractmethod
    def _add(self, values: pl.Series) -> bytes: ...

    @abstractmethod
    def _union(self, parts: Sequence[bytes]) -> bytes: ...


class Quantile(_Sketch):
    """A quantile of a numeric column as float64, to a relative error; nulls and NaN are skipped.

    The quantile of `n` values is the one at position `ceil(q · n)` in their order; the result is off by no more than
    `relative_error` of it, whatever the values. It does not depend on arrival, on how batches are cut, or on restores.
    The smallest and the largest value are exact. Null if there is no value.

    `column`: the name of the column. One that is not numeric, boolean or decimal raises SchemaError.
    `q`: from 0 (the smallest value) to 1 (the largest); 0.5 is the median.
    `relative_error`: from 0.001 to 0.5. State has 12 bytes for each range of values of this relative width that occurs: at
    0.01, positive values within a factor of 1,000,000 take 8 KB at most.
    `where`: an expression; rows for which it is not true do not count.

        >>> value = testing.check_aggregate(Quantile("ms", 0.99), [{"ms": ms} for ms in range(1, 1001)])
        >>> abs(value - 990) <= 9.9
        True
    """

    def __init__(self, column: str, q: float, *, relative_error: float = 0.01, where: pl.Expr | None = None) -> None:
        if not _is_number(q) or not 0 <= q <= 1:
            raise ConfigError(f"Quantile: q {q!r} is not a number from 0 to 1; 0.99 is the 99th percentile")
        if not _is_number(relative_error) or not 0.001 <= relative_error <= 0.5:
            raise ConfigError(f"Quantile: relative_error {relative_error!r} is not a number from 0.001 to 0.5")
        self.columns = (column,)
        self._q = Fraction(str(q))
        self._error = float(relative_error)
        self._where = where

    def _parameters(self) -> Mapping[str, object]:
        return {"relative_error": self._error}

    def bind(self, schema: pa.Schema) -> Aggregate:
        numeric_kind(schema, self.columns[0], "quantile", durations=False)
        return self

    @property
    def _log_width(self) -> float:
        return log((1 + self._error) / (1 - self._error))

    def _values(self) -> pl.Expr:
        return pl.col(self.columns[0]).cast(pl.Float64)

    def _add(self, values: pl.Series) -> bytes:
        numbers = values.to_numpy()
        numbers = numbers[~np.isnan(numbers)]
        if not len(numbers):
            return b""
        keys, counts = np.unique(self._keys(numbers), return_counts=True)
        return _histogram(numbers.min(), numbers.max(), keys, counts)

    def _keys(self, numbers: Floats) -> npt.NDArray[np.int64]:
        """Return the key of the bucket of each number."""
        sizes = np.abs(numbers)
        usual = (sizes > 0) & np.isfinite(sizes)
        keys = np.where(sizes > 0, _INFINITE, 0)
        keys[usual] = np.ceil(np.log(sizes[usual]) / self._log_width).astype(np.int64) + _ZERO_AT
        return np.where(numbers < 0, -keys, keys)

    def _union(self, parts: Sequence[bytes]) -> bytes:
        if not parts:
            return b""
        bounds, keys, counts = zip(*map(_read_histogram, parts), strict=True)
        merged, positions = np.unique(np.concatenate(keys), return_inverse=True)
        sums = np.zeros(len(merged), np.int64)
        np.add.at(sums, positions, np.concatenate(counts))
        lowest, highest = np.array(bounds).T
        return _histogram(lowest.min(), highest.max(), merged, sums)

    def finish(self, part: Columns) -> pl.Expr:
        return part(self._part).map_batches(self._results, return_dtype=pl.Float64)

    def _results(self, column: pl.Series) -> pl.Series:
        return pl.Series(column.name, [self._result(each) if each else None for each in column.to_list()], pl.Float64)

    def _result(self, histogram: bytes) -> float:
        (lowest, highest), keys, counts = _read_histogram(histogram)
        upto = np.cumsum(counts)
        rows = int(upto[-1])
        position = ceil(self._q * rows)
        if position <= 1 or position == rows:
            return lowest + 0.0 if position <= 1 else highest + 0.0  # 0.0, not -0.0
        key = int(keys[np.searchsorted(upto, position)])
        return min(max(self._middle(key), lowest), highest) + 0.0

    def _middle(self, key: int) -> float:
        """Return the value from which no value of a bucket is further than the relative error."""
        if abs(key) in (0, _INFINITE):
            return inf * key if key else 0.0
        power = (abs(key) - _ZERO_AT) * self._log_width + log1p(-self._error)
        size = exp(power) if power < log(float_info.max) else float_info.max
        return size if key > 0 else -size


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _histogram(lowest: float, highest: float, keys: npt.NDArray[Any], counts: npt.NDArray[Any]) -> bytes:
    parts = (np.array([lowest, highest], _FLOAT), keys.astype(_KEY), counts.astype(_COUNT))
    return b"".join(part.tobytes() for part in parts)


def _read_histogram(data: bytes) -> tuple[tuple[float, float], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    buckets = (len(data) - _BOUNDS_BYTES) // (_KEY.itemsize + _COUNT.itemsize)
    lowest, highest = np.frombuffer(data, _FLOAT, 2).tolist()
    keys = np.frombuffer(data, _KEY, buckets, _BOUNDS_BYTES)
    return (lowest, highest), keys, np.frombuffer(data, _COUNT, buckets, _BOUNDS_BYTES + keys.nbytes)


class ApproxCountDistinct(_Sketch):
    """The approximate number of distinct values of a column as int64, in bounded state; nulls do not count.

    All NaN are one value, and -0.0 is 0.0. It is exact up to `2 ** precision` values; above, the standard error is
    `1 / sqrt(2 ** precision - 1)`, 1.6 % at 12, and two of three results are within it, 99.7 % within three times as much.
    The result does not depend on arrival, on how batches are cut, or on restores.

    `column`: the name of the column; lists and structs raise SchemaError.
    `precision`: from 5 to 20. A key or window has 8 bytes of state for each of up to `2 ** precision` values.
    `where`: an expression; rows for which it is not true do not count.

    Raises ConfigError for another precision.

        >>> testing.check_aggregate(ApproxCountDistinct("x"), [{"x": 3}, {"x": None}, {"x": 5}, {"x": 3}])
        2
    """

    def __init__(self, column: str, *, precision: int = 12, where: pl.Expr | None = None) -> None:
        if not is_whole(precision, 5) or precision > 20:
            raise ConfigError(f"ApproxCountDistinct: precision {precision!r} is not a whole number from 5 to 20")
        self.columns = (column,)
        self._precision = precision
        self._where = where
        self._kind: pa.DataType = pa.int64()

    def _parameters(self) -> Mapping[str, object]:
        return {"precision": self._precision}

    def bind(self, schema: pa.Schema) -> Aggregate:
        kind = schema.field(self.columns[0]).type
        if pa.types.is_nested(kind) or pa.types.is_null(kind):
            raise SchemaError(
                f"distinct values of column {self.columns[0]!r}, which is {kind}; count one of its fields, or its text"
            )
        bound = copy(self)
        bound._kind = kind
        # a value has another hash in a column of another type, except among integers, and among floats
        is_integer, is_float = pa.types.is_integer(kind), pa.types.is_floating(kind)
        bound._part = f"hashes of {'integers' if is_integer else 'floats' if is_float else kind}"
        return bound

    def _values(self) -> pl.Expr:
        column, kind = pl.col(self.columns[0]), self._kind
        if pa.types.is_floating(kind):
            return with_one_zero(column.cast(pl.Float64)).fill_nan(nan)
        return column.cast(pl.String) if pa.types.is_decimal(kind) else column

    def _add(self, values: pl.Series) -> bytes:
        values = values.unique()
        if values.dtype == pl.Float64:
            values = pl.Series(values.to_numpy().view(np.int64))
        return self._smallest(hash_column(values.to_arrow(compat_level=pl.CompatLevel.oldest())))

    def _union(self, parts: Sequence[bytes]) -> bytes:
        return self._smallest(np.frombuffer(b"".join(parts), _HASH))

    def _smallest(self, hashes: npt.NDArray[np.uint64]) -> bytes:
        """One more than are counted exactly: it says how densely the hashes lie."""
        return np.unique(hashes)[: 2**self._precision + 1].astype(_HASH).tobytes()

    def finish(self, part: Columns) -> pl.Expr:
        return part(self._part).map_batches(self._results, return_dtype=pl.Int64)

    def _results(self, column: pl.Series) -> pl.Series:
        return pl.Series(column.name, [self._estimate(part) for part in column.to_list()], pl.Int64)

    def _estimate(self, part: bytes) -> int:
        exact = 2**self._precision
        hashes = np.frombuffer(part, _HASH)
        return len(hashes) if len(hashes) <= exact else round(Fraction(exact << 64, int(hashes[-1])))
