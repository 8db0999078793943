"""Process functions: they process one row at a time, with state and timers per key.

    class CountVisits(KeyedProcessFunction):
        count = ValueState(default=0)
        pages = MapState()

        def process(self, row, ctx):
            self.count.value += 1
            self.pages[row["page"]] = self.pages.get(row["page"], 0) + 1
            ctx.timers.event_time(ctx.timestamp + timedelta(minutes=30))
            yield {"user": ctx.key, "visits": self.count.value}

        def on_timer(self, time, ctx):
            self.count.clear()

Only states declared on the class are in a checkpoint. `process`, `on_timer` and the like return or yield
rows (dicts): one dict, an iterable of dicts, or None. A row is copied when it is returned or yielded, with
the lists and dicts in it (such as a state's own), so later changes of them do not change the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Protocol, TypeAlias

from midstream.engine.operators.functions.function_operator import Function
from midstream.engine.operators.row_conversion import Row
from midstream.engine.operators.user_metrics import UserMetrics

Result: TypeAlias = "Row | Iterable[Row] | None"
Instant: TypeAlias = "datetime | int"
"""A datetime (UTC if it has no zone), or int64 microseconds since the epoch."""


class Timers(Protocol):
    """Timers of the current key. Setting one that is set, or deleting one that is not, has no effect.

    A time is a datetime (UTC if it has no zone), or an integer of microseconds since 1970. Other values, and calls
    without a current key, raise JobError.

        def process(self, row, ctx):
            ctx.timers.event_time(ctx.timestamp + timedelta(minutes=30))
    """

    def event_time(self, at: Instant) -> None:
        """Call `on_timer` once the watermark has reached a time; if it has already, with the next watermark.

        `at`: a datetime (UTC if it has no zone), or microseconds since 1970.

            >>> class Reminder(KeyedProcessFunction):
            ...     def process(self, row, ctx):
            ...         ctx.timers.event_time(row["at"] + timedelta(hours=1))
            ...     def on_timer(self, time, ctx):
            ...         return {"user": ctx.key, "at": time}
            >>> reminder = testing.harness(Reminder(), clicks.schema, clicks.schema, key="user", event_time="at")
            >>> _ = reminder.process({"user": "ann", "at": "2024-01-01 12:00"})
            >>> [str(row["at"]) for row in reminder.advance_to("2024-01-01 13:00")]
            ['2024-01-01 13:00:00']
        """
        ...

    def processing_time(self, at: Instant) -> None:
        """Call `on_timer` once the wall clock has reached a time.

        `at`: a datetime (UTC if it has no zone), or microseconds since 1970.

            def process(self, row, ctx):
                ctx.timers.processing_time(ctx.now + timedelta(minutes=5))
        """
        ...

    def delete_event_time(self, at: Instant) -> None:
        """Delete an event-time timer of the current key.

        `at`: the time that it was set for.

            def process(self, row, ctx):
                ctx.timers.delete_event_time(self.deadline.value)
        """
        ...

    def delete_processing_time(self, at: Instant) -> None:
        """Delete a processing-time timer of the current key.

        `at`: the time that it was set for.

            def process(self, row, ctx):
                ctx.timers.delete_processing_time(self.deadline.value)
        """
        ...


class ProcessContext(Protocol):
    """The key, times, timers and side outputs of a process function. Valid during the call only.

    For example:

        def process(self, row, ctx):
            if ctx.timestamp <= ctx.watermark:
                ctx.side_output("late", row)
                ctx.metrics.counter("late").inc()
            else:
                ctx.timers.event_time(ctx.timestamp + timedelta(hours=1))
    """

    @property
    def key(self) -> Any:
        """The key's value; a tuple if there are several key columns; None on a stream without keys."""
        ...

    @property
    def timestamp(self) -> datetime | None:
        """Event time of the row, or of the timer that fires; None if the stream has no event time."""
        ...

    @property
    def watermark(self) -> datetime:
        """The current event time: `datetime.min` until the first watermark since a start, `datetime.max` at the end."""
        ...

    @property
    def now(self) -> datetime:
        """The wall clock in UTC, to the millisecond."""
        ...

    @property
    def timers(self) -> Timers:
        """The timers of the current key."""
        ...

    @property
    def metrics(self) -> UserMetrics:
        """Counters and gauges of the function, for the job's status, its page and `/metrics`."""
        ...

    def side_output(self, tag: str, row: Row) -> None:
        """Emit a row apart from the main output.

        `tag`: one of the names that `side_outputs=` of `process` declares.
        `row`: a dict with the columns that are declared for it.

            >>> class Sorted(KeyedProcessFunction):
            ...     def process(self, row, ctx):
            ...         if row["price"] < 4:
            ...             ctx.side_output("cheap", row)
            ...         else:
            ...             return row
            >>> made = orders.key_by("user").process(Sorted(), orders.schema, side_outputs={"cheap": orders.schema})
            >>> testing.run(made)["cheap"]
            [{'user': 'ann', 'price': 3}]
        """
        ...


class ProcessFunction(Function):
    """A function on the rows of a stream without keys, with side outputs and metrics; it has neither states nor timers.

    `process` returns or yields rows as dicts, or returns None. A row is emitted as it was when it was returned.

        >>> class Parsed(ProcessFunction):
        ...     def process(self, row, ctx):
        ...         if row["user"] == "bob":
        ...             ctx.metrics.counter("of_bob").inc()
        ...             ctx.side_output("bob", row)
        ...         else:
        ...             return row
        >>> made = orders.process(Parsed(), orders.schema, side_outputs={"bob": orders.schema})
        >>> testing.run(made)["bob"]
        [{'user': 'bob', 'price': 5}]
    """

    def process(self, row: Row, ctx: ProcessContext) -> Result:
        """Process one row.

        `row`: a dict with the columns of the stream.
        `ctx`: the times, metrics and side outputs; valid during the call only.

        Return or yield rows as dicts with the columns of the output, or return None.

            def process(self, row, ctx):
                return {"user": row["user"], "seen": ctx.now}
        """
        raise NotImplementedError


class KeyedProcessFunction(Function):
    """A function on the rows of a keyed stream, with states and timers per key.

    Only states declared on the class are in a checkpoint. Methods return or yield rows as dicts, or return None. A row
    is emitted as it was when it was returned.

        >>> class FirstOnly(KeyedProcessFunction):
        ...     seen = ValueState(default=False)
        ...     def process(self, row, ctx):
        ...         if not self.seen.value:
        ...             self.seen.value = True
        ...             ctx.timers.event_time(row["at"] + timedelta(hours=1))
        ...             return row
        ...     def on_timer(self, time, ctx):
        ...         self.seen.clear()
        >>> firsts = clicks.key_by("user").process(FirstOnly(), clicks.schema)
        >>> len(testing.run(firsts).rows)
        1
    """

    def process(self, row: Row, ctx: ProcessContext) -> Result:
        """Process one row.

        `row`: a dict with the columns of the stream.
        `ctx`: the key, times, timers and side outputs; valid during the call only.

        Return or yield rows as dicts with the columns of the output, or return None.

            def process(self, row, ctx):
                self.total.value += row["price"]
                return {"user": ctx.key, "total": self.total.value}
        """
        raise NotImplementedError

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Result:
        """Handle a timer of the current key that is due.

        `time`: the time that the timer was set for, without a zone if the event time has none.
        `ctx`: as for `process`.

        Return or yield rows, or return None, as this default does.

            def on_timer(self, time, ctx):
                self.seen.clear()
        """
        return None


class CoProcessFunction(Function):
    """A function on the rows of two connected streams; if both are keyed they share the states and timers of a key.

    No order holds between the two inputs.

        >>> class Joined(CoProcessFunction):
        ...     names, prices = ListState(), ListState()
        ...     def process1(self, row, ctx):
        ...         self.prices.append(row["price"])
        ...         return [{"name": name, "price": row["price"]} for name in self.names]
        ...     def process2(self, row, ctx):
        ...         self.names.append(row["name"])
        ...         return [{"name": row["name"], "price": price} for price in self.prices]
        >>> names = env.from_collection([{"user": "ann", "name": "Ann"}])
        >>> both = orders.key_by("user").connect(names.key_by("user"))
        >>> testing.run(both.process(Joined(), {"name": str, "price": int})).rows
        [{'name': 'Ann', 'price': 3}, {'name': 'Ann', 'price': 4}]
    """

    def process1(self, row: Row, ctx: ProcessContext) -> Result:
        """Process one row of the first stream.

        `row`: a dict with the columns of the first stream.
        `ctx`: the key, times, timers and side outputs; valid during the call only.

        Return or yield rows as dicts with the columns of the output, or return None.

            def process1(self, row, ctx):
                return {"user": ctx.key, "clicks": self.clicks.value}
        """
        raise NotImplementedError

    def process2(self, row: Row, ctx: ProcessContext) -> Result:
        """Process one row of the second stream.

        `row`: a dict with the columns of the second stream.
        `ctx`: the key, times, timers and side outputs; valid during the call only.

        Return or yield rows as dicts with the columns of the output, or return None.

            def process2(self, row, ctx):
                self.clicks.value += 1
        """
        raise NotImplementedError

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Result:
        """Handle a timer of the current key that is due.

        `time`: the time that the timer was set for, without a zone if the event time has none.
        `ctx`: as for `process1`.

        Return or yield rows, or return None, as this default does.

            def on_timer(self, time, ctx):
                self.clicks.clear()
        """
        return None


class BroadcastProcessFunction(Function):
    """A function on a stream and a broadcast stream. A BroadcastState has the same contents on all subtasks.

    Broadcast states can be written only in `process_broadcast`, which every subtask runs for the same rows in the same
    order: it must be deterministic. On a keyed stream `process` also has keyed states and timers.

        >>> class Dear(BroadcastProcessFunction):
        ...     limits = BroadcastState()
        ...     def process_broadcast(self, row, ctx):
        ...         self.limits["least"] = row["least"]
        ...     def process(self, row, ctx):
        ...         return row if row["price"] >= self.limits.get("least", 0) else None
        >>> dear = testing.harness(Dear(), orders.schema, orders.schema, second={"least": int})
        >>> dear.process_broadcast({"least": 4})
        []
        >>> dear.process([{"user": "ann", "price": 3}, {"user": "bob", "price": 5}])
        [{'user': 'bob', 'price': 5}]
    """

    def process(self, row: Row, ctx: ProcessContext) -> Result:
        """Process one row of the stream; broadcast states can be read.

        `row`: a dict with the columns of the stream.
        `ctx`: the key, times, timers and side outputs; valid during the call only.

        Return or yield rows as dicts with the columns of the output, or return None.

            def process(self, row, ctx):
                return row if row["price"] >= self.limits.get("least", 0) else None
        """
        raise NotImplementedError

    def process_broadcast(self, row: Row, ctx: ProcessContext) -> Result:
        """Process one broadcast row; broadcast states can be written.

        `row`: a dict with the columns of the broadcast stream.
        `ctx`: times and side outputs; there is no key.

        Return or yield rows as dicts with the columns of the output, in every subtask, or return None.

            def process_broadcast(self, row, ctx):
                self.limits["least"] = row["least"]
        """
        raise NotImplementedError

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Result:
        """Handle a timer of the current key that is due; only on a keyed stream.

        `time`: the time that the timer was set for, without a zone if the event time has none.
        `ctx`: as for `process`.

        Return or yield rows, or return None, as this default does.

            def on_timer(self, time, ctx):
                self.seen.clear()
        """
        return None
