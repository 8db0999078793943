"""DataStream: rows of one schema on their way from one operator to the next."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import polars as pl
import pyarrow as pa
import pyarrow.fs

from midstream.api.arguments import columns_text, require_callable, require_column
from midstream.api.program import Handle, MakeOperator, Program, located
from midstream.api.shipping import check_shippable
from midstream.connectors.collect import CollectSink
from midstream.connectors.file_sink import FileSink
from midstream.connectors.print_sink import PrintSink
from midstream.core.batches import check_held_by_polars
from midstream.core.config import Size
from midstream.core.errors import JobError, SchemaError
from midstream.core.keys import key_cast, key_type_supported
from midstream.core.schemas import SchemaLike, as_schema
from midstream.graph.job_graph import Partitioning
from midstream.graph.logical import Input
from midstream.operators.base import Operator
from midstream.operators.rows import Row
from midstream.operators.sink import Sink
from midstream.operators.sinks import SinkOperator
from midstream.operators.stateless import (
    FilterOperator,
    FlatMapOperator,
    MapBatchesOperator,
    MapOperator,
    ProjectOperator,
)
from midstream.operators.watermarks import TimestampsOperator, WatermarkStrategy
from midstream.operators.windows import Window

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource

    from midstream.api.connected import BroadcastConnectedStreams, ConnectedStreams
    from midstream.api.keyed import KeyedStream, WindowedStream
    from midstream.connectors.kafka_client import OptionValue
    from midstream.connectors.kafka_records import KafkaFormat
    from midstream.connectors.kafka_sink import Guarantee


@dataclass(frozen=True, slots=True)
class Origin:
    """An output that a stream's rows come from; a union has several."""

    node: int
    tag: str | None = None


class StreamSink(Handle):
    """The end of a stream."""

    def __init__(self, program: Program, node: int) -> None:
        self._program = program
        self._node = node


class DataStream(Handle):
    """Made by an Environment and by other streams, never directly.

    Each method adds an operator and answers the stream behind it. Its arguments are checked against
    `schema` at once: SchemaError, JobError or ConfigError begin with the file and line of the call.
    The event-time column stays what it is for as long as a column of its name holds timestamps.
    """

    def __init__(
        self,
        program: Program,
        origins: tuple[Origin, ...],
        schema: pa.Schema,
        event_time: str | None = None,
        *,
        node: int | None = None,
        side_outputs: Mapping[str, tuple[pa.Schema, str | None]] | None = None,
        partitioning: Partitioning | None = None,
    ) -> None:
        self._program = program
        self._node = node
        self._origins = origins
        self._side_outputs = dict(side_outputs or {})
        self._partitioning = partitioning
        self.schema = schema
        """The columns, as an Arrow schema."""
        self.event_time = event_time
        """The column that says when a row happened; None before with_watermarks() and behind a window."""

    # ---- rows to rows

    @located
    def filter(self, predicate: pl.Expr | Callable[[Row], object]) -> DataStream:
        """Keep the rows for which a boolean polars expression, or a function of the row, is true; null drops."""
        if not isinstance(predicate, pl.Expr):
            require_callable(predicate, "filter", "write for example filter(pl.col('x') > 0) or filter(lambda row: …)")
            check_shippable(predicate, "filter")
        return self._then("filter", lambda name: FilterOperator(name, predicate, self.schema))

    @located
    def select(self, *columns: str | pl.Expr, **named: pl.Expr) -> DataStream:
        """Just these columns: names, polars expressions, and `new_name=expression`; all work row by row."""
        exprs = _expressions("select", columns, named)
        return self._then("select", lambda name: ProjectOperator(name, exprs, self.schema, keep=False))

    @located
    def with_columns(self, *columns: pl.Expr, **named: pl.Expr) -> DataStream:
        """All columns, with those that the expressions give added or replaced."""
        exprs = _expressions("with_columns", columns, named)
        return self._then("with_columns", lambda name: ProjectOperator(name, exprs, self.schema, keep=True))

    @located
    def map(self, function: Callable[[Row], Row], schema: SchemaLike | None = None) -> DataStream:
        """One row for each: `function` takes a dict and returns one with the columns of `schema` (default: the same)."""
        made = self._schema_of(function, schema, "map")
        return self._then("map", lambda name: MapOperator(name, function, made))

    @located
    def flat_map(self, function: Callable[[Row], Iterable[Row] | None], schema: SchemaLike | None = None) -> DataStream:
        """Any number of rows for each: `function` returns or yields dicts, or returns None for no row."""
        made = self._schema_of(function, schema, "flat_map")
        return self._then("flat_map", lambda name: FlatMapOperator(name, function, made))

    @located
    def map_batches(
        self,
        function: Callable[[Any], Any],
        schema: SchemaLike | None = None,
        *,
        form: Literal["polars", "arrow"] = "polars",
    ) -> DataStream:
        """`function` on whole batches: a polars DataFrame, or an Arrow RecordBatch with form="arrow".

        It may return either, with any number of rows. Where batches are cut is the engine's business:
        a result must not depend on which rows happen to share one.
        """
        made = self._schema_of(function, schema, "map_batches")
        if form not in ("polars", "arrow"):
            raise JobError(f"map_batches: form {form!r} is neither 'polars' nor 'arrow'")
        if form == "polars":
            check_held_by_polars(self.schema, "map_batches")
        return self._then("map_batches", lambda name: MapBatchesOperator(name, function, made, form))

    @located
    def with_watermarks(self, column: str, strategy: WatermarkStrategy) -> DataStream:
        """Make timestamp column `column` the event time; `strategy` says how far out of order rows may be."""
        if not isinstance(strategy, WatermarkStrategy):
            raise JobError(
                f"with_watermarks: {strategy!r} is not a WatermarkStrategy; write for example "
                "WatermarkStrategy.bounded('5 s') or WatermarkStrategy.monotonous()"
            )
        require_column(self.schema, column, "with_watermarks", "column", "Name a timestamp column.")
        stream = self._then("watermarks", lambda name: TimestampsOperator(name, column, strategy, self.schema))
        stream.event_time = column
        return stream

    # ---- several streams

    @located
    def union(self, *others: DataStream) -> DataStream:
        """The rows of all, in no particular order. All have the same columns in the same order."""
        if not others:
            raise JobError("union: needs at least one other stream")
        for other in others:
            self._require_stream(other, "union")
            if not other.schema.equals(self.schema):
                raise SchemaError(
                    f"union: the streams differ: {_difference(self.schema, other.schema)}; "
                    "use select() to give them the same columns in the same order"
                )
            if other.event_time != self.event_time:
                raise JobError(
                    f"union: one stream has event time {self.event_time!r}, another {other.event_time!r}; "
                    "call with_watermarks() behind the union, or on all of its streams"
                )
            if other._partitioning is not self._partitioning:
                raise JobError("union: call rebalance(), broadcast(), global_() or forward() behind the union")
        origins = tuple(origin for stream in (self, *others) for origin in stream._origins)
        return DataStream(self._program, origins, self.schema, self.event_time, partitioning=self._partitioning)

    @overload  # a BroadcastStream is told apart before a DataStream
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStreams: ...  # type: ignore[overload-overlap]

    @overload
    def connect(self, other: DataStream) -> ConnectedStreams: ...

    @located
    def connect(self, other: DataStream) -> ConnectedStreams | BroadcastConnectedStreams:
        """Two streams of different columns as the inputs of one function; with other.broadcast() all subtasks get all of it."""
        from midstream.api.connected import BroadcastConnectedStreams, ConnectedStreams

        self._require_stream(other, "connect")
        if isinstance(self, BroadcastStream):
            raise JobError("connect: the broadcast stream is the argument: stream.connect(small.broadcast())")
        if isinstance(other, BroadcastStream):
            return BroadcastConnectedStreams(self, (), other)
        return ConnectedStreams(self, (), other, ())

    @located
    def key_by(self, *columns: str) -> KeyedStream:
        """All rows with the same values in `columns` go to the same subtask, which keeps their state."""
        from midstream.api.keyed import KeyedStream

        if not columns:
            raise JobError("key_by: name at least one column")
        for column in columns:
            advice = "Name columns of the stream; make one with with_columns() first if it has to be computed."
            field = require_column(self.schema, column, "key_by", "key column", advice)
            if not key_type_supported(field.type):
                raise SchemaError(
                    f"key_by: key column {column!r} is {field.type}, which cannot be a key; {key_cast(field.type)}"
                )
        if len(set(columns)) < len(columns):
            raise JobError(f"key_by: a column is named twice in {', '.join(columns)}")
        if self._partitioning is not None:
            raise JobError(f"key_by: says where rows go, and so does {_METHOD[self._partitioning]}(); use one of them")
        return KeyedStream(self, columns)

    @located
    def window_all(self, window: Window) -> WindowedStream:
        """Windows over all rows, whatever their key, in a single subtask."""
        from midstream.api.keyed import WindowedStream

        return WindowedStream(self, (), window)

    @located
    def side_output(self, tag: str) -> DataStream:
        """What the operator in front emits under `tag`: rows that are `LATE` for a window, or what a function sends there."""
        if self._node is None or tag not in self._side_outputs:
            known = ", ".join(map(repr, self._side_outputs)) or "none"
            raise JobError(
                f"side_output: there is no side output {tag!r} here (there is: {known}); "
                "call it on the stream that a window or process() made, which must declare it"
            )
        schema, event_time = self._side_outputs[tag]
        return DataStream(self._program, (Origin(self._node, tag),), schema, event_time)

    # ---- which subtask gets a row

    def rebalance(self) -> DataStream:
        """Batches to the subtasks of the next operator in turn."""
        return self._toward(Partitioning.REBALANCE)

    def forward(self) -> DataStream:
        """Subtask i to subtask i; the next operator must have the same parallelism."""
        return self._toward(Partitioning.FORWARD)

    def global_(self) -> DataStream:
        """All rows to the first subtask of the next operator."""
        return self._toward(Partitioning.GLOBAL)

    def broadcast(self) -> BroadcastStream:
        """All rows to every subtask of the next operator."""
        return BroadcastStream(
            self._program, self._origins, self.schema, self.event_time, partitioning=Partitioning.BROADCAST
        )

    # ---- ends

    @located
    def sink(self, sink: Sink) -> StreamSink:
        """Any sink: one of `midstream.connectors`, or your own subclass of Sink."""
        if not isinstance(sink, Sink):
            raise JobError(f"sink: {sink!r} is not a Sink; make one first, for example PrintSink()")
        return self._end(_kind_of(sink), sink)

    @located
    def write_parquet(
        self,
        directory: str | os.PathLike[str],
        *,
        roll_size: Size = "128 MiB",
        append: bool = False,
        filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> StreamSink:
        """Every row exactly once into Parquet files below `directory`.

        In a new job the directory must be empty or absent, unless `append`.
        """
        sink = FileSink(directory, format="parquet", roll_size=roll_size, append=append, filesystem=filesystem)
        return self._end("parquet", sink)

    @located
    def write_jsonl(
        self,
        directory: str | os.PathLike[str],
        *,
        roll_size: Size = "128 MiB",
        append: bool = False,
        filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> StreamSink:
        """As write_parquet, in files of JSON lines."""
        sink = FileSink(directory, format="jsonl", roll_size=roll_size, append=append, filesystem=filesystem)
        return self._end("jsonl", sink)

    @located
    def write_datasource(
        self, data_source: type[DataSource] | DataSource, *, options: Mapping[str, str] | None = None
    ) -> StreamSink:
        """Through the stream writer of a PySpark Python Data Source (or its batch writer), committed with checkpoints."""
        from midstream.spark.datasource_sink import DataSourceSink

        return self._end("datasource", DataSourceSink(data_source, options=options))

    @located
    def write_postgres(
        self,
        dsn: str,
        table: str,
        *,
        schema: str | None = None,
        key: Sequence[str] = (),
        append: bool = False,
        staging_schema: str | None = None,
    ) -> StreamSink:
        """Every row exactly once into a table of PostgreSQL; rows of the same `key` replace each other.

        In a new job the table must be empty or absent, unless `append` or with a `key`. See PostgresSink.
        """
        from midstream.connectors.postgres import PostgresSink

        sink = PostgresSink(dsn, table, schema=schema, key=key, append=append, staging_schema=staging_schema)
        return self._end("postgres", sink)

    @located
    def write_delta(
        self,
        table: str | os.PathLike[str],
        *,
        partition_by: Sequence[str] = (),
        append: bool = False,
        roll_size: Size = "128 MiB",
        storage_options: Mapping[str, str] | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> StreamSink:
        """Every row exactly once into a Delta table, a version per checkpoint.

        In a new job the table must be empty or absent, unless `append`. See DeltaSink.
        """
        from midstream.connectors.delta import DeltaSink

        sink = DeltaSink(
            table,
            partition_by=partition_by,
            append=append,
            roll_size=roll_size,
            storage_options=storage_options,
            filesystem=filesystem,
        )
        return self._end("delta", sink)

    @located
    def write_kafka(
        self,
        servers: str | Sequence[str],
        topic: str,
        *,
        guarantee: Guarantee = "exactly_once",
        format: KafkaFormat = "json",
        key: str | None = None,
        headers: str | None = None,
        partition: str | None = None,
        options: Mapping[str, OptionValue] | None = None,
    ) -> StreamSink:
        """Every row once into a topic of Kafka, when its checkpoint completes; or at once, and at least once. See KafkaSink.

        `key`, `headers`, `partition`: columns. `options`: librdkafka's, such as those of SASL and TLS.
        """
        from midstream.connectors.kafka_sink import KafkaSink

        sink = KafkaSink(
            servers,
            topic,
            guarantee=guarantee,
            format=format,
            key=key,
            headers=headers,
            partition=partition,
            options=options,
        )
        return self._end("kafka", sink)

    @located
    def print(self, prefix: str = "", limit: int | None = None) -> StreamSink:
        """Rows on the standard output of the slots, at least once; each subtask stops after `limit` rows."""
        return self._end("print", PrintSink(prefix, limit))

    @located
    def collect(self) -> CollectSink:
        """Rows of completed checkpoints in this process: `.rows()`, `.table()`, `.frame()` of the answer."""
        sink = CollectSink()
        self._end("collect", sink)
        return sink

    # ---- for the modules of this room

    def _inputs(
        self, port: int = 0, keys: tuple[str, ...] = (), partitioning: Partitioning | None = None
    ) -> list[Input]:
        how = Partitioning.KEYED if keys else partitioning or self._partitioning
        return [Input(origin.node, self.schema, origin.tag, how, keys, port) for origin in self._origins]

    def _then(self, kind: str, make: MakeOperator) -> DataStream:
        """Behind one operator with this stream as its only input and an attribute `schema`."""
        node, _ = self._program.add(kind, self._inputs(), make, schema=schema_of)
        assert node.schema is not None
        return self._behind(node.id, node.schema)

    def _behind(
        self, node: int, schema: pa.Schema, side_outputs: Mapping[str, pa.Schema] | None = None, *events: str | None
    ) -> DataStream:
        """The stream that node `node` makes. `events`: event-time columns that may live on in it, this stream's first."""
        names = (self.event_time, *events)
        sides = {tag: (side, surviving(names, side)) for tag, side in (side_outputs or {}).items()}
        return DataStream(
            self._program, (Origin(node),), schema, surviving(names, schema), node=node, side_outputs=sides
        )

    def _end(self, kind: str, sink: Sink) -> StreamSink:
        check_shippable(sink, kind)
        node, _ = self._program.add(
            kind, self._inputs(), lambda name: SinkOperator(name, sink, self.schema), schema=lambda _: None, sink=sink
        )
        return StreamSink(self._program, node.id)

    def _toward(self, partitioning: Partitioning) -> DataStream:
        return DataStream(self._program, self._origins, self.schema, self.event_time, partitioning=partitioning)

    def _schema_of(self, function: object, schema: SchemaLike | None, kind: str) -> pa.Schema:
        require_callable(function, kind, f"write for example {kind}(my_function, schema={{'word': str}})")
        check_shippable(function, kind)
        return self.schema if schema is None else as_schema(schema, kind)

    def _require_stream(self, other: object, method: str) -> None:
        if not isinstance(other, DataStream):
            kind = type(other).__name__
            hint = "; both sides of connect() are keyed, or neither" if kind == "KeyedStream" else ""
            raise JobError(f"{method}: needs a DataStream, got a {kind}{hint}")
        if other._program is not self._program:
            raise JobError(f"{method}: the streams are of two Environments; build a job from one")


class BroadcastStream(DataStream):
    """A stream whose rows go to every subtask of the operator that takes it."""


_METHOD = {
    Partitioning.REBALANCE: "rebalance",
    Partitioning.FORWARD: "forward",
    Partitioning.GLOBAL: "global_",
    Partitioning.BROADCAST: "broadcast",
}


def schema_of(operator: Operator) -> pa.Schema:
    """What an operator emits: all but sinks have this attribute."""
    schema = getattr(operator, "schema", None)
    assert isinstance(schema, pa.Schema), f"{type(operator).__name__} has no schema"
    return schema


def surviving(event_times: Iterable[str | None], schema: pa.Schema) -> str | None:
    """The first event-time column that is still a timestamp of `schema`."""
    for name in event_times:
        if name is not None:
            index = schema.get_field_index(name)
            if index >= 0 and pa.types.is_timestamp(schema.field(index).type):
                return name
    return None


def timestamps_text(schema: pa.Schema) -> str:
    return ", ".join(field.name for field in schema if pa.types.is_timestamp(field.type)) or "none"


def _expressions(kind: str, columns: tuple[str | pl.Expr, ...], named: Mapping[str, pl.Expr]) -> list[pl.Expr]:
    exprs = [pl.col(column) if isinstance(column, str) else column for column in columns]
    for name, expr in named.items():
        if not isinstance(expr, pl.Expr):
            raise JobError(
                f"{kind}: {name}={expr!r} is not a polars expression; write for example pl.col('x') or pl.lit(1)"
            )
        exprs.append(expr.alias(name))
    if not exprs:
        raise JobError(f"{kind}: name at least one column or expression")
    return exprs


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


def _kind_of(sink: Sink) -> str:
    """PrintSink is "print", CollectSink "collect"."""
    return type(sink).__name__.removesuffix("Sink").lower() or "sink"
