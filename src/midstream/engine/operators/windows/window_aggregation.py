"""Aggregates bound to a stream: they reduce rows to parts, merge parts, and compute results from parts, in columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import canonical_schema, frame_of
from midstream.engine.core.errors import ConfigError, JobError, MidstreamError, SchemaError
from midstream.engine.operators.base import OperatorContext
from midstream.engine.operators.elementwise import check_of_many_rows, check_row_by_row
from midstream.engine.operators.event_time_column import EventTime, Int64s, TimeColumn
from midstream.engine.operators.expressions import (
    EXPRESSION_ERRORS,
    Evaluation,
    computed_schema,
    empty_frame,
    infer_schema,
    is_plain_column,
    twice,
)
from midstream.engine.operators.row_conversion import require_columns, require_keys, user_error
from midstream.engine.operators.windows.accumulators import AccumulatorAggregate
from midstream.engine.operators.windows.aggregates import (
    Accumulator,
    Aggregate,
    AnyAggregate,
    Columns,
    description_of,
    filtered,
    folds_of,
    pick_of,
)
from midstream.engine.operators.windows.dense_groupby import NO_FOLDS, DenseGroupBy, fold
from midstream.engine.operators.windows.prefix_scan import Prefixes, Scanned, Segments, scan
from midstream.engine.operators.windows.window_specs import END, START, WINDOW_END, WINDOW_START
from midstream.engine.state.safe_pickle import OwnCode, Pickles

T = TypeVar("T")

ALL: Final = "__all"
_NO_TIME: Final = "__no_time"
"""Stands for the event time where there is none."""
_ROW: Final = "__row"
_COPY: Final = "__copy"
_NOT_SORTED: Final = "__not_sorted"
"""Stands for the key where there are no key columns."""


@dataclass(slots=True)
class _RowParts:
    """How the columns of a part are made of one row, by their names; and how parts are merged."""

    folded: set[str] = field(default_factory=set)
    """The columns that are folds."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns of the row that are columns of its part."""
    computed: dict[str, pl.Expr] = field(default_factory=dict)
    reduced: list[pl.Expr] = field(default_factory=list)
    """Columns of aggregates that only reduce groups of rows."""
    merges: dict[str, list[pl.Expr]] = field(default_factory=dict)
    """The expressions that merge parts, by output."""


class WindowAggregation:
    """Computes `aggregates` by `keys` over rows of `schema`. Instances pickle.

    A part is a frame with the columns `by`, then the parts of all aggregates, named `output:part`. `schema` is that of
    the results: keys, `bounds` (columns of the event time's type), and a column per aggregate. Without event time, rows
    are of one time: their order of arrival counts. Raises SchemaError or ConfigError for arguments that do not fit together.
    """

    def __init__(
        self,
        name: str,
        keys: Sequence[str],
        event_time: str | TimeColumn | None,
        aggregates: Mapping[str, AnyAggregate],
        schema: pa.Schema,
        bounds: Sequence[str] = (WINDOW_START, WINDOW_END),
    ) -> None:
        self._arguments = (name, tuple(keys), event_time, dict(aggregates), schema, tuple(bounds))
        self.where = f"operator {name!r}"
        self.input_schema = canonical_schema(schema)
        self.keys = tuple(keys)
        self.by = self.keys or (ALL,)
        self.bounds = tuple(bounds)
        self._time = None if event_time is None else EventTime(event_time, self.input_schema, self.where)
        require_keys(self.input_schema, self.keys, self.where)
        self._derived: list[pl.Expr] = []
        """Columns that aggregates read and the input does not have."""
        self._zeros = ({} if self._time else {_NO_TIME: pl.Int64}) | ({} if self.keys else {ALL: pl.Int8})
        """Further such columns, of zeros."""
        self._wheres: dict[str, pl.Expr] = {}
        """Which rows count, by output."""
        self._aggregates = {output: self._bind(output, aggregate) for output, aggregate in aggregates.items()}
        self.settings: Mapping[str, str] = {
            f"aggregate {output!r}": description_of(aggregate) for output, aggregate in aggregates.items()
        }
        """Settings on which the parts depend in addition to their columns."""
        self._check_outputs()
        self._partial: list[pl.Expr] = []
        self._merge: list[pl.Expr] = []
        self._finish: list[pl.Expr] = []
        self._parts_of: dict[str, list[str]] = {}
        """The columns of a part that belong to each output."""
        self._overflow: list[tuple[str, pl.Expr]] = []
        self._folds: dict[str, DenseGroupBy] = {}
        """All columns of a part if they are all folds; otherwise some of them."""
        for output, aggregate in self._aggregates.items():
            self._compile(output, aggregate)
        needed = {root for expr in (*self._partial, *self._derived) for root in expr.meta.root_names()} | {*self.keys}
        needed |= set() if self._time is None else {self._time.column}
        self._row_evaluation = Evaluation(self._derived)
        users = [output for output, aggregate in self._aggregates.items() if not _is_own(aggregate)]
        of_users = [expr for output in users for expr in self._of_output(output, (*self._partial, *self._merge))]
        self._group_evaluation = Evaluation(of_users)
        self._finish_evaluation = Evaluation([expr for expr in self._finish if expr.meta.output_name() in users])
        self.columns = [name for name in self.input_schema.names if name in needed]
        """The input columns that are needed at all."""
        self._check_inputs()
        self.part_schema, self.schema = self._schemas()
        self._merges_by_polars = any(
            each.kind == "sum" and not each.is_estimate and pa.types.is_floating(self.part_schema.field(name).type)
            for name, each in self._folds.items()
        )
        """Whether parts are never folded, since the last digits of a sum would depend on which keys are stored together."""

    def __reduce__(self) -> tuple[type[WindowAggregation], tuple[object, ...]]:
        """Pickle the arguments: polars would give each expression its own copy of its Python functions."""
        return WindowAggregation, self._arguments

    def pickles_of(self, own: OwnCode) -> None:
        """Let accumulators be instances of classes in `own`. Called before any row."""
        for aggregate in self._aggregates.values():
            if isinstance(aggregate, AccumulatorAggregate):
                aggregate.pickles = Pickles(own)

    @property
    def combines(self) -> bool:
        """Whether rows may be reduced to parts before they are sent: not if Python code makes and merges some of these."""
        return not any(isinstance(aggregate, AccumulatorAggregate) for aggregate in self._aggregates.values())

    @property
    def depends_on_arrival(self) -> bool:
        """Whether results depend on which of two parts of different event times arrived first."""
        return any(each._depends_on_arrival for each in self._aggregates.values())

    def open(self, context: OperatorContext) -> None:
        """Prepare what needs the context of the operator. Called once before any row."""

    def close(self) -> None:
        """Release what `open` has prepared. Called even if `open` was not."""

    @property
    def time(self) -> EventTime:
        """The event time, without which only running aggregates do."""
        assert self._time is not None, self.where
        return self._time

    # ---- checks ----

    def check_expressions(self) -> None:
        """Raise JobError for an aggregate whose results depend on how batches are cut, or on the process.

        For the driver, once: the expressions are evaluated on probe rows.
        """
        overflow = dict(self._overflow)
        for (output, aggregate), finish in zip(self._aggregates.items(), self._finish, strict=True):
            where = f"{self.where}: aggregate {output!r}"
            if output in self._wheres:
                check_row_by_row([self._wheres[output]], self.input_schema, f"{where}: where")
            if _is_own(aggregate):
                continue
            partial, merge = (self._of_output(output, exprs) for exprs in (self._partial, self._merge))
            check_of_many_rows(partial, self._prepared_schema(), f"{where}: partial")
            check_of_many_rows(merge, self.part_schema, f"{where}: merge")
            finished = [finish, overflow[output]] if output in overflow else [finish]
            check_row_by_row(finished, self.part_schema, f"{where}: finish")

    def _of_output(self, output: str, exprs: Iterable[pl.Expr]) -> list[pl.Expr]:
        return [expr for expr in exprs if expr.meta.output_name() in self._parts_of[output]]

    def _prepared_schema(self) -> pa.Schema:
        return computed_schema(self.prepare(self._empty_frame()), self.where)

    def _empty_frame(self) -> pl.DataFrame:
        return empty_frame(pa.schema([self.input_schema.field(name) for name in self.columns]), self.where)

    def _bind(self, output: str, aggregate: AnyAggregate) -> Aggregate:
        if isinstance(aggregate, Accumulator):
            aggregate = AccumulatorAggregate(aggregate, f"{self.where}: aggregate {output!r}")
        if not isinstance(aggregate, Aggregate):
            raise ConfigError(
                f"{self.where}: {output}={aggregate!r} is not an aggregate; write for example {output}=Sum('value')"
            )
        require_columns(self.input_schema, aggregate.columns, f"{self.where}: aggregate {output!r}", "column")
        try:
            some = filtered(aggregate, f"__{len(self._wheres)}_")
            if some is None:
                return aggregate.bind(self.input_schema)
            what = f"{self.where}: aggregate {output!r}: where"
            kinds = infer_schema(self.input_schema, [some.where], what, keep=False).types
            if kinds != [pa.bool_()]:
                raise SchemaError(
                    f"where={some.where} is {', '.join(map(str, kinds)) or 'no column'}; it must be one condition "
                    "of a row"
                )
            aggregate.bind(self.input_schema)  # an error names the column as the user does
            self._wheres[output] = some.where
            self._derived.extend(expr.alias(name) for name, expr in some.derived.items())
            kinds = [self.input_schema.field(name).type for name in aggregate.columns] or kinds
            fields = [pa.field(name, kind) for name, kind in zip(some.derived, kinds, strict=True)]
            return some.aggregate.bind(pa.schema([*self.input_schema, *fields]))
        except SchemaError as error:
            if str(error).startswith(self.where):
                raise
            raise SchemaError(f"{self.where}: aggregate {output!r}: {error}") from None

    def _check_outputs(self) -> None:
        if not self._aggregates:
            raise ConfigError(f"{self.where}: there are no aggregates; give at least one, such as n=Count()")
        for output in self._aggregates:
            if output in self.keys or output in self.bounds:
                raise ConfigError(f"{self.where}: two output columns are called {output!r}; rename the aggregate")
            check_output(output, self.where)
        for key in self.keys:
            if key in self.bounds:
                raise ConfigError(f"{self.where}: the key column must not be called {key!r}; rename it first")

    def _check_inputs(self) -> None:
        for name in self.columns:
            if name.startswith("__"):  # the columns that windows add internally begin like this
                raise ConfigError(
                    f"{self.where}: a column that an aggregate reads must not be called {name!r}; rename it first"
                )

    def _time_of(self, output: str) -> pl.Expr:
        """Return the event time of the rows that an aggregate counts, null for all others."""
        time = pl.col(_NO_TIME) if self._time is None else self._time.expr
        return pl.when(self._wheres[output]).then(time) if output in self._wheres else time

    def _compile(self, output: str, aggregate: Aggregate) -> None:
        def name(part: str) -> str:
            return f"{output}:{part}"

        def column(part: str) -> pl.Expr:
            return pl.col(name(part))

        part: Columns = column
        parts = self._named(output, "partial", aggregate.partial(self._time_of(output)))
        merge = self._named(output, "merge", aggregate.merge(part))
        if parts.keys() != merge.keys():
            raise JobError(
                f"{self.where}: aggregate {output!r}: partial returns {sorted(parts)}, merge returns "
                f"{sorted(merge)}; both must return the same columns"
            )
        taken = {existing.meta.output_name() for existing in self._partial}
        for key in parts:
            if name(key) in taken or name(key) in self.keys:
                raise ConfigError(f"{self.where}: two columns of state are called {name(key)!r}; rename one")
        self._parts_of[output] = [name(key) for key in parts]
        self._partial.extend(expr.alias(name(key)) for key, expr in parts.items())
        self._merge.extend(merge[key].alias(name(key)) for key in parts)
        [finish] = self._named(output, "finish", {output: aggregate.finish(part)}).values()
        self._finish.append(finish.alias(output))
        self._folds.update({name(key): each for key, each in folds_of(aggregate).items()})
        overflow = aggregate.overflow(part)
        if overflow is not None:
            self._overflow.append((output, overflow))

    def _named(self, output: str, step: str, made: object) -> dict[str, pl.Expr]:
        """Return the expressions of a step of an aggregate. Raises JobError if the user's class returned something else."""
        wrong = made
        if isinstance(made, Mapping):
            wrong = next((each for each in made.values() if not isinstance(each, pl.Expr)), None)
            if wrong is None:
                return dict(made)
        what = "an expression" if step == "finish" else "a dict of names with expressions"
        raise JobError(
            f"{self.where}: aggregate {output!r}: {step} returns {what}, of polars, such as pl.col('x').sum(); "
            f"this one has {wrong!r:.200}"
        )

    def _schemas(self) -> tuple[pa.Schema, pa.Schema]:
        frame = self.prepare(self._empty_frame())
        try:
            parts = self._reduce(frame)
            merged = parts.group_by(self.by).agg(self._merge)
            if merged.schema != parts.schema:
                changed = [name for name in parts.columns if merged.schema[name] != parts.schema[name]]
                raise JobError(
                    f"{self.where}: {changed[0]!r} is {parts.schema[changed[0]]} in partial and "
                    f"{merged.schema[changed[0]]} in merge; both must be the same"
                )
            results = computed_schema(merged.select(self._finish), self.where)
        except MidstreamError:
            raise
        except EXPRESSION_ERRORS as error:
            raise SchemaError(f"{self.where}: the aggregates do not fit the columns: {error}") from error
        keys = [self.input_schema.field(key) for key in self.keys]
        bounds = [pa.field(name, self.time.kind) for name in self.bounds]
        # Keys in state have the stream's own types, as in all other state: polars has other types for some of them.
        own = {key.name: key for key in keys}
        part_schema = pa.schema([own.get(field.name, field) for field in computed_schema(parts, self.where)])
        return part_schema, pa.schema([*keys, *bounds, *results])

    # ---- work ----

    def prepare(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return rows with a column for every name in `by`, and all that aggregates read."""
        if self._derived:
            frame = self._row_evaluation.of(frame, lambda rows: rows.with_columns_seq(self._derived))
        zeros = [pl.Series(name, np.zeros(frame.height, np.int8)).cast(kind) for name, kind in self._zeros.items()]
        return frame_of([*frame.iter_columns(), *zeros]) if zeros else frame

    def reduce(
        self, frame: pl.DataFrame, also_by: Sequence[str] = (), also: Mapping[str, DenseGroupBy] = NO_FOLDS
    ) -> pl.DataFrame:
        """Reduce prepared rows to parts, one per key and value of `also_by`; `also` are further columns of them."""
        folded = self._folded(frame, (*also_by, *self.by), {**also, **self._folds})
        return self._guard(lambda: self._reduce(frame, also_by, also)) if folded is None else folded

    def _reduce(
        self, frame: pl.DataFrame, also_by: Sequence[str] = (), also: Mapping[str, DenseGroupBy] = NO_FOLDS
    ) -> pl.DataFrame:
        return self._grouped(frame, (*also_by, *self.by), [*_expressions(also), *self._partial])

    def _grouped(self, frame: pl.DataFrame, by: Sequence[str], exprs: Sequence[pl.Expr]) -> pl.DataFrame:
        """Return one row per group. A group alone is computed as two, like a row alone (see `Evaluation`)."""
        made = frame.group_by(by, maintain_order=True).agg(exprs)
        if made.height != 1 or not self._group_evaluation.divides:
            return made
        copies = pl.Series(_COPY, np.repeat(np.arange(2), frame.height))
        grouped = twice(frame).with_columns(copies).group_by((_COPY, *by), maintain_order=True)
        return grouped.agg(exprs).drop(_COPY).head(1)

    def merge(
        self, parts: Sequence[pl.DataFrame], also_by: Sequence[str] = (), also: Mapping[str, DenseGroupBy] = NO_FOLDS
    ) -> pl.DataFrame:
        """Merge parts, in the order in which they were made, to one per key and `also_by`; `also` are further columns."""
        frame = parts[0] if len(parts) == 1 else pl.concat(parts, rechunk=True)
        by = (*also_by, *self.by)
        if not self._merges_by_polars:
            folds = {name: each.of_parts(name) for name, each in self._folds.items()}
            folded = self._folded(frame, by, {**also, **folds})
            if folded is not None:
                return folded
        if len(by) == 1 and any(frame.get_column(by[0]).flags.values()):
            # If a column is marked as sorted, polars takes its groups as slices and adds up their floats in another
            # order: a sum would depend on which keys are stored together.
            frame, by = frame.with_columns(pl.lit(0, pl.Int8).alias(_NOT_SORTED)), (*by, _NOT_SORTED)
        merged = self._guard(lambda: self._grouped(frame, by, [*_expressions(also), *self._merge]))
        return merged.drop(_NOT_SORTED) if _NOT_SORTED in by else merged

    def check_restored(self, parts: pl.DataFrame) -> None:
        """Check that parts of a checkpoint can be merged. Raises StorageError."""

    def _folded(self, frame: pl.DataFrame, by: Sequence[str], folds: Mapping[str, DenseGroupBy]) -> pl.DataFrame | None:
        """Return what polars would compute, in another order, or None if polars has to."""
        if len(self._folds) < len(self._partial) or not self.keys:
            return None
        return fold(frame, by, folds)

    def row_parts(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the part of each prepared row alone, without its key; that of an accumulator is null."""
        made_by = self._of_row
        parts = {name: each.of_rows(frame) for name, each in self._folds.items() if name in made_by.folded}
        parts |= {name: frame.get_column(column) for name, column in made_by.columns.items()}
        if made_by.computed:
            # of nothing but literals, `select` would make one row, however many the frame has
            computed = frame.with_columns_seq(made_by.computed.values())
            parts |= {name: computed.get_column(name) for name in made_by.computed}
        if made_by.reduced:
            numbered = frame.with_row_index(_ROW)
            others = self._guard(lambda: self._grouped(numbered, (_ROW,), made_by.reduced)).drop(_ROW)
            parts |= {each.name: each for each in others}
        return frame_of([parts[name].alias(name) for names in self._parts_of.values() for name in names])

    @cached_property
    def _of_row(self) -> _RowParts:
        made_by = _RowParts()
        for output, aggregate in self._aggregates.items():
            folds, pick = folds_of(aggregate), pick_of(aggregate, self._time_of(output))
            alone = {} if pick is None else dict(pick.of_row)
            if isinstance(aggregate, AccumulatorAggregate):
                alone = {"accumulator": pl.lit(None, pl.Binary)}
            made_by.merges[output] = self._of_output(output, self._merge)
            made_by.folded.update(f"{output}:{name}" for name in folds)
            for part, expr in alone.items():
                name = f"{output}:{part}"
                if is_plain_column(expr):
                    made_by.columns[name] = expr.meta.output_name()
                else:
                    made_by.computed[name] = expr.alias(name)
            if not folds and not alone:
                made_by.reduced.extend(self._of_output(output, self._partial))
        return made_by

    def prefixes(
        self, parts: pl.DataFrame, source: Int64s, segments: Segments, accumulated: Mapping[str, pl.Series]
    ) -> list[Prefixes]:
        """Return the merge of the part of each row of the segments with all parts before it in its segment.

        `source`: the position of the part of each row. `accumulated`: the accumulators, which are merged already.
        """
        found: list[Prefixes] = []
        for output, aggregate in self._aggregates.items():
            names = self._parts_of[output]
            if isinstance(aggregate, AccumulatorAggregate):
                found.append(Scanned([accumulated[names[0]]]))
                continue
            columns = [parts.get_column(name) for name in names]
            merge = self._of_row.merges[output]
            found += self._guard(partial(scan, aggregate, columns, source, segments, merge))
        return found

    @property
    def folds(self) -> Mapping[str, DenseGroupBy] | None:
        """The folds by column of a part; None if some columns are no folds."""
        return self._folds if len(self._folds) == len(self._partial) else None

    def accumulators(self) -> Iterator[tuple[str, AccumulatorAggregate]]:
        """Yield the accumulators, each with its column of a part."""
        for output, aggregate in self._aggregates.items():
            if isinstance(aggregate, AccumulatorAggregate):
                yield self._parts_of[output][0], aggregate

    def update(self, known: pl.DataFrame, more: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Merge further parts into those that are known. Returns all parts, and those whose results are others now."""
        total = self.merge([known, more])
        return total, total

    def finish(self, merged: pl.DataFrame) -> pl.DataFrame:
        """Return results with the columns `by`, then all other columns of `merged` that are not parts, then one per
        aggregate.

        Raises JobError for a result that does not fit its type.
        """
        for output, overflow in self._overflow:
            too_large = merged.filter(overflow)
            if too_large.height:
                key = ", ".join(f"{name}={too_large.item(0, name)!r}" for name in self.keys)
                raise JobError(
                    f"{self.where}: aggregate {output!r} does not fit {self.schema.field(output).type}"
                    f"{' for ' + key if key else ''}; cast its column to a float, or to a decimal of a smaller scale, first"
                )
        finished = self._finished_columns
        computing = [
            expr for output, expr in zip(self._aggregates, self._finish, strict=True) if output not in finished
        ]
        made = merged
        if computing:
            made = self._guard(
                lambda: self._finish_evaluation.of(merged, lambda rows: rows.with_columns_seq(computing))
            )
        columns = {each.name: each for each in made.iter_columns()}
        columns |= {output: merged.get_column(part).alias(output) for output, part in finished.items()}
        return frame_of(list(columns.values()))

    @cached_property
    def _finished_columns(self) -> Mapping[str, str]:
        """The columns of parts that are results as they are, by output."""
        return {
            expr.meta.output_name(): expr.meta.root_names()[0]
            for expr in self._finish
            if is_plain_column(expr.meta.undo_aliases())
        }

    def _guard(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except EXPRESSION_ERRORS as error:  # the expressions may be the user's
            for aggregate in self._aggregates.values():
                if isinstance(aggregate, AccumulatorAggregate) and aggregate.failure is not None:
                    raise aggregate.failure from aggregate.failure.__cause__
            if isinstance(error, MidstreamError):
                raise
            raise user_error(self.where, "an aggregate", error) from error


def check_output(name: str, where: str) -> None:
    """Raise ConfigError for an output column that is called like one of those that windows add to their parts."""
    if name in (START, END, ALL):
        raise ConfigError(
            f"{where}: an output column must not be called {name!r}, as one that windows add is; rename it"
        )


def _is_own(aggregate: Aggregate) -> bool:
    """Whether the aggregate is one of midstream's, whose expressions need no check."""
    return type(aggregate).__module__.startswith("midstream.engine.operators.")


def _expressions(folds: Mapping[str, DenseGroupBy]) -> list[pl.Expr]:
    return [each.expression.alias(name) for name, each in folds.items()]
