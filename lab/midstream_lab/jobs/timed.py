"""The parts of a simulated job that depend on event time, designed so that results can be checked row by row.

Which rows are late depends on the order of everything; the places where each row must be found do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.core.arrow_types import is_list_array
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US, Assigned
from midstream.engine.operators.base import Operator, OperatorContext, Output
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction, ProcessContext
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.functions.window_functions import (
    WindowContext,
    WindowFunction,
    window_function_operator,
)
from midstream.engine.operators.row_conversion import Row
from midstream.engine.operators.watermarks import TimestampsOperator, WatermarkStrategy
from midstream.engine.operators.windows.aggregates import Aggregate, Columns, Max, Min
from midstream.engine.operators.windows.window_factory import Window, session, sliding, tumbling, window_operator
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream.engine.state.keyed_states import MapState
from midstream.engine.worker.source_reader import SourceReader, SplitRequestState
from midstream.simulation.outside import SOURCE_IDS, SPLIT_IDS
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside

Integers = TypeVar("Integers", int, npt.NDArray[np.int64])
"""One time, or several."""

TUMBLING_MS: Final = 40
SIZE_MS: Final = 30
SLIDE_MS: Final = 10
GAP_MS: Final = 4
IDS: Final = "ids:ids"
"""The column with the ids of the rows in a window operator's state, and in combined batches."""
ROW_IDS: Final = "__rows:id"
"""The same if the state is the rows themselves: the column with their ids."""
LOWEST: Final = "lowest"
HIGHEST: Final = "highest"
WINDOWS: Final[Mapping[str, Window]] = {
    "window": tumbling(f"{TUMBLING_MS} ms"),
    "slide": sliding(f"{SIZE_MS} ms", f"{SLIDE_MS} ms"),
    "session": session(f"{GAP_MS} ms"),
}


def due_us(kind: str, end_us: Integers) -> Integers:
    """Return the watermark at which a window with this end is due.

    A row exactly at the end of a session belongs to it; one at the end of a window of fixed size does not.
    """
    return end_us if kind == "session" else end_us - 1


STRATEGIES: Final[Mapping[str, WatermarkStrategy]] = {
    "times": WatermarkStrategy.bounded("5 s"),
    "tight": WatermarkStrategy.bounded("2 ms"),
    "idle": WatermarkStrategy.bounded("2 ms", idle_after="1 ms"),
}
SLACK_US: Final = 10_000
"""How long after `idle_after` a subtask may become idle, as its clock is read only so often."""
WAITING: Final = "waiting"
"""The state of `Delay` that holds rows."""
DELAY_US: Final = 6_999
"""The delay of timers. Watermarks end in 999 µs as well, so a timer may be due exactly at a watermark."""
_DELAY: Final = timedelta(microseconds=DELAY_US)
_STEP: Final = timedelta(milliseconds=1)


class Timestamps(TimestampsOperator):
    """Checks that event time passes no split that is being read and cannot be idle, and stands still for no other.

    A split can be idle if its source has no end and its splits have none, and no row of it came for `idle_after`. A
    subtask without splits is idle as soon as none waits for it and no row of any came for `idle_after`.
    """

    def __init__(self, uid: str, kind: str, outside: Outside) -> None:
        super().__init__(uid, "ts", STRATEGIES[kind], SCHEMA)
        self.splits_end = False
        """Whether the splits of the source in the same task end."""
        self._outside = outside
        self.reported: Assigned = ()
        """The splits of which the last status is."""
        self._rule = STRATEGIES[kind]
        self._begun_us: dict[int, int] = {}
        """When each split was assigned."""
        self._read: dict[int, tuple[int, int]] = {}
        """The time of each split's latest row, and when it last had rows.

        The latter is in the world's time, since reading the clock of a process may take time.
        """

    def open(self, context: OperatorContext, out: Output) -> None:
        self._newest_us = self._outside.world.now_us
        """When the last row of any split came."""
        super().open(context, _Watched(self, out))

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if batch.num_rows:
            parts = ((0, batch.num_rows),) if self._splits is None else self._splits.current
            times_us = batch.column("ts").view(pa.int64()).to_numpy()
            self._newest_us, first = self._outside.world.now_us, 0
            for split, rows in parts:
                self._check_split(split, batch.slice(first, rows))
                latest_us = int(times_us[first : first + rows].max())
                self._read[split] = max(latest_us, self._read.get(split, (0, 0))[0]), self._newest_us
                first += rows
        super().process(batch, port)
        self._check_timer()

    def _check_split(self, split: int, rows: pa.RecordBatch) -> None:
        """Check that rows are of the split that the source says; their ids tell."""
        if not isinstance(self._splits, SourceReader):
            return
        name = self._splits.split_id(split)
        found = {
            f"{i // SOURCE_IDS}-{i % SOURCE_IDS // SPLIT_IDS}" for i in rows.column("id").to_numpy().tolist() if i >= 0
        }
        if name is not None and found - {name}:
            self._bug(f"rows of {sorted(found)} count as rows of split {name}")

    def _splits_changed(self) -> None:
        assert self._splits is not None
        for split in self._splits.open:
            self._begun_us.setdefault(split, self._outside.world.now_us)
        super()._splits_changed()
        self._check_not_held_back()

    def _check_idle(self) -> None:
        super()._check_idle()
        if not self._ended:
            self._check_not_held_back()
            self._check_open_splits()
            self._check_timer()

    def _check_not_held_back(self) -> None:
        """Check that what may be idle is, once its source has reported for long enough that it has no rows."""
        idle_after_us, splits = self._rule.idle_after_us, self._splits
        if idle_after_us is None or self._context.is_bounded or splits is None:
            return
        if splits.assigned != self.reported:
            self._bug(f"consumers know of {self.reported} splits, of which {splits.assigned} are assigned")
        if self._is_idle:
            return
        if splits.waiting_from_us == MAX_WATERMARK_US and not list(splits.open) and splits.none_waits:
            silent_us = self._outside.world.now_us - self._newest_us
            if silent_us > idle_after_us + SLACK_US:
                self._bug(f"no row came for {silent_us} µs, no split is left, and it holds event time back")

    def _check_open_splits(self) -> None:
        """Check the same of splits that are open, right after each of them was examined."""
        idle_after_us, splits = self._rule.idle_after_us, self._splits
        if idle_after_us is None or self._context.is_bounded or self.splits_end or not isinstance(splits, SourceReader):
            return
        for current in splits._splits:
            read_us, _ = getattr(current.reader, "without_rows_us", (0, 0))  # of two such reads the first was processed
            begun_us = self._begun_us.get(current.number, self._outside.world.now_us)
            _, came_us = self._read.get(current.number, (0, begun_us))
            if read_us > came_us + idle_after_us + SLACK_US and current.number not in self._idle_splits:
                self._bug(
                    f"split {current.split.id} had no rows after {came_us} µs, nor at {read_us} µs, and is not idle"
                )

    def _check_timer(self) -> None:
        """Check that splits which hold event time back are examined again."""
        has_timer = self._timer is not None or self._rule.idle_after_us is None or self._context.is_bounded
        if not has_timer and not self._idle_splits >= self._reached_us.keys():
            self._bug("splits hold event time back, and nothing will notice that they are idle")

    def _bug(self, what: str) -> None:
        self._outside.world.bug(f"{self._context.uid}/{self._context.subtask}: {what}")

    def check(self, watermark_us: int | None) -> None:
        """Check a watermark, or the report that all splits are idle, for which `watermark_us` is None."""
        now_us, idle_after_us = self._outside.world.now_us, self._rule.idle_after_us
        may_be_idle = idle_after_us is not None and not (self._context.is_bounded or self.splits_end)
        if watermark_us is None and isinstance(self._splits, SourceReader) and not list(self._splits.open):
            if self._splits._request_state is SplitRequestState.MAY_REQUEST:
                self._bug("it is idle between two splits, and has not requested the next one")
        for split in (0,) if self._splits is None else self._splits.open:
            if split not in self._read and (may_be_idle or self._splits is None):
                continue
            latest_us, came_us = self._read.get(split, (MIN_WATERMARK_US, now_us))
            first_us = MIN_WATERMARK_US if self._splits is None else self._splits.held_back_at_us(split) + 1
            if may_be_idle and idle_after_us is not None and now_us >= came_us + idle_after_us:
                continue
            if self._may_be_as_early(split) and first_us > MIN_WATERMARK_US + 1:
                latest_us = first_us
            if watermark_us is None or watermark_us >= max(latest_us, first_us) - self._rule.delay_us:
                self._bug(
                    f"{'all splits are idle' if watermark_us is None else f'event time is {watermark_us}'}, and a split "
                    f"that has come to {latest_us} had rows {now_us - came_us} µs ago"
                )

    def _may_be_as_early(self, split: int) -> bool:
        """Whether the rows of a split may have any order until it ends."""
        if not isinstance(self._splits, SourceReader) or self._splits.split_id(split) is None:
            return False
        source = self._splits._source
        return source.splits_unordered and (source.bounded or source.splits_end)


class _Watched(Output):
    """The output of `Timestamps`."""

    def __init__(self, operator: Timestamps, out: Output) -> None:
        self._operator = operator
        self._out = out

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        self._out.emit(batch, tag)

    def watermark(self, watermark_us: int) -> None:
        self._operator.check(watermark_us)
        self._out.watermark(watermark_us)

    def idle(self, idle: bool, assigned: Assigned = ()) -> None:
        if idle:
            self._operator.check(None)
        self._operator.reported = assigned
        self._out.idle(idle, assigned)


def timestamps(uid: str, kind: str, outside: Outside) -> Timestamps:
    return Timestamps(uid, kind, outside)


def window(
    uid: str, kind: str, allowed_lateness: str = "0 ms", *, combines: bool = False, emit_every: str = "0 ms"
) -> WindowOperator:
    """Return a window operator that emits the ids of the rows of each window, as a list.

    `combines`: also the lowest and the highest of them, which a combiner merges.
    """
    bounds = {LOWEST: Min("id"), HIGHEST: Max("id")} if combines else {}
    return window_operator(
        uid,
        window=WINDOWS[kind],
        keys=["key"],
        event_time="ts",
        aggregates={"ids": Ids(), **bounds},
        schema=SCHEMA,
        allowed_lateness=allowed_lateness,
        emit_every=emit_every,
    )


GAPS_SCHEMA: Final = SCHEMA.append(pa.field("gap", pa.duration("ms")))
"""Rows, each with the gap of its session."""


def gap_ms(row: Integers) -> Integers:
    """Return the gap of a row in `GAPS_SCHEMA`."""
    return 1 + row % 7


def window_of_gaps(uid: str, allowed_lateness: str) -> WindowOperator:
    """Return a window operator of rows of `GAPS_SCHEMA`, whose sessions have the gaps of the rows."""
    return window_operator(
        uid,
        window=session(pl.col("gap")),
        keys=["key"],
        event_time="ts",
        aggregates={"ids": Ids()},
        schema=GAPS_SCHEMA,
        allowed_lateness=allowed_lateness,
    )


class IdsOfRows(WindowFunction):
    """Emits what `Ids` computes, for windows whose state is their rows."""

    def process(self, rows: pl.DataFrame, ctx: WindowContext) -> pl.DataFrame:
        assert rows["ts"].is_sorted() and rows["key"].unique().to_list() == [ctx.key], rows
        return rows.select(pl.col("id").implode().alias("ids"))


def window_of_rows(uid: str, kind: str, allowed_lateness: str) -> WindowOperator:
    """Return a window operator that emits what `window` does, by a function that gets the rows of each window."""
    return window_function_operator(
        uid,
        window=WINDOWS[kind],
        keys=["key"],
        event_time="ts",
        function=IdsOfRows(),
        made=pa.schema([("ids", pa.large_list(pa.int64()))]),
        schema=SCHEMA,
        allowed_lateness=allowed_lateness,
    )


class Ids(Aggregate):
    columns = ("id",)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"ids": pl.col("id").implode()}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {"ids": part("ids").explode().implode()}

    def finish(self, part: Columns) -> pl.Expr:
        return part("ids")


class Pack(Operator):
    """Emits one row for each row of each window, with its `id` and `key`. `ts` is the start of the window, `sequence`
    its end in microseconds, and `n` its start in milliseconds, plus 1.
    """

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        ids = batch.column("ids")
        assert is_list_array(ids)
        counts = ids.value_lengths().to_numpy()
        rows = ids.flatten()
        start_us, end_us = (batch.column(f"window_{name}").view(pa.int64()).to_numpy() for name in ("start", "end"))
        columns = [
            rows,
            pa.array(np.repeat(batch.column("key").to_numpy(), counts)),
            pa.array(np.repeat(end_us, counts)),
            pa.array(np.repeat(start_us, counts)).view(pa.timestamp("us")),
            pa.array(np.repeat(start_us // 1000 + 1, counts)),
            pa.array([""] * len(rows), pa.large_string()),
        ]
        self._out.emit(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


class Delay(KeyedProcessFunction):
    """Holds every row until event time is `DELAY_US` past it. A timer that was deleted must never fire."""

    waiting: MapState[datetime, list[Row]] = MapState()

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def process(self, row: Row, ctx: ProcessContext) -> None:
        self._outside.work(1)
        self._outside.check_poison([row["id"]])
        at = row["ts"] + _DELAY
        self.waiting[at] = [*self.waiting.get(at, []), row]
        ctx.timers.event_time(at)
        other = at + _STEP
        if row["id"] % 5 == 0 and other not in self.waiting:
            ctx.timers.event_time(other)
            ctx.timers.delete_event_time(other)

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Iterator[Row]:
        self._outside.work(1)
        if time not in self.waiting:
            self._outside.world.bug(f"a timer of key {ctx.key} fires at {time}, where nothing waits")
            return
        watermark = ctx.watermark
        if watermark < time:
            self._outside.world.bug(f"a timer of {time} fires when event time has come to {watermark}")
        yield from self.waiting.pop(time)


def delay(uid: str, outside: Outside) -> ProcessOperator:
    return ProcessOperator(uid, Delay(outside), [Port("process", ("key",), "ts", SCHEMA)], SCHEMA, {})
