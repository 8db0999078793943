"""The context of a process function: key, times, timers, side outputs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.errors import JobError
from midstream.engine.core.interfaces import Clock
from midstream.engine.operators.row_conversion import Row
from midstream.engine.operators.user_metrics import UserMetrics
from midstream.engine.state.keyed_states import KeyScope
from midstream.engine.state.timers import TimerQueue

_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def instant_us(at: Any) -> int:
    """Convert a datetime (UTC if it has no zone) or an int to microseconds since the epoch. Raises JobError for others."""
    if type(at) is datetime or (
        isinstance(at, datetime) and not getattr(at, "nanosecond", 0)
    ):  # a pandas Timestamp may have nanoseconds, and so may NaT
        return (at - (_EPOCH if at.tzinfo is None else _EPOCH_UTC)) // _MICROSECOND
    if isinstance(at, int) and not isinstance(at, bool) and MIN_WATERMARK_US <= at <= MAX_WATERMARK_US:
        return at
    raise JobError(f"{at!r} is not a time; give a datetime, or an integer of microseconds since 1970")


class Calendar:
    """Converts times to datetimes that can be compared with those in the rows: naive, or aware if the event time has a
    zone.

    Aware ones are in UTC and not in the stream's zone: Python adds to a datetime by wall clock, so a timer "in an hour"
    would be off by an hour when daylight saving time begins or ends.
    """

    def __init__(self, aware: bool) -> None:
        self._epoch = _EPOCH_UTC if aware else _EPOCH

    def datetime(self, time_us: int) -> datetime:
        """Convert a time. Those beyond the years 1 to 9999 become the first or last instant that a datetime can hold."""
        try:
            return self._epoch + _MICROSECOND * time_us  # takes half as long as timedelta(microseconds=time_us)
        except OverflowError:
            return (datetime.max if time_us > 0 else datetime.min).replace(tzinfo=self._epoch.tzinfo)


class ContextTimers:
    """See `process_functions.Timers`. `changed` is called when a processing-time timer is set.

    While `held` is a list, calls wait in it until `release`.

    After the end of processing time (`has_ended`) no processing-time timer is set; attempts to set one are counted in
    `processing.dropped`.
    """

    def __init__(self, scope: KeyScope, changed: Callable[[], None]) -> None:
        self.event = TimerQueue()
        self.processing = TimerQueue()
        self.has_ended = False
        self.held: list[tuple[Callable[[int, Any], None], int, Any]] | None = None
        self._scope = scope
        self._changed = changed

    def event_time(self, at: Any) -> None:
        self._call(self.event.add, instant_us(at))

    def processing_time(self, at: Any) -> None:
        self._call(self._add_processing, instant_us(at))

    def delete_event_time(self, at: Any) -> None:
        self._call(self.event.delete, instant_us(at))

    def delete_processing_time(self, at: Any) -> None:
        self._call(self.processing.delete, instant_us(at))

    def release(self) -> None:
        """Do what was held, in order."""
        held, self.held = self.held, None
        for change, time_us, key in held or ():
            change(time_us, key)

    def _call(self, change: Callable[[int, Any], None], time_us: int) -> None:
        if self.held is None:
            change(time_us, self._key())
        else:
            self.held.append((change, time_us, self._key()))

    def _add_processing(self, time_us: int, key: Any) -> None:
        if self.has_ended:
            self.processing.drop(time_us, key)
            return
        self.processing.add(time_us, key)
        self._changed()

    def _key(self) -> Any:
        if not self._scope.is_set:
            raise JobError(
                "timers belong to a key, and this stream is not keyed; key the stream with key_by() first (by a column with one "
                "value for timers of the whole stream)"
            )
        return self._scope.key


class TimeContext:
    """The event time, the wall clock, and metrics; the operator sets `watermark_us`."""

    def __init__(self, calendar: Calendar, clock: Clock, metrics: UserMetrics) -> None:
        self.watermark_us = MIN_WATERMARK_US
        self.metrics = metrics
        self._calendar = calendar
        self._clock = clock

    @property
    def watermark(self) -> datetime:
        return self._calendar.datetime(self.watermark_us)

    @property
    def now(self) -> datetime:
        return self._calendar.datetime(self._clock.now_ms() * 1000)


class Context(TimeContext):
    """See `process_functions.ProcessContext`. One per operator; the operator sets `time_us` before each call."""

    def __init__(
        self,
        scope: KeyScope,
        shown: Callable[[Any], Any],
        timers: ContextTimers,
        calendar: Calendar,
        clock: Clock,
        metrics: UserMetrics,
        side_output: Callable[[str, Row], None],
    ) -> None:
        super().__init__(calendar, clock, metrics)
        self.timers = timers
        self.side_output = side_output
        self.time_us: int | None = None
        self._scope = scope
        self._shown = shown

    @property
    def key(self) -> Any:
        return self._shown(self._scope.key)

    @property
    def timestamp(self) -> datetime | None:
        return None if self.time_us is None else self._calendar.datetime(self.time_us)
