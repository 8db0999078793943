"""Session windows: consecutive rows of a key, no two neighbours more than a gap apart.

Each batch is reduced to small sessions, which are merged with those in state when a watermark makes them due, or when a
late row depends on them. As in Flink, sessions that touch are one, and a late row is dropped only if the session it
would belong to is late as a whole.

A row exactly at the end of a session still belongs to it. So a session, unlike a window of fixed size, is due only when
the watermark has reached its end: then no such row can follow, however batches are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import first_null, rows_at, rows_where, selected, stacked, to_polars, without
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import SchemaError
from midstream.engine.operators.event_time_column import Int64s
from midstream.engine.operators.row_conversion import null_error, require_columns, row_error
from midstream.engine.operators.windows import window_operator as window_base
from midstream.engine.operators.windows.dense_groupby import NO_FOLDS, DenseGroupBy
from midstream.engine.operators.windows.window_aggregation import WindowAggregation
from midstream.engine.operators.windows.window_combiner import COUNT, WindowCombiner
from midstream.engine.operators.windows.window_operator import (
    Firing,
    Piece,
    WindowOperator,
    clamp,
    native_units,
    room_for,
)
from midstream.engine.operators.windows.window_specs import END, START, Session
from midstream.engine.state.columnar import FrameRun, by_group, snapshot_runs
from midstream.engine.state.session_index import SessionIndex
from midstream.engine.state.state_parts import KEY_GROUP, Chunk

_SESSION = "__session"
_TURN = "__turn"
_ROW = "__row"
_KEY = "__key"
_BOUNDS: Final[Mapping[str, DenseGroupBy]] = {START: DenseGroupBy("min", START), END: DenseGroupBy("max", END)}


class Gap:
    """How long after each row its session still takes others."""

    def __init__(self, window: Session, aggregation: WindowAggregation) -> None:
        self._time = aggregation.time
        self._where = f"{aggregation.where}: window gap"
        self._column = window.gap_column
        self.least = 0
        """The gap of all rows; 0 if each has its own."""
        if self._column is None:
            self.least = native_units(window.gap_us, self._time, self._where)
            return
        require_columns(aggregation.input_schema, [self._column], self._where, "column")
        self._kind = aggregation.input_schema.field(self._column).type
        is_number = pa.types.is_integer(self._kind) or pa.types.is_floating(self._kind)
        if not is_number and not pa.types.is_duration(self._kind):
            raise SchemaError(
                f"{self._where}: column {self._column!r} is {self._kind}; it must have durations, or numbers of seconds: cast it "
                "first"
            )

    def ends(self, times: Int64s, batch: pa.RecordBatch) -> Int64s:
        """Return the end of the session of each row alone. Raises JobError for a row without a gap."""
        if self._column is None:
            return times + self.least
        column = batch.column(self._column)
        row = first_null(column)
        if row is not None:
            raise null_error(
                f"{self._where}: column {self._column!r}", batch, row, "filter out or fill such rows first"
            )
        # in floats first: a gap that is far too long for an integer is refused like all others
        per_second = _PER_SECOND[self._time.kind.unit]
        if pa.types.is_duration(self._kind):
            ticks = column.view(pa.int64()).to_numpy()
            own = _PER_SECOND[self._kind.unit]
            gaps = ticks // (own // per_second) if own >= per_second else ticks
            factor = max(1, per_second // own)
        else:
            gaps, factor = column.to_numpy(), per_second
        with np.errstate(invalid="ignore", over="ignore"):
            length = gaps.astype(np.float64) * factor
            fits = (length >= 0.5) & (times + length < 0.999 * MAX_WATERMARK_US)
            whole = (
                np.maximum(np.rint(length), 1).astype(np.int64)
                if gaps.dtype.kind == "f"
                else gaps.astype(np.int64) * factor
            )
            ends: Int64s = times + whole
            wrong = ~(fits & (ends <= self._time.last))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise row_error(
                f"{self._where}: column {self._column!r} is {column[row].as_py()!r}",
                batch,
                row,
                "a gap must be longer than 0, at least one unit of the event time, and end in the range of times, by the end of "
                f"the year {_LAST_YEAR.get(self._time.kind.unit, 9999)}; filter out or replace the others first",
            )
        return ends


_PER_SECOND: Final = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""How many units of a time a second has."""
_LAST_YEAR: Final = {"ns": 2252}
"""The last year in which a gap may end, for units that do not reach the year 9999."""


class SessionCombiner(WindowCombiner):
    """Combines rows by key into small sessions, each of which ends a gap after its last row."""

    bounds = (START, END)

    def __init__(self, aggregation: WindowAggregation, room: int, gap: Gap) -> None:
        super().__init__(aggregation, room)
        self._gap = gap

    def _parts(self, frame: pl.DataFrame, times: Int64s, batch: pa.RecordBatch) -> pl.DataFrame:
        spans = frame.hstack([pl.Series(START, times), pl.Series(END, self._gap.ends(times, batch))])
        return _small_sessions(self._aggregation, spans, self._gap.least, COUNT)


class SessionWindowOperator(WindowOperator):
    def __init__(self, aggregation: WindowAggregation, window: Session, lateness_us: int) -> None:
        super().__init__(aggregation, window, lateness_us)
        self._gap = Gap(window, aggregation)
        self._room = room_for(self._gap.least, window, aggregation.time, aggregation.where)
        self._parts = SessionIndex(aggregation.by, END, self._merge)

    def state_runs(self) -> Iterable[FrameRun]:
        return self._parts.runs

    def _combiner(self) -> WindowCombiner:
        return SessionCombiner(self._aggregation, self._room, self._gap)

    def _state_schema(self) -> pa.Schema:
        bounds = [pa.field(name, pa.int64()) for name in (START, END)]
        return pa.schema([*bounds, *self._aggregation.part_schema])

    def _state_times(self) -> dict[str, pa.DataType]:
        return {START: pa.int64(), END: pa.int64()}

    # ---- rows ----

    def _absorb(self, batch: pa.RecordBatch, times: Int64s, watermark: int) -> None:
        is_combined = self._is_combined(batch)
        if is_combined:
            frame = self._uncombined(batch, (START, END))
            ends = batch.column(END).to_numpy()
        else:
            ends = self._gap.ends(times, batch)
            frame = self._prepared(batch).hstack([pl.Series(START, times), pl.Series(END, ends)])
        if int(ends.min()) <= self._expired(watermark):
            keep = self._not_late(frame, watermark)
            if not keep.all():
                self._emit_late(batch.filter(pa.array(~keep)))
                frame = rows_where(frame, keep)
                if not frame.height:
                    return
        parts = frame if is_combined else _small_sessions(self._aggregation, frame, self._gap.least)
        self._parts.append(parts)
        self._parts.compact()
        if int(parts.get_column(END).min()) <= watermark:  # type: ignore[arg-type]
            self._emit_updated(_ended(parts, watermark), watermark)

    def _merge(self, parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
        """Merge parts to one for each session, or for each of its turns (`_numbered`)."""
        frame = parts[0] if len(parts) == 1 else stacked(parts)
        return self._merged(*_numbered(frame, self._aggregation))

    def _merged(self, numbered: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
        return without(self._aggregation.merge([numbered], by, _BOUNDS), by)

    def _emit_updated(self, parts: pl.DataFrame, watermark: int) -> None:
        """Fire sessions that end by the watermark and have just received rows."""
        by = self._aggregation.by
        merged = self._merge_keys(parts.select(by).unique(maintain_order=True))
        ended = _ended(merged, watermark).with_row_index(_ROW)
        inside = ended.join(parts.select(*by, pl.col(START).alias("__at")), on=by, how="inner")
        touched = inside.filter((pl.col("__at") >= pl.col(START)) & (pl.col("__at") < pl.col(END)))
        self._emit(_ordered(ended.join(touched.select(_ROW).unique(), on=_ROW, how="semi").drop(_ROW)))

    def _merge_keys(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Merge all parts of these keys, in state too, and return their sessions."""
        parts = self._parts.take(keys)
        if parts is None:
            return to_polars(self._state_schema().empty_table())
        numbered, by = _numbered(parts, self._aggregation)
        merged = self._merged(numbered, by)
        self._parts.append(merged)
        return merged if by == (_SESSION,) else self._merged(numbered, (_SESSION,))

    # ---- late rows ----

    def _not_late(self, frame: pl.DataFrame, watermark: int) -> npt.NDArray[np.bool_]:
        """Return which rows to keep: those in time, and late ones whose session is in time, decided row by row in
        order.
        """
        expired = self._expired(watermark)
        keep: npt.NDArray[np.bool_] = frame.get_column(END).to_numpy() > expired
        by = self._aggregation.by
        keys = rows_where(selected(frame, by), ~keep).unique(maintain_order=True)
        merged = self._merge_keys(keys)
        # Keys are numbered, since distinct keys may be equal as Python values: times less than a microsecond apart.
        keys = keys.with_row_index(_KEY)
        known: dict[int, list[tuple[int, int]]] = {}
        for key, start, end in merged.join(keys, on=by, how="inner").select(_KEY, START, END).iter_rows():
            known.setdefault(key, []).append((start, end))
        rows = frame.select(START, END, *by).with_row_index(_ROW).join(keys, on=by, how="inner", maintain_order="left")
        for row, key, start, end in rows.select(_ROW, _KEY, START, END).iter_rows():
            sessions = known.setdefault(key, [])
            touching = [session for session in sessions if session[0] <= end and session[1] >= start]
            merged_end = max([end, *(session[1] for session in touching)])
            if merged_end <= expired:
                continue
            keep[row] = True
            merged_start = min([start, *(session[0] for session in touching)])
            known[key] = [s for s in sessions if s not in touching] + [(merged_start, merged_end)]
        return keep

    def _expired(self, watermark: int) -> int:
        """Return the latest end of the sessions that take no more rows."""
        return clamp(watermark - self._lateness)

    # ---- firing ----

    def _next_firing(self, watermark: int) -> Firing | None:
        fired = self._fired.lowest
        if fired >= watermark:
            return None
        # This includes keys with parts that are about to be dropped: newer rows may continue their session.
        keys = self._parts.keys_of_ended(fired, watermark, self._expired(watermark))
        if keys is None:
            return None
        ended = _ended(self._merge_keys(keys), watermark)
        due = self._unfired(ended, ended.get_column(END).to_numpy())
        return Firing(self._by_end(due, watermark), watermark) if due.height else None

    def _by_end(self, due: pl.DataFrame, watermark: int) -> Iterator[Piece]:
        """Yield sessions in the order of their ends. Sessions of one end that are too many for a piece are cut between key
        groups.
        """
        due = _ordered(due)
        ends = due.get_column(END).to_numpy()
        begun = 0
        while len(ends) - begun > window_base.PIECE_ROWS:
            upto = int(ends.searchsorted(ends[begun + window_base.PIECE_ROWS]))
            if upto > begun:
                yield Piece(due.slice(begun, upto - begun), self._last_group, int(ends[upto - 1]))
            else:
                upto = int(ends.searchsorted(ends[begun], "right"))
                of_one_end = due.slice(begun, upto - begun)
                for (part,), last_group in self._cut_by_group([by_group(of_one_end, self._layout.groups(of_one_end))]):
                    yield Piece(part, last_group, int(ends[begun]))
            begun = upto
        if begun < len(ends):
            yield Piece(due.slice(begun), self._last_group, watermark)

    def _forget(self) -> None:
        """Drop expired parts; all keys that have some are merged by now, so these parts are whole sessions."""
        self._parts.remove_ended(self._expired(self._fired.lowest))
        self._parts.compact()

    # ---- snapshot ----

    def _snapshot_chunks(self) -> Callable[[], tuple[Chunk, ...]]:
        return snapshot_runs([(0, self._parts.runs)], self._layout, self._context.ids).beside(
            self._context.stored_bytes
        )

    def _restore_table(self, table: pa.Table) -> None:
        frame = self._frame_of(table)
        groups = table.column(KEY_GROUP).to_numpy()
        # A snapshot between two slices holds parts that have expired in key groups that had already fired.
        live = frame.get_column(END).to_numpy() + self._lateness > self._fired.of(groups)
        frame = rows_where(frame, live)
        if frame.height:
            self._parts.append(self._merge([frame]))
            self._parts.compact()


def _ordered(sessions: pl.DataFrame) -> pl.DataFrame:
    """Sort sessions by their ends, those of one end in the order in which they are."""
    ends = sessions.get_column(END).to_numpy()
    return sessions if (ends[1:] >= ends[:-1]).all() else rows_at(sessions, ends.argsort(kind="stable"))


def _ended(parts: pl.DataFrame, watermark: int) -> pl.DataFrame:
    return rows_where(parts, parts.get_column(END).to_numpy() <= watermark)


def _small_sessions(
    aggregation: WindowAggregation, frame: pl.DataFrame, least: int, also: Mapping[str, DenseGroupBy] = NO_FOLDS
) -> pl.DataFrame:
    """Reduce prepared rows with START and END to small sessions, with bounds. `least`: no row has a shorter gap. `also`:
    further columns of these.
    """
    by: tuple[str, ...] = ()
    starts = frame.get_column(START)
    if int(starts.max()) - int(starts.min()) > least:  # type: ignore[arg-type]
        frame, by = _numbered(frame, aggregation)
    return without(aggregation.reduce(frame, by, {**_BOUNDS, **also}), by)


def _numbered(frame: pl.DataFrame, aggregation: WindowAggregation) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Number the sessions in a frame with START and END. Returns it with the columns by which it is reduced to parts.

    If two sessions of a key have got rows in turns, and the order of arrival counts, there is a part for each turn, with the
    bounds of its session: a later row may make one session of the two, and parts of whole sessions have no order.
    """
    frame = frame.hstack([pl.Series(_SESSION, session_numbers(frame, aggregation.by))])
    if not aggregation.depends_on_arrival:
        return frame, (_SESSION,)
    number, before = pl.col(_SESSION), pl.col(_SESSION).shift(1).over(aggregation.by)
    turns = frame.select(number.ne_missing(before).sum()).item()
    if turns == frame.get_column(_SESSION).n_unique():
        return frame, (_SESSION,)
    bounds = pl.col(START).min().over(_SESSION), pl.col(END).max().over(_SESSION)
    return frame.with_columns(*bounds, number.rle_id().over(aggregation.by).alias(_TURN)), (_SESSION, _TURN)


def session_numbers(frame: pl.DataFrame, by: Sequence[str]) -> Int64s:
    """Number the sessions in a frame with START and END, which are rows of a key whose spans touch; one number per row."""
    if not frame.height:
        return np.empty(0, np.int64)
    starts, ends = frame.get_column(START).to_numpy(), frame.get_column(END).to_numpy()
    order, codes = _by_key_and_time(_key_codes(frame, by), starts)
    starts, ends = starts[order], ends[order]
    breaks = np.empty(len(order), np.bool_)
    breaks[0] = True
    np.not_equal(codes[1:], codes[:-1], out=breaks[1:])
    if (np.diff(ends)[~breaks[1:]] < 0).any():
        spans = pl.DataFrame([pl.Series("key", codes), pl.Series(END, ends)])
        ends = spans.select(pl.col(END).cum_max().over("key")).to_series().to_numpy()
    breaks[1:] |= starts[1:] > ends[:-1]
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(breaks)
    return numbers


def _key_codes(frame: pl.DataFrame, by: Sequence[str]) -> Int64s:
    """Return a small number per row, which is the same for equal keys."""
    codes = np.zeros(frame.height, np.int64)
    for name in by:
        column = frame.get_column(name).rechunk().to_arrow(compat_level=pl.CompatLevel.oldest()).dictionary_encode()
        codes *= len(column.dictionary)
        codes += column.indices.to_numpy()
        if len(by) > 1:
            codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    return codes


def _by_key_and_time(codes: Int64s, starts: Int64s) -> tuple[Int64s, Int64s]:
    """Return the order of rows by key, then time, then arrival; and the sorted codes."""
    rows = len(codes)
    low = int(starts.min())
    row_bits = rows.bit_length()
    time_bits = (int(starts.max()) - low).bit_length()
    if int(codes.max()).bit_length() + time_bits + row_bits > 63:
        order = np.lexsort((starts, codes))
        return order, codes[order]
    # All three fit into one integer, and sorting integers is several times faster than sorting by columns.
    packed = (codes << (time_bits + row_bits)) | ((starts - low) << row_bits) | np.arange(rows)
    packed.sort()
    return packed & ((1 << row_bits) - 1), packed >> (time_bits + row_bits)
