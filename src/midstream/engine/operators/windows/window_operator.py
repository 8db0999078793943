"""The base of all window operators: late rows, firing in slices, snapshots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.batches import from_polars, rows_where, selected, to_polars
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.errors import ConfigError, InvariantError, JobError
from midstream.engine.core.key_groups import key_groups
from midstream.engine.operators.base import KEY, Combiner, Operator, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.event_time_column import EventTime, Int64s
from midstream.engine.operators.key_group_watermarks import KeyGroupWatermarks
from midstream.engine.operators.row_conversion import check_keys, fields_text
from midstream.engine.operators.windows.window_aggregation import WindowAggregation
from midstream.engine.operators.windows.window_combiner import ROWS, WindowCombiner
from midstream.engine.operators.windows.window_specs import END, IS_EARLY, LATE, START, WINDOW_END, WINDOW_START, Window
from midstream.engine.state.columnar import Ordered, StateLayout
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart, check_columns

PIECE_ROWS = 65_536
"""The approximate size of batches in which windows are emitted; a larger one is cut between window ends, or else between key groups."""
SLICE_ROWS = 4 * PIECE_ROWS
"""The largest number of rows that fire in one slice, however fast."""

PARTS: Final = "parts"
PROGRESS: Final = "progress"


@dataclass(frozen=True, slots=True)
class Piece:
    """Parts to finish and emit; afterwards event time of the key groups up to `last_group` is at `reached`."""

    frame: pl.DataFrame
    last_group: int
    reached: int


@dataclass(frozen=True, slots=True)
class Firing:
    """Windows that are due, with the columns START and END; after all are emitted, event time is at `reached`.

    The pieces are made one by one: the state must not change before the last of them. Windows are in the order of their
    ends, over all pieces: a watermark that is made from the first results, wherever they are cut, makes none of the
    others late.
    """

    pieces: Iterator[Piece]
    reached: int


class WindowOperator(Operator):
    """Base of the window operators. `lateness_us`: how long after its end a window still takes rows."""

    def __init__(self, aggregation: WindowAggregation, window: Window, lateness_us: int) -> None:
        self.schema = aggregation.schema
        self.side_outputs = {LATE: aggregation.input_schema}
        self._aggregation = aggregation
        self._spec = window
        self._lateness = native_units(lateness_us, aggregation.time, f"{aggregation.where}: allowed_lateness")
        self._room: int
        """The duration that is added to or subtracted from event times, in their unit."""
        self._marks_early = False
        """Whether results have the column `IS_EARLY`."""
        self._firing: Firing | None = None
        self._context: OperatorContext
        self._out: Output
        self._layout: StateLayout
        self._fired: KeyGroupWatermarks
        self._combined: pa.Schema | None
        """The schema of the combined batches that the operator accepts as well as rows."""
        self._combined_at: str
        """The column with the start of each of their parts."""

    @property
    def fires_again(self) -> bool:
        """Whether a window has several results: early ones, or others for rows within the allowed lateness."""
        return self._lateness > 0 or self._marks_early

    # ---- what differs between kinds of windows ----

    @abstractmethod
    def _absorb(self, batch: pa.RecordBatch, times: Int64s, watermark: int) -> None:
        """Add rows whose key groups are all at `watermark`; emit late rows, and updates of windows that have fired."""

    @abstractmethod
    def _next_firing(self, watermark: int) -> Firing | None:
        """Return the next windows that are due and have not fired."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop the windows that can no longer change."""

    @abstractmethod
    def _combiner(self) -> WindowCombiner: ...

    @abstractmethod
    def _snapshot_chunks(self) -> Callable[[], tuple[Chunk, ...]]: ...

    @abstractmethod
    def _restore_table(self, table: pa.Table) -> None: ...

    @abstractmethod
    def _state_schema(self) -> pa.Schema: ...

    def _state_log(self) -> pa.Field[Any] | None:
        """Return the column of state that distinguishes its logs; None if there is only one."""
        return None

    def _state_times(self) -> dict[str, pa.DataType]:
        """Return the columns of state that identify the window of a row."""
        log = self._state_log()
        return {} if log is None else {log.name: log.type}

    # ---- life ----

    def combiner(self, tags: Collection[str]) -> Combiner | None:
        """Return the combiner, unless it would lose something: late rows that are read, or what accumulators pickle; or gain nothing."""
        if LATE in tags or not self._aggregation.combines or ROWS in self._aggregation.input_schema.names:
            return None  # a batch with a column of that name could be mistaken for a combined one
        return self._combiner()

    def state_forms(self) -> Mapping[str, pa.Schema]:
        keys = self._aggregation.keys
        return {"": pa.schema([self._aggregation.input_schema.field(key) for key in keys])} if keys else {}

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        aggregation = self._aggregation
        parts = [field for field in aggregation.part_schema if field.name not in aggregation.by]
        return {
            "": {
                "the window": str(self._spec),
                KEY: fields_text(aggregation.input_schema.field(key) for key in aggregation.keys) or "none",
                "the event time": f"timestamp[{aggregation.time.kind.unit}]",
                "the aggregates' state": fields_text(parts),
                **aggregation.settings,
            }
        }

    def open(self, context: OperatorContext, out: Output) -> None:
        if not self._aggregation.keys and context.parallelism != 1:
            raise ConfigError(f"{self._aggregation.where}: a window without keys requires parallelism 1")
        self._context = context
        self._out = out
        aggregation = self._aggregation
        self._layout = StateLayout(self._state_schema(), aggregation.keys, context.max_parallelism, self._state_log())
        self._fired = KeyGroupWatermarks(context.key_groups)
        aggregation.pickles_of(self.own)
        self.user_metrics = context.metrics
        aggregation.open(context)
        combiner = self._combiner()
        self._combined = None if ROWS in aggregation.input_schema.names else combiner.schema
        self._combined_at = combiner.bounds[0]

    def close(self) -> None:
        self._aggregation.close()

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if batch.num_rows == 0:
            return
        if self._is_combined(batch):
            times = batch.column(self._combined_at).to_numpy()
        else:
            check_keys(batch, self._aggregation.keys, self._aggregation.where)
            times = self._aggregation.time.native(batch, self._room)
        if self._fired.is_even:
            self._absorb(batch, times, self._fired.lowest)
            return
        groups = key_groups(batch, self._aggregation.keys, self._context.max_parallelism)
        for watermark, rows in self._fired.levels(groups):
            self._absorb(batch.filter(pa.array(rows)), times[rows], watermark)

    def _is_combined(self, batch: pa.RecordBatch) -> bool:
        return self._combined is not None and batch.schema.equals(self._combined)

    def _uncombined(self, batch: pa.RecordBatch, bounds: Sequence[str] = ()) -> pl.DataFrame:
        """Return the parts of a combined batch, with these bounds, in the order of columns that reduced rows have."""
        by, names = self._aggregation.by, self._aggregation.part_schema.names
        return to_polars(batch.select([*by, *bounds, *names[len(by) :]]))

    def _prepared(self, batch: pa.RecordBatch) -> pl.DataFrame:
        return self._aggregation.prepare(to_polars(batch.select(self._aggregation.columns)))

    # ---- firing ----

    def advance_watermark(self, watermark_us: int) -> bool:
        watermark = self._aggregation.time.from_us(watermark_us)
        clock = self._context.clock
        end_s = clock.monotonic_s() + self._context.slice_s
        rows = 0
        while True:
            if rows and (rows >= SLICE_ROWS or clock.monotonic_s() >= end_s):
                return False
            if self._firing is None:
                self._firing = self._next_firing(watermark)
                if self._firing is None:
                    break
            piece = next(self._firing.pieces, None)
            if piece is None:
                self._fired.reach(self._firing.reached)
                self._forget()
                self._firing = None
            else:
                rows += piece.frame.height
                self._emit(piece.frame)
                self._fired.reach_up_to(piece.last_group, piece.reached)
        self._fired.reach(watermark)
        self._forget()
        return True

    def _cut_by_group(self, frames: Sequence[Ordered]) -> Iterator[tuple[list[pl.DataFrame], int]]:
        """Yield the rows of all frames range by range of key groups, with the last group of each range.

        Every range but the last has PIECE_ROWS rows or more.

        A range consists of whole key groups, so that the progress per key group can record how far firing has come.
        """
        owned = self._context.key_groups
        for frame, groups in frames:
            if len(groups) and not owned.start <= groups[0] <= groups[-1] < owned.stop:
                raise InvariantError(
                    f"{self._aggregation.where}: state of subtask {self._context.subtask}, which owns the key groups "
                    f"{owned.start} to {owned.stop - 1}, has rows of key groups {groups[0]} to {groups[-1]}: rows of "
                    f"other subtasks would never fire (the first row: {frame.row(0)})"
                )
        ends = [np.searchsorted(groups, np.arange(owned.start + 1, owned.stop + 1)) for _, groups in frames]
        total_ends: list[int] = np.sum(ends, axis=0).tolist()
        begun, taken = [0] * len(frames), 0
        for number, total_end in enumerate(total_ends):
            if total_end > taken and (total_end - taken >= PIECE_ROWS or total_end == total_ends[-1]):
                upto = [int(end[number]) for end in ends]
                parts = [frame.slice(a, b - a) for (frame, _), a, b in zip(frames, begun, upto, strict=True)]
                yield parts, self._last_group if total_end == total_ends[-1] else owned.start + number
                begun, taken = upto, total_end

    @property
    def _last_group(self) -> int:
        return self._context.key_groups.stop - 1

    def _unfired(self, frame: pl.DataFrame, due: Int64s | int) -> pl.DataFrame:
        """Drop the windows that had already fired before a restore (`due`: the watermark at which each of them fires,
        or all do).
        """
        if self._fired.is_even:
            if isinstance(due, int):
                return frame if due > self._fired.lowest else frame.clear()
            return rows_where(frame, due > self._fired.lowest)
        return rows_where(frame, due > self._fired.of(self._layout.groups(frame)))

    def _emit(self, merged: pl.DataFrame, *, is_early: bool = False) -> None:
        """Finish a merged frame with START and END, and emit it; a part may become several rows."""
        if merged.height == 0:
            return
        schema, kind = self.schema, self._aggregation.time.kind
        added = (WINDOW_START, WINDOW_END, IS_EARLY) if self._marks_early else (WINDOW_START, WINDOW_END)
        values = pa.schema([field for field in schema if field.name not in added])
        finished = self._aggregation.finish(merged)
        if finished.height == 0:
            return
        batch = from_polars(selected(finished, values.names), values, self._aggregation.where)
        columns = {name: batch.column(name) for name in values.names}
        columns[WINDOW_START] = pa.array(finished.get_column(START).to_numpy()).view(kind)
        columns[WINDOW_END] = pa.array(finished.get_column(END).to_numpy()).view(kind)
        if self._marks_early:
            columns[IS_EARLY] = pa.array(np.full(batch.num_rows, is_early))
        self._out.emit(pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema))

    def _emit_late(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._is_combined(batch):  # late rows are not read, but they are counted
            rows = pc.sum(batch.column(ROWS)).as_py()
            batch = pa.RecordBatch.from_arrays([pa.nulls(rows)], [ROWS])
        self._out.emit(batch, LATE)

    # ---- snapshot ----

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        chunks = self._snapshot_chunks()
        progress = self._fired.table()
        progress_id = self._context.ids.new_id()

        def later() -> SnapshotResult:
            parts = {PARTS: StatePart(Redistribute.KEYED, chunks())}
            if progress is not None:
                parts[PROGRESS] = StatePart(Redistribute.KEYED, (Chunk(progress_id, progress),))
            return SnapshotResult({name: part for name, part in parts.items() if part.chunks})

        return Snapshot(later=later)

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if PROGRESS in parts:
            self._fired.restore(parts[PROGRESS])
        if PARTS in parts:
            expected = self._state_schema()
            for chunk in parts[PARTS].chunks:
                for field in expected:
                    index = chunk.table.schema.get_field_index(field.name)
                    if index < 0 or chunk.table.schema.field(index).type != field.type:
                        found = "missing" if index < 0 else str(chunk.table.schema.field(index).type)
                        raise JobError(
                            f"{self._aggregation.where}: column {field.name!r} of the state in the checkpoint is "
                            f"{found}, but the job needs {field.type}; use the same keys and aggregates as then, or "
                            "the operator "
                            "needs a new uid to start without state"
                        )
                check_columns(chunk.table, self._state_times(), self._aggregation.where)
                self._restore_table(chunk.table)

    def _frame_of(self, table: pa.Table) -> pl.DataFrame:
        frame = to_polars(table.select(self._layout.schema.names))
        self._aggregation.check_restored(frame)
        return frame


def native_units(time_us: int, time: EventTime, what: str) -> int:
    """Convert a duration to the unit of the event-time column. Raises ConfigError if the duration is finer than the
    unit.
    """
    if time.kind.unit == "us" or time_us == 0:
        return time_us
    if time.kind.unit == "ns":
        return time_us * 1000
    if time_us % 1000:
        raise ConfigError(
            f"{what}: {time_us} µs is finer than the event time {time.column!r}, which is in milliseconds"
        )
    return time_us // 1000


def room_for(span: int, window: Window, time: EventTime, where: str) -> int:
    """Return `span` again. Raises ConfigError if it is so long that no event time could be processed with it."""
    if span > MAX_WATERMARK_US // 2:
        raise ConfigError(f"{where}: {window} are longer than event times of {time.kind} can be apart")
    return span


def clamp(time: int) -> int:
    return max(MIN_WATERMARK_US, min(MAX_WATERMARK_US, time))
