"""Calls one function with its states and timers, outside of a job: `harness`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from operator import itemgetter
from typing import Any, Final, TypeAlias

import pyarrow as pa

from midstream.api.argument_checks import require_column
from midstream.api.data_stream import DataStream, main_output
from midstream.api.environment import Environment
from midstream.api.program import located
from midstream.engine.core.config import Duration
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.schemas import SchemaLike, as_schema
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.batch_functions import CoBatchFunction, KeyedBatchFunction
from midstream.engine.operators.functions.process_functions import (
    BroadcastProcessFunction,
    CoProcessFunction,
    KeyedProcessFunction,
    ProcessFunction,
)
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.inprocess.endpoints import MarksOperator
from midstream.testing.inputs import Instant, Rows
from midstream.testing.jobs import NOW, RunningJob
from midstream.testing.results import Row

AnyFunction: TypeAlias = (
    "KeyedProcessFunction | ProcessFunction | CoProcessFunction | BroadcastProcessFunction | KeyedBatchFunction | "
    "CoBatchFunction"
)
Columns: TypeAlias = "str | Sequence[str]"

INPUT: Final = "input"
SECOND: Final = "input2"
FUNCTION: Final = "function"


@located
def harness(
    function: AnyFunction,
    input: SchemaLike,
    output: SchemaLike,
    *,
    key: Columns = (),
    event_time: str | None = None,
    second: SchemaLike | None = None,
    second_key: Columns | None = None,
    second_event_time: str | None = None,
    side_outputs: Mapping[str, SchemaLike] | None = None,
    parallelism: int = 1,
    now: Instant = NOW,
) -> Harness:
    """Return a function with its states and timers, as the engine runs it, for a test that calls it.

    `function`: an instance of a process or batch function.
    `input`, `output`: the columns of the rows that it takes and returns, as Arrow or polars schemas or as `{"column":
    type}`.
    `key`: the column or columns that the input is keyed by.
    `event_time`: the event-time column of the input; event time stands still until `advance_to`.
    `second`: the columns of its second input, or of its broadcast one.
    `second_key`: the key columns of the second input, by default the same names.
    `second_event_time`: the event-time column of the second input.
    `side_outputs`: the columns of each side output, by its tag.
    `parallelism`: the number of subtasks.
    `now`: the wall clock at the beginning; it stands still until `advance_processing_time`.

    Returns a Harness. Raises ConfigError for inputs that the function does not have, and as the `process` of a stream
    does.

        >>> total = testing.harness(Total(), {"user": str, "price": int}, {"user": str, "total": int}, key="user")
        >>> total.process({"user": "ann", "price": 3})
        [{'user': 'ann', 'total': 3}]
        >>> total.snapshot_and_restore(parallelism=3).state
        {'total': {'ann': 3}}
    """
    env = Environment("harness")
    takes_two = isinstance(function, (CoProcessFunction, CoBatchFunction, BroadcastProcessFunction))
    if takes_two is not (second is not None):
        raise ConfigError(
            f"harness: {type(function).__name__} takes {'two inputs, so give' if takes_two else 'one input, without'} "
            "second=, the columns of the second one"
        )
    first: Any = _input(env, INPUT, input, event_time)
    first = first.key_by(*_names(key)) if key else first
    sides = {} if isinstance(function, (KeyedBatchFunction, CoBatchFunction)) else {"side_outputs": side_outputs}
    if not sides and side_outputs:
        raise ConfigError(f"harness: {type(function).__name__} works on batches, which have no side outputs")
    if second is not None:
        other: Any = _input(env, SECOND, second, second_event_time)
        if isinstance(function, BroadcastProcessFunction):
            other = other.broadcast()
        elif key:
            other = other.key_by(*_names(key if second_key is None else second_key))
        first = first.connect(other)
    method = "process_batches" if not sides else "process"
    if not key and isinstance(function, (KeyedProcessFunction, KeyedBatchFunction)):
        raise ConfigError(
            f"harness: {type(function).__name__} is for a keyed stream; give key=, the columns of its key"
        )
    made: DataStream = getattr(first, method)(function, output, **sides)
    return Harness(made.uid(FUNCTION).name(type(function).__name__), function, parallelism, now)


def _names(columns: Columns) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else tuple(columns)


def _input(env: Environment, uid: str, columns: SchemaLike, event_time: str | None) -> DataStream:
    schema: pa.Schema = as_schema(columns, f"harness: {uid}")
    stream = env.from_collection([], schema=schema).uid(uid)
    marked = stream.core.then("marks", lambda name: MarksOperator(stream.schema))
    if event_time is not None:
        require_column(schema, event_time, "harness", "event_time", "Name a timestamp column.")
        marked = replace(marked, event_time=TimeColumn(event_time))
    return main_output(marked)


class Harness:
    """A function between two calls. Each call returns the rows that it produced.

    For example:

        >>> total = testing.harness(Total(), {"user": str, "price": int}, {"user": str, "total": int}, key="user")
        >>> total.process([{"user": "ann", "price": 3}, {"user": "ann", "price": 4}])
        [{'user': 'ann', 'total': 3}, {'user': 'ann', 'total': 7}]
        >>> total.state
        {'total': {'ann': 7}}
    """

    def __init__(self, stream: DataStream, function: AnyFunction, parallelism: int, now: Instant) -> None:
        self._stream = stream
        self._in_batches = isinstance(function, (KeyedBatchFunction, CoBatchFunction))
        self._job = RunningJob(stream, parallelism=parallelism, now=now, restore=None)

    def process(self, rows: Rows) -> list[Row]:
        """Call the function with a row, or with each of several; a batch function gets all of them as one batch.

        `process1` is the same, for functions of two inputs.

        `rows`: a dict or several, a polars DataFrame, or an Arrow table or batch.

        Returns the rows that the function produced. Raises SchemaError for rows that do not fit, and what the function
        raises.

            >>> total = testing.harness(Total(), {"user": str, "price": int}, {"user": str, "total": int}, key="user")
            >>> total.process({"user": "ann", "price": 3})
            [{'user': 'ann', 'total': 3}]
        """
        return self._process(INPUT, rows)

    process1 = process

    def process2(self, rows: Rows) -> list[Row]:
        """Call the function with rows of the second input.

        `rows`: as for `process`.

        Returns and raises as `process` does.

            >>> class Known(CoProcessFunction):
            ...     known = ValueState(default=False)
            ...     def process1(self, row, ctx):
            ...         return {"user": ctx.key, "known": self.known.value}
            ...     def process2(self, row, ctx):
            ...         self.known.value = True
            >>> user = {"user": str}
            >>> known = testing.harness(Known(), user, {"user": str, "known": bool}, key="user", second=user)
            >>> known.process2({"user": "ann"})
            []
            >>> known.process1([{"user": "ann"}, {"user": "bob"}])
            [{'user': 'ann', 'known': True}, {'user': 'bob', 'known': False}]
        """
        return self._process(SECOND, rows)

    def process_broadcast(self, rows: Rows) -> list[Row]:
        """Call the function with rows of the broadcast input, which every subtask receives.

        `rows`: as for `process`.

        Returns and raises as `process` does.

            >>> class Known(BroadcastProcessFunction):
            ...     users = BroadcastState()
            ...     def process_broadcast(self, row, ctx):
            ...         self.users[row["user"]] = True
            ...     def process(self, row, ctx):
            ...         return {"user": row["user"], "known": row["user"] in self.users}
            >>> user = {"user": str}
            >>> known = testing.harness(Known(), user, {"user": str, "known": bool}, second=user)
            >>> known.process_broadcast({"user": "ann"})
            []
            >>> known.process({"user": "ann"})
            [{'user': 'ann', 'known': True}]
        """
        return self._process(SECOND, rows)

    def _process(self, source: str, rows: Rows) -> list[Row]:
        self._job.feed(source, rows, cut="whole" if self._in_batches else 1)
        return self._job.take(self._stream)

    def advance_to(self, at: Instant) -> list[Row]:
        """Advance event time: timers up to a time fire, and `on_watermark` is called.

        `at`: an ISO string such as "2024-01-01 12:05", a datetime (UTC if it has no zone), or microseconds since 1970.

        Returns the rows that the function produced. Raises ConfigError for another time, and what the function raises.

            >>> class Reminder(KeyedProcessFunction):
            ...     def process(self, row, ctx):
            ...         ctx.timers.event_time(row["at"] + timedelta(hours=1))
            ...     def on_timer(self, time, ctx):
            ...         return {"user": ctx.key}
            >>> reminder = testing.harness(Reminder(), clicks.schema, {"user": str}, key="user", event_time="at")
            >>> reminder.process({"user": "ann", "at": "2024-01-01 12:00"})
            []
            >>> reminder.advance_to("2024-01-01 13:00")
            [{'user': 'ann'}]
        """
        self._job.advance_to(at)
        return self._job.take(self._stream)

    def advance_processing_time(self, by: Duration) -> list[Row]:
        """Advance the wall clock: processing-time timers fire.

        `by`: a duration such as "10 s", a number of seconds, or a timedelta.

        Returns the rows that the function produced. Raises ConfigError for an invalid duration, and what the function
        raises.

            >>> class Reminder(KeyedProcessFunction):
            ...     def process(self, row, ctx):
            ...         ctx.timers.processing_time(ctx.now + timedelta(minutes=1))
            ...     def on_timer(self, time, ctx):
            ...         return {"user": ctx.key}
            >>> reminder = testing.harness(Reminder(), {"user": str}, {"user": str}, key="user")
            >>> reminder.process({"user": "ann"})
            []
            >>> reminder.advance_processing_time("1 min")
            [{'user': 'ann'}]
        """
        self._job.advance_processing_time(by)
        return self._job.take(self._stream)

    def fire_timers(self) -> list[Row]:
        """Advance time until the last timer that is set now fires: first event time, then the wall clock.

        Returns the rows that the function produced. Raises what the function raises.

            >>> class Reminder(KeyedProcessFunction):
            ...     def process(self, row, ctx):
            ...         ctx.timers.processing_time(ctx.now + timedelta(days=365))
            ...     def on_timer(self, time, ctx):
            ...         return {"user": ctx.key}
            >>> reminder = testing.harness(Reminder(), {"user": str}, {"user": str}, key="user")
            >>> _ = reminder.process({"user": "ann"})
            >>> reminder.fire_timers()
            [{'user': 'ann'}]
        """
        event_times, wall_times = self.timers
        if event_times:
            self._job.advance_to(max(at for at, _ in event_times))
        if wall_times:
            self._job.advance_processing_time(max(self._to_come(at) for at, _ in wall_times))
        return self._job.take(self._stream)

    def _to_come(self, at: datetime) -> Any:
        now = self._job.now
        return max(at - (now if at.tzinfo else now.replace(tzinfo=None)), at - at)

    def end(self) -> list[Row]:
        """End the input: all timers fire.

        Returns the rows that the function produced. Raises what the function raises.

            >>> total = testing.harness(Total(), {"user": str, "price": int}, {"user": str, "total": int}, key="user")
            >>> total.end()
            []
        """
        self._job.end()
        return self._job.take(self._stream)

    def side_output(self, tag: str) -> list[Row]:
        """Return the rows that were sent to a side output since the last call.

        `tag`: its name in `side_outputs=`.

        Raises ConfigError for another name.

            >>> class Sorted(KeyedProcessFunction):
            ...     def process(self, row, ctx):
            ...         if row["price"] < 4:
            ...             ctx.side_output("cheap", row)
            >>> columns = orders.schema
            >>> made = testing.harness(Sorted(), columns, columns, key="user", side_outputs={"cheap": columns})
            >>> made.process({"user": "ann", "price": 3})
            []
            >>> made.side_output("cheap")
            [{'user': 'ann', 'price': 3}]
        """
        return self._job.take((FUNCTION, tag))

    @property
    def state(self) -> dict[str, Any]:
        """The values of each state by its name, by key; a broadcast state as a whole, and a table as a frame."""
        return self._job.state(FUNCTION)

    @property
    def metrics(self) -> dict[str, float]:
        """The value of each counter, and of each gauge that was set, by name: the sum over subtasks. Reset by a
        restore.
        """
        return self._job.metrics(FUNCTION)

    @property
    def timers(self) -> tuple[list[tuple[datetime, Any]], list[tuple[datetime, Any]]]:
        """Timers that are set, for event time and for processing time: the time and the key of each, the next one
        first.
        """
        found: tuple[list[tuple[datetime, Any]], list[tuple[datetime, Any]]] = ([], [])
        for operator in self._job.operators(FUNCTION):
            if isinstance(operator, ProcessOperator):
                for timers, more in zip(found, operator.timers_set(), strict=True):
                    timers += more
        return sorted(found[0], key=itemgetter(0)), sorted(found[1], key=itemgetter(0))

    @property
    def now(self) -> datetime:
        """The wall clock in UTC."""
        return self._job.now

    def snapshot_and_restore(self, parallelism: int | None = None) -> Harness:
        """Restore the function as if the job had failed after a checkpoint: a new instance, with the stored states and
        timers.

        `parallelism`: the number of subtasks from then on, each with its own keys; None for as many as before.

        Returns the harness. Raises ConfigError for another number, and what the function raises.

            >>> total = testing.harness(Total(), {"user": str, "price": int}, {"user": str, "total": int}, key="user")
            >>> _ = total.process({"user": "ann", "price": 3})
            >>> total.snapshot_and_restore(parallelism=2).process({"user": "ann", "price": 4})
            [{'user': 'ann', 'total': 7}]
        """
        self._job.snapshot_and_restore(parallelism)
        return self

    def close(self) -> None:
        """Call `close` of the function. Not needed if it has none.

        For example:

            >>> total = testing.harness(Total(), {"user": str, "price": int}, {"user": str, "total": int}, key="user")
            >>> total.close()
        """
        self._job.close()
