"""Two streams of different columns as the inputs of one function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from midstream.api.data_stream import DataStream, main_output
from midstream.api.function_checks import error_policy
from midstream.api.hints import OF_CONNECTED_STREAMS, Hinted
from midstream.api.keyed_streams import processed, require_function
from midstream.api.program import located
from midstream.api.stream_core import StreamCore
from midstream.engine.core.errors import JobError
from midstream.engine.core.schemas import SchemaLike, as_schema
from midstream.engine.operators.failed_rows import FailedMax, OnError
from midstream.engine.operators.functions.batch_functions import BatchFunctionOperator, CoBatchFunction
from midstream.engine.operators.functions.function_operator import Port, two_ports
from midstream.engine.operators.functions.process_functions import BroadcastProcessFunction, CoProcessFunction


class ConnectedStreams(Hinted):
    """Two streams as the inputs of one function; if both are keyed, their rows share the states of a key.

    Event time is the minimum of both: it does not advance while one of them has no watermark. No order holds between
    the two inputs.

        >>> class Tagged(CoProcessFunction):
        ...     def process1(self, row, ctx):
        ...         return {"what": f"order of {row['user']}"}
        ...     def process2(self, row, ctx):
        ...         return {"what": f"click of {row['user']}"}
        >>> tagged = orders.connect(clicks).process(Tagged(), {"what": str})
        >>> sorted({row["what"] for row in testing.run(tagged).rows})
        ['click of ann', 'order of ann', 'order of bob']
    """

    _hints = OF_CONNECTED_STREAMS

    def __init__(self, first: StreamCore, second: StreamCore) -> None:
        for core in (first, second):
            core.check_not_overwritten("connect")
        self._first = first
        self._second = second
        self._ports = two_ports(
            (first.keys, second.keys), (first.event_time, second.event_time), (first.schema, second.schema)
        )

    @located
    def process(
        self,
        function: CoProcessFunction,
        schema: SchemaLike,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
        on_error: OnError = "fail",
        failed_max: FailedMax | None = None,
    ) -> DataStream:
        """Call a function with each row of the two streams.

        `function`: an instance of your own subclass of CoProcessFunction: `process1` gets the rows of the first stream,
        `process2` those of the second.
        `schema`: the columns of the rows that the function returns, as an Arrow or polars schema or as `{"column":
        type}`.
        `side_outputs`: the columns of each side output, by its tag.
        `on_error`, `failed_max`: as for `KeyedStream.process`, of the rows of both streams together. With "side_output",
        those of the first are in `side_output(FAILED)`, those of the second in `side_output(FAILED_RIGHT)`.

        Returns the stream of the returned rows. Raises JobError for a function that cannot be sent to the slots,
        SchemaError for columns that do not fit, ConfigError for other values of `on_error` and `failed_max`.

            >>> class Spent(CoProcessFunction):
            ...     clicks = ValueState(pa.int64(), default=0)
            ...     def process1(self, row, ctx):
            ...         return {"user": ctx.key, "price": row["price"], "clicks": self.clicks.value}
            ...     def process2(self, row, ctx):
            ...         self.clicks.value += 1
            >>> both = orders.key_by("user").connect(clicks.key_by("user"))
            >>> spent = both.process(Spent(), {"user": str, "price": int, "clicks": int})
            >>> with testing.job(spent) as job:
            ...     _ = job.feed("clicks", {"user": "ann", "at": "2024-01-01 12:00"})
            ...     job.feed("orders", {"user": "ann", "price": 3}).take()
            [{'user': 'ann', 'price': 3, 'clicks': 1}]
        """
        require_function(function, CoProcessFunction, "process")
        policy = error_policy(on_error, failed_max, self._first.schema, "process", self._second.schema)
        return processed("co_process", function, self._ports, schema, side_outputs, self._first, self._second, policy)

    @located
    def process_batches(
        self,
        function: CoBatchFunction,
        schema: SchemaLike,
        *,
        on_error: OnError = "fail",
        failed_max: FailedMax | None = None,
    ) -> DataStream:
        """Call a function with batches of rows of many keys, as polars DataFrames; its state is in tables.

        `function`: an instance of your own subclass of CoBatchFunction. The engine decides where batches are cut: a
        result must not depend on which rows share one.
        `schema`: the columns of the frames that the function returns; forms as for `process`.
        `on_error`, `failed_max`: as for `process`. What the function has done to its tables for a batch that fails is
        undone, and it is called again with halves of the batch, until each row that fails is alone.

        Returns the stream of the returned rows. Raises JobError if the streams are not keyed or the function cannot be
        sent to the slots, SchemaError for columns that do not fit.

            >>> class Known(CoBatchFunction):
            ...     users = TableState({"user": str})
            ...     def process1(self, rows, ctx):
            ...         return rows.join(self.users.frame, on="user", how="semi")
            ...     def process2(self, rows, ctx):
            ...         self.users.frame = pl.concat([self.users.frame, rows.select("user")]).unique()
            >>> both = orders.key_by("user").connect(clicks.key_by("user"))
            >>> with testing.job(both.process_batches(Known(), orders.schema)) as job:
            ...     _ = job.feed("clicks", {"user": "ann", "at": "2024-01-01 12:00"})
            ...     job.feed("orders", [{"user": "ann", "price": 3}, {"user": "bob", "price": 5}]).take()
            [{'user': 'ann', 'price': 3}]
        """
        require_function(function, CoBatchFunction, "process_batches")
        if not self._first.keys:
            raise JobError(
                "process_batches: tables are of keyed streams; connect a.key_by(…) with b.key_by(…) "
                "(process() also takes streams without keys)"
            )
        made = as_schema(schema, "process_batches")
        policy = error_policy(on_error, failed_max, self._first.schema, "process_batches", self._second.schema)
        return main_output(
            self._first.then(
                "co_process_batches",
                lambda name: BatchFunctionOperator(name, function, self._ports, made, policy),
                second=self._second,
            )
        )


class BroadcastConnectedStreams:
    """A stream, keyed or not, and a broadcast stream, as the inputs of one function.

    Event time is the minimum of both. A broadcast stream without event time does not hold it back, unless it ends: then
    event time waits until all of it has been processed.

        >>> rules = env.from_collection([{"least": 4}])
        >>> both = orders.key_by("user").connect(rules.broadcast())
    """

    def __init__(self, stream: StreamCore, broadcast: StreamCore) -> None:
        for core in (stream, broadcast):
            core.check_not_overwritten("connect")
        self._stream = stream
        self._broadcast = broadcast

    @located
    def process(
        self,
        function: BroadcastProcessFunction,
        schema: SchemaLike,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
        on_error: OnError = "fail",
        failed_max: FailedMax | None = None,
    ) -> DataStream:
        """Call a function with each row of the stream, and in every subtask with each broadcast row.

        No order holds between the two inputs.

        `function`: an instance of your own subclass of BroadcastProcessFunction: `process` gets the rows of the stream,
        `process_broadcast` the broadcast ones.
        `schema`: the columns of the rows that the function returns, as an Arrow or polars schema or as `{"column":
        type}`.
        `side_outputs`: the columns of each side output, by its tag.
        `on_error`, `failed_max`: as for `KeyedStream.process`, of the rows of the stream. A broadcast row for which
        `process_broadcast` fails fails the job: in subtasks where it did not fail, the broadcast states would differ.

        Returns the stream of the returned rows. Raises JobError for a function that cannot be sent to the slots,
        SchemaError for columns that do not fit, ConfigError for other values of `on_error` and `failed_max`.

            >>> class Dear(BroadcastProcessFunction):
            ...     limits = BroadcastState()
            ...     def process_broadcast(self, row, ctx):
            ...         self.limits["least"] = row["least"]
            ...     def process(self, row, ctx):
            ...         return row if row["price"] >= self.limits.get("least", 0) else None
            >>> rules = env.from_collection([{"least": 4}]).uid("rules")
            >>> dear = orders.connect(rules.broadcast()).process(Dear(), orders.schema)
            >>> with testing.job(dear) as job:
            ...     _ = job.feed("rules", {"least": 4})
            ...     job.feed("orders", [{"user": "ann", "price": 3}, {"user": "bob", "price": 5}]).take()
            [{'user': 'bob', 'price': 5}]
        """
        stream, broadcast = self._stream, self._broadcast
        require_function(function, BroadcastProcessFunction, "process")
        ports = [
            Port("process", stream.keys, stream.event_time, stream.schema),
            Port("process_broadcast", (), broadcast.event_time, broadcast.schema, broadcast=True),
        ]
        # what is broadcast does not lend its event time to the result
        second = replace(broadcast, event_time=None)
        policy = error_policy(on_error, failed_max, stream.schema, "process")
        return processed("broadcast_process", function, ports, schema, side_outputs, stream, second, policy)
