"""Decomposable aggregates: what windows compute.

An aggregate is three steps, so that rows can be reduced batch by batch and the parts put together later: `partial`
reduces rows to a few columns, `merge` reduces such parts to one, `finish` computes the value from it. All three are
polars expressions. An aggregate that only Python code can express is an `Accumulator`.

    window.aggregate(n=Count(), total=Sum("value"), longest=Max("delay"))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, Literal, TypeAlias, TypeVar, get_args

import polars as pl
import pyarrow as pa

from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.core.schemas import TypeLike
from midstream.engine.operators.windows.dense_groupby import DenseGroupBy

Columns: TypeAlias = Callable[[str], pl.Expr]
"""Returns the expression of a partial column, given its name in `partial`."""

A = TypeVar("A")


class Aggregate(ABC):
    """An aggregate of your own, as three steps that are polars expressions; instances must pickle.

    Rows are reduced batch by batch, and the parts put together later: `partial` reduces rows to a few columns, `merge`
    reduces such parts to one, `finish` computes the value from it. Within `partial`, rows are in order of arrival;
    within `merge`, parts are in the order in which they were made. What only Python code can express is an Accumulator.
    `testing.check_aggregate` checks it.

        >>> class Spread(Aggregate):
        ...     def __init__(self, column):
        ...         self.columns = (column,)
        ...     def partial(self, event_time):
        ...         column = pl.col(self.columns[0])
        ...         return {"low": column.min(), "high": column.max()}
        ...     def merge(self, part):
        ...         return {"low": part("low").min(), "high": part("high").max()}
        ...     def finish(self, part):
        ...         return part("high") - part("low")
        >>> testing.check_aggregate(Spread("price"), [{"price": 3}, {"price": 9}, {"price": 5}])
        6
    """

    columns: tuple[str, ...] = ()
    """The input columns that the aggregate reads; a missing one is reported before the job runs."""

    @property
    def _depends_on_arrival(self) -> bool:
        """Whether the result depends on which of two parts of different event times arrived first; a user's may."""
        return True

    def bind(self, schema: pa.Schema) -> Aggregate:
        """Return the aggregate for the rows of one stream; by default itself.

        `schema`: the columns of the stream, among them all of `columns`.

        Raises SchemaError for a column of a type that the aggregate does not support.

            >>> bound = Sum("price").bind(pa.schema({"price": pa.int32()}))
        """
        return self

    @abstractmethod
    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        """Return named columns, each an expression that reduces a group of input rows to one value.

        `event_time`: the expression of the stream's event-time column.

            >>> list(Mean("price").partial(pl.col("at")))
            ['sum', 'n']
        """

    @abstractmethod
    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        """Return, for each name in `partial`, an expression that reduces a group of parts to one of the same type.

        `part`: returns the expression of a column of `partial`, given its name.

            >>> list(Mean("price").merge(pl.col))
            ['sum', 'n']
        """

    @abstractmethod
    def finish(self, part: Columns) -> pl.Expr:
        """Return the expression of the result, which computes each merged part on its own.

        `part`: returns the expression of a column of `partial`, given its name.

            >>> pl.select(Count().finish(lambda name: pl.lit(7).alias(name))).item()
            7
        """

    def overflow(self, part: Columns) -> pl.Expr | None:
        """Return a boolean expression: whether the result of a merged part does not fit its type, which fails the job.

        `part`: returns the expression of a column of `partial`, given its name.

        By default returns None: the result always fits.

            >>> Count().overflow(pl.col) is None
            True
        """
        return None


class Conditional(Aggregate):
    """An aggregate of some of the rows: of those for which the expression `_where` is true, if there is one."""

    _where: pl.Expr | None = None

    @property
    def _depends_on_arrival(self) -> bool:
        return False

    def _parameters(self) -> Mapping[str, object]:
        """Return what the meaning of parts depends on, apart from the class and the columns, by name."""
        return {}

    def _of_columns(self, columns: Sequence[str]) -> Aggregate:
        """Return the same aggregate of other columns."""
        other = copy(self)
        other.columns = tuple(columns)
        return other


class _Folded(Conditional):
    """An aggregate whose parts are folds, so that polars need not compute them."""

    @abstractmethod
    def _folds(self) -> Mapping[str, DenseGroupBy]: ...

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {name: fold.expression for name, fold in self._folds().items()}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {name: fold.of_parts(part(name).meta.output_name()).expression for name, fold in self._folds().items()}


@dataclass(frozen=True, slots=True)
class Filtered:
    """An aggregate that counts some of the rows: it reads the columns `derived`, which are null in all others."""

    aggregate: Aggregate
    where: pl.Expr
    derived: Mapping[str, pl.Expr]


def filtered(aggregate: Aggregate, prefix: str) -> Filtered | None:
    """Return how an aggregate with `where` is computed; None without. The names of derived columns begin with `prefix`."""
    if not isinstance(aggregate, Conditional) or aggregate._where is None:
        return None
    where = aggregate._where
    if not isinstance(where, pl.Expr):
        raise SchemaError(f"where={where!r} is not a polars expression; write for example where=pl.col('x') > 0")
    read = [pl.col(name) for name in aggregate.columns] or [pl.lit(True)]  # Count() of all rows
    derived = {f"{prefix}{number}": pl.when(where).then(each) for number, each in enumerate(read)}
    return Filtered(aggregate._of_columns(list(derived)), where, derived)


def description_of(aggregate: Aggregate | Accumulator[Any]) -> str:
    """Return what the parts of an aggregate are of. Those of another description mean something else."""
    if not isinstance(aggregate, Conditional):
        return f"one of {', '.join(aggregate.columns) or 'no column'}"
    parameters = [f"{name}={value!r}" for name, value in aggregate._parameters().items()]
    return f"{type(aggregate).__name__}({', '.join([*aggregate.columns, *parameters])})"


def folds_of(aggregate: Aggregate) -> Mapping[str, DenseGroupBy]:
    """Return the folds that an aggregate consists of; none if it has expressions of its own."""
    if not isinstance(aggregate, _Folded):
        return {}
    own = type(aggregate)
    return aggregate._folds() if own.partial is _Folded.partial and own.merge is _Folded.merge else {}


class Count(_Folded):
    """The number of rows, or of rows in which a column is not null, as int64.

    `column`: the name of the column; without one all rows are counted.

    `where`: a polars expression of the row; rows for which it is not true do not count. All aggregates have it.

        >>> testing.check_aggregate(Count("x"), [{"x": 3}, {"x": None}, {"x": 5}])
        2
        >>> testing.check_aggregate(Count(where=pl.col("x") > 3), [{"x": 3}, {"x": None}, {"x": 5}])
        1
    """

    def __init__(self, column: str | None = None, *, where: pl.Expr | None = None) -> None:
        self.columns = () if column is None else (column,)
        self._where = where

    def _folds(self) -> Mapping[str, DenseGroupBy]:
        return {"n": DenseGroupBy("count", self.columns[0] if self.columns else None)}

    def finish(self, part: Columns) -> pl.Expr:
        return part("n")


class Sum(_Folded):
    """The sum of a numeric, boolean, decimal or duration column; nulls are ignored, and the sum of no values is 0.

    Integers and booleans give int64 (uint64 for unsigned ones), floats float64, decimals decimals of 38 digits. A sum
    that does not fit fails the job instead of wrapping around.

    `column`: the name of the column. A column of another type raises SchemaError when the window is declared.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(Sum("x"), [{"x": 3}, {"x": None}, {"x": 5}])
        8
    """

    def __init__(self, column: str, *, where: pl.Expr | None = None) -> None:
        self.columns = (column,)
        self._where = where
        self._widened: pl.DataType | None = None
        self._wraps_at: float | None = None

    def bind(self, schema: pa.Schema) -> Aggregate:
        kind = numeric_kind(schema, self.columns[0], "sum", durations=True)
        bound = copy(self)
        if pa.types.is_floating(kind):
            bound._widened = pl.Float64()
        elif pa.types.is_unsigned_integer(kind):
            bound._widened, bound._wraps_at = pl.UInt64(), 2.0**64
        elif pa.types.is_decimal(kind):
            if kind.scale < 0:
                raise SchemaError(f"column {self.columns[0]!r} is {kind}, which polars cannot hold; cast it first")
            if type(self) is not Sum:
                raise SchemaError(
                    f"column {self.columns[0]!r} is {kind}, which a subclass of Sum cannot add; cast it first"
                )
            return _DecimalSum(self.columns[0], kind.scale)
        elif pa.types.is_duration(kind):
            bound._wraps_at = 2.0**64
        else:
            bound._widened, bound._wraps_at = pl.Int64(), 2.0**64
        return bound

    def _folds(self) -> Mapping[str, DenseGroupBy]:
        total = DenseGroupBy("sum", self.columns[0], self._widened)
        if self._wraps_at is None:
            return {"sum": total}
        # An integer sum that wraps around is right again once later rows bring it back into range. The float sum
        # next to it deviates only by rounding, so it shows at the end whether the integer sum is still wrapped.
        return {"sum": total, "rough": DenseGroupBy("sum", self.columns[0], pl.Float64(), is_estimate=True)}

    def finish(self, part: Columns) -> pl.Expr:
        return with_one_zero(part("sum")) if self._widened == pl.Float64() else part("sum")

    def overflow(self, part: Columns) -> pl.Expr | None:
        if self._wraps_at is None:
            return None
        return (part("sum").cast(pl.Float64) - part("rough")).abs() > self._wraps_at / 2


class _DecimalSum(Aggregate):
    """The exact sum of a column with `scale` decimal places, however large the intermediate sums are.

    A decimal is an integer of 38 digits, and polars fails in several ways when an intermediate sum has more. So the
    upper and the lower half of the digits are summed separately; each has room for 10^19 rows.
    """

    _depends_on_arrival = False

    def __init__(self, column: str, scale: int) -> None:
        self.columns = (column,)
        self._scale = scale
        # named by the scale: state with digits of another one is not restored
        self._high, self._low = f"high at scale {scale}", f"low at scale {scale}"

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        whole = pl.col(self.columns[0]).cast(pl.Decimal(_DIGITS, self._scale)).to_physical()
        halves = {self._high: whole // _HALF, self._low: whole % _HALF}
        return {name: half.cast(_HALVES).sum() for name, half in halves.items()}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {name: part(name).sum() for name in (self._high, self._low)}

    def finish(self, part: Columns) -> pl.Expr:
        high, low = self._carried(part)
        kind = pl.Decimal(_DIGITS, self._scale)
        return (high * _HALF + low).cast(_HALVES).map_batches(self._with_point, return_dtype=kind)

    def _with_point(self, sums: pl.Series) -> pl.Series:
        """Return the same digits as decimals of the right scale."""
        digits = sums.to_arrow(compat_level=pl.CompatLevel.oldest())
        return pl.Series(sums.name, digits.view(pa.decimal128(_DIGITS, self._scale)))

    def overflow(self, part: Columns) -> pl.Expr | None:
        high, low = self._carried(part)
        return (high >= _HALF) | (high < -_HALF) | ((high == -_HALF) & (low == 0))

    def _carried(self, part: Columns) -> tuple[pl.Expr, pl.Expr]:
        """Return both halves as integers; the lower one is not negative and has at most 19 digits."""
        high, low = part(self._high).to_physical(), part(self._low).to_physical()
        return high + low // _HALF, low % _HALF


_DIGITS: Final = 38
"""The number of digits that a decimal has."""
_HALVES: Final = pl.Decimal(_DIGITS, 0)
_HALF: Final = pl.lit(10 ** (_DIGITS // 2), pl.Int128)


class _OfColumn(Conditional):
    """Base of aggregates that read one column."""

    def __init__(self, column: str, *, where: pl.Expr | None = None) -> None:
        self.columns = (column,)
        self._where = where


class _Extreme(_OfColumn, _Folded):
    """Base of the smallest and the largest value."""

    _kind: ClassVar[Literal["min", "max"]]

    def __init__(self, column: str, *, where: pl.Expr | None = None) -> None:
        super().__init__(column, where=where)
        self._has_floats = False

    def bind(self, schema: pa.Schema) -> Aggregate:
        _check_ordered(schema, self.columns[0], self._kind)
        kind = schema.field(self.columns[0]).type
        if not pa.types.is_floating(kind):
            return self
        bound = copy(self)
        bound._has_floats = True
        return bound

    def _folds(self) -> Mapping[str, DenseGroupBy]:
        return {self._kind: DenseGroupBy(self._kind, self.columns[0])}

    def finish(self, part: Columns) -> pl.Expr:
        return with_one_zero(part(self._kind)) if self._has_floats else part(self._kind)


class Min(_Extreme):
    """The smallest value of a column; null if there is none.

    Nulls are ignored, NaN counts only if there is nothing else, and -0.0 is 0.0.

    `column`: the name of a column whose values have an order; lists and structs raise SchemaError.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(Min("x"), [{"x": 3}, {"x": None}, {"x": 5}])
        3
    """

    _kind = "min"


class Max(_Extreme):
    """The largest value of a column; null if there is none.

    Nulls are ignored, NaN counts only if there is nothing else, and -0.0 is 0.0.

    `column`: the name of a column whose values have an order; lists and structs raise SchemaError.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(Max("x"), [{"x": 3}, {"x": None}, {"x": 5}])
        5
    """

    _kind = "max"


class Mean(_OfColumn, _Folded):
    """The mean of a numeric, boolean or decimal column as float64, ignoring nulls; null if there is no value.

    `column`: the name of the column. A column of another type raises SchemaError when the window is declared.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(Mean("x"), [{"x": 3}, {"x": None}, {"x": 5}])
        4.0
    """

    def bind(self, schema: pa.Schema) -> Aggregate:
        numeric_kind(schema, self.columns[0], "mean", durations=False)
        return self

    def _folds(self) -> Mapping[str, DenseGroupBy]:
        return {"sum": DenseGroupBy("sum", self.columns[0], pl.Float64()), "n": DenseGroupBy("count", self.columns[0])}

    def finish(self, part: Columns) -> pl.Expr:
        mean = with_one_zero(part("sum") / part("n"))
        return pl.when(part("n") > 0).then(mean)


@dataclass(frozen=True, slots=True)
class Pick:
    """How an aggregate chooses the row whose value it is.

    `of_row`: the part of each row alone. `by`: the column of a part by which rows are chosen; one in which it is null is
    not. `takes_largest`: the row with the largest `by`, or the smallest. `takes_last`: the last of equals, or the first.
    """

    of_row: Mapping[str, pl.Expr]
    by: str
    takes_largest: bool
    takes_last: bool


class _Picked(Conditional):
    """Base of the aggregates whose part is the value of one row, and what the row was chosen by."""

    @abstractmethod
    def _pick(self, event_time: pl.Expr) -> Pick: ...

    def finish(self, part: Columns) -> pl.Expr:
        return part("value")


def pick_of(aggregate: Aggregate, event_time: pl.Expr) -> Pick | None:
    """Return how an aggregate chooses its row; None if it does not, or is a user's."""
    if not isinstance(aggregate, _Picked) or not type(aggregate).__module__.startswith("midstream.engine.operators."):
        return None
    return aggregate._pick(event_time)


Order: TypeAlias = Literal["time", "arrival"]


class _OfOneRow(_OfColumn, _Picked):
    """Base of the first and the last value."""

    def __init__(self, column: str, *, order: Order = "time", where: pl.Expr | None = None) -> None:
        super().__init__(column, where=where)
        if order not in get_args(Order):
            raise ConfigError(
                f"{type(self).__name__}: order={order!r} is none of {', '.join(map(repr, get_args(Order)))}"
            )
        self.order = order

    @property
    def _depends_on_arrival(self) -> bool:
        return self.order == "arrival"

    def _parameters(self) -> Mapping[str, object]:
        return {"order": self.order}

    def _time(self, event_time: pl.Expr) -> pl.Expr:
        """Return the event time, or one that is the same for all rows that count."""
        return event_time if self.order == "time" else pl.when(event_time.is_not_null()).then(pl.lit(0, pl.Int64))


class First(_OfOneRow):
    """The value, possibly null, of the row with the smallest event time; among equals, of the one that arrived first.

    `column`: the name of the column, of any type.
    `order`: "arrival" for the row that arrived first, whatever its event time; not in sliding windows. Rows of a key that come from several
    subtasks or splits arrive in no particular order, so the value may be another after a restart.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(First("x"), [{"x": 3}, {"x": 9}, {"x": 5}])
        3
    """

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return _of_first(pl.col(self.columns[0]), self._time(event_time))

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return _of_first(part("value"), part("at"))

    def _pick(self, event_time: pl.Expr) -> Pick:
        of_row = {"value": pl.col(self.columns[0]), "at": self._time(event_time)}
        return Pick(of_row, "at", takes_largest=False, takes_last=False)


class Last(_OfOneRow):
    """The value, possibly null, of the row with the largest event time; among equals, of the one that arrived last.

    `column`: the name of the column, of any type.
    `order`: "arrival" for the row that arrived last, whatever its event time, as for `First`.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(Last("x"), [{"x": 3}, {"x": 9}, {"x": 5}])
        5
    """

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return _of_last(pl.col(self.columns[0]), self._time(event_time))

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return _of_last(part("value"), part("at"))

    def _pick(self, event_time: pl.Expr) -> Pick:
        of_row = {"value": pl.col(self.columns[0]), "at": self._time(event_time)}
        return Pick(of_row, "at", takes_largest=True, takes_last=True)


class _ExtremeRow(_Picked):
    """Base of the value of the row with the smallest or the largest value of another column."""

    _takes_largest: ClassVar[bool]
    _depends_on_arrival = True  # the first of equals

    def __init__(self, value: str, by: str, *, where: pl.Expr | None = None) -> None:
        self.columns = (value, by)
        self._where = where
        self._has_floats = False

    def bind(self, schema: pa.Schema) -> Aggregate:
        _check_ordered(schema, self.columns[1], "extreme")
        bound = copy(self)
        bound._has_floats = pa.types.is_floating(schema.field(self.columns[1]).type)
        return bound

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return self._extreme(*(pl.col(name) for name in self.columns))

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return self._extreme(part("value"), part("by"))

    def _extreme(self, value: pl.Expr, by: pl.Expr) -> Mapping[str, pl.Expr]:
        by = self._comparable(by)
        best = by.max() if self._takes_largest else by.min()
        return {"value": value.filter(by == best).first(), "by": best}

    def _comparable(self, by: pl.Expr) -> pl.Expr:
        return by.fill_nan(None) if self._has_floats else by

    def _pick(self, event_time: pl.Expr) -> Pick:
        value, by = (pl.col(name) for name in self.columns)
        by = self._comparable(by)
        of_row = {"value": pl.when(by.is_not_null()).then(value), "by": by}
        return Pick(of_row, "by", takes_largest=self._takes_largest, takes_last=False)


class ArgMin(_ExtremeRow):
    """The value, possibly null, of the row with the smallest value of another column; of equals, the first that arrived.

    In sliding windows and with `every=`, it is the first that arrived of those in the earliest interval. Rows in which
    the other column is null or NaN do not count; null if there are no others.

    `value`: the name of the column of the result, of any type.
    `by`: the name of a column whose values have an order; lists and structs raise SchemaError.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(ArgMin("shop", by="price"), [{"shop": s, "price": p} for s, p in [("a", 3), ("b", 2), ("c", 5)]])
        'b'
    """

    _takes_largest = False


class ArgMax(_ExtremeRow):
    """The value, possibly null, of the row with the largest value of another column; of equals, the first that arrived.

    In sliding windows and with `every=`, it is the first that arrived of those in the earliest interval. Rows in which
    the other column is null or NaN do not count; null if there are no others.

    `value`: the name of the column of the result, of any type.
    `by`: the name of a column whose values have an order; lists and structs raise SchemaError.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(ArgMax("shop", by="price"), [{"shop": s, "price": p} for s, p in [("a", 3), ("b", 2), ("c", 5)]])
        'c'
    """

    _takes_largest = True


class Accumulator(ABC, Generic[A]):
    """An aggregate in plain Python, for what expressions cannot compute; it is 100 to 200 times slower.

    The accumulator is a plain value or an object of a class of your own, as in untyped state. `add` and `merge` may
    change and return their first argument. `columns`: the input columns that are read; `type`: the type of the
    result.

        >>> class Words(Accumulator):
        ...     columns = ("text",)
        ...     type = int
        ...     def init(self):
        ...         return set()
        ...     def add(self, accumulator, row):
        ...         return accumulator | set(row["text"].split())
        ...     def merge(self, first, second):
        ...         return first | second
        ...     def result(self, accumulator):
        ...         return len(accumulator)
        >>> testing.check_aggregate(Words(), [{"text": "to be"}, {"text": "or not"}, {"text": "to be"}])
        4
    """

    columns: tuple[str, ...] = ()
    type: TypeLike

    @abstractmethod
    def init(self) -> A:
        """Return a new, empty accumulator.

        For example:

            def init(self):
                return set()
        """

    @abstractmethod
    def add(self, accumulator: A, row: dict[str, object]) -> A:
        """Add a row.

        `accumulator`: what `init`, `add` or `merge` has returned.
        `row`: a dict of exactly `columns`.

        Returns the accumulator with the row; it may be the same object.

            def add(self, accumulator, row):
                return accumulator | set(row["text"].split())
        """

    @abstractmethod
    def merge(self, first: A, second: A) -> A:
        """Combine two accumulators.

        `first`, `second`: `first` has the earlier rows.

        Returns an accumulator with the rows of both; it may be `first`.

            def merge(self, first, second):
                return first | second
        """

    @abstractmethod
    def result(self, accumulator: A) -> object:
        """Compute the value of the window.

        `accumulator`: the rows of one key and window.

        Returns a value of `type`, or None for null.

            def result(self, accumulator):
                return len(accumulator)
        """
        ...


AnyAggregate: TypeAlias = "Aggregate | Accumulator[Any]"


def _of_first(value: pl.Expr, at: pl.Expr) -> Mapping[str, pl.Expr]:
    return {"value": value.get(_unmarked(at).arg_min()), "at": at.min()}


def _of_last(value: pl.Expr, at: pl.Expr) -> Mapping[str, pl.Expr]:
    # arg_max returns the first of equals, so search from the end
    return {"value": value.get(at.len() - 1 - _unmarked(at).reverse().arg_max()), "at": at.max()}


def _unmarked(at: pl.Expr) -> pl.Expr:
    """Return the column as one that polars does not consider sorted.

    polars considers concatenated frames of one row to be sorted in descending order. For a column that it considers
    sorted, arg_min returns the last of equals, and reverse() within groups changes the order but not the mark.
    """
    return at.to_physical().xor(0)


def numeric_kind(schema: pa.Schema, column: str, what: str, *, durations: bool) -> pa.DataType:
    kind: pa.DataType = schema.field(column).type
    numeric = (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )
    if not numeric and not (durations and pa.types.is_duration(kind)):
        raise SchemaError(f"{what} of column {column!r}, which is {kind}: only numbers have a {what}; cast it first")
    return kind


def with_one_zero(floats: pl.Expr) -> pl.Expr:
    """Replace -0.0 by 0.0: they are equal, so which of them a part has depends on where batches are cut."""
    return pl.when(floats == 0).then(floats.abs()).otherwise(floats)


def _check_ordered(schema: pa.Schema, column: str, what: str) -> None:
    kind = schema.field(column).type
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        raise SchemaError(f"{what} of column {column!r}, which is {kind}: such values have no order")
