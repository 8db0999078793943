"""Tumbling and sliding windows. Rows are reduced once, per pane; a window is the merge of its panes.

A pane is as long as the greatest common divisor of size and slide, so every window is a whole
number of panes and a row belongs to one pane however many windows overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from math import gcd
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.operators.base import OperatorContext, Output
from midstream.engine.operators.event_time_column import Int64s
from midstream.engine.operators.windows import window_operator as window_base
from midstream.engine.operators.windows.dense_groupby import NO_FOLDS, DenseGroupBy
from midstream.engine.operators.windows.early_results import ChangedKeys, EarlyResults
from midstream.engine.operators.windows.local_days import LocalDays
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
from midstream.engine.operators.windows.window_specs import END, IS_EARLY, START, WINDOW_END, Sliding
from midstream.engine.state.columnar import FrameRun, Ordered, PartLog, snapshot_runs
from midstream.engine.state.state_parts import Chunk

PANE: Final = "__pane"
FEW_PANES = 4
"""Up to this many panes in a batch are selected one by one, which is faster than grouping by pane and key."""


class PaneCombiner(WindowCombiner):
    """Combines rows by key and pane."""

    bounds = (PANE,)

    def __init__(
        self, aggregation: WindowAggregation, room: int, pane: int, offset: int, days: LocalDays | None
    ) -> None:
        super().__init__(aggregation, room)
        self._pane = pane
        self._offset = offset
        self._days = days

    def _parts(self, frame: pl.DataFrame, times: Int64s, batch: pa.RecordBatch) -> pl.DataFrame:
        if self._days is not None:
            times = self._days.positions(times)
        panes = _by_pane(self._aggregation, frame, times, self._pane, self._offset, COUNT)
        parts = [part.with_columns(pl.lit(pane, pl.Int64).alias(PANE)) for pane, part in panes]
        return parts[0] if len(parts) == 1 else pl.concat(parts)


class PaneWindowOperator(WindowOperator):
    """`emit_every_us`: how often open windows that have changed are emitted; 0 for never."""

    def __init__(
        self, aggregation: WindowAggregation, window: Sliding, lateness_us: int, emit_every_us: int = 0
    ) -> None:
        super().__init__(aggregation, window, lateness_us)
        where = f"{aggregation.where}: window"
        self._size = native_units(window.size_us, aggregation.time, f"{where} size")
        self._slide = native_units(window.slide_us, aggregation.time, f"{where} slide")
        self._offset = native_units(window.offset_us, aggregation.time, f"{where} offset") % self._slide
        self._room = room_for(self._size + self._slide, window, aggregation.time, aggregation.where)
        self._pane = gcd(self._size, self._slide)
        self._days = None if window.zone is None else LocalDays(window.zone, aggregation.time.kind.unit)
        """The days of the windows' time zone; panes and their bounds are positions of `LocalDays` then."""
        self._logs: dict[int, PartLog] = {}
        """The parts of each pane, by its start."""
        self._starts: list[int] = []
        """The keys of `_logs`, sorted."""
        self._early = EarlyResults(emit_every_us, aggregation.by) if emit_every_us else None
        if self._early is not None:
            if IS_EARLY in self.schema.names:
                raise ConfigError(
                    f"{aggregation.where}: two output columns are called {IS_EARLY!r}; rename the other one"
                )
            self._marks_early = True
            after = self.schema.get_field_index(WINDOW_END) + 1
            self.schema = self.schema.insert(after, pa.field(IS_EARLY, pa.bool_()))

    def open(self, context: OperatorContext, out: Output) -> None:
        super().open(context, out)
        if self._early is not None:
            self._early.open(context, self._early_results, partial(self._emit, is_early=True))

    def state_runs(self) -> Iterable[FrameRun]:
        return chain.from_iterable(self._logs[start].runs for start in self._starts)

    def close(self) -> None:
        if self._early is not None:
            self._early.close()
        super().close()

    def _combiner(self) -> WindowCombiner:
        return PaneCombiner(self._aggregation, self._room, self._pane, self._offset, self._days)

    @property
    def is_tumbling(self) -> bool:
        """Whether each row is in exactly one window."""
        return self._size == self._slide

    def _state_schema(self) -> pa.Schema:
        return self._aggregation.part_schema

    def _state_log(self) -> pa.Field[Any]:
        return pa.field(PANE, self._aggregation.time.kind)

    # ---- where windows lie; `//` rounds down, also before 1970. Bounds of panes and windows are positions ----

    def _position(self, time: int) -> int:
        """Return where an instant lies among the panes."""
        return time if self._days is None else self._days.position(time)

    def _instant(self, position: int) -> int:
        """Return the instant at which the pane or the window at this position begins."""
        return position if self._days is None else self._days.instant(position)

    def _last_start(self, time: int) -> int:
        """Return the latest start of a window at or before `time`."""
        return (time - self._offset) // self._slide * self._slide + self._offset

    def _last_end(self, time: int) -> int:
        """Return the latest end of a window at or before `time`."""
        return self._last_start(time - self._size) + self._size

    def _late_before(self, watermark: int) -> int:
        """Return the time before which rows are late: all windows that they are in are closed."""
        if watermark == MIN_WATERMARK_US:
            return MIN_WATERMARK_US
        # the last window of a row starts at s; it takes rows until s + size - 1 + lateness <= watermark
        return clamp(self._last_start(self._position(watermark + 1 - self._lateness) - self._size) + self._slide)

    def _fired_before(self, watermark: int) -> int:
        """Return the time before which rows are in a window that has fired."""
        return (
            MIN_WATERMARK_US if watermark == MIN_WATERMARK_US else clamp(self._last_end(self._position(watermark + 1)))
        )

    # ---- rows ----

    def _absorb(self, batch: pa.RecordBatch, times: Int64s, watermark: int) -> None:
        if self._days is not None and not self._is_combined(batch):
            times = self._days.positions(times)
        late_before = self._late_before(watermark)  # the start of a pane: all rows of a part are late, or none
        if times.min() < late_before:
            late = times < late_before
            self._emit_late(batch.filter(pa.array(late)))
            batch, times = batch.filter(pa.array(~late)), times[~late]
            if not len(times):
                return
        fired_before, is_combined = self._fired_before(watermark), self._is_combined(batch)
        updated: dict[int, list[pl.DataFrame]] = {}
        for pane, part in self._parts(batch, times):
            # A combined batch that was joined of several has several parts of a key.
            self._log(pane).append(part, is_merged=not is_combined)
            if self._early is not None:
                self._early.add(pane, part)
            if pane < fired_before:
                for end in self._fired_ends(pane, watermark):
                    updated.setdefault(end, []).append(part.select(self._aggregation.by))
        for end in sorted(updated):
            keys = pl.concat(updated[end]).unique(maintain_order=True)
            self._emit(self._window(end, keys))

    def _parts(self, batch: pa.RecordBatch, times: Int64s) -> Iterator[tuple[int, pl.DataFrame]]:
        """Yield the start of each pane of the batch, with its parts."""
        if not self._is_combined(batch):
            yield from _by_pane(self._aggregation, self._prepared(batch), times, self._pane, self._offset)
            return
        if times[0] == times[-1] and (times == times[0]).all():
            yield int(times[0]), self._uncombined(batch)
            return
        parts = self._uncombined(batch, (PANE,))
        for (pane,), part in parts.partition_by(PANE, include_key=False, as_dict=True, maintain_order=True).items():
            yield int(pane), part

    def _log(self, pane: int) -> PartLog:
        log = self._logs.get(pane)
        if log is None:
            log = self._logs[pane] = PartLog(self._aggregation.merge)
            self._starts.insert(bisect_left(self._starts, pane), pane)
        return log

    def _fired_ends(self, pane: int, watermark: int) -> range:
        """Return the ends of the windows of `pane` that have fired but still take rows."""
        first = self._last_end(pane + self._pane - 1) + self._slide
        last = min(self._last_start(pane) + self._size, self._last_end(self._position(watermark + 1)))
        first = max(first, self._last_end(self._position(watermark + 1 - self._lateness)) + self._slide)
        return range(first, last + 1, self._slide)

    # ---- firing ----

    def _next_firing(self, watermark: int) -> Firing | None:
        fired = self._fired.lowest
        # skip the panes whose last window has fired already; they are the first ones
        at = (
            0
            if fired == MIN_WATERMARK_US
            else bisect_left(self._starts, self._last_start(self._position(fired + 1) - self._size) + self._slide)
        )
        if at == len(self._starts):
            return None
        end = self._unfired_ends(self._starts[at]).start
        reached = self._instant(end) - 1
        return None if reached > watermark else Firing(self._due(end, reached), reached)

    def _due(self, end: int, reached: int) -> Iterator[Piece]:
        """Yield the window that ends at `end`, for the key groups in which it has not fired. A large one is merged one
        range of key groups at a time.
        """
        logs = self._logs_of(end)
        if sum(log.merged().height for log in logs) <= window_base.PIECE_ROWS:
            yield Piece(self._unfired(self._window(end), reached), self._last_group, reached)
            return
        frames = [log.by_group(self._layout) for log in logs]
        if not self._fired.is_even:
            frames = [_only(ordered, self._fired.of(ordered[1]) < reached) for ordered in frames]
        for parts, last_group in self._cut_by_group(frames):
            yield Piece(self._merged(parts, end), last_group, reached)

    def _window(self, end: int, keys: pl.DataFrame | None = None) -> pl.DataFrame:
        """Merge the window that ends at `end`, with its bounds; only for `keys` if given."""
        frames = []
        for log in self._logs_of(end):
            if keys is None:
                frames.append(log.merged())
            else:
                frames.extend(frame.join(keys, on=self._aggregation.by, how="semi") for frame in log.frames())
        return self._merged(frames, end, is_merged=keys is None)

    def _logs_of(self, end: int) -> list[PartLog]:
        """Return the logs of the panes of the window that ends at `end`."""
        low = bisect_left(self._starts, end - self._size)
        high = bisect_left(self._starts, end)
        return [self._logs[pane] for pane in self._starts[low:high]]

    def _merged(self, frames: Sequence[pl.DataFrame], end: int, *, is_merged: bool = True) -> pl.DataFrame:
        """Merge these parts of the window that ends at `end` into one frame, with its bounds.

        `is_merged`: whether each frame has one part of a key only.
        """
        merged = frames[0] if len(frames) == 1 and is_merged else self._aggregation.merge(frames)
        start, stop = self._instant(end - self._size), self._instant(end)
        bounds = [pl.lit(start, pl.Int64).alias(START), pl.lit(stop, pl.Int64).alias(END)]
        return merged.with_columns(bounds)

    def _forget(self) -> None:
        if not self._starts:
            return
        count = bisect_left(self._starts, self._late_before(self._fired.lowest))
        for pane in self._starts[:count]:
            del self._logs[pane]
            if self._early is not None:
                self._early.forget(pane)
        del self._starts[:count]

    # ---- early results ----

    def _early_results(self, changed: ChangedKeys) -> Iterator[pl.DataFrame]:
        """Yield the results so far of the windows that have not fired, for the keys that have changed in their panes.

        Rows may come and windows fire between two pieces: each of them leaves out what has fired by then.
        """
        for end in sorted({end for pane in changed for end in self._unfired_ends(pane)}):
            due = self._instant(end) - 1
            if due <= self._fired.lowest:
                continue
            keys = pl.concat([keys for pane, keys in changed.items() if end - self._size <= pane < end])
            window = self._unfired(self._window(end, keys.unique(maintain_order=True)), due)
            for piece in window.iter_slices(window_base.PIECE_ROWS):
                yield self._unfired(piece, due)

    def _unfired_ends(self, pane: int) -> range:
        """Return the ends of the windows of `pane` that have not fired in all key groups."""
        first = self._last_end(pane + self._pane - 1) + self._slide
        fired = self._fired.lowest
        if fired != MIN_WATERMARK_US:
            first = max(first, self._last_end(self._position(fired + 1)) + self._slide)
        return range(first, self._last_start(pane) + self._size + 1, self._slide)

    # ---- snapshot ----

    def _snapshot_chunks(self) -> Callable[[], tuple[Chunk, ...]]:
        return snapshot_runs(
            [(pane, self._logs[pane].runs) for pane in self._starts], self._layout, self._context.ids
        ).beside(self._context.stored_bytes)

    def _restore_table(self, table: pa.Table) -> None:
        panes = table.column(PANE).combine_chunks().cast(pa.int64()).to_numpy()
        if ((panes - self._offset) % self._pane).any():
            raise StorageError(
                f"{self._aggregation.where}: the state in the checkpoint has parts of no window: it is damaged, or midstream "
                "has not written it. To resume from an older checkpoint, name it with --from"
            )
        frame = self._frame_of(table)
        for pane in np.unique(panes).tolist():
            self._log(pane).restore(frame.filter(pl.Series(panes == pane)))
            if self._early is not None:
                self._early.add(pane, self._logs[pane].merged())


def _only(ordered: Ordered, rows: npt.NDArray[np.bool_]) -> Ordered:
    frame, groups = ordered
    return frame.filter(pl.Series(rows)), groups[rows]


def _by_pane(
    aggregation: WindowAggregation,
    frame: pl.DataFrame,
    times: Int64s,
    pane: int,
    offset: int,
    also: Mapping[str, DenseGroupBy] = NO_FOLDS,
) -> Iterator[tuple[int, pl.DataFrame]]:
    """Reduce prepared rows; yield the start of each pane, with its parts. `also`: further columns of these."""
    first = (int(times.min()) - offset) // pane
    last = (int(times.max()) - offset) // pane
    if first == last:
        yield first * pane + offset, aggregation.reduce(frame, (), also)
        return
    numbers = (times - offset) // pane
    if (numbers[1:] >= numbers[:-1]).all():  # as most streams come: slices copy nothing
        starts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        for start, stop in pairwise((0, *starts.tolist(), len(numbers))):
            yield int(numbers[start]) * pane + offset, aggregation.reduce(frame.slice(start, stop - start), (), also)
        return
    if last - first < FEW_PANES:
        for number in range(first, last + 1):
            rows = frame.filter(pl.Series(numbers == number))
            if rows.height:
                yield number * pane + offset, aggregation.reduce(rows, (), also)
        return
    reduced = aggregation.reduce(frame.with_columns(pl.Series(PANE, numbers)), (PANE,), also)
    for (number,), part in reduced.partition_by(PANE, include_key=False, as_dict=True).items():
        yield int(number) * pane + offset, part
