"""DataStream: its event time, its keys, how it joins with others, and which subtask gets its rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import polars as pl
import pyarrow as pa
import pyarrow.fs

from midstream.api.argument_checks import calling_line, check_no_patterns, columns_text, require_column
from midstream.api.hints import OF_STREAMS, Hinted
from midstream.api.program import Handle, located
from midstream.api.row_transformations import Transformable
from midstream.api.stream_core import StreamCore
from midstream.api.stream_sinks import Writable
from midstream.engine.core.config import Duration, duration_us
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.core.key_groups import key_cast, key_type_supported
from midstream.engine.core.schemas import SchemaLike
from midstream.engine.graph.job_graph import Partitioning
from midstream.engine.operators.bad_records import BAD_RECORDS
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.failed_rows import FAILED
from midstream.engine.operators.functions.duplicates import drop_duplicates_operator
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.interval_join import How
from midstream.engine.operators.row_keys import RowKeysOperator
from midstream.engine.operators.table_join import TableHow
from midstream.engine.operators.watermarks import TimestampsOperator, WatermarkStrategy
from midstream.engine.operators.windows.window_factory import Sliding, Window

if TYPE_CHECKING:
    from midstream.api.connected_streams import BroadcastConnectedStreams, ConnectedStreams
    from midstream.api.keyed_streams import KeyedStream
    from midstream.api.table_joins import TableLike
    from midstream.api.windowed_streams import WindowedStream
    from midstream.inprocess.preview import Preview

_log = logging.getLogger(__name__)


class DataStream(Handle, Transformable, Hinted):
    """A stream of rows with one schema. Streams are created by an Environment and by methods of other streams.

    Each method adds an operator and returns the stream of its output; the stream itself stays as it is, and may be used
    again. Arguments are checked against `schema` immediately: the SchemaError, JobError or ConfigError begins with the file
    and line of the call. The event-time column stays the event time as long as the output has a timestamp column of
    that name. An expression that computes that column again ends this, until `with_watermarks` is called again; a function
    returns it unchanged, since rows with earlier times may be late.

        >>> dear = orders.filter(pl.col("price") > 3).select("user", cents=pl.col("price") * 100)
        >>> testing.run(dear).rows
        [{'user': 'bob', 'cents': 500}, {'user': 'ann', 'cents': 400}]
        >>> dear.schema.names
        ['user', 'cents']
    """

    _hints = OF_STREAMS

    def __init__(self, core: StreamCore, node: int | None = None) -> None:
        Handle.__init__(self, core.program, node)
        Transformable.__init__(self, core)
        self.event_time = core.event_time_name
        """The event-time column; None before with_watermarks()."""

    # ---- event time, and rows that are there once

    @located
    def with_watermarks(self, column: str, strategy: WatermarkStrategy) -> DataStream:
        """Make a timestamp column the event time of the rows.

        Call it directly after the source, so that event time is tracked for each of its splits.

        `column`: the name of a timestamp column, in which no row is null.
        `strategy`: how far out of order rows may be: `WatermarkStrategy.monotonous()` or `WatermarkStrategy.bounded("5
        s")`.

        Returns a stream of the same rows, with event time. Raises SchemaError if there is no such column or it is not a
        timestamp, JobError if `strategy` is not a WatermarkStrategy.

            >>> visits = env.from_collection([{"user": "ann", "at": datetime(2024, 1, 1)}])
            >>> visits.with_watermarks("at", WatermarkStrategy.bounded("5 s", idle_after="1 min")).event_time
            'at'
        """
        if not isinstance(strategy, WatermarkStrategy):
            raise JobError(
                f"with_watermarks: {strategy!r} is not a WatermarkStrategy; write for example "
                "WatermarkStrategy.bounded('5 s') or WatermarkStrategy.monotonous()"
            )
        require_column(self.schema, column, "with_watermarks", "column", "Name a timestamp column.")
        made = self.core.then("watermarks", lambda name: TimestampsOperator(name, column, strategy, self.schema))
        return main_output(replace(made, event_time=TimeColumn(column), overwritten=""))

    @located
    def drop_duplicates(self, *columns: str | Sequence[str], within: Duration | None = None) -> DataStream:
        """Keep the first row of each key, in the order of arrival, and drop the others.

        A row is emitted as soon as it arrives. No order of arrival holds between rows of different splits of a source:
        which one is the first may then differ from run to run.

        `columns`: the names of the columns whose values together are the key, or lists of them. They have the types of
        keys (see `key_by`), and none of their values is null. Without columns, whole rows are compared: nulls equal each
        other, and so do NaN; only columns of lists or structs are refused.
        `within`: how long a duplicate is one: a row is dropped if its key has a kept row whose event time is at most this
        duration earlier or later. Kept rows leave the state once event time is this far past them. Without it, every key
        is remembered for as long as the job lives: the state grows with each new key, as a warning in the log says.

        Returns a stream of the kept rows, unchanged. With `within`, rows that came late are in its `side_output(LATE)`.
        Raises SchemaError for an unknown column or one that cannot be a key, JobError for `within` on a stream without
        event time, ConfigError for an invalid duration.

            >>> testing.run(orders.drop_duplicates("user")).rows
            [{'user': 'ann', 'price': 3}, {'user': 'bob', 'price': 5}]
            >>> visits = clicks.drop_duplicates("user", within="1 min")
            >>> [str(row["at"]) for row in testing.run(visits).rows]
            ['2024-01-01 12:00:00', '2024-01-01 12:02:00']
        """
        method = "drop_duplicates"
        names, within_us = _names(method, columns), None
        if names:
            core = replace(self.core, keys=checked_keys(self, names, method))
        else:
            core = self._keyed_by_rows(method)
        if within is None:
            _log.warning(
                "%s: drop_duplicates remembers each distinct value of %s for as long as the job lives, so its state grows "
                "with them; within='1 h' forgets those that are an hour old by event time",
                calling_line(),
                ", ".join(names) or "all columns",
            )
        else:
            core.check_event_time(method, "within= compares event times")
            within_us = duration_us(within, f"{method}: within")
        port = Port("process", core.keys, core.event_time if within is not None else None, core.schema)
        return main_output(
            core.then(method, lambda name: drop_duplicates_operator(name, port, within_us, hides_keys=not names))
        )

    @located
    def distinct(self) -> DataStream:
        """Keep the first of all rows that are equal in every column: `drop_duplicates()` under the name that Spark has.

        Returns a stream of the kept rows. Raises as `drop_duplicates` does.

            >>> doubled = orders.union(orders)
            >>> len(testing.run(doubled.distinct()).rows)
            3
        """
        return self.drop_duplicates()

    # ---- several streams

    @located
    def union(self, *others: DataStream) -> DataStream:
        """Put the rows of several streams into one, in no particular order.

        `others`: streams with the same columns in the same order, and the same event time, as this one.

        Returns the stream of all rows. Raises SchemaError for a stream with other columns, JobError for one with
        another event time, of another Environment, or one to which `rebalance()` or the like was applied, and if none is given.

            >>> more = env.from_collection([{"user": "eve", "price": 1}])
            >>> len(testing.run(orders.union(more)).rows)
            4
        """
        if not others:
            raise JobError("union: needs at least one other stream")
        for other in others:
            self._require_stream(other, "union")
            if not other.schema.equals(self.schema):
                raise SchemaError(
                    f"union: the streams differ: {_difference(self.schema, other.schema)}; "
                    "use select() to give them the same columns in the same order"
                )
            if other.core.event_time != self.core.event_time:
                raise JobError(
                    f"union: one stream has event time {_described(self.core)}, another {_described(other.core)}; "
                    "call with_watermarks() after the union, or on each of its streams"
                )
            if other.core.partitioning is not self.core.partitioning:
                raise JobError("union: call rebalance(), broadcast(), global_() or forward() after the union")
        origins = tuple(origin for stream in (self, *others) for origin in stream.core.origins)
        overwritten = next((each.core.overwritten for each in (self, *others) if each.core.overwritten), "")
        return DataStream(replace(self.core, origins=origins, side_outputs={}, overwritten=overwritten))

    @overload  # a BroadcastStream is a DataStream too, so its overload comes first
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStreams: ...  # type: ignore[overload-overlap]

    @overload
    def connect(self, other: DataStream) -> ConnectedStreams: ...

    @located
    def connect(self, other: DataStream) -> ConnectedStreams | BroadcastConnectedStreams:
        """Make two streams with different columns the inputs of one function.

        `other`: a stream of the same Environment. With `other.broadcast()` every subtask of the function gets all of
        its rows. Two keyed streams are connected by `KeyedStream.connect`.

        Returns ConnectedStreams, or BroadcastConnectedStreams, whose `process` takes the function. Raises JobError if
        the two cannot be connected.

            >>> class Dear(BroadcastProcessFunction):
            ...     limits = BroadcastState()
            ...     def process_broadcast(self, row, ctx):
            ...         self.limits["least"] = row["least"]
            ...     def process(self, row, ctx):
            ...         return row if row["price"] >= self.limits.get("least", 0) else None
            >>> rules = env.from_collection([{"least": 4}]).uid("rules")
            >>> dear = orders.connect(rules.broadcast()).process(Dear(), orders.schema)
            >>> with testing.job(dear) as job:
            ...     job.feed("rules", {"least": 4}).feed("orders", {"user": "bob", "price": 5}).take()
            [{'user': 'bob', 'price': 5}]
        """
        from midstream.api.connected_streams import BroadcastConnectedStreams, ConnectedStreams

        self._require_stream(other, "connect")
        if isinstance(self, BroadcastStream):
            raise JobError("connect: the broadcast stream is the argument: stream.connect(small.broadcast())")
        if isinstance(other, BroadcastStream):
            return BroadcastConnectedStreams(self.core, other.core)
        return ConnectedStreams(self.core, other.core)

    @located
    def join(
        self,
        other: DataStream,
        on: str | Sequence[str] | None = None,
        how: How = "inner",
        *,
        within: tuple[Duration, Duration] | None = None,
        window: Sliding | None = None,
        left_on: str | Sequence[str] | None = None,
        right_on: str | Sequence[str] | None = None,
        suffix: str = "_right",
    ) -> DataStream:
        """Join with another stream: rows of equal keys whose event times are no further apart than given, or in one window.

        `other`: the right stream. Both have event time.
        `on`: the key columns, as for `key_by`.
        `left_on`, `right_on`: the key columns of each stream, in place of `on`, if their names differ.
        `how`: "inner" for the pairs alone; "left", "right" or "full" also for the rows of that side, or of both, that have
        no partner; "semi" or "anti" for the left rows alone that have a partner, each once, or have none.
        `within`: the bounds of the right row's event time less that of the left, both included: `("-1 min", 0)` joins each
        left row with the right rows of the minute before. Durations, numbers of seconds, or timedeltas.
        `window`: in place of `within`, `tumbling("1 h")` or `sliding("1 h", "5 min")`: rows are joined in each window that
        both are in, and held once for each.
        `suffix`: appended to the names of the right stream's columns that the left has too.

        Returns a stream of the left's columns, then the right's without its keys (those of a right row without a partner
        are in the left's key columns). The event time of a row is the left's, or the right's with "right"; with "full" and `within` the
        left's column has the right's time where there is no left row. With `window`, `window_start` and `window_end` follow
        the left's columns, in place of columns that are called like them, and the event time is the last time in the
        window. Rows leave as soon as they are certain: a pair when its later row arrives, a row without a partner once
        event time has passed all its partners or the window. So windows and joins may follow. Late rows are not joined:
        they are in `side_output(LATE)`, and those of the right stream in `side_output(LATE_RIGHT)`. Raises JobError and
        SchemaError for streams and columns that do not fit, ConfigError for an unknown `how`, an empty interval, a session,
        and unless one of `within` and `window` is given.

            >>> sales = env.from_collection([{"user": "ann", "sold": datetime(2024, 1, 1, 12, 2, 30)}])
            >>> sales = sales.with_watermarks("sold", WatermarkStrategy.monotonous())
            >>> for row in testing.run(clicks.join(sales, on="user", how="left", within=(0, "1 min"))).rows:
            ...     print(*row.values())
            ann 2024-01-01 12:02:00 2024-01-01 12:02:30
            ann 2024-01-01 12:00:00 None
            >>> for row in testing.run(clicks.join(sales, on="user", window=tumbling("1 min"))).rows:
            ...     print(*row.values())
            ann 2024-01-01 12:02:00 2024-01-01 12:02:00 2024-01-01 12:03:00 2024-01-01 12:02:30
        """
        from midstream.api.joins import joined

        self._require_stream(other, "join")
        return joined(self, other, (on, left_on, right_on), how, within, window, suffix)

    @located
    def join_asof(
        self,
        other: DataStream,
        on: str | Sequence[str] | None = None,
        *,
        tolerance: Duration | None = None,
        left_on: str | Sequence[str] | None = None,
        right_on: str | Sequence[str] | None = None,
        suffix: str = "_right",
    ) -> DataStream:
        """Join each row with the newest row of another stream that has its key and is not later by event time.

        `other`: the right stream: versions of what belongs to a key. Both have event time.
        `on`: the key columns, as for `key_by` (in polars, `by`: the times compared are the event times).
        `tolerance`: how old the right row may be, at most: a duration, a number of seconds, or a timedelta; without it,
        the newest row of each key is held indefinitely.
        `left_on`, `right_on`: the key columns of each stream, in place of `on`, if their names differ.
        `suffix`: appended to the names of the right stream's columns that the left has too.

        Returns a stream of all rows of the left: its columns, then the right's without its keys, null where there is no
        such row. Its event time is the left's. A row leaves once event time has passed it, so that no version can be
        missing; of versions at the same time, the one that came last counts. Late rows are not joined: they are in
        `side_output(LATE)`, and those of the right stream in `side_output(LATE_RIGHT)`. Raises JobError and SchemaError
        for streams and columns that do not fit, ConfigError for an invalid tolerance.

            >>> prices = env.from_collection([{"user": "ann", "since": datetime(2024, 1, 1, 12, 1), "rate": 7}])
            >>> prices = prices.with_watermarks("since", WatermarkStrategy.monotonous())
            >>> for row in testing.run(clicks.join_asof(prices, on="user", tolerance="1 d")).rows:
            ...     print(*row.values())
            ann 2024-01-01 12:00:00 None None
            ann 2024-01-01 12:02:00 2024-01-01 12:01:00 7
        """
        from midstream.api.joins import asof_joined

        self._require_stream(other, "join_asof")
        return asof_joined(self, other, (on, left_on, right_on), tolerance, suffix)

    @located
    def join_table(
        self,
        table: TableLike,
        on: str | Sequence[str] | None = None,
        how: TableHow = "inner",
        *,
        refresh: Duration | None = None,
        left_on: str | Sequence[str] | None = None,
        right_on: str | Sequence[str] | None = None,
        suffix: str = "_right",
        schema: SchemaLike | None = None,
    ) -> DataStream:
        """Join each row with the row of a table that has its key.

        Every subtask loads the table before its first row, on its own, and replaces it as a whole between two batches, so
        subtasks may use different versions for a while. Checkpoints contain the version, and a restore continues with it
        until the next refresh is due; at another parallelism, all subtasks continue with the newest.

        `table`: a polars, Arrow or pandas frame; a path, a glob or a list of Parquet, CSV or JSON-lines files, as for
        `env.read_files`; the path of a Delta table; a `midstream.connectors.PostgresQuery`; or a function without arguments
        that returns a frame. It must fit in memory, once per subtask.
        `on`: the key columns, of the types that `key_by` takes. A null equals nothing.
        `how`: "inner" for rows that have a partner, "left" for all rows, with nulls where there is none; "semi" or "anti"
        for rows that have a partner, or none, without columns of the table.
        `refresh`: how long a version is used until the table is loaded again; None: loaded once. If a refresh fails, the
        version before remains, a warning is logged, the metric `table_refreshes_failed` counts it, and it is tried again
        after `refresh`, or a minute if that is sooner. If the first load fails, the task does.
        `left_on`, `right_on`: the key columns of each side, in place of `on`, if their names differ.
        `suffix`: appended to the names of the table's columns that the stream has too.
        `schema`: the columns of the table to use, with their types; by default all that it has at this call, for which a
        function is called once here.

        Returns a stream of this stream's columns, then, with "inner" and "left", the table's without its keys. Raises
        SchemaError for columns and key types that do not fit, JobError for a table in which a key is twice ("inner" and
        "left"), and for a function that cannot be called or sent to the slots, ConfigError for other arguments. At a
        refresh, such tables are failures.

            >>> users = pl.DataFrame({"user": ["ann"], "country": ["FR"]})
            >>> testing.run(orders.join_table(users, on="user", how="left")).rows[1]
            {'user': 'bob', 'price': 5, 'country': None}
            >>> users.write_csv("users.csv")
            >>> testing.run(orders.join_table("users.csv", on="user", refresh="5 min")).rows[1]
            {'user': 'ann', 'price': 4, 'country': 'FR'}
        """
        from midstream.api.table_joins import table_joined

        return table_joined(self, table, (on, left_on, right_on), how, refresh, suffix, schema)

    @located
    def key_by(self, *columns: str) -> KeyedStream:
        """Partition the rows by the values of columns: one subtask gets all rows of a key, and keeps their state.

        `columns`: the names of one or more columns. They are integers, booleans, dates, times, timestamps, durations,
        text or binary; floats and decimals have to be cast first.

        Returns a KeyedStream. Raises SchemaError for an unknown column or one of another type, JobError if none is
        named, one is named twice, or another method has decided where rows go.

            >>> per_user = orders.key_by("user").process(Total(), {"user": str, "total": int})
            >>> testing.run(per_user).rows
            [{'user': 'ann', 'total': 3}, {'user': 'bob', 'total': 5}, {'user': 'ann', 'total': 7}]
        """
        from midstream.api.keyed_streams import KeyedStream

        return KeyedStream(replace(self.core, keys=checked_keys(self, columns, "key_by")))

    @located
    def window_all(self, window: Window) -> WindowedStream:
        """Put all rows into event-time windows, whatever their key, in a single subtask.

        `window`: `tumbling("1 h")`, `sliding("1 h", "5 min")` or `session("30 min")`.

        Returns a WindowedStream, whose `aggregate` computes a row per window. Raises JobError if the stream has no
        event time, or if `window` is not a window. To use more than one subtask, call `key_by` and then
        `KeyedStream.window`.

            >>> per_hour = clicks.window_all(tumbling("1 h")).aggregate(n=Count())
            >>> [row["n"] for row in testing.run(per_hour).rows]
            [2]
        """
        from midstream.api.windowed_streams import WindowedStream

        check_no_patterns(self.schema, "window_all")
        return WindowedStream(self.core, window)

    @located
    def side_output(self, tag: str) -> DataStream:
        """Return the rows that the operator before it emits apart from its main output.

        `tag`: which side output. `LATE` is that of windows and joins, whose right stream has `LATE_RIGHT`; a function's
        tags are those of `side_outputs=`; `BAD_RECORDS` is that of a source that drops bad records, `FAILED` that of rows
        for which a function fails.

        Returns a stream with the columns of the side output. Raises JobError for a tag that the operator does not have.

            >>> per_minute = clicks.key_by("user").window(tumbling("1 min")).aggregate(n=Count())
            >>> per_minute.side_output(LATE).schema.names
            ['user', 'at']
        """
        core = self.core
        if tag not in core.side_outputs:
            known = ", ".join(map(repr, core.side_outputs)) or "none"
            if tag == BAD_RECORDS:
                raise JobError(
                    "side_output: bad records are with the stream that read_kafka or read_files made, of which "
                    "on_bad_record='drop' takes them aside"
                )
            if tag == FAILED:
                raise JobError(
                    "side_output: failed rows are with the stream that a function made of which on_error='side_output' takes "
                    "them aside"
                )
            raise JobError(
                f"side_output: there is no side output {tag!r} here (there is: {known}); "
                "call it on the stream that a window or process() made, which must declare it"
            )
        schema, event_time = core.side_outputs[tag]
        [origin] = core.origins
        return DataStream(StreamCore(core.program, (replace(origin, tag=tag),), schema, event_time))

    # ---- which subtask gets a row

    def rebalance(self) -> DataStream:
        """Send batches to the subtasks of the next operator in turn.

        Returns a stream of the same rows. By default rows stay with their subtask if the next operator has the same
        parallelism, and are rebalanced if not.

            >>> env = Environment("shop", parallelism=2)
            >>> _ = env.generate(lambda i: {"n": i}, count=9).rebalance().print()
            >>> print(env.explain())
            2 vertices, 2 slots, at most 128 key groups
            [0] ×2  generate
            [1] ×2  print
                  ← [0] rebalance
        """
        return DataStream(self.core.toward(Partitioning.REBALANCE))

    def forward(self) -> DataStream:
        """Send the rows of subtask i to subtask i of the next operator, which must have the same parallelism.

        Returns a stream of the same rows. When the job starts, JobError is raised if the parallelism of the next
        operator differs.

            >>> env = Environment("shop", parallelism=2)
            >>> _ = env.generate(lambda i: {"n": i}, count=9).forward().print()
            >>> print(env.explain())
            1 vertex, 2 slots, at most 128 key groups
            [0] ×2  generate → print
        """
        return DataStream(self.core.toward(Partitioning.FORWARD))

    def global_(self) -> DataStream:
        """Send all rows to the first subtask of the next operator.

        Returns a stream of the same rows.

            >>> env = Environment("shop", parallelism=2)
            >>> _ = env.generate(lambda i: {"n": i}, count=9).global_().print()
            >>> print(env.explain())
            2 vertices, 2 slots, at most 128 key groups
            [0] ×2  generate
            [1] ×2  print
                  ← [0] global
        """
        return DataStream(self.core.toward(Partitioning.GLOBAL))

    def broadcast(self) -> BroadcastStream:
        """Send all rows to every subtask of the next operator.

        Returns a BroadcastStream of the same rows: the argument of `connect`, or a stream like any other.

            >>> env = Environment("shop", parallelism=2)
            >>> _ = env.generate(lambda i: {"n": i}, count=9).broadcast().print()
            >>> print(env.explain())
            2 vertices, 2 slots, at most 128 key groups
            [0] ×2  generate
            [1] ×2  print
                  ← [0] broadcast
        """
        return BroadcastStream(self.core.toward(Partitioning.BROADCAST))

    # ---- preview

    @located
    def preview(self, rows: int = 20, *, seconds: float = 1.0) -> Preview:
        """Return the first rows of this stream, computed in this process; for use in a notebook.

        The job's own files, collections, generators and other sources are read, all but Spark's. Sinks are not written
        to.

        `rows`: the number of rows at most. Where there are fewer in time, the input ends where it is, and `note` of the
        result states it.
        `seconds`: about how long to read, in seconds.

        Returns a Preview, which shows itself as a table; `rows` and `frame` are its rows as dicts and as a polars
        DataFrame. Raises ConfigError for other values of `rows` and `seconds`, JobError for a source that is read with
        Spark, and what a function of the job raises.

            >>> orders.preview(2).rows
            [{'user': 'ann', 'price': 3}, {'user': 'bob', 'price': 5}]
        """
        from midstream.inprocess.preview import preview
        from midstream.inprocess.rewrite import End

        program = self.core.program
        end = End(tuple((origin.node, origin.tag) for origin in self.core.origins), self.schema)
        [found] = preview(program.graph, program.config, [end], rows, seconds, time.time_ns() // 1000)
        return found

    def _keyed_by_rows(self, method: str) -> StreamCore:
        """Return the rows with one more column, which stands for all others, and partitioned by it."""
        key = "__row"
        while key in self.schema.names:
            key += "_"
        made = self._then(
            "row_keys", lambda name: RowKeysOperator(method if name == "row_keys" else name, key, self.schema)
        )
        return replace(made.core, keys=checked_keys(made, (key,), method))

    def _require_stream(self, other: object, method: str) -> None:
        if not isinstance(other, DataStream):
            kind = type(other).__name__
            hint = "; both sides of connect() are keyed, or neither" if kind == "KeyedStream" else ""
            raise JobError(f"{method}: needs a DataStream, got a {kind}{hint}")
        self.core.check_program(other.core, method)


class BroadcastStream(DataStream):
    """A stream whose rows go to every subtask of the operator that consumes it; `DataStream.broadcast` returns it.

    For example:

        >>> rules = env.from_collection([{"least": 4}]).broadcast()
        >>> both = orders.connect(rules)
    """


_METHOD = {
    Partitioning.REBALANCE: "rebalance",
    Partitioning.FORWARD: "forward",
    Partitioning.GLOBAL: "global_",
    Partitioning.BROADCAST: "broadcast",
}


def checked_keys(stream: Writable, columns: tuple[str, ...], method: str) -> tuple[str, ...]:
    """Return the columns; raise SchemaError or JobError if the stream cannot be keyed by them."""
    if not columns:
        raise JobError(f"{method}: name at least one column")
    check_no_patterns(stream.schema, method)
    for column in columns:
        advice = "Name columns of the stream; make one with with_columns() first if it has to be computed."
        field = require_column(stream.schema, column, method, "key column", advice)
        if not key_type_supported(field.type):
            raise SchemaError(
                f"{method}: key column {column!r} is {field.type}, which cannot be a key; {key_cast(field.type, method)}"
            )
    if len(set(columns)) < len(columns):
        raise JobError(f"{method}: a column is named twice in {', '.join(columns)}")
    how = stream.core.partitioning
    if how is not None:
        raise JobError(f"{method}: defines where rows go, and so does {_METHOD[how]}(); use one of them")
    return columns


def main_output(core: StreamCore) -> DataStream:
    """Return the stream of an operator's main output, on which the operator is named and configured."""
    [origin] = core.origins
    return DataStream(core, origin.node)


def _names(method: str, columns: Iterable[str | Sequence[str]]) -> tuple[str, ...]:
    """Return the names that were given one by one or in lists."""
    names: list[str] = []
    for given in columns:
        if isinstance(given, (pl.Expr, pl.Series)) or not isinstance(given, Iterable):
            raise JobError(f"{method}: {given!r} is not the name of a column; write for example {method}('id')")
        names += [given] if isinstance(given, str) else given
    return tuple(names)


def _described(core: StreamCore) -> str:
    is_end = core.event_time is not None and core.event_time.is_end
    return f"one unit before {core.event_time_name!r}" if is_end else repr(core.event_time_name)


def _difference(first: pa.Schema, second: pa.Schema) -> str:
    for name in first.names:
        if name not in second.names:
            return f"column {name!r} is missing in one ({columns_text(second)})"
        if first.field(name).type != second.field(name).type:
            return f"column {name!r} is {first.field(name).type} in one and {second.field(name).type} in another"
    for name in second.names:
        if name not in first.names:
            return f"column {name!r} is missing in one ({columns_text(first)})"
    return f"the columns are in different order ({columns_text(first)}; {columns_text(second)})"
