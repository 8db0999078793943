"""DataStream: the rows of one schema between two operators, and the methods that add an operator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import polars as pl
import pyarrow as pa
import pyarrow.fs

from midstream.api.arguments import columns_text, require_callable, require_column
from midstream.api.core import StreamCore
from midstream.api.program import Handle, MakeOperator, located
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
from midstream.operators.bad_records import BAD_RECORDS
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
    from midstream.inprocess.preview import Preview


class StreamSink(Handle):
    """The end of a stream, returned by the methods that write. It takes `uid`, `name` and `parallelism`."""


class DataStream(Handle):
    """A stream of rows with one schema. Streams are created by an Environment and by methods of other streams.

    Each method adds an operator and returns the stream of its output. Arguments are checked against `schema`
    at once: the SchemaError, JobError or ConfigError begins with the file and line of the call. The event-time
    column stays the event time as long as the output has a timestamp column of that name.
    """

    def __init__(self, core: StreamCore, node: int | None = None) -> None:
        super().__init__(core.program, node)
        self.core = core  # for midstream's own modules
        self.schema = core.schema
        """The columns, as an Arrow schema."""
        self.event_time = core.event_time
        """The event-time column; None before with_watermarks() and after a window."""

    # ---- rows to rows

    @located
    def filter(self, predicate: pl.Expr | Callable[[Row], object]) -> DataStream:
        """Keep the rows for which `predicate` is true; rows for which it is null are dropped.

        `predicate`: a boolean polars expression, or a function that takes a row as a dict.
        """
        if not isinstance(predicate, pl.Expr):
            require_callable(predicate, "filter", "write for example filter(pl.col('x') > 0) or filter(lambda row: …)")
            check_shippable(predicate, "filter")
        return self._then("filter", lambda name: FilterOperator(name, predicate, self.schema))

    @located
    def select(self, *columns: str | pl.Expr, **named: pl.Expr) -> DataStream:
        """Keep only these columns: names, polars expressions, and `new_name=expression`.

        Expressions compute each row on its own; an expression that reads other rows of its batch is refused.

            stream.select("user", pl.col("at").dt.date(), total=pl.col("price") * pl.col("count"))
        """
        exprs = _expressions("select", columns, named)
        return self._then("select", lambda name: ProjectOperator(name, exprs, self.schema, keep=False))

    @located
    def with_columns(self, *columns: pl.Expr, **named: pl.Expr) -> DataStream:
        """Keep all columns, and add or replace those that the expressions compute; otherwise like `select`."""
        exprs = _expressions("with_columns", columns, named)
        return self._then("with_columns", lambda name: ProjectOperator(name, exprs, self.schema, keep=True))

    @located
    def map(self, function: Callable[[Row], Row], schema: SchemaLike | None = None) -> DataStream:
        """Replace each row: `function` takes a row as a dict and returns a dict with the columns of `schema`.

        `schema`: the columns of the result, by default those of this stream.
        """
        made = self._schema_of(function, schema, "map")
        return self._then("map", lambda name: MapOperator(name, function, made))

    @located
    def flat_map(self, function: Callable[[Row], Iterable[Row] | None], schema: SchemaLike | None = None) -> DataStream:
        """Replace each row by any number of rows: `function` takes a dict and returns or yields dicts, or returns None.

        `schema`: the columns of the result, by default those of this stream.
        """
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
        """Call `function` with whole batches: polars DataFrames, or Arrow RecordBatches with form="arrow".

        It may return either form, with any number of rows and the columns of `schema` (by default those of this
        stream). The engine decides where batches are cut: a result must not depend on which rows share one.
        """
        made = self._schema_of(function, schema, "map_batches")
        if form not in ("polars", "arrow"):
            raise JobError(f"map_batches: form {form!r} is neither 'polars' nor 'arrow'")
        if form == "polars":
            check_held_by_polars(self.schema, "map_batches")
        return self._then("map_batches", lambda name: MapBatchesOperator(name, function, made, form))

    @located
    def with_watermarks(self, column: str, strategy: WatermarkStrategy) -> DataStream:
        """Make timestamp column `column` the event time; `strategy` declares how far out of order rows may be.

        Call it directly after the source, so that event time is tracked for each of its splits.

            stream.with_watermarks("at", WatermarkStrategy.bounded("5 s", idle_after="1 min"))
        """
        if not isinstance(strategy, WatermarkStrategy):
            raise JobError(
                f"with_watermarks: {strategy!r} is not a WatermarkStrategy; write for example "
                "WatermarkStrategy.bounded('5 s') or WatermarkStrategy.monotonous()"
            )
        require_column(self.schema, column, "with_watermarks", "column", "Name a timestamp column.")
        made = self.core.then("watermarks", lambda name: TimestampsOperator(name, column, strategy, self.schema))
        return main_output(replace(made, event_time=column))

    # ---- several streams

    @located
    def union(self, *others: DataStream) -> DataStream:
        """Return the rows of all these streams, in no particular order.

        All streams must have the same columns in the same order (else SchemaError) and the same event time.
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
            if other.event_time != self.event_time:
                raise JobError(
                    f"union: one stream has event time {self.event_time!r}, another {other.event_time!r}; "
                    "call with_watermarks() behind the union, or on all of its streams"
                )
            if other.core.partitioning is not self.core.partitioning:
                raise JobError("union: call rebalance(), broadcast(), global_() or forward() behind the union")
        origins = tuple(origin for stream in (self, *others) for origin in stream.core.origins)
        return DataStream(replace(self.core, origins=origins, side_outputs={}))

    @overload  # a BroadcastStream is a DataStream too, so its overload comes first
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStreams: ...  # type: ignore[overload-overlap]

    @overload
    def connect(self, other: DataStream) -> ConnectedStreams: ...

    @located
    def connect(self, other: DataStream) -> ConnectedStreams | BroadcastConnectedStreams:
        """Make two streams with different columns the inputs of one function.

        With `other.broadcast()` every subtask of the function gets all rows of `other`. Two keyed streams are
        connected by `KeyedStream.connect`. Returns a stream whose `process` takes the function.
        """
        from midstream.api.connected import BroadcastConnectedStreams, ConnectedStreams

        self._require_stream(other, "connect")
        if isinstance(self, BroadcastStream):
            raise JobError("connect: the broadcast stream is the argument: stream.connect(small.broadcast())")
        if isinstance(other, BroadcastStream):
            return BroadcastConnectedStreams(self.core, other.core)
        return ConnectedStreams(self.core, other.core)

    @located
    def key_by(self, *columns: str) -> KeyedStream:
        """Partition the rows by the values of `columns`: one subtask gets all rows of a key, and keeps their state.

        Key columns are integers, booleans, dates, times, timestamps, durations, text or binary; other types
        raise SchemaError. Returns a KeyedStream.
        """
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
        how = self.core.partitioning
        if how is not None:
            raise JobError(f"key_by: says where rows go, and so does {_METHOD[how]}(); use one of them")
        return KeyedStream(replace(self.core, keys=columns))

    @located
    def window_all(self, window: Window) -> WindowedStream:
        """Put all rows into windows, whatever their key, in a single subtask; see `KeyedStream.window`."""
        from midstream.api.keyed import WindowedStream

        return WindowedStream(self.core, window)

    @located
    def side_output(self, tag: str) -> DataStream:
        """Return the rows that the operator before it emits under `tag`, apart from its main output.

        `LATE` is the side output of windows; a function's tags are those of `side_outputs=`; `BAD_RECORDS` is that of a
        source that drops bad records. Raises JobError
        for a tag that the operator does not have.
        """
        core = self.core
        if tag not in core.side_outputs:
            known = ", ".join(map(repr, core.side_outputs)) or "none"
            if tag == BAD_RECORDS:
                raise JobError(
                    "side_output: bad records are with the stream that read_kafka or read_files made, of which "
                    "on_bad_record='drop' takes them aside"
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
        """Send batches to the subtasks of the next operator in turn."""
        return DataStream(self.core.toward(Partitioning.REBALANCE))

    def forward(self) -> DataStream:
        """Send the rows of subtask i to subtask i of the next operator, which must have the same parallelism."""
        return DataStream(self.core.toward(Partitioning.FORWARD))

    def global_(self) -> DataStream:
        """Send all rows to the first subtask of the next operator."""
        return DataStream(self.core.toward(Partitioning.GLOBAL))

    def broadcast(self) -> BroadcastStream:
        """Send all rows to every subtask of the next operator."""
        return BroadcastStream(self.core.toward(Partitioning.BROADCAST))

    # ---- ends

    @located
    def sink(self, sink: Sink) -> StreamSink:
        """Write the rows to `sink`: one of `midstream.connectors`, or your own subclass of Sink."""
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
        """Write every row exactly once into Parquet files below `directory`, a local path or a storage URL.

        A new job refuses a directory that is not empty, unless `append`. `roll_size`: a file is closed when it
        has about this size, and at every checkpoint. `filesystem`: by default that of the URL.
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
        """Write every row exactly once into files of JSON lines; arguments as for `write_parquet`."""
        sink = FileSink(directory, format="jsonl", roll_size=roll_size, append=append, filesystem=filesystem)
        return self._end("jsonl", sink)

    @located
    def write_datasource(
        self, data_source: type[DataSource] | DataSource, *, options: Mapping[str, str] | None = None
    ) -> StreamSink:
        """Write through the stream writer of a PySpark Python Data Source, or its batch writer, with checkpoints.

        `data_source`: its class, or an instance. `options`: the options for a class.
        """
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
        """Write every row exactly once into a table of PostgreSQL; with `key`, rows are upserted by these columns.

        A new job refuses a table that has rows, unless `append` or with a `key`. PostgresSink describes the arguments.
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
        """Write every row exactly once into a Delta table, one version per checkpoint.

        A new job refuses a table that has rows, unless `append`. DeltaSink describes the arguments.
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
        registry: Mapping[str, OptionValue] | None = None,
        message: object = None,
        options: Mapping[str, OptionValue] | None = None,
    ) -> StreamSink:
        """Every row once into a topic of Kafka, when its checkpoint completes; or at once, and at least once. See KafkaSink.

        `key`, `headers`, `partition`: columns. `registry`: of schemas, for `format="avro"` and `"protobuf"`. `message`: the class for `format="protobuf"`. `options`: librdkafka's, such as those of SASL and TLS.
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
            registry=registry,
            message=message,
            options=options,
        )
        return self._end("kafka", sink)

    @located
    def print(self, prefix: str = "", limit: int | None = None) -> StreamSink:
        """Print rows to the standard output of the slots, at least once; each subtask stops after `limit` rows."""
        return self._end("print", PrintSink(prefix, limit))

    @located
    def collect(self) -> CollectSink:
        """Collect the rows of completed checkpoints in this process, exactly once.

        Returns a CollectSink, whose rows are read with `.rows()`, `.table()` or `.frame()`.
        """
        sink = CollectSink()
        self._end("collect", sink)
        return sink

    @located
    def preview(self, rows: int = 20, *, seconds: float = 1.0) -> Preview:
        """The first rows of this stream, in this process, within about so many seconds; to be looked at in a notebook.

        Reads the job's own files, collections, generators and other sources, all but Spark's. Nothing is written.
        Where there are fewer rows by then, the input ends where it is, and the answer's `note` says so.
        """
        from midstream.inprocess.preview import preview
        from midstream.inprocess.rewriting import End

        program = self.core.program
        end = End(tuple((origin.node, origin.tag) for origin in self.core.origins), self.schema)
        [found] = preview(program.graph, program.config, [end], rows, seconds, time.time_ns() // 1000)
        return found

    def _then(self, kind: str, make: MakeOperator) -> DataStream:
        return main_output(self.core.then(kind, make))

    def _end(self, kind: str, sink: Sink) -> StreamSink:
        check_shippable(sink, kind)
        program, inputs = self.core.program, self.core.inputs()
        node = program.add(kind, inputs, lambda name: SinkOperator(name, sink, self.schema), sink=sink)
        return StreamSink(program, node.id)

    def _schema_of(self, function: object, schema: SchemaLike | None, kind: str) -> pa.Schema:
        require_callable(function, kind, f"write for example {kind}(my_function, schema={{'word': str}})")
        check_shippable(function, kind)
        return self.schema if schema is None else as_schema(schema, kind)

    def _require_stream(self, other: object, method: str) -> None:
        if not isinstance(other, DataStream):
            kind = type(other).__name__
            hint = "; both sides of connect() are keyed, or neither" if kind == "KeyedStream" else ""
            raise JobError(f"{method}: needs a DataStream, got a {kind}{hint}")
        self.core.check_program(other.core, method)


class BroadcastStream(DataStream):
    """A stream whose rows go to every subtask of the operator that consumes it."""


_METHOD = {
    Partitioning.REBALANCE: "rebalance",
    Partitioning.FORWARD: "forward",
    Partitioning.GLOBAL: "global_",
    Partitioning.BROADCAST: "broadcast",
}


def main_output(core: StreamCore) -> DataStream:
    """Return the stream of an operator's main output, on which the operator is named and configured."""
    [origin] = core.origins
    return DataStream(core, origin.node)


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
    """Derive the operator kind from the class: PrintSink is "print", CollectSink "collect"."""
    return type(sink).__name__.removesuffix("Sink").lower() or "sink"
