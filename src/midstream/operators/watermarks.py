"""Event time: which column it is, and how far it has come.

A watermark says that no row at or below it will follow. How far a split has come is the largest
event time seen of it, less the strategy's delay, less one microsecond (a row with that same time
may still come). Where the source is in the same task (see `Splits`), this holds:

    The watermark never passes how far any open split has come that is not idle; a split without a
    row has not come anywhere. It stands while a split that was found along with those that are being
    read, and does not follow all of them, waits to be handed out.

So a row is late only if it is more than the delay behind a row of its own split, or of a split that
was found after event time had passed it, or was idle. Splits that were read to the end hold nothing
back. Elsewhere there are no splits to tell apart, and the stream counts as one.

Nothing of this is in a checkpoint: after a restore a split has not come anywhere until its first
row, which can only make a watermark late; what was said before is in the chain's snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

import pyarrow as pa

from midstream.core.config import Duration, duration_us
from midstream.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.core.errors import ConfigError
from midstream.core.seams import Timer
from midstream.operators.base import Operator, OperatorContext, Output, Splits
from midstream.operators.event_time import EventTime

LATE_LOOK_S = 0.1
"""A timer that is later than this has waited for the task's output, not for its turn."""
NO_SPLIT: Final = -1
"""Stands for all rows where splits cannot be told apart, and for those read to the end while none is open."""


@dataclass(frozen=True, slots=True)
class WatermarkStrategy:
    """How far out of order rows may be, and when a silent input stops holding the others back.

    Make one with `monotonous()` or `bounded()`.
    """

    delay_us: int
    """Rows may come this much later than the latest one seen."""
    idle_after_us: int | None = None
    """Without rows for so long (wall clock) a split counts as idle, and a subtask all of whose splits do; None: never."""

    @staticmethod
    def monotonous(idle_after: Duration | None = None) -> WatermarkStrategy:
        """Event times never go back, within one split of the source."""
        return WatermarkStrategy.bounded(0, idle_after)

    @staticmethod
    def bounded(max_delay: Duration, idle_after: Duration | None = None) -> WatermarkStrategy:
        """A row is at most `max_delay` older than the newest row before it in its split; what is older is late."""
        strategy = WatermarkStrategy(
            delay_us=duration_us(max_delay, "max_delay"),
            idle_after_us=None if idle_after is None else duration_us(idle_after, "idle_after"),
        )
        if strategy.idle_after_us is not None and strategy.idle_after_us < 1000:
            raise ConfigError(f"idle_after: {idle_after!r} is too short; give at least 1 ms")
        return strategy


class SlowestSplit(NamedTuple):
    split: int
    come_us: int
    furthest_us: int
    """How far the split has come that has come furthest."""


class TimestampsOperator(Operator):
    """Makes `column` the event time of the stream and emits watermarks; the rows pass unchanged.

    Raises SchemaError at once when `schema` has no such column or it is not a timestamp, and
    JobError when a row has no event time.
    """

    makes_watermarks = True
    keeps_splits = True
    keeps_rows = True

    def __init__(self, name: str, column: str, strategy: WatermarkStrategy, schema: pa.Schema) -> None:
        self.schema = schema
        self._time = EventTime(column, schema, f"operator {name!r}")
        self._strategy = strategy
        self._watermark_us = MIN_WATERMARK_US
        self._come_us: dict[int, int] = {NO_SPLIT: MIN_WATERMARK_US}
        """How far each open split has come."""
        self._ended_us = MIN_WATERMARK_US
        """How far the furthest of those has come that were read to the end."""
        self._lowest_us = MIN_WATERMARK_US
        """At or above this is every split that is not idle."""
        self._idle_splits: set[int] = set()
        self._is_idle = False
        self._ended = False
        self._timer: Timer | None = None
        self._last_row_s: dict[int, float] = {}
        """By split; from when it was there if it has had none. Monotonic: the wall clock may be set."""
        self._look_s = 0.0
        """When the timer is to ring."""
        self._splits: Splits | None = None
        self._context: OperatorContext
        self._out: Output

    def open(self, context: OperatorContext, out: Output) -> None:
        self._context = context
        self._out = out
        self._splits = context.splits
        if self._splits is not None:
            self._splits.on_change(self._splits_changed)
        if self._strategy.idle_after_us is not None:
            self._last_row_s[NO_SPLIT] = context.clock.monotonic_s()
            self._watch(self._last_row_s[NO_SPLIT])

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if batch.num_rows == 0:
            return
        times = self._time.native(batch)
        split = NO_SPLIT if self._splits is None else self._splits.current
        if self._strategy.idle_after_us is not None:
            self._stir(split)
        self._out.emit(batch)
        come_us = self._time.to_us(int(times.max())) - self._strategy.delay_us - 1
        before_us = self._come_us[split]
        if come_us > before_us:
            self._come_us[split] = come_us
            if before_us <= self._lowest_us:
                self._advance()

    def advance_to(self, watermark_us: int) -> None:
        """Event time is at least there, whatever the rows have said; between two steps of the task."""
        if watermark_us > self._watermark_us:
            self._watermark_us = watermark_us
            self._out.watermark(watermark_us)

    def end_input(self, port: int) -> None:
        self._ended = True
        self._unwatch()

    def close(self) -> None:
        self._ended = True
        self._unwatch()

    def slowest_split(self) -> SlowestSplit | None:
        """The open split that holds event time back, of those that are not idle. None where splits are not told apart,
        and while a split that waits to be handed out does."""
        active = [
            (come_us, split) for split, come_us in self._come_us.items() if split not in self._idle_splits | {NO_SPLIT}
        ]
        if self._stands or not active:
            return None
        come_us, split = min(active)
        return SlowestSplit(split, come_us, max(max(active)[0], self._ended_us))

    # ---- splits ----

    @property
    def _stands(self) -> bool:
        return self._splits is not None and not self._splits.all_assigned

    def _advance(self) -> None:
        active = [come_us for split, come_us in self._come_us.items() if split not in self._idle_splits]
        if not active:
            self._lowest_us = MAX_WATERMARK_US
            return
        self._lowest_us = min(active)
        if self._lowest_us > self._watermark_us and not self._stands:
            self._watermark_us = self._lowest_us
            self._out.watermark(self._watermark_us)

    def _splits_changed(self) -> None:
        assert self._splits is not None
        now = set(self._splits.open)
        for split in self._come_us.keys() - now - {NO_SPLIT}:
            self._ended_us = max(self._ended_us, self._come_us[split])
            self._forget(split)
        for split in sorted(now - self._come_us.keys()):
            self._begin(split, MIN_WATERMARK_US)
        if now:
            self._forget(NO_SPLIT)
        elif NO_SPLIT not in self._come_us:
            self._begin(NO_SPLIT, self._ended_us)
        self._say_idle()
        self._advance()

    def _begin(self, split: int, come_us: int) -> None:
        self._come_us[split] = come_us
        if self._strategy.idle_after_us is not None:
            self._last_row_s[split] = self._context.clock.monotonic_s()
            if self._timer is None and not self._ended:
                self._watch(self._last_row_s[split])

    def _forget(self, split: int) -> None:
        self._come_us.pop(split, None)
        self._last_row_s.pop(split, None)
        self._idle_splits.discard(split)

    # ---- idleness ----

    def _say_idle(self) -> None:
        is_idle = not self._stands and self._idle_splits == self._come_us.keys()
        if is_idle is not self._is_idle:
            self._is_idle = is_idle
            self._out.idle(is_idle)

    def _stir(self, split: int) -> None:
        self._last_row_s[split] = self._context.clock.monotonic_s()
        if split in self._idle_splits:
            self._idle_splits.discard(split)
            self._lowest_us = min(self._lowest_us, self._come_us[split])
            self._say_idle()
            if self._timer is None:
                self._watch(self._last_row_s[split])

    def _watch(self, since_s: float) -> None:
        assert self._strategy.idle_after_us is not None
        clock = self._context.clock
        self._look_s = since_s + self._strategy.idle_after_us / 1e6
        delay_ms = max(1, ceil((self._look_s - clock.monotonic_s()) * 1000))
        self._timer = self._context.call_at(clock.now_ms() + delay_ms, self._check_idle)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_idle(self) -> None:
        """One timer runs at a time; it looks at every split, and sleeps until the next of them may be idle."""
        assert self._strategy.idle_after_us is not None
        self._timer = None
        if self._ended:
            return
        if self._splits is not None:
            self._splits_changed()  # the timer may come before the first step, with splits that were restored
        now_s, idle_after_s = self._context.clock.monotonic_s(), self._strategy.idle_after_us / 1e6
        again_s: list[float] = []
        for split, last_row_s in self._last_row_s.items():
            if split in self._idle_splits:
                continue
            if now_s < last_row_s + idle_after_s:
                again_s.append(last_row_s)
            elif self._is_starved(split, now_s, idle_after_s):
                # Rows may wait that the task could not take. They would be late if event time went on without them.
                again_s.append(now_s)
            else:
                self._idle_splits.add(split)
        if again_s:
            self._unwatch()
            self._watch(min(again_s))
        self._say_idle()
        self._advance()

    def _is_starved(self, split: int, now_s: float, idle_after_s: float) -> bool:
        if self._splits is not None and split != NO_SPLIT:
            return self._splits.is_starved(split, now_s - idle_after_s)
        return now_s > self._look_s + max(idle_after_s / 4, LATE_LOOK_S)  # for back-pressure
