"""Event time: which column holds it, and how far it has advanced.

A watermark states that no row at or below it follows. The progress of a split is the largest event time seen in it,
less the strategy's delay, less one microsecond (a row with that same time may still arrive). If the source is in the
same task (see `Splits`), this holds:

    The watermark never passes the progress of an open split that is not idle. A split without a row has none, unless its
    source knows the earliest time that a row may have: then that counts as seen. Nor does the watermark pass the progress
    of a split that waits to be assigned and was found together with those being read, unless each of these follows another.
    If the rows of a split may have any order and its source knows the earliest time, the progress stays there to its end.

So a row is late only if it is older than a row of its own split by more than the delay, or if its split was found after event
time had passed the row, or if its split was idle. A split that ends is never idle. One without an end is idle if no row
arrived for `idle_after`, and its source has reported since then that it has none. Splits that have been read to the end
hold nothing back. If the source is in another task, splits cannot be distinguished, and the whole stream counts as one
split.

Of this, checkpoints only have the latest event time of splits that are held to their end (`Split.latest_us`). After a
restore a split begins as one without a row, which can only delay a watermark; the watermarks emitted before are in the
chain's snapshot.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, NamedTuple

import pyarrow as pa

from midstream.engine.core.config import Duration, duration_text, duration_us, signed_duration_us
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US, Assigned
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.interfaces import Timer
from midstream.engine.operators.base import Operator, OperatorContext, Output, Splits
from midstream.engine.operators.event_time_column import EventTime

TIMER_DELAY_S_MAX = 0.1
"""A timer that fires later than this was delayed by backpressure, not by waiting for its turn."""
RECHECK_S_MIN, RECHECK_S_MAX = 0.001, 0.1
"""When a split without rows is examined again if its source has not reported yet that it has none."""
NO_SPLIT: Final = -1
"""Stands for all rows where splits cannot be distinguished, and for splits read to the end while none is open."""


@dataclass(frozen=True, slots=True)
class WatermarkStrategy:
    """How far out of order rows may be, and when a silent input stops holding back the others.

    Make one with `monotonous()` or `bounded()`.

        >>> WatermarkStrategy.bounded("5 s").delay_us
        5000000
    """

    delay_us: int
    """Rows may be this much older than the newest one seen."""
    idle_after_us: int | None = None
    """A split without an end that has no rows for this long (wall clock) is idle, and so is a subtask whose splits all
    are; None: never."""
    drift_us: int | None = None
    """No split is read further ahead of the slowest one than this; None: any distance."""

    @staticmethod
    def monotonous(idle_after: Duration | None = None, drift: Duration | None = None) -> WatermarkStrategy:
        """Return a strategy for event times that never decrease within one split of the source.

        `idle_after`: a split without an end that has no rows for this long (a duration, wall clock) no longer holds back
        event time; None for never.
        `drift`: as for `bounded`.

        Raises ConfigError for an invalid duration and for an `idle_after` of less than 1 ms.

            >>> visits = env.from_collection([{"user": "ann", "at": datetime(2024, 1, 1)}])
            >>> timed = visits.with_watermarks("at", WatermarkStrategy.monotonous())
        """
        return WatermarkStrategy.bounded(0, idle_after, drift)

    @staticmethod
    def bounded(
        max_delay: Duration, idle_after: Duration | None = None, drift: Duration | None = None
    ) -> WatermarkStrategy:
        """Return a strategy for rows that are not much older than the newest row before them in their split.

        `max_delay`: how much older they may be: a duration such as "5 s", a number of seconds, or a timedelta. Older
        rows are late.
        `idle_after`: a split without an end that has no rows for this long (a duration, wall clock) no longer holds back
        event time; None for never.
        `drift`: how far splits may be apart in event time, within the source and across all sources that have a drift and
        whose rows meet (a duration): a split further ahead of the slowest is not read until that has caught up. None for
        any distance.

        Raises ConfigError for an invalid duration, for an `idle_after` of less than 1 ms, and for a `drift` that is 0 or
        less than `max_delay`.

            >>> visits = env.from_collection([{"user": "ann", "at": datetime(2024, 1, 1)}])
            >>> timed = visits.with_watermarks("at", WatermarkStrategy.bounded("5 s", idle_after="1 min"))
        """
        strategy = WatermarkStrategy(
            delay_us=duration_us(max_delay, "max_delay"),
            idle_after_us=None if idle_after is None else duration_us(idle_after, "idle_after"),
        )
        if strategy.idle_after_us is not None and strategy.idle_after_us < 1000:
            raise ConfigError(f"idle_after: {idle_after!r} is too short; give at least 1 ms")
        return replace(strategy, drift_us=_drift_us(drift, max_delay, strategy.delay_us))


def _drift_us(drift: Duration | None, max_delay: Duration, delay_us: int) -> int | None:
    """Raises ConfigError for a drift with which splits would wait for each other all the time."""
    if drift is None:
        return None
    drift_us = signed_duration_us(drift, "drift")
    if drift_us <= 0:
        raise ConfigError(
            f"drift: {drift!r} would let no split be ahead of another; give a time such as '5 min', or leave drift out"
        )
    if drift_us < delay_us:
        raise ConfigError(
            f"drift: {drift!r} is less than max_delay={max_delay!r}: splits would wait for each other because of rows that "
            f"are merely out of order; give at least {duration_text(delay_us)}, such as '5 min' or more"
        )
    return drift_us


class SlowestSplit(NamedTuple):
    split: int
    reached_us: int
    furthest_us: int
    """The progress of the split that is furthest ahead."""


class TimestampsOperator(Operator):
    """Makes `column` the event time of the stream and emits watermarks; rows pass unchanged.

    Raises SchemaError immediately if `schema` has no such column or it is not a timestamp, and JobError for a row without
    an event time.
    """

    makes_watermarks = True
    keeps_splits = True
    keeps_rows = keeps_every_row = True

    def __init__(self, name: str, column: str, strategy: WatermarkStrategy, schema: pa.Schema) -> None:
        self.schema = schema
        self._time = EventTime(column, schema, f"operator {name!r}")
        self.strategy = strategy
        self._idle_after_s = None if strategy.idle_after_us is None else strategy.idle_after_us / 1e6
        """None: no split is ever idle, which includes every split of a job's bounded sources."""
        self._watermark_us = MIN_WATERMARK_US
        self._reached_us: dict[int, int] = {NO_SPLIT: MIN_WATERMARK_US}
        """The progress of each open split."""
        self._latest_us: dict[int, int | None] = {}
        """The latest event time so far of each open split that is held to its end."""
        self._ended_us = MIN_WATERMARK_US
        """The progress of the furthest split that was read to the end."""
        self._lowest_us = MIN_WATERMARK_US
        """Every split that is not idle is at or above this time."""
        self._idle_splits: set[int] = set()
        self._is_idle = False
        self._assigned: Assigned = ()
        """The splits of which the last status was emitted."""
        self._ended = False
        self._timer: Timer | None = None
        self._last_row_s: dict[int, float] = {}
        """The time of each split's last row, or of its assignment. Monotonic, since the wall clock may be set."""
        self._newest_row_s = 0.0
        """The time of the last row of all, or of `open`: a subtask is not active only because it is assigned splits."""
        self._check_s = 0.0
        """When the timer is due."""
        self._splits: Splits | None = None
        self._context: OperatorContext
        self._out: Output

    @property
    def column(self) -> str:
        return self._time.column

    def input_column(self, name: str) -> str | None:
        return name

    def columns_needed(self, wanted: frozenset[str]) -> frozenset[str]:
        return wanted | {self.column}

    def narrowed(self, columns: frozenset[str]) -> TimestampsOperator:
        made = copy(self)
        made.schema = pa.schema([field for field in self.schema if field.name in columns])
        return made

    def open(self, context: OperatorContext, out: Output) -> None:
        self._context = context
        self._out = out
        self._splits = context.splits
        if self._splits is not None:
            self._splits.on_change(self._splits_changed)
            if self.strategy.drift_us is not None:
                self._splits.limit_drift(self, self.strategy.drift_us)
        if context.is_bounded:
            self._idle_after_s = None
        if self._idle_after_s is not None:
            self._newest_row_s = self._last_row_s[NO_SPLIT] = context.clock.monotonic_s()
            self._start_timer(self._newest_row_s + self._idle_after_s)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if batch.num_rows == 0:
            return
        times = self._time.native(batch)
        parts = ((NO_SPLIT, len(times)),) if self._splits is None else self._splits.current
        if self._idle_after_s is not None:
            for split, _ in parts:
                self._wake(split)
        self._out.emit(batch)
        may_advance, end = False, 0
        for split, rows in parts:
            first, end = end, end + rows if len(parts) > 1 else len(times)  # of one split, rows may be missing
            latest_us = self._time.to_us(int(times[first:end].max()))
            if split in self._latest_us:
                self._note_latest(split, latest_us)
                continue
            reached_us = self._progress_us(latest_us)
            before_us = self._reached_us[split]
            if reached_us > before_us:
                self._reached_us[split] = reached_us
                may_advance = may_advance or before_us <= self._lowest_us
        if may_advance:
            self._advance()

    def advance_to(self, watermark_us: int) -> None:
        """Raise event time to at least this watermark, regardless of rows; called between two steps of the task."""
        if watermark_us > self._watermark_us:
            self._watermark_us = watermark_us
            self._out.watermark(watermark_us)

    def end_input(self, port: int) -> None:
        self._ended = True
        self._stop_timer()

    def close(self) -> None:
        self._ended = True
        self._stop_timer()

    def slowest_split(self) -> SlowestSplit | None:
        """Return the open split that holds back event time, among those that are not idle.

        None if splits are not distinguished, and while a split that waits to be assigned holds it back.
        """
        active = [
            (reached_us, split)
            for split, reached_us in self._reached_us.items()
            if split not in self._idle_splits | {NO_SPLIT}
        ]
        if self._is_held_back or not active:
            return None
        reached_us, split = min(active)
        return SlowestSplit(split, reached_us, max(max(active)[0], self._ended_us))

    # ---- splits ----

    def progress_us(self, split: int) -> int:
        return max(self._reached_us.get(split, MIN_WATERMARK_US), self._watermark_us)

    def _progress_us(self, latest_us: int) -> int:
        return latest_us - self.strategy.delay_us - 1

    def _note_latest(self, split: int, time_us: int) -> None:
        assert self._splits is not None
        before_us = self._latest_us[split]
        if before_us is None or time_us > before_us:
            self._latest_us[split] = time_us
            self._splits.note_latest_us(split, time_us)

    @property
    def _is_held_back(self) -> bool:
        return self._splits is not None and self._splits.waiting_from_us < MAX_WATERMARK_US

    def _delayed_us(self, held_back_at_us: int) -> int:
        """Return the progress of a split before its first row: as if the earliest row that it may have had come.

        So the delay also holds between its rows and those of splits that are found later.
        """
        return held_back_at_us if held_back_at_us == MIN_WATERMARK_US else held_back_at_us - self.strategy.delay_us

    def _advance(self) -> None:
        active = [reached_us for split, reached_us in self._reached_us.items() if split not in self._idle_splits]
        if not active:
            self._lowest_us = MAX_WATERMARK_US
            return
        self._lowest_us = min(active)
        watermark_us = self._lowest_us
        if self._splits is not None and self._is_held_back:
            watermark_us = min(watermark_us, self._delayed_us(self._splits.waiting_from_us))
        if watermark_us > self._watermark_us:
            self._watermark_us = watermark_us
            self._out.watermark(watermark_us)

    def _splits_changed(self) -> None:
        assert self._splits is not None
        now = set(self._splits.open)
        for split in self._reached_us.keys() - now - {NO_SPLIT}:
            latest_us = self._latest_us.pop(split, None)
            reached_us = self._reached_us[split] if latest_us is None else self._progress_us(latest_us)
            self._ended_us = max(self._ended_us, reached_us)
            self._forget(split)
        for split in sorted(now - self._reached_us.keys()):
            self._begin(split, self._delayed_us(self._splits.held_back_at_us(split)))
            if self._splits.is_held_to_its_end(split):
                self._latest_us[split] = self._splits.latest_us(split)
        if now:
            self._forget(NO_SPLIT)
        elif NO_SPLIT not in self._reached_us:
            self._begin(NO_SPLIT, self._ended_us)
        if self._idle_after_s is not None and not now and self._has_none(NO_SPLIT, self._context.clock.monotonic_s()):
            self._idle_splits.add(NO_SPLIT)
        self._emit_idleness()
        self._advance()

    def _begin(self, split: int, reached_us: int) -> None:
        self._reached_us[split] = reached_us
        if self._idle_after_s is None:
            return
        self._last_row_s[split] = self._newest_row_s if split == NO_SPLIT else self._context.clock.monotonic_s()
        check_s = self._last_row_s[split] + self._idle_after_s
        if not self._ended and (self._timer is None or check_s < self._check_s):
            self._start_timer(check_s)

    def _forget(self, split: int) -> None:
        self._reached_us.pop(split, None)
        self._last_row_s.pop(split, None)
        self._idle_splits.discard(split)

    # ---- idleness ----

    def _emit_idleness(self) -> None:
        """Emit whether the task is idle, and the splits that are assigned, before any watermark that depends on these."""
        is_idle = not self._is_held_back and self._idle_splits == self._reached_us.keys()
        assigned = self._assigned if self._splits is None or self._idle_after_s is None else self._splits.assigned
        if is_idle is not self._is_idle or assigned != self._assigned:
            self._is_idle, self._assigned = is_idle, assigned
            self._out.idle(is_idle, assigned)

    def _wake(self, split: int) -> None:
        assert self._idle_after_s is not None
        now_s = self._newest_row_s = self._last_row_s[split] = self._context.clock.monotonic_s()
        if split in self._idle_splits:
            self._idle_splits.discard(split)
            self._lowest_us = min(self._lowest_us, self._reached_us[split])
            self._emit_idleness()
            if self._timer is None:
                self._start_timer(now_s + self._idle_after_s)

    def _start_timer(self, check_s: float) -> None:
        self._stop_timer()
        clock = self._context.clock
        self._check_s = check_s
        delay_ms = max(1, ceil((check_s - clock.monotonic_s()) * 1000))
        self._timer = self._context.call_later(delay_ms / 1000, self._check_idle)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_idle(self) -> None:
        """Check every split; the one timer then sleeps until the next of them may become idle."""
        assert self._idle_after_s is not None
        self._timer = None
        if self._ended:
            return
        if self._splits is not None:
            self._splits_changed()  # the timer may fire before the first step, before restored splits are available
        now_s, recheck_s = self._context.clock.monotonic_s(), self._idle_after_s
        if self._splits is not None:
            recheck_s = min(max(recheck_s / 4, RECHECK_S_MIN), RECHECK_S_MAX)
        checks_s: list[float] = []
        for split, last_row_s in self._last_row_s.items():
            if split in self._idle_splits:
                continue
            if self._has_none(split, now_s):
                self._idle_splits.add(split)
            else:
                # A split may have rows that the task could not read yet. They would be late if event time advanced.
                due_s = last_row_s + self._idle_after_s
                checks_s.append(due_s if now_s < due_s else now_s + recheck_s)
        if checks_s:
            self._start_timer(min(checks_s))
        self._emit_idleness()
        self._advance()

    def _has_none(self, split: int, now_s: float) -> bool:
        """Whether the split is known to have had no rows for as long as it takes to be idle."""
        assert self._idle_after_s is not None
        due_s = self._last_row_s[split] + self._idle_after_s
        if now_s < due_s:
            return False
        if self._splits is None:
            return now_s <= self._check_s + max(
                self._idle_after_s / 4, TIMER_DELAY_S_MAX
            )  # or backpressure delays the timer
        if split == NO_SPLIT:
            return self._splits.none_waits
        return self._splits.quiet_until_s(split) >= due_s
