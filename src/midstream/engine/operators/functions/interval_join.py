"""The join of two streams by keys and by an interval of event time: inner, outer, semi and anti.

A side whose rows matter even without a partner (`left` of a left join) has two indexes: of the rows without a partner so
far, and of those that have had one. The first partner moves a row from one to the other, so that a row's state is where
it lies, and checkpoints store it incrementally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import empty_batch, rows_where, stacked, to_polars
from midstream.engine.core.errors import SchemaError
from midstream.engine.operators.base import OperatorContext, Output
from midstream.engine.operators.event_time_column import EventTime, TimeColumn
from midstream.engine.operators.functions.event_time_join import EventTimeJoinOperator, JoinColumns
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.state.join_index import JoinIndex, Matches, TimedRun

How: TypeAlias = Literal["inner", "left", "right", "full", "semi", "anti"]
HOWS: Final[tuple[str, ...]] = get_args(How)
_FURTHEST_US: Final = 2**62
"""A limit within int64: no two event times are further apart."""

LEFT, RIGHT = 0, 1
_SIDES: Final = ("left", "right")
_KEEPS_UNMATCHED: Final[Mapping[str, tuple[int, ...]]] = {
    "inner": (),
    "left": (LEFT,),
    "right": (RIGHT,),
    "full": (LEFT, RIGHT),
    "semi": (LEFT,),
    "anti": (LEFT,),
}
"""The sides of each kind of join whose rows without a partner are held apart from the others."""


def interval_join_operator(
    name: str, ports: Sequence[Port], lower_us: int, upper_us: int, how: str = "inner", suffix: str = "_right"
) -> IntervalJoinOperator:
    """Return the operator that pairs rows of equal keys if the second is `lower_us` to `upper_us` after the first.

    A pair is emitted when the later of its rows arrives, a row without a partner when, by event time, only late rows
    could match it.

    Raises SchemaError for columns that do not fit.
    """
    bounds = max(lower_us, -_FURTHEST_US), min(upper_us, _FURTHEST_US)
    return IntervalJoinOperator(name, ports, bounds, how, JoinColumns.of(ports, suffix, f"operator {name!r}"))


class IntervalJoinOperator(EventTimeJoinOperator):
    def __init__(
        self, name: str, ports: Sequence[Port], bounds_us: tuple[int, int], how: str, columns: JoinColumns
    ) -> None:
        lower_us, upper_us = self._bounds_us = bounds_us
        self._how = how
        self._columns = columns
        self._is_filter = how in ("semi", "anti")
        """Whether the result has rows of the left stream alone."""
        right = columns.right
        if self._is_filter:  # only whether there is a row matters
            right = pa.schema([field for field in right if field.name in (*columns.keys, columns.right_time.name)])
        self._right = right
        after_left_us, after_right_us = max(upper_us, 0), max(-lower_us, 0)
        """How long a row of each side is held after its own time. A row is held until then even if its partners are all
        earlier: then no row is removed before event time has passed it."""
        times, held_us = (columns.left_time, columns.right_time), (after_left_us, after_right_us)
        tables = {}
        for side, schema in ((LEFT, columns.left), (RIGHT, right)):
            if side == RIGHT or not self._is_filter:
                tables[_SIDES[side]] = _index(schema, times[side], held_us[side], columns.keys)
            if side in _KEEPS_UNMATCHED[how]:
                tables[f"{_SIDES[side]}_unmatched"] = _index(schema, times[side], held_us[side], columns.keys)
        super().__init__(name, tables, ports, columns.left if self._is_filter else columns.both)
        self.result_time = columns.right_time if how == "right" else columns.left_time
        self.watermark_delay_us = {"right": after_right_us, "full": max(held_us)}.get(how, after_left_us)
        if how == "full":
            self._check_one_type()
        self._own_times = tuple(
            EventTime(time, schema, self._where)
            for time, schema in ((columns.left_time, columns.left), (columns.right_time, columns.right))
        )
        self._empty = to_polars(empty_batch(self.schema))
        # The following attributes are set when the operator opens.
        self._matched: list[JoinIndex | None]
        """By side: its rows, or those that have had a partner; None if these matter no more."""
        self._unmatched: list[JoinIndex | None]
        """By side: its rows that have not had a partner; None if they are not held apart."""

    def _check_one_type(self) -> None:
        """The event time of a full join is in one column."""
        left, right = self._columns.left_time, self._columns.right_time
        kinds = self._columns.left.field(left.name).type, self._columns.right.field(right.name).type
        if kinds[0] != kinds[1]:
            raise SchemaError(
                f"{self._where}: a full join puts the event times of both streams into column {left.name!r}, and these are "
                f"{kinds[0]} and {kinds[1]}; cast one of them before with_watermarks()"
            )
        if left.is_end != right.is_end and left.name in self._columns.keys:
            windows, other = ("left", "right") if left.is_end else ("right", "left")
            raise SchemaError(
                f"{self._where}: a full join puts the event times of both streams into column {left.name!r}; that of the "
                f"{windows} stream is the end of a window, whose rows are just before it, and that of the {other} stream is "
                "not: values of this key would be changed by one unit; join windows of equal ends, or use how='left'"
            )

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        settings = dict(super().state_settings())
        lower_us, upper_us = self._bounds_us
        own = {"the kind of join": self._how}
        if self._how != "inner":  # rows that the old interval has completed could not be told from the others
            own["the interval"] = f"{lower_us} µs to {upper_us} µs"
        settings[""] = {**settings[""], **own}
        return settings

    def open(self, context: OperatorContext, out: Output) -> None:
        super().open(context, out)
        bound = vars(self._function)
        self._matched = [bound.get(side) for side in _SIDES]
        self._unmatched = [bound.get(f"{side}_unmatched") for side in _SIDES]

    def _joined(self, rows: pl.DataFrame, port: int) -> pl.DataFrame | None:
        other = 1 - port
        if port == RIGHT:
            rows = rows.rename(self._columns.names).select(self._right.names)
        own = self._matched[port] or self._unmatched[port]
        assert own is not None, port
        run = own.run_of(rows)
        assert run is not None, rows
        lower_us, upper_us = self._bounds_us
        within = (lower_us, upper_us) if port == LEFT else (-upper_us, -lower_us)
        matched, unmatched = (
            None if index is None else self._exact(index.matches(run, *within), port)
            for index in (self._matched[other], self._unmatched[other])
        )
        self._hold(run, port, [matched, unmatched])
        firsts = self._move(other, unmatched)
        if self._how == "anti":
            return None
        if self._how == "semi":
            return _matched_rows(run, matched) if port == LEFT else firsts
        pairs = [self._side_by_side(each, port) for each in (matched, unmatched) if each is not None]
        return stacked(pairs) if pairs else None

    def _exact(self, matches: Matches | None, port: int) -> Matches | None:
        """Leave out pairs that are too close or too far apart by nanoseconds; they were found in whole microseconds."""
        if matches is None or not any(time.has_ns for time in self._own_times):
            return matches
        frames = (matches.their_rows, matches.rows)[:: 1 if port == LEFT else -1]
        left, right = (time.us_and_ns_of(rows) for time, rows in zip(self._own_times, frames, strict=True))
        us, ns = right[0] - left[0], right[1] - left[1]
        lower_us, upper_us = self._bounds_us
        fits = ~(((us == lower_us) & (ns < 0)) | ((us == upper_us) & (ns > 0)))
        return matches.only(fits) if fits.any() else None

    def _hold(self, run: TimedRun, side: int, matches: Sequence[Matches | None]) -> None:
        """Hold new rows, where those belong that have had a partner or not."""
        matched, unmatched = self._matched[side], self._unmatched[side]
        if unmatched is None:
            assert matched is not None
            matched.put(run)
            return
        had = _had_partner(run, matches)
        for index, rows in ((matched, had), (unmatched, ~had)):
            if index is not None and rows.any():
                index.put(run if rows.all() else TimedRun(*run.only(rows)))

    def _move(self, side: int, matches: Matches | None) -> pl.DataFrame | None:
        """Move the rows of `side` that have got their first partner. Returns them."""
        unmatched, matched = self._unmatched[side], self._matched[side]
        if matches is None or unmatched is None:
            return None
        rows = unmatched.take(matches.mine)
        if matched is not None:
            matched.append(rows)
        return rows

    def _side_by_side(self, matches: Matches, port: int) -> pl.DataFrame:
        left, right = (matches.their_rows, matches.rows) if port == LEFT else (matches.rows, matches.their_rows)
        return left.hstack([right.get_column(name) for name in self._columns.added])

    def _completed(self, watermark_us: int) -> pl.DataFrame | None:
        made = []
        for side, unmatched in enumerate(self._unmatched):
            if unmatched is not None:
                rows = unmatched.pop_expired(watermark_us)
                if rows.height and self._how != "semi":
                    made.append(self._without_partner(rows, side))
        for matched in self._matched:
            if matched is not None:
                matched.advance(watermark_us)
        return pl.concat(made).sort(self.result_time.name, maintain_order=True) if made else None

    def _without_partner(self, rows: pl.DataFrame, side: int) -> pl.DataFrame:
        """Return rows of one side as results, in which the other side's columns are null."""
        if side == RIGHT and self._how == "full":
            left, right = self._columns.left_time, self._columns.right_time
            kind = self._columns.right.field(right.name).type
            time = right.times(kind)
            rows = rows.with_columns((time.dt.offset_by(f"1{kind.unit}") if left.is_end else time).alias(left.name))
        return pl.concat([self._empty, rows], how="diagonal")

    def _drop_completed(self) -> None:
        for index in (*self._matched, *self._unmatched):
            if index is not None:
                index.drop(self._fired.of)


def _index(schema: pa.Schema, time: TimeColumn, held_us: int, equal: Sequence[str]) -> JoinIndex:
    return JoinIndex(schema, time.name, held_us, time.times(schema.field(time.name).type), equal)


def _had_partner(run: TimedRun, matches: Sequence[Matches | None]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    had = np.zeros(run.frame.height, np.bool_)
    for each in matches:
        if each is not None:
            had[each.theirs] = True
    return had


def _matched_rows(run: TimedRun, matches: Matches | None) -> pl.DataFrame | None:
    return None if matches is None else rows_where(run.frame, _had_partner(run, [matches]))
